"""The store of earlier responses: what it returns, forgets and saves, and that a run's tokens do not depend on it."""

import numpy as np
import pytest

from gspo_jax.rollout.history import History
from gspo_jax.types import Prompts


def add(history, prompts, responses, width=9):
    """Add responses to prompts, lists of tokens."""

    def padded(rows, width):
        found = np.full((len(rows), width), 77, np.int32)
        for row, own in zip(found, rows, strict=True):
            row[: len(own)] = own
        return found, np.array(list(map(len, rows)), np.int32)

    history.add(*padded(prompts, 5), *padded(responses, width))


def of(history, *prompts):
    """Return the responses kept for prompts, as lists."""
    tokens = np.zeros((len(prompts), 7), np.int32)
    for row, own in zip(tokens, prompts, strict=True):
        row[: len(own)] = own
    found = history.of(Prompts(tokens, np.array(list(map(len, prompts)), np.int32)))
    return [
        [row[:length].tolist() for row, length in zip(*both, strict=True) if length]
        for both in zip(found.tokens, found.lengths, strict=True)
    ]


def test_the_newest_responses_to_each_prompt_are_kept():
    history = History(9, rows=2)
    assert of(history, [1], [1, 2]) == [[], []]
    add(history, [[1], [1], [1], [1, 2]], [[5], [6, 6], [7], [8]])
    assert of(history, [1], [1, 2], [2]) == [[[5], [6, 6]], [[8]], []]
    add(history, [[1]], [[9, 9, 9]])
    assert of(history, [1], [1, 2]) == [[[9, 9, 9]], [[8]]], "a new epoch's replace those of the last"


def test_it_forgets_the_prompts_answered_longest_ago():
    history = History(9, tokens=6)
    add(history, [[1], [2], [3]], [[5, 5], [6, 6], [7, 7]])
    add(history, [[1]], [[4, 4]])
    add(history, [[9]], [[8]])
    assert of(history, [1], [2], [3], [9]) == [[[4, 4]], [], [[7, 7]], [[8]]]


@pytest.mark.parametrize("length", [9, 2])
def test_a_saved_store_is_the_same(length):
    """Into a run with a lower limit of tokens, responses come cut."""
    history, again = History(9), History(length)
    add(history, [[1], [2, 3], [1]], [[5, 5, 6], [7], [4] * 9])
    again.restore(history.to_arrays())
    assert of(again, [1], [2, 3]) == [[[5, 5, 6][:length], [4] * min(9, length)], [[7]]]
    if length == 9:
        for name, array in history.to_arrays().items():
            np.testing.assert_array_equal(again.to_arrays()[name], array)
    empty = History(9)
    empty.restore(History(9).to_arrays())
    empty.restore({})
    assert len(empty) == 0
