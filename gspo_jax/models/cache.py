"""The decoder's key/value cache: each prompt once, and each response's own tokens."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from gspo_jax.parallel.mesh import constrain


@struct.dataclass
class Cache:
    """Keys and values of all layers, in two segments. Rows of a group are adjacent: row b belongs to prompt b // G."""

    prompt_k: Float[Array, "L P S Kv h"]
    prompt_v: Float[Array, "L P S Kv h"]
    prompt_lengths: Int[Array, " P"]
    """Filled slots of the prompt segment."""
    k: Float[Array, "L B T Kv h"]
    v: Float[Array, "L B T Kv h"]
    step: Int[Array, ""]
    """Filled slots of the response segment: all rows advance together."""


def new_cache(prompt_k: Array, prompt_v: Array, prompt_lengths: Array, *, group_size: int, length: int) -> Cache:
    """A cache with the prompts prefilled and room for `length` tokens in each of `group_size` responses per prompt."""
    L, P, _, Kv, h = prompt_k.shape
    empty = constrain(
        jnp.zeros((L, P * group_size, length, Kv, h), prompt_k.dtype), "layers", "batch", None, "kv_heads", None
    )
    return Cache(prompt_k, prompt_v, prompt_lengths, empty, empty, jnp.zeros((), jnp.int32))
