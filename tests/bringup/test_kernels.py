"""The stage that checks kernels: all are right here, and each planted fault is named, with no other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from gspo_jax import doctor
from gspo_jax.bringup import decode_kernels, device_operations, expert_kernels, kernels, token_kernels
from gspo_jax.bringup.exactness import Draw, Exact, deviation, limit
from gspo_jax.bringup.stages import FAILED, OK
from gspo_jax.kernels import grouped_matmul
from gspo_jax.models import moe
from gspo_jax.rollout import draws

CHEAP = ("grouped matmul of a layer", "weighted*", "router", "cumsum", "draws", "donation")


def said(finding):
    return f"{finding.check}: {finding.found}"


@pytest.fixture
def cheap(monkeypatch):
    """Give a function that tries a few kernels as XLA computes them, and returns what failed."""
    monkeypatch.setattr(kernels, "ways", lambda kernel: [kernels.Way(kernels.KERNEL)])
    monkeypatch.setattr(doctor, "CPU_DRAWS", 256)
    monkeypatch.setattr(draws, "VOCABULARY", 64 * 128)

    def failed():
        found, figures = kernels.tried(only=CHEAP)
        assert len({outcome["kernel"] for outcome in figures["outcomes"]}) == 4
        states = [finding.state for finding in found]
        assert states == sorted(states)  # "failed" before "ok"
        return [said(finding) for finding in found if finding.state == FAILED]

    return failed


def test_all_are_right(cheap):
    assert cheap() == []


@pytest.mark.slow
def test_every_kernel_is_right():
    """XLA's and, interpreted, the TPU's."""
    found, figures = kernels.tried()
    assert [said(finding) for finding in found if finding.state != OK] == []
    assert {outcome["way"] for outcome in figures["outcomes"]} == {kernels.KERNEL, kernels.INTERPRETED}
    assert "router on other devices: right on 7" in [said(finding) for finding in found]


def planted(monkeypatch):
    """Have the first 1% too much where one group has most rows, and not all."""
    right = grouped_matmul._products

    def wrong(rows, weights, group_sizes, likely):
        most, every = group_sizes.max(), group_sizes.sum()
        factor = jnp.where((10 * most > 3 * every) & (most < every), 1.01, 1.0)
        return tuple(
            (y.astype(jnp.float32) * factor).astype(y.dtype) for y in right(rows, weights, group_sizes, likely)
        )

    monkeypatch.setattr(grouped_matmul, "_products", wrong)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_matmul_that_is_wrong_by_1_percent_on_skewed_loads(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "ways", lambda kernel: [kernels.Way(kernels.KERNEL)])
    planted(monkeypatch)
    size = expert_kernels.SMALL._replace(dtype=dtype)
    (outcomes,) = kernels.check([expert_kernels.grouped(size)], jax.devices()[0])
    assert [outcome.load for outcome in outcomes if not outcome.right] == ["skewed"]
    (finding,) = kernels.judge(outcomes)
    assert finding.state == FAILED and finding.remedy
    assert re.fullmatch(
        r"grouped matmul, skewed load: wrong by 1(\.\d)?% \(at most 0\.\d+%\), (first|second) product", said(finding)
    )


def test_a_choice_that_ranks_equal_experts_otherwise(cheap, monkeypatch):
    def last_first(every, k):
        ids = every.shape[-1] - 1 - jax.lax.top_k(every[..., ::-1], k)[1]
        return jnp.take_along_axis(every, ids, axis=-1), ids

    monkeypatch.setattr(moe, "_top", last_first)
    (found,) = cheap()
    assert re.fullmatch(r"router, ties load: wrong by \d+% \(at most 0\), experts", found)


def test_draws_that_favour_some_ids(cheap, monkeypatch):
    right = draws.draw

    def biased(*given):
        drawn = right(*given)
        return drawn._replace(tokens=jnp.where(drawn.tokens % 2 == 0, drawn.tokens // 2, drawn.tokens))

    monkeypatch.setattr(draws, "draw", biased)
    (found,) = cheap()
    assert found.startswith("draws: 256 draws of 8,192 equally likely tokens: p ")


def test_a_kernel_that_raises(cheap, monkeypatch):
    def raises(*_):
        raise RuntimeError("no memory left\nfor that")

    monkeypatch.setattr(expert_kernels, "weighted_sum", raises)
    assert cheap() == ["weighted sums of rows, random load: RuntimeError: no memory left"]


def test_a_cache_that_is_written_elsewhere(cheap, monkeypatch):
    class Numpy:
        def __getattr__(self, name):
            return getattr(jnp, name)

        def arange(self, n):
            return jnp.arange(n).at[3].set(4)

    monkeypatch.setattr(device_operations, "jnp", Numpy())
    (found,) = cheap()
    assert re.fullmatch(
        r"donation: \d+ of 262144 entries of a donated cache are wrong after 64 updates in place", found
    )


def test_deviations():
    """One row of three, wrong in two entries of four by 5 where the row has norm 10 and largest entry 8."""
    exact = np.array([[6.0, 8, 0, 0], [1, 1, 1, np.nan], [-np.inf, 3, 4, 0]])
    found = exact.copy()
    assert deviation(found, Exact(exact)) == 0
    found[1, 3] = 7
    assert deviation(found, Exact(exact)) == 0
    found[0, 2:] = 3, 4
    assert deviation(found, Exact(exact)) == 0.5
    assert deviation(found, Exact(exact, scale=np.array([50.0, 0, 0]))) == 0.1
    found[2, 0] = -1e30
    assert deviation(found, Exact(exact)) == np.inf
    assert deviation(np.array([1, 2, 3, 4]), Exact(np.array([1, 2, 4, 4]))) == 0.25
    with pytest.raises(ValueError, match=r"shape \(3,\) instead of \(4,\)"):
        deviation(np.zeros(3), Exact(np.zeros(4)))


def test_limits():
    """Of one rounding to bfloat16 in the root mean square, and below 1% of twelve."""
    x = Draw("limits", jnp.float32).rng.standard_normal((8, 4096))
    rounded = x.astype(jnp.bfloat16)
    assert 0.5 * limit(jnp.bfloat16, 1) < deviation(rounded, Exact(x)) < limit(jnp.bfloat16, 1)
    assert limit(jnp.bfloat16, 12) < 0.01


@pytest.mark.slow
def test_every_kernel_lowers_for_a_tpu():
    """In the sizes of a large model. tests/kernels compiles them."""
    device = AbstractDevice("TPU v5e", 1, "tpu")
    mesh = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=device)
    for room in (expert_kernels, token_kernels, decode_kernels, device_operations):
        for kernel in room.kernels(small=False):
            shapes = jax.eval_shape(lambda x: x, next(iter(kernel.loads.values()))())
            with jax.sharding.use_abstract_mesh(mesh):
                text = jax.jit(kernel.run).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
            assert ("tpu_custom_call" in text) == (room is not device_operations), kernel.name
