"""The suffix automaton against counting by hand: every stretch, what followed it, how often."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from draftwise.drafters.automaton import NEWEST, NOTHING, START, Automaton, Match

LONGEST = 5


def append(automaton: Automaton, text: list[int], end=START):
    for token in text:
        end = automaton.append(end, token)
    return end


def texts_of(seed: int, vocab: int) -> list[list[int]]:
    chance = random.Random(seed)
    texts = [[chance.randrange(vocab) for _ in range(chance.randrange(1, 40))] for _ in range(chance.choice([1, 4]))]
    return texts + [texts[0][3:] + texts[0][:7], [1] * 23, [0, 1] * 12]


def followers(texts: list[list[int]], stretch: tuple[int, ...]) -> Counter[int]:
    found: Counter[int] = Counter()
    for text in texts:
        for start in range(len(text) - len(stretch)):
            if tuple(text[start : start + len(stretch)]) == stretch:
                found[text[start + len(stretch)]] += 1
    return found


def longest_end(texts: list[list[int]], tokens: list[int]) -> int:
    """Length of the longest end of `tokens` that stands in the texts."""
    for length in range(min(len(tokens), LONGEST), 0, -1):
        wanted = tokens[len(tokens) - length :]
        if any(text[i : i + length] == wanted for text in texts for i in range(len(text))):
            return length
    return 0


@pytest.mark.parametrize("vocab", [2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_every_stretch_is_found_with_what_followed_it(seed, vocab):
    texts = texts_of(seed, vocab)
    automaton = Automaton(LONGEST)
    for text in texts:
        append(automaton, text)
    assert len(automaton) <= 2 * sum(len(text) for text in texts)
    stretches = {
        tuple(text[i : i + n]) for text in texts for i in range(len(text)) for n in range(1, LONGEST + 1) if i + n <= len(text)
    }
    for stretch in stretches:
        match = NOTHING
        for token in stretch:
            match = automaton.follow(match, token)
        assert match.length == len(stretch)
        expected = followers(texts, stretch)
        total, found = automaton.followers(match, NEWEST)
        assert dict(found) == expected and total == expected.total()
        assert [count for _, count in found] == sorted(expected.values(), reverse=True)
        if expected:
            assert automaton.followers(match, 1)[1][0][1] == max(expected.values())
        shorter = automaton.shorter(match)
        assert shorter.length < len(stretch)
        assert shorter == NOTHING or followers(texts, stretch[len(stretch) - shorter.length :]).total() >= expected.total()


@pytest.mark.parametrize("seed", range(8))
def test_a_match_follows_other_text_though_states_are_split_meanwhile(seed):
    chance = random.Random(seed)
    texts: list[list[int]] = []
    automaton = Automaton(LONGEST)
    tokens: list[int] = []
    match = Match()
    for _ in range(12):
        texts.append([chance.randrange(3) for _ in range(chance.randrange(1, 12))])
        append(automaton, texts[-1])
        for _ in range(4):
            tokens.append(chance.randrange(3))
            match = automaton.follow(match, tokens[-1])
            # what was learned since may have made the match longer; it is never longer than that
            assert match.length <= longest_end(texts, tokens)
            stretch = tuple(tokens[len(tokens) - match.length :])
            assert dict(automaton.followers(match, NEWEST)[1]) == followers(texts, stretch)


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_repeated_end_of_a_growing_text(seed):
    chance = random.Random(seed)
    automaton, end, text = Automaton(LONGEST), START, []
    for _ in range(60):
        text.append(chance.randrange(3))
        end = automaton.append(end, text[-1])
        match = automaton.repeated(end)
        assert match.length == longest_end([text[:-1]], text)
        stretch = tuple(text[len(text) - match.length :])
        assert dict(automaton.followers(match, NEWEST)[1]) == followers([text], stretch) or not match.length


def test_going_round_in_circles_stays_cheap():
    automaton = Automaton(LONGEST)
    end = append(automaton, [7] * 3000)
    assert automaton.repeated(end).length == LONGEST
    assert automaton.followers(automaton.repeated(end), 1) == (3000 - LONGEST, [(7, 3000 - LONGEST)])
    assert len(automaton) < 3100


def test_among_equals_the_newest_and_past_many_the_most_frequent():
    automaton = Automaton(LONGEST)
    append(automaton, [1, 2, 1, 3, 1, 4])
    assert automaton.followers(automaton.follow(NOTHING, 1), 2) == (3, [(4, 1), (3, 1)])
    assert automaton.followers(automaton.follow(NOTHING, 1), 1)[1] == [(4, 1)]
    automaton = Automaton(LONGEST)
    append(automaton, [1, 50, 1, 50, *(token for i in range(60) for token in (1, 100 + i))])
    total, found = automaton.followers(automaton.follow(NOTHING, 1), 3)
    assert total == 62 and found == [(50, 2), (159, 1), (158, 1)]
