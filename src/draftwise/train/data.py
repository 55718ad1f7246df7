"""What drafts learn from: the model's own answers, to a user's prompts, to prompts of its own, to longer ones made of those.

Knows prompts and answers as token ids, and the engine that makes them; knows nothing of drafts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from draftwise.engine.llm import LLM
from draftwise.types import Request, Result, SamplingParams

TEMPERATURES = (0.0, 0.8, 0.8, 1.0)
"""Answers are made at these in turn, since drafts are asked for at all of them."""
MARK = "§"
FROM_TEXT = (
    "Summarize the following text.\n\n{0}",
    "Give the main points of this text as a short list:\n\n{0}",
    "Translate the following text into {language}:\n\n{0}",
    "Rewrite the following text in simpler words.\n\n{0}",
    "Make this text shorter, but keep its meaning: {0}",
    "Use the text below to answer the question.\n\n{0}\n\nQuestion: {question}",
    "Passage 1: {0}\n\nPassage 2: {1}\n\nQuestion: {question}\n\nAnswer with the help of the passages.",
    "Continue this text:\n\n{0}",
    "{question}\n\nHere is one answer: {0}\n\nWrite a better one.",
)
LANGUAGES = ("German", "French", "Spanish", "English", "Italian")
LEAST_TEXT, MOST_TEXT = 200, 2000  # characters of an answer that a longer prompt is made of
MOST_REFUSED = 100
LEAST_QUESTION, MOST_QUESTION = 8, 256  # tokens of a prompt that the model makes up


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt as the model was fed it, and what it said, its end token included."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class Corpus:
    """Answers in a file of JSON lines, added as they come. A last line cut short by a kill is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: list[Answer] = []
        self.tokens = 0
        self._read = 0  # bytes of the file
        self.refresh()

    def refresh(self) -> None:
        """Take in what was added to the file, by whomever."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                row = json.loads(line)
                self._take(Answer(tuple(row["prompt"]), tuple(row["answer"])))

    def add(self, answer: Answer) -> None:
        """Write an answer to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"prompt": answer.prompt, "answer": answer.tokens}).encode() + b"\n"
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.seek(self._read)
            file.write(line)
            file.truncate()
        self._read += len(line)
        self._take(answer)

    def _take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.tokens += len(answer.tokens)


def make_answers(
    llm: LLM,
    corpus: Corpus,
    prompts: Seq[str],
    *,
    done: Callable[[], bool],
    seed: int = 0,
    max_tokens: int = 384,
    invented: float | None = None,
    longer: float = 0.25,
) -> None:
    """Answer prompts with the engine, as many at a time as it takes, until `done` says so.

    invented: the share of prompts that the model makes up itself (None: a quarter, or all where the user gave none).
    longer: the share of prompts made of earlier answers, to be summarised, translated, drawn on.
    """
    _Maker(llm, corpus, prompts, seed, max_tokens, invented, longer).run(done)


class _Maker:
    """Keeps the engine's queue full of questions to be answered and of questions to be made up."""

    def __init__(
        self,
        llm: LLM,
        corpus: Corpus,
        prompts: Seq[str],
        seed: int,
        max_tokens: int,
        invented: float | None,
        longer: float,
    ) -> None:
        self.llm, self.engine, self.corpus = llm, llm.engine, corpus
        self.random = random.Random(f"{seed} {len(corpus.answers)}")
        self.max_tokens, self.longer = max_tokens, longer
        self.invented = (0.25 if prompts else 1.0) if invented is None else invented
        self.given = self._shuffled(prompts)
        self.questions: list[str] = []
        self.beginning = user_turn(llm)

    def run(self, done: Callable[[], bool]) -> None:
        waiting: dict[int, Callable[[Result], None]] = {}
        refused = 0
        while not done():
            while len(waiting) < 2 * self.engine.max_batch:
                request, then = self._next()
                try:
                    waiting[self.engine.submit(request)] = then
                    refused = 0
                except ValueError as error:  # too long for the context
                    refused += 1
                    if refused == MOST_REFUSED:
                        raise ValueError(f"{refused} prompts one after another cannot be answered; the last: {error}") from None
            for event in self.engine.step():
                if event.result is not None:
                    waiting.pop(event.request_id)(event.result)
        for identity in waiting:
            self.engine.cancel(identity)

    def _next(self) -> tuple[Request, Callable[[Result], None]]:
        chance = self.random.random()
        if chance < self.longer and len(self.corpus.answers) >= 8:
            return self._answer(self._longer_question())
        if chance < self.longer + self.invented or self.given is None:
            if not self.questions:
                return self._invent()
            return self._answer(self.questions.pop())
        return self._answer(next(self.given))

    def _answer(self, question: str) -> tuple[Request, Callable[[Result], None]]:
        params = SamplingParams(
            temperature=self.random.choice(TEMPERATURES), seed=self.random.getrandbits(60), max_tokens=self.max_tokens
        )
        prompt = tuple(self.llm.encode(question))

        def then(result: Result) -> None:
            if len(result.tokens) > 1:
                self.corpus.add(Answer(prompt, result.tokens))

        return Request(prompt=prompt, params=params), then

    def _invent(self) -> tuple[Request, Callable[[Result], None]]:
        params = SamplingParams(temperature=1.0, top_p=0.98, seed=self.random.getrandbits(60), max_tokens=MOST_QUESTION)

        def then(result: Result) -> None:
            text = result.text.strip()
            if result.finish_reason == "stop" and len(result.tokens) >= LEAST_QUESTION and text:
                self.questions.append(text)

        return Request(prompt=self.beginning, params=params), then

    def _longer_question(self) -> str:
        def text() -> str:
            answer = self.random.choice(self.corpus.answers)
            return self.llm.tokenizer.decode(answer.tokens).strip()[:MOST_TEXT]

        texts = sorted((text() for _ in range(4)), key=len)[-2:]
        if len(texts[0]) < LEAST_TEXT and self.given is not None:
            return next(self.given)
        form = self.random.choice(FROM_TEXT)
        question = next(self.given) if self.given is not None else self.random.choice(texts[0].split(". "))
        return form.format(*texts, question=question, language=self.random.choice(LANGUAGES))

    def _shuffled(self, prompts: Seq[str]) -> Iterator[str] | None:
        def endless() -> Iterator[str]:
            while True:
                yield from self.random.sample(prompts, len(prompts))

        return endless() if prompts else None


def user_turn(llm: LLM) -> tuple[int, ...]:
    """What stands before a user's text: the model's default system prompt and the turn's beginning, or the first token."""
    tokenizer = llm.tokenizer
    if tokenizer.has_chat_template:
        text = tokenizer.chat_text([{"role": "user", "content": MARK}], add_generation_prompt=False).partition(MARK)[0]
        if text:
            return tuple(tokenizer.encode(text, around=False))
    first = tokenizer.bos_token if tokenizer.bos_token is not None else llm.config.bos_token
    return (first if first is not None else min(tokenizer.eos_tokens, default=0),)
