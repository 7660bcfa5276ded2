"""Prefixes in rows: every token is where the decoder looks for it, and sees its prompt and what comes before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.rollout import prefixes
from gspo_jax.rollout.prefixes import Prefix, few, pack
from gspo_jax.types import Prompts


def packed(lengths, heads, *, size, shards, limit, random):
    """Return random prompts and prefixes of these lengths, and their packing."""
    prompts = Prompts(random.integers(1, 100, (len(heads), max(heads))).astype(np.int32), np.array(heads, np.int32))
    prefix = Prefix(random.integers(100, 200, (len(lengths), limit)).astype(np.int32), np.array(lengths, np.int32))
    assert len(lengths) == size * len(heads)
    return prompts, prefix, pack(prompts, prefix, shards=shards, limit=limit)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_every_token_sees_its_prompt_and_those_before_it(data):
    shards, size, groups = (data.draw(st.integers(1, n)) for n in (3, 4, 3))
    heads = data.draw(st.lists(st.integers(1, 40), min_size=shards * groups, max_size=shards * groups))
    count = len(heads) * size
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 5, 300, 700, 999]), min_size=count, max_size=count))
    prompts, prefix, found = packed(
        lengths, heads, size=size, shards=shards, limit=1000, random=np.random.default_rng(0)
    )
    rows, spans = len(found.tokens) // shards, found.spans
    claimed = np.zeros(found.tokens.shape, int)
    for i, n in enumerate(lengths):
        if not n:
            continue
        row, start = i // (count // shards) * rows + found.row[i], found.start[i]
        own, prompt = slice(start, start + n), i // size
        np.testing.assert_array_equal(found.tokens[row, own], prefix.tokens[i, :n])
        claimed[row, own] += 1
        assert (spans.own_start[row, own] == start).all()
        first, end = spans.prompt_start[row, start], spans.prompt_end[row, start]
        assert (spans.prompt_start[row, own] == first).all() and (spans.prompt_end[row, own] == end).all()
        np.testing.assert_array_equal(found.tokens[row, first:end], prompts.tokens[prompt, : heads[prompt]])
        assert (spans.own_start[row, first:end] == first).all()
        np.testing.assert_array_equal(spans.positions[row, first:end], np.arange(heads[prompt]))
        np.testing.assert_array_equal(spans.positions[row, own], heads[prompt] + np.arange(n))
        claimed[row, first:end] = 1
    np.testing.assert_array_equal(claimed, np.asarray(spans.valid))


def test_rows_are_few_and_full():
    """Log-normal prefixes of half of 64 responses to 16 prompts: at most a tenth of the rows is padding."""
    random = np.random.default_rng(1)
    lengths = np.where(random.random(64) < 0.5, np.clip(np.exp(random.normal(6, 0.8, 64)), 1, 4000), 0).astype(int)
    groups = np.arange(64) // 4
    (places,), rows, width = prefixes.place(lengths, np.full(64, 100), groups, shards=1, longest=4100)
    used = max(at.row for at in places.values()) + 1
    needed = lengths.sum() + 100 * len(set(groups[lengths > 0]))
    assert rows == few(used) and needed <= used * width <= max(1.1 * needed, needed + width)


@pytest.mark.parametrize(("rows", "want"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 6), (7, 8), (9, 12), (13, 16)])
def test_the_number_of_rows_takes_few_values(rows, want):
    assert few(rows) == want


def test_one_row_is_as_long_as_it_has_to_be():
    *_, found = packed([3, 0, 4, 0], [2, 2], size=2, shards=1, limit=1000, random=np.random.default_rng(0))
    assert found.tokens.shape == (1, 256)
    *_, found = packed([0, 0, 0, 0], [2, 2], size=2, shards=2, limit=5000, random=np.random.default_rng(0))
    assert found.tokens.shape == (2, 1251) and not np.asarray(found.spans.valid).any()
