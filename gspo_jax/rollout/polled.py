"""The decoder in several programs, so that the host can poll during a long decode."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Key

from gspo_jax.models.cache import pool_axes, sharded_pool
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rows import ROWS, shards
from gspo_jax.rollout.decoder import prefilled_specs, shard_over_batch
from gspo_jax.rollout.drafting import Drafting
from gspo_jax.rollout.loop import Decoded, DecodeLoop, LoopState
from gspo_jax.rollout.pages import Pool
from gspo_jax.rollout.prefilled import Prefilled
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.types import Weights

_Leaves = list[Array]


def pool_spec(shape: tuple[int, ...]) -> PartitionSpec:
    """Return the sharding of a pool handed from piece to piece, [shards, L, M, Kv, C, h], or of its scales."""
    axes = mesh_lib.spec(pool_axes(shape[3])[: len(shape) - 1], mesh_lib.SAMPLER)
    return PartitionSpec(mesh_lib.BATCH_AXES, *mesh_lib.without_axes(axes, set(mesh_lib.BATCH_AXES)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolledDecode:
    """`decode` in several programs, returning to the host every `poll_steps` steps.

    Each program takes over the previous one's buffers, pools included.
    """

    graph: nnx.GraphDef[Transformer]
    sampling: SamplingParams
    stop: StopRule
    slots: int
    """Over all devices."""
    pool: Pool
    min_ended: float
    drafting: Drafting
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
        heard: Callable[[Array, Array], None] | None = None,
    ) -> Decoded:
        """Decode.

        Args:
          poll: called between programs; may raise to end the decode.
          heard: called between programs with tokens [B, T] and lengths [B] of the responses that have ended, length 0
            for all others.
        """
        inputs = prefilled, keys, limits
        state, pools = begin_piece(self, weights, inputs)
        running = True
        while running:
            (state, pools), more = advance_piece(self, weights, inputs, state, pools)
            running = bool(more)
            if heard is not None and running:
                heard(*ended_piece(self, weights, inputs, state))
            poll()
        del pools
        return finish_piece(self, weights, inputs, state, prompt_length=prompt_length)

    def run(
        self,
        piece: Callable[[DecodeLoop, Any], Any],
        weights: Weights,
        inputs: tuple[Any, ...],
        state: _Leaves | None = None,
        pools: _Leaves | None = None,
        *,
        out_specs: Any,
    ) -> Any:
        """Call `piece(loop, state)` per batch shard; the first has no state."""
        options: Any = {"sampling": self.sampling, "stop": self.stop, "min_ended": self.min_ended, "pool": self.pool}
        options |= {"slots": self.slots // shards(), "drafting": self.drafting, "polled": True}

        def shard(weights: Weights, prefilled: Prefilled, keys: Any, limits: Any, state: Any, pools: Any) -> Any:
            loop = DecodeLoop(self.graph, weights, prefilled, keys, limits, **options)
            return piece(loop, None if state is None else _unpack(loop, state, pools))

        in_specs = prefilled_specs(inputs[0].prefix), *(ROWS,) * 4
        return shard_over_batch(shard, weights, (*inputs, state, pools), in_specs=in_specs, out_specs=out_specs)


def _pack(state: LoopState) -> tuple[_Leaves, _Leaves]:
    """Return the state's arrays and its pools, one entry per shard."""
    pools = sharded_pool(state.k), sharded_pool(state.v)
    return jax.tree.map(lambda x: x[None], (jax.tree.leaves(_without_pools(state)), jax.tree.leaves(pools)))


def _without_pools(state: LoopState) -> LoopState:
    nothing = jnp.zeros(0)
    return dataclasses.replace(state, k=nothing, v=nothing)


def _unpack(loop: DecodeLoop, leaves: _Leaves, pools: _Leaves | None) -> LoopState:
    """Invert `_pack`. Without `pools` they are the initial ones, not to be used."""
    first = loop.start()  # for its structure; the compiler drops the computation
    state = jax.tree.unflatten(jax.tree.structure(_without_pools(first)), [x[0] for x in leaves])
    k, v = first.k, first.v
    if pools is not None:
        k, v = jax.tree.unflatten(jax.tree.structure((k, v)), [x[0] for x in pools])
    return dataclasses.replace(state, k=k, v=v)


@partial(jax.jit, static_argnums=0)
def begin_piece(decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...]) -> tuple[_Leaves, _Leaves]:
    return decode.run(lambda loop, _: _pack(loop.start()), weights, inputs, out_specs=ROWS)


@partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def advance_piece(
    decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...], state: _Leaves, pools: _Leaves
) -> tuple[tuple[_Leaves, _Leaves], Bool[Array, ""]]:
    def piece(loop: DecodeLoop, state: LoopState) -> tuple[tuple[_Leaves, _Leaves], Array]:
        after = loop.advance(state, decode.poll_steps)
        return _pack(after), loop.goes_on(after)

    return decode.run(piece, weights, inputs, state, pools, out_specs=(ROWS, PartitionSpec()))


@partial(jax.jit, static_argnums=0)
def ended_piece(
    decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...], state: _Leaves
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    return decode.run(lambda loop, state: loop.ended_so_far(state), weights, inputs, state, out_specs=ROWS)


@partial(jax.jit, static_argnums=0, static_argnames="prompt_length")
def finish_piece(
    decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...], state: _Leaves, *, prompt_length: int
) -> Decoded:
    def piece(loop: DecodeLoop, state: LoopState) -> Decoded:
        return loop.finish(state, prompt_length=prompt_length)

    return decode.run(piece, weights, inputs, state, out_specs=ROWS)


PROGRAMS = (begin_piece, advance_piece, ended_piece, finish_piece)
