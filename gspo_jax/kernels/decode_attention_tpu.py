"""Decode attention of slots on TPU: a slot's prompt, its own pages and its newest tokens in one softmax.

The grid visits live blocks alone, slot after slot: a prompt's blocks, then groups of own pages, which lie anywhere in
the pool. A visit reads about 1 MiB of keys and values, 0.4 µs on v5p and 1.3 on v5e, as starting one takes about 0.35;
where pages are smaller, several at once. A slot's last visit adds the tokens of this step, each seen by its own query
and later ones, and writes them to their pages: the tile that holds the first is read ahead, changed in VMEM and copied
back. A second tile holds no older token, and is only written.

Keys may be values too, as in latent attention: then both are read from one array.

The pool is one operand, aliased to a result, and the kernel copies pages itself: of an aliased operand given twice, for
blocks to be copied from, the compiler makes a copy.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.decode_tpu import LANES, cores, divisor, dot, in_place, vmem_limit
from gspo_jax.kernels.kv import KV, ScaledKV, head_bytes, parts

_MASKED = -1e30
BLOCK_BYTES = 2**20
"""Bytes of keys and values per visit."""
_MOST_PAGES = 8
"""Most pages per visit."""
_LARGEST = 127
"""Of int8, as `models.int8.LARGEST`."""


class _Sizes(NamedTuple):
    """Columns that a visit reads."""

    prompt: int
    """Columns of a prompt per visit."""
    pages: int
    """Pages of a slot per visit."""
    page: int
    """Columns of a page."""

    @classmethod
    def of(cls, prompts: KV, pool: KV, most: int, arrays: int) -> "_Sizes":
        """`most` is the pages of a slot, `arrays` 2, or 1 if keys are the values."""
        keys, scale = parts(pool)
        (Kv, C, h), scaled = keys.shape[2:], scale is not None
        fitting = BLOCK_BYTES // (arrays * Kv * head_bytes(h, keys.dtype, scaled=scaled))
        unit = LANES if scaled else _tile(keys)
        S = prompts.shape[3]
        prompt = S if S % unit else divisor(S, fitting, unit)
        return cls(prompt, max(1, min(_MOST_PAGES, fitting // C, most)), C)


def _tile(x: Array) -> int:
    """Return the rows of a tile."""
    return 32 // x.dtype.itemsize


@struct.dataclass
class Visits:
    """The live blocks of a decode step, for all layers: slot after slot, in the order of their prompts.

    With two cores, the second begins at another slot.
    """

    slot: Int[Array, " V"]
    number: Int[Array, " V"]
    """Counted from the slot's first visit."""
    begins: Int[Array, " c"]
    """First visit of each core."""
    ends: Int[Array, " c"]
    prompts: Int[Array, " B"]
    """Each slot's prompt."""
    seen: Int[Array, " B"]
    """Columns of the prompt."""
    own: Int[Array, " B"]
    """Columns of the slot before this step's."""
    fed: Int[Array, " B"]
    """Columns of this step."""
    table: Int[Array, "B W"]
    """Pages of the slots."""

    @classmethod
    def of(
        cls,
        prompts: KV,
        lengths: Int[Array, " P"],
        pool: KV,
        table: Int[Array, "B W"],
        chosen: Int[Array, " B"],
        ages: Int[Array, "B Q"],
        *,
        arrays: int = 2,
    ) -> "Visits":
        """List the visits of slots of prompts `chosen`, with `ages` as in `DecodeSlots`, `arrays` as in `_Sizes`."""
        (B, W), sizes = table.shape, _Sizes.of(prompts, pool, table.shape[1], arrays)
        seen, own = lengths[chosen].astype(jnp.int32), jnp.maximum(ages[:, 0] - 1, 0).astype(jnp.int32)
        fed = (ages > 0).sum(axis=1, dtype=jnp.int32)
        count = _cdiv(seen, sizes.prompt) + _cdiv(own, sizes.pages * sizes.page)
        count = jnp.where(fed > 0, jnp.maximum(count, 1), 0)
        # Of slots in a row with one prompt, whose only block stays in VMEM, the first one fetches it.
        order = jnp.argsort(chosen, stable=False).astype(jnp.int32)
        count = count[order]
        ends = jnp.cumsum(count, dtype=jnp.int32)
        room = B * (_cdiv(prompts.shape[3], sizes.prompt) + _cdiv(W, sizes.pages))
        v = jnp.arange(room, dtype=jnp.int32)
        after = ends[None] <= v[:, None]
        here = ~after & ((ends - count)[None] <= v[:, None])
        slot = jnp.where(here, order[None], 0).sum(axis=1, dtype=jnp.int32)
        number = v - jnp.where(after, count[None], 0).sum(axis=1, dtype=jnp.int32)
        total = ends[-1]
        middle = jnp.where(2 * ends - count <= total, ends, 0).max()
        begins, stops = jnp.stack([0 * total, middle]), jnp.stack([middle, total])
        if cores() == 1:
            begins, stops = begins[:1], stops[1:]
        return cls(slot, number, begins, stops, chosen.astype(jnp.int32), seen, own, fed, table.astype(jnp.int32))


def _cdiv(a: Any, b: int) -> Any:
    return (a + b - 1) // b


class _At(NamedTuple):
    """A visit: what its scalars say."""

    valid: Any
    core_works: Any
    slot: Any
    number: Any
    prompt: Any
    """Number of the visits to the prompt."""
    live: Any
    """Pages with columns before this step's."""
    last: Any

    @classmethod
    def of(cls, core: Any, i: Any, slot: Any, number: Any, begins: Any, ends: Any, seen: Any, own: Any, sizes: _Sizes):
        v = begins[core] + i
        valid, works = v < ends[core], begins[core] < ends[core]
        v = jnp.maximum(jnp.minimum(v, ends[core] - 1), 0)
        b, m = slot[v], number[v]
        prompt = _cdiv(seen[b], sizes.prompt)
        live = _cdiv(own[b], sizes.page)
        return cls(valid, works, b, m, prompt, live, m == jnp.maximum(prompt + _cdiv(live, sizes.pages), 1) - 1)


class _Pieces(NamedTuple):
    """Keys or values in VMEM, with scales if in int8."""

    values: Any
    """[Kv, C, h]."""
    scale: Any
    """[Kv, C]."""


def _pieces(x: Any) -> _Pieces:
    return _Pieces(x.values, x.scale) if isinstance(x, ScaledKV) else _Pieces(x, None)


def _add(
    q: Any,
    keys: Sequence[_Pieces],
    values: Sequence[_Pieces],
    seen: Sequence[Array],
    sums: tuple[Any, Any, Any],
) -> None:
    """Add columns to the softmax of every head."""
    total, highest_ref, weight_ref = sums
    for head in range(q.shape[0]):
        own, width = q[head], q.shape[-1]
        scores = []
        for k, mask in zip(keys, seen, strict=True):
            s = dot(own, k.values[head].astype(own.dtype), w_axis=1) * width**-0.5
            s = s if k.scale is None else s * k.scale[pl.ds(head, 1), :]
            scores.append(jnp.where(mask, s, _MASKED))
        before = highest_ref[head][:, :1]
        highest = functools.reduce(jnp.maximum, (s.max(axis=1, keepdims=True) for s in scores), before)
        factor = jnp.exp(before - highest)
        out, weight = total[head] * factor, weight_ref[head] * factor
        for s, v in zip(scores, values, strict=True):
            p = jnp.exp(s - highest)
            weight += p.sum(axis=1, keepdims=True)
            p = p if v.scale is None else p * v.scale[pl.ds(head, 1), :]
            out += dot(p.astype(own.dtype), v.values[head].astype(own.dtype))
        total[head], weight_ref[head] = out, weight
        highest_ref[head] = jnp.broadcast_to(highest, highest_ref.shape[1:])


def _stored(x: Float[Array, "Kv h"], scaled: bool) -> tuple[Array, Any]:
    """Return a new column as the cache stores it, in float32, and its scale [Kv, 1]; see `models.cache.stored`."""
    if not scaled:
        return x, None
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) * (1 / _LARGEST)
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)), scale


def _new(heads: Any, first: int, keys: int, row: Any, scaled: bool, arrays: int) -> list[tuple[Array, Any]]:
    """Return a token's keys, and values, [Kv, h] with scales, as the cache stores them."""
    rows = [heads[first + n * keys : first + (n + 1) * keys, pl.ds(row, 1), :] for n in range(arrays)]
    return [_stored(x.reshape(keys, -1), scaled) for x in rows]


class _Buffers(NamedTuple):
    """A pool's keys or values in VMEM, for two visits, with scales if in int8."""

    pages: Any
    """[2, n, Kv, C, h]."""
    tile: Any
    """[2, tiles, Kv, t, h], with scales of a whole page."""


def _kernel(
    layer: Any,
    slot: Any,
    number: Any,
    begins: Any,
    ends: Any,
    prompts: Any,
    seen: Any,
    own: Any,
    fed: Any,
    table: Any,
    heads: Any,
    prompt: Any,
    given: Any,
    out: Any,
    pools: Any,
    q: Any,
    total: Any,
    highest: Any,
    weight: Any,
    buffers: tuple[_Buffers, ...],
    pending: Any,
    done: Any,
    *,
    sizes: _Sizes,
    slot_pages: int,
    queries: int,
) -> None:
    del prompts, given
    core, i = pl.program_id(0), pl.program_id(1)
    scalars = slot, number, begins, ends, seen, own, sizes
    at, b2 = _At.of(core, i, *scalars), jax.lax.rem(i, 2)
    (Kv, _, h), b, C, g = q.shape, at.slot, sizes.page, q.shape[1] // queries
    sums = total, highest, weight
    tiles, height = _pieces(buffers[0].tile).values.shape[1], _pieces(buffers[0].tile).values.shape[3]
    scaled = isinstance(buffers[0].tile, ScaledKV)

    def page_copies(here: _At, n: int, buffer: Any) -> list[Any]:
        page = (here.number - here.prompt) * sizes.pages + n
        where = layer[0], table[here.slot * slot_pages + page]
        return [
            pltpu.make_async_copy(source.at[where], target.at[buffer, n], done.at[0, buffer])
            for pool, own in zip(pools, buffers, strict=True)
            for source, target in zip(jax.tree.leaves(pool), jax.tree.leaves(own.pages), strict=True)
        ]

    def tile_copies(here: _At, buffer: Any, *, back: bool, tile: int = 0, kinds: Sequence[int] = (0, 1)) -> list[Any]:
        """Return the copies of a tile's columns (kind 0), and of the scales of its page (kind 1)."""
        column = (own[here.slot] // height + tile) * height
        where = layer[0], table[here.slot * slot_pages + jnp.minimum(column // C, slot_pages - 1)]
        found = []
        for pool, own_buffers in zip(pools, buffers, strict=True):
            (values, scales), (held, beside) = _pieces(pool), _pieces(own_buffers.tile)
            start = pl.multiple_of(jax.lax.rem(column, C), height)
            ends = [(values.at[(*where, slice(None), pl.ds(start, height))], held.at[buffer, tile])]
            if scales is not None and beside is not None:
                ends.append((scales.at[where], beside.at[buffer, tile]))
            for end in (ends[kind] for kind in kinds if kind < len(ends)):
                source, target = reversed(end) if back else end
                found.append(pltpu.make_async_copy(source, target, done.at[2 if back else 1, buffer]))
        return found

    def second(here: _At) -> tuple[Any, Any]:
        """Return whether a slot's new columns reach a second tile, and a second page."""
        column = own[here.slot]
        reaches = jax.lax.rem(column, height) + fed[here.slot] > height
        return reaches, reaches & (jax.lax.rem(column // height + 1, C // height) == 0)

    def written(buffer: Any) -> None:
        """Wait for what `pending` counts: a tile with its scales, a second tile, its scales."""

        @pl.when(pending[buffer] > 0)
        def _() -> None:
            for copy in tile_copies(at, buffer, back=True):
                copy.wait()

        for kind in range(2) if tiles > 1 else ():

            @pl.when(pending[buffer] > 1 + kind)
            def _(kind: int = kind) -> None:
                for copy in tile_copies(at, buffer, back=True, kinds=(kind,)):
                    copy.wait()

        pending[buffer] = 0

    def each(here: _At, buffer: Any, act: Any) -> None:
        """Act on the copies that a visit waits for."""
        for n in range(sizes.pages):

            @pl.when(
                here.valid & (here.number >= here.prompt) & ((here.number - here.prompt) * sizes.pages + n < here.live)
            )
            def _(n: int = n) -> None:
                for copy in page_copies(here, n, buffer):
                    act(copy)

        @pl.when(here.valid & here.last)
        def _() -> None:
            for copy in tile_copies(here, buffer, back=False):
                act(copy)

    @pl.when(i == 0)
    def _() -> None:
        pending[0], pending[1] = 0, 0
        # Values of pages that are not there count 0 times.
        for array in jax.tree.leaves(buffers[-1].pages) if sizes.pages > 1 else ():
            array[:, 1:] = jnp.zeros((2, sizes.pages - 1, *array.shape[2:]), array.dtype)
        each(at, b2, lambda copy: copy.start())

    @pl.when(i + 1 < pl.num_programs(1))
    def _() -> None:
        after = _At.of(core, i + 1, *scalars)

        @pl.when(after.valid & after.last)
        def _() -> None:
            written(1 - b2)

        each(after, 1 - b2, lambda copy: copy.start())

    each(at, b2, lambda copy: copy.wait())

    @pl.when(at.valid & (at.number == 0))
    def _() -> None:
        for head in range(Kv):
            for j in range(queries):
                own_heads = heads[head * g : (head + 1) * g, pl.ds(b * queries + j, 1), :]
                q[head, j * g : (j + 1) * g, :] = own_heads.reshape(g, h).astype(q.dtype)
        total[...] = jnp.zeros_like(total)
        highest[...] = jnp.full_like(highest, _MASKED / 10)
        weight[...] = jnp.zeros_like(weight)

    @pl.when(at.valid & (at.number < at.prompt))
    def _() -> None:
        column = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.prompt), 1) + at.number * sizes.prompt
        k, v = _pieces(prompt[0]), _pieces(prompt[-1])
        _add(q, [k], [v], [column < seen[b]], sums)

    @pl.when(at.valid & (at.number >= at.prompt) & (at.live > 0))
    def _() -> None:
        first = (at.number - at.prompt) * sizes.pages * C
        column = jax.lax.broadcasted_iota(jnp.int32, (1, C), 1) + first

        def pieces(kv: _Buffers) -> list[_Pieces]:
            values, scale = _pieces(kv.pages)
            return [_Pieces(values.at[b2, n], None if scale is None else scale.at[b2, n]) for n in range(sizes.pages)]

        masks = [column + n * C < own[b] for n in range(sizes.pages)]
        _add(q, pieces(buffers[0]), pieces(buffers[-1]), masks, sums)

    @pl.when(at.valid & at.last)
    def _() -> None:
        query = jax.lax.broadcasted_iota(jnp.int32, (queries * g, 1), 0) // g
        new = [_new(heads, Kv * g, Kv, b * queries + j, scaled, len(buffers)) for j in range(queries)]
        for head in range(Kv):
            out_sum, most, weights = total[head], highest[head][:, :1], weight[head][:, :1]
            for j, of_token in enumerate(new):
                (k, k_scale), (v, v_scale) = of_token[0], of_token[-1]
                score = jnp.sum(q[head].astype(jnp.float32) * k[head : head + 1], axis=1, keepdims=True) * h**-0.5
                score = score if k_scale is None else score * k_scale[head : head + 1]
                if queries > 1:
                    score = jnp.where((query >= j) & (j < fed[b]), score, _MASKED)
                before, most = most, jnp.maximum(most, score)
                factor, p = jnp.exp(before - most), jnp.exp(score - most)
                value = v[head : head + 1] if v_scale is None else v[head : head + 1] * v_scale[head : head + 1]
                out_sum, weights = out_sum * factor + p * value, weights * factor + p
            found = (out_sum / weights).astype(q.dtype).astype(jnp.float32)
            for j in range(queries):
                out[j, head * g : (head + 1) * g, :] = found[j * g : (j + 1) * g]
        offset, column = jax.lax.rem(own[b], height), jax.lax.rem(own[b], C)
        for kind, own_buffers in enumerate(buffers):
            held, scales = _pieces(own_buffers.tile)
            for tile in range(tiles):
                row = jax.lax.broadcasted_iota(jnp.int32, (Kv, height, h), 1) + tile * height
                changed = held[b2, 0].astype(jnp.float32) if tile == 0 else jnp.zeros(row.shape)
                for j, pair in enumerate(new):
                    here = row == offset + j
                    here = here & (j < fed[b]) if queries > 1 else here
                    changed = jnp.where(here, pair[kind][0][:, None], changed)
                held[b2, tile] = (changed.astype(jnp.int32) if scaled else changed).astype(held.dtype)
                if scales is None:
                    continue
                place = jax.lax.broadcasted_iota(jnp.int32, (Kv, C), 1) + tile * C
                changed = scales[b2, 0] if tile == 0 else jnp.zeros(place.shape)
                for j, pair in enumerate(new):
                    here = place == column + j
                    here = here & (j < fed[b]) if queries > 1 else here
                    changed = jnp.where(here, pair[kind][1], changed)
                scales[b2, tile] = changed
        for copy in tile_copies(at, b2, back=True):
            copy.start()
        pending[b2] = 1
        if tiles > 1:
            for kind, needed in enumerate(second(at)):

                @pl.when(needed)
                def _(kind: int = kind) -> None:
                    for copy in tile_copies(at, b2, back=True, tile=1, kinds=(kind,)):
                        copy.start()
                    pending[b2] = 2 + kind

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        written(0)
        written(1)


def paged_attention(
    heads: Float[Array, "J BQ h"],
    prompt: tuple[KV, ...],
    pools: tuple[KV, ...],
    visits: Visits,
    *,
    layer: Int[Array, ""],
    dtype: Any,
    interpret: bool = False,
) -> tuple[Float[Array, "b H h"], tuple[KV, ...]]:
    """Return the attention of each slot's Q queries, and the pools with its newest keys and values.

    The output, in float32, is rounded to `dtype`. It has Q rows more than there are; these, and those of tokens that
    are not fed, are undefined.

    Args:
      heads: as of `decode_qkv_tpu.heads`, of the slots' tokens one slot after another.
      prompt: keys and values of the prompts, [L, P, Kv, S, h]; keys alone if they are the values too.
      pools: of the slots' pages, [L, M, Kv, C, h]; donate them.
    """
    (J, rows, h), (_, _, Kv, S, _), (B, W) = heads.shape, prompt[0].shape, visits.table.shape
    g, (keys, scale), Q = J // Kv - len(pools), parts(pools[0]), rows // B
    sizes = _Sizes.of(prompt[0], pools[0], W, len(pools))
    scaled, C = scale is not None, sizes.page
    height = _tile(keys) if C % _tile(keys) == 0 else C
    tiles = 1 if Q == 1 else 2
    assert height + 1 >= Q, "new columns lie in at most two tiles"

    def at(given: Sequence[Any]) -> _At:
        core, i, _, slot, number, begins, ends, _, seen, own, _, _ = given
        return _At.of(core, i, slot, number, begins, ends, seen, own, sizes)

    def of_prompt(*given: Any) -> tuple[Any, ...]:
        layer, prompts, here = given[2], given[7], at(given)
        return layer[0], prompts[here.slot], 0, jnp.clip(here.number, 0, jnp.maximum(here.prompt - 1, 0)), 0

    def of_out(*given: Any) -> tuple[Any, ...]:
        here = at(given)
        return jnp.where(here.core_works, here.slot, B), 0, 0, 0

    block = pl.BlockSpec((None, None, Kv, sizes.prompt, h), of_prompt)
    if scaled:
        beside = pl.BlockSpec((None, None, Kv, sizes.prompt), lambda *given: of_prompt(*given)[:-1])
        block = ScaledKV(block, beside)  # pyright: ignore[reportArgumentType]

    def buffer(pool: KV) -> Any:
        def tile(x: Array) -> Any:
            columns = height if x.ndim == 5 else C
            return pltpu.VMEM((2, tiles, x.shape[2], columns, *x.shape[4:]), x.dtype)

        pages = jax.tree.map(lambda x: pltpu.VMEM((2, sizes.pages, *x.shape[2:]), x.dtype), pool)
        return _Buffers(pages, jax.tree.map(tile, pool))

    prompt, pools = (prompt, pools) if interpret else in_place(prompt, pools)
    scalars = visits.slot, visits.number, visits.begins, visits.ends, visits.prompts, visits.seen, visits.own
    scalars = [layer.astype(jnp.int32).reshape(1), *scalars, visits.fed, visits.table.reshape(-1)]
    elsewhere = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pools)
    given, leaves = len(scalars) + 1 + len(jax.tree.leaves(prompt)), len(jax.tree.leaves(pools))
    column_bytes = Kv * head_bytes(h, keys.dtype, scaled=scaled)
    own = min(B * W, keys.shape[1]) * C  # no page is of two slots
    sums = pltpu.VMEM((Kv, Q * g, LANES), jnp.float32)
    count = len(visits.begins)
    read = min(B, count * prompt[0].shape[1]) if sizes.prompt == S else B  # prompts
    steps = jnp.maximum((visits.ends - visits.begins).max(), 1)
    out, written = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, slot_pages=W, queries=Q),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count, steps),
            in_specs=[pl.BlockSpec((J, rows, h), lambda *_: (0, 0, 0)), (block,) * len(pools), elsewhere],
            out_specs=[pl.BlockSpec((None, Q, Kv * g, h), of_out), elsewhere],
            scratch_shapes=[
                pltpu.VMEM((Kv, Q * g, h), dtype),
                pltpu.VMEM((Kv, Q * g, h), jnp.float32),
                sums,
                sums,
                tuple(map(buffer, pools)),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((3, 2)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B + 1, Q, Kv * g, h), jnp.float32),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pools),
        ],
        input_output_aliases={given + n: 1 + n for n in range(leaves)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * Q * Kv * g * h * (B * S + own),
            bytes_accessed=len(pools) * (read * S + own) * column_bytes + heads.nbytes + 4 * rows * Kv * g * h,
            transcendentals=Q * Kv * g * (B * S + own),
        ),
        name="paged_attention",
        interpret=interpret,
    )(*scalars, heads, prompt, pools)
    return out.reshape(-1, Kv * g, h), written


def attend_paged(
    q: Float[Array, "B Q H h"],
    new: tuple[Float[Array, "B Q Kv h"], ...],
    prompt: tuple[KV, ...],
    pools: tuple[KV, ...],
    visits: Visits,
    *,
    layer: Int[Array, ""],
    interpret: bool = False,
) -> tuple[Float[Array, "B Q H h"], tuple[KV, ...]]:
    """Return as `paged_attention`, for layers that make queries and `new` keys and values themselves.

    The output of tokens that are not fed is 0.
    """
    B, Q, H, h = q.shape
    heads = jnp.concatenate([q, *new], axis=2).astype(jnp.float32).transpose(2, 0, 1, 3).reshape(-1, B * Q, h)
    options: Any = {"layer": layer, "dtype": q.dtype, "interpret": interpret}
    out, pools = paged_attention(heads, prompt, pools, visits, **options)
    is_fed = jnp.arange(Q)[None] < visits.fed[:, None]
    out = jnp.where(is_fed[..., None, None], out[: B * Q].reshape(B, Q, H, h), 0)
    return out.astype(q.dtype), pools
