"""Multi-head latent attention (arXiv 2405.04434, 2412.19437): keys and values of all heads from one latent per token.

With the residual stream x, r = `Latent.rank`, and turn the rotation of positions:

    [c | p] = x kv_a,  c = rms_norm(c) [r],  p = turn(p)       p is one rotary key for all heads
    [k | v] = c kv_b                                           per head
    [q | s] = rms_norm(x q_a) q_b, or x q,  s = turn(s)        per head
    scores  = (q · k + s · p) growth / √(width of [q | s])     growth is YaRN's, else 1

Training and prefill expand keys and values. A cache holds [c | p] alone, of which all heads read the same: a decode
step takes kv_b into its queries and its outputs, which attend to latents, q · k = (k's part of kv_b · q) · c.

The fused decode kernels have no such layer: every platform takes `Transformer`'s own step.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

from gspo_jax.errors import UserError
from gspo_jax.kernels.grouped_matmul import scaled
from gspo_jax.kernels.rotary import Rotation, halves, rms_norm, rope
from gspo_jax.models.attention import Context
from gspo_jax.models.config import ModelConfig, Stack, ones, parameter, zeros
from gspo_jax.models.matrices import BIAS, Matrix, matrix, project

_EPS = 1e-6
"""Of the latents' norms, whatever that of others."""


class LatentAttention(nnx.Module):
    """Multi-head latent attention. Parameters have a leading layer axis. `__call__` gets one layer's slice."""

    def __init__(self, config: ModelConfig, stack: Stack, *, rngs: nnx.Rngs):
        if config.latent is None:
            raise UserError(f"a model of the family {config.family} has no sizes of its latent attention; give latent")
        L, D, H, latent = stack.layers, config.hidden_size, config.num_heads, config.latent
        self.config, self.latent = config, latent
        queries, cached = H * (latent.plain_dim + config.head_dim), config.cached.key_dim
        self.kv_a = parameter(rngs, (L, D, cached), ("layers", "embed", "rank"))
        self.kv_norm = parameter(rngs, (L, latent.rank), ("layers", "latent"), ones, float32=True)
        both = H * (latent.plain_dim + latent.value_dim)
        self.kv_b = parameter(rngs, (L, latent.rank, both), ("layers", "latent", "heads"))
        self.kv_b.set_metadata(whole=True)  # a step reads it by heads
        self.o = parameter(rngs, (L, H * latent.value_dim, D), ("layers", "heads", "embed"))
        if latent.query_rank is None:
            self.q = parameter(rngs, (L, D, queries), ("layers", "embed", "heads"))
        else:
            self.q_a = parameter(rngs, (L, D, latent.query_rank), ("layers", "embed", "rank"))
            self.q_norm = parameter(rngs, (L, latent.query_rank), ("layers", "latent"), ones, float32=True)
            self.q_b = parameter(rngs, (L, latent.query_rank, queries), ("layers", "latent", "heads"))
        of = {"kv_a": (cached, "rank"), "q_a": (latent.query_rank, "rank"), "o": (D, "embed")}
        for name, (width, axis) in of.items() if config.attention_bias else ():
            if width is not None:
                setattr(self, name + BIAS, parameter(rngs, (L, width), ("layers", axis), zeros))

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation, context: Context
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the attention output, and what the context kept: of rows, ([B, T, 1, r + rotary width], None)."""
        n, r, (B, T, _) = self.latent.plain_dim, self.latent.rank, x.shape
        queries = self._queries(x).reshape(B, T, -1, n + self.config.head_dim)
        queries = jnp.concatenate([queries[..., :n], self._turned(queries[..., n:], rotation)], axis=-1)
        made = self._project("kv_a", x)
        latents = rms_norm(made[..., :r], self.kv_norm[...], _EPS)
        rotary = self._turned(made[..., None, r:], rotation)
        attend = self._attend_absorbed if context.is_step else self._attend_expanded
        out, kept = attend(queries, latents, rotary, context)
        (y,) = project(self, ("o",), out.reshape(B, T, -1))
        return y, kept

    def _project(self, name: str, x: Array) -> Array:
        return checkpoint_name(project(self, (name,), x)[0], "dot")

    def _queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Hh"]:
        if self.latent.query_rank is None:
            return self._project("q", x)
        return self._project("q_b", rms_norm(self._project("q_a", x), self.q_norm[...], _EPS))

    def _turned(self, x: Float[Array, "B T N p"], rotation: Rotation) -> Float[Array, "B T N p"]:
        heads = jnp.swapaxes(x, 1, 2)
        return jnp.swapaxes(rope(halves(heads) if self.latent.interleaved else heads, rotation), 1, 2)

    def _scaled(self, queries: Array, width: int) -> Array:
        """Return queries for a kernel that divides their scores by √`width`."""
        scaling, own = self.config.rope_scaling, self.latent.plain_dim + self.config.head_dim
        factor = (1.0 if scaling is None else scaling.latent_growth) * math.sqrt(width / own)
        return queries if factor == 1 else queries * factor

    def _attend_expanded(
        self, queries: Float[Array, "B T H h"], latents: Array, rotary: Array, context: Context
    ) -> tuple[Float[Array, "B T H v"], Any]:
        (B, T, H, own), n, v = queries.shape, self.latent.plain_dim, self.latent.value_dim
        both = self._project("kv_b", latents).reshape(B, T, H, n + v)
        keys = jnp.concatenate([both[..., :n], jnp.broadcast_to(rotary, (B, T, H, own - n))], axis=-1)
        width = max(own, v)  # kernels take keys and values of one width
        q, k, values = (_padded(x, width) for x in (self._scaled(queries, width), keys, both[..., n:]))
        out, kept = context.attend(q, k, values, keep=(_cached(latents, rotary), None))
        return out[..., :v], kept

    def _attend_absorbed(
        self, queries: Float[Array, "B Q H h"], latents: Array, rotary: Array, context: Context
    ) -> tuple[Float[Array, "B Q H v"], Any]:
        n, made = self.latent.plain_dim, matrix(self, "kv_b", queries.dtype)
        keys, values = (_Columns.of(made, queries.shape[2], own) for own in (slice(n), slice(n, None)))
        absorbed = jnp.concatenate([keys.transposed(queries[..., :n]), queries[..., n:]], axis=-1)
        out, kept = context.attend(self._scaled(absorbed, absorbed.shape[-1]), _cached(latents, rotary), None)
        return values(out[..., : self.latent.rank]), kept


def _padded(x: Float[Array, "B T N h"], width: int) -> Array:
    return jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),))


def _cached(latents: Float[Array, "B T r"], rotary: Float[Array, "B T 1 p"]) -> Float[Array, "B T 1 rp"]:
    return jnp.concatenate([latents[:, :, None], rotary], axis=-1)


class _Columns(NamedTuple):
    """The columns W of `kv_b` that make the keys, or the values, of each head."""

    weights: Shaped[Array, "r H w"]
    scale: Float[Array, "1 1 H w"] | None
    """Of int8 weights."""
    low: tuple[Float[Array, "r R"], Float[Array, "R H w"], float] | None
    """An adapter's A, B and s."""

    @classmethod
    def of(cls, made: Matrix, heads: int, own: slice) -> "_Columns":
        def part(x: Array) -> Array:
            return x.reshape(*x.shape[:-1], heads, -1)[..., own]

        scale, low = made.scale, made.low
        scale = None if scale is None else part(scale)[None, None]
        return cls(part(made.weights), scale, None if low is None else (low.a, part(low.b), low.scale))

    def __call__(self, x: Float[Array, "B Q H r"]) -> Float[Array, "B Q H w"]:
        """Return x W, each head by its own columns."""
        y = _product("bqhr,rhw->bqhw", x, self.weights)
        y = y if self.scale is None else scaled(y, self.scale)
        if self.low is None:
            return y
        a, b, s = self.low
        return y + _product("bqhk,khw->bqhw", x @ a * s, b)

    def transposed(self, x: Float[Array, "B Q H w"]) -> Float[Array, "B Q H r"]:
        """Return x Wᵀ."""
        y = _product("bqhw,rhw->bqhr", x if self.scale is None else scaled(x, self.scale), self.weights)
        if self.low is None:
            return y
        a, b, s = self.low
        return y + _product("bqhw,khw->bqhk", x, b) * s @ a.T


def _product(how: str, x: Array, weights: Array) -> Array:
    sums = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(how, x, weights.astype(x.dtype), preferred_element_type=sums).astype(x.dtype)
