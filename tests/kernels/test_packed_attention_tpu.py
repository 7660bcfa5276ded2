"""The TPU kernels over packed rows, in interpret mode on CPU, match the dense oracle and visit what is seen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from gspo_jax.kernels import packed_attention, packed_attention_tpu
from gspo_jax.parallel import mesh as mesh_lib
from tests.kernels.test_packed_attention import draw, oracle, seen_by, spans_of, with_gradients
from tests.tiny import mostly_slow

PACKINGS = {
    "groups, padding, an empty row": (400, [[(5, [90, 30]), (40, [150])], [], [(70, [1] * 5), (30, [40])]]),
    "one full text": (384, [[(384, [])]]),
    "blocks line up": (640, [[(128, [128, 256]), (0, [128])]]),
    "a prompt of several blocks": (600, [[(300, [20, 190, 65]), (1, [2, 1])]]),
    "shorter than a block": (7, [[(2, [1, 3])], [(1, [])]]),
}
"""Tokens per row, and of each row its groups: the prompt's length and the responses'. Blocks have 128 tokens."""
QUICK = ("groups, padding, an empty row", "blocks line up")
interpreted = partial(packed_attention_tpu.attention, interpret=True)


def close(ours, theirs, spans):
    """Compare the output and the gradients; the output of padding needs only be finite."""
    valid = np.asarray(spans.valid)[:, :, None, None]
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert np.isfinite(np.asarray(a, np.float64)).all()
        a = np.where(valid | (n > 0), np.asarray(a, np.float64), 0)
        tolerance = 2e-6 if ours[n].dtype == jnp.float32 else 2e-2  # bfloat16 rounds probabilities and their gradients
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


@pytest.mark.parametrize(
    ("packing", "dtype"),
    [
        *((packing, jnp.float32) for packing in QUICK),
        *(pytest.param(packing, jnp.float32, marks=pytest.mark.slow) for packing in PACKINGS if packing not in QUICK),
        *(pytest.param(packing, jnp.bfloat16, marks=pytest.mark.slow) for packing in QUICK),
    ],
)
def test_equals_the_dense_oracle(packing, dtype):
    spans = spans_of(*PACKINGS[packing])
    arrays = draw(spans, dtype=dtype)
    close(with_gradients(*arrays, spans, attend=interpreted), oracle(*arrays, spans), spans)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"),
    mostly_slow([(4, 1, 8), (2, 2, 8), (16, 1, 128)], always=[(4, 1, 8)]),
    ids=["two groups of query heads read a key head", "a query head each", "whole lanes"],
)
def test_every_number_of_heads(heads, kv_heads, width):
    spans = spans_of(*PACKINGS["groups, padding, an empty row"])
    arrays = draw(spans, heads, kv_heads, width)
    close(with_gradients(*arrays, spans, attend=interpreted), oracle(*arrays, spans), spans)


@pytest.mark.parametrize("dtype", mostly_slow([jnp.float32, jnp.bfloat16], always=[]))
def test_the_longest_blocks(dtype):
    """256 tokens in float32, 512 in bfloat16, whose queries are several chunks."""
    spans = spans_of(1536, [[(100, [700, 300]), (30, [350])]])
    assert (
        packed_attention_tpu.block_length(1536, jnp.dtype(dtype).itemsize)
        == {2: 512, 4: 256}[jnp.dtype(dtype).itemsize]
    )
    arrays = draw(spans, 2, 1, dtype=dtype)
    close(with_gradients(*arrays, spans, attend=interpreted), oracle(*arrays, spans), spans)


def test_sums_in_hbm_are_free_of_races():
    """Visits of the same keys follow each other directly; the interpreter raises on a race of copies and accesses."""
    spans = spans_of(300, [[(20, [250])]])
    arrays = draw(spans, 2, 1)
    attend = partial(packed_attention_tpu.attention, interpret=pltpu.InterpretParams(detect_races=True))
    close(with_gradients(*arrays, spans, attend=attend), oracle(*arrays, spans), spans)


def test_every_shard_of_a_mesh_has_its_own_rows_and_heads(monkeypatch):
    monkeypatch.setattr(packed_attention, "platform", lambda: "tpu")
    monkeypatch.setattr(packed_attention_tpu, "attention", interpreted)
    spans = spans_of(130, [[(5, [90, 30])], [(40, [50])]])
    arrays = draw(spans)
    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    attend = jax.shard_map(
        partial(with_gradients, attend=packed_attention.packed_attention),
        in_specs=(heads, heads, heads, heads, rows),
        out_specs=heads,
        check_vma=False,
    )
    with jax.set_mesh(mesh_lib.make_mesh({"data": 2, "expert": 2, "tensor": 2})):
        close(jax.jit(attend)(*arrays, spans), oracle(*arrays, spans), spans)


def random_rows(seed):
    """Return the groups of three rows of at most 640 tokens; many boundaries are those of blocks of 16 tokens."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(3):
        lengths = rng.integers(0, 50, 12)
        lengths = np.where(rng.random(12) < 0.5, -(-lengths // 16) * 16, lengths)
        rows.append([(lengths[n], [m for m in lengths[n + 1 : n + 1 + rng.integers(0, 4)] if m]) for n in (0, 4, 8)])
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_visits_are_the_blocks_that_are_seen(seed):
    """Once each, known to be full where they are, else with the parts that are seen; NumPy counts the same parts.

    Padding has one visit per block of queries.
    """
    rows, tokens, block = random_rows(seed), 640, 16
    part = block // (1 + seed % 2)
    spans, blocks, n = spans_of(tokens, rows), tokens // block, block // part
    ends = jnp.stack([x + jnp.arange(len(rows))[:, None] * tokens for x in spans]).reshape(3, -1)
    visits, count = packed_attention_tpu._visits(ends, tokens, block, part, interpret=True)
    found = [tuple(int(x) for x in visit) for visit in np.stack(visits, axis=1)[: int(count[0])]]
    pairs = seen_by(spans).reshape(len(rows), blocks, n, part, blocks, n, part).sum(axis=(3, 6))
    expected = {}
    for b, i, j in np.argwhere(pairs.sum(axis=(2, 4))):
        own = pairs[b, i, :, j]
        bits = sum(1 << (a * n + c) for a, c in np.argwhere(own))
        expected[b * blocks + i, b * blocks + j] = packed_attention_tpu._FULL if own.sum() == block**2 else bits
    for b, i in np.argwhere(~pairs.any(axis=(2, 3, 4))):
        expected[(b * blocks + i,) * 2] = packed_attention_tpu._EMPTY
    assert {visit[:2]: visit[2] for visit in found} == expected
    assert len(found) == len(expected)
    assert [visit[:2] for visit in found] == sorted(expected), "by query; a block's own keys come last"
    assert packed_attention_tpu.visited_blocks(*(np.asarray(x) for x in spans), block=part) == (pairs > 0).sum()


@pytest.mark.parametrize("packing", mostly_slow(PACKINGS, always=["a prompt of several blocks"]))
def test_parts_equal_the_dense_oracle(packing, monkeypatch):
    """Blocks of 128 tokens in parts of 64."""
    monkeypatch.setattr(packed_attention_tpu, "_PART", 64)
    spans = spans_of(*PACKINGS[packing])
    arrays = draw(spans)
    close(with_gradients(*arrays, spans, attend=interpreted), oracle(*arrays, spans), spans)


def test_work_follows_what_is_seen():
    """A prompt and eight responses of one block each: one block for the prompt, two for every response."""
    spans = (np.asarray(x) for x in spans_of(16 * 512, [[(512, [512] * 8)]]))
    assert packed_attention_tpu.visited_blocks(*spans, block=512) == 1 + 8 * 2


@pytest.mark.parametrize(
    ("tokens", "itemsize", "block"), [(16384, 2, 512), (4608, 2, 512), (4096, 4, 256), (768, 2, 256), (300, 2, 128)]
)
def test_blocks_lengthen_a_row_by_an_eighth_at_most(tokens, itemsize, block):
    assert packed_attention_tpu.block_length(tokens, itemsize) == block


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "together"),
    [(8, 4, 128, 8), (8, 1, 128, 4), (16, 2, 128, 8), (1, 1, 128, 1), (12, 2, 256, 3), (3, 1, 2048, 1)],
)
def test_query_heads_of_a_visit_fit_and_leave_work_for_two_cores(heads, kv_heads, width, together):
    assert packed_attention_tpu._heads_per_visit(heads, kv_heads, width) == together
