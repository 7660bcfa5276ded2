"""The TPU kernel for attention over prompts and pages, in interpret mode on CPU, matches a float64 oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.kernels import decode_attention_tpu
from gspo_jax.kernels.decode_attention_tpu import Visits, paged_attention
from gspo_jax.kernels.kv import KV, ScaledKV
from gspo_jax.models.cache import stored
from tests.kernels.decode import close
from tests.tiny import mostly_slow

L, B, P, GROUP, WIDTH = 2, 5, 3, 2, 16
"""Layers, slots, prompts, query heads per key head, head dimension."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a cache, and its dtypes."""

    prompt: int
    """Columns of the longest prompt, S."""
    page: int
    """Columns of a page, C."""
    pages: int
    """Pages per slot, W."""
    dtype: str = "float32"
    cache: str | None = None
    columns: int = 1024
    """Columns of a visit."""
    cores: int = 1
    keys: int = 2
    """Key heads."""
    queries: int = 1
    """Tokens per slot, Q."""
    arrays: int = 2
    """1: the keys are the values too."""


def float64(x: KV) -> np.ndarray:
    """Return what the cache stands for."""
    if isinstance(x, ScaledKV):
        return np.asarray(x.values, np.float64) * np.asarray(x.scale, np.float64)[..., None]
    return np.asarray(x, np.float64)


def check(case, monkeypatch, ages, lengths, chosen, fed=None):
    """Compare outputs and pools of layer 1 with the oracle: every live column once, and no live column changed.

    `ages` are those after each slot's last token, of which it feeds `fed`, by default one.
    """
    rng, pages, kv = np.random.default_rng(0), B * case.pages + 3, case.keys
    H, Q = GROUP * kv, case.queries
    fed = np.minimum(1, ages) if fed is None else np.asarray(fed)
    column = case.arrays * kv * (WIDTH + 4 if case.cache else WIDTH * jnp.dtype(case.dtype).itemsize)
    monkeypatch.setattr(decode_attention_tpu, "BLOCK_BYTES", case.columns * column)
    monkeypatch.setattr(decode_attention_tpu, "LANES", 16)
    monkeypatch.setattr(decode_attention_tpu, "cores", lambda: case.cores)

    def draw(*shape):
        return stored(jnp.asarray(rng.standard_normal(shape), case.dtype), case.cache)

    heads = jnp.asarray(rng.standard_normal((H + case.arrays * kv, B * Q, WIDTH)), case.dtype).astype(jnp.float32)
    prompt = tuple(draw(L, P, kv, case.prompt, WIDTH) for _ in range(case.arrays))
    pools = tuple(draw(L, pages, kv, case.page, WIDTH) for _ in range(case.arrays))
    table = rng.permutation(pages)[: B * case.pages].reshape(B, case.pages)
    first = np.asarray(ages) - fed + 1
    steps = np.where(np.arange(Q) < fed[:, None], first[:, None] + np.arange(Q), 0)
    steps, lengths, chosen = (jnp.asarray(x, jnp.int32) for x in (steps, lengths, chosen))

    @jax.jit
    def run(heads, prompt, pools, layer):
        given = prompt[0], lengths, pools[0], jnp.asarray(table, jnp.int32), chosen, steps
        visits = Visits.of(*given, arrays=case.arrays)
        return paged_attention(heads, prompt, pools, visits, layer=layer, dtype=jnp.dtype(case.dtype), interpret=True)

    out, written = run(heads, prompt, pools, jnp.asarray(1))
    assert out.shape == ((B + 1) * Q, H, WIDTH)
    expected, live = [float64(x) for x in pools], np.ones(pages * case.page, bool)
    for b, j in np.argwhere(np.asarray(steps) > 0):
        age = int(steps[b, j])
        at, column = divmod(age - 1, case.page)
        for pool, head in zip(expected, (H, H + kv), strict=False):
            new = heads[head : head + kv, b * Q + j].astype(case.dtype)
            pool[1, table[b, at], :, column] = float64(stored(new, case.cache))
        keys, *_, values = 2 * tuple(
            np.concatenate(
                [float64(x)[1, chosen[b], :, : lengths[chosen[b]]]]
                + [pool[1, table[b, t // case.page], :, t % case.page][:, None] for t in range(age)],
                axis=1,
            )
            for x, pool in zip(prompt, expected, strict=True)
        )
        for head in range(H):
            own = head // GROUP
            scores = keys[own] @ np.asarray(heads[head, b * Q + j], np.float64) / np.sqrt(WIDTH)
            weights = np.exp(scores - scores.max())
            close(out[b * Q + j, head], weights @ values[own] / weights.sum(), case.dtype)
    if Q > 1:  # a second tile is only written: it has no older column
        for b in np.flatnonzero(fed):
            for t in range(ages[b], case.page * case.pages):
                live[table[b, t // case.page] * case.page + t % case.page] = False
    live = live.reshape(pages, case.page)
    for found, pool in zip(written, expected, strict=True):
        found, pool = (np.moveaxis(x, 3, 2)[:, live] for x in (float64(found), pool))
        np.testing.assert_allclose(found, pool, rtol=0, atol=1e-6)


CASES = [
    Case(prompt=5, page=8, pages=3),
    Case(prompt=32, page=8, pages=5, columns=16),
    Case(prompt=32, page=8, pages=5, columns=16, cores=2, keys=1),
    Case(prompt=32, page=8, pages=3, cache="int8", columns=16),
    Case(prompt=32, page=32, pages=3, dtype="bfloat16"),
    Case(prompt=32, page=8, pages=5, columns=16, cores=2, keys=1, arrays=1),
    Case(prompt=32, page=64, pages=2, dtype="bfloat16", cache="int8", columns=32, cores=2, keys=1, arrays=1),
    Case(prompt=32, page=64, pages=2, dtype="bfloat16", cache="int8", columns=32, cores=2, keys=1),
]


@pytest.mark.parametrize("case", mostly_slow(CASES, always=CASES[2:3] + CASES[6:]))
def test_the_kernel_equals_the_oracle(case, monkeypatch):
    """Pages in random order; ages of 0, 1, a whole page, one more, and the limit; prompts of 1 token and of S."""
    limit = case.page * case.pages
    lengths, chosen = [case.prompt, 1, case.prompt - 2], [1, 0, 1, 2, 0]
    check(case, monkeypatch, [1, case.page + 1, 0, limit, case.page], lengths, chosen)


@pytest.mark.parametrize("cores", mostly_slow([1, 2], always=[]))
@pytest.mark.parametrize("age", mostly_slow([0, 9], always=[]))
def test_idle_slots_change_nothing(age, cores, monkeypatch):
    """All slots idle, or all but one: with two cores, one has nothing to do."""
    check(Case(prompt=5, page=8, pages=2, cores=cores), monkeypatch, [0, 0, age, 0, 0], [5, 1, 3], [0, 1, 1, 2, 0])


@pytest.mark.parametrize("cores", [1, 2])
def test_visits_are_the_live_blocks(cores, monkeypatch):
    """Prompts of 20 and 3 columns in blocks of 16, pages of 8 two at a time; the newest column needs no visit.

    By prompt, slots are 1 (prompt 0: 2 blocks; 17 old columns: 2 visits), 3 (2 blocks; none), 0 (prompt 1: 1 block; 8
    columns: 1 visit); slot 2 is idle. The first core takes slots up to the middle of the 8 visits.
    """
    monkeypatch.setattr(decode_attention_tpu, "BLOCK_BYTES", 16 * 2 * 4 * 16)
    monkeypatch.setattr(decode_attention_tpu, "cores", lambda: cores)
    prompts, pool = jnp.zeros((1, 2, 1, 32, 16)), jnp.zeros((1, 9, 1, 8, 16))
    table, ages = jnp.zeros((4, 5), jnp.int32), jnp.asarray([9, 18, 0, 1])
    visits = Visits.of(prompts, jnp.asarray([20, 3]), pool, table, jnp.asarray([1, 0, 1, 0]), ages[:, None])
    assert visits.slot[:8].tolist() == [1, 1, 1, 1, 3, 3, 0, 0]
    assert visits.number[:8].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert visits.begins.tolist() == [0, 4][:cores] and visits.ends.tolist() == [4, 8][-cores:]


SEVERAL = [
    Case(prompt=32, page=8, pages=5, columns=16, queries=4),
    Case(prompt=32, page=8, pages=5, columns=16, cores=2, keys=1, queries=9),
    Case(prompt=32, page=32, pages=3, dtype="bfloat16", queries=3),
    Case(prompt=32, page=64, pages=2, dtype="bfloat16", cache="int8", columns=32, cores=2, keys=1, queries=4),
]


@pytest.mark.parametrize(
    ("begin", "case"),
    mostly_slow(
        [(begin, case) for n, case in enumerate(SEVERAL) for begin in (1, 2 * (n % 2))],
        always=[(1, case) for case in SEVERAL[:1] + SEVERAL[3:]],
    ),
)
def test_several_tokens_of_a_slot(case, begin, monkeypatch):
    """Slots that feed one token, some and all, within a tile, over the end of a tile, and over that of a page."""
    Q, page, limit = case.queries, case.page, case.page * case.pages
    fed = [Q, 1, 0, Q, min(2, Q)]
    ages = [[Q, 1, 0, limit, page], [page + 2, page + 1, 0, page + Q - 1, page + 1], [page, 9, 0, limit - 1, 9]][begin]
    ages = np.maximum(ages, fed)
    check(case, monkeypatch, ages, [case.prompt, 1, case.prompt - 2], [1, 0, 1, 2, 0], fed)
