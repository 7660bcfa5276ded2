"""Sampling settings, and the distribution that tokens are sampled from."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from gspo_jax.errors import UserError
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.logprobs import log_softmax_at
from gspo_jax.parallel.mesh import manual_axes, on_shards
from gspo_jax.types import KeptRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Distribution that tokens are sampled from, by default the model's."""

    temperature: float = 1.0
    """Divisor of the logits; 0 for greedy decoding."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this total probability; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less than this fraction as probable as the most probable one; 0 keeps all."""
    keep_top: int = 0
    """Ids recorded per token (`KeptRecord`); 0: none."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature {self.temperature} is not in [0, ∞); use 0 for greedy or a positive number")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} is negative; use 0 to keep every token")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is outside (0, 1]; use 1 to keep every token")
        if not 0 <= self.min_p < 1:
            raise UserError(f"min_p {self.min_p} is outside [0, 1); use 0 to keep every token")
        if self.keep_top < 0:
            raise UserError(f"keep_top {self.keep_top} is negative; use 0 to record no ids")

    @property
    def scoring_temperature(self) -> float:
        """Temperature of full-softmax log-probs; 1 for greedy decoding."""
        return self.temperature if self.temperature > 0 else 1.0

    @property
    def truncates(self) -> bool:
        """True if some tokens may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def recorded(self) -> int:
        """Ids recorded per token: none of greedy decoding, which samples from no distribution."""
        return self.keep_top if self.temperature > 0 else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRule:
    """When a response ends, and its padding."""

    max_length: int
    """Response tokens T, prefix and EOS included."""
    eos_ids: tuple[int, ...]
    """Ids that end a response and belong to it; empty: run to the length limit."""
    pad_id: int = 0


class SampledTokens(NamedTuple):
    """Sampled token ids with their log-probs, float32."""

    tokens: Int[Array, "*b"]
    behaviour_logprobs: Float[Array, "*b"]
    """Log-prob under the distribution sampled from; 0 for greedy decoding."""
    logprobs: Float[Array, "*b"]
    """Log-prob under the full softmax at the scoring temperature, or where `kept.whole` renormalised over the kept
    ids."""
    kept: KeptRecord | None = None


def is_eos(tokens: Int[Array, "*b"], eos_ids: tuple[int, ...]) -> Bool[Array, "*b"]:
    """Return True for tokens that end a response."""
    ids = jnp.asarray(eos_ids, jnp.int32)
    return (tokens[..., None] == ids.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)


def token_keys(keys: Key[Array, " B"], t: Int[Array, " B"]) -> Key[Array, " B"]:
    """Return keys for sampling token t of each response. Does not consume the response's key."""
    return jax.vmap(jax.random.fold_in)(keys, t)


def truncate(logits: Float[Array, "B V"], *, top_k: int, top_p: float, min_p: float = 0.0) -> Float[Array, "B V"]:
    """Set the logits to -inf for tokens that top-k, then top-p, then min-p (arXiv 2407.01082) exclude.

    Ties with the last kept token stay, and so does the most probable token.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        last = jnp.where(before < top_p, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < last, -jnp.inf, logits)
    if min_p > 0:
        least = logits.max(axis=-1, keepdims=True) + math.log(min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def _most_probable(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Return the least id with the highest logit, in [0, V) even for a row with NaN.

    On CPU argmax takes eight times as long. For TPU it compiles to a reduce of windows with an output in bfloat16,
    whose rounding would make ties of close logits.
    """
    ids, last = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1), logits.shape[1] - 1
    return jnp.where(logits == logits.max(axis=-1, keepdims=True), ids, last).min(axis=-1)


def draw(keys: Key[Array, " B"], logits: Float[Array, "B V"], sampling: SamplingParams) -> SampledTokens:
    """Sample one token per row with that row's key."""
    logits = logits.astype(jnp.float32) / sampling.scoring_temperature
    if sampling.temperature == 0:
        tokens = _most_probable(logits)
        logprobs = log_softmax_at(logits, tokens)[0]
        return SampledTokens(tokens, jnp.zeros_like(logprobs), logprobs)
    kept = truncate(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, kept.shape[1:], kept.dtype))(keys)
    tokens = _most_probable(kept + noise)
    full = log_softmax_at(logits, tokens)[0]
    # The kept tokens share probability 1: log p_kept = log p - log of the kept mass.
    behaviour = full + jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(kept, axis=-1)
    drawn = SampledTokens(tokens, behaviour, full)
    return _recorded(drawn, logits, kept, sampling) if sampling.keep_top else drawn


def _recorded(
    drawn: SampledTokens, logits: Float[Array, "B V"], kept: Float[Array, "B V"], sampling: SamplingParams
) -> SampledTokens:
    """Add the record of kept ids to draws from `kept`, the truncated logits."""
    tokens, behaviour, full, _ = drawn
    K = sampling.keep_top
    values, ids = _largest(kept, K, exact=sampling.truncates)
    whole = jnp.zeros(len(tokens), bool)
    if sampling.truncates:
        whole = (kept > -jnp.inf).sum(axis=-1) <= K
    own = jnp.where(whole, behaviour, full)
    log_z = jnp.where(whole, jax.nn.logsumexp(kept, axis=-1), jax.nn.logsumexp(logits, axis=-1))
    found = ids == tokens[:, None]
    last = jnp.arange(K)[None] == K - 1
    token_here = jnp.where(found.any(axis=-1, keepdims=True), found, last)
    used = (values > -jnp.inf) | token_here
    ids = jnp.where(token_here, tokens[:, None], jnp.where(used, ids, -1))
    logprobs = jnp.where(token_here, own[:, None], jnp.where(used, values - log_z[:, None], 0))
    return SampledTokens(tokens, behaviour, own, KeptRecord(ids, logprobs, whole))


def _largest(logits: Float[Array, "B V"], k: int, *, exact: bool) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Return the k largest logits, in descending order, and their ids.

    Unless `exact`, a TPU looks for them in one pass over the logits, and may miss some that are not the largest. Each
    shard of the vocabulary sends its own k.
    """

    def run(logits: Array) -> Any:
        columns = logits.shape[1]
        find: Any = jax.lax.approx_max_k if platform() == "tpu" and not exact else jax.lax.top_k
        values, ids = find(logits, min(k, columns))
        if "tensor" not in manual_axes() or jax.lax.axis_size("tensor") == 1:
            return values, ids
        ids = ids + jax.lax.axis_index("tensor") * columns
        values, ids = (jax.lax.all_gather(x, "tensor", axis=1, tiled=True) for x in (values, ids))
        values, ids = jax.lax.sort((-values, ids), num_keys=1)
        return -values[:, :k], ids[:, :k]

    return on_shards(run, (logits,), (("batch", "vocab"),), [("batch",), ("batch",)])
