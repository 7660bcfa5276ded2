"""Attention over packed rows on TPU: Pallas kernels for forward and backward.

Both run over visits, the pairs of a query block and a key block where any query sees any key. The list is made on the
device, since spans are data. A visit serves all query heads of a key head: it loads keys and makes the mask once.
Scores are transposed, queries along lanes: maxima and sums over keys are element-wise.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.backend import unchecked

_LANES = 128
_MASKED = -1e30
"""Masked score. Finite, so that outputs without visible keys are too."""
_EMPTY, _FULL = 0, -1
"""Kinds of visits: padding queries, all pairs seen. Others have a bit for each part with some pairs seen."""
_BLOCKS = (512, 256)
"""Candidate block lengths, else 128."""
_PART = 256
"""Queries, and keys, of a block's parts, which are left out if no pair is seen. The forward pass has scores of one part
of the queries at a time: fewer spill less, but keep the matrix units less busy."""
_HEADS = 8
"""Maximum query heads of 128 columns per visit: blocks of 512 bfloat16 tokens fit the VMEM that the compiler grants."""
_QUERY_BYTES, _KEY_BYTES = 20, 32
"""VMEM of a column of a token in the backward pass: of each query head, and of keys, values and their float32 sums."""


class _Visits(NamedTuple):
    """Block pairs, ordered by query block. Each query block ends with its own key block.

    A block of padding has one visit, which zeroes its outputs.
    """

    query: Int[Array, " V"]
    key: Int[Array, " V"]
    kind: Int[Array, " V"]
    """`_EMPTY`, `_FULL`, or the parts to compute: bit a · n + c for the a-th of n parts of queries and c-th of keys."""


def _visits_kernel(
    first: Any, last: Any, query: Any, key: Any, kind: Any, count: Any, *, block: int, part: int
) -> None:
    """`first` and `last` are the spans of each part's first and last token."""
    n = block // part

    def ranges(begin: Array, size: int) -> tuple[Array, Array, Array, Array]:
        """Return whether the token at `begin` is none of padding, and the blocks of this size that it sees.

        They are [0] up to [1], of its prompt, and from [2] on.
        """
        start, end, own = (first[r, begin // part] for r in range(3))
        some = own <= begin
        prompts = jnp.where(some & (start < end), (end - 1) // size + 1, 0)
        return some, start // size, prompts, jnp.where(some, jnp.maximum(own // size, prompts), begin // size)

    def one(i: Array, v: Array) -> Array:
        start, end, _ = (first[r, i * n] for r in range(3))
        last_start, last_end, last_own = (last[r, i * n + n - 1] for r in range(3))
        some, of_prompt, prompts, of_own = ranges(i * block, block)
        parts = [ranges(i * block + a * part, part) for a in range(n)]
        # Whether the last query is a response's, and the first of the same group.
        prompted = last_start < last_end
        one_group = prompted & (((last_start == start) & (last_end == end)) | (last_start == first[2, i * n]))
        # A response directly after its prompt sees one range.
        joined = jnp.where(prompted & (last_end == last_own), last_start, last_own)

        def write(j: Array, v: Array) -> Array:
            whole = (joined <= j * block) | (one_group & (last_start <= j * block) & ((j + 1) * block <= last_end))
            bits = jnp.int32(0)
            for a, (real, begin, past, since) in enumerate(parts):
                for c in range(n):
                    at = j * n + c
                    needed = real & (((begin <= at) & (at < past)) | ((since <= at) & (at <= i * n + a)))
                    bits += jnp.where(needed, 1 << (a * n + c), 0)
            query[v], key[v] = i, j
            kind[v] = jnp.where(some, jnp.where(whole & (j < i), _FULL, bits), _EMPTY)
            return v + 1

        v = jax.lax.fori_loop(of_prompt, prompts, write, v)
        return jax.lax.fori_loop(of_own, i + 1, write, v)

    count[0] = jax.lax.fori_loop(0, first.shape[1] // n, one, jnp.int32(0))


@functools.partial(jax.jit, static_argnames=("row", "block", "part", "interpret"))
def _visits(
    spans: Int[Array, "3 M"], row: int, block: int, part: int, *, interpret: Any
) -> tuple[_Visits, Int[Array, " 1"]]:
    """Return the visits of rows of `row` tokens, and their number.

    Jitted to be traced once, for identical kernels in forward and backward.
    """
    blocks = row // block
    room = spans.shape[1] // row * (blocks * (blocks + 1) // 2)
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    run = pl.pallas_call(
        functools.partial(_visits_kernel, block=block, part=part),
        out_shape=(*[jax.ShapeDtypeStruct((room,), jnp.int32)] * 3, jax.ShapeDtypeStruct((1,), jnp.int32)),
        in_specs=(scalars,) * 2,
        out_specs=(scalars,) * 4,
        interpret=interpret,
        name="packed_visits",
    )
    *visits, count = unchecked(run, spans[:, ::part], spans[:, part - 1 :: part])
    return _Visits(*visits), count


def block_length(tokens: int, itemsize: int) -> int:
    """Return the longest block that pads a row by at most an eighth and fits VMEM."""
    fitting = (b for b in _BLOCKS if b * itemsize <= _BLOCKS[0] * 2 and -tokens % b <= tokens // 8)
    return next(fitting, _LANES)


def part_length(block: int) -> int:
    """Return the queries, and keys, of a block's parts."""
    return min(block, _PART)


def visited_blocks(
    prompt_start: Int[np.ndarray, "B N"],
    prompt_end: Int[np.ndarray, "B N"],
    own_start: Int[np.ndarray, "B N"],
    *,
    block: int,
) -> int:
    """Return how many pairs of blocks, or of blocks' parts, are computed, in forward as in backward.

    Each has block² scores per query head.
    """
    start, end, own = (x[:, ::block] for x in (prompt_start, prompt_end, own_start))
    i = np.arange(own.shape[1])[None]
    begin, past = (np.where(start < end, x, 0) for x in (start // block, (end - 1) // block + 1))
    visits = past - begin + i + 1 - np.maximum(own // block, past)
    return int(visits[own <= i * block].sum())


def _mask(spans: Any, part: Any, query: Array, key: Array) -> Array:
    """Return the mask to add to a part's scores, [keys, queries], whose first query and key these are."""
    start, end, own = (spans[n : n + 1, part] for n in range(3))
    keys = key + jax.lax.broadcasted_iota(jnp.int32, (part.size, part.size), 0)
    queries = query + jax.lax.broadcasted_iota(jnp.int32, (1, part.size), 1)
    seen = ((keys >= start) & (keys < end)) | ((keys >= own) & (keys <= queries))
    return jnp.where(seen, 0, _MASKED)


def _dot(a: Array, b: Array, a_over: int, b_over: int) -> Array:
    """Contract one dimension of each, in float32."""
    dimensions = (((a_over,), (b_over,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _lanes(head: int, width: int) -> Any:
    return pl.ds(head * width, width)


def _begins(query: Any, n: Array) -> Array:
    return (n == 0) | (query[jnp.maximum(n - 1, 0)] != query[n])


def _for_parts(
    kind: Array, block: int, visit: Callable[[Any, Any], None], between: Callable[[], None] | None = None
) -> None:
    """Call visit(queries, keys) for the parts of a block that are seen, and `between` after those of its first queries.

    Not for visits that see all pairs.
    """
    part = part_length(block)
    slices = [pl.ds(at, part) for at in range(0, block, part)]
    for a, c in itertools.product(range(len(slices)), repeat=2):
        bit = 1 << (a * len(slices) + c)
        pl.when((kind != _FULL) & ((kind & bit) != 0))(functools.partial(visit, slices[a], slices[c]))
        if between is not None and (a, c) == (0, len(slices) - 1):
            pl.when((kind != _FULL) & (kind != _EMPTY))(between)


def _forward_kernel(
    query: Any,
    key: Any,
    kind: Any,
    spans: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    log_sum: Any,
    totals: Any,
    highest: Any,
    sums: Any,
    mask: Any,
    *,
    scale: float,
) -> None:
    """The log-sum-exp has base 2."""
    n = pl.program_id(1)
    i, j = query[n], key[n]
    (heads, width, _), block = totals.shape, len(k)

    @pl.when(_begins(query, n))
    def _() -> None:
        totals[...] = jnp.zeros_like(totals)
        highest[...] = jnp.full_like(highest, _MASKED)
        sums[...] = jnp.zeros_like(sums)

    def visit(part: Any, keys: Any, masked: bool = True) -> None:
        if masked:
            mask[...] = _mask(spans, part, i * block + part.start, j * block + keys.start)
        for head in range(heads):
            row = pl.ds(head, 1)
            scores = _dot(k[keys, :], q[part, _lanes(head, width)], 1, 1) * (scale * math.log2(math.e))
            if masked:
                scores += mask[...]
            before = highest[row, part]
            now = jnp.maximum(before, scores.max(axis=0, keepdims=True))
            probs, kept = jnp.exp2(scores - now), jnp.exp2(before - now)
            highest[row, part] = now
            sums[row, part] = sums[row, part] * kept + probs.sum(axis=0, keepdims=True)
            totals[head, :, part] = totals[head, :, part] * kept + _dot(v[keys, :], probs.astype(v.dtype), 0, 0)

    @pl.when(kind[n] == _FULL)
    def _() -> None:
        for at in range(0, block, part_length(block)):
            visit(pl.ds(at, part_length(block)), pl.ds(0, block), masked=False)

    _for_parts(kind[n], block, visit)

    @pl.when(i == j)
    def _() -> None:
        weight = jnp.maximum(sums[...], 1e-30)
        log_sum[...] = highest[...] + jnp.log2(weight)
        for head in range(heads):
            mean = totals[head] / weight[head : head + 1]
            out[:, _lanes(head, width)] = mean.T.astype(out.dtype)


def _backward_kernel(
    query: Any,
    key: Any,
    kind: Any,
    spans: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    grads: Any,
    log_sum: Any,
    dq: Any,
    d_keys: Any,
    totals: Any,
    delta: Any,
    sums: Any,
    before: Any,
    mask: Any,
    arrived: Any,
    left: Any,
    *,
    scale: float,
) -> None:
    """Add up dk / scale and dv in HBM, in float32.

    Sums leave for HBM while the next visit computes. That visit waits for them before it fetches its own key block's
    sums, which may be the same.
    """
    head_k, n = pl.program_id(0), pl.program_id(1)
    i, j, slot = query[n], key[n], n % 2
    (heads, width, _), block = totals.shape, len(k)

    def in_hbm(j: Array) -> Any:
        return d_keys.at[head_k, :, pl.ds(j * block, block)]

    def store(slot: Array, j: Array) -> Any:
        return pltpu.make_async_copy(sums.at[slot], in_hbm(j), left)

    fetch = pltpu.make_async_copy(in_hbm(j), before, arrived)
    # The first query block that sees a key block is its own.
    first_of_keys = i == j

    def exchange() -> None:
        pl.when(n > 0)(lambda: store(1 - slot, key[jnp.maximum(n - 1, 0)]).wait())
        pl.when(~first_of_keys)(fetch.start)

    @pl.when(_begins(query, n))
    def _() -> None:
        totals[...] = jnp.zeros_like(totals)
        for head in range(heads):
            own = _lanes(head, width)
            product = grads[:, own].astype(jnp.float32) * out[:, own].astype(jnp.float32)
            delta[head : head + 1] = product.T.sum(axis=0, keepdims=True)

    def visit(part: Any, keys: Any, head: int, masked: bool) -> tuple[Array, Array]:
        """Add to dq, and return the gradients of the keys, times 1 / scale, and of the values."""
        own = _lanes(head, width)
        do = grads[part, own]
        scores = _dot(k[keys, :], q[part, own], 1, 1) * (scale * math.log2(math.e))
        if masked:
            scores += mask[...]
        probs = jnp.exp2(scores - log_sum[head : head + 1, part])
        ds = (probs * (_dot(v[keys, :], do, 1, 1) - delta[head : head + 1, part])).astype(q.dtype)
        totals[head, :, part] += _dot(k[keys, :], ds, 0, 0)
        return _dot(ds, q[part, own], 1, 0), _dot(probs.astype(do.dtype), do, 1, 0)

    @pl.when(kind[n] == _FULL)
    def _() -> None:
        whole = pl.ds(0, block)
        for head in range(heads):
            dk, dv = visit(whole, whole, head, masked=False)
            if head == 0:
                sums[slot, 0], sums[slot, 1] = dk, dv
                exchange()
            else:
                sums[slot, 0] += dk
                sums[slot, 1] += dv

    @pl.when(kind[n] != _FULL)
    def _() -> None:
        sums[slot] = jnp.zeros_like(before)

    def add(part: Any, keys: Any) -> None:
        mask[...] = _mask(spans, part, i * block + part.start, j * block + keys.start)
        for head in range(heads):
            dk, dv = visit(part, keys, head, masked=True)
            sums[slot, 0, keys] += dk
            sums[slot, 1, keys] += dv

    _for_parts(kind[n], block, add, exchange)

    pl.when(kind[n] == _EMPTY)(exchange)

    @pl.when(~first_of_keys)
    def _() -> None:
        fetch.wait()
        sums[slot] += before[...]

    store(slot, j).start()
    pl.when(n == pl.num_programs(1) - 1)(lambda: store(slot, j).wait())

    @pl.when(i == j)
    def _() -> None:
        for head in range(heads):
            dq[:, _lanes(head, width)] = (totals[head] * scale).T.astype(dq.dtype)


class _Rows(NamedTuple):
    tokens: int
    """A multiple of the block."""
    groups: int
    """Groups of query heads, one to a visit."""
    shared: int
    """Groups per key head."""
    heads: int
    """Query heads of a group."""
    width: int
    block: int
    scale: float
    interpret: Any


def _call(
    kernel: Callable[..., None],
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Sequence[Any],
    spans: Int[Array, "3 M"],
    rows: _Rows,
    name: str,
) -> tuple[Array, ...]:
    block = rows.block
    visits, count = _visits(spans, rows.tokens, block, part_length(block), interpret=rows.interpret)
    by_block = jnp.swapaxes(spans.reshape(3, -1, block), 0, 1)

    def run(count: Array, *args: Array) -> tuple[Array, ...]:
        return pl.pallas_call(
            functools.partial(kernel, scale=rows.scale),
            out_shape=tuple(shape for shape, _ in outputs),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(visits),
                in_specs=(
                    pl.BlockSpec((None, 3, block), lambda p, n, query, *_: (query[n], 0, 0)),
                    *(spec for _, spec in inputs),
                ),
                out_specs=tuple(spec for _, spec in outputs),
                grid=(rows.groups, count),
                scratch_shapes=scratch,
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            interpret=rows.interpret,
            name=name,
        )(*args)

    return unchecked(run, count[0], *visits, by_block, *(x for x, _ in inputs))


def _specs(rows: _Rows) -> tuple[pl.BlockSpec, ...]:
    """Return the blocks of queries and outputs, keys and values, and numbers per query."""
    block, heads, width, shared = rows.block, rows.heads, rows.width, rows.shared
    return (
        pl.BlockSpec((block, heads * width), lambda p, n, query, *_: (query[n], p)),
        pl.BlockSpec((block, width), lambda p, n, query, key, *_: (key[n], p // shared)),
        pl.BlockSpec((None, heads, block), lambda p, n, query, *_: (p, 0, query[n])),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: Float[Array, "M Hh"],
    k: Float[Array, "M Kvh"],
    v: Float[Array, "M Kvh"],
    spans: Int[Array, "3 M"],
    rows: _Rows,
) -> Float[Array, "M Hh"]:
    return _attend_forward(q, k, v, spans, rows)[0]


def _attend_forward(q: Array, k: Array, v: Array, spans: Array, rows: _Rows) -> tuple[Array, tuple[Array, ...]]:
    block, heads, width = rows.block, rows.heads, rows.width
    of_q, of_k, numbers = _specs(rows)
    out, log_sum = _call(
        _forward_kernel,
        ((q, of_q), (k, of_k), (v, of_k)),
        (
            (jax.ShapeDtypeStruct(q.shape, q.dtype), of_q),
            (jax.ShapeDtypeStruct((rows.groups, heads, len(q)), jnp.float32), numbers),
        ),
        (
            pltpu.VMEM((heads, width, block), jnp.float32),
            *[pltpu.VMEM((heads, block), jnp.float32)] * 2,
            pltpu.VMEM((part_length(block),) * 2, jnp.float32),
        ),
        spans,
        rows,
        "packed_attention",
    )
    out, log_sum = (checkpoint_name(x, "dot") for x in (out, log_sum))
    return out, (q, k, v, spans, out, log_sum)


def _attend_backward(rows: _Rows, residuals: tuple[Array, ...], grads: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, spans, out, log_sum = residuals
    M, block, heads, width = len(q), rows.block, rows.heads, rows.width
    of_q, of_k, numbers = _specs(rows)
    # Probability 0 for padding.
    valid = spans[2] <= jnp.arange(M)
    log_sum = jnp.where(valid[None, None], log_sum, -_MASKED)
    dq, d_keys = _call(
        _backward_kernel,
        ((q, of_q), (k, of_k), (v, of_k), (out, of_q), (grads, of_q), (log_sum, numbers)),
        (
            (jax.ShapeDtypeStruct(q.shape, q.dtype), of_q),
            (jax.ShapeDtypeStruct((rows.groups, 2, M, width), jnp.float32), pl.BlockSpec(memory_space=pl.ANY)),
        ),
        (
            pltpu.VMEM((heads, width, block), jnp.float32),
            pltpu.VMEM((heads, block), jnp.float32),
            pltpu.VMEM((2, 2, block, width), jnp.float32),
            pltpu.VMEM((2, block, width), jnp.float32),
            pltpu.VMEM((part_length(block),) * 2, jnp.float32),
            *[pltpu.SemaphoreType.DMA] * 2,
        ),
        spans,
        rows,
        "packed_attention_backward",
    )
    d_keys = d_keys.reshape(-1, rows.shared, 2, M, width).sum(axis=1)
    dk, dv = (d_keys[:, 0] * rows.scale).astype(k.dtype), d_keys[:, 1].astype(v.dtype)
    dk, dv = (jnp.swapaxes(x, 0, 1).reshape(k.shape) for x in (dk, dv))
    return dq, dk, dv, None


_attend.defvjp(_attend_forward, _attend_backward)


def _heads_per_visit(heads: int, kv_heads: int, width: int) -> int:
    """Return the heads of a visit: as many as fit, leaving work for two cores if possible."""
    room = (_HEADS * _QUERY_BYTES + _KEY_BYTES) * _LANES // width
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * _QUERY_BYTES + _KEY_BYTES <= room)]
    return max(fitting, key=lambda n: (min(kv_heads * heads // n, 2), n))


def attention(
    q: Float[Array, "B N H h"],
    k: Float[Array, "B N Kv h"],
    v: Float[Array, "B N Kv h"],
    spans: Sequence[Int[Array, "B N"]],
    *,
    interpret: Any = False,
) -> Float[Array, "B N H h"]:
    """Return attention softmax(q k^T / sqrt(h)) v, as `packed_attention`.

    Args:
      spans: prompt_start, prompt_end and own_start of `packed_attention.Spans`.
      interpret: on any backend, slowly, for tests; True, or `pltpu.InterpretParams` to look for races.
    """
    B, N, H, h = q.shape
    Kv, block = k.shape[2], block_length(N, q.dtype.itemsize)
    row = N + -N % block
    first = (jnp.arange(B, dtype=jnp.int32) * row)[:, None]
    start, end, own = (jnp.pad(x, ((0, 0), (0, row - N))) for x in spans)
    token = jnp.arange(row, dtype=jnp.int32)[None]
    own = jnp.where(token < N, own, token + 1)
    ends = jnp.stack([x + first for x in (start, end, own)]).reshape(3, B * row)

    def tokens(x: Array) -> Array:
        """Lay rows end to end, padded to whole blocks and lanes."""
        x = jnp.pad(x, ((0, 0), (0, row - N), (0, 0), (0, -h % _LANES)))
        return x.reshape(B * row, *x.shape[2:])

    q, k, v = (tokens(x) for x in (q, k, v))
    width = q.shape[2]
    heads = _heads_per_visit(H // Kv, Kv, width)
    rows = _Rows(row, H // heads, H // Kv // heads, heads, width, block, h**-0.5, interpret)
    out = _attend(*(x.reshape(B * row, -1) for x in (q, k, v)), ends, rows)
    return out.reshape(B, row, H, width)[:, :N, :, :h]
