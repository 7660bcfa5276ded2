"""The end of a decode step's attention on TPU: output projection, residual, and the router's choice, in one kernel."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.decode_experts_tpu import pack, packed_width
from gspo_jax.kernels.decode_tpu import (
    Stacked,
    blocks,
    divisor,
    in_place,
    layer_bytes,
    normed,
    product,
    vmem_budget,
    vmem_limit,
)

_ROWS = 512
"""Rows of the projection per grid step: 2 MiB of bfloat16 weights of width 2048."""


@struct.dataclass
class Router:
    """A softmax router of all layers, with the norm before it."""

    scale: Float[Array, "L 1 D"]
    weights: Stacked
    """[L, D, E]."""
    k: int = struct.field(pytree_node=False)
    """Experts per token."""
    renormalise: bool = struct.field(pytree_node=False)
    """Make the chosen experts' weights sum to one."""


class RouteLog(NamedTuple):
    """The chosen experts of all layers, most probable first, and the router's log softmax there."""

    experts: Int[Array, "L B K"]
    logprobs: Float[Array, "L B K"]


def _choose(logits: Float[Array, "B E"], k: int) -> tuple[Array, Array]:
    """Return the k highest entries of the log softmax, and where: of equal ones the first, as `jax.lax.top_k`."""
    highest = jnp.max(logits, axis=1, keepdims=True)
    left = logits - highest - jnp.log(jnp.sum(jnp.exp(logits - highest), axis=1, keepdims=True))
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    place = jax.lax.broadcasted_iota(jnp.int32, (logits.shape[0], k), 1)
    ids, found = jnp.zeros(place.shape, jnp.int32), jnp.zeros(place.shape, jnp.float32)
    for i in range(k):
        value = jnp.max(left, axis=1, keepdims=True)
        first = jnp.min(jnp.where(left == value, column, logits.shape[1]), axis=1, keepdims=True)
        ids, found = jnp.where(place == i, first, ids), jnp.where(place == i, value, found)
        left = jnp.where(column == first, -jnp.inf, left)
    return ids, found


def _whole(attended: Any) -> Float[Array, "B D"]:
    """Join what is projected already."""
    parts = [attended[...]] if len(attended.shape) == 2 else [attended[e] for e in range(attended.shape[0])]
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)).astype(jnp.float32)


def _share(attended: Any, o: Stacked, dtype: Any) -> Float[Array, "B D"]:
    """Return the product of this grid step's heads."""
    heads = o.weights.shape[0] // attended.shape[2]
    first = pl.program_id(0) * heads
    rows = [attended[:, first + i, :].astype(dtype) for i in range(heads)]
    return product(jnp.concatenate(rows, axis=1), o)


def _projection_kernel(layer: Any, attended: Any, o: Stacked, out: Any, total: Any) -> None:
    del layer
    j, share = pl.program_id(0), _share(attended, o, out.dtype)
    total[...] = jnp.where(j == 0, share, total[...] + share)
    out[...] = total[...].astype(out.dtype)


def _rows(o: Stacked, B: int, head_dim: int, beside: int) -> int:
    """Return the rows of o per grid step; `beside` is bytes of VMEM per token and column of D."""
    _, inner, D = o.weights.shape
    fixed = 8 * inner * B + beside * B * D
    return divisor(inner, min(_ROWS, (vmem_budget() - fixed) // (o.block_bytes * D)), max(head_dim, 16))


def projection(
    attended: Float[Array, "b H h"], o: Stacked, batch: int, *, layer: Int[Array, ""], dtype: Any, interpret: bool
) -> Float[Array, "B D"]:
    """Return o(attended) of the first `batch` rows, rounded to `dtype`: of a part of the heads, a part of the sum."""
    (_, H, h), (_, inner, D) = attended.shape, o.weights.shape
    rows = _rows(o, batch, h, 4 * dtype.itemsize + 8)
    matrix = o if interpret else in_place(o)[0]
    return pl.pallas_call(
        _projection_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(inner // rows,),
            in_specs=[
                pl.BlockSpec((batch, H, h), lambda *_: (0, 0, 0)),
                blocks(matrix, rows, D, lambda j, layer: ((layer[0],), j, 0)),
            ],
            out_specs=pl.BlockSpec((batch, D), lambda *_: (0, 0)),
            scratch_shapes=[pltpu.VMEM((batch, D), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, D), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit()),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * D * inner,
            bytes_accessed=layer_bytes(o) + 4 * batch * inner + dtype.itemsize * batch * D,
            transcendentals=0,
        ),
        name="decode_projection",
        interpret=interpret,
    )(layer.astype(jnp.int32).reshape(1), attended, matrix)


def _kernel(
    layer: Any,
    attended: Any,
    x: Any,
    y: Any,
    active: Any,
    o: Stacked | None,
    router: tuple[Any, Stacked] | None,
    log: Any,
    stream: Any,
    packed: Any,
    written: Any,
    total: Any,
    *,
    k: int,
    renormalise: bool,
    experts: int,
    eps: float,
) -> None:
    del layer, log
    j, dtype = pl.program_id(0), x.dtype

    @pl.when(j == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total) if o is not None else _whole(attended)

    if o is not None:
        total[...] += _share(attended, o, dtype)

    @pl.when(j == pl.num_programs(0) - 1)
    def _() -> None:
        before = (x[...].astype(jnp.float32) + y[...].astype(jnp.float32)).astype(dtype)
        out = jnp.where(active[...] > 0, total[...], 0.0).astype(dtype)  # an idle slot's attention is undefined
        after = (before.astype(jnp.float32) + out.astype(jnp.float32)).astype(dtype)
        stream[...] = after
        if router is None:
            return
        scale, weights = router
        rows = normed(after.astype(jnp.float32), scale[...], eps).astype(dtype)
        ids, logprobs = _choose(product(rows, weights), k)
        shares = jnp.exp(logprobs)
        if renormalise:
            shares = jnp.exp(logprobs - logprobs[:, :1])
            shares = shares / jnp.sum(shares, axis=1, keepdims=True)
        packed[...] = pack(rows, jnp.where(active[...] > 0, ids, experts), shares, experts)
        written.experts[...] = ids
        written.logprobs[...] = logprobs


def output_and_routes(
    attended: Float[Array, "b H h"] | Float[Array, "B D"] | Float[Array, "E B d"],
    x: Float[Array, "B D"],
    y: Float[Array, "B D"],
    active: Float[Array, "B 1"],
    o: Stacked | None,
    router: Router | None,
    log: RouteLog | None,
    *,
    layer: Int[Array, ""],
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "B D"], Float[Array, "B W"] | None, RouteLog | None]:
    """Return the residual stream x + y + o(attended), rows for the experts (see `pack`), and the log with this layer's.

    Args:
      attended: float32, of values in x's dtype, undefined for idle slots; more rows than x are not read.
      active: 0 for idle slots, else 1.
      o: [L, H · h, D]; None: attended is projected already, maybe in E parts side by side, and defined everywhere.
      router: None: a dense layer, with neither rows nor log.
    """
    (B, D), size = x.shape, x.dtype.itemsize
    steps, rows = 1, 0
    if o is not None:
        rows = _rows(o, B, attended.shape[-1], 8 * size + 16)
        steps = o.weights.shape[1] // rows
    experts = 0 if router is None else router.weights.weights.shape[-1]
    width = 0 if router is None else packed_width(D, router.k, experts)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    def of_layer(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda j, layer: (layer[0], *(0,) * len(shape)))

    beside, own, outs, shapes = None, None, [], []
    if router is not None and log is not None:
        beside = of_layer(1, D), blocks(router.weights, D, experts, lambda j, layer: ((layer[0],), 0, 0))
        own = router.scale, router.weights
        outs = [whole(B, width), jax.tree.map(lambda _: of_layer(B, router.k), log)]
        shapes = [
            jax.ShapeDtypeStruct((B, width), x.dtype),
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), log),
        ]
    o_spec = None if o is None else blocks(o, rows, D, lambda j, layer: ((layer[0],), j, 0))
    inputs = attended, x, y, active, o, own, log
    if not interpret:
        inputs = *inputs[:4], *in_place(*inputs[4:])
    kept = len(jax.tree.leaves(inputs)) - len(jax.tree.leaves(log))
    options = {"k": 0, "renormalise": False} if router is None else {"k": router.k, "renormalise": router.renormalise}
    read = 0 if o is None else layer_bytes(o)
    read += 0 if router is None else layer_bytes(router.weights)
    kernel = functools.partial(_kernel if router is not None else _dense_kernel, **options, experts=experts, eps=eps)
    stream, *routed = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[
                whole(*(attended.shape if o is None else (B, *attended.shape[1:]))),
                whole(B, D),
                whole(B, D),
                whole(B, 1),
                o_spec,
                beside,
                jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), log),
            ],
            out_specs=[whole(B, D), *outs],
            scratch_shapes=[pltpu.VMEM((B, D), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct((B, D), x.dtype), *shapes],
        input_output_aliases={2: 0} | ({} if log is None else {1 + kept: 2, 2 + kept: 3}),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit()),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * D * (steps * rows + experts),
            bytes_accessed=read + attended.size * attended.dtype.itemsize + size * B * (3 * D + width),
            transcendentals=2 * B * experts,
        ),
        name="decode_output",
        interpret=interpret,
    )(layer.astype(jnp.int32).reshape(1), *inputs)
    return (stream, *routed) if routed else (stream, None, None)


def _dense_kernel(
    layer: Any,
    attended: Any,
    x: Any,
    y: Any,
    active: Any,
    o: Any,
    router: None,
    log: None,
    stream: Any,
    total: Any,
    **options: Any,
) -> None:
    _kernel(layer, attended, x, y, active, o, router, log, stream, None, None, total, **options)
