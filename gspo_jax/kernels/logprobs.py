"""Log-probs, entropies and divergences of token distributions from hidden states, without a [B, T, V] array."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gspo_jax.kernels import logprobs_tpu
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.dense_matmul import matmul
from gspo_jax.kernels.grouped_matmul import Kept
from gspo_jax.parallel.mesh import manual_axes, on_shards


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

    @classmethod
    def of(cls, logits: Float[Array, "*n V"], targets: Int[Array, "*n"]) -> "_Sums":
        top = logits.max(axis=-1)
        shifted = logits - top[..., None]
        parts, here = jnp.exp(shifted), _is_target(logits, targets)
        return cls(top, parts.sum(axis=-1), (parts * shifted).sum(axis=-1), jnp.where(here, shifted, 0).sum(axis=-1))

    @property
    def log_z(self) -> Float[Array, "*n"]:
        """log Σ exp(l − max l)."""
        return jnp.log(self.z)

    @property
    def entropy(self) -> Float[Array, "*n"]:
        return self.log_z - self.weighted / self.z


def _is_target(logits: Float[Array, "*n V"], targets: Int[Array, "*n"]) -> Array:
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
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return log softmax(h W / temperature)[target] and the softmax's entropy.

    Logits exist for about `chunk` tokens at once ([B, chunk // B, V], at least one position per row), in the forward
    pass on TPU for none. The backward pass recomputes them. Outputs are float32.
    """
    with jax.named_scope("logits"):
        return _logprobs(hidden, head, targets, temperature, chunk)


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


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _logprobs(hidden: Array, head: Array, targets: Array, temperature: float, chunk: int) -> tuple[Array, Array]:
    sums = _sums(hidden, head, targets, temperature, chunk)
    return sums.picked - sums.log_z, sums.entropy


def _sums(hidden: Array, head: Array, targets: Array, temperature: float, chunk: int) -> _Sums:
    if platform() == "tpu" and hidden.shape[-1] % logprobs_tpu.LANES == 0:
        return _on_shards(hidden, head, targets, temperature)
    split, join = _chunks(targets.shape, chunk)

    def one(h: Array, y: Array) -> _Sums:
        return _Sums.of(matmul(h, head, dtype=jnp.float32) / temperature, y)

    return join(jax.lax.scan(lambda c, xs: (c, one(*xs)), None, split((hidden, targets)))[1])


def _on_shards(hidden: Array, head: Array, targets: Array, temperature: float) -> _Sums:
    """Return the kernel's sums over the vocabulary's shards."""

    def run(hidden: Array, head: Array, targets: Array) -> _Sums:
        (B, T, D), columns = hidden.shape, head.shape[1]
        own = targets - jax.lax.axis_index("tensor") * columns if "tensor" in manual_axes() else targets
        found = logprobs_tpu.softmax_sums(hidden.reshape(B * T, D), head, own.reshape(-1), temperature=temperature)
        top, z, weighted, picked = (x.reshape(B, T) for x in found)
        if "tensor" not in manual_axes():
            return _Sums(top, z, weighted, picked - top)
        whole = jax.lax.pmax(top, "tensor")
        down, add = top - whole, partial(jax.lax.psum, axis_name="tensor")
        share = jnp.exp(down)
        return _Sums(whole, add(share * z), add(share * (weighted + down * z)), add(picked) - whole)

    rows = ("batch",)
    return on_shards(run, (hidden, head, targets), (rows, (None, "vocab"), rows), rows)


def _chunks(shape: tuple[int, ...], chunk: int) -> tuple[Any, Any]:
    """Return functions that split arrays [B, T, …] of a tree into chunks [C, B, width, …], and that join them."""
    B, T = shape
    width = max(1, min(T, chunk // B))
    chunks = -(-T // width)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * width - T)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, chunks, width, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(B, chunks * width, *x.shape[3:])[:, :T]

    return partial(jax.tree.map, split), partial(jax.tree.map, join)


def _forward(hidden: Any, head: Any, targets: Any, temperature: float, chunk: int) -> tuple[Any, tuple[Any, ...]]:
    sums = _sums(hidden.value, head.value, targets.value, temperature, chunk)
    of_all = sums.top + sums.log_z, sums.entropy
    return (sums.picked - sums.log_z, sums.entropy), (hidden.value, Kept.of(head), targets.value, of_all)


def _backward(temperature: float, chunk: int, kept: tuple[Any, ...], given: Any) -> tuple[Array, Array | None, None]:
    """Recompute logits l: with p = softmax(l), d log p_y / dl = 1_y − p and dH / dl = −p (log p + H)."""
    hidden, matrix, targets, of_all = kept
    grads = [None if isinstance(g, jax.custom_derivatives.SymbolicZero) else g for g in given]
    split, join = _chunks(targets.shape, chunk)

    def one(total: Array | None, xs: tuple[Any, ...]) -> tuple[Array | None, Array]:
        h, y, (log_sum, entropy), (of_logprob, of_entropy) = xs

        def logits_of(h: Array, *head: Array) -> Array:
            return matmul(h, *(head or [matrix.value]), dtype=jnp.float32) / temperature

        logits, pull = jax.vjp(logits_of, h, *([] if total is None else [matrix.value]))
        log_p = logits - log_sum[..., None]
        p, d = jnp.exp(log_p), jnp.zeros((), jnp.float32)
        if of_logprob is not None:
            d += jnp.where(_is_target(logits, y), of_logprob[..., None], 0) - p * of_logprob[..., None]
        if of_entropy is not None:
            d -= p * (log_p + entropy[..., None]) * of_entropy[..., None]
        d_h, *d_head = pull(jnp.broadcast_to(d, logits.shape))
        return (None if total is None else total + d_head[0]), d_h

    nothing = None if matrix.trained is None else jnp.zeros_like(matrix.trained)
    d_head, d_hidden = jax.lax.scan(one, nothing, split((hidden, targets, of_all, grads)))
    return join(d_hidden), d_head, None


_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
