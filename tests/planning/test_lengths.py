"""Length distributions: what they draw, and what is refused."""

import math

import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.lengths import Lengths


def draw(text, *, limit, count=200_000, seed=0):
    return Lengths(text, limit, "--new_tokens").draw(count, np.random.default_rng(seed))


def test_uniform():
    """Every whole number from 2 to 7, both included; the first draws are those of earlier versions."""
    lengths = draw("uniform:2:7", limit=8)
    assert lengths.dtype == np.int32 and np.array_equal(np.bincount(lengths).nonzero()[0], range(2, 8))
    assert np.bincount(lengths)[2:].std() < 0.01 * len(lengths)
    np.testing.assert_array_equal(lengths, np.random.default_rng(0).integers(2, 8, len(lengths)))


def test_lognormal_has_its_mean_before_the_cut():
    lengths = draw("lognormal:4096:0.8", limit=10**8)
    assert lengths.mean() == pytest.approx(4096, rel=0.01)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.01)
    assert np.median(lengths) == pytest.approx(4096 * math.exp(-0.32), rel=0.01)


def test_lognormal_is_cut_at_the_limit_and_at_one_token():
    """P(X > 15872) = P(z > (ln(15872 / 4096) + 0.32) / 0.8) = P(z > 2.093) = 1.82% of responses have the limit."""
    lengths = draw("lognormal:4096:0.8", limit=15872)
    assert lengths.max() == 15872 and np.mean(lengths == 15872) == pytest.approx(0.0182, abs=0.001)
    assert draw("lognormal:1:2", limit=10, count=1000).min() == 1
    assert set(draw("lognormal:300:0", limit=1000, count=10)) == {300}


def test_the_same_seed_draws_the_same():
    np.testing.assert_array_equal(draw("lognormal:100:0.8", limit=512), draw("lognormal:100:0.8", limit=512))
    assert not np.array_equal(draw("lognormal:100:0.8", limit=512), draw("lognormal:100:0.8", limit=512, seed=1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("normal:1:2", "--lengths is 'normal:1:2'; write it as uniform:16:128 or lognormal:32:0.8"),
        ("uniform:16", "write it as uniform:16:128"),
        ("uniform:1.5:16", "write it as uniform:16:128"),
        ("uniform:16:129", "uniform:16:129 does not lie in 1 to 128, which is --new_tokens"),
        ("uniform:0:8", "does not lie in 1 to 128"),
        ("lognormal:many:0.8", "needs a mean of at least 1 and a σ of at least 0"),
        ("lognormal:0:0.8", "needs a mean of at least 1"),
        ("lognormal:64:-1", "needs a mean of at least 1 and a σ of at least 0"),
        ("lognormal:64:nan", "needs a mean of at least 1 and a σ of at least 0"),
    ],
)
def test_refusals(text, says):
    with pytest.raises(UserError, match=says) as caught:
        Lengths(text, 128, "--new_tokens")
    assert "\n" not in str(caught.value)
