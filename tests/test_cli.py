"""The command line on tiny models: what it prints, its JSON, its exit codes, and one clear line for bad input."""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import draftwise as dw
from draftwise.cli import COMMANDS, main, output
from tiny import tiny_checkpoint

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"}
PROMPT = "the other day in the"
STATS = [
    "drafter", "verify", "steps", "drafted", "accepted", "emitted", "tokens_per_step", "acceptance_rate", "accepted_at",
    "reached_at", "tokens_per_second", "time_to_first_token", "seconds",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Passes of a tiny model take longer to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def other_cache(tmp_path_factory) -> Path:
    """A cache that has the kernels of the user's own and nothing else."""
    kernels = dw.cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("cache")
    (folder / "draftwise").mkdir()
    (folder / "draftwise" / "kernels").symlink_to(kernels)
    return folder


@pytest.fixture(autouse=True)
def costs_of_tiny_models_are_kept_elsewhere(other_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(other_cache))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(scope="module")
def llm(model) -> dw.LLM:
    return dw.load(model)


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*arguments, stdin=""): the exit code, standard output and standard error of a command line."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def prompts_file(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": PROMPT, "category": "a"}, {"turns": ["an apple and", "more"]}, {"prompt": "it is in", "category": "a"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# help


def test_help_is_quick_and_imports_neither_torch_nor_transformers():
    code = "import sys; from draftwise.cli import main; main(['--help']); assert not {'torch', 'transformers'} & {*sys.modules}"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert all(name in done.stdout for name in COMMANDS)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert "Examples:" in out and f"draftwise {name}" in out.split("Examples:")[1]
    assert "--json" in out


def test_no_command_shows_the_help(run):
    code, out, _ = run()
    assert code == 0 and "Commands:" in out


def test_version(run):
    assert run("--version")[1] == f"draftwise, version {dw.__version__}\n"


# generate


def test_generate_prints_the_text_and_figures_apart(run, model, llm):
    code, out, err = run("generate", PROMPT, "--model", model, "--max-tokens", "40")
    assert code == 0
    assert out == llm.generate(PROMPT, max_tokens=40).text + "\n"
    assert "tokens/s" in err and "tokens a pass" in err and "drafter ngram" in err


def test_a_seed_that_was_not_given_is_told_and_gives_the_text_again(run, model):
    asked = ["generate", PROMPT, "--model", model, "--max-tokens", "20", "--temperature", "1"]
    _, text, err = run(*asked)
    seed = err.rsplit("seed ", 1)[1].split()[0]
    assert run(*asked, "--seed", seed)[1] == text
    told = json.loads(run(*asked, "--json")[1])
    assert json.loads(run(*asked, "--json", "--seed", str(told["seed"]))[1])["text"] == told["text"]
    assert "seed" not in run(*asked[:-2])[2]


def test_generate_reads_standard_input(run, model, llm):
    _, out, _ = run("generate", "-", "--model", model, "--max-tokens", "8", "--raw", stdin=PROMPT)
    assert out == llm.generate(PROMPT, raw=True, max_tokens=8).text + "\n"


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1", "--seed", "3"]])
def test_generate_json_is_the_same_with_and_without_drafts(run, model, sampling):
    found = []
    for drafter in ("none", "ngram"):
        drafting = ["--drafter", drafter, "--draft-tokens", "4"]
        code, out, _ = run("generate", PROMPT, "--model", model, "--json", *drafting, *sampling)
        assert code == 0
        found.append(json.loads(out))
    plain, drafted = found
    assert list(plain) == ["text", "tokens", "finish_reason", "stats", "seed"] and list(plain["stats"]) == STATS
    assert set(plain["stats"]["seconds"]) == {"prefill", "draft", "target", "decode", "total"}
    assert (plain["stats"]["drafter"], drafted["stats"]["drafter"]) == ("none", "ngram")
    assert plain["stats"]["drafted"] == 0 < drafted["stats"]["drafted"]
    assert all(plain[key] == drafted[key] for key in ("text", "tokens", "finish_reason"))


@pytest.mark.parametrize("batch", ["1", "2"])
def test_several_prompts_give_an_object_a_line_in_their_order(run, model, llm, prompts_file, batch):
    line = ["generate", "--model", model, "--prompts", prompts_file, "--batch", batch, "--max-tokens", "12", "--json"]
    _, out, _ = run(*line)
    expected = [list(llm.generate(text, max_tokens=12).tokens) for text in (PROMPT, "an apple and", "it is in")]
    assert [json.loads(row)["tokens"] for row in out.splitlines()] == expected
    _, out, _ = run(*line, "--limit", "2")
    assert [json.loads(row)["tokens"] for row in out.splitlines()] == expected[:2]


def test_several_prompts_as_text(run, model, llm, prompts_file):
    _, out, err = run("generate", "--model", model, "--prompts", prompts_file, "--max-tokens", "12")
    assert "2 of 3" in out and llm.generate("an apple and", max_tokens=12).text in out
    assert err.splitlines()[-1].count("tokens/s") == 1


def test_drafted_tokens_are_coloured_on_a_terminal_only(run, model, monkeypatch):
    line = ["generate", PROMPT, "--model", model, "--draft-tokens", "4", "--ignore-eos"]
    _, plain, err = run(*line)
    assert "\x1b" not in plain + err
    monkeypatch.setattr(output, "in_colour", lambda: True)
    _, coloured, err = run(*line)
    assert "\x1b[32m" in coloured and "in this colour" in err
    assert coloured.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


PARAMETERS = [
    (["--temperature", "1.5", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--seed", "5"],
     {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}),
    (["--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.2"],
     {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}),
    (["--allowed-tokens", "40,50,60", "--min-tokens", "5"], {"allowed_tokens": (40, 50, 60), "min_tokens": 5}),
    (["--logit-bias", "70=100", "--logit-bias", "71=-5"], {"logit_bias": {70: 100.0, 71: -5.0}}),
    (["--stop", "e", "--ignore-eos"], {"stop": ("e",), "ignore_eos": True}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "params"), PARAMETERS)
def test_sampling_parameters_reach_the_model(run, model, llm, arguments, params):
    _, out, _ = run("generate", PROMPT, "--model", model, "--max-tokens", "16", "--json", *arguments)
    expected = llm.generate(PROMPT, max_tokens=16, **params)
    assert (json.loads(out)["tokens"], json.loads(out)["finish_reason"]) == (list(expected.tokens), expected.finish_reason)


def test_a_stop_token_and_a_bad_word(run, model, llm):
    tokens = llm.generate(PROMPT, max_tokens=8).tokens
    _, out, _ = run("generate", PROMPT, "--model", model, "--max-tokens", "8", "--json", "--stop-token", str(tokens[3]))
    assert json.loads(out)["finish_reason"] == "stop"
    _, out, _ = run("generate", PROMPT, "--model", model, "--max-tokens", "30", "--json", "--bad-word", "an", "--bad-word", "e")
    assert not {*llm.tokenizer.encode("an"), *llm.tokenizer.encode("e")} & set(json.loads(out)["tokens"])


def test_logprobs_come_with_json(run, model):
    _, out, _ = run("generate", PROMPT, "--model", model, "--max-tokens", "5", "--json", "--logprobs", "2")
    found = json.loads(out)
    assert [row["token"] for row in found["logprobs"]] == found["tokens"]
    assert all(len(row["top"]) == 2 for row in found["logprobs"])


def test_the_options_of_a_drafter_are_shown(run):
    code, out, _ = run("generate", "--help-drafter", "ngram")
    assert code == 0
    for option in dw.drafter_options("ngram"):
        assert option[0] in out


# chat


def test_chat_from_a_pipe_keeps_the_conversation(run, model, llm):
    code, out, _ = run("chat", "--model", model, "--max-tokens", "10", "--json", stdin="the one\n\nand then\n")
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    turns = [{"role": "user", "content": "the one"}]
    assert first["tokens"] == list(llm.generate(turns, max_tokens=10).tokens)
    turns += [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "and then"}]
    assert second["tokens"] == list(llm.generate(turns, max_tokens=10).tokens)


def test_chat_commands(run, model, llm):
    lines = "the one\n/reset\nthe one\n/system in an hour\nthe one\n/what\n/quit\nthe one\n"
    _, out, err = run("chat", "--model", model, "--max-tokens", "10", "--json", stdin=lines)
    answers = [json.loads(line)["text"] for line in out.splitlines()]
    system = [{"role": "system", "content": "in an hour"}, {"role": "user", "content": "the one"}]
    assert answers == [answers[0], answers[0], llm.generate(system, max_tokens=10).text]
    assert "no command /what" in err


def test_chat_streams_text(run, model, llm):
    _, out, err = run("chat", "--model", model, "--max-tokens", "10", stdin="the one\n")
    assert out == llm.generate([{"role": "user", "content": "the one"}], max_tokens=10).text + "\n"
    assert "tokens/s" in err


def test_chat_goes_on_after_a_turn_that_is_too_long(run, model):
    lines = "the one " * 40 + "\n/reset\nthe one\n"
    code, out, err = run("chat", "--model", model, "--context", "64", "--max-tokens", "5", "--json", stdin=lines)
    assert code == 0
    assert len(out.splitlines()) == 1 and "/reset forgets" in err


# bench


def test_bench_json(run, model, prompts_file):
    code, out, err = run(
        "bench", "--model", model, "--prompts", prompts_file, "--drafters", "ngram", "--draft-tokens", "3",
        "--max-tokens", "16", "--ignore-eos", "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert list(found) == ["model", "machine", "versions", "prompts", "runs"]
    assert [row["drafter"] for row in found["runs"]] == ["none", "ngram"]
    assert set(found["runs"][1]["by_category"]) == {"a", "all"}
    assert found["runs"][0]["speedup"] == 1.0 and found["prompts"]["count"] == 3
    assert "same as with plain decoding, token for token (3 outputs" in err


def test_bench_tables_in_batches_with_options(run, model, prompts_file):
    code, out, _ = run(
        "bench", "--model", model, "--prompts", prompts_file, "--drafters", "ngram,none", "-o", "max_ngram=2", "--batch", "2",
        "--max-tokens", "8", "--temperature", "1", "--repeat", "2",
    )  # fmt: skip
    assert code == 0
    assert "speed-up" in out and "category" in out and "×" in out


def test_bench_exits_with_one_at_a_difference(run, model, prompts_file, monkeypatch):
    from draftwise.bench import run as bench_run

    monkeypatch.setattr(bench_run, "first_difference", lambda runs: bench_run.Difference("ngram", 1, 4, 40, None))
    code, _, err = run("bench", "--model", model, "--prompts", prompts_file, "--max-tokens", "4")
    assert code == 1
    assert "ngram differs from plain decoding: prompt 2, token 5: the end instead of token 40" in err


def test_bench_says_that_other_rules_are_not_compared(run, model, prompts_file):
    code, _, err = run("bench", "--model", model, "--prompts", prompts_file, "--max-tokens", "4", "--verify", "rejection")
    assert code == 0
    assert "outputs were not compared" in err


def test_bench_cost(run, model):
    code, out, _ = run("bench", "--model", model, "--cost", "--cost-context", "32", "--json")
    assert code == 0
    found = json.loads(out)
    told = ["model", "weights", "context", "rows", "milliseconds", "read_gb_per_s", "floor_milliseconds", "read_share"]
    assert list(found) == told
    assert found["rows"] == [1, 2, 4, 8, 16, 32] and len(found["milliseconds"]) == 6
    code, out, _ = run("bench", "--model", model, "--cost", "--cost-context", "32")
    assert code == 0 and "merely reading" in out


# other commands


def test_doctor(run):
    code, out, _ = run("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["versions"]["torch"] and found["machine"]["threads"] >= 1 and "ngram" in found["drafters"] and found["kernels"]
    assert run("doctor")[0] == 0


def test_pull_prints_where_the_model_lies(run, smollm2_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(smollm2_path.parents[2]))
    code, out, _ = run("pull", "smollm2")
    assert (code, out) == (0, f"{smollm2_path}\n")


def test_a_warning_is_one_line(run, monkeypatch):
    from draftwise.kernels import loader

    monkeypatch.setattr(loader, "load", lambda name: warnings.warn(f"no {name} here", RuntimeWarning, stacklevel=2))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = run("doctor", "--json")
    assert code == 0
    assert err.startswith("draftwise: warning: no ") and err.count("\n") == 1


def test_doctor_says_why_there_are_no_kernels(run, monkeypatch):
    from draftwise.kernels import loader

    def no_compiler(name):
        raise loader.BuildError("no C++ compiler found; install g++")

    monkeypatch.setattr(loader, "load", no_compiler)
    assert "no C++ compiler found; install g++" in run("doctor")[1]


# bad input: found before anything is loaded


CHEAP = [
    (["generate", "x", "--temperature", "-1"], "temperature"),
    (["generate", "x", "--top-p", "0"], "top_p"),
    (["generate", "x", "--max-tokens", "0"], "max_tokens"),
    (["generate", "x", "--temperature", "hot"], "--temperature"),
    (["generate", "x", "--drafter", "telepathy"], "unknown drafter 'telepathy'; choices: "),
    (["train", "eagle3", "--out", "never", "-o", "start=nowhere"], "nowhere"),
    (["generate", "x", "--drafter", "ngram", "-o", "colour=red"], "unknown option 'colour' for ngram; it has: "),
    (["generate", "x", "-o", "max_ngram"], "KEY=VALUE"),
    (["generate", "x", "-o", "max_ngram=many"], "max_ngram"),
    (["generate", "x", "--verify", "faith"], "'match', 'rejection', 'block'"),
    (["generate", "x", "--draft-tokens", "-2"], "auto"),
    (["generate", "x", "--logit-bias", "5"], "KEY=VALUE"),
    (["generate", "x", "--logit-bias", "a=1"], "42=-100"),
    (["generate", "x", "--allowed-tokens", "a,b"], "11,42,7"),
    (["generate", "x", "--threads", "0"], "--threads"),
    (["generate", "x", "--speed", "9"], "--speed"),
    (["generate"], "give either a prompt"),
    (["generate", "x", "--prompts", "y"], "give either a prompt"),
    (["generate", ""], "the prompt is empty"),
    (["generate", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
    (["generate", "--prompts", "/"], "/: is a directory"),
    (["bench", "--drafters", "ngram,telepathy"], "unknown drafter 'telepathy'"),
    (["bench", "--drafters", ","], "no drafter given"),
    (["bench", "-o", "colour=red"], "unknown option 'colour'"),
    (["bench", "--prompts", "/nowhere.jsonl"], "no such file"),
    (["chat", "--min-p", "2"], "min_p"),
    (["generate", "--help-drafter", "telepathy"], "unknown drafter"),
    (["speculate"], "no command 'speculate'; there are: generate"),
    (["pull", "no/such/model"], "no/such/model"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), CHEAP)
def test_bad_input_is_one_clear_line_before_any_model_is_loaded(run, monkeypatch, arguments, message):
    monkeypatch.setattr(dw, "load", None, raising=False)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("draftwise: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts"),
        ('{"prompt": "x"}\n{"prompt": \n', "prompts.jsonl, line 2: not JSON"),
        ('\n{"text": "x"}\n', "prompts.jsonl, line 2: has neither `prompt` nor `turns`"),
    ],
)
def test_bad_prompt_files(run, monkeypatch, tmp_path, content, message):
    monkeypatch.setattr(dw, "load", None, raising=False)
    (tmp_path / "prompts.jsonl").write_text(content)
    code, _, err = run("bench", "--prompts", str(tmp_path / "prompts.jsonl"))
    assert code == 2 and message in err and err.count("\n") == 1


# bad input: found by the library


def broken_models(folder: Path, smollm2: Path, good: str) -> dict[str, tuple[str, str]]:
    """Per kind of broken model its path and what the message must hold."""
    (folder / "cut.gguf").write_bytes(smollm2.read_bytes()[:100_000])
    (folder / "noise.gguf").write_bytes(b"GGUFnonsense" * 20)
    (folder / "empty").mkdir()
    odd = folder / "odd"
    shutil.copytree(good, odd)
    (odd / "config.json").write_text(json.dumps({"model_type": "perceptron9", "architectures": ["Perceptron9ForCausalLM"]}))
    return {
        "missing": (str(folder / "missing.gguf"), "missing.gguf"),
        "cut short": (str(folder / "cut.gguf"), "cut.gguf"),
        "noise": (str(folder / "noise.gguf"), "noise.gguf"),
        "no config": (str(folder / "empty"), "config.json"),
        "unknown architecture": (str(odd), "perceptron9"),
    }


@pytest.mark.parametrize("kind", ["missing", "cut short", "noise", "no config", "unknown architecture"])
def test_broken_models(run, model, tmp_path, smollm2_path, kind):
    path, message = broken_models(tmp_path, smollm2_path, model)[kind]
    code, out, err = run("generate", "x", "--model", path)
    assert (code, out) == (2, "")
    assert err.startswith("draftwise: error: ") and err.count("\n") == 1
    assert message in err


def last_line(err: str) -> str:
    """The last line on standard error, after what was said while loading; no line may look like a traceback."""
    assert "Traceback" not in err
    return err.splitlines()[-1]


def test_a_draft_of_another_vocabulary(run, model, tmp_path):
    draft = tiny_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)
    tokenizer = json.loads((draft / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words["Ġthe"], words["Ġof"] = words["Ġof"], words["Ġthe"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    code, out, err = run("generate", "x", "--model", model, "--drafter", f"model:{draft}")
    assert (code, out) == (2, "")
    assert "vocabular" in last_line(err)


def test_a_prompt_longer_than_the_context(run, model):
    code, out, err = run("generate", "the one " * 100, "--model", model, "--context", "64")
    assert (code, out) == (2, "")
    assert "context" in last_line(err) and "64" in last_line(err)


def test_a_token_beyond_the_vocabulary(run, model):
    code, _, err = run("generate", PROMPT, "--model", model, "--logit-bias", "5000=1")
    assert code == 2 and "5000" in last_line(err)


def test_traceback_on_request(run):
    with pytest.raises(ValueError, match="temperature"):
        run("--traceback", "generate", "x", "--temperature", "-1")


# leaving early


@pytest.fixture
def interruptible():
    """A shell has what it starts in the background ignore interrupts, and so would all that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_without_a_traceback(model, tmp_path):
    (tmp_path / "many.jsonl").write_text('{"prompt": "the cat"}\n' * 2000)
    asked = ["--prompts", str(tmp_path / "many.jsonl"), "--ignore-eos", "--max-tokens", "400"]
    line = [sys.executable, "-m", "draftwise", "generate", "--model", model, *asked]
    with subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # reads on, or a full pipe would hold it
    assert process.returncode == 130 and b"Traceback" not in err


@pytest.mark.usefixtures("interruptible")
def test_interrupt_on_a_terminal_ends_the_answer_and_not_the_chat(model):
    ours, theirs = os.openpty()
    line = [sys.executable, "-m", "draftwise", "chat", "--model", model, "--ignore-eos", "--max-tokens", "400"]
    with subprocess.Popen(line, env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""

        def read_until(mark: bytes) -> None:
            nonlocal shown
            while mark not in shown:
                shown += os.read(ours, 4096)
            shown = shown.partition(mark)[2]

        read_until(b"> ")
        os.write(ours, b"the one\n")
        read_until(b"\n")  # what was typed; the answer follows
        shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        read_until(b"> ")
        os.write(ours, b"/quit\n")
        assert process.wait(20) == 0
    os.close(ours)


def test_a_reader_that_leaves_is_no_error():
    line = [sys.executable, "-m", "draftwise", "predict", "--length", "1000"]
    with subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr.read() == b""


def test_a_reader_that_leaves_while_text_comes_is_no_error(smollm2_path):
    line = [sys.executable, "-m", "draftwise", "generate", "Count to fifty.", "--model", str(smollm2_path)]
    with subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 0
        assert b"error" not in process.stderr.read().lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "--cost", "nan"], "cost is nan; it must be a finite number"),
        (["predict", "--parameters", "8B", "--bandwidth", "inf"], "bandwidth is inf; it must be a finite number"),
        (["predict", "--length", "20000"], "20000 is not in the range 0<=x<=1000"),
        (["bench", "--cost", "--cost-context", "999999"], "--cost-context is 999999; at most"),
    ],
)
def test_numbers_that_cannot_be_worked_with_are_refused_at_once(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
