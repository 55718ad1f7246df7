"""Drafts that come with the package, and `auto`: who gets one, what is said then, what is shown, and what may be shipped."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
from safetensors.torch import load_file

import draftwise as dw
from draftwise.cli import main
from draftwise.drafters import shipped
from draftwise.drafters.trained import algorithm_of, served_acceptance, stored_kind
from tiny import tiny_checkpoint, tiny_draft

PACKAGE = Path(dw.__file__).parent
SHIPPED = shipped.ROOT
MOST_BYTES = 25_000_000
PROMPTS = ["one two three one two three one two", "a", "def add(a, b):\n    return a + b\n\ndef sub(a, b):"]
ASKED = {"raw": True, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Path:
    """As `draftwise train` leaves it, with what that command knows of itself."""
    folder = tiny_draft(tmp_path_factory.mktemp("draft"), target, "eagle3", vocab=100)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["draftwise"]["card"] |= {
        "command": f"draftwise train eagle3 --model {target} --prompts /home/me/chats.jsonl --out my-draft",
        "model": str(target),
        "prompts": [{"file": "chats.jsonl", "sha256": "0123456789abcdef", "count": 7}],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def drafts(target, draft, tmp_path_factory) -> Path:
    """A folder of shipped drafts, with one for the target."""
    folder = tmp_path_factory.mktemp("drafts")
    command = ["export", f"eagle3:{draft}", "--model", str(target), "--quantize", "int8", "--license", "apache-2.0"]
    assert main([*command, "--out", str(folder / "tiny" / "eagle3")]) == 0
    return folder


@pytest.fixture(autouse=True)
def ships_a_draft(drafts, monkeypatch):
    monkeypatch.setattr(shipped, "ROOT", drafts)


@pytest.fixture(scope="module")
def plain(target) -> dw.LLM:
    return dw.load(str(target))


# who gets it


def test_a_trained_drafter_without_a_path_gets_the_draft_that_comes_with_the_package(target, plain, monkeypatch):
    llm = dw.load(str(target), drafter="eagle3", draft_tokens=4)
    result = llm.generate(PROMPTS[0], **ASKED)
    assert result.tokens == plain.generate(PROMPTS[0], **ASKED).tokens and result.stats.drafted > 0
    with pytest.raises(ValueError, match="the eagle drafter needs a draft: --drafter eagle:FOLDER"):
        dw.load(str(target), drafter="eagle")
    monkeypatch.setattr(shipped, "ROOT", Path("nowhere"))
    with pytest.raises(ValueError, match="the eagle3 drafter needs a draft: --drafter eagle3:FOLDER"):
        dw.load(str(target), drafter="eagle3")


def test_of_several_drafts_for_a_target_auto_takes_the_preferred_one(target, drafts, tmp_path, monkeypatch):
    copytree(drafts, tmp_path / "drafts")
    copytree(drafts / "tiny" / "eagle3", tmp_path / "drafts" / "tiny" / "draft")
    monkeypatch.setattr(shipped, "ROOT", tmp_path / "drafts")
    assert [draft.algorithm for draft in shipped.shipped_drafts()] == ["eagle3", "draft"]
    assert dw.load(str(target), drafter="auto").drafter == "ngram,eagle3"


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("options", [{}, {"tree": "2,1", "ngram.max_tokens": 2}], ids=str)
def test_the_target_that_a_draft_was_made_for_gets_it_and_says_what_it_said(target, plain, options, verify):
    told: list[str] = []
    llm = dw.load(str(target), drafter="auto", options=options, verify=verify, notice=told.append)
    assert llm.drafter == "ngram,eagle3"
    assert "drafter auto: ngram, and the eagle3 draft for tiny that comes with draftwise" in told
    assert any(line.startswith("draft ") and line.endswith("eagle3: int8") for line in told)
    lookup = plain.using("ngram", options={"max_tokens": 2} if options else {}, verify=verify)
    for params in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 11}):
        results = llm.generate(PROMPTS, draft_tokens=5, **ASKED, **params)
        assert llm.pool(results).drafted > llm.pool(lookup.generate(PROMPTS, draft_tokens=5, **ASKED, **params)).drafted + 20
        if verify == "match" or not params:
            assert [result.tokens for result in results] == [plain.generate(p, **ASKED, **params).tokens for p in PROMPTS]


def other_weights(folder: Path) -> Path:
    return tiny_checkpoint(folder, "llama", seed=1)


def another_depth(folder: Path) -> Path:
    return tiny_checkpoint(folder, "llama", num_hidden_layers=2)


def another_tokenizer(folder: Path) -> Path:
    """The same weights under a vocabulary with two words exchanged."""
    path = tiny_checkpoint(folder, "llama") / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words["Ġthe"], words["Ġof"] = words["Ġof"], words["Ġthe"]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


@pytest.mark.parametrize("other", [other_weights, another_depth, another_tokenizer])
def test_other_targets_get_prompt_lookup(tmp_path, other):
    told: list[str] = []
    llm = dw.load(str(other(tmp_path / "other")), drafter="auto", notice=told.append)
    assert llm.drafter == "ngram"
    assert "drafter auto: ngram; no draft that comes with draftwise was made for exactly these weights" in told
    drafted = llm.generate(PROMPTS, draft_tokens=5, **ASKED)
    assert [result.tokens for result in drafted] == [result.tokens for result in llm.using("none").generate(PROMPTS, **ASKED)]
    with pytest.raises(ValueError, match="unknown option 'tree' for ngram; it has: max_ngram"):
        llm.using("auto", options={"tree": "2,1"})


@pytest.mark.parametrize("weights", [{"dtype": "fp32"}, {"dtype": "bf16", "kernels": "torch"}, {"quantize": "int4"}], ids=str)
def test_other_numbers_of_the_same_target_get_it_too(target, weights):
    llm = dw.load(str(target), drafter="auto", **weights)
    assert llm.drafter == "ngram,eagle3"
    drafted = llm.generate(PROMPTS, draft_tokens=5, **ASKED)
    assert [result.tokens for result in drafted] == [result.tokens for result in llm.using("none").generate(PROMPTS, **ASKED)]


def test_where_its_numbers_cannot_be_multiplied_prompt_lookup_remains(target, monkeypatch):
    def no_such_kernel(*_):
        raise RuntimeError("not implemented for this device")

    monkeypatch.setattr(shipped, "make_linear", no_such_kernel)
    told: list[str] = []
    assert dw.load(str(target), drafter="auto", draft_quantize="int4", notice=told.append).drafter == "ngram"
    named = "the eagle3 draft for tiny that comes with draftwise"
    assert f"drafter auto: ngram; {named} does not run on cpu with weights in int4" in told


def test_without_drafts_it_is_prompt_lookup(target, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "ROOT", tmp_path)
    assert dw.load(str(target), drafter="auto", options={"max_tokens": 3}).drafter == "ngram"


def test_python_drafts_only_when_asked_to(target):
    assert dw.load(str(target)).drafter == "none"


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("auto,suffix", {}, "auto chooses drafters itself: it stands alone and takes no path"),
        ("auto:x", {}, "auto chooses drafters itself"),
        ("auto", {"colour": "red"}, "unknown option 'colour' for ngram, eagle3; they have: ngram.max_ngram, .*eagle3.tree"),
        ("auto", {"max_ngram": "many"}, "option max_ngram of ngram is 'many'"),
        ("auto", {"medusa.tree": "2"}, "option 'medusa.tree' names no drafter here; there are: ngram, eagle3"),
    ],
)
def test_what_no_target_can_be_given_is_refused_before_it_is_loaded(drafter, options, message):
    with pytest.raises(ValueError, match=message):
        dw.load("/nowhere", drafter=drafter, options=options)


def test_an_option_that_both_have_needs_a_name(plain):
    with pytest.raises(ValueError, match="say which: ngram.max_tokens, eagle3.max_tokens"):
        plain.using("auto", options={"max_tokens": 3})


# the command line


def test_generate_drafts_so_unless_told_else(target, plain, capsys):
    assert main(["generate", PROMPTS[0], "--model", str(target), "--max-tokens", "12", "--raw", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "draftwise: drafter auto: ngram, and the eagle3 draft for tiny that comes with draftwise\n" in err
    found = json.loads(out)
    assert found["stats"]["drafter"] == "ngram,eagle3"
    assert tuple(found["tokens"]) == plain.generate(PROMPTS[0], raw=True, max_tokens=12).tokens


def test_bench_compares_it_by_its_name(target, capsys):
    command = ["bench", "--model", str(target), "--drafters", "auto,ngram", "--limit", "1", "--max-tokens", "6", "--json"]
    assert main([*command, "-o", "tree=2,1", "-o", "max_ngram=3"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["drafter"] for run in runs] == ["none", "auto", "ngram"]
    assert [run["options"] for run in runs] == [{}, {"tree": "2,1", "max_ngram": "3"}, {"max_ngram": "3"}]
    assert main([*command[:4], "auto+suffix"]) == 2
    assert "auto chooses drafters itself" in capsys.readouterr().err


def test_what_comes_along_is_shown(capsys, tmp_path, monkeypatch):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"] == ["tiny/eagle3"]
    assert main(["generate", "--help-drafter", "auto"]) == 0
    out = capsys.readouterr().out
    assert "drafts for: tiny (eagle3)" in out and "ngram: options" in out and "eagle3: options" in out and "max_nodes" in out
    monkeypatch.setattr(shipped, "ROOT", tmp_path)
    assert main(["generate", "--help-drafter", "auto"]) == 0
    assert "drafts for: no model yet" in capsys.readouterr().out


# the model card


def test_the_card_says_how_the_draft_came_about(target, draft, tmp_path, capsys):
    bench = ["bench", "--model", str(target), "--drafters", f"eagle3:{draft}", "--limit", "1", "--max-tokens", "6", "--json"]
    assert main(bench) == 0
    (tmp_path / "bench.json").write_text(capsys.readouterr().out, encoding="utf-8")
    command = ["export", f"eagle3:{draft}", "--model", str(target), "--quantize", "int4", "--license", "apache-2.0"]
    assert main([*command, "--results", str(tmp_path / "bench.json"), "--out", str(tmp_path / "small")]) == 0
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    for fact in (
        f"# eagle3 draft for {target.name}",
        "3 layers of 64, 300 tokens",
        "| weights | int4;",
        f"`draftwise train eagle3 --model {target.name} --prompts chats.jsonl --out my-draft`",
        "answers of the model, ",
        "7 prompts of chats.jsonl (SHA-256 `0123456789ab…`)",
        "| seed | 0 |",
        "minutes, 2 updates",
        "## Curve",
        "| prompts.jsonl, 1 | 0 | eagle3 |",
    ):
        assert fact in card
    assert str(tmp_path) not in card and "/home" not in card
    assert "/home" not in (tmp_path / "small" / "config.json").read_text(encoding="utf-8")


def test_what_the_card_cannot_say_is_refused_before_anything_is_written(target, draft, tmp_path, capsys):
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    (tmp_path / "text.json").write_text("{", encoding="utf-8")
    command = ["export", f"eagle3:{draft}", "--model", str(target), "--out", str(tmp_path / "out")]
    for arguments, message in [
        (["--results", str(tmp_path / "list.json")], "list.json: is not what `draftwise bench --json` prints"),
        (["--results", str(tmp_path / "text.json")], "text.json: is not what `draftwise bench --json` prints"),
        (["--results", str(tmp_path / "none.json")], "none.json: no such file"),
        (["--layout", "eagle", "--license", "mit"], "--license and --results are for the model card"),
    ]:
        assert main([*command, *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# what may be shipped


def faults(root: Path) -> Iterator[str]:
    """What is wrong with a folder of shipped drafts."""
    if (size := sum(path.stat().st_size for path in root.rglob("*") if path.is_file())) > MOST_BYTES:
        yield f"{size} bytes are more than {MOST_BYTES}"
    for config_path in root.glob("*/*/config.json"):
        folder, config = config_path.parent, json.loads(config_path.read_text(encoding="utf-8"))
        if found := {"config.json", "model.safetensors", "README.md"} ^ {path.name for path in folder.iterdir()}:
            yield f"{folder} lacks or does not need {found}"
            continue
        if algorithm_of(config) != folder.name:
            yield f"{folder} holds a draft for {algorithm_of(config)}"
        if stored_kind(config) is None or any("embed" in name for name in load_file(folder / "model.safetensors")):
            yield f"{folder} is larger than it need be"
        card = (folder / "README.md").read_text(encoding="utf-8")
        if missing := [word for word in ("license: apache-2.0", "| command |", "| data |", "## Curve") if word not in card]:
            yield f"the card of {folder} lacks {missing}"
        if re.search(r"[ `\"](/|~)\w", card + config_path.read_text(encoding="utf-8")):
            yield f"{folder} names a path of the machine that it was made on"


def test_what_comes_with_the_package_is_small_and_complete():
    assert not list(faults(SHIPPED))


CARD = b"license: apache-2.0\n| command |\n| data |\n## Curve\n"


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("config.json", lambda kept: kept, None),
        ("config.json", lambda kept: kept.replace(b'"int8"', b"null"), "is larger than it need be"),
        ("config.json", lambda kept: kept.replace(b': "eagle3"', b': "eagle"'), "holds a draft for eagle"),
        ("README.md", lambda kept: b"license: mit\n" + CARD[20:], r"lacks \['license: apache-2.0'\]"),
        ("README.md", lambda kept: CARD + b"`train --out /srv/x`", "names a path of the machine"),
        ("checkpoint.pt", lambda kept: b"", "lacks or does not need {'checkpoint.pt'}"),
        ("checkpoint.pt", lambda kept: bytes(MOST_BYTES), "bytes are more than 25000000"),
    ],
)
def test_a_draft_that_is_not_fit_to_be_shipped_is_found(drafts, tmp_path, file, change, fault):
    copy = tmp_path / "tiny" / "eagle3"
    copytree(drafts / "tiny" / "eagle3", copy)
    kept = (copy / file).read_bytes() if (copy / file).exists() else b""
    (copy / file).write_bytes(change(kept))
    first = next(faults(tmp_path), None)
    assert first is None if fault is None else re.search(fault, first or "")


def test_a_draft_begins_with_the_acceptance_on_its_card():
    curve = [{"served": [1.2, 1.1], "first": [0.9, 0.9]}, {"served": [1.8, 1.6], "first": [0.5, 0.3]}]
    assert served_acceptance({"draftwise": {"card": {"curve": curve}}}) == pytest.approx(0.4)
    assert served_acceptance({"model_type": "llama"}) == served_acceptance({"draftwise": {"card": {}}}) == 0.6


def test_the_package_takes_the_whole_folder_along():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (patterns,) = re.findall(r"^draftwise = (\[.*\])$", project, re.M)
    packed = {path for pattern in ast.literal_eval(patterns) for path in PACKAGE.glob(pattern)}
    assert set(SHIPPED.rglob("*")) <= packed and (SHIPPED / "README.md") in packed
