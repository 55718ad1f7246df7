"""Modules that models are published with: every layout drafts what a plain computation of it says, and is read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import draftwise as dw
from draftwise.types import Feed
from tiny import ARCHITECTURES, GROUPED, tiny_checkpoint

PROMPT = "one two three one two three one two"
WIDTH, LAYERS = 64, 2
MIXTURE = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURE |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "num_key_value_heads": 4}


class Family(NamedTuple):
    """A family's architecture and settings, and the names of a module's own tensors."""

    architecture: str
    settings: dict[str, Any]
    modules: int
    prefix: str
    enorm: str
    hnorm: str
    mix: str
    norm: str
    hidden_first: bool = False
    recycle_normed: bool = False
    model_type: str | None = None


MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
DEEPSEEK = ("model.layers.{}.", "{}enorm.weight", "{}hnorm.weight", "{}eh_proj.weight", "{}shared_head.norm.weight")
MIMO = ("model.mtp_layers.{}.", *(f"{{}}{name}.weight" for name in MIMO_NAMES))
FAMILIES = {
    "llama": Family("llama", {}, 2, *DEEPSEEK),
    "mimo": Family("qwen2", {}, 1, *MIMO, hidden_first=True, recycle_normed=True, model_type="mimo"),
    "mimo of two": Family("qwen2", {}, 2, *MIMO, hidden_first=True, recycle_normed=True, model_type="mimo"),
    "glm": Family("glm4_moe", MIXTURE | {"use_qk_norm": True, "partial_rotary_factor": 0.5}, 2, *DEEPSEEK),
    "glm, dense": Family("glm4_moe", MIXTURE | {"first_k_dense_replace": 9, "attention_bias": True}, 1, *DEEPSEEK),
    "deepseek": Family("deepseek_v3", MIXTURE | LATENT | {"v_head_dim": 32}, 1, *DEEPSEEK),
}


def published(folder: Path, family: Family) -> nn.Module:
    """Write a model whose last layers are its modules; the same in the transformers library, layers and modules alike."""
    layers = LAYERS + family.modules
    settings = {"num_hidden_layers": layers, "head_dim": 16} | family.settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, family.architecture, ARCHITECTURES.get(family.architecture, GROUPED))
        tiny_checkpoint(folder, family.architecture, **settings)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    for number in range(family.modules):
        ours = f"model.layers.{LAYERS + number}."
        start = family.prefix.format(number + (LAYERS if family.prefix == DEEPSEEK[0] else 0))
        moved = {name: tensors.pop(name) for name in list(tensors) if name.startswith(ours)}
        tensors |= {start + name.removeprefix(ours): tensor for name, tensor in moved.items()}
        for norm in (family.enorm, family.hnorm, family.norm):
            tensors[norm.format(start)] = 1 + torch.randn(WIDTH) * 0.2
        tensors[family.mix.format(start)] = torch.randn(WIDTH, 2 * WIDTH) * (2 * WIDTH) ** -0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": family.modules}
    config["model_type"] = family.model_type or config["model_type"]
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return reference


class Plain:
    """The modules in plain torch over a whole text, from the layers of the library's own model."""

    def __init__(self, folder: Path, family: Family, reference: nn.Module) -> None:
        self.family, self.reference, self.tensors = family, reference, load_file(folder / "model.safetensors")
        self.layers = list(reference.model.layers)
        self.rms = type(reference.model.norm)

    def part(self, name: str, number: int) -> Tensor:
        shift = LAYERS if self.family.prefix == DEEPSEEK[0] else 0
        return self.tensors[name.format(self.family.prefix.format(number + shift))]

    def normed(self, x: Tensor, name: str, number: int) -> Tensor:
        norm = self.rms(WIDTH, eps=self.reference.config.rms_norm_eps)
        norm.weight = nn.Parameter(self.part(name, number))
        return norm(x)

    def features(self, text: list[int]) -> Tensor:
        return self.run(torch.tensor(text), list(range(LAYERS)))[1]

    def run(self, given: Tensor, layers: list[int], norm: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output of some layers over tokens or inputs, before and after the final norm."""
        base, kept = self.reference.model, []
        base.layers = nn.ModuleList(self.layers[index] for index in layers)
        base.config.num_hidden_layers = len(layers)
        own = base.norm.weight
        base.norm.weight = own if norm is None else nn.Parameter(norm)
        hook = base.layers[-1].register_forward_hook(lambda m, i, out: kept.append(out[0] if isinstance(out, tuple) else out))
        named = {"input_ids": given[None]} if given.dim() == 1 else {"inputs_embeds": given[None]}
        final = base(**named, use_cache=False).last_hidden_state[0]
        hook.remove()
        base.norm.weight = own
        return kept[0].view(-1, WIDTH), final

    def module(self, number: int, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """What a module hands on at each row, and the logits there."""
        family = self.family
        embedded = self.reference.get_input_embeddings()(torch.tensor(tokens))
        both = [self.normed(embedded, family.enorm, number), self.normed(states, family.hnorm, number)]
        x = torch.cat(both[::-1] if family.hidden_first else both, -1) @ self.part(family.mix, number).T
        out, final = self.run(x, [LAYERS + number], self.part(family.norm, number))
        return (final if family.recycle_normed else out), self.reference.lm_head(final)

    def drafted(self, text: list[int], after: list[int]) -> Tensor:
        """Logits of a chain of drafted tokens `after` a text: after its last row, and after each of them."""
        tokens, states, rows = text[1:], self.features(text)[:-1], []
        for depth in range(len(after) + 1):
            number = min(depth, self.family.modules - 1)
            handed, logits = self.module(number, tokens, states)
            rows.append(logits[-1])
            if depth < len(after):
                tokens = [*tokens, after[depth]]
                if depth < self.family.modules - 1:  # the next module, on what this one made a row before
                    states = torch.cat([torch.zeros(1, WIDTH), handed])
                else:  # the same once more, on its own output
                    states = torch.cat([states, handed[-1:]])
        return torch.stack(rows)


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def plain(folder, family) -> Plain:
    return Plain(folder, family, published(folder, family))


@pytest.fixture(scope="module")
def llm(folder, plain):
    return dw.load(str(folder), dtype="fp32", context=256)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@torch.inference_mode()
def test_a_published_module_drafts_what_plain_torch_says(folder, plain, kernels):
    llm = dw.load(str(folder), drafter="mtp", dtype="fp32", context=256, kernels=kernels)
    runner = llm.engine._proposals.drafters[0].network
    text, after = list(range(5, 30)), [40, 41, 42]
    model = llm.target.model
    cache = model.new_cache(64)
    features = model.forward(cache.pack([Feed.chain(cache.alloc(), text)]), cache, ("final_norm",)).taps["final_norm"]
    torch.testing.assert_close(features, plain.features(text), rtol=1e-3, atol=1e-3)
    cache = runner.new_cache(64)
    slot, handed = cache.alloc(), torch.zeros(1, runner.width)
    for start, stop in ((0, 1), (1, 9), (9, 24)):
        rows = cache.pack([Feed.chain(slot, text[start + 1 : stop + 1])])
        handed = runner.read(rows, cache, handed, (features[start:stop],))[-1:]
        cache.commit(slot, range(stop - start))
    found = [runner.logits(handed)]
    for depth, token in enumerate(after, 1):
        handed = runner.draft(cache.pack([Feed.chain(slot, [token], after=depth - 2)]), cache, handed, depth)
        found.append(runner.logits(handed))
    torch.testing.assert_close(torch.cat(found), plain.drafted(text, after), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"tree": "3,2"}, {"tree": "dynamic", "max_tokens": 3, "beam": 2}], ids=str)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_it_changes_no_token(llm, folder, options, quantize):
    drafted = llm.using("mtp", options=options, draft_tokens=4, draft_quantize=quantize)
    for params in ({}, {"temperature": 0.9, "seed": 5}):
        prompts = [PROMPT, "a", "In the beginning"]
        said = llm.generate(prompts, raw=True, max_tokens=24, ignore_eos=True, **params)
        results = drafted.generate(prompts, raw=True, max_tokens=24, ignore_eos=True, **params)
        assert [result.tokens for result in results] == [result.tokens for result in said]
        assert llm.pool(results).drafted > 60


# what cannot be used is refused by name


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    published(folder, FAMILIES["llama"])
    return folder


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    published(folder, FAMILIES["glm"])
    return folder


def changed(folder: Path, to: Path, *, tensors=lambda tensors: tensors, **config: Any) -> Path:
    to.mkdir()
    save_file(tensors(load_file(folder / "model.safetensors")), to / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    (to / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return to


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def put(name: str, *shape: int):
    return lambda tensors: tensors | {name: torch.ones(*shape)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.layers.3.enorm.weight"), "model.layers.3.enorm.weight is missing"),
        (without("model.layers.2.shared_head.norm.weight"), "model.layers.2.shared_head.norm.weight is missing"),
        (without("model.layers.2.self_attn.q_proj.weight"), "self_attn.q_proj.weight is missing"),
        (put("model.layers.3.extra.weight", 2), "extra.weight is not part of"),
        (put("model.layers.2.eh_proj.weight", 64, 64), r"model.layers.2.eh_proj.weight is \(64, 64\)"),
        (put("mtp.fc.weight", 2), "as Qwen3-Next has them .mtp.fc.weight. cannot be run"),
    ],
)
def test_a_wrong_file_is_refused_by_name(llama, glm, tmp_path, change, message):
    for name, folder in (("llama", llama), ("glm", glm)):
        wrong = changed(folder, tmp_path / name, tensors=change)
        with pytest.raises(ValueError, match=message):
            dw.load(str(folder), drafter=f"mtp:{wrong}", context=64)


def test_modules_of_another_model_are_refused(llama, glm, tmp_path):
    llm = dw.load(str(llama), context=64)
    with pytest.raises(ValueError, match="for a model with architecture glm4_moe; this one has llama"):
        llm.using(f"mtp:{glm}")
    deeper = changed(llama, tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(ValueError, match="for a model with num_layers 3; this one has 2"):
        llm.using(f"mtp:{deeper}")
    with pytest.raises(ValueError, match="modules is 3; the draft has 2"):
        llm.using("mtp", options={"modules": 3})
    quantised = changed(llama, tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="modules quantised by fp8 cannot be read"):
        llm.using(f"mtp:{quantised}")
    plain = tiny_checkpoint(tmp_path / "plain", "llama")
    with pytest.raises(ValueError, match="brings no modules for multi-token prediction; the mtp drafter needs a draft"):
        dw.load(str(plain), drafter="mtp", context=64)


def test_a_model_that_cannot_run_says_so(tmp_path):
    """DeepSeek-V3's own latent attention: keys and values of different size. Its modules never come up."""
    settings = MIXTURE | LATENT | {"v_head_dim": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "deepseek_v3", GROUPED)
        folder = tiny_checkpoint(tmp_path / "model", "deepseek_v3", **settings)
    with pytest.raises(ValueError, match="deepseek_v3 models cannot be run: keys of 32 and values of 16 numbers"):
        dw.load(str(folder), drafter="mtp", context=64)


@pytest.mark.parametrize("model", ["llama", "glm"])
def test_a_copy_of_the_model_s_head_is_borrowed_and_another_is_kept(request, model, tmp_path):
    folder = request.getfixturevalue(model)
    head, table = "model.layers.{}.shared_head.head.weight", "model.layers.{}.embed_tokens.weight"

    def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        own = {head.format(n): tensors["lm_head.weight"].clone() for n in (2, 3)}
        return tensors | own | {table.format(n): tensors["model.embed_tokens.weight"].clone() for n in (2, 3)}

    def others(tensors: dict[str, Tensor], *changed: str) -> dict[str, Tensor]:
        changed = changed or ("head.head", "2.embed", "3.embed")
        return {name: 2 * t if any(part in name for part in changed) else t for name, t in copies(tensors).items()}

    llm = dw.load(str(folder), dtype="fp32", context=64)
    shapes = []
    for name, change in (("copies", copies), ("others", others)):
        path = changed(folder, tmp_path / name, tensors=change)
        drafted = llm.using(f"mtp:{path}", draft_tokens=3)
        shapes.append(drafted.engine._proposals.drafters[0].network.shape)
        plain = llm.generate(PROMPT, raw=True, max_tokens=12)
        assert drafted.generate(PROMPT, raw=True, max_tokens=12).tokens == plain.tokens
    assert [(shape.own_head, shape.own_embedding) for shape in shapes] == [(False, False), (True, True)]
    path = changed(folder, tmp_path / "two", tensors=lambda tensors: others(tensors, "3.embed"))
    with pytest.raises(ValueError, match="model.layers.3.embed_tokens.weight is another than model.layers.2"):
        llm.using(f"mtp:{path}")
