"""Expert loads of routers with preferences, against counts of other code and by hand."""

import numpy as np
import pytest

from gspo_jax import commands
from gspo_jax.planning import loads
from gspo_jax.planning.loads import Loads


def test_the_hottest_expert_of_a_layer():
    """Of 128 experts with a mean of 8192 pairs, with a spread of 0.25: exp(0.25 · 2.6 − 0.03) ≈ 1.9 times."""
    for skew, low, high in ((0.0, 1.02, 1.04), (0.25, 1.75, 2.05)):
        drawn = loads.draw(2**20, 128, 1, skew=skew).pairs[:, 0]
        assert (drawn.sum(axis=1) == 2**20).all()
        assert low < (drawn.max(axis=1) / 8192).mean() < high


@pytest.mark.parametrize(("skew", "least", "most"), [(0.0, 0.02, 0.09), (0.25, 0.75, 0.95), (0.5, 1.0, 1.9)])
def test_overfull_buffers_of_a_decode_step(skew, least, most):
    """16 slots on each of 32 shards, 128 pairs each, and room for 160: an independent count found some shard overfull.

    In 5% of the layers without preferences, in 85% with a spread of 0.25, in all with 0.5.
    """
    assert least <= loads.draw(128, 128, 32, skew=skew).passes(160) <= most


def test_passes_and_parts_by_hand():
    """Two layers, two shards of three experts each. Of 10 pairs in the first layer the second shard is busiest.

    In buffers of 4 its 7 go 4 and 3; in the second layer the first shard's 4 fit.
    """
    drawn = Loads(np.array([[[1, 1, 1], [3, 0, 4]], [[2, 2, 0], [1, 0, 2]]]))
    assert drawn.busiest.tolist() == [[3, 0, 4], [2, 2, 0]]
    assert drawn.passes(4) == 0.5 and drawn.passes(7) == 0 and drawn.passes(2) == (3 + 1) / 2
    assert drawn.parts(2) == ((2 + 0 + 2) + (1 + 1)) / 2 and drawn.parts(64) == (3 + 2) / 2
    assert drawn.part(4, first=True).tolist() == [[3, 0, 1], [2, 2, 0]]
    assert drawn.part(4, first=False).tolist() == [[0, 0, 3]]
    assert drawn.part(7, first=False).shape == (0, 3)


def test_the_default_of_the_flag():
    (skew,) = (flag for flag in commands.COMMANDS["plan"].flags if flag.name == "skew")
    assert skew.default == loads.SKEW
