"""Benchmarks: prompt files, the interleaving, the figures, and what is said when outputs differ."""

import json
from collections.abc import Mapping

import pytest

from draftwise.bench import report
from draftwise.bench.run import PLAIN, WARM_UP, Answer, Difference, Journal, Run, Setting, first_difference, side_by_side
from draftwise.bench.workloads import Prompt, Workload, read, spread
from draftwise.types import Result, Stats


@pytest.fixture
def prompts_file(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
        return str(path)

    return write


def test_lines_have_a_prompt_or_turns(prompts_file):
    path = prompts_file({"prompt": "One?", "category": "maths"}, "", {"turns": ["Two?", "Why?"], "id": 7})
    found = read(path)
    assert found.prompts == (Prompt("One?", "maths"), Prompt("Two?", "all"))
    assert found.path == path and len(found.sha256) == 64


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "line 2: not JSON"),
        ({"text": "x"}, "line 2: has neither `prompt` nor `turns`"),
        ([1], "line 2: has neither"),
        ({"turns": []}, "line 2: `prompt` must be a text"),
        ({"prompt": 3}, "line 2: `prompt` must be a text"),
        ({"prompt": ""}, "neither empty"),
    ],
)
def test_a_bad_line_is_named_by_its_number(prompts_file, line, message):
    with pytest.raises(ValueError, match=message):
        read(prompts_file({"prompt": "good"}, line))


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "One?"}\n')
    assert read(str(tmp_path / "marked.jsonl")).prompts == (Prompt("One?"),)


def test_a_file_without_prompts_is_an_error(prompts_file, tmp_path):
    with pytest.raises(ValueError, match="no prompts"):
        read(prompts_file("", "  "))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read(str(tmp_path / "binary"))
    with pytest.raises(FileNotFoundError):
        read(str(tmp_path / "nowhere"))


def test_limit_spreads_rows_evenly():
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread(range(3), 8) == [0, 1, 2]
    assert spread(range(3), None) == [0, 1, 2]


def test_the_prompts_that_come_with_draftwise():
    found = read()
    assert len(found.prompts) == 12
    assert {"question", "edit", "code", "summary", "translation", "maths", "chat"} <= {p.category for p in found.prompts}
    assert [p.text for p in read(limit=3).prompts] == [found.prompts[i].text for i in (0, 4, 8)]


class FakeLLM:
    """Says the prompt's characters; `drafts` of each step's tokens are drafted and accepted. Logs who ran what."""

    def __init__(self, log: list, drafter: str = "none", options: Mapping[str, str] | None = None):
        self.log, self.drafter, self.options = log, drafter, options or {}

    def using(self, drafter: str, *, options: Mapping[str, str]) -> "FakeLLM":
        self.log.append(("built", drafter))
        return FakeLLM(self.log, drafter, options)

    def generate(self, prompts, *, max_tokens):
        self.log.append((self.drafter, tuple(prompts)))
        return [self.answer(prompt, max_tokens) for prompt in prompts]

    def answer(self, prompt: str, max_tokens: int) -> Result:
        tokens = tuple(map(ord, prompt[:max_tokens]))
        if self.options.get("wrong") == prompt:
            tokens = tokens[:-1]
        accepted = 0 if self.drafter == "none" else 1
        steps = (len(tokens) - 1) // (1 + accepted)
        stats = Stats(
            emitted=len(tokens), requests=1, steps=steps, drafted=2 * accepted * steps, accepted=accepted * steps,
            accepted_at=[steps, 0] * accepted, reached_at=[steps, steps] * accepted, decode_seconds=0.5 * steps,
        )  # fmt: skip
        return Result("", tokens, "length", stats, drafter=self.drafter)


PROMPTS = [Prompt("aaaaa", "x"), Prompt("bbbbbbbbb", "y"), Prompt("ccccc", "x")]


def test_every_prompt_meets_every_drafter_in_turning_order():
    log: list = []
    side_by_side(FakeLLM(log), [Setting("a", {}), Setting("b", {})], PROMPTS, max_tokens=9)
    assert log[:3] == [("built", "none"), ("built", "a"), ("built", "b")]
    assert log[3:6] == [(name, (WARM_UP,)) for name in ("none", "a", "b")]
    order = [name for name, _ in log[6:]]
    assert order == ["none", "a", "b", "a", "b", "none", "b", "none", "a"]
    assert [prompts[0] for _, prompts in log[6::3]] == ["aaaaa", "bbbbbbbbb", "ccccc"]


def test_batches_and_repeats():
    log: list = []
    runs = side_by_side(FakeLLM(log), [Setting("a", {})], PROMPTS, batch=2, repeat=2, max_tokens=9)
    assert log.count(("built", "a")) == 2
    assert log.count(("a", ("aaaaa", "bbbbbbbbb"))) == 2 and log.count(("a", ("ccccc",))) == 2
    assert runs[1].stats.emitted == 2 * (5 + 9 + 5)
    assert len(runs[1].answers) == 6
    assert {prompt: stats.emitted for prompt, stats in runs[1].by_prompt().items()} == {0: 10, 1: 18, 2: 10}


def test_a_benchmark_that_was_cut_goes_on_from_its_journal(tmp_path):
    whole = side_by_side(FakeLLM([]), [Setting("a", {})], PROMPTS, batch=2, repeat=2, max_tokens=9)
    path, what = tmp_path / "journal.jsonl", {"drafters": ["a"]}
    side_by_side(FakeLLM([]), [Setting("a", {})], PROMPTS, batch=2, repeat=2, journal=Journal(path, what), max_tokens=9)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 2 * 2
    path.write_text("".join(lines[:4]) + lines[4][:20])
    log: list = []
    journal = Journal(path, what)
    again = side_by_side(FakeLLM(log), [Setting("a", {})], PROMPTS, batch=2, repeat=2, journal=journal, max_tokens=9)
    assert [run.answers for run in again] == [run.answers for run in whole]
    assert len([prompts for _, prompts in log if isinstance(prompts, tuple) and prompts != (WARM_UP,)]) == 8 - 3
    assert path.read_text().count("\n") == len(lines)
    with pytest.raises(ValueError, match="holds another benchmark"):
        Journal(path, {"drafters": ["b"]})


@pytest.mark.parametrize("content", ["notes", "notes\n", '{"drafters": ["b"]}\nmore'])
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path, content):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match="holds another benchmark, or none"):
        Journal(tmp_path / "file", {"drafters": ["a"]})
    assert (tmp_path / "file").read_text() == content


def test_a_journal_whose_first_line_was_cut_begins_anew(tmp_path):
    (tmp_path / "file").write_text('{"draft')
    assert Journal(tmp_path / "file", {"drafters": ["a"]}).held(0, 0, 0) is None
    assert (tmp_path / "file").read_text() == '{"drafters": ["a"]}\n'


def test_figures_are_ratios_of_sums_against_the_control():
    runs = side_by_side(FakeLLM([]), [Setting("a", {"k": "1"})], PROMPTS, max_tokens=9)
    workload = Workload("p.jsonl", "0" * 64, tuple(PROMPTS))
    found = report.as_json(runs, workload, model="m", device="cpu", verify="match", temperature=0.0, batch=1)
    assert list(found) == ["model", "machine", "versions", "prompts", "runs"]
    assert found["prompts"] == {"path": "p.jsonl", "sha256": "0" * 64, "count": 3}
    plain, drafted = found["runs"]
    assert list(drafted) == [
        "drafter", "options", "verify", "temperature", "batch", "tokens_per_second", "speedup", "interval", "tokens_per_step",
        "acceptance_rate", "conditional_acceptance", "seconds", "by_category",
    ]  # fmt: skip
    assert (plain["tokens_per_second"], plain["speedup"], plain["tokens_per_step"]) == (2.0, 1.0, 1.0)
    assert (drafted["tokens_per_second"], drafted["speedup"], drafted["tokens_per_step"]) == (4.0, 2.0, 2.0)
    assert (drafted["acceptance_rate"], drafted["conditional_acceptance"]) == (0.5, [1.0, 0.0])
    assert set(drafted["seconds"]) == {"prefill", "draft", "target", "decode", "total"}
    figures = {"tokens_per_second": 4.0, "speedup": 2.0, "interval": [2.0, 2.0], "tokens_per_step": 2.0}
    assert drafted["by_category"]["y"] == figures
    assert drafted["options"] == {"k": "1"}
    json.dumps(found)


def test_tables_show_every_run_and_category():
    from rich.console import Console

    runs = side_by_side(FakeLLM([]), [Setting("a", {})], PROMPTS, max_tokens=9)
    workload = Workload("p.jsonl", "0" * 64, tuple(PROMPTS))
    found = report.as_json(runs, workload, model="m", device="cpu", verify="match", temperature=0.0, batch=1)
    console = Console(width=100)
    with console.capture() as capture:
        for table in report.tables(found):
            console.print(table)
    lines = [line.split() for line in capture.get().splitlines()]
    assert ["a", "4.0", "2.00×", "2.00", "50%", "100%", "0%"] in lines
    assert ["y", "2.0", "2.00×"] in lines


def test_the_first_difference_is_found():
    def run(setting: Setting, *tokens: tuple[int, ...]) -> Run:
        return Run(setting, [Answer(prompt, "all", said, Stats()) for prompt, said in enumerate(tokens)])

    same = run(PLAIN, (1, 2, 3), (4, 5))
    assert first_difference([same, same]) is None
    assert first_difference([same, run(Setting("a", {}), (1, 2, 3), (4, 6))]) == Difference("a", 1, 1, 5, 6)
    assert first_difference([same, run(Setting("a", {}), (1, 2), (4, 5))]) == Difference("a", 0, 2, 3, None)
    longer = run(Setting("b", {}), (1, 2, 3, 9), (4, 5))
    assert first_difference([same, same, longer]) == Difference("b", 0, 3, None, 9)


def test_intervals_hold_the_speed_up_and_narrow_with_prompts():
    def runs(prompts: int) -> list[Run]:
        def answers(seconds) -> list[Answer]:
            return [
                Answer(i, "all", (), Stats(emitted=11, requests=1, steps=10, decode_seconds=seconds(i))) for i in range(prompts)
            ]

        return [Run(PLAIN, answers(lambda i: 1.0)), Run(Setting("a", {}), answers(lambda i: 0.4 + 0.2 * (i % 3)))]

    def interval(prompts: int) -> list[float]:
        pair, workload = runs(prompts), Workload("p", "0", (PROMPTS[0],))
        found = report.as_json(pair, workload, model="m", device="cpu", verify="match", temperature=0.0, batch=1)
        assert found["runs"][0]["interval"] == [1.0, 1.0]
        low, high = found["runs"][1]["interval"]
        assert low <= found["runs"][1]["speedup"] <= high
        return [low, high]

    (few_low, few_high), (many_low, many_high) = interval(6), interval(60)
    assert 1 / 0.8 <= few_low < many_low < 1 / 0.6 < many_high < few_high <= 1 / 0.4
    assert interval(1)[0] == interval(1)[1]
