"""Log-probs, entropies and divergences of token distributions from hidden states, without a [B, T, V] array."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels import logprobs_tpu
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.dense_matmul import matmul
from gspo_jax.kernels.grouped_matmul import Kept
from gspo_jax.parallel.mesh import manual_axes, on_shards

_WHOLE = 64
"""Tokens of a chunk of logits are a multiple of it, or all that one may have."""


class KeptIds(NamedTuple):
    """Ids whose log-probs are wanted beside each target's, from a `types.KeptRecord`."""

    ids: Int[Array, "B T K"]
    """Distinct; -1 in unused entries."""
    whole: Bool[Array, "B T"]
    """True where log-probs are renormalised over these ids."""


class _Sums(NamedTuple):
    """A softmax's sums over logits l, float32."""

    top: Float[Array, "*n"]
    """max l."""
    z: Float[Array, "*n"]
    """Σ exp(l − max l)."""
    weighted: Float[Array, "*n"]
    """Σ exp(l − max l) (l − max l)."""
    picked: Float[Array, "*n"]
    """The target's l − max l."""
    kept: Float[Array, "*n K"] | None = None
    """The kept ids' l − max l; arbitrary in unused entries."""

    @classmethod
    def of(
        cls, logits: Float[Array, "*n V"], targets: Int[Array, "*n"], ids: Int[Array, "*n K"] | None = None
    ) -> "_Sums":
        top = logits.max(axis=-1)
        shifted = logits - top[..., None]
        parts, here = jnp.exp(shifted), _is_target(logits, targets)
        sums = parts.sum(axis=-1), (parts * shifted).sum(axis=-1), jnp.where(here, shifted, 0).sum(axis=-1)
        if ids is None:
            return cls(top, *sums)
        there = _is_target(logits[..., None, :], ids)
        return cls(top, *sums, jnp.where(there, shifted[..., None, :], 0).sum(axis=-1))

    @property
    def log_z(self) -> Float[Array, "*n"]:
        """log Σ exp(l − max l)."""
        return jnp.log(self.z)

    @property
    def entropy(self) -> Float[Array, "*n"]:
        return self.log_z - self.weighted / self.z


def _is_target(logits: Float[Array, "*m V"], targets: Int[Array, "*n"]) -> Array:
    """Return True at the target, by comparison: a gather would not keep a sharded vocabulary sharded."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


def log_softmax_at(
    logits: Float[Array, "*n V"], targets: Int[Array, "*n"]
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """Return log softmax(logits)[target] and the entropy of softmax(logits), in nats and float32."""
    sums = _Sums.of(logits.astype(jnp.float32), targets)
    return sums.picked - sums.log_z, sums.entropy


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    kept: KeptIds | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T K"] | None]:
    """Return log softmax(h W / temperature)[target], the softmax's entropy, and its log-probs at the `kept` ids.

    Where `kept.whole`, the first and the last are renormalised over the kept ids S: log π^S(v) = log π(v) − log Σ_{u∈S}
    π(u). The entropy is always the full softmax's. The last is 0 in unused entries, None without `kept`.

    Logits exist for about `chunk` tokens at once ([B, chunk // B, V], at least one position per row), in the forward
    pass on TPU for none. The backward pass recomputes them. Outputs are float32.
    """
    with jax.named_scope("logits"):
        ids = None if kept is None else kept.ids
        logprobs, entropy, at_ids = _logprobs(hidden, head, targets, ids, temperature, chunk)
        if kept is None:
            return logprobs, entropy, None
        used = kept.ids >= 0
        # Where not whole, a finite sum that is not used, since its gradient must be finite.
        mass = jax.nn.logsumexp(at_ids, axis=-1, where=used | ~kept.whole[..., None])
        mass = jnp.where(kept.whole, mass, 0.0)
        return logprobs - mass, entropy, jnp.where(used, at_ids - mass[..., None], 0.0)


def divergences(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    other_hidden: Float[Array, "B T E"],
    other_head: Float[Array, "E U"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Float[Array, "B T"]:
    """Return KL(p ‖ q) = Σ_v p_v (log p_v − log q_v), p = softmax(h W / temperature), and q likewise of another model.

    The sum is over the min(U, V) ids that both have. q is constant. With f_v = log p_v − log q_v on these ids the
    gradient in logit l_j is p_j (f_j − KL) / temperature if U ≥ V. Logits of both exist for about `chunk` tokens at
    once, in the backward pass too, which recomputes them. Outputs are float32.
    """
    both = min(head.shape[1], other_head.shape[1])

    def kl(logits: Array, other: Array) -> Array:
        log_p, log_q = (jax.nn.log_softmax(x)[..., :both] for x in (logits, other))
        return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)

    return _compared(kl, hidden, head, other_hidden, other_head, temperature, chunk)


def forward_divergences(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    other_hidden: Float[Array, "B T E"],
    other_head: Float[Array, "E V"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    kept: Callable[[Float[Array, "N V"]], Float[Array, "N V"]] | None = None,
) -> Float[Array, "B T"]:
    """Return KL(q ‖ p) = Σ_v q_v (log q_v − log p_v) of the distributions of `divergences`, with q constant.

    `kept` sets logits / temperature of q to -inf where q is 0. Minus the gradient is q's expectation of the score,
    Σ_v q_v ∇ log p_v: (q_j − p_j) / temperature in logit l_j.
    """

    def kl(logits: Array, other: Array) -> Array:
        other = other if kept is None else kept(other.reshape(-1, other.shape[-1])).reshape(other.shape)
        log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
        return jnp.where(log_q > -jnp.inf, jnp.exp(log_q) * (log_q - log_p), 0).sum(axis=-1)

    return _compared(kl, hidden, head, other_hidden, other_head, temperature, chunk)


def _compared(
    compare: Callable[[Array, Array], Array],
    hidden: Array,
    head: Array,
    other_hidden: Array,
    other_head: Array,
    temperature: float,
    chunk: int,
) -> Array:
    """Compare two models' logits / temperature, the other's constant, in chunks that the backward pass recomputes."""
    other_hidden, other_head = jax.lax.stop_gradient((other_hidden, other_head))
    split, join = _chunks(hidden.shape[:2], chunk)

    def one(h: Array, other: Array) -> Array:
        return compare(*(matmul(x, w, dtype=jnp.float32) / temperature for x, w in ((h, head), (other, other_head))))

    def step(_: None, xs: tuple[Array, Array]) -> tuple[None, Array]:
        return None, jax.checkpoint(one, prevent_cse=False)(*xs)

    with jax.named_scope("logits"):
        return join(jax.lax.scan(step, None, split((hidden, other_hidden)))[1])


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _logprobs(
    hidden: Array, head: Array, targets: Array, ids: Array | None, temperature: float, chunk: int
) -> tuple[Array, Array, Array | None]:
    return _of_sums(_sums(hidden, head, targets, ids, temperature, chunk))


def _of_sums(sums: _Sums) -> tuple[Array, Array, Array | None]:
    kept = None if sums.kept is None else sums.kept - sums.log_z[..., None]
    return sums.picked - sums.log_z, sums.entropy, kept


def _sums(hidden: Array, head: Array, targets: Array, ids: Array | None, temperature: float, chunk: int) -> _Sums:
    if platform() == "tpu" and hidden.shape[-1] % logprobs_tpu.LANES == 0:
        return _on_shards(hidden, head, targets, ids, temperature)
    split, join = _chunks(targets.shape, chunk)

    def one(h: Array, y: Array, v: Array | None) -> _Sums:
        return _Sums.of(matmul(h, head, dtype=jnp.float32) / temperature, y, v)

    return join(jax.lax.scan(lambda c, xs: (c, one(*xs)), None, split((hidden, targets, ids)))[1])


def _on_shards(hidden: Array, head: Array, targets: Array, ids: Array | None, temperature: float) -> _Sums:
    """Return the kernel's sums over the vocabulary's shards."""

    def run(hidden: Array, head: Array, targets: Array, *ids: Array) -> _Sums:
        (B, T, D), columns = hidden.shape, head.shape[1]
        split = "tensor" in manual_axes()
        own = [x - jax.lax.axis_index("tensor") * columns if split else x for x in (targets, *ids)]
        own = [x.reshape(B * T, *x.shape[2:]) for x in own]
        found = logprobs_tpu.softmax_sums(hidden.reshape(B * T, D), head, *own, temperature=temperature)
        top, z, weighted, *picked = (x.reshape(B, T, *x.shape[1:]) for x in found)
        if not split:
            return _shifted(top, z, weighted, picked)
        whole = jax.lax.pmax(top, "tensor")
        down, add = top - whole, partial(jax.lax.psum, axis_name="tensor")
        share = jnp.exp(down)
        return _shifted(whole, add(share * z), add(share * (weighted + down * z)), [add(x) for x in picked])

    rows = ("batch",)
    arrays = (hidden, head, targets) if ids is None else (hidden, head, targets, ids)
    return on_shards(run, arrays, (rows, (None, "vocab"), *[rows] * (len(arrays) - 2)), rows)


def _shifted(top: Array, z: Array, weighted: Array, picked: list[Array]) -> _Sums:
    """Return the sums with logits `picked`, of the target and of any kept ids, relative to the largest."""
    target, *kept = picked
    return _Sums(top, z, weighted, target - top, *(x - top[..., None] for x in kept))


def _chunks(shape: tuple[int, ...], chunk: int) -> tuple[Any, Any]:
    """Return functions that split arrays [B, T, …] of a tree into chunks [C, B, width, …], and that join them."""
    B, T = shape
    most = max(1, min(T, chunk // B))
    chunks = -(-T // most)
    width = min(most, -(-T // (chunks * _WHOLE)) * _WHOLE)  # of equal lengths, so that little is filled up

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * width - T)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, chunks, width, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, chunks * width, *x.shape[3:])[:, :T]

    return partial(jax.tree.map, split), partial(jax.tree.map, join)


def _forward(
    hidden: Any, head: Any, targets: Any, ids: Any, temperature: float, chunk: int
) -> tuple[Any, tuple[Any, ...]]:
    ids = None if ids is None else ids.value
    sums = _sums(hidden.value, head.value, targets.value, ids, temperature, chunk)
    of_all = sums.top + sums.log_z, sums.entropy
    return _of_sums(sums), (hidden.value, Kept.of(head), targets.value, ids, of_all)


def _backward(
    temperature: float, chunk: int, kept: tuple[Any, ...], given: Any
) -> tuple[Array, Array | None, None, None]:
    """Recompute logits l: with p = softmax(l), d log p_y / dl = 1_y − p and dH / dl = −p (log p + H)."""
    hidden, matrix, targets, ids, of_all = kept
    grads = [None if isinstance(g, jax.custom_derivatives.SymbolicZero) else g for g in given]
    split, join = _chunks(targets.shape, chunk)

    def one(total: Array | None, xs: tuple[Any, ...]) -> tuple[Array | None, Array]:
        h, y, v, (log_sum, entropy), (of_logprob, of_entropy, of_kept) = xs

        def logits_of(h: Array, *head: Array) -> Array:
            return matmul(h, *(head or [matrix.value]), dtype=jnp.float32) / temperature

        logits, pull = jax.vjp(logits_of, h, *([] if total is None else [matrix.value]))
        log_p = logits - log_sum[..., None]
        p, d = jnp.exp(log_p), jnp.zeros((), jnp.float32)
        if of_logprob is not None:
            d += jnp.where(_is_target(logits, y), of_logprob[..., None], 0) - p * of_logprob[..., None]
        if of_entropy is not None:
            d -= p * (log_p + entropy[..., None]) * of_entropy[..., None]
        if of_kept is not None:
            own = jnp.zeros_like(logits)
            for k in range(v.shape[-1]):  # on TPU part of the product; a sum over [n, K, V] would be written
                own = jnp.where(_is_target(logits, v[..., k]), of_kept[..., k, None], own)
            d += own - p * of_kept.sum(axis=-1, keepdims=True)
        d_h, *d_head = pull(jnp.broadcast_to(d, logits.shape))
        return (None if total is None else total + d_head[0]), d_h

    nothing = None if matrix.trained is None else jnp.zeros_like(matrix.trained)
    d_head, d_hidden = jax.lax.scan(one, nothing, split((hidden, targets, ids, of_all, grads)))
    return join(d_hidden), d_head, None, None


_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
