"""The gated delta rule as a mixer of tokens (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Projections make queries, keys and values, a gate z of outputs, and per value head a step β = σ(b) and a decay
g = −exp(A_log) · softplus(a + dt_bias). A short convolution mixes q, k and v with the three tokens before. The outputs
of the rule (kernels/delta_rule.py) are normed per head and multiplied by silu(z).

A text's state in a layer has one size, whatever the text's length. A response's first is its prompt's. In the decoder a
slot takes the state with the response, and keeps every bit of it while slots move together and while the host is asked
between pieces of a decode. A response that gives up its slot, or goes on in another call, is a prefix that is prefilled
again, in chunks: its state is then the same up to rounding.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.delta_rule import conv_inputs, delta_rule, delta_step, short_conv, short_conv_step
from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.kernels.rotary import Rotation, rms_norm
from gspo_jax.models.attention import Context
from gspo_jax.models.config import ModelConfig, Stack, ones, parameter
from gspo_jax.models.matrices import project
from gspo_jax.parallel.mesh import constrain, on_shards


class DeltaState(NamedTuple):
    """States of texts in one layer, or of all recurrent layers with a leading [L]."""

    memory: Float[Array, "*L B Hv dk dv"]
    """S, float32."""
    inputs: Float[Array, "*L B Hk w c"]
    """The last inputs of the convolution, each key head's channels together, in the compute dtype."""

    @classmethod
    def shapes(cls, config: ModelConfig, dtype: DTypeLike) -> "DeltaState":
        """Return the shapes of a text's state in one layer."""
        memory = config.linear_value_heads, config.linear_key_dim, config.linear_value_dim
        inputs = config.linear_key_heads, config.linear_conv_width - 1, sum(_widths(config)) // config.linear_key_heads
        shapes: Any = jax.ShapeDtypeStruct(memory, jnp.float32), jax.ShapeDtypeStruct(inputs, dtype)
        return cls(*shapes)


class Mixed(NamedTuple):
    """Inputs of the state's rule at each token."""

    qkv: Float[Array, "B *T c"]
    """Inputs of the convolution: of each key head its query, its key, and its values."""
    g: Float[Array, "B *T Hv"]
    beta: Float[Array, "B *T Hv"]


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    """Return the channels of queries, keys and values."""
    keys = config.linear_key_heads * config.linear_key_dim
    return keys, keys, config.linear_value_heads * config.linear_value_dim


class DeltaMixer(nnx.Module):
    """Linear attention by the gated delta rule. Parameters have a leading layer axis. `__call__` gets a layer's slice.

    Projections are as checkpoints store them: with `grouped`, `qkvz` has each key head's query, key, values and gates
    side by side, and `ba` its value heads' b, then a (Qwen3-Next); else `qkv` has all queries, all keys and all values,
    beside `z`, `b` and `a` (Qwen3.5).
    """

    def __init__(self, config: ModelConfig, stack: Stack, *, grouped: bool, rngs: nnx.Rngs):
        L, D, Hv, (keys, _, values) = stack.layers, config.hidden_size, config.linear_value_heads, _widths(config)
        channels = 2 * keys + values
        self.config, self.grouped = config, grouped
        if grouped:
            widths = {"qkvz": channels + values, "ba": 2 * Hv}
        else:
            widths = {"qkv": channels, "z": values, "b": Hv, "a": Hv}
        for name, width in widths.items():
            setattr(self, name, parameter(rngs, (L, D, width), ("layers", "embed", "heads")))
        self.projections = tuple(widths)
        # Whole on every shard: its channels are not in the order of heads.
        self.conv = parameter(rngs, (L, channels, 1, config.linear_conv_width), ("layers", *("head_dim",) * 3))
        self.a_log = parameter(rngs, (L, Hv), ("layers", "heads"), _decays, float32=True)
        self.dt_bias = parameter(rngs, (L, Hv), ("layers", "heads"), ones, float32=True)
        self.norm = parameter(rngs, (L, config.linear_value_dim), ("layers", "head_dim"), ones, float32=True)
        self.out = parameter(rngs, (L, values, D), ("layers", "heads", "embed"))

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation, context: Context
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the mixer's output, and what the context kept. It has no use for positions."""
        del rotation
        config, shape = self.config, (*x.shape[:2], self.config.linear_value_heads, -1)
        qkv, z, b, a = self._projected(x)
        b, a = b.astype(jnp.float32), a.astype(jnp.float32)
        g = -jnp.exp(self.a_log[...])[None, None] * jax.nn.softplus(a + self.dt_bias[...][None, None])
        out, kept = context.recur(self, Mixed(qkv, g, jax.nn.sigmoid(b)))
        y = rms_norm(out.reshape(shape), self.norm[...], config.rms_norm_eps)
        y = (y.astype(jnp.float32) * jax.nn.silu(z.reshape(shape).astype(jnp.float32))).astype(x.dtype)
        (y,) = project(self, ("out",), y.reshape(*x.shape[:2], -1))
        return y, kept

    def _projected(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T _"]]:
        """Return qkv, z, b and a, each key head's columns together."""
        found = [checkpoint_name(y, "dot") for y in project(self, self.projections, x)]
        if self.grouped:
            qkvz, ba = map(self._by_head, found)
            values = self.config.linear_value_heads // self.config.linear_key_heads
            ends = qkvz.shape[-1] - values * self.config.linear_value_dim, values
            parts = (part for y, end in zip((qkvz, ba), ends, strict=True) for part in jnp.split(y, [end], axis=-1))
            return [part.reshape(*x.shape[:2], -1) for part in parts]
        return [self._regrouped(found[0]).reshape(found[0].shape), *found[1:]]

    def _by_head(self, x: Float[Array, "*b c"]) -> Float[Array, "*b Hk _"]:
        return x.reshape(*x.shape[:-1], self.config.linear_key_heads, -1)

    def _regrouped(self, x: Float[Array, "*b c"]) -> Float[Array, "*b Hk _"]:
        """Return all queries, all keys and all values with each key head's together.

        Shards gather x, and take their heads afterwards: an exchange of parts would take all shards in a loop of steps,
        which some leave earlier.
        """
        keys, _, _ = _widths(self.config)
        batch = ("batch",) + (None,) * (x.ndim - 1) if x.ndim > 2 else (None,) * x.ndim
        parts = jnp.split(constrain(x, *batch), [keys, 2 * keys], axis=-1)
        return constrain(jnp.concatenate([self._by_head(part) for part in parts], axis=-1), *batch, None)

    def _weight(self) -> Float[Array, "Hk c W"]:
        return jnp.moveaxis(self._regrouped(self.conv[...][:, 0].T), 0, -1)

    def _heads(self, qkv: Float[Array, "B *T c"]) -> list[Float[Array, "B *T n d"]]:
        dk, dv = self.config.linear_key_dim, self.config.linear_value_dim
        q, k, v = jnp.split(self._by_head(qkv), [dk, 2 * dk], axis=-1)
        return [q, k, v.reshape(*qkv.shape[:-1], -1, dv)]

    def rows(self, inputs: Mixed, spans: Spans, ends: Int[Array, " E"] | None) -> tuple[Array, DeltaState]:
        """Return the rule's outputs in rows and end states, as `Recurrence` says."""
        wide, row, width = ("batch", None, "heads"), ("batch",), self.config.linear_conv_width
        weight = self._weight().reshape(-1, width)
        qkv = on_shards(short_conv, (inputs.qkv, weight, spans), (wide, ("heads",), row), wide)
        last = on_shards(partial(conv_inputs, width=width), (inputs.qkv, spans, ends), (wide, row, ()), wide)
        arrays = *self._heads(qkv), inputs.g, inputs.beta, spans, ends
        out, memory = on_shards(delta_rule, arrays, (*(wide,) * 5, row, ()), [wide, ("batch", "heads")])
        return out, DeltaState(memory, jnp.swapaxes(self._by_head(last), 1, 2))

    def step(self, state: DeltaState, inputs: Mixed) -> tuple[Array, DeltaState]:
        """Return the rule's outputs of one more token and the states after it."""
        qkv, last = short_conv_step(state.inputs, self._by_head(inputs.qkv), self._weight())
        q, k, v = self._heads(qkv.reshape(inputs.qkv.shape))
        out, memory = delta_step(state.memory, q, k, v, inputs.g, inputs.beta)
        return out, DeltaState(memory, last)


def _decays(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return log A for A uniform within 0.01 to 16."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16))
