"""Drafters that need no model: same tokens, what they find, what they keep, and how little room they take."""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftwise.drafters import corpus, find_drafter, parse_options
from draftwise.drafters.averages import Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.chosen import Guess, best_first
from draftwise.drafters.corpus import BORDER, CorpusDrafter, Index, arranged, open_index, texts_of
from draftwise.drafters.keeping import KeptFile
from draftwise.drafters.lookahead import TOKENS, LookaheadDrafter, Pool
from draftwise.drafters.ngram import NgramDrafter
from draftwise.drafters.none import NoDrafter
from draftwise.drafters.recycling import RecyclingDrafter, Table
from draftwise.drafters.suffix import Memory, SuffixDrafter
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Drawn, Limit, Outcome, Request, SamplingParams
from table_model import TableModel, built, engine

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4)
RAGGED = [PROMPT, (7,), (2, 7, 1, 8, 2, 8, 1, 8, 2, 8), (0, 0, 0), tuple(range(20)) * 3]
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_p": 0.95, "seed": 5},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "bad_words": ((1, 2), (9,)),
        "seed": 6,
    },
}


def index_of(*texts: list[int]) -> Index:
    tokens, places = arranged(np.array([token for text in texts for token in (*text, BORDER)], np.uint32))
    return Index(tokens.tobytes(), places)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "suffix": lambda: SuffixDrafter(memory=Memory(4096, 32)),
    "suffix chain": lambda: SuffixDrafter(width=1, max_match=3, max_tokens=5),
    "recycling": lambda: RecyclingDrafter(Table(1000, 12)),
    "recycling single": lambda: RecyclingDrafter(Table(0, 3), width=3, prompt=False),
    "corpus": lambda: CorpusDrafter(index_of([*range(20)] * 3, [2, 8, 1, 8, 2, 8], [*PROMPT]), min_match=1),
    "lookahead": lambda: LookaheadDrafter(),
    "lookahead small": lambda: LookaheadDrafter(window=3, ngram=2, guesses=2, text=False),
}


def run(drafter: Drafter, prompts, *, model=None, verify="match", draft_tokens=None, max_tokens=40, context=512, **params):
    made = engine(model or TableModel(VOCAB), drafter, context=context)
    wanted = draft_tokens if isinstance(draft_tokens, list) else [draft_tokens] * len(prompts)
    return made.generate(
        [
            Request(prompt=prompt, params=SamplingParams(max_tokens=max_tokens, **params), verify=verify, draft_tokens=count)
            for prompt, count in zip(prompts, wanted, strict=True)
        ]
    )


class Silent:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def sequence(tokens, identity: int = 0, **params) -> Sequence:
    return Sequence(
        identity,
        Request(prompt=tuple(tokens), params=SamplingParams(**params)),
        end_tokens=(23,),
        context=9999,
        decoder=Silent(),
    )


def ask(drafter: Drafter, seq: Sequence, nodes: int = 16, depth: int = 16) -> Draft:
    (draft,) = drafter.propose([seq], [Limit(nodes, depth)])
    return draft


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens[node] for node in draft.path(node)) for node in range(len(draft))}


def target(notices: list[str] | None = None, vocabulary: str = "v1") -> Target:
    model = TableModel(VOCAB)
    tokenizer = SimpleNamespace(vocabulary_fingerprint=vocabulary)
    notice = (lambda line: None) if notices is None else notices.append
    return Target(model, model.new_cache(64), tokenizer, VOCAB, 512, 8, notice)


def build(name: str, where: Target, path: Path | None = None, **options) -> Drafter:
    source = DraftSource(str(path)) if path else None
    return find_drafter(name).build(parse_options(name, options), where, source)


# the same tokens


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens_alone_and_in_a_ragged_batch(drafter, sampling):
    params = SAMPLING[sampling]
    plain = plain_tokens(sampling)
    assert run(DRAFTERS[drafter](), [PROMPT], **params)[0].tokens == plain[0]
    for draft_tokens in (None, 1, 5, 63, [0, 7, None, 0, 2]):
        together = run(DRAFTERS[drafter](), RAGGED, draft_tokens=draft_tokens, **params)
        assert [result.tokens for result in together] == plain
        if draft_tokens in (5, 63):
            assert sum(result.stats.drafted for result in together) > 20


@functools.cache
def plain_tokens(sampling):
    return [run(NoDrafter(), [prompt], **SAMPLING[sampling])[0].tokens for prompt in RAGGED]


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_other_rules_say_the_same_when_greedy_and_repeat_themselves_when_not(drafter, verify):
    drafted = run(DRAFTERS[drafter](), RAGGED, verify=verify, draft_tokens=9)
    assert [result.tokens for result in drafted] == plain_tokens("greedy")
    sampled = [run(DRAFTERS[drafter](), RAGGED, verify=verify, draft_tokens=9, temperature=1.0, seed=1) for _ in range(2)]
    assert [result.tokens for result in sampled[0]] == [result.tokens for result in sampled[1]]
    assert all(len(result.tokens) == 40 for result in sampled[0])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_requests_get_the_same_drafts_again(drafter):
    def drafts() -> list[tuple]:
        made = DRAFTERS[drafter]()
        seen = []
        observe = made.observe
        made.observe = lambda seq, outcome: (
            seen.append((seq.id, outcome.draft.tokens, outcome.draft.parents)),
            observe(seq, outcome),
        )
        run(made, RAGGED, draft_tokens=12, temperature=0.7, seed=2)
        return seen

    first = drafts()
    assert first == drafts() and any(tokens for _, tokens, _ in first)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nothing_is_kept_of_a_request_that_ended_and_nothing_drafted_past_a_limit(drafter):
    made = DRAFTERS[drafter]()
    run(made, RAGGED, draft_tokens=8)
    assert not any(value for value in vars(made).values() if isinstance(value, dict))
    seq = sequence(PROMPT * 3)
    for limit in (Limit(0, 0), Limit(5, 0), Limit(0, 5), Limit(1, 1), Limit(7, 2), Limit(2, 7), Limit(63, 63)):
        (draft,) = made.propose([seq], [limit])
        assert len(draft) <= max(limit.nodes, 0) and max(draft.depths(), default=0) <= min(limit.depth, made.max_depth)
        assert set(draft.drawn) <= {Drawn.CHOSEN}
        made.observe(seq, Outcome((), (1,)))
    made.forget(seq)
    made.forget(seq)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_survival_falls_along_the_draft_and_equal_siblings_are_joined(drafter):
    made = DRAFTERS[drafter]()
    seen: list[Draft] = []
    propose = made.propose
    made.propose = lambda seqs, limits: (seen.extend(drafts := propose(seqs, limits)), drafts)[1]
    run(made, RAGGED, draft_tokens=20, temperature=0.5, seed=3)
    for draft in seen:
        places = list(zip(draft.parents, draft.tokens, strict=True))
        assert len(set(places)) == len(places)
        if draft.survival is not None:
            assert list(draft.survival) == sorted(draft.survival, reverse=True)
            assert all(0 < chance < 1 for chance in draft.survival)
    assert any(len(draft) > 3 for draft in seen)


# how often they are right


@pytest.mark.parametrize("drafter", ["suffix", "suffix chain", "recycling", "lookahead"])
def test_a_text_that_repeats_is_mostly_drafted(drafter):
    result = run(DRAFTERS[drafter](), [PROMPT], draft_tokens=40, max_tokens=300)[0]
    assert result.stats.tokens_per_step > 2.5


def test_suffix_says_more_than_prompt_lookup():
    prompts = [tuple(random.Random(seed).choices(range(VOCAB), k=40)) for seed in range(12)]
    for params in ({}, {"temperature": 0.4, "seed": 1}):
        speeds = []
        for drafter in (NgramDrafter(), SuffixDrafter(memory=Memory(4096, 32))):
            results = run(drafter, prompts, draft_tokens=8, max_tokens=80, **params)
            speeds.append(sum(len(result.tokens) for result in results) / sum(result.stats.steps for result in results))
        assert speeds[1] >= speeds[0]


def test_lookahead_finds_what_the_text_never_said():
    """Without the text's own runs, and with a text that hardly repeats: the target guessed in the window what is accepted."""
    params = {"model": TableModel(400, memory=1), "max_tokens": 120, "temperature": 0.4, "seed": 1}
    result = run(LookaheadDrafter(text=False), [PROMPT], draft_tokens=63, **params)[0]
    assert result.stats.tokens_per_step > 1.15
    lookup = run(NgramDrafter(), [PROMPT], draft_tokens=63, **params)[0]
    assert lookup.stats.tokens_per_step < result.stats.tokens_per_step
    assert result.tokens == lookup.tokens


# trees of guesses


def test_the_likeliest_guesses_come_first_and_what_came_of_them_counts():
    after = {"": [("b", 0.6), ("c", 0.3), ("d", 0.05)], "b": [("b", 0.4), ("c", 0.2)], "c": [("c", 0.9)]}

    def expand(path: str) -> list[Guess]:
        return [Guess(ord(letter), "kind", chance, letter) for letter, chance in after.get(path, [])]

    rates = Rates()
    tree = best_first(expand, "", rates, Limit(5, 3), min_chance=0.06)
    assert [chr(token) for token in tree.draft.tokens] == ["b", "c", "c", "c", "b"]
    assert tree.draft.parents == (-1, -1, 1, 2, 0)
    assert tree.draft.survival == pytest.approx((0.6, 0.3, 0.27, 0.243, 0.24))
    for _ in range(40):
        tree.learn([ord("c"), ord("b")], rates)
    again = best_first(expand, "", rates, Limit(5, 3), min_chance=0.06).draft
    assert [chr(token) for token in again.tokens[:1]] == ["c"]
    assert len(best_first(expand, "", Rates(), Limit(5, 1), min_chance=0.06).draft) == 2


# prompt lookup


def test_a_chance_is_what_followed_each_run_corrected_from_the_shortest_to_the_longest():
    """With a doubt of 5: 9 followed the only 2 before; 1 2 stood there too; 7 1 2 did not."""
    draft = ask(NgramDrafter(), sequence([7, 1, 2, 9, 8, 1, 2]), nodes=1)
    assert draft.tokens == (9,) and draft.survival == pytest.approx([(1 + 5 * 1 / 6) / 6])
    assert ask(NgramDrafter(max_ngram=1), sequence([7, 1, 2, 9, 8, 1, 2]), nodes=1).survival == pytest.approx([1 / 6])
    # 3 was followed by 5 twice and by 6 once, but after 2 3 it was 6
    draft = ask(NgramDrafter(), sequence([1, 3, 5, 1, 3, 5, 2, 3, 6, 2, 3]), nodes=1)
    assert draft.tokens == (6,) and draft.survival == pytest.approx([(1 + 5 * 1 / 8) / 6])


def test_of_equally_likely_followers_the_latest_is_proposed():
    assert ask(NgramDrafter(), sequence([1, 5, 1, 6, 1]), nodes=1).tokens == (6,)
    assert ask(NgramDrafter(), sequence([1, 2, 5, 1, 2, 6, 1, 2]), nodes=1).tokens == (6,)


def test_matches_shorter_than_asked_for_are_not_used():
    text = [1, 2, 3, 9, 2, 3]
    assert [len(ask(NgramDrafter(min_ngram=n), sequence(text), nodes=1)) for n in (1, 2, 3)] == [1, 1, 0]
    assert not ask(NgramDrafter(), sequence([1, 2, 3]))


def test_lookup_goes_round_a_loop_and_stops_where_the_next_token_is_not_worth_its_row():
    loop = sequence([5, 6, 7] * 3)
    assert ask(NgramDrafter(max_tokens=9), loop).tokens == (5, 6, 7) * 3
    (draft,) = NgramDrafter().propose([loop], [Limit(16, 16, node_price=0.2)])
    assert 1 <= len(draft) < 16 and all(chance >= 0.2 for chance in draft.survival[:-1])


# suffix


def test_the_most_frequent_follower_comes_first():
    text = [1, 2, 5, 10, 1, 2, 5, 11, 1, 2, 6, 12, 1, 2]
    assert ask(SuffixDrafter(width=1), sequence(text), nodes=1).tokens == (5,)
    assert ask(SuffixDrafter(width=2), sequence(text), nodes=2).tokens == (5, 6)


def test_a_longer_match_makes_a_longer_draft():
    once = list(range(12))
    sizes = [len(ask(SuffixDrafter(width=1, min_chance=0.2), sequence([*once, 20, *once[:n]]))) for n in (1, 2, 4, 6)]
    assert 0 < sizes[0] < sizes[1] < sizes[2]


def test_a_loop_goes_on_as_a_loop():
    assert ask(SuffixDrafter(width=1, max_tokens=9), sequence([5, 6, 7] * 3)).tokens == (5, 6, 7) * 3


def test_a_tree_holds_what_followed_shorter_matches_too():
    draft = ask(SuffixDrafter(width=2), sequence([1, 2, 5, 10, 3, 2, 6, 11, 1, 2]), nodes=2, depth=1)
    assert draft.tokens == (5, 6) and draft.parents == (-1, -1)


def test_past_outputs_are_remembered_and_prompts_are_not():
    drafter = SuffixDrafter(width=1, memory=Memory(100, 32))
    seq = sequence([1, 2, 3, 4, 5], identity=1)
    assert len(ask(drafter, seq)) == 0
    seq.tokens += [10, 11, 12, 13]
    drafter.forget(seq)
    assert ask(drafter, sequence([9, 10, 11], identity=2)).tokens == (12, 13)
    assert len(ask(drafter, sequence([9, 2, 3], identity=3))) == 0


def test_requests_share_the_memory_while_they_run():
    """A second request whose match was made before the first one ended finds what that one said."""
    drafter = SuffixDrafter(width=1, memory=Memory(100, 32))
    first, second = sequence([1], identity=1), sequence([20, 21], identity=2)
    assert len(ask(drafter, second)) == 0
    first.tokens += [21, 22, 21, 23]
    drafter.forget(first)
    second.tokens += [22]
    assert ask(drafter, second, nodes=2).tokens == (21, 23)


@pytest.mark.parametrize("size", [1, 2, 50, 1000])
def test_memory_is_bounded_and_keeps_the_latest(size):
    memory = Memory(size, 8)
    chance = random.Random(1)
    added: list[int] = []
    for _ in range(200):
        text = [chance.randrange(40) for _ in range(chance.randrange(0, 30))]
        memory.add(text)
        added += text
        assert len(memory) <= size
        assert len(memory.automaton) <= 2 * size + 1
        assert len(added) < size or len(memory) >= size // 2 - 60
    kept = memory.arrays()["tokens"].tolist()
    if size == 1000:
        assert added[-len(kept) :] == kept


def test_twenty_thousand_tokens_in_bounded_room_and_drafted_no_worse_at_the_end():
    drafter = SuffixDrafter(memory=Memory(2000, 32))
    made = engine(TableModel(VOCAB, peak=2.0), drafter)
    chance = random.Random(0)
    speeds, said = [], 0
    while said < 20_000:
        requests = [
            Request(
                prompt=tuple(chance.choices(range(VOCAB), k=6)),
                params=SamplingParams(max_tokens=250, temperature=0.3, seed=said + i),
                draft_tokens=8,
            )
            for i in range(8)
        ]
        results = made.generate(requests)
        said += sum(len(result.tokens) for result in results)
        speeds.append(sum(len(result.tokens) for result in results) / sum(result.stats.steps for result in results))
        assert drafter.memory is not None and len(drafter.memory) <= 2000
        assert not drafter._texts
    assert speeds[-1] >= speeds[0]


def test_threads_share_a_memory():
    memory = Memory(3000, 16)
    errors: list[BaseException] = []

    def work(place: int) -> None:
        try:
            drafter = SuffixDrafter(memory=memory, min_chance=0.0)
            chance = random.Random(place)
            for i in range(30):
                seq = sequence(chance.choices(range(12), k=10), identity=i)
                for _ in range(10):
                    draft = ask(drafter, seq)
                    seq.tokens.append(draft.tokens[0] if len(draft) else chance.randrange(12))
                    drafter.observe(seq, Outcome((), (seq.tokens[-1],), draft))
                drafter.forget(seq)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(memory) == 6 * 30 * 10


# what is kept


def fill(drafter: Drafter) -> None:
    run(drafter, RAGGED, draft_tokens=8, temperature=0.5, seed=1)


@pytest.mark.parametrize(("name", "option"), [("suffix", "memory_file"), ("recycling", "table_file")])
def test_what_a_drafter_learned_is_read_by_the_next_one(name, option, tmp_path):
    path = tmp_path / "kept"
    first = build(name, target(), **{option: str(path)})
    fill(first)
    assert not path.exists()
    store = first.memory if name == "suffix" else first.table
    expected = {key: value.tolist() for key, value in store.arrays().items()}
    seqs = [sequence([9, *PROMPT[:3]], identity=100), sequence((2, 8), identity=101)]
    del first
    gc.collect()
    assert path.exists() and [file.name for file in tmp_path.iterdir()] == ["kept"]
    second = build(name, target(), **{option: str(path)})
    store = second.memory if name == "suffix" else second.table
    assert {key: value.tolist() for key, value in store.arrays().items()} == expected
    assert any(len(ask(second, seq)) for seq in seqs)
    assert not any(len(ask(build(name, target()), seq)) for seq in seqs)


@pytest.mark.parametrize(("name", "option"), [("suffix", "memory_file"), ("recycling", "table_file")])
def test_a_file_that_does_not_fit_is_refused(name, option, tmp_path):
    path = tmp_path / "kept"
    drafter = build(name, target(), **{option: str(path)})
    fill(drafter)
    del drafter
    gc.collect()
    with pytest.raises(ValueError, match="another vocabulary"):
        build(name, target(vocabulary="v2"), **{option: str(path)})
    other = {"suffix": "table_file", "recycling": "memory_file"}[name]
    with pytest.raises(ValueError, match=f"kept by the drafter {name}"):
        build({"suffix": "recycling", "recycling": "suffix"}[name], target(), **{other: str(path)})
    for content in (b"", b"nothing of the kind", path.read_bytes()[:200]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a file that a drafter kept"):
            build(name, target(), **{option: str(path)})
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3))
    with pytest.raises(ValueError, match="not a file that a drafter kept"):
        build(name, target(), **{option: str(tmp_path / "other.npz")})
    with pytest.raises(ValueError, match="its folder does not exist"):
        build(name, target(), **{option: str(tmp_path / "nowhere" / "kept")})


def test_a_file_that_cannot_be_written_is_said_and_ends_nothing(tmp_path):
    notices: list[str] = []
    (tmp_path / "folder").mkdir()
    KeptFile(tmp_path / "folder", "suffix", "v1", notices.append).write({"tokens": np.zeros(3)})
    assert len(notices) == 1 and "could not be written" in notices[0]


def test_a_drafter_at_work_writes_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("draftwise.drafters.keeping.EVERY", 0.0)
    path = tmp_path / "kept"
    drafter = build("suffix", target(), memory_file=str(path))
    run(drafter, [PROMPT], draft_tokens=4)
    assert path.exists()


# recycling


def rows(*best: tuple[int, ...]) -> torch.Tensor:
    logits = torch.full((len(best), VOCAB), -9.0)
    for row, tokens in enumerate(best):
        for place, token in enumerate(tokens):
            logits[row, token] = 5.0 - 3 * place
    return logits


def test_rejected_rows_teach_and_the_accepted_path_counts_most():
    drafter = RecyclingDrafter(Table(100, 4), width=2, min_chance=0.0, prompt=False)
    seq = sequence([1, 2])
    assert len(ask(drafter, seq)) == 0
    seq.tokens += [3]
    drafter.observe(seq, Outcome((1, 2), (3,), logits=lambda: rows((3, 7))))
    assert not paths(ask(drafter, seq)), "nothing is known after 3"
    # 5 was drafted and rejected, 4 accepted, then 6 emitted
    draft = Draft((5, 4), (-1, -1), (Drawn.CHOSEN,) * 2)
    seq.tokens += [4, 6]
    drafter.observe(seq, Outcome((3, 4), (4, 6), draft, (1,), logits=lambda: rows((4, 5), (11, 12), (6, 13))))
    later = sequence([8, 5], identity=1)
    assert {(11,), (12,)} <= paths(ask(drafter, later)), "after the rejected 5, from the table of single tokens"
    later = sequence([3, 4], identity=2)
    assert ask(drafter, later).tokens[:1] == (6,)


def test_the_same_pair_twice_in_a_pass_is_blended_in_a_fixed_order():
    table = Table(100, 4)
    drafter = RecyclingDrafter(table, prompt=False)
    seq = sequence([1, 2])
    seq.tokens += [2]
    # the pair (2, 2) comes three times: rejected, rejected, accepted
    draft = Draft((2, 2, 2), (-1, 0, 1), (Drawn.CHOSEN,) * 3)
    outcome = Outcome((2,), (2,), draft, (0,), logits=lambda: rows((2,), (7,), (8,), (9,)))
    drafter.observe(seq, outcome)
    assert [token for token, _ in table.after_two[2, 2]][:1] == [7], "the accepted one came last"


def test_the_table_is_bounded_and_drops_the_oldest_pair():
    table = Table(3, 2)
    for token in range(10):
        table.put((token, 1), ((token, 1.0),))
    assert list(table.after_two) == [(7, 1), (8, 1), (9, 1)]
    assert len(table.after_one[1]) == 2
    restored = Table(2, 2)
    restored.restore(table.arrays())
    assert list(restored.after_two) == [(8, 1), (9, 1)]
    assert len(Table(0, 2).after_two) == 0


def test_a_prompt_is_used_for_its_own_request_only():
    drafter = RecyclingDrafter(Table(100, 4))
    assert (7,) in paths(ask(drafter, sequence([5, 6, 7, 5, 6], identity=0)))
    assert len(ask(drafter, sequence([5, 6], identity=1))) == 0


# corpus


@pytest.mark.parametrize("seed", range(6))
def test_the_index_finds_every_stretch_and_what_follows(seed):
    chance = random.Random(seed)
    texts = [[chance.randrange(4) for _ in range(chance.randrange(1, 60))] for _ in range(3)]
    index = index_of(*texts)
    for _ in range(60):
        stretch = [chance.randrange(4) for _ in range(chance.randrange(1, 6))]
        following = []
        for text in texts:
            for place in range(len(text) - len(stretch) + 1):
                if text[place : place + len(stretch)] == stretch:
                    following.append(([*text, BORDER, BORDER][place + len(stretch) :])[:2])
        ranks = index.find(stretch)
        assert len(ranks) == len(following)
        found = index.continuations(ranks, len(stretch), 2)
        known = [row[:1] if row[0] == BORDER else row for row in found]  # past a border another text begins
        assert known == sorted(known)
        assert sorted(row[:1] for row in found) == sorted(row[:1] for row in following)
        text = [9, 9, *stretch]
        length, ranks = index.longest(text, 1)
        assert ranks == (index.find(text[len(text) - length :]) if ranks else range(0))
        assert not index.find(text[len(text) - length - 1 :])


def test_frequent_continuations_are_drafted_first_and_no_border_is():
    index = index_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2, 3, 4], [1, 2])
    draft = ask(CorpusDrafter(index, min_chance=0.0, width=9), sequence([9, 1, 2]))
    assert paths(draft) == {(3,), (6,), (3, 4), (3, 5)}
    assert draft.tokens[:2] == (3, 4)
    assert len(ask(CorpusDrafter(index), sequence([2, 9]))) == 0
    assert len(ask(CorpusDrafter(index, min_match=3), sequence([9, 1, 2]))) == 0
    assert len(ask(CorpusDrafter(index, min_match=2), sequence([1]))) == 0


def test_many_continuations_are_sampled_over_their_whole_order():
    index = index_of(*([1, 2, token] for token in range(3, 23) for _ in range(20)))
    draft = ask(CorpusDrafter(index, width=30, min_chance=0.0), sequence([1, 2]), nodes=63, depth=1)
    assert len(draft) == 16 or set(draft.tokens) == set(range(3, 23))
    assert len(set(draft.tokens)) == len(draft) > 10


class Letters:
    """A tokenizer of one token a character."""

    vocabulary_fingerprint = "letters"

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, special: bool, around: bool) -> list[int]:
        assert not special and not around
        self.encoded.append(text)
        return [ord(letter) for letter in text]


def test_a_corpus_is_encoded_once_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 8)
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    (folder / "deep").mkdir()
    (folder / "a.txt").write_text("the cat sat\non the mat\n")
    (folder / "deep" / "b.md").write_text("the cat ran")
    (folder / "deep" / "empty").write_text("")
    (folder / ".git" / "c.txt").write_text("hidden")
    (folder / "d.bin").write_bytes(b"\0\1\2")
    (folder / "e.latin").write_bytes(b"caf\xe9")
    cache = tmp_path / "cache"
    notices: list[str] = []
    tokenizer = Letters()
    index = open_index(folder, tokenizer, cache, notices.append)
    assert tokenizer.encoded == ["the cat sat\n", "on the mat\n", "the cat ran"]
    assert len(index.find([ord(letter) for letter in "the cat "])) == 2
    assert len(notices) == 2
    again = Letters()
    same = open_index(folder, again, cache, notices.append)
    assert not again.encoded and len(same) == len(index) == len("the cat sat\non the mat\nthe cat ran") + 2
    moved = folder.rename(tmp_path / "moved")
    open_index(moved, again, cache, notices.append)
    assert not again.encoded
    (moved / "a.txt").write_text("the cow")
    changed = open_index(moved, again, cache, notices.append)
    assert again.encoded and len(changed.find([ord(letter) for letter in "the c"])) == 2
    assert not list(cache.glob("*.part"))


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    (tmp_path / "text").write_text("one two one two")
    index = open_index(tmp_path / "text", Letters(), tmp_path / "cache", lambda line: None)
    assert len(index.find([ord(letter) for letter in "one "])) == 2


def test_what_is_no_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        texts_of(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        texts_of(tmp_path / "binary")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "empty" / "file"):
        (tmp_path / "empty" / "file").touch()
        with pytest.raises(ValueError, match="holds no text"):
            open_index(path, Letters(), tmp_path, lambda line: None)
    with pytest.raises(ValueError, match="needs a text: --drafter corpus:PATH"):
        build("corpus", target())


def test_a_corpus_drafter_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "text").write_text("to be or not to be")
    model = TableModel(128)
    made = build(
        "corpus", Target(model, model.new_cache(64), Letters(), 128, 512, 8, lambda line: None), tmp_path / "text", width=1
    )
    draft = ask(made, sequence([ord(letter) for letter in "or not "]), nodes=4)
    assert "".join(map(chr, draft.tokens)) == "to b"


# lookahead


def test_the_window_and_the_runs_are_one_tree():
    drafter = LookaheadDrafter(window=3, ngram=4, guesses=2, text=False)
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    draft = ask(drafter, seq, 63, 63)
    # columns begin at thirds of the text; the first one's level 0 is the last token itself
    assert paths(draft) == {(2,), (2, 3), (4,), (4, 5), (4, 5, 6), (4, 7), (4, 7, 8), (4, 7, 8, 9)}
    assert draft.survival is None, "taken whole or not at all"
    index = {tuple(draft.tokens[n] for n in draft.path(node)): node for node in range(len(draft))}
    logits = torch.full((1 + len(draft), VOCAB), -1.0)
    for path, guess in (((2, 3), 10), ((4, 5, 6), 11), ((4, 7, 8, 9), 12)):
        logits[1 + index[path], guess] = 1.0
    seq.tokens.append(2)
    drafter.observe(seq, Outcome((9,), (2,), draft, (), logits=lambda: logits))
    again = ask(drafter, seq, 63, 63)
    # one level up; nothing is known under 2 yet
    assert paths(again) == {(3,), (3, 10), (5,), (5, 6), (5, 6, 11), (5, 8), (5, 8, 9), (5, 8, 9, 12)}
    seq.tokens.append(4)
    drafter.observe(seq, Outcome((2,), (4,)))
    assert {(5,), (5, 6), (5, 6, 11)} <= paths(ask(drafter, seq, 63, 63)), "the run found under 4"
    seq.tokens.append(9)
    assert (2, 3, 10) in paths(ask(drafter, seq, 63, 63)), "and the one found under 9"


def test_a_window_that_was_not_verified_stays():
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=1, text=False)
    seq = sequence([1, 2, 3, 4])
    before = paths(ask(drafter, seq, 63, 63))
    drafter.observe(seq, Outcome((4,), (5,), NO_DRAFT, logits=lambda: torch.zeros(1, VOCAB)))
    assert paths(ask(drafter, seq, 63, 63)) == before


def test_no_end_token_enters_the_window():
    drafter = LookaheadDrafter(window=1, ngram=3, guesses=1, text=False)
    seq = sequence([1, 2, 3])
    draft = ask(drafter, seq)
    assert paths(draft) == {(2,)}
    logits = torch.zeros(2, VOCAB)
    logits[1, 23] = 1.0
    seq.tokens.append(7)
    drafter.observe(seq, Outcome((3,), (7,), draft, logits=lambda: logits))
    assert paths(ask(drafter, seq)) == {(1,)}
    seq.tokens.append(3)
    assert (2, 23) in paths(ask(drafter, seq)), "as the last of a run it may well be right"


def test_a_pool_is_bounded_and_gives_the_latest_first():
    pool = Pool(2)
    for run_of in ((1,), (2,), (1,), (3,)):
        pool.put(9, run_of)
    assert list(pool.get(9)) == [(3,), (1,)]
    for token in range(TOKENS + 50):
        pool.put(token + 100, (1,))
    assert list(pool.get(9)) == [] and list(pool.get(149)) == [] and list(pool.get(150)) == [(1,)]


# options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("suffix", {"width": 0}, "suffix's width is 0"),
        ("suffix", {"min_chance": 1.0}, "suffix's min_chance is 1.0"),
        ("suffix", {"memory_tokens": -1}, "suffix's memory_tokens is -1"),
        ("suffix", {"memory_tokens": 0, "memory_file": "x"}, "nothing to keep"),
        ("recycling", {"max_depth": 0}, "recycling's max_depth is 0"),
        ("recycling", {"min_chance": -0.1}, "recycling's min_chance is -0.1"),
        ("recycling", {"pairs": -1}, "recycling's pairs is -1"),
        ("corpus", {"max_match": 1, "min_match": 2}, "corpus's max_match is 1, below min_match 2"),
        ("corpus", {"width": 0}, "corpus's width is 0"),
        ("corpus", {"min_chance": 2.0}, "corpus's min_chance is 2.0"),
        ("lookahead", {"ngram": 1}, "lookahead's ngram is 1; it must be at least 2"),
        ("lookahead", {"window": 0}, "lookahead's window is 0"),
        ("lookahead", {"guesses": 0}, "lookahead's guesses is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        parse_options(name, options)


def test_drafters_by_name_need_no_more_than_their_file():
    plain = run(NoDrafter(), [PROMPT])[0].tokens
    for name in ("suffix", "recycling", "lookahead"):
        model = TableModel(VOCAB)
        assert run(built(name, model, model.new_cache(64)), [PROMPT], draft_tokens=9)[0].tokens == plain
