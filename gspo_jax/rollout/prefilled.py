"""What prefill leaves for the decode loop."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from gspo_jax.kernels.kv import KV, Values
from gspo_jax.rollout.prefixes import PackedPrefix
from gspo_jax.rollout.sampling import SampledTokens
from gspo_jax.types import Prompts, RouterRecord


class PrefilledKV(NamedTuple):
    """Cache entries of M prefilled positions in R rows: prompts, or packed prefixes."""

    k: KV
    """Rotary positions applied: [L, R, Kv, M, h] of prompts, [R, L, Kv, M, h] of rows of prefixes."""
    v: Values
    routes: RouterRecord
    """[R, M, L, K]."""
    states: Any = None
    """States at the ends of prompts, arrays [L, R, …], or of the E prefixes of each row, [R, L, E, …]; None in a model
    without them."""


class Prefilled(NamedTuple):
    """Prefilled prompts and prefixes, with every response's next token."""

    prompts: Prompts
    """[P, S]."""
    prefix: PackedPrefix | None
    prompt_kv: PrefilledKV
    prefix_kv: PrefilledKV | None
    first: SampledTokens
    """Token sampled after the prefix, [B]."""

    @property
    def prefix_lengths(self) -> Int[Array, " B"]:
        """Tokens of each response's prefix, 0 without one."""
        return jnp.zeros(len(self.first.tokens), jnp.int32) if self.prefix is None else self.prefix.lengths


def length_mask(lengths: Int[Array, " R"], size: int) -> Bool[Array, "R size"]:
    """Return True on the first `lengths[r]` of `size` positions in row r."""
    return jnp.arange(size)[None] < lengths[:, None]


def flatten_routes(x: Shaped[Array, "*b L K"]) -> Shaped[Array, "*b LK"]:
    """Reshape to [..., L·K], because TPUs pad the last dimension to 128."""
    return x.reshape(*x.shape[:-2], -1)
