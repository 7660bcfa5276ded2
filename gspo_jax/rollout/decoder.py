"""The in-graph decoder: each prompt is prefilled once, its G responses decode against the shared prompt cache.

One jitted program per shape. All rows advance together and the loop ends when every response has ended; slots refilled
in graph belong in the loop's body. Every response has its own key, so what it samples does not depend on
the batch around it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from gspo_jax.models import moe
from gspo_jax.models.cache import Cache, new_cache
from gspo_jax.models.transformer import Output, Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain
from gspo_jax.rollout.sampling import Sampling, draw
from gspo_jax.types import Prompts, Rollout, RouterRecord


@struct.dataclass
class _State:
    """The loop's state after `t` tokens of every response; it stops when `t` reaches the limit or all have ended."""

    t: Int[Array, ""]
    ended: Bool[Array, " B"]
    tokens: Int[Array, "B T"]
    behaviour_logprobs: Float[Array, "B T"]
    logprobs: Float[Array, "B T"]
    mask: Bool[Array, "B T"]
    routes: RouterRecord
    """Of the response tokens; those of the prompts are known before the loop."""
    cache: Cache


def response_keys(key: Key[Array, ""], responses: Int[Array, " B"]) -> Key[Array, " B"]:
    """One key per response, from its number alone. Consumes `key`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, responses)


@partial(jax.jit, static_argnames=("graph", "group_size", "length", "sampling", "eos_ids", "pad_id", "router_logprobs"))
def generate(
    graph: nnx.GraphDef[Transformer],
    params: nnx.State,
    prompts: Prompts,
    keys: Key[Array, " B"],
    *,
    group_size: int,
    length: int,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    pad_id: int = 0,
    router_logprobs: bool = False,
) -> Rollout:
    """Samples `group_size` responses of at most `length` tokens to every prompt.

    Args:
      graph, params: the model, in the sampler's layout and dtype.
      prompts: [P, S], right padded.
      keys: one per response, B = P · group_size; token t of a response is drawn with `fold_in(key, t)`.
      group_size: responses per prompt; their rows are adjacent.
      length: the token limit T, EOS included.
      sampling: temperature, top-k and top-p.
      eos_ids: a response ends with the first of these; the empty tuple never ends one early.
      pad_id: what stands in `tokens` after the end.
      router_logprobs: also return the router's log-probs of the experts it chose.

    Returns:
      A Rollout; `truncated` marks the responses that met the limit without an EOS.
    """
    model = nnx.merge(graph, params)
    B, T = keys.shape[0], length
    stops = jnp.asarray(eos_ids, jnp.int32)
    of_routers = partial(moe.record, config=model.config, logprobs=router_logprobs)

    def pick(t: Array, output: Output) -> tuple[Array, Array, Array]:
        """The token after the output's (one) position."""
        logits = constrain(output.logits[:, 0], "batch", "vocab")
        return draw(jax.vmap(jax.random.fold_in, (0, None))(keys, t), logits, sampling)

    def record(state: _State, token: Array, behaviour: Array, full: Array) -> _State:
        alive = ~state.ended
        token = jnp.where(alive, token, pad_id)
        return dataclasses.replace(
            state,
            t=state.t + 1,
            ended=state.ended | (token[:, None] == stops[None]).any(axis=1),
            tokens=state.tokens.at[:, state.t].set(token),
            behaviour_logprobs=state.behaviour_logprobs.at[:, state.t].set(jnp.where(alive, behaviour, 0)),
            logprobs=state.logprobs.at[:, state.t].set(jnp.where(alive, full, 0)),
            mask=state.mask.at[:, state.t].set(alive),
        )

    def advance(state: _State) -> _State:
        """Feeds the newest token of every row, keeps its routes, draws the next."""
        fed = state.t - 1
        alive = ~state.ended
        output, cache = model.decode(
            jax.lax.dynamic_index_in_dim(state.tokens, fed, 1, keepdims=False), alive, state.cache
        )
        routes = jax.tree.map(
            lambda kept, new: kept.at[:, fed].set(new[:, 0]), state.routes, of_routers(output.routes, alive[:, None])
        )
        state = dataclasses.replace(state, cache=cache, routes=routes)
        return record(state, *pick(state.t, output))

    output, (prompt_k, prompt_v) = model.prefill(prompts.tokens, prompts.lengths)
    last = jnp.take_along_axis(output.hidden, prompts.lengths[:, None, None] - 1, axis=1)
    first = dataclasses.replace(output, hidden=constrain(jnp.repeat(last, group_size, axis=0), "batch", None, None))
    of_prompts = of_routers(output.routes, jnp.arange(prompts.tokens.shape[1])[None] < prompts.lengths[:, None])
    none = (B, T, *of_prompts.experts.shape[2:])
    state = _State(
        t=jnp.zeros((), jnp.int32),
        ended=jnp.zeros(B, bool),
        tokens=jnp.full((B, T), pad_id, jnp.int32),
        behaviour_logprobs=jnp.zeros((B, T)),
        logprobs=jnp.zeros((B, T)),
        mask=jnp.zeros((B, T), bool),
        routes=RouterRecord(jnp.full(none, -1, of_prompts.experts.dtype), jnp.zeros(none) if router_logprobs else None),
        cache=new_cache(prompt_k, prompt_v, prompts.lengths, group_size=group_size, length=T),
    )
    state = record(state, *pick(state.t, first))
    state = jax.lax.while_loop(lambda s: (s.t < T) & ~s.ended.all(), advance, state)
    return Rollout(
        prompts=jnp.repeat(prompts.tokens, group_size, axis=0),
        prompt_lengths=jnp.repeat(prompts.lengths, group_size, axis=0),
        tokens=state.tokens,
        mask=state.mask,
        truncated=~state.ended,
        behaviour_logprobs=state.behaviour_logprobs,
        logprobs=state.logprobs,
        routes=jax.tree.map(
            lambda p, own: jnp.concatenate([jnp.repeat(p, group_size, axis=0), own], axis=1), of_prompts, state.routes
        ),
    )


def to_sampler(shapes: nnx.State, mesh: Mesh, dtype: DTypeLike) -> Callable[[nnx.State], nnx.State]:
    """A compiled program that casts the trainer's weights and lays them out for sampling.

    Parameters declared `float32` (norms, router) keep their dtype: the forward reads them so.
    """

    def cast(params: nnx.State) -> nnx.State:
        return jax.tree.map(
            lambda v: v if v.get_metadata("float32") else v.replace(v[...].astype(dtype)),
            params,
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )

    return jax.jit(cast, out_shardings=mesh_lib.param_shardings(shapes, mesh, mesh_lib.SAMPLER))
