"""Log-probs and entropies of target tokens from hidden states, without a [B, T, V] array."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gspo_jax.kernels.dense_matmul import matmul


def log_softmax_at(
    logits: Float[Array, "*n V"], targets: Int[Array, "*n"]
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Return log softmax(logits)[target] and the entropy of softmax(logits), in nats and float32.

    Comparison instead of a gather keeps a sharded vocabulary sharded.
    """
    logits = logits.astype(jnp.float32)
    shifted = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    log_z = jnp.log(jnp.exp(shifted).sum(axis=-1))
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    picked = jnp.where(vocabulary == targets[..., None], shifted, 0).sum(axis=-1)
    probs = jnp.exp(shifted - log_z[..., None])
    return picked - log_z, log_z - (probs * shifted).sum(axis=-1)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return log softmax(h W / temperature)[target] and the softmax's entropy.

    Logits exist for about `chunk` tokens at once ([B, chunk // B, V], at least one position per row). The backward pass
    recomputes them. Outputs are float32.
    """
    B, T = targets.shape
    width = max(1, min(T, chunk // B))
    chunks = -(-T // width)
    pad = chunks * width - T

    @partial(jax.checkpoint, prevent_cse=False)
    def one(h: Array, y: Array) -> tuple[Array, Array]:
        logits = matmul(h, head, dtype=jnp.float32)
        return log_softmax_at(logits / temperature, y)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, chunks, width, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, chunks * width)[:, :T]

    with jax.named_scope("logits"):
        _, (logprobs, entropy) = jax.lax.scan(lambda c, xs: (c, one(*xs)), None, (split(hidden), split(targets)))
    return join(logprobs), join(entropy)
