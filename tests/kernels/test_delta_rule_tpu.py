"""The TPU kernels of the gated delta rule, in interpret mode on CPU, match the float64 recurrence token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import delta_rule as kernel
from gspo_jax.kernels import delta_rule_tpu
from gspo_jax.planning import executed
from gspo_jax.planning.cost_records import KernelCall, OpWork
from gspo_jax.planning.hlo import Array
from gspo_jax.planning.topology import CHIPS
from tests.kernels import test_delta_rule as plain
from tests.kernels.test_packed_attention import spans_of

PACKINGS = {
    "groups": (250, [[(5, [40, 1]), (130, [60])]]),
    "rows, whole chunks, an empty row": (
        600,
        [[(5, [40, 1, 70]), (150, [130, 60]), (2, [1])], [], [(128, [128, 64, 1])], [(600, [])]],
    ),
}
"""As in `test_packed_attention`. Chunks have 128 tokens, of which up to four are a grid step."""
ARGUMENTS = ("q", "k", "v", "g", "beta")


@pytest.fixture
def heads(monkeypatch):
    """Give a function that sets how many key and value heads there are, of 128 columns, and chunks of a grid step.

    The kernels run.
    """
    monkeypatch.setattr(kernel, "platform", lambda: "tpu")
    monkeypatch.setattr(delta_rule_tpu, "delta_rule", partial(delta_rule_tpu.delta_rule, interpret=True))

    def have(keys, values, group=None):
        if group is not None:
            monkeypatch.setattr(delta_rule_tpu, "group_of", lambda *_: group)
        for name, value in (("HK", keys), ("HV", values), ("DK", 128), ("DV", 128)):
            monkeypatch.setattr(plain, name, value)

    return have


@jax.jit
def with_gradients(arrays, spans, do):
    """Return o, the states of the rows' last tokens, and the gradients of o's sum with these weights."""
    out, back, states = jax.vjp(lambda *arrays: kernel.delta_rule(*arrays, spans), *arrays, has_aux=True)
    return out, states, back(do)


def last_states(arrays, texts, rows):
    """Return the state at each row's last token, by the recurrence."""
    found = np.zeros((rows, plain.HV, plain.DK, plain.DV))
    for b, tokens, _ in texts:  # in the order of rows
        found[b] = plain.recurrence(*(a[b, tokens] for a in arrays))[1]
    return found


def test_values_and_end_states_match_the_recurrence(heads):
    """States of any tokens, in order; zeros for no token."""
    heads(1, 1, group=1)
    N, rows = PACKINGS["groups"]
    drawn, texts = plain.draw(1, N), plain.texts_in(rows)
    ends = jnp.asarray([tokens[-1] for _, tokens, _ in texts] + [N + 64], jnp.int32)
    arrays = [jnp.asarray(a, jnp.float32) for a in drawn[:5]]
    out, states = jax.jit(kernel.delta_rule)(*arrays, spans_of(N, rows), ends)
    assert plain.error(out, plain.oracle(drawn, texts)[0]) < 3e-6
    for (_, tokens, _), state in zip(texts, states, strict=False):
        assert plain.error(state, plain.recurrence(*(a[0, tokens] for a in drawn[:5]))[1]) < 3e-6
    assert not np.any(states[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "keys", "values", "dtype"),
    [("rows, whole chunks, an empty row", 2, 2, "float32"), ("groups", 1, 3, "bfloat16")],
)
def test_values_and_slopes_match_the_recurrence(packing, keys, values, dtype, heads):
    """The gradient of each input agrees with the slope of the outputs' weighted sum along a random direction.

    Bfloat16 is rounded on its way out, and float32 beside it to 2^-16.
    """
    heads(keys, values, group=1 if dtype == "bfloat16" else None)
    (N, rows), rng = PACKINGS[packing], np.random.default_rng(1)
    q, k, v, g, beta, *rest, do, _ = plain.draw(len(rows), N)
    given = *(jnp.asarray(a, dtype) for a in (q, k, v)), *(jnp.asarray(a, jnp.float32) for a in (g, beta))
    do, texts = jnp.asarray(do, dtype), plain.texts_in(rows)
    found, states, grads = with_gradients(given, spans_of(N, rows), do)
    arrays, do = [np.asarray(a, np.float64) for a in given], np.asarray(do, np.float64)
    limit = 3e-6 if dtype == "float32" else 4e-3
    assert found.dtype == dtype
    assert plain.error(np.asarray(found, np.float64), plain.oracle([*arrays, *rest], texts)[0]) < limit
    assert plain.error(states, last_states(arrays, texts, len(rows))) < min(limit, 1e-4)

    def loss(at, step):
        moved = [a + step * (n == at) * way for n, (a, way) in enumerate(zip(arrays, ways, strict=True))]
        return float((plain.oracle([*moved, *rest], texts)[0] * do).sum())

    ways = [rng.standard_normal(a.shape) for a in arrays]
    for at, (name, grad, way) in enumerate(zip(ARGUMENTS, grads, ways, strict=True)):
        grad, slope = np.asarray(grad, np.float64), (loss(at, 1e-5) - loss(at, -1e-5)) / 2e-5
        assert abs((grad * way).sum() - slope) < 2 * limit * np.linalg.norm(grad), name


@pytest.mark.slow
def test_equal_keys_are_solved(heads):
    """As in `test_delta_rule`."""
    heads(1, 1)
    q, k, v, g, beta, *_ = plain.draw(1, 128)
    k, g, beta = np.broadcast_to(k[:, :1], k.shape), 0 * g, np.ones_like(beta)
    arrays = [jnp.asarray(a, jnp.float32) for a in (q, k, v, g, beta)]
    o, _ = jax.jit(kernel.delta_rule)(*arrays, spans_of(128, [[(128, [])]]))
    np.testing.assert_allclose(o[0], plain.recurrence(q[0], k[0], v[0], g[0], beta[0])[0], rtol=0, atol=3e-6)


def test_plan_counts_cycles():
    """Four chunks of two value heads, 8 · 3150 cycles of one core."""
    qkv, out = (Array("bf16", (512, heads * 128), 0) for heads in (4, 2))
    call = KernelCall("delta_rule_backward.3", (Array("s32", (13, 4), 0), qkv, out), (qkv,), OpWork(0.0, 5e6))
    found, chip = executed.delta_rule(CHIPS["v5p"])(call), CHIPS["v5p"]
    assert np.isclose(found.flops / chip.flops, 8 * 3150 / chip.clock / chip.cores)
    assert found.bytes == 5e6
