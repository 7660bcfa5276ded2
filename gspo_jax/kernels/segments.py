"""Rows of a prompt and several responses to it: what each token has before it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def valid_so_far(valid: Bool[Array, "B N"], prompt: int, responses: int) -> Int[Array, "B N"]:
    """How many valid tokens each token sees, itself included: of the prompt, and of its own response.

    A row is `prompt` tokens and then `responses` segments of equal length.
    """
    B, N = valid.shape
    of_prompt = jnp.cumsum(valid[:, :prompt], axis=1)
    start = valid[:, :prompt].sum(axis=1).reshape(B, 1, 1)
    own = start + jnp.cumsum(valid[:, prompt:].reshape(B, responses, (N - prompt) // responses), axis=2)
    return jnp.concatenate([of_prompt, own.reshape(B, -1)], axis=1)
