"""Temperature, top-k, top-p and min-p: one definition of the distribution that tokens are drawn from."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from gspo_jax.kernels.logprobs import log_softmax_at
from gspo_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave the distribution whole."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature} is negative; use 0 for greedy or a positive number")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} is negative; use 0 to keep every token")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is outside (0, 1]; use 1 to keep every token")
        if not 0 <= self.min_p < 1:
            raise UserError(f"min_p {self.min_p} is outside [0, 1); use 0 to keep every token")

    @property
    def scoring_temperature(self) -> float:
        """The temperature at which log-probs are taken: 1 for greedy decoding, which has none of its own."""
        return self.temperature if self.temperature > 0 else 1.0


def truncate(logits: Float[Array, "B V"], *, top_k: int, top_p: float, min_p: float = 0.0) -> Float[Array, "B V"]:
    """-inf for tokens outside the top k, then outside the smallest set whose probability reaches top_p, then for those
    less than min_p times as probable as the most probable one (arXiv 2407.01082).

    Tokens tied with the last one kept stay. The most probable token always stays.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # probability of all tokens ranked above
        last = jnp.where(before < top_p, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < last, -jnp.inf, logits)
    if min_p > 0:
        least = logits.max(axis=-1, keepdims=True) + math.log(min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def draw(
    keys: Key[Array, " B"], logits: Float[Array, "B V"], sampling: Sampling
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Draws one token per row with that row's key.

    Returns the ids, their log-prob under the distribution drawn from (0 when greedy: it is a point mass), and their
    log-prob under the whole softmax at the scoring temperature. All log-probs float32.
    """
    logits = logits.astype(jnp.float32) / sampling.scoring_temperature
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logprobs = log_softmax_at(logits, tokens)[0]
        return tokens, jnp.zeros_like(logprobs), logprobs
    kept = truncate(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    tokens = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    full = log_softmax_at(logits, tokens)[0]
    # Probability 1 is spread over fewer tokens: log p_kept = log p - log of the kept mass.
    behaviour = full + jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(kept, axis=-1)
    return tokens, behaviour, full
