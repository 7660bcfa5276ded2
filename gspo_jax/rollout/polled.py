"""The decoder in several programs, so that the host can poll during a long decode."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Key

from gspo_jax.kernels.kv import KV
from gspo_jax.models.cache import RING_AXES, Cache, sharded_ring
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rows import ROWS, shards
from gspo_jax.rollout.decoder import prefilled_specs, shard_over_batch
from gspo_jax.rollout.loop import DecodeLoop, LoopState, Prefilled, phases
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.rollout.shard import Decoded, DecodeProgress, advance, begin, finish, shrink
from gspo_jax.types import Weights

_Leaves = list[Array]

RINGS = PartitionSpec(
    mesh_lib.BATCH_AXES, *mesh_lib.without_axes(mesh_lib.spec(RING_AXES, mesh_lib.SAMPLER), set(mesh_lib.BATCH_AXES))
)
"""Sharding of the rings handed from piece to piece, [shards, L, N, B, Kv, C, h]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolledDecode:
    """`decode` in several programs, returning to the host every `poll_steps` steps.

    Shards that finish a phase wait for the rest; in `decode` they wait only at the end. Each program takes over the
    previous one's buffers, cache included.
    """

    graph: nnx.GraphDef[Transformer]
    sampling: SamplingParams
    stop: StopRule
    slots: int
    """Over all devices."""
    min_ended: float
    poll_steps: int

    def __call__(
        self,
        weights: Weights,
        prefilled: Prefilled,
        keys: Key[Array, " B"],
        limits: Int[Array, " B"] | None,
        *,
        prompt_length: int,
        poll: Callable[[], None],
    ) -> Decoded:
        """Decode; `poll` is called between programs and may raise to end it."""
        inputs = prefilled, keys, limits
        progress, rings = begin_piece(self, weights, inputs)
        for phase in range(self.phases(prefilled, limits)):
            if phase:
                progress, rings = shrink_piece(self, weights, inputs, progress, rings, phase=phase)
            running = True
            while running:
                (progress, rings), more = advance_piece(self, weights, inputs, progress, rings, phase=phase)
                running = bool(more)
                poll()
        del rings
        return finish_piece(self, weights, inputs, progress, prompt_length=prompt_length)

    def phases(self, prefilled: Prefilled, limits: Array | None) -> int:
        """Needs the mesh in scope."""
        return len(phases(self.slots // shards(), prefilled, limits, self.stop))

    def run(
        self,
        piece: Callable[[DecodeLoop, Any], Any],
        weights: Weights,
        inputs: tuple[Any, ...],
        progress: _Leaves | None = None,
        rings: _Leaves | None = None,
        *,
        out_specs: Any,
    ) -> Any:
        """Call `piece(loop, progress)` per batch shard; the first has no progress."""
        options: Any = {"sampling": self.sampling, "stop": self.stop, "min_ended": self.min_ended}
        options["slots"] = self.slots // shards()

        def shard(weights: Weights, prefilled: Prefilled, keys: Any, limits: Any, progress: Any, rings: Any) -> Any:
            loop = DecodeLoop(self.graph, weights, prefilled, keys, limits, **options)
            return piece(loop, None if progress is None else _unpack(loop, progress, rings))

        in_specs = prefilled_specs(inputs[0].prefix), *(ROWS,) * 4
        return shard_over_batch(shard, weights, (*inputs, progress, rings), in_specs=in_specs, out_specs=out_specs)


def _carried(progress: DecodeProgress) -> tuple[Any, ...]:
    state = {field.name: getattr(progress.state, field.name) for field in dataclasses.fields(progress.state)}
    del state["cache"]
    return state, *progress[1:]


def _rings(cache: Cache) -> tuple[KV, KV, Array]:
    return cache.k, cache.v, cache.step


def _pack(progress: DecodeProgress) -> tuple[_Leaves, _Leaves]:
    """Return the carried arrays and the cache's rings, one entry per shard."""
    k, v, step = _rings(progress.state.cache)
    leaves = jax.tree.leaves(_carried(progress)), jax.tree.leaves((sharded_ring(k), sharded_ring(v), step))
    return jax.tree.map(lambda x: x[None], leaves)


def _unpack(loop: DecodeLoop, leaves: _Leaves, rings: _Leaves | None) -> DecodeProgress:
    """Invert `_pack`. Without `rings` the cache is the initial one, not to be used."""
    first = begin(loop)  # for its structure; the compiler drops the computation
    state, *rest = jax.tree.unflatten(jax.tree.structure(_carried(first)), [x[0] for x in leaves])
    cache = first.state.cache
    if rings is not None:
        cache = loop.cache(*jax.tree.unflatten(jax.tree.structure(_rings(cache)), [x[0] for x in rings]))
    return DecodeProgress(LoopState(**state, cache=cache), *rest)


@partial(jax.jit, static_argnums=0)
def begin_piece(decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...]) -> tuple[_Leaves, _Leaves]:
    return decode.run(lambda loop, _: _pack(begin(loop)), weights, inputs, out_specs=ROWS)


@partial(jax.jit, static_argnums=0, static_argnames="phase", donate_argnums=(3, 4))
def advance_piece(
    decode: PolledDecode,
    weights: Weights,
    inputs: tuple[Any, ...],
    progress: _Leaves,
    rings: _Leaves,
    *,
    phase: int,
) -> tuple[tuple[_Leaves, _Leaves], Bool[Array, ""]]:
    def piece(loop: DecodeLoop, progress: DecodeProgress) -> tuple[tuple[_Leaves, _Leaves], Array]:
        after = advance(loop, progress, phase, steps=decode.poll_steps)
        return _pack(after), mesh_lib.any_shard(after.state.running)

    return decode.run(piece, weights, inputs, progress, rings, out_specs=(ROWS, PartitionSpec()))


@partial(jax.jit, static_argnums=0, static_argnames="phase", donate_argnums=4)
def shrink_piece(
    decode: PolledDecode,
    weights: Weights,
    inputs: tuple[Any, ...],
    progress: _Leaves,
    rings: _Leaves,
    *,
    phase: int,
) -> tuple[_Leaves, _Leaves]:
    def piece(loop: DecodeLoop, progress: DecodeProgress) -> tuple[_Leaves, _Leaves]:
        return _pack(shrink(loop, progress, phase))

    return decode.run(piece, weights, inputs, progress, rings, out_specs=ROWS)


@partial(jax.jit, static_argnums=0, static_argnames="prompt_length")
def finish_piece(
    decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...], progress: _Leaves, *, prompt_length: int
) -> Decoded:
    def piece(loop: DecodeLoop, progress: DecodeProgress) -> Decoded:
        return finish(loop, progress, prompt_length)

    return decode.run(piece, weights, inputs, progress, out_specs=ROWS)


PROGRAMS = (begin_piece, advance_piece, shrink_piece, finish_piece)
