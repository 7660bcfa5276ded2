"""The overlong penalty against numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.errors import UserError
from gspo_jax.training import shaping

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def test_overlong_by_hand():
    # L_max 20, L_cache 4: no penalty up to 16; then (16 - 17)/4, ..., (16 - 20)/4 = -1; -1 beyond.
    penalty = shaping.overlong(np.asarray([0, 15, 16, 17, 18, 19, 20, 21, 500], np.int32), limit=20, cache=4)
    assert penalty.dtype == np.float32
    np.testing.assert_array_equal(penalty, [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1])
    assert not np.signbit(penalty[:3]).any()


def test_a_cache_of_the_whole_limit_counts_every_token():
    np.testing.assert_array_equal(shaping.overlong(np.arange(5), limit=4, cache=4), [0, -0.25, -0.5, -0.75, -1])
    np.testing.assert_array_equal(shaping.overlong(np.arange(5), limit=4, cache=1), [0, 0, 0, 0, -1])


@SETTINGS
@given(st.integers(1, 40_000), st.data())
def test_overlong_is_the_paper_s_three_cases(limit, data):
    cache = data.draw(st.integers(1, limit))
    lengths = data.draw(st.lists(st.integers(0, 2 * limit), min_size=1, max_size=20))
    expected = [0 if n <= limit - cache else ((limit - cache) - n) / cache if n <= limit else -1 for n in lengths]
    np.testing.assert_array_equal(
        shaping.overlong(np.asarray(lengths), limit=limit, cache=cache), np.asarray(expected, np.float32)
    )


@pytest.mark.parametrize("cache", [-1, 0, 21])
def test_a_cache_out_of_range_is_told(cache):
    with pytest.raises(UserError, match=rf"overlong.cache is {cache}; use 1 to 20, the maximum response length"):
        shaping.overlong(np.zeros(1, np.int32), limit=20, cache=cache)
