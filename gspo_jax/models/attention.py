"""Grouped-query attention with rotary positions, and with normed queries and keys in some families."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.attention import SlotRows, causal_attention, decode_attention
from gspo_jax.kernels.decode_qkv_tpu import HeadNorms
from gspo_jax.kernels.kv import KV, Values
from gspo_jax.kernels.packed_attention import Spans, packed_attention
from gspo_jax.kernels.rotary import Rotation, in_place, normed_rope, rms_norm, rope
from gspo_jax.models.config import ModelConfig, Stack, parameter, zeros
from gspo_jax.models.matrices import BIAS, project
from gspo_jax.parallel.mesh import head_axis, on_shards


@runtime_checkable
class Context(Protocol):
    """What the tokens of a layer see: those before them in their rows, or a cache."""

    @property
    def is_step(self) -> bool:
        """True in a decode step, where a slot's earlier tokens are in a cache."""
        ...

    def attend(
        self, q: Array, k: Array, v: Array | None, keep: tuple[Array, Array | None] | None = None
    ) -> tuple[Float[Array, "B T H h"], Any]:
        """Return the queries' attention, and this layer's part of what the forward returns.

        Args:
          q, k, v: [B, T, H, h], and [B, T, Kv, h] of the same tokens. A step whose keys are the values too has no v.
          keep: what a cache stores in place of k and v. A step attends to a cache, with k and v as stored.
        """
        ...

    def recur(self, rule: "Recurrence", inputs: Any) -> tuple[Any, Any]:
        """Return a rule's outputs of inputs [B, T, …], and this layer's part of what the forward returns.

        A step feeds one token.
        """
        ...


@runtime_checkable
class Recurrence(Protocol):
    """A mixer of tokens by a state, which the tokens before a token have made."""

    def rows(self, inputs: Any, spans: Spans, ends: Int[Array, " E"] | None) -> tuple[Any, Any]:
        """Return the outputs of rows, and states [B, …] after their last tokens.

        Args:
          inputs: [B, T, …].
          spans: tell which tokens come before each.
          ends: tokens of the only row whose states are returned instead, [E, …], ascending; T or more for none.
        """
        ...

    def step(self, state: Any, inputs: Any) -> tuple[Any, Any]:
        """Return the outputs of one more token of each row, [B, …], and the states after it."""
        ...


def attend_causal(
    q: Float[Array, "B N H h"], k: Float[Array, "B N Kv h"], v: Float[Array, "B N Kv h"], valid: Bool[Array, "B N"]
) -> Float[Array, "B N H h"]:
    """Run `causal_attention` on each shard."""
    queries, keys = ("batch", None, "heads"), ("batch", None, "kv_heads")
    return on_shards(causal_attention, (q, k, v, valid), (queries, keys, keys, ("batch",)), queries)


def attend_packed(
    q: Float[Array, "B N H h"], k: Float[Array, "B N Kv h"], v: Float[Array, "B N Kv h"], spans: Spans
) -> Float[Array, "B N H h"]:
    """Run `packed_attention` on each shard."""
    queries, keys, h = ("batch", None, "heads"), ("batch", None, "kv_heads"), q.shape[-1]

    def attend(q: Array, k: Array, v: Array, spans: Spans) -> Array:
        q, k, v = (x.reshape(*x.shape[:2], -1, h) for x in (q, k, v))
        return _wide(packed_attention(q, k, v, spans))

    # Heads stay side by side between the matmuls and the kernel, or the compiler may move them.
    arrays = (_wide(q), _wide(k), _wide(v), spans)
    return on_shards(attend, arrays, (queries, keys, keys, ("batch",)), queries).reshape(q.shape)


def _wide(x: Float[Array, "B N H h"]) -> Float[Array, "B N Hh"]:
    return x.reshape(*x.shape[:2], -1)


def attend_cached(
    q: Float[Array, "B Q H h"],
    prompt_k: KV,
    prompt_v: Values,
    prompt_lengths: Int[Array, " P"],
    k: KV,
    v: Values,
    *,
    layer: Int[Array, ""],
    table: Int[Array, "B W"],
    ages: Int[Array, "B Q"],
    rows: SlotRows | None,
) -> Float[Array, "B Q H h"]:
    """Run `decode_attention` on each shard's heads. The batch is split already."""

    def attend(q: Array, keys: KV, values: Values, lengths: Array, k: KV, v: Values, where: dict) -> Array:
        return decode_attention(q, keys, values, lengths, k, v, **where)

    queries, keys = (None, None, "heads"), (None, None, head_axis(prompt_k.shape[2]))
    arrays = (q, prompt_k, prompt_v, prompt_lengths, k, v)
    where = {"layer": layer, "table": table, "ages": ages, "rows": rows}
    return on_shards(attend, (*arrays, where), (queries, keys, keys, (), keys, keys, ()), queries)


class HeadNorm(nnx.Module):
    """RMS norm of each head, with one scale [h] for all, as in Qwen3."""

    over: HeadNorms = "head"

    def __init__(self, config: ModelConfig, stack: Stack, axis: str, *, rngs: nnx.Rngs):
        del axis
        self.config = config
        shape, axes = (stack.layers, config.head_dim), ("layers", "head_dim")
        self.scale = parameter(rngs, shape, axes, config.norm_init, float32=True)

    def __call__(self, x: Float[Array, "B N T h"]) -> Float[Array, "B N T h"]:
        """Return the normed heads."""
        return rms_norm(x, self.config.norm_scale(self.scale[...]), self.config.rms_norm_eps)


class Attention(nnx.Module):
    """Grouped-query attention. Parameters have a leading layer axis. `__call__` gets one layer's slice.

    `norm(config, stack, axis, rngs=…)` makes the norm of heads [B, N, T, h] of queries (axis "heads") or keys
    ("kv_heads"). None: they are not normed. With `gated`, `q` gives each head's query and a gate beside it, and the
    head's output is multiplied by σ(gate).
    """

    def __init__(
        self,
        config: ModelConfig,
        stack: Stack,
        *,
        norm: Callable[..., nnx.Module] | None = None,
        gated: bool = False,
        rngs: nnx.Rngs,
    ):
        L, D, h = stack.layers, config.hidden_size, config.head_dim
        queries, keys = config.num_heads * h, config.num_kv_heads * h
        self.config, self.gated = config, gated
        # Heads side by side: a TPU would keep split ones in a layout that its matmuls copy.
        self.q = parameter(rngs, (L, D, queries * (1 + gated)), ("layers", "embed", "heads"))
        self.k = parameter(rngs, (L, D, keys), ("layers", "embed", "kv_heads"))
        self.v = parameter(rngs, (L, D, keys), ("layers", "embed", "kv_heads"))
        self.o = parameter(rngs, (L, queries, D), ("layers", "heads", "embed"))
        of = {"q": (queries, "heads"), "k": (keys, "kv_heads"), "v": (keys, "kv_heads")}
        for name, (width, axis) in of.items() if config.attention_bias else ():
            setattr(self, name + BIAS, parameter(rngs, (L, width), ("layers", axis), zeros))
        self.q_norm: Any = norm and norm(config, stack, "heads", rngs=rngs)
        self.k_norm: Any = norm and norm(config, stack, "kv_heads", rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation, context: Context
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the attention output, and what the context kept."""
        q, k, v = project(self, ("q", "k", "v"), x)
        q, gate = self._split(q) if self.gated else (q, None)
        q, k = self._turned(q, self.q_norm, rotation, "heads"), self._turned(k, self.k_norm, rotation, "kv_heads")
        v = checkpoint_name(v, "dot").reshape(*v.shape[:2], -1, self.config.head_dim)
        if self.config.attention_multiplier is not None:  # the kernels divide by √h
            q = q * (self.config.attention_multiplier * self.config.head_dim**0.5)
        out, kept = context.attend(q, k, v)
        out = out.reshape(*x.shape[:2], -1)
        (y,) = project(self, ("o",), out if gate is None else out * jax.nn.sigmoid(gate))
        return y, kept

    def _split(self, q: Float[Array, "B T n"]) -> tuple[Float[Array, "B T _"], Float[Array, "B T _"]]:
        """Return queries and gates, heads side by side."""
        heads = q.reshape(*q.shape[:2], -1, 2, self.config.head_dim)
        query, gate = (heads[:, :, :, i].reshape(*q.shape[:2], -1) for i in range(2))
        return query, checkpoint_name(gate, "dot")

    def _turned(self, x: Float[Array, "B T n"], norm: Any, rotation: Rotation, axis: str) -> Array:
        """Return the heads [B, T, N, h], normed and turned."""
        h = self.config.head_dim
        if in_place(x.shape[1], h, rotation) and isinstance(norm, HeadNorm | None):
            scale = None if norm is None else self.config.norm_scale(norm.scale[...])

            def run(x: Array, rotation: Rotation, scale: Array | None) -> Array:
                return normed_rope(x, rotation, scale, eps=self.config.rms_norm_eps)

            wide = ("batch", None, axis)
            arrays = (checkpoint_name(x, "dot"), rotation, scale)
            return on_shards(run, arrays, (wide, ("batch",), ()), wide).reshape(*x.shape[:2], -1, h)
        # Heads before tokens, before norm and rotation make them float32.
        heads = checkpoint_name(jnp.swapaxes(x.reshape(*x.shape[:2], -1, h), 1, 2), "dot")
        return jnp.swapaxes(rope(heads if norm is None else norm(heads), rotation), 1, 2)
