"""Float64 NumPy oracles of the objectives: token loops written from the formulas, sharing no code with gspo_jax.

`Oracle.gain` takes the log-probs twice, to differentiate in and frozen for terms under a stop-gradient, so that its
central differences are the gradient. `Oracle.slope` is derived by hand. h holds the hyper-parameters.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Hyper = dict[str, Any]


class Batch(NamedTuple):
    """A batch of float64 and bool arrays [B, T]; outside the mask, log-probs and advantages are 0 and shifts 1."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    router_shift: np.ndarray


class Oracle(NamedTuple):
    """One objective, as functions of single tokens."""

    gain: Callable[[np.ndarray, np.ndarray, Batch, int, int, Hyper], float]
    """gain[i,t], given the log-probs and the frozen log-probs."""
    slope: Callable[[Batch, int, int, int, Hyper], float]
    """∂ gain[i,u] / ∂ log π_θ[i,t], called with (b, i, t, u, h)."""
    ratio: Callable[[np.ndarray, Batch, int, int], float]
    gate: Callable[[Batch, int, int, Hyper], int]
    """-1 or 1 where the lower or upper bound cuts the gradient (or caps the weight), else 0."""
    margin: Callable[[Batch, int, int, Hyper], float]
    """Distance of the token from the nearest point where its gate changes."""
    weights: Callable[[np.ndarray, Hyper], np.ndarray]


# --- weights --------------------------------------------------------------------------------------


def sequence_mean(mask: np.ndarray, h: Hyper | None = None) -> np.ndarray:
    """1 / (N_rows · n_i)."""
    rows = sum(1 for row in mask if any(row))
    w = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        w[i, t] = 1 / (rows * sum(mask[i]))
    return w


def token_mean(mask: np.ndarray, h: Hyper | None = None) -> np.ndarray:
    """1 / Σ n."""
    w = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        w[i, t] = 1 / np.count_nonzero(mask)
    return w


def constant_length(mask: np.ndarray, h: Hyper) -> np.ndarray:
    """1 / (N_rows · L), L the batch's width unless a length is given."""
    rows = sum(1 for row in mask if any(row))
    length = mask.shape[1] if h.get("length") is None else h["length"]
    w = np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        w[i, t] = 1 / (rows * length)
    return w


def row_sum(mask: np.ndarray, h: Hyper) -> np.ndarray:
    """1 / N_rows."""
    return constant_length(mask, {"length": 1})


# --- PPO's clip and its relatives -----------------------------------------------------------------


def tokens(b: Batch, i: int) -> list[int]:
    return [t for t in range(b.mask.shape[1]) if b.mask[i, t]]


def token_ratio(x: np.ndarray, b: Batch, i: int, t: int) -> float:
    """The token's ratio π_θ / π_old."""
    return math.exp(x[i, t] - b.old_logprobs[i, t])


def sequence_ratio(x: np.ndarray, b: Batch, i: int, t: int) -> float:
    """Geometric mean of a row's token ratios."""
    row = tokens(b, i)
    return math.prod(token_ratio(x, b, i, u) for u in row) ** (1 / len(row))


def token_ratio_of(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int) -> float:
    return token_ratio(x, b, i, t)


def sequence_ratio_of(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int) -> float:
    return sequence_ratio(x, b, i, t)


def sequence_value_token_slope(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int) -> float:
    """sg[s_i] · π_θ / sg[π_θ]."""
    return sequence_ratio(frozen, b, i, t) * math.exp(x[i, t]) / math.exp(frozen[i, t])


def own_ratio_slope(b: Batch, i: int, t: int, u: int) -> float:
    """∂ log ratio[i,u] / ∂ log π_θ[i,t] with one ratio per token."""
    return 1.0 if t == u else 0.0


def shared_ratio_slope(b: Batch, i: int, t: int, u: int) -> float:
    """∂ log ratio[i,u] / ∂ log π_θ[i,t] with one ratio per row, a geometric mean: 1/n for every token."""
    return 1 / np.count_nonzero(b.mask[i])


def clipped_family(
    differentiated: Callable[..., float],
    ratio: Callable[..., float],
    slope_of_log: Callable[[Batch, int, int, int], float],
    weights: Callable[..., np.ndarray],
) -> Oracle:
    """min(r·Â, clip(r)·Â), and with a dual clip at least c·Â for Â < 0; members differ in ratio and weights."""

    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> float:
        r, a = differentiated(x, frozen, b, i, t), b.advantages[i, t]
        least = min(r * a, max(min(r, 1 + h["high"]), 1 - h["low"]) * a)
        return max(least, h["dual_clip"] * a) if h.get("dual_clip") and a < 0 else least

    def gate(b: Batch, i: int, t: int, h: Hyper) -> int:
        r, a = ratio(b.logprobs, b, i, t), b.advantages[i, t]
        if a > 0 and r > 1 + h["high"]:
            return 1
        if a < 0 and h.get("dual_clip") and r > h["dual_clip"]:
            return 1
        return -1 if a < 0 and r < 1 - h["low"] else 0

    def slope(b: Batch, i: int, t: int, u: int, h: Hyper) -> float:
        if gate(b, i, u, h):
            return 0.0
        return b.advantages[i, u] * ratio(b.logprobs, b, i, u) * slope_of_log(b, i, t, u)

    def margin(b: Batch, i: int, t: int, h: Hyper) -> float:
        r = ratio(b.logprobs, b, i, t)
        return min(abs(r - bound) for bound in (1 - h["low"], 1 + h["high"], h.get("dual_clip") or math.inf))

    return Oracle(gain, slope, ratio, gate, margin, weights)


def banded_family(ratio: Callable[..., float], slope_of_log: Callable[..., float], weights: Callable) -> Oracle:
    """min(s, 1 + high)·Â for Â ≥ 0, s held to [1 − low, 1 + high_neg] for Â < 0."""

    def ends(b: Batch, i: int, t: int, h: Hyper) -> tuple[float, float]:
        a = b.advantages[i, t]
        return (1 - h["low"], 1 + h["high_neg"]) if a < 0 else (0.0, 1 + h["high"] if a > 0 else math.inf)

    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> float:
        least, most = ends(b, i, t, h)
        return min(max(ratio(x, b, i, t), least), most) * b.advantages[i, t]

    def gate(b: Batch, i: int, t: int, h: Hyper) -> int:
        (least, most), s = ends(b, i, t, h), ratio(b.logprobs, b, i, t)
        return 1 if s > most else -1 if s < least else 0

    def slope(b: Batch, i: int, t: int, u: int, h: Hyper) -> float:
        s = ratio(b.logprobs, b, i, u)
        return 0.0 if gate(b, i, u, h) else b.advantages[i, u] * s * slope_of_log(b, i, t, u)

    def margin(b: Batch, i: int, t: int, h: Hyper) -> float:
        s = ratio(b.logprobs, b, i, t)
        return min(abs(s - end) for end in (1 - h["low"], 1 + h["high"], 1 + h["high_neg"]))

    return Oracle(gain, slope, ratio, gate, margin, weights)


# --- the policy gradient and CISPO ----------------------------------------------------------------


def score_family(coefficient: Callable[..., float], gate: Callable, margin: Callable, weights: Callable) -> Oracle:
    """sg[coefficient] · Â · log π_θ."""

    def gain(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> float:
        return coefficient(b, i, t, h) * b.advantages[i, t] * x[i, t]

    def slope(b: Batch, i: int, t: int, u: int, h: Hyper) -> float:
        return coefficient(b, i, t, h) * b.advantages[i, t] if t == u else 0.0

    return Oracle(gain, slope, token_ratio, gate, margin, weights)


def unit_coefficient(b: Batch, i: int, t: int, h: Hyper) -> float:
    return 1.0


def no_gate(b: Batch, i: int, t: int, h: Hyper) -> int:
    return 0


def no_margin(b: Batch, i: int, t: int, h: Hyper) -> float:
    return math.inf


def cispo_weight(b: Batch, i: int, t: int, h: Hyper) -> float:
    """clip(r); with mask="ppo", 0 where PPO cuts the gradient."""
    r, a = token_ratio(b.logprobs, b, i, t), b.advantages[i, t]
    cut = (a > 0 and r > 1 + h["high"]) or (a < 0 and r < 1 - h["low"])
    return 0.0 if h.get("mask") == "ppo" and cut else max(min(r, 1 + h["high"]), 1 - h["low"])


def cispo_gate(b: Batch, i: int, t: int, h: Hyper) -> int:
    """Side on which the weight is capped, for either sign of Â."""
    r = token_ratio(b.logprobs, b, i, t)
    return 1 if r > 1 + h["high"] else -1 if r < 1 - h["low"] else 0


def cispo_margin(b: Batch, i: int, t: int, h: Hyper) -> float:
    r = token_ratio(b.logprobs, b, i, t)
    return min(abs(r - 1 - h["high"]), abs(r - 1 + h["low"]))


def minirl_gate(b: Batch, i: int, t: int, h: Hyper) -> int:
    """Side on which PPO would cut the gradient."""
    r, a = token_ratio(b.logprobs, b, i, t), b.advantages[i, t]
    return 1 if a > 0 and r > 1 + h["high"] else -1 if a < 0 and r < 1 - h["low"] else 0


def minirl_weight(b: Batch, i: int, t: int, h: Hyper) -> float:
    return 0.0 if minirl_gate(b, i, t, h) else token_ratio(b.logprobs, b, i, t)


# --- MinPRO and DRO -------------------------------------------------------------------------------


def prefix_ratio(x: np.ndarray, b: Batch, i: int, t: int) -> float:
    """The token's ratio times the smallest of its row's earlier tokens."""
    earlier = [token_ratio(x, b, i, u) for u in tokens(b, i) if u < t]
    return min(earlier, default=1.0) * token_ratio(x, b, i, t)


def minpro_weight(b: Batch, i: int, t: int, h: Hyper) -> float:
    return max(min(prefix_ratio(b.logprobs, b, i, t), 1 + h["high"]), 1 - h["low"])


def minpro_gate(b: Batch, i: int, t: int, h: Hyper) -> int:
    r = prefix_ratio(b.logprobs, b, i, t)
    return 1 if r > 1 + h["high"] else -1 if r < 1 - h["low"] else 0


def minpro_margin(b: Batch, i: int, t: int, h: Hyper) -> float:
    r = prefix_ratio(b.logprobs, b, i, t)
    return min(abs(r - 1 - h["high"]), abs(r - 1 + h["low"]))


def penalised_gain(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> float:
    """Â·log π_θ less half of β times the square of the log-ratio."""
    return b.advantages[i, t] * x[i, t] - 0.5 * h["beta"] * (x[i, t] - b.old_logprobs[i, t]) ** 2


def penalised_slope(b: Batch, i: int, t: int, u: int, h: Hyper) -> float:
    return b.advantages[i, t] - h["beta"] * (b.logprobs[i, t] - b.old_logprobs[i, t]) if t == u else 0.0


# --- DPPO -----------------------------------------------------------------------------------------


def probabilities(b: Batch, i: int, t: int) -> tuple[float, float]:
    """π_θ and π_old of the token."""
    return math.exp(b.logprobs[i, t]), math.exp(b.old_logprobs[i, t])


def total_variation(b: Batch, i: int, t: int) -> float:
    """The change of the token's probability, with its sign."""
    p, q = probabilities(b, i, t)
    return p - q


def two_outcome_kl(b: Batch, i: int, t: int) -> float:
    """KL from old to new of "this token or another", with the sign of the change of probability."""
    p, q = probabilities(b, i, t)
    k = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return math.copysign(k, p - q) if p != q else 0.0


def divergence_family(change: Callable[[Batch, int, int], float]) -> Oracle:
    """sg[min(r, cap)·M]·Â·log π_θ, M = 0 where the change goes on in the direction of Â beyond its bound."""

    def gate(b: Batch, i: int, t: int, h: Hyper) -> int:
        a, moved = b.advantages[i, t], change(b, i, t)
        return 1 if a > 0 and moved > h["high"] else -1 if a < 0 and moved < -h["low"] else 0

    def coefficient(b: Batch, i: int, t: int, h: Hyper) -> float:
        return 0.0 if gate(b, i, t, h) else min(token_ratio(b.logprobs, b, i, t), h["cap"])

    def margin(b: Batch, i: int, t: int, h: Hyper) -> float:
        return min(abs(change(b, i, t) - h["high"]), abs(change(b, i, t) + h["low"]))

    return score_family(coefficient, gate, margin, token_mean)


# --- VESPO ----------------------------------------------------------------------------------------


def response_ratio(x: np.ndarray, b: Batch, i: int, t: int) -> float:
    """The product of a row's token ratios, each in e^±20 and the product in [1e-8, e^20]."""
    product = math.prod(min(max(token_ratio(x, b, i, u), math.exp(-20)), math.exp(20)) for u in tokens(b, i))
    return min(max(product, 1e-8), math.exp(20))


def gamma_weight(b: Batch, i: int, t: int, h: Hyper) -> float:
    """W^k · e^(λ(1 − W))."""
    k, rate = (h[f"{name}_{'pos' if b.advantages[i, t] >= 0 else 'neg'}"] for name in ("k", "lambda"))
    w = response_ratio(b.logprobs, b, i, t)
    return w**k * math.exp(rate * (1 - w))


def gamma_gate(b: Batch, i: int, t: int, h: Hyper) -> int:
    if gamma_weight(b, i, t, h) >= 0.5:
        return 0
    return -1 if response_ratio(b.logprobs, b, i, t) < 1 else 1


def gamma_margin(b: Batch, i: int, t: int, h: Hyper) -> float:
    return abs(gamma_weight(b, i, t, h) - 0.5)


# --- GMPO and RSPO --------------------------------------------------------------------------------


def log_damping(b: Batch, i: int, t: int, h: Hyper) -> float:
    """log γ' with γ' = max(γ_min, γ); 0 for objectives without router shift."""
    return math.log(max(h["gamma_min"], b.router_shift[i, t])) if "gamma_min" in h else 0.0


def clip_input(x: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> float:
    """The log-ratio that is clipped; includes log γ' unless apply="after"."""
    return x[i, t] - b.old_logprobs[i, t] + (0.0 if h.get("apply") == "after" else log_damping(b, i, t, h))


def geometric_gain(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> float:
    """Â times the geometric mean of the row's clipped, then damped ratios."""
    sign, c = np.sign(b.advantages[i, t]), h["log_clip"]
    product = 1.0
    for u in tokens(b, i):
        d = clip_input(x, b, i, u, h)
        product *= math.exp(sign * min(sign * d, sign * max(min(d, c), -c)))
        product *= math.exp(log_damping(b, i, u, h)) if h.get("apply") == "after" else 1.0
    return b.advantages[i, t] * product ** (1 / len(tokens(b, i)))


def geometric_gate(b: Batch, i: int, t: int, h: Hyper) -> int:
    d, a = clip_input(b.logprobs, b, i, t, h), b.advantages[i, t]
    return 1 if a > 0 and d > h["log_clip"] else -1 if a < 0 and d < -h["log_clip"] else 0


def geometric_slope(b: Batch, i: int, t: int, u: int, h: Hyper) -> float:
    """0 for a gated token, 1/n of the row's gain for any other."""
    if geometric_gate(b, i, t, h):
        return 0.0
    return geometric_gain(b.logprobs, b.logprobs, b, i, u, h) / np.count_nonzero(b.mask[i])


def geometric_margin(b: Batch, i: int, t: int, h: Hyper) -> float:
    return abs(abs(clip_input(b.logprobs, b, i, t, h)) - h["log_clip"])


# --- SAPO -----------------------------------------------------------------------------------------


def sigmoid_of(x: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> tuple[float, float]:
    """σ(τ(r − 1)) and τ."""
    tau = h["tau_pos"] if b.advantages[i, t] > 0 else h["tau_neg"]
    return 1 / (1 + math.exp(-tau * (token_ratio(x, b, i, t) - 1))), tau


def soft_gain(x: np.ndarray, frozen: np.ndarray, b: Batch, i: int, t: int, h: Hyper) -> float:
    p, tau = sigmoid_of(x, b, i, t, h)
    return 4 / tau * p * b.advantages[i, t]


def kernel(b: Batch, i: int, t: int, h: Hyper) -> float:
    p, _ = sigmoid_of(b.logprobs, b, i, t, h)
    return 4 * p * (1 - p)


def soft_slope(b: Batch, i: int, t: int, u: int, h: Hyper) -> float:
    return kernel(b, i, t, h) * token_ratio(b.logprobs, b, i, t) * b.advantages[i, t] if t == u else 0.0


def soft_gate(b: Batch, i: int, t: int, h: Hyper) -> int:
    if kernel(b, i, t, h) >= 0.5:
        return 0
    return -1 if token_ratio(b.logprobs, b, i, t) < 1 else 1


def soft_margin(b: Batch, i: int, t: int, h: Hyper) -> float:
    return abs(kernel(b, i, t, h) - 0.5)


ORACLES = {
    "reinforce": score_family(unit_coefficient, no_gate, no_margin, token_mean),
    "rloo": score_family(unit_coefficient, no_gate, no_margin, row_sum),
    "ppo": clipped_family(token_ratio_of, token_ratio, own_ratio_slope, token_mean),
    "grpo": clipped_family(token_ratio_of, token_ratio, own_ratio_slope, sequence_mean),
    "dr_grpo": clipped_family(token_ratio_of, token_ratio, own_ratio_slope, constant_length),
    "dapo": clipped_family(token_ratio_of, token_ratio, own_ratio_slope, token_mean),
    "gspo": clipped_family(sequence_ratio_of, sequence_ratio, shared_ratio_slope, sequence_mean),
    "gspo_token": clipped_family(sequence_value_token_slope, sequence_ratio, own_ratio_slope, sequence_mean),
    "cispo": score_family(cispo_weight, cispo_gate, cispo_margin, token_mean),
    "gmpo": Oracle(geometric_gain, geometric_slope, token_ratio, geometric_gate, geometric_margin, sequence_mean),
    "rspo": Oracle(geometric_gain, geometric_slope, token_ratio, geometric_gate, geometric_margin, sequence_mean),
    "sapo": Oracle(soft_gain, soft_slope, token_ratio, soft_gate, soft_margin, sequence_mean),
    "dppo_tv": divergence_family(total_variation),
    "dppo_kl": divergence_family(two_outcome_kl),
    "luspo": clipped_family(sequence_ratio_of, sequence_ratio, shared_ratio_slope, row_sum),
    "minirl": score_family(minirl_weight, minirl_gate, cispo_margin, row_sum),
    "dro": Oracle(penalised_gain, penalised_slope, token_ratio, no_gate, no_margin, token_mean),
    "tbpo": banded_family(sequence_ratio, shared_ratio_slope, sequence_mean),
    "minpro": score_family(minpro_weight, minpro_gate, minpro_margin, token_mean)._replace(ratio=prefix_ratio),
    "vespo": score_family(gamma_weight, gamma_gate, gamma_margin, token_mean)._replace(ratio=response_ratio),
}


# --- a whole batch --------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """An oracle's results for a batch, all [B, T]; outside the mask 0, except ratio 1 and an infinite margin."""

    gain: np.ndarray
    weights: np.ndarray
    gradient: np.ndarray
    ratio: np.ndarray
    gate: np.ndarray
    margin: np.ndarray

    @property
    def loss(self) -> float:
        """The loss −Σ w·gain."""
        return -math.fsum((self.weights * self.gain).ravel())


def judge(oracle: Oracle, b: Batch, h: Hyper) -> Verdict:
    """Evaluate an oracle on a batch, taking the gradient from its slopes."""
    gain, gradient, ratio, margin = (np.full(b.mask.shape, fill) for fill in (0.0, 0.0, 1.0, math.inf))
    gate, w = np.zeros(b.mask.shape, int), oracle.weights(b.mask, h)
    for i, t in np.argwhere(b.mask):
        gain[i, t] = oracle.gain(b.logprobs, b.logprobs, b, i, t, h)
        gradient[i, t] = -sum(w[i, u] * oracle.slope(b, i, t, u, h) for u in tokens(b, i))
        ratio[i, t] = oracle.ratio(b.logprobs, b, i, t)
        gate[i, t], margin[i, t] = oracle.gate(b, i, t, h), oracle.margin(b, i, t, h)
    return Verdict(gain, w, gradient, ratio, gate, margin)


def central_differences(oracle: Oracle, b: Batch, h: Hyper, step: float = 1e-6) -> np.ndarray:
    """Gradient of the loss by central differences, an independent check of the slopes; rows do not interact."""
    out, w = np.zeros(b.mask.shape), oracle.weights(b.mask, h)
    for i, t in np.argwhere(b.mask):
        for sign in (1, -1):
            x = b.logprobs.copy()
            x[i, t] += sign * step
            for u in tokens(b, i):
                out[i, t] -= sign * w[i, u] * oracle.gain(x, b.logprobs, b, i, u, h) / (2 * step)
    return out


# --- advantages, regularizers, corrections --------------------------------------------------------


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float, whiten: bool
) -> np.ndarray:
    """Σ_k (γλ)^k δ_{t+k} over a row's sampled tokens, δ_t = R_t + γ·V_{t+1} − V_t; whitened over all rows."""
    out = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        found = [t for t in range(len(row)) if row[t]]
        for k, t in enumerate(found):
            for ahead, u in enumerate(found[k:]):
                later = found[k + ahead + 1 : k + ahead + 2]
                delta = rewards[i, u] + gamma * sum(values[i, v] for v in later) - values[i, u]
                out[i, t] += (gamma * lam) ** ahead * delta
    if whiten and mask.any():
        out[mask] = zscore(list(out[mask]))
    return out


def zscore(x: list[float]) -> list[float]:
    """(x − mean) / (std + 1e-6), with the sample standard deviation."""
    mean = math.fsum(x) / len(x)
    std = math.sqrt(math.fsum((each - mean) ** 2 for each in x) / max(len(x) - 1, 1))
    return [(each - mean) / (std + 1e-6) for each in x]


def group_steps(rewards: np.ndarray, steps: np.ndarray, group_size: int) -> np.ndarray:
    """For every token, the sum of z-scores over its row's steps that end at or after it."""
    out = np.zeros(steps.shape)
    for first in range(0, len(steps), group_size):
        where = [(i, u) for i in range(first, first + group_size) for u in range(steps.shape[1]) if steps[i, u]]
        z = dict(zip(where, zscore([rewards[at] for at in where]), strict=True)) if where else {}
        for i in range(first, first + group_size):
            for t in range(steps.shape[1]):
                out[i, t] = sum(score for (j, u), score in z.items() if j == i and u >= t)
    return out


def of_group(name: str, x: list[float]) -> list[float]:
    """A critic-free advantage of one group; NaN is no score, leaves the others alone and gets 0."""
    known = [each for each in x if not math.isnan(each)]
    if not known:
        return [0.0] * len(x)
    mean = math.fsum(known) / len(known)
    found = {
        "group_zscore": lambda: zscore(known),
        "group_centered": lambda: [each - mean for each in known],
        "leave_one_out": lambda: [len(known) / max(len(known) - 1, 1) * (each - mean) for each in known],
        "max_rl": lambda: [(each - mean) / mean if mean > 0 else 0.0 for each in known],
    }[name]()
    rest = iter(found)
    return [0.0 if math.isnan(each) else next(rest) for each in x]


def of_groups(name: str, rewards: np.ndarray, group_size: int) -> np.ndarray:
    groups = [rewards[first : first + group_size].tolist() for first in range(0, len(rewards), group_size)]
    return np.array([each for group in groups for each in of_group(name, group)])


def gdpo(rewards: dict[str, np.ndarray], weights: dict[str, float], group_size: int) -> np.ndarray:
    """The weighted sum of z-scores within the group, z-scored over the responses of the batch with any score."""
    total = sum(w * of_groups("group_zscore", rewards[name], group_size) for name, w in weights.items())
    scored = [i for i in range(len(total)) if any(not math.isnan(rewards[name][i]) for name in weights)]
    out = np.zeros(len(total))
    if scored:
        out[scored] = zscore([total[i] for i in scored])
    return out


def optimal_token_baseline(rewards: np.ndarray, energy: np.ndarray, mask: np.ndarray, group_size: int) -> np.ndarray:
    """R − Σ W·R / Σ W over the group's scored responses with a token of the same number; 0 if there is one alone."""
    out = np.zeros(mask.shape)
    drawn = [[t for t in range(mask.shape[1]) if row[t]] for row in mask]
    for first in range(0, len(mask), group_size):
        group = [i for i in range(first, first + group_size) if not math.isnan(rewards[i])]
        for k in range(mask.shape[1]):
            spent = {i: math.fsum(energy[i, t] for t in drawn[i][: k + 1]) for i in group if len(drawn[i]) > k}
            whole = math.fsum(spent.values())
            if len(spent) < 2:
                continue
            mean = math.fsum(rewards[i] for i in group) / len(group)
            base = math.fsum(w * rewards[i] for i, w in spent.items()) / whole if whole else mean
            for i in spent:
                out[i, drawn[i][k]] = rewards[i] - base
    return out


def group_turns(
    name: str,
    rewards: np.ndarray,
    outcome: np.ndarray,
    mask: np.ndarray,
    group_size: int,
    discount: float,
    ends: list[list[int]] | None = None,
) -> np.ndarray:
    """For every turn, the advantage of Σ_j γ^(j−k)·r_j among the episodes of the group that have a turn k."""
    turns: list[list[list[int]]] = []
    for i, row in enumerate(mask):
        if ends is not None:
            spans = zip([0, *ends[i]], ends[i], strict=False)
            turns.append([[t for t in range(begin, end) if row[t]] for begin, end in spans])
            continue
        found: list[list[int]] = []
        for t in range(len(row)):
            if row[t] and (t == 0 or not row[t - 1]):
                found.append([])
            if row[t]:
                found[-1].append(t)
        turns.append(found)
    out = np.zeros(mask.shape)
    for first in range(0, len(mask), group_size):
        for k in range(max(len(turns[i]) for i in range(first, first + group_size))):
            returns = []
            for i in range(first, first + group_size):
                own = [math.fsum(rewards[i, t] for t in turn) for turn in turns[i]]
                later = [discount ** (j - k) * own[j] for j in range(k, len(own))]
                end = discount ** (len(own) - 1 - k) * outcome[i] if len(own) > k else math.nan
                returns.append(math.nan if math.isnan(end) else math.fsum([*later, end]))
            for i, advantage in zip(range(first, first + group_size), of_group(name, returns), strict=True):
                for t in turns[i][k] if len(turns[i]) > k else ():
                    out[i, t] = advantage
    return out


def value_loss(v: float, old: float, target: float, clip: float) -> tuple[float, bool, float]:
    """½·max(free, clipped); True if the clipped error is larger; and the derivative with respect to v."""
    free = (v - target) ** 2
    held = (old + max(min(v - old, clip), -clip) - target) ** 2
    cut = abs(v - old) > clip and held > free
    return max(free, held) / 2, cut, 0.0 if cut else v - target
