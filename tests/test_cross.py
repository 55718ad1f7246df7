"""Drafts with another vocabulary: ids that mean the same, text read in other tokens, and the same tokens and law as plain."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

import draftwise as dw
from draftwise.cache import KVCache
from draftwise.checkpoint import open_checkpoint
from draftwise.drafters import parse_options
from draftwise.drafters.base import Target
from draftwise.drafters.cross import CrossDrafter, Options
from draftwise.drafters.none import NoDrafter
from draftwise.drafters.transcripts import LONGEST, Reader, Transcript
from draftwise.drafters.trees import Trees
from draftwise.drafters.vocabularies import SharedTokens, chat_phrases, continuation
from draftwise.models.base import Model
from draftwise.sampling import History, Noise, distribution
from draftwise.sequence import Sequence
from draftwise.tokenizer import Tokenizer, load_tokenizer
from draftwise.types import NO_DRAFT, Batch, Draft, Drawn, Hidden, Limit, Outcome, Request, Result, SamplingParams, Tap
from draftwise.verify import verify
from laws import Chance, ExactNoise, deviation, law
from table_model import TableModel, engine
from tiny import CHAT_TEMPLATE, MERGES, SPECIALS, tiny_checkpoint

VOCAB = 24
LETTERS = "abcdefghijklmnopqrstuvwx"
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
RAGGED = [PROMPT, (7,), (2, 7, 1, 8, 2, 8, 1, 8, 2, 8), (0, 0, 0), tuple(range(20)) * 3]
SAMPLING = {
    "greedy": {},
    "nucleus": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
    "everything": {
        "temperature": 1.0,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 1.5, 4: -2.0},
        "bad_words": ((1, 2), (9,)),
        "min_tokens": 12,
        "stop_tokens": (11,),
        "seed": 6,
    },
    "allowed": {"temperature": 0.9, "seed": 8, "allowed_tokens": (1, 2, 3, 5, 8, 13, 21), "frequency_penalty": 1.0},
    "masked": {"temperature": 0.9, "seed": 8, "mask": lambda path: torch.arange(VOCAB) % 3 != len(path) % 3},
}
METHODS = ("intersection", "text", "auto")
SHAPES = [  # of the draft and its trees, and the nodes a step
    ({"kept": 14, "own": "yzAB", "skew": 1.0}, None),
    ({"kept": 14, "own": "yzAB", "skew": 1.0, "min_confidence": 0.2}, 5),
    ({"kept": 5, "tree": "3,2"}, 9),
    ({"kept": 20, "own": "yz", "tree": "dynamic", "beam": 3}, 7),
]
OTHER_MERGES = "t h|e r|Ġ t|Ġt h|i n|Ġth e|o u|Ġ m|a t|Ġ c|Ġc at|s at|Ġ Ġ|Ċ Ċ|Ġ w".split("|")
TEXT = (
    "The cat sat   on the mat; it's 12345 + 678 = 13023, isn't it?\n\n  def add(a, b):\n\treturn a+b\n"
    "naïve 😀😀 Ünïcödé http://example.com/a/very/long/path?with=query&and=more#fragment-of-it  \n"
    "你好，世界。今天天气很好  \n \n end"
)


# tokenizers


def byte_level(merges: Iterable[str], *, seed: int | None = None, specials: Seq[str] = SPECIALS, **said: object) -> Tokenizer:
    """A byte-level BPE tokenizer; a seed shuffles its ids."""
    return Tokenizer(byte_level_backend(merges, seed=seed, specials=specials), **said)  # type: ignore[arg-type]


def byte_level_backend(merges: Iterable[str], *, seed: int | None, specials: Seq[str]) -> Backend:
    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in pairs)]
    if seed is not None:
        random.Random(seed).shuffle(words)
    backend = Backend(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in specials])
    return backend


def sentencepiece(words: str) -> Tokenizer:
    """A SentencePiece-like tokenizer of the bytes and of these words, with a space of its own before every text."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words.split("|")]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[258:]
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    backend = Backend(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<s>", "</s>")])
    return Tokenizer(backend, eos_tokens=[1])


def spell(letters: str) -> Tokenizer:
    """A tokenizer of single letters: the id of each is its place."""
    backend = Backend(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(smollm2_path)))


@pytest.fixture(scope="module")
def tokenizers(smollm2: Tokenizer) -> dict[str, Tokenizer]:
    return {
        "smollm2": smollm2,
        "merges": byte_level(MERGES),
        "other merges": byte_level(OTHER_MERGES, seed=1),
        "sentencepiece": sentencepiece("▁|e|t|h|a|c|▁t|he|▁the|s|at|▁c|▁cat|▁▁|▁▁▁|▁s|▁sat|\n|i|n|in|o|▁on"),
    }


# ids that mean the same


def test_tokens_correspond_by_their_bytes_and_special_ones_by_name() -> None:
    mine, theirs = byte_level(MERGES), byte_level(OTHER_MERGES, seed=1)
    shared = SharedTokens(mine, theirs, target_vocab=mine.size, draft_vocab=theirs.size)
    merged = {merge.replace(" ", "") for merge in MERGES} & {merge.replace(" ", "") for merge in OTHER_MERGES}
    assert len(shared) == 256 + len(SPECIALS) + len(merged) and len(merged) == 10
    for own, other in shared.to_draft.items():
        assert mine.token_bytes(own) == theirs.token_bytes(other)
        assert mine.token_bytes(own) is not None or mine.token_text(own) == theirs.token_text(other)
        assert shared.to_target[other] == own


def test_a_byte_and_a_character_of_the_same_bytes_are_one_token() -> None:
    plain, pieces = byte_level(MERGES), sentencepiece("▁|a|the")
    shared = SharedTokens(plain, pieces, target_vocab=plain.size, draft_vocab=pieces.size)
    assert shared.to_draft[plain.token_id("a")] == pieces.token_id("a")
    assert shared.to_draft[plain.token_id("b")] == pieces.token_id("<0x62>")
    assert shared.to_draft[plain.token_id("the")] == pieces.token_id("the")
    assert shared.to_draft[plain.token_id("Ġ")] == pieces.token_id("▁")
    back = SharedTokens(pieces, plain, target_vocab=pieces.size, draft_vocab=plain.size)
    assert back.to_draft[pieces.token_id("a")] == plain.token_id("a")
    assert pieces.token_id("<0x61>") not in back.to_draft


def test_end_tokens_correspond_by_role() -> None:
    template = CHAT_TEMPLATE.replace("<|im_start|>", "<turn>").replace("<|im_end|>", "</turn>")
    chatty = byte_level([], specials=("</text>", "<turn>", "</turn>"), eos_tokens=[0, 2], chat_template=template)
    mine = byte_level([], eos_tokens=[0, 2], chat_template=CHAT_TEMPLATE)
    shared = SharedTokens(mine, chatty, target_vocab=mine.size, draft_vocab=chatty.size)
    assert {own: other for own, other in shared.to_draft.items() if mine.token_bytes(own) is None} == {2: 2, 0: 0}
    one_end = byte_level([], specials=("<end>",), eos_tokens=[0])
    shared = SharedTokens(mine, one_end, target_vocab=mine.size, draft_vocab=one_end.size)
    assert shared.to_draft[2] == 0 and 0 not in shared.to_draft


def test_rows_that_pad_a_head_are_never_shared() -> None:
    mine, theirs = spell(LETTERS), spell(LETTERS[::-1])
    shared = SharedTokens(mine, theirs, target_vocab=20, draft_vocab=22)
    assert shared.to_draft == {id: 23 - id for id in range(2, 20)}
    row_V = shared.row(torch.arange(40.0))
    assert row_V.tolist() == [-torch.inf] * 2 + [23.0 - id for id in range(2, 20)]


# text in other tokens


PAIRS = [
    ("smollm2", "merges"),
    ("merges", "smollm2"),
    ("other merges", "merges"),
    ("smollm2", "sentencepiece"),
    ("sentencepiece", "smollm2"),
]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_text_read_token_by_token_is_the_text_read_at_once(target: str, draft: str, tokenizers: dict[str, Tokenizer]) -> None:
    mine, theirs = tokenizers[target], tokenizers[draft]
    shared = SharedTokens(mine, theirs, target_vocab=mine.size, draft_vocab=theirs.size)
    tokens = mine.encode(TEXT, around=False)
    transcript = Transcript(Reader(mine, theirs, shared), tokens[:1])
    settled: list[int] = []
    for count in range(2, len(tokens) + 1):
        transcript.append(tokens[count - 1 : count])
        ids = transcript.ids()
        written = b"".join(theirs.token_bytes(id) or b"" for id in ids)
        assert written.strip(b" ") == b"".join(mine.token_bytes(token) or b"" for token in tokens[:count]).strip(b" ")
        assert transcript.settled[: len(settled)] == settled == ids[: len(settled)], "what is settled stays"
        settled = list(transcript.settled)
        assert len(ids) - len(settled) <= LONGEST + 3
    assert transcript.ids() == theirs.encode(TEXT, around=False)


def test_a_chat_is_read_in_the_drafts_own_format(smollm2: Tokenizer) -> None:
    template = (
        "{{ '<bos>' }}{% for message in messages %}{{ '<turn>' + message['role'] + '\n' + message['content'] + '</turn>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
    )
    mine = byte_level(MERGES, specials=("<bos>", "<turn>", "</turn>", "<odd>"), eos_tokens=[2], chat_template=template)
    reader = Reader(mine, smollm2, SharedTokens(mine, smollm2, target_vocab=mine.size, draft_vocab=smollm2.size))
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    long = [{"role": "system", "content": "Be brief."}, *question, {"role": "assistant", "content": "Air."}, question[0]]
    for messages in (question, long):
        assert reader.opening(mine.chat(messages)) == smollm2.chat_text(messages)
        transcript = Transcript(reader, mine.chat(messages))
        assert transcript.ids() == smollm2.chat(messages)
        transcript.append([*mine.encode("Light is "), 3, *mine.encode("scattered."), 2])  # a special token that is not shared
        assert transcript.ids() == smollm2.chat(messages) + smollm2.encode("Light is scattered.<|im_end|>")
    assert reader.opening(mine.encode("just text")) == "just text"


def test_a_template_may_refuse_a_role() -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[say]"
    )
    phrases = chat_phrases(byte_level([], chat_template=template))
    assert phrases == {
        "start, user": "[user]",
        "user, assistant": "[assistant]",
        "assistant, user": "[user]",
        "user, answer": "[say]",
    }


@pytest.mark.parametrize("name", ["smollm2", "merges", "sentencepiece"])
def test_a_continuation_is_what_the_whole_text_has(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    words = tokenizer.encode("the cat sat on the cat  in the end", around=False)
    for cut in range(1, len(words)):
        before, text = (b"".join(tokenizer.token_bytes(id) or b"" for id in part) for part in (words[:cut], words[cut:]))
        assert continuation(tokenizer, before[name == "sentencepiece" :], text) == words[cut:]


def test_a_continuation_never_takes_back_what_is_read(tokenizers: dict[str, Tokenizer]) -> None:
    merges = tokenizers["merges"]
    assert continuation(merges, b"t", b"he") == [merges.token_id("h"), merges.token_id("e")]
    assert continuation(merges, "é".encode()[:1], "é".encode()[1:]) == [merges.token_id("©")]
    assert continuation(merges, b"t", "h😀".encode()[:3]) == [merges.token_id("h")]
    assert continuation(merges, b"t", "😀".encode()[:3]) == []
    pieces = tokenizers["sentencepiece"]
    assert continuation(pieces, b"the", b" cat") == [pieces.token_id("▁cat")]
    assert continuation(pieces, b" t", b"he") == [pieces.token_id("he")]
    assert continuation(pieces, b"", b"the") == [pieces.token_id("▁the")]


# the loop


class Renamed(TableModel):
    """A table model whose ids have other numbers: `names[id]` is what the target calls it, or None for a token of its own."""

    def __init__(self, names: Seq[int | None], *, vocab: int = VOCAB, **settings: float) -> None:
        super().__init__(vocab, **settings)  # type: ignore[arg-type]
        self.names = list(names)

    def row(self, code: int) -> Tensor:
        row = super().row(code)
        return torch.stack([row[0] + 0.5 if name is None else row[name] for name in self.names])

    def _code(self, tokens: Seq[int]) -> int:
        return super()._code([1000 if self.names[token] is None else self.names[token] for token in tokens])


def cross(*, kept: int = VOCAB, own: str = "", seed: int = 0, memory: int = 2, skew: float = 0.0, **options) -> CrossDrafter:
    """A draft that has `kept` of the target's letters under other ids, and letters of its own."""
    letters = list(LETTERS)
    random.Random(seed).shuffle(letters)
    names: list[int | None] = [LETTERS.index(letter) for letter in letters[:kept]] + [None] * len(own)
    model = Renamed(names, memory=memory, skew=skew)
    draft = spell("".join(letters[:kept]) + own)
    own_settings = {name: options.pop(name) for name in ("context", "method") if name in options}
    settings = {"vocab": VOCAB, "context": 512, "max_batch": 8} | own_settings
    return CrossDrafter(model, target=spell(LETTERS), draft=draft, trees=Trees(**options), **settings)


def run(drafter, prompts, *, memory=2, verify="match", draft_tokens=None, engine_options=None, **params):
    params = {"max_tokens": 40, **params}
    made = engine(TableModel(VOCAB, memory=memory), drafter, **(engine_options or {}))
    wanted = {"params": SamplingParams(**params), "verify": verify, "draft_tokens": draft_tokens}
    results = made.generate([Request(prompt=prompt, **wanted) for prompt in prompts])
    if isinstance(drafter, CrossDrafter):
        assert drafter.cache.free_rows == drafter.cache.pages * 16, "every page came back"
    return results


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_same_model_under_other_ids_is_always_accepted(sampling: str, method: str, verify: str) -> None:
    """Each row depends on all tokens before it, so a draft that reads one wrong, or one too few, is found out."""
    if method == "text" and sampling != "greedy":
        return  # chosen tokens are not what is sampled
    params = {name: value for name, value in SAMPLING[sampling].items() if name != "stop_tokens"}  # drafts may pass an end
    plain = [run(NoDrafter(), [prompt], memory=0, **params)[0].tokens for prompt in RAGGED]
    results = run(cross(memory=0, method=method), RAGGED, memory=0, verify=verify, draft_tokens=4, **params)
    for result, expected in zip(results, plain, strict=True):
        assert result.stats.accepted == result.stats.drafted > 0
        assert verify != "match" or result.tokens == expected


def grid() -> list[Any]:
    """Every way to draft, to sample and to shape the drafts; by default two of the four shapes each, in turn."""
    return [
        pytest.param(
            method,
            sampling,
            SHAPES[half::2],
            marks=() if (m + s + half) % 2 else pytest.mark.lab,
            id=f"{method}-{sampling}-{half}",
        )
        for m, method in enumerate(METHODS)
        for s, sampling in enumerate(SAMPLING)
        for half in range(2)
    ]


@pytest.mark.parametrize(("method", "sampling", "shapes"), grid())
def test_same_tokens_alone_and_in_a_ragged_batch(method: str, sampling: str, shapes: list[Any]) -> None:
    params = SAMPLING[sampling]
    plain = plain_results(sampling)
    drafted = 0
    for shape, draft_tokens in shapes:
        together = run(cross(method=method, **shape), RAGGED, draft_tokens=draft_tokens, **params)
        assert [result.tokens for result in together] == [result.tokens for result in plain]
        assert [result.finish_reason for result in together] == [result.finish_reason for result in plain]
        drafted += sum(result.stats.drafted for result in together)
    assert drafted > 100
    assert run(cross(method=method, **shapes[0][0]), [PROMPT], **params)[0].tokens == plain[0].tokens


@functools.cache
def plain_results(sampling: str) -> list[Result]:
    return [run(NoDrafter(), [prompt], **SAMPLING[sampling])[0] for prompt in RAGGED]


def test_nothing_is_drafted_where_a_request_allows_nothing_that_is_shared() -> None:
    drafter = cross(kept=14, own="yz", method="intersection")
    allowed = tuple(id for id in range(VOCAB) if id not in drafter.shared.to_draft)
    for rule in ("match", "rejection", "block"):
        for temperature in (0.0, 1.0):
            params = {"allowed_tokens": allowed, "temperature": temperature, "seed": 1}
            made = run(drafter, [PROMPT], draft_tokens=4, verify=rule, **params)[0]
            assert set(made.tokens) <= set(allowed) and made.stats.drafted == 0


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_other_rules_run_to_the_end_and_are_greedy_when_greedy(method: str, verify: str) -> None:
    shape = {"kept": 14, "own": "yz", "skew": 1.0, "method": method}
    plain = run(NoDrafter(), [PROMPT])[0]
    assert run(cross(**shape), [PROMPT], verify=verify, draft_tokens=5)[0].tokens == plain.tokens
    sampled = run(cross(**shape), RAGGED, verify=verify, draft_tokens=5, temperature=1.0, seed=1)
    assert all(len(result.tokens) == 40 for result in sampled)
    again = run(cross(**shape), RAGGED, verify=verify, draft_tokens=5, temperature=1.0, seed=1)
    assert [result.tokens for result in again] == [result.tokens for result in sampled], "a seed repeats itself"


def test_auto_keeps_to_shared_tokens_where_nearly_all_are() -> None:
    for kept, own, drawn in ((VOCAB, "yz", Drawn.SHARED_NOISE), (14, "", Drawn.CHOSEN)):
        drafter = cross(kept=kept, own=own)
        seq = sequence(SamplingParams(temperature=0.8), prompt=tuple(range(VOCAB)))
        (draft,) = drafter.propose([seq], [Limit(3, 3)])
        assert set(draft.drawn) == {drawn}


def test_a_draft_of_shorter_context_falls_silent_and_the_target_goes_on() -> None:
    for method in METHODS:
        made = run(cross(context=30, method=method), [PROMPT], draft_tokens=4)[0]
        assert made.tokens == run(NoDrafter(), [PROMPT])[0].tokens
        assert 0 < made.stats.drafted < 40


def test_a_long_prompt_is_read_in_chunks() -> None:
    prompts = [tuple(random.Random(seed).randrange(VOCAB) for _ in range(700)) for seed in range(3)]
    options = {"engine_options": {"context": 1024}, "memory": 0}
    plain = [run(NoDrafter(), [prompt], **options)[0].tokens for prompt in prompts]
    results = run(cross(memory=0, context=1024), prompts, draft_tokens=4, **options)
    assert [result.tokens for result in results] == plain
    assert all(result.stats.accepted == result.stats.drafted > 0 for result in results)


@pytest.mark.parametrize("tree", ["chain", "2,2"])
@pytest.mark.parametrize("method", ["intersection", "text"])
def test_what_a_draft_has_read_is_what_a_fresh_one_reads(method: str, tree: str) -> None:
    """Tokens come right, wrong, several at once and undrafted, and merge with what stands before them."""
    target, draft = byte_level(MERGES), byte_level(OTHER_MERGES, seed=1)
    settings = {"target": target, "draft": draft, "vocab": target.size, "context": 512, "max_batch": 2, "method": method}
    settings["trees"] = Trees(tree=tree)
    source = random.Random(3)
    old = CrossDrafter(TableModel(draft.size, memory=0), **settings)
    seqs = [sequence(SamplingParams(max_tokens=400), prompt=tuple(target.encode(text)), name=i) for i, text in enumerate("ab")]
    text = target.encode(TEXT * 2)
    for step in range(60):
        place = 4 * step
        fed = [seq for seq in seqs if source.random() < 0.8]
        drafts = dict(zip(fed, old.propose(fed, [Limit(20, 4)] * len(fed)), strict=True))
        for seq, made in drafts.items():
            (expected,) = CrossDrafter(TableModel(draft.size, memory=0), **settings).propose([seq], [Limit(20, 4)])
            assert (made.tokens, made.parents) == (expected.tokens, expected.parents)
        for seq in seqs:
            made = drafts.get(seq, NO_DRAFT)
            right = [made.tokens[node] for node in made.path(source.randrange(-1, len(made)))]
            new = [*right, *text[place : place + 1 + source.randrange(4)]]
            seq.extend(new)
            old.observe(seq, Outcome((), tuple(new)))
    for seq in seqs:
        old.forget(seq)
    assert old.cache.free_rows == old.cache.pages * 16


# the law


class Silent:
    """A decoder that shows nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Scripted(Sequence):
    """A sequence whose drafter draws by enumeration."""

    chance: Chance

    def noise(self) -> Noise:
        return self  # type: ignore[return-value]

    def draft(self, q_V: Tensor, depth: int, **key: int) -> int:
        return self.chance.choose(exact(q_V))

    def draft_distinct(self, q_V: Tensor, depth: int, count: int, **key: int) -> list[int]:
        left, found = exact(q_V), []
        while len(found) < count and left.any():
            found.append(self.chance.choose(left))
            left[found[-1]] = 0
        return found


def sequence(params: SamplingParams, *, prompt: tuple[int, ...] = (0,), verify: str = "match", kind=Sequence, name: int = 0):
    return kind(name, Request(prompt=prompt, params=params, verify=verify), end_tokens=(), context=1024, decoder=Silent())


def exact(row_V: Tensor) -> np.ndarray:
    """The same distribution in fractions that add up to 1."""
    row = np.array([Fraction(weight) for weight in row_V.tolist()], dtype=object)
    return row / row.sum()


TARGET = torch.tensor([[0.2, 1.0, 0.1, 0.4], [0.9, 0.3, 0.4, 0.1], [0.5, 0.8, 1.1, 0.2], [0.3, 0.1, 0.9, 0.7]])
PARAMS = SamplingParams(temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=9)


class Bigrams:
    """A model whose logits depend on the last token alone: the row of a table."""

    def __init__(self, table_VV: Tensor) -> None:
        self.table_VV = table_VV
        self.config = TableModel(len(table_VV)).config
        self.device = torch.device("cpu")

    def forward(self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = ()) -> Hidden:
        return Hidden(batch.tokens_N[:, None], {})

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table_VV[hidden[:, 0]]

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(layers=1, kv_heads=1, head_dim=1, capacity=capacity)


def draft_of_abcd(method: str, **options: float) -> CrossDrafter:
    """It has a, b and d of the target's four letters, and two of its own."""
    table = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) * 2
    return CrossDrafter(
        Bigrams(table),
        target=spell("abcd"),
        draft=spell("dxbay"),
        vocab=4,
        context=64,
        max_batch=1,
        method=method,
        trees=Trees(max_tokens=2, **options),
    )


def target_law(length: int, number: Callable[[Tensor], Iterable]) -> dict[tuple[int, ...], Fraction]:
    found = {(): number(torch.ones(1))[0]}
    for _ in range(length):
        found = {
            (*text, token): chance * p
            for text, chance in found.items()
            for token, p in enumerate(number(distribution(TARGET[(0, *text)[-1]], PARAMS, History((0,), text))))
        }
    return found


@pytest.mark.parametrize("method", ["intersection", "text"])
def test_the_end_of_what_a_draft_says_is_the_targets_end(method: str) -> None:
    target = byte_level(["a b"], eos_tokens=[2])
    draft = byte_level([], seed=1, specials=("<end>",))
    end = draft.token_id("<end>")
    draft = byte_level([], seed=1, specials=("<end>",), eos_tokens=[end])
    table = torch.zeros(draft.size, draft.size)
    for before, after in (("a", "b"), ("b", "c"), ("c", "<end>")):
        table[draft.token_id(before), draft.token_id(after)] = 9.0
    settings = {"target": target, "draft": draft, "vocab": target.size, "context": 64, "max_batch": 1, "method": method}
    drafter = CrossDrafter(Bigrams(table), trees=Trees(max_tokens=3), **settings)
    seq = sequence(SamplingParams(), prompt=(target.token_id("a"),))
    (made,) = drafter.propose([seq], [Limit(3, 3)])
    assert made.tokens == (target.token_id("b"), target.token_id("c"), 2)
    assert made.survival == tuple(sorted(made.survival, reverse=True))


@pytest.mark.parametrize("shape", [{}, {"min_confidence": 0.35}, {"tree": "2"}], ids=str)
@pytest.mark.parametrize("method", ["intersection", "text"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_every_outcome_together_has_the_law_of_the_target(rule: str, method: str, shape: dict[str, float]) -> None:
    """All draws of the drafter and the rule, enumerated over as many steps as two tokens take."""
    drafter = draft_of_abcd(method, **shape)
    drafted = Counter()

    def experiment(chance: Chance) -> tuple[int, ...]:
        seq = sequence(PARAMS, verify=rule, kind=Scripted)
        seq.chance = chance
        while len(seq.output) < 2:
            (draft,) = drafter.propose([seq], [Limit(3, 2)])
            drafted[len(draft)] += 1
            if draft.q is not None:
                assert not draft.q[:, 2].any(), "what is not shared is never drawn"
                q = np.array([exact(row) for row in draft.q], dtype=object)
                draft = Draft(draft.tokens, draft.parents, draft.drawn, q, draft.q_row)

            def row(node: int, draft: Draft = draft) -> np.ndarray:
                path = [draft.tokens[above] for above in draft.path(node)]
                return exact(seq.distribution(TARGET[[seq.tokens[-1], *path][-1]], path))

            path, token = verify(draft, row, rule, ExactNoise(chance))
            seq.extend([*(draft.tokens[node] for node in path), token])
        drafter.forget(seq)
        return tuple(seq.output[:2])

    assert law(experiment) == target_law(2, exact)
    assert drafted.total() - drafted[0] > 20


@pytest.mark.parametrize("method", ["intersection", "text"])
@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_with_the_real_noise_it_has_the_law_of_the_target(rule: str, method: str) -> None:
    found: Counter[tuple[int, ...]] = Counter()
    drafter = draft_of_abcd(method)
    for seed in range(400):
        seq = sequence(replace(PARAMS, seed=seed), verify=rule)
        while len(seq.output) < 2:
            (draft,) = drafter.propose([seq], [Limit(2, 2)])

            def row(node: int, seq: Sequence = seq, draft: Draft = draft) -> Tensor:
                path = [draft.tokens[above] for above in draft.path(node)]
                return seq.distribution(TARGET[[seq.tokens[-1], *path][-1]], path)

            path, token = verify(draft, row, rule, seq.noise())
            seq.extend([*(draft.tokens[node] for node in path), token])
        drafter.forget(seq)
        found[tuple(seq.output[:2])] += 1
    assert deviation(found, target_law(2, torch.Tensor.tolist)) < 5


# checkpoints


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random models; the second has other merges, other ids and other special tokens."""
    target = tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")
    specials = ("<s>", "</s>", "<unk>")
    backend = byte_level_backend(OTHER_MERGES, seed=1, specials=specials)
    size = backend.get_vocab_size()
    draft = tiny_checkpoint(tmp_path_factory.mktemp("draft"), "qwen2", seed=4, vocab_size=size + 5)
    backend.save(str(draft / "tokenizer.json"))
    return target, draft


@pytest.mark.parametrize("method", METHODS)
def test_tiny_models_of_two_families(method: str, tiny_pair: tuple[Path, Path]) -> None:
    target, draft = tiny_pair
    plain = dw.load(str(target), dtype="fp32")
    drafted = plain.using(f"cross:{draft}", options={"method": method})
    prompts = ["The cat sat on the mat and", "naïve 😀 one\n\n  two", "a", TEXT]
    for params in ({}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}):
        options = {"raw": True, "max_tokens": 24, "ignore_eos": True, **params}
        alone = [plain.generate(prompt, **options).tokens for prompt in prompts]
        together = drafted.generate(prompts, draft_tokens=4, **options)
        assert [result.tokens for result in together] == alone
        assert drafted.generate(prompts[0], **options).tokens == alone[0]
        assert sum(result.stats.drafted for result in together) > 50
        for rule in ("rejection", "block"):
            results = drafted.generate(prompts, draft_tokens=4, verify=rule, **options)
            assert params or [result.tokens for result in results] == alone


class Shuffled:
    """A model whose ids have other numbers: `own[id]` is the number of `id` in the model that does the work."""

    def __init__(self, model: Model, own: Tensor) -> None:
        self.model, self.own = model, own
        self.config, self.device, self.new_cache = model.config, model.device, model.new_cache

    def forward(self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = ()) -> Hidden:
        tokens_N = self.own[batch.tokens_N]
        return self.model.forward(Batch(tokens_N, batch.positions_N, batch.rows_N, batch.spans, batch.trees), cache, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)[:, self.own]


def shuffled(tokenizer: Tokenizer, backend: Backend, own: Seq[int]) -> Tokenizer:
    """The same tokenizer with its ids renamed."""
    place = {old: new for new, old in enumerate(own)}
    said = json.loads(backend.to_str())
    said["model"]["vocab"] = {word: place[id] for word, id in said["model"]["vocab"].items()}
    for added in said["added_tokens"]:
        added["id"] = place[added["id"]]
    said["post_processor"] = None
    ends = [place[id] for id in tokenizer.eos_tokens]
    return Tokenizer(Backend.from_str(json.dumps(said)), eos_tokens=ends)


def test_a_real_model_under_other_ids_is_nearly_always_accepted(
    smollm2_path: Path, smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwise.checkpoint.gguf_file import read_gguf
    from draftwise.tokenizer.gguf import gguf_backend

    own = torch.randperm(smollm2.size, generator=torch.Generator().manual_seed(0))
    backend = gguf_backend(read_gguf(smollm2_path).metadata, smollm2_path)
    renamed = shuffled(smollm2, backend, own.tolist())

    def build(options: Options, target: Target, source: None) -> CrossDrafter:
        settings = {"vocab": target.vocab, "context": 512, "max_batch": 1, "method": options.method}
        return CrossDrafter(Shuffled(target.model, own), target=smollm2, draft=renamed, **settings)  # type: ignore[arg-type]

    module = ModuleType("renamed.model")
    module.Options, module.build = Options, build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "renamed.model", module)
    plain = dw.load("smollm2", context=512)
    prompt = "The sun rose over the hills, and the village of 12 houses"
    for method, params, least in (("intersection", {}, 0.95), ("intersection", {"temperature": 0.8}, 0.95), ("text", {}, 0.85)):
        drafted = plain.using("renamed.model", options={"method": method})
        options = {"raw": True, "max_tokens": 48, "seed": 1, "ignore_eos": True, **params}
        result = drafted.generate(prompt, draft_tokens=4, **options)
        assert result.tokens == plain.generate(prompt, **options).tokens
        assert result.stats.acceptance_rate > least


def test_options_say_what_they_take() -> None:
    with pytest.raises(ValueError, match="cross's method is 'both'; it must be one of: auto, intersection, text"):
        parse_options("cross", {"method": "both"})
    with pytest.raises(ValueError, match="max_tokens is 0"):
        Options(max_tokens=0)
    with pytest.raises(ValueError, match="min_confidence is 2"):
        Options(min_confidence=2)
    with pytest.raises(ValueError, match="needs a checkpoint: --drafter cross:PATH"):
        dw.load("smollm2", drafter="cross", context=64)


@pytest.mark.lab
def test_smollm2_drafts_for_qwen(lab_model: Callable[[str], Path]) -> None:
    plain = dw.load(str(lab_model("qwen2.5-coder-1.5b")), context=1024)
    prompts = ["Write a Python function that reverses a string.", "Why is the sky blue?", "Say good morning in German."]
    for params in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 1}):
        alone = [plain.generate(prompt, max_tokens=64, **params) for prompt in prompts]
        for options in (*({"method": method} for method in METHODS), {"tree": "dynamic"}):
            drafted = plain.using("cross:smollm2", options=options)
            together = drafted.generate(prompts, max_tokens=64, draft_tokens=4, **params)
            assert [result.tokens for result in together] == [result.tokens for result in alone]
            stats = plain.pool(together)
            print(f"{options}, {params}: {stats.acceptance_rate:.3f} accepted, {stats.tokens_per_step:.2f} tokens a step")
            assert stats.acceptance_rate > 0.15
        auto = plain.using("cross:smollm2").generate(prompts[0], max_tokens=64, **params)
        assert auto.tokens == alone[0].tokens
