"""Routing's share of the importance ratio's noise: log-ratios split into a weights part and a routes part.

Responses are scored by the old policy, by a later one replaying the old routes, and by the later one with its own
routes. A token's log-ratio is d = w + r,

    w = log π(replayed) − log π_old    effect of the weights at fixed experts
    r = log π(native) − log π(replayed)    effect of the routes

and Var d = Var w + Var r + 2·Cov(w, r), for tokens and, with means over their tokens, for responses. The routes' share
is Cov(r, d) / Var d; the weights' is the rest. On the host, in float64.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.estimates import COVERAGE, RESAMPLES

PARTS = ("weights", "routes", "covariance")
MOST_FLIPS = 8
"""Tokens with this many flipped experts or more are one class."""


class Moments(NamedTuple):
    """Sums over N numbers, per group, the bootstrap's unit."""

    count: Float[np.ndarray, " P"]
    d: Float[np.ndarray, " P"]
    w: Float[np.ndarray, " P"]
    r: Float[np.ndarray, " P"]
    dd: Float[np.ndarray, " P"]
    ww: Float[np.ndarray, " P"]
    rr: Float[np.ndarray, " P"]
    wr: Float[np.ndarray, " P"]


class Split(NamedTuple):
    """A variance in nats² and its parts."""

    whole: float
    weights: float
    routes: float
    covariance: float
    """2·Cov(w, r)."""

    @property
    def share(self) -> float:
        """Share of the routes, Cov(r, d) / Var d; 0 if nothing varies."""
        return (self.routes + self.covariance / 2) / self.whole if self.whole > 0 else 0.0


class LogRatios(NamedTuple):
    """Log-ratios of B responses of T tokens, 0 outside the mask."""

    whole: Float[np.ndarray, "B T"]
    weights: Float[np.ndarray, "B T"]
    routes: Float[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"]

    @classmethod
    def of(
        cls,
        old: Float[np.ndarray, "B T"],
        replayed: Float[np.ndarray, "B T"],
        native: Float[np.ndarray, "B T"],
        mask: Bool[np.ndarray, "B T"],
    ) -> "LogRatios":
        """Split the log-ratios of log-probs."""
        old, replayed, native = (np.where(mask, np.asarray(x, np.float64), 0.0) for x in (old, replayed, native))
        return cls(native - old, replayed - old, native - replayed, mask)

    @property
    def of_responses(self) -> "LogRatios":
        """Means over each response's tokens, as one-token responses; empty ones are masked."""
        lengths = self.mask.sum(axis=1, keepdims=True)
        whole, weights, routes = (
            np.where(self.mask, x, 0.0).sum(axis=1, keepdims=True) / np.maximum(lengths, 1) for x in self[:3]
        )
        return LogRatios(whole, weights, routes, lengths > 0)

    def where(self, chosen: Bool[np.ndarray, "B T"]) -> "LogRatios":
        return self._replace(mask=self.mask & chosen)

    def moments(self, group_size: int) -> Moments:
        d, w, r = (np.where(self.mask, x, 0.0) for x in self[:3])
        columns = (self.mask, d, w, r, d * d, w * w, r * r, w * r)
        return Moments(*(x.reshape(-1, group_size * self.mask.shape[1]).sum(axis=1, dtype=float) for x in columns))


def split(moments: Moments) -> Split:
    """Return the variance of all numbers and its parts."""
    parts = _parts(np.array([x.sum() for x in moments])[:, None])
    return Split(*(float(part[0]) for part in parts))


def share_interval(moments: Moments, *, seed: int) -> tuple[float, float]:
    """Return a percentile-bootstrap interval of the routes' share, over groups, with probability COVERAGE."""
    sums = np.array(moments)
    drawn = np.random.default_rng(seed).multinomial(sums.shape[1], np.full(sums.shape[1], 1 / sums.shape[1]), RESAMPLES)
    whole, _, routes, covariance = _parts(sums @ drawn.T)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(whole > 0, (routes + covariance / 2) / whole, 0.0)
    low, high = np.quantile(shares, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def _parts(sums: Float[np.ndarray, "8 N"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    count, d, w, r, dd, ww, rr, wr = sums
    count = np.maximum(count, 1)
    whole, weights, routes = (
        np.maximum(square / count - (x / count) ** 2, 0.0) for square, x in ((dd, d), (ww, w), (rr, r))
    )
    return whole, weights, routes, 2 * (wr / count - w * r / count**2)


class Flips(NamedTuple):
    """A token's old experts that its later routers did not choose."""

    old: Bool[np.ndarray, "B T L K"]
    """True for dropped experts, most probable first."""
    probability: Float[np.ndarray, "B T L K"] | None
    """Probability by the old routers, before a sigmoid router's bias; None if not recorded."""

    @property
    def count(self) -> Int[np.ndarray, "B T"]:
        return self.old.sum(axis=(2, 3))


def flips(
    old: Int[np.ndarray, "B N L K"],
    new: Int[np.ndarray, "B N L K"],
    prompt_lengths: Int[np.ndarray, " B"],
    *,
    prompt_columns: int,
    old_logprobs: Float[np.ndarray, "B N L K"] | None = None,
) -> Flips:
    """Compare two records of routes at the positions that predict each response token."""
    before, after = (at_predicting(x, prompt_lengths, prompt_columns) for x in (old, new))
    gone = ~(before[..., :, None] == after[..., None, :]).any(axis=-1) & (before >= 0)
    logprobs = None if old_logprobs is None else at_predicting(old_logprobs, prompt_lengths, prompt_columns)
    return Flips(gone, None if logprobs is None else np.exp(logprobs))


def at_predicting(x: np.ndarray, prompt_lengths: Int[np.ndarray, " B"], prompt_columns: int) -> np.ndarray:
    """Return values [B, T, …] at the position before each response token, from all positions [B, N, …]."""
    last = x[np.arange(len(x)), prompt_lengths - 1]
    return np.concatenate([last[:, None], x[:, prompt_columns:-1]], axis=1)


def by_flips(ratios: LogRatios, found: Flips) -> list[dict[str, float]]:
    """Return mean squares by a token's number of flipped experts, 0 to MOST_FLIPS and more."""
    count = np.minimum(found.count, MOST_FLIPS)
    return [{"flips": n} | _squares(ratios.where(count == n)) for n in range(MOST_FLIPS + 1)]


def by_rank(ratios: LogRatios, found: Flips) -> list[dict[str, float]]:
    """Return mean squares by a token's best rank, 1 for most probable, of a flipped expert in any layer."""
    gone = found.old.any(axis=2)
    best = np.where(gone.any(axis=2), gone.argmax(axis=2), -1)
    return [{"rank": rank + 1} | _squares(ratios.where(best == rank)) for rank in range(gone.shape[2])]


def by_probability(ratios: LogRatios, found: Flips, edges: Sequence[float]) -> list[dict[str, float]]:
    """Return mean squares by a token's largest old probability of a flipped expert, between the edges."""
    assert found.probability is not None
    largest = np.where(found.old, found.probability, -1.0).max(axis=(2, 3))
    return [
        {"above": low, "up_to": high} | _squares(ratios.where((largest > low) & (largest <= high)))
        for low, high in itertools.pairwise(edges)
    ]


def by_position(ratios: LogRatios, *, parts: int) -> list[dict[str, float]]:
    """Split the variance by token position, in `parts` of equal width."""
    T = ratios.mask.shape[1]
    edges = [round(T * i / parts) for i in range(parts + 1)]
    found = []
    for low, high in itertools.pairwise(edges):
        own = ratios.where((np.arange(T) >= low)[None] & (np.arange(T) < high)[None])
        one = split(own.moments(len(own.mask)))
        found.append({"from": low, "to": high, "tokens": int(own.mask.sum())} | one._asdict() | {"share": one.share})
    return found


def _squares(ratios: LogRatios) -> dict[str, float]:
    count = int(ratios.mask.sum())
    squares = ((x**2)[ratios.mask].sum() / max(1, count) for x in (ratios.weights, ratios.routes))
    return {"tokens": count, **dict(zip(("weights_squared", "routes_squared"), map(float, squares), strict=True))}


def metrics(ratios: LogRatios) -> dict[str, float]:
    """Return the split of tokens and of responses, keyed as in metrics.jsonl."""
    found = {}
    for level, these in (("token", ratios), ("sequence", ratios.of_responses)):
        one = split(these.moments(1))
        found |= {f"noise/{level}": one.whole, f"noise/{level}_share": one.share}
        found |= {f"noise/{level}_{part}": getattr(one, part) for part in PARTS}
    token, sequence = found["noise/token"], found["noise/sequence"]
    return found | {"noise/effective_tokens": token / sequence if sequence > 0 else float("nan")}
