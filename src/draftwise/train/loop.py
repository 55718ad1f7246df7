"""The loop that trains any kind of draft: answers, captured rows, updates, measurements, checkpoints.

Knows lessons by their interface only. What it does depends on the seed and on how many updates are planned; with a budget of
minutes the schedule follows the clock, and a resumed run goes on where its checkpoint stands.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from draftwise.engine.llm import LLM
from draftwise.train.batches import Place, Shots, endless, is_held_out
from draftwise.train.data import Corpus, make_answers
from draftwise.train.lesson import Lesson
from draftwise.train.optimizer import Optimizer
from draftwise.train.served import Served, measure_served

CHECKPOINT, ANSWERS, LOG = "checkpoint.pt", "answers.jsonl", "log.jsonl"
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much and how to train. Raises ValueError naming what is wrong.

    minutes: of wall time, data included. tokens: of answers to make. updates: exactly so many, whatever time they take.
    rows: answered tokens of an update. memory: bytes of captured rows kept from one epoch to the next. patience:
    measurements without progress that end training; 0: none do. every: minutes between measurements of the served draft.
    served_prompts, served_tokens: how much is answered then. save_every: seconds between checkpoints. quantize: "int8"
    or "int4", which the draft is to be served in; it learns with weights rounded so.
    """

    minutes: float | None = None
    tokens: int | None = None
    updates: int | None = None
    rows: int = 1280
    learning_rate: float = 2e-3
    precision: str = "bf16"
    seed: int = 0
    most_tokens: int = 768
    max_answer: int = 384
    memory: int = 0
    patience: int = 8
    every: float = 4.0
    data_share: float = 0.4
    invented: float | None = None
    longer: float = 0.25
    served_prompts: int = 8
    served_tokens: int = 64
    save_every: float = 60.0
    quantize: str | None = None

    def __post_init__(self) -> None:
        for name in ("minutes", "tokens", "updates", "rows", "learning_rate", "every", "most_tokens", "served_prompts"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; it must be one of: {', '.join(PRECISIONS)}")
        if self.minutes is None and self.updates is None:
            raise ValueError("give a budget: minutes, or updates")


@dataclass(slots=True)
class Curve:
    """How training went, and what it took: what a checkpoint holds beside weights."""

    update: int = 0
    rows: int = 0
    seconds: float = 0.0  # of training, in all runs
    data: float = 0.0  # seconds that making answers took
    measured: float = 0.0  # `seconds` at the last measurement
    best: float = 0.0  # served tokens a pass
    stale: int = 0  # measurements since


Report = Callable[[Mapping[str, Any]], None]
"""Is told one thing at a time: phase ("data", "train", "served", "done") and figures."""


def train(
    llm: LLM,
    build: Callable[[Corpus], Lesson],
    out: Path,
    plan: Plan,
    *,
    prompts: Seq[str] = (),
    answers: Path | None = None,
    resume: bool = False,
    card: Mapping[str, Any] | None = None,
    report: Report = lambda figures: None,
) -> None:
    """From a model to a draft in `out`. build: the untrained lesson, once there are answers. answers: a file of them to use
    and to add to, instead of one in `out`.

    Raises ValueError where `out` holds a run and `resume` is not given, or the other way round.
    """
    held = (out / CHECKPOINT).exists()
    if held and not resume:
        raise ValueError(f"{out}: holds a run already; give --resume to go on with it, or another folder")
    if resume and not held and not (out / ANSWERS).exists():
        raise ValueError(f"{out}: there is no run to resume")
    out.mkdir(parents=True, exist_ok=True)
    with _processes(llm):
        corpus = Corpus(answers or out / ANSWERS)
        seconds = 0.0 if held else _make_data(llm, corpus, plan, prompts, report)
        Trainer(llm, build(corpus), corpus, out, plan, dict(card or {}), report, Curve(data=seconds)).run()


def _make_data(llm: LLM, corpus: Corpus, plan: Plan, prompts: Seq[str], report: Report) -> float:
    """Answers until there are enough tokens of them, or until their share of the time is over; the seconds it took."""
    wanted = plan.tokens if plan.tokens is not None or plan.minutes is not None else 100_000
    seconds = plan.minutes * 60 * plan.data_share if plan.minutes is not None else math.inf
    started, told = time.monotonic(), 0.0

    def done() -> bool:
        nonlocal told
        passed = time.monotonic() - started
        if passed - told >= 1:
            told = passed
            left = seconds - passed
            report({"phase": "data", "tokens": corpus.tokens, "wanted": wanted, "answers": len(corpus.answers), "left": left})
        enough = wanted is not None and corpus.tokens >= wanted
        return (enough or passed >= seconds) and len(corpus.answers) >= 2

    if _rank() == 0 and not done():
        make_answers(
            llm,
            corpus,
            prompts,
            done=done,
            seed=plan.seed,
            max_tokens=plan.max_answer,
            invented=plan.invented,
            longer=plan.longer,
        )
    if dist.is_initialized():
        dist.barrier()
        corpus.refresh()
    return time.monotonic() - started


class Trainer:
    """One run of one lesson."""

    def __init__(
        self,
        llm: LLM,
        lesson: Lesson,
        corpus: Corpus,
        out: Path,
        plan: Plan,
        card: dict[str, Any],
        report: Report,
        curve: Curve,
    ) -> None:
        self.llm, self.lesson, self.corpus, self.out, self.plan, self.report = llm, lesson, corpus, out, plan, report
        self.card = card | {"plan": {key: value for key, value in asdict(plan).items() if value is not None}}
        lesson.kind = plan.quantize
        self.optimizer = Optimizer(lesson, plan.learning_rate)
        self.device = llm.target.model.device
        self.curve, self.place = curve, Place()
        self.history: list[dict[str, Any]] = []
        if (out / CHECKPOINT).exists():
            self._restore()
        self.model: nn.Module = DistributedDataParallel(lesson) if dist.is_initialized() else lesson
        self.shots = Shots(
            llm.target,
            corpus.answers,
            lesson.taps,
            most_tokens=plan.most_tokens,
            dtype=torch.bfloat16 if plan.precision == "bf16" else torch.float32,
            memory=plan.memory,
        )

    def run(self) -> None:
        """Train to the end of the plan."""
        batches = endless(self.corpus, self.place, seed=self.plan.seed, rows=self.plan.rows)
        started = time.monotonic() - self.curve.seconds
        saved = time.monotonic()
        while self.progress < 1 and not (self.plan.patience and self.curve.stale >= self.plan.patience):
            group = [next(batches) for _ in range(_world())]
            figures = self._update(group[_rank()])
            self.curve.update += 1
            self.curve.rows += int(figures.pop("rows"))
            self.curve.seconds = time.monotonic() - started
            figures |= {"update": self.curve.update, "rows": self.curve.rows, "seconds": round(self.curve.seconds, 1)}
            if _rank() == 0:
                self._log(figures)
            self.report({"phase": "train", "progress": self.progress, "left": self._left(), **figures})
            if self.curve.seconds - self.curve.measured >= self.plan.every * 60:
                self._measure()
            if time.monotonic() - saved >= self.plan.save_every:
                self._save()
                saved = time.monotonic()
        if not self.history or self.curve.measured < self.curve.seconds:
            self._measure()
        self._save()
        self.report({"phase": "done", **asdict(self.curve)})

    @property
    def progress(self) -> float:
        """The share of the plan that is done."""
        parts = []
        if self.plan.updates is not None:
            parts.append(self.curve.update / self.plan.updates)
        if self.plan.minutes is not None:
            parts.append(self.curve.seconds / max(self.plan.minutes * 60 - self.curve.data, 1))
        return max(parts)

    def _left(self) -> float:
        """Seconds to go at this pace."""
        return self.curve.seconds * (1 - self.progress) / max(self.progress, 1e-6)

    def _update(self, places: list[int]) -> dict[str, Any]:
        batch = self.shots.batch(places)
        half = self.plan.precision == "bf16"
        with self.lesson.rounded():
            with torch.autocast(self.device.type, dtype=torch.bfloat16) if half else nullcontext():
                figures = self.model(batch)
            figures["loss"].backward()
        size = nn.utils.clip_grad_norm_(self.lesson.parameters(), 1.0)
        rate = self.optimizer.step(self.progress)
        loss = float(figures["loss"].detach())
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at update {self.curve.update + 1}; lower --learning-rate")
        kept = {name: round(float(value.detach()), 5) for name, value in figures.items()}
        return kept | {"rows": batch.rows * _world(), "rate": rate, "gradient": round(float(size), 3)}

    def _measure(self) -> None:
        """Serve the draft as it is now to prompts held out, and note how it does."""
        self.curve.measured = self.curve.seconds
        if _rank() == 0:
            places = [place for place in range(len(self.corpus.answers)) if is_held_out(place)]
            prompts = [self.corpus.answers[place].prompt for place in places[: self.plan.served_prompts]]
            prompts = prompts or [self.corpus.answers[0].prompt]
            self._write()
            served = measure_served(self.llm, self.lesson.drafter, self.out, prompts, max_tokens=self.plan.served_tokens)
            self._note(served)
        if dist.is_initialized():
            stale = torch.tensor([self.curve.stale], device=self.device)
            dist.broadcast(stale, 0)
            self.curve.stale = int(stale)

    def _note(self, served: Served) -> None:
        better = served.mean > self.curve.best + 1e-4
        self.curve.best, self.curve.stale = max(served.mean, self.curve.best), 0 if better else self.curve.stale + 1
        figures = {
            "update": self.curve.update,
            "rows": self.curve.rows,
            "seconds": round(self.curve.seconds, 1),
            "served": [round(value, 4) for value in served.tokens_per_step],
            "first": [round(value, 4) for value in served.first],
        }
        self.history.append(figures)
        self._log(figures)
        self._write()
        self.report({"phase": "served", **figures})

    def _write(self) -> None:
        state = {"update": self.curve.update, "rows": self.curve.rows, "minutes": round(self.curve.seconds / 60, 1)}
        data = {"answers": len(self.corpus.answers), "tokens": self.corpus.tokens}
        with self.lesson.rounded():
            self.lesson.save(self.out, self.card | {"trained": state, "data": data, "curve": self.history})

    def _log(self, figures: Mapping[str, Any]) -> None:
        with open(self.out / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")

    def _save(self) -> None:
        """A checkpoint, whole or not at all."""
        if _rank():
            return
        part = self.out / f"{CHECKPOINT}.part"
        torch.save(
            {
                "lesson": self.lesson.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "curve": asdict(self.curve),
                "place": asdict(self.place),
                "history": self.history,
                "random": torch.get_rng_state(),
            },
            part,
        )
        part.replace(self.out / CHECKPOINT)
        self._write()

    def _restore(self) -> None:
        """Go on from the checkpoint; what the log says of updates after it is dropped."""
        kept = torch.load(self.out / CHECKPOINT, map_location="cpu", weights_only=True)
        for name, now in self.lesson.state_dict().items():
            then = kept["lesson"].get(name)
            if then is None or then.shape != now.shape:
                size = "missing" if then is None else f"{tuple(then.shape)}, now {tuple(now.shape)}"
                raise ValueError(f"{self.out}: the run was begun with other options ({name}: {size}); give the same again")
        self.lesson.restore(kept["lesson"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.curve, self.place, self.history = Curve(**kept["curve"]), Place(**kept["place"]), list(kept["history"])
        torch.set_rng_state(kept["random"])
        if (self.out / LOG).exists() and _rank() == 0:
            lines = (self.out / LOG).read_text(encoding="utf-8").splitlines()
            lines = [line for line in lines if line.endswith("}") and json.loads(line)["update"] <= self.curve.update]
            (self.out / LOG).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


class _processes:
    """The group of processes that torchrun started, where it did."""

    def __init__(self, llm: LLM) -> None:
        self.cuda = llm.target.model.device.type == "cuda"

    def __enter__(self) -> None:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
            import datetime

            dist.init_process_group("nccl" if self.cuda else "gloo", timeout=datetime.timedelta(days=1))

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
