"""EAGLE drafts in other engines' layouts: what is written is read again, and drafts what it drafted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwise as dw
from draftwise.cli import main
from draftwise.drafters.eagle import EagleRunner
from draftwise.drafters.eagle_files import read_eagle
from draftwise.drafters.eagle_layouts import write_layout
from draftwise.drafters.eagle_network import EagleNetwork, EagleShape
from draftwise.models.linear import WeightKind
from draftwise.types import Feed
from tiny import tiny_checkpoint

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def llm(target):
    return dw.load(str(target), dtype="fp32", context=256)


def random_draft(algorithm: str, **changes) -> EagleNetwork:
    torch.manual_seed(3)
    shape = {
        "algorithm": algorithm,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-5,
        "target_hidden": 64,
        "target_vocab": 300,
        "taps": (2, 3, 3) if algorithm == "eagle3" else ("final_norm",),
        "draft_vocab": 120,
        "own_head": False,
        "fc_bias": algorithm == "eagle",
    }
    network = EagleNetwork(EagleShape(**shape | changes))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(1 + torch.randn_like(parameter) * 0.1 if "norm" in name else torch.randn_like(parameter) * 0.15)
    network.d2t = torch.randperm(300)[: network.shape.draft_vocab].sort().values
    return network


def drafted(network: EagleNetwork, llm, *, compiled: bool = False) -> torch.Tensor:
    """Logits of a chain of four after five rows of made-up features."""
    runner = EagleRunner(network, llm.target.model, vocab=300, kind=WeightKind(torch.float32, compiled=compiled))
    torch.manual_seed(4)
    features = torch.randn(5, 64 * len(network.shape.taps)).split(64, -1)
    cache = runner.new_cache(64)
    slot = cache.alloc()
    handed = runner.read(cache.pack([Feed.chain(slot, [5, 6, 7, 8, 9])]), cache, torch.zeros(1, 64), features)[-1:]
    cache.commit(slot, range(5))
    rows = [runner.logits(handed).clone()]
    for depth, token in enumerate((10, 11, 12), 1):
        handed = runner.draft(cache.pack([Feed.chain(slot, [token], after=depth - 2)]), cache, handed, depth)
        rows.append(runner.logits(handed).clone())
    return torch.cat(rows)


@pytest.mark.parametrize("changes", [{}, {"own_head": True}, {"residual_after_norm": True}, {"recycle_normed": True}], ids=str)
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_eagle3_comes_back_as_it_went(llm, tmp_path, layout, changes):
    before = drafted(random_draft("eagle3", **changes), llm)
    write_layout(tmp_path / "out", layout, random_draft("eagle3", **changes), llm.target, verifier="target")
    network, _ = read_eagle(tmp_path / "out", "eagle3", llm.target)
    assert network.shape.own_head
    torch.testing.assert_close(drafted(network, llm), before, rtol=1e-5, atol=1e-5)
    plain = llm.generate(PROMPT, raw=True, max_tokens=20)
    out = llm.using(f"eagle3:{tmp_path / 'out'}", draft_tokens=4).generate(PROMPT, raw=True, max_tokens=20)
    assert out.tokens == plain.tokens and out.stats.drafted > 0


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rows_that_are_skimmed_leave_the_cache_as_if_they_were_read(llm, kind):
    """Of a text and a node below it, to the bit."""
    runner = EagleRunner(random_draft("eagle3"), llm.target.model, vocab=300, kind=WeightKind(kind))
    assert runner.skim is not None
    torch.manual_seed(4)
    features = torch.randn(40, 64 * 3)
    found = []
    for skimmed in (0, 39):
        cache = runner.new_cache(64)
        slot = cache.alloc()
        if skimmed:
            runner.skim(cache.pack([Feed.chain(slot, range(5, 5 + skimmed))]), cache, features[:skimmed].split(64, -1))
            cache.commit(slot, range(skimmed))
        rest = cache.pack([Feed.chain(slot, range(5 + skimmed, 45))])
        handed = runner.read(rest, cache, [None], features[skimmed:].split(64, -1))[-1:]
        cache.commit(slot, range(40 - skimmed))
        below = runner.draft(cache.pack([Feed.chain(slot, [9])]), cache, handed, 1)
        found.append(torch.cat([handed, below, runner.logits(below)], -1))
    assert torch.equal(*found)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
@pytest.mark.parametrize("changes", [{}, {"own_head": True}], ids=str)
def test_the_compiled_layer_is_the_plain_one(llm, algorithm, changes):
    plain, compiled = (drafted(random_draft(algorithm, **changes), llm, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-2)  # of logits that reach 200


def test_eagle1_comes_back_as_it_went(llm, tmp_path):
    network = random_draft("eagle", draft_vocab=300)
    network.d2t = torch.arange(300)
    before = drafted(network, llm)
    again = random_draft("eagle", draft_vocab=300)
    again.d2t = torch.arange(300)
    write_layout(tmp_path / "out", "eagle", again, llm.target, verifier="target")
    read, _ = read_eagle(tmp_path / "out", "eagle", llm.target)
    torch.testing.assert_close(drafted(read, llm), before)
    with pytest.raises(ValueError, match="speculators layout is for EAGLE-3"):
        write_layout(tmp_path / "other", "speculators", read, llm.target, verifier="target")


def test_published_files_are_read_by_their_own_configuration_alone(llm, tmp_path):
    """As the authors' trainer writes them: a pickle, no word of ours, rope's base left out."""
    network = random_draft("eagle3", own_head=True)
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    tensors["d2t"] = network.d2t - torch.arange(120)
    tensors["t2d"] = torch.zeros(300, dtype=torch.bool).index_fill(0, network.d2t, True)
    (tmp_path / "draft").mkdir()
    torch.save(tensors, tmp_path / "draft" / "pytorch_model.bin")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 2048,
        "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
        "use_cache": True, "vocab_size": 300, "draft_vocab_size": 120,
    }  # fmt: skip
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    read, _ = read_eagle(tmp_path / "draft", "eagle3", llm.target)
    assert read.shape.taps == (2, 3, 3) and read.shape.rope["rope_theta"] == 10000.0
    torch.testing.assert_close(drafted(read, llm), drafted(random_draft("eagle3", own_head=True), llm))


def test_a_layout_that_cannot_say_it_refuses_by_name(llm, tmp_path):
    with pytest.raises(ValueError, match="reads 2,5,final_norm; the speculators layout knows inputs of layers alone"):
        write_layout(tmp_path, "speculators", random_draft("eagle3", taps=(2, 5, "final_norm")), llm.target, verifier="t")
    with pytest.raises(ValueError, match="in the eagle layout it must be 2,3,3"):
        write_layout(tmp_path, "eagle", random_draft("eagle3", taps=(1, 2, 3)), llm.target, verifier="t")
    with pytest.raises(ValueError, match="layout is 'gguf'; it must be one of: draftwise, eagle, speculators"):
        write_layout(tmp_path, "gguf", random_draft("eagle3"), llm.target, verifier="t")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "peagle"}, "kind peagle cannot be read"),
        ({"fc_norm": True}, "with fc_norm cannot be read"),
        ({"norm_before_fc": True}, "with norm_before_fc cannot be read"),
    ],
)
def test_other_speculators_are_refused_by_name(llm, tmp_path, change, message):
    write_layout(tmp_path / "out", "speculators", random_draft("eagle3"), llm.target, verifier="t")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_eagle(tmp_path / "out", "eagle3", llm.target)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in change}
                               | {"speculators_model_type": "eagle3"}))
    with pytest.raises(ValueError, match="midlayer.mlp.up_proj.weight is missing"):
        read_eagle(tmp_path / "out", "eagle3", llm.target)


def test_the_command_exports(target, llm, tmp_path, capsys):
    write_layout(tmp_path / "draft", "eagle", random_draft("eagle3"), llm.target, verifier="t")
    command = ["export", f"eagle3:{tmp_path / 'draft'}", "--model", str(target), "--out"]
    assert main([*command, str(tmp_path / "small"), "--quantize", "int8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["draft"], shown["layout"], shown["quantize"]) == (str(tmp_path / "small"), "draftwise", "int8")
    assert main([*command, str(tmp_path / "theirs"), "--layout", "speculators"]) == 0
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["speculators_model_type"] == "eagle3"
    for arguments, message in [
        ([str(tmp_path / "small")], "is not empty"),
        ([str(tmp_path / "a"), "--layout", "gguf"], "layout is 'gguf'"),
        ([str(tmp_path / "b"), "--layout", "eagle", "--quantize", "int8"], "--quantize goes with the draftwise layout"),
    ]:
        assert main([*command, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", "ngram:x", "--out", str(tmp_path / "c")]) == 2
    assert "drafts of ngram cannot be exported" in capsys.readouterr().err


@pytest.mark.lab
@pytest.mark.filterwarnings("ignore")  # that library's own
def test_the_speculators_library_loads_what_is_written_and_drafts_the_same(llm, target, tmp_path):
    """`make test-lab` installs it. The first logits of each row of a text."""
    from speculators import SpeculatorModel

    network = random_draft("eagle3", taps=(1, 3, 5))
    write_layout(tmp_path / "out", "speculators", random_draft("eagle3", taps=(1, 3, 5)), llm.target, verifier=str(target))
    theirs = SpeculatorModel.from_pretrained(str(tmp_path / "out")).float()
    torch.manual_seed(4)
    features, tokens = torch.randn(5, 192), torch.tensor([[5, 6, 7, 8, 9]])
    said = []
    theirs.lm_head.register_forward_hook(lambda module, inputs, output: said.append(output.detach()))
    with torch.no_grad():
        theirs(features[None], tokens, document_ids=torch.zeros(1, 5, dtype=torch.long), ttt_steps=1)
    known = drafted(network, llm)[0][network.d2t]
    torch.testing.assert_close(said[0][0, -1], known, rtol=1e-4, atol=1e-4)
