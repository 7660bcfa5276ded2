"""Float64 NumPy oracles of the objectives: loops over rows and tokens, from the formulas, no code shared with gspo_jax.

`value` takes the log-probs twice: those to differentiate in, and the same ones frozen where the formula has a
stop-gradient, so that central differences of it are the gradient. `gradient` is worked out by hand.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """One batch: all [B, T], float64 and bool; the log-probs hold 0 outside the mask."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray


class Oracle(NamedTuple):
    """One objective: its loss, its gradient, and for every token the ratio and the bound that cut it (-1, 0, 1)."""

    value: Callable[[Batch, np.ndarray, np.ndarray, float, float], float]
    gradient: Callable[[Batch, float, float], np.ndarray]
    ratio_and_gate: Callable[[Batch, float, float], tuple[np.ndarray, np.ndarray]]


def sequence_mean(mask: np.ndarray) -> np.ndarray:
    """1 / (N_rows · n_i)."""
    rows = sum(1 for row in mask if any(row))
    w = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        w[i, t] = 1 / (rows * sum(mask[i]))
    return w


def token_mean(mask: np.ndarray) -> np.ndarray:
    """1 / Σ n."""
    w = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        w[i, t] = 1 / np.count_nonzero(mask)
    return w


def constant_length(mask: np.ndarray, length: float) -> np.ndarray:
    """1 / (N_rows · L)."""
    rows = sum(1 for row in mask if any(row))
    w = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        w[i, t] = 1 / (rows * length)
    return w


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float, whiten: bool
) -> np.ndarray:
    """Σ_k (γλ)^k δ_{t+k} over the row's sampled tokens alone, δ_t = R_t + γ·V_{t+1} − V_t; whitened over all rows."""
    out = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        tokens = [t for t in range(len(row)) if row[t]]
        for k, t in enumerate(tokens):
            for ahead, u in enumerate(tokens[k:]):
                later = tokens[k + ahead + 1 : k + ahead + 2]
                delta = rewards[i, u] + gamma * sum(values[i, v] for v in later) - values[i, u]
                out[i, t] += (gamma * lam) ** ahead * delta
    if whiten and mask.any():
        found = out[mask]
        mean = math.fsum(found) / len(found)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in found) / max(len(found) - 1, 1))
        out[mask] = [(x - mean) / (std + 1e-6) for x in found]
    return out


def min_of_two(ratio: float, advantage: float, low: float, high: float) -> float:
    """min(r·Â, clip(r)·Â)."""
    return min(ratio * advantage, max(min(ratio, 1 + high), 1 - low) * advantage)


def gate(ratio: float, advantage: float, low: float, high: float) -> int:
    """-1 or 1 where min(r·Â, clip(r)·Â) has gone flat in r at the lower or the upper bound, else 0."""
    if advantage > 0 and ratio > 1 + high:
        return 1
    return -1 if advantage < 0 and ratio < 1 - low else 0


def geometric_mean(logprobs: np.ndarray, old_logprobs: np.ndarray, mask: np.ndarray, i: int) -> float:
    """The n-th root of the product of a row's token ratios."""
    tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
    return math.prod(math.exp(logprobs[i, t] - old_logprobs[i, t]) for t in tokens) ** (1 / len(tokens))


def ratio_grpo(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int) -> float:
    """π_θ / π_old of the token."""
    return math.exp(x[i, t] - b.old_logprobs[i, t])


def ratio_gspo(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int) -> float:
    """s_i, the same at every token of the row."""
    return geometric_mean(x, b.old_logprobs, b.mask, i)


def ratio_gspo_token(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int) -> float:
    """sg[s_i] · π_θ / sg[π_θ]."""
    return geometric_mean(frozen, b.old_logprobs, b.mask, i) * math.exp(x[i, t]) / math.exp(frozen[i, t])


def slope_own(b: Batch, i: int, t: int, u: int) -> float:
    """∂ log ratio[i,u] / ∂ log π_θ[i,t] where each token has its own ratio."""
    return 1.0 if t == u else 0.0


def slope_shared(b: Batch, i: int, t: int, u: int) -> float:
    """∂ log ratio[i,u] / ∂ log π_θ[i,t] where the row has one: a geometric mean gives each token 1/n."""
    return 1 / np.count_nonzero(b.mask[i])


def clipped_family(ratio: Callable[..., float], slope: Callable[[Batch, int, int, int], float]) -> Oracle:
    """The objectives of the form Σ w·min(r·Â, clip(r)·Â), w = 1 / (N_rows · n_i), told apart by their ratio."""

    def value(b: Batch, x: np.ndarray, frozen: np.ndarray, low: float, high: float) -> float:
        w, total = sequence_mean(b.mask), 0.0
        for i, t in np.argwhere(b.mask):
            total -= w[i, t] * min_of_two(ratio(x, frozen, b, i, t), b.advantages[i, t], low, high)
        return total

    def ratio_and_gate(b: Batch, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        r, g = np.ones(b.mask.shape), np.zeros(b.mask.shape, int)
        for i, t in np.argwhere(b.mask):
            r[i, t] = ratio(b.logprobs, b.logprobs, b, i, t)
            g[i, t] = gate(r[i, t], b.advantages[i, t], low, high)
        return r, g

    def gradient(b: Batch, low: float, high: float) -> np.ndarray:
        w, out = sequence_mean(b.mask), np.zeros(b.mask.shape)
        r, g = ratio_and_gate(b, low, high)
        for i, t in np.argwhere(b.mask):
            for u in np.flatnonzero(b.mask[i] & (g[i] == 0)):
                out[i, t] -= w[i, u] * b.advantages[i, u] * r[i, u] * slope(b, i, t, u)
        return out

    return Oracle(value, gradient, ratio_and_gate)


ORACLES = {
    "grpo": clipped_family(ratio_grpo, slope_own),
    "gspo": clipped_family(ratio_gspo, slope_shared),
    "gspo_token": clipped_family(ratio_gspo_token, slope_own),
}


def central_differences(oracle: Oracle, b: Batch, low: float, high: float, h: float = 1e-6) -> np.ndarray:
    """The gradient of `value` by differences: what `gradient` is checked against."""
    out = np.zeros(b.mask.shape)
    for i, t in np.argwhere(b.mask):
        up, down = b.logprobs.copy(), b.logprobs.copy()
        up[i, t] += h
        down[i, t] -= h
        out[i, t] = (oracle.value(b, up, b.logprobs, low, high) - oracle.value(b, down, b.logprobs, low, high)) / (
            2 * h
        )
    return out
