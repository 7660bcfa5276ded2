"""Decode attention of slots over their own tokens on TPU, reading the ring KV cache in place.

Unlike a loop over segments, the kernel prefetches the next block of columns, and writes only the result.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.kv import KV, head_bytes, parts

_MASKED = -1e30
_LANES = 128
_BLOCK_BYTES = 2**20
"""Bytes of keys, and of values, per grid step: enough to hide its overhead."""


def block_columns(size: int, column_bytes: int, *, scaled: bool = False) -> int:
    """Return the columns per block: the largest divisor of `size` in whole tiles within `_BLOCK_BYTES`.

    Scales have columns on lanes, which makes tiles wider.
    """
    fitting = (c for c in range(size, 0, -1) if size % c == 0 and c * column_bytes <= _BLOCK_BYTES)
    return next((c for c in fitting if c == size or c % (_LANES if scaled else 16) == 0), size)


def _kernel(
    layer_ref: Any,
    step_ref: Any,
    first_ref: Any,
    begins_ref: Any,
    ages_ref: Any,
    *refs: Any,
) -> None:
    del layer_ref, begins_ref
    q_ref, k_ref, v_ref, *scales, out_ref, highest_ref, total_ref = refs
    heads, columns = k_ref.shape[:2]
    age, i = ages_ref[pl.program_id(0)], pl.program_id(1)

    @pl.when(i == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)
        highest_ref[...] = jnp.full_like(highest_ref, _MASKED / 10)
        total_ref[...] = jnp.zeros_like(total_ref)

    start = step_ref[0] - (first_ref[0] + i) * columns

    @pl.when(start - (columns - 1) < age)
    def _() -> None:
        ago = start - jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        seen = (ago >= 0) & (ago < age)
        for head in range(heads):
            q = q_ref[head]
            k, v = (ref[head].astype(q.dtype) for ref in (k_ref, v_ref))
            scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            scores = scores * scales[0][pl.ds(head, 1)] if scales else scores
            scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, _MASKED)
            before = highest_ref[head][:, :1]
            highest = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            probs, scale = jnp.exp(scores - highest), jnp.exp(before - highest)
            weights = probs * scales[1][pl.ds(head, 1)] if scales else probs
            new = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            out_ref[head] = out_ref[head] * scale + new
            highest_ref[head] = jnp.broadcast_to(highest, highest_ref.shape[1:])
            total_ref[head] = total_ref[head] * scale + probs.sum(axis=1, keepdims=True)


def ring_softmax(
    q: Float[Array, "B Kv g h"],
    k: KV,
    v: KV,
    *,
    layer: Int[Array, ""],
    step: Int[Array, ""],
    ages: Int[Array, " B"],
    interpret: bool = False,
) -> tuple[Float[Array, "B Kv g h"], Float[Array, "B Kv g 1"], Float[Array, "B Kv g 1"]]:
    """Return the softmax of one layer's queries over each slot's newest `ages` columns of a ring.

    The outputs are Σ exp(score − highest) · value, the highest score, and Σ exp(score − highest), all float32. Keys and
    values are [L, N, R, Kv, C, h] with R >= B. The newest column is `step` modulo N·C.
    """
    (B, Kv, g, h), (N, C) = q.shape, (k.shape[1], k.shape[4])
    (keys, key_scale), (values, value_scale) = parts(k), parts(v)
    scales = [scale for scale in (key_scale, value_scale) if scale is not None]
    if not interpret:  # else the compiler may copy all layers' scales to VMEM in every call
        scales = [pltpu.with_memory_space_constraint(scale, pltpu.HBM) for scale in scales]
    column_bytes = Kv * head_bytes(h, keys.dtype, scaled=bool(scales))
    columns = block_columns(C, column_bytes, scaled=bool(scales))
    per_segment = C // columns
    # Block numbers count up like steps: a block being overwritten is visited under its old and its new number, with
    # different columns visible.
    newest = step // columns
    begins = jnp.minimum(jnp.maximum(step + 1 - ages, 0) // columns, newest)
    first = begins.min()

    def slot(b: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return b, 0, 0, 0

    def block(b: Any, i: Any, layer: Any, step: Any, first: Any, begins: Any, ages: Any) -> tuple[Any, ...]:
        # Steps before a slot's first block map to it: it is prefetched, and fetched once.
        at = jnp.maximum(first[0] + i, begins[b]) % (N * per_segment)
        return layer[0], at // per_segment, b, 0, at % per_segment, 0

    ring_spec = pl.BlockSpec((None, None, None, Kv, columns, h), block)
    scale_spec = pl.BlockSpec((None, None, None, Kv, columns), lambda *at: block(*at)[:-1])
    slot_spec = pl.BlockSpec((None, Kv, g, h), slot)
    sums_spec = pl.BlockSpec((None, Kv, g, _LANES), slot)
    sums = jax.ShapeDtypeStruct((B, Kv, g, _LANES), jnp.float32)
    scalars = (x.astype(jnp.int32).reshape(-1) for x in (layer, step, first, begins, ages))
    out, highest, total = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(B, newest - first + 1),
            in_specs=[slot_spec, ring_spec, ring_spec, *[scale_spec] * len(scales)],
            out_specs=[slot_spec, sums_spec, sums_spec],
        ),
        out_shape=[jax.ShapeDtypeStruct((B, Kv, g, h), jnp.float32), sums, sums],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * Kv * g * N * C * h,
            transcendentals=B * Kv * g * N * C,
            bytes_accessed=2 * B * N * C * column_bytes,
        ),
        name="ring_softmax",
        interpret=interpret,
    )(*scalars, q, keys, values, *scales)
    return out, highest[..., :1], total[..., :1]
