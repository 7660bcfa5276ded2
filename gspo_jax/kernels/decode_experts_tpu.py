"""The experts of a decode step on TPU: one kernel without a sort, a gather or a buffer of a guessed size.

Tokens stay in VMEM while the held experts' weights pass by, each once. An expert's tokens are picked, and its outputs
returned to them, by one-hot products in parts of 64 rows: rank = mask · triangle, rows = onehot · x, and
y += onehotᵀ · out. An expert with more tokens takes more parts.

Picking is from at most S = 1024 tokens at a time. With tokens of width D, experts of width F and parts of R rows,
picking and returning take 2 · 2·R·S·D flops beside the 3 · 2·R·D·F of the products, 2 S / (3 F) of them: 0.9 for
F = 768. Of 1024, an expert of 128 gets 64 on average at top 8: their products take 0.6 Gflop and picking 0.5 (2.5 µs on
v5p), its weights 9.4 MB (3.4 µs). More tokens than VMEM has room for, 2048 where it is large, are computed in chunks,
which read the weights again. Row DMAs instead of one-hot products would issue two copies per pair and sum float32 rows
in HBM, 16 KB per pair at D = 2048, 1 MB for these 64.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from gspo_jax.kernels.decode_tpu import (
    LANES,
    Stacked,
    blocks,
    cores,
    divisor,
    dot,
    in_place,
    layer_bytes,
    product,
    vmem_budget,
    vmem_limit,
)

PART = 64
"""Rows of an expert computed together."""
CHUNK = 2048
"""Most tokens in VMEM."""
_PICKED = 1024
"""Most tokens that rows are picked from."""
_FEW = 256
"""Up to so many tokens, blocks of weights are kept short: the first is waited for, and picking again costs little."""
_TRIANGLE = 256
"""Columns of the triangle that ranks come from, at a time."""
_FLOPS_PER_BYTE = 200
"""Of a chip: 166 of v5p, 240 of v5e."""
_DIGIT = 256
"""Integers up to this are exact in bfloat16."""


def packed_width(hidden: int, k: int, experts: int) -> int:
    """Return the columns of a packed row."""
    return hidden + LANES * pl.cdiv(k * (1 + _digits(experts)), LANES)


def _digits(experts: int) -> int:
    return 1 if experts <= _DIGIT else 2


def pack(
    x: Float[Array, "B D"], ids: Int[Array, "B K"], weights: Float[Array, "B K"], experts: int
) -> Float[Array, "B W"]:
    """Return rows [x | weights | ids] in x's dtype, for one all-gather, in a kernel or not.

    Ids go up to `experts`, which is none; above 256 they take two digits. Weights are rounded, as experts use them.
    """
    high = [ids // _DIGIT] if _digits(experts) == 2 else []
    low = ids % _DIGIT if high else ids
    beside = [a.astype(jnp.float32) for a in (weights, low, *high)]
    lanes = packed_width(x.shape[1], ids.shape[1], experts) - x.shape[1]
    column = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], lanes), 1)
    out = jnp.zeros((x.shape[0], lanes), jnp.float32)
    for i, a in enumerate(beside):
        for k in range(a.shape[1]):
            out = jnp.where(column == i * a.shape[1] + k, a[:, k : k + 1], out)
    return jnp.concatenate([x, out.astype(x.dtype)], axis=1)


def _kernel(
    layer: Any,
    first: Any,
    visited: Any,
    count: Any,
    packed: Any,
    gate: Stacked,
    up: Stacked,
    down: Stacked,
    out: Any,
    total: Any,
    ranks: Any,
    shares: Any,
    rounded: Any,
    done: Any,
    *,
    k: int,
    experts: int,
    hidden: int,
    part: int,
    by_tokens: bool,
) -> None:
    del layer
    core, c, j, f = (pl.program_id(axis) for axis in range(4))
    number = j if by_tokens else core * pl.num_programs(2) + j
    half, chunk = (0, core * pl.num_programs(1) + c) if by_tokens else (core, c)
    C, dtype = packed.shape[0], packed.dtype
    S = C // _pieces(C)
    pieces = range(0, C, S)

    @pl.when((j == 0) & (f == 0))
    def _() -> None:
        total[...] = jnp.zeros_like(total)
        beside = packed[:, hidden:].astype(jnp.float32)
        ids = beside[:, k : 2 * k]
        ids = ids + _DIGIT * beside[:, 2 * k : 3 * k] if _digits(experts) == 2 else ids
        expert = jax.lax.broadcasted_iota(jnp.int32, shares.shape, 1) + first[0]
        expert = expert.astype(jnp.float32)
        member, share = jnp.zeros(shares.shape, jnp.float32), jnp.zeros(shares.shape, jnp.float32)
        for i in range(k):
            hit = ids[:, i : i + 1] == expert
            member, share = jnp.where(hit, 1.0, member), jnp.where(hit, beside[:, i : i + 1], share)
        shares[...] = share.astype(dtype)
        member = member.astype(jnp.bfloat16)
        wide = divisor(S, _TRIANGLE)
        for piece, start in itertools.product(pieces, range(0, S, wide)):
            here = member[piece : piece + S]
            before, at = (jax.lax.broadcasted_iota(jnp.int32, (S, wide), axis) for axis in (0, 1))
            earlier = dot(here, (before < at + start).astype(jnp.float32).astype(jnp.bfloat16), x_axis=0)
            own = dot(here, (before == at + start).astype(jnp.float32).astype(jnp.bfloat16), x_axis=0)
            ranks[:, pl.ds(piece + start, wide)] = jnp.where(own > 0, earlier, -1.0)

    @pl.when(number < count[0])
    def _() -> None:
        e = visited[number]
        for piece in pieces:
            at = pl.ds(piece, S)
            rank = ranks[pl.ds(e, 1), at]
            rows = jnp.max(rank).astype(jnp.int32) + 1

            def one(i: Any, carry: None, at: Any = at, rank: Array = rank) -> None:
                row = jax.lax.broadcasted_iota(jnp.int32, (part, S), 0) + i * part
                pick = (rank == row.astype(jnp.float32)).astype(jnp.float32).astype(dtype)
                x = dot(pick, packed[at, :hidden]).astype(dtype)
                share = dot(pick, shares[at])
                column = jax.lax.broadcasted_iota(jnp.int32, share.shape, 1)
                share = jnp.sum(jnp.where(column == e, share, 0.0), axis=1, keepdims=True)
                raised = jax.nn.silu(product(x, gate)) * product(x, up) * share
                back = product(raised.astype(dtype), down).astype(dtype)
                total[at] += dot(pick, back, x_axis=0)
                return carry

            jax.lax.fori_loop(0, (rows + part - 1) // part, one, None)

    @pl.when((j == pl.num_programs(2) - 1) & (f == pl.num_programs(3) - 1))
    def _() -> None:
        rows = rounded.shape[1]

        def copy(i: int) -> Any:
            to = out.at[half, pl.ds(chunk * C + i * rows, rows)]
            return pltpu.make_async_copy(rounded.at[i % 2], to, done.at[i % 2])

        for i in range(C // rows):
            if i >= 2:
                copy(i - 2).wait()
            rounded[i % 2] = total[i * rows : (i + 1) * rows].astype(dtype)
            copy(i).start()
        for i in range(max(0, C // rows - 2), C // rows):
            copy(i).wait()


class _Blocks(NamedTuple):
    """How a kernel's work is cut."""

    tokens: int
    """Tokens per chunk."""
    columns: int
    """Columns of F per block of weights."""
    by_tokens: bool
    """True if two cores share the chunks; else they share the experts, and their sums are added."""


def _blocks_of(N: int, W: int, matrices: tuple[Stacked, Stacked, Stacked], size: int, pairs: int) -> _Blocks:
    """Choose the blocks that move the fewest bytes, with picking's flops counted as bytes."""
    _, held, D, F = matrices[0].weights.shape
    lanes, two = LANES * pl.cdiv(held, LANES), cores() == 2 and held % 2 == 0
    per_column = D * sum(m.block_bytes for m in matrices) + 4 * 4 * PART

    def columns(C: int) -> int:
        S, budget = C // _pieces(C), vmem_budget() if C <= _FEW else vmem_limit() * 7 // 8
        held_all_along = size * C * W + 4 * C * D + (4 + size) * C * lanes + 2 * size * _staged(C) * D
        return (budget - held_all_along - 6 * S * divisor(S, _TRIANGLE) - PART * (4 + size) * (2 * D + S)) // per_column

    def blocks(C: int) -> _Blocks:
        return _Blocks(C, divisor(F, columns(C)), two and N // C % 2 == 0)

    def cost(blocks: _Blocks) -> float:
        C, columns, by_tokens = blocks
        picked = pairs * 4 * (C // _pieces(C)) * (F // columns) * D / _FLOPS_PER_BYTE
        sums = 5 * N * D * size if two and not by_tokens else 0  # written twice, packed read twice, added
        return N // C * sum(map(layer_bytes, matrices)) + picked + sums

    chunks = [c for c in range(8, N, 8) if N % c == 0 and c <= CHUNK] + [N] * (N <= CHUNK or N % 8 > 0)
    fitting = [c for c in chunks if columns(c) >= divisor(F, LANES)] or [min(chunks)]
    return min(map(blocks, reversed(fitting)), key=cost)


def _staged(tokens: int) -> int:
    """Return the rows of a chunk that are written at a time."""
    return divisor(tokens, 256, 8) if tokens % 8 == 0 else tokens


def experts_sum(
    packed: Float[Array, "N W"],
    gate: Stacked,
    up: Stacked,
    down: Stacked,
    *,
    layer: Int[Array, ""],
    first: Int[Array, ""] | int,
    k: int,
    experts: int,
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """Return Σ_k w_k · down_e(silu(gate_e x) · up_e x) over each token's experts that are held here.

    The sum is accumulated in float32 and rounded once to x's dtype; each expert's output is rounded to it before. The
    kernel's name ends in the blocks of F and the tokens that rows are picked from.

    Args:
      packed: rows as of `pack`.
      gate, up: [L, E, D, F], of the E experts held here.
      down: [L, E, F, D].
      first: id of the first expert held here.
      k: experts per token, K.
      experts: of the whole layer.
    """
    (N, W), (_, held, D, F), size = packed.shape, gate.weights.shape, packed.dtype.itemsize
    matrices, lanes, pairs = (gate, up, down), LANES * pl.cdiv(held, LANES), -(-N * k * held // experts)
    C, width, by_tokens = _blocks_of(N, W, matrices, size, pairs)
    split = 2 if cores() == 2 and held % 2 == 0 and not by_tokens else 1
    core_chunks, core_experts = (N // C // 2, held) if by_tokens else (N // C, held // split)
    visited, count = _visited(packed, first, held, D, k, experts)
    scalars = [jnp.asarray(x, jnp.int32).reshape(-1) for x in (layer, first, visited, count)]

    def at(core: Any, c: Any, j: Any, f: Any, layer: Any, first: Any, visited: Any, count: Any) -> tuple[Any, Any]:
        del c, first
        n = jnp.minimum(j if by_tokens else core * core_experts + j, jnp.maximum(count[0] - 1, 0))
        return (layer[0], visited[n]), f

    def chunk(core: Any, c: Any) -> Any:
        return core * core_chunks + c if by_tokens else c

    def across(*given: Any) -> tuple[Any, Any, Any]:
        leading, f = at(*given)
        return leading, 0, f

    def along(*given: Any) -> tuple[Any, Any, Any]:
        leading, f = at(*given)
        return leading, f, 0

    if not interpret:
        matrices = in_place(*matrices)
    out = pl.pallas_call(
        functools.partial(_kernel, k=k, experts=experts, hidden=D, part=min(PART, max(8, C)), by_tokens=by_tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores() if by_tokens else split, core_chunks, core_experts, F // width),
            in_specs=[
                pl.BlockSpec((C, W), lambda core, c, *_: (chunk(core, c), 0), pipeline_mode=pl.Buffered(1)),
                *(blocks(m, D, width, across) for m in matrices[:2]),
                blocks(matrices[2], width, D, along),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((C, D), jnp.float32),
                pltpu.VMEM((lanes, C), jnp.float32),
                pltpu.VMEM((C, lanes), packed.dtype),
                pltpu.VMEM((2, _staged(C), D), packed.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((split, N, D), packed.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=pairs * 6 * D * F,
            bytes_accessed=size * N * split * (W + D) + N // C * sum(map(layer_bytes, (gate, up, down))),
            transcendentals=pairs * F,
        ),
        name=f"decode_experts_{F // width}_{C // _pieces(C)}",
        interpret=interpret,
    )(*scalars, packed, *matrices)
    return out[0] if split == 1 else out[0] + out[1]


def _pieces(tokens: int) -> int:
    """Return the parts of a chunk that rows are picked from."""
    return next((n for n in range(pl.cdiv(tokens, _PICKED), tokens) if tokens % (LANES * n) == 0), 1)


def _visited(
    packed: Array, first: Any, held: int, hidden: int, k: int, experts: int
) -> tuple[Shaped[Array, " E"], Any]:
    """List the held experts to visit: all, or where a fifth or more are likely empty, those with tokens."""
    every = jnp.arange(held, dtype=jnp.int32)
    if (1 - k / experts) ** len(packed) < 0.2:
        return every, held
    beside = packed[:, hidden + k : hidden + k * (1 + _digits(experts))].astype(jnp.int32)
    ids = beside[:, :k] + (_DIGIT * beside[:, k:] if _digits(experts) == 2 else 0)
    has = (ids[..., None] == (first + every)[None, None]).any(axis=(0, 1))
    rank = jnp.sum(has[None] & (every[None] < every[:, None]), axis=1)
    order = jnp.sum(jnp.where(has[None] & (rank[None] == every[:, None]), every[None], 0), axis=1)
    return order.astype(jnp.int32), has.sum(dtype=jnp.int32)
