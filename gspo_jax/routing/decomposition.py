"""Routing's share of the importance ratio's noise: log-ratios split into a weights part and a routes part.

Responses are scored by the old policy, by a later one replaying the old routes, and by the later one with its own
routes. A token's log-ratio is d = w + r,

    w = log π(replayed) − log π_old    effect of the weights at fixed experts
    r = log π(native) − log π(replayed)    effect of the routes

and Var d = Var w + Var r + 2·Cov(w, r), for tokens and, with means over their tokens, for responses. The routes' share
is Cov(r, d) / Var d; the weights' is the rest. On the host, in float64.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
        """Share of the routes, Cov(r, d) / Var d: above 1, or below 0, where w and r oppose each other. NaN if nothing
        varies."""
        return (self.routes + self.covariance / 2) / self.whole if self.whole > 0 else math.nan


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
    whole, _, routes, covariance = _parts(_drawn(moments, seed))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(whole > 0, (routes + covariance / 2) / whole, math.nan)
    return _middle(shares)


def of_layer(moments: Moments) -> dict[str, Any]:
    """Return the split, with an interval of the routes' variance."""
    return split(moments)._asdict() | {"interval": list(_middle(_parts(_drawn(moments, 0))[2]))}


def _drawn(moments: Moments, seed: int) -> Float[np.ndarray, "8 N"]:
    """Return the sums of RESAMPLES draws of the groups."""
    sums = np.array(moments)
    groups = sums.shape[1]
    return sums @ np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), RESAMPLES).T


def _middle(drawn: Float[np.ndarray, " N"]) -> tuple[float, float]:
    """Return the middle COVERAGE of draws, without those that are NaN; NaN if all are."""
    known = drawn[np.isfinite(drawn)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
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


def by_flips(ratios: LogRatios, found: Flips, *, group_size: int) -> list[dict[str, Any]]:
    """Return mean squares by a token's number of flipped experts, 0 to MOST_FLIPS and more."""
    count = np.minimum(found.count, MOST_FLIPS)
    return [{"flips": n} | _squares(ratios.where(count == n), group_size) for n in range(MOST_FLIPS + 1)]


def by_rank(ratios: LogRatios, found: Flips, *, group_size: int) -> list[dict[str, Any]]:
    """Return mean squares by a token's best rank, 1 for most probable, of a flipped expert in any layer."""
    gone = found.old.any(axis=2)
    best = np.where(gone.any(axis=2), gone.argmax(axis=2), -1)
    return [{"rank": rank + 1} | _squares(ratios.where(best == rank), group_size) for rank in range(gone.shape[2])]


def by_probability(ratios: LogRatios, found: Flips, edges: Sequence[float], *, group_size: int) -> list[dict[str, Any]]:
    """Return mean squares by a token's largest old probability of a flipped expert, between the edges."""
    assert found.probability is not None
    largest = np.where(found.old, found.probability, -1.0).max(axis=(2, 3))
    return [
        {"above": low, "up_to": high} | _squares(ratios.where((largest > low) & (largest <= high)), group_size)
        for low, high in itertools.pairwise(edges)
    ]


def by_position(ratios: LogRatios, *, parts: int, group_size: int) -> list[dict[str, Any]]:
    """Split the variance by token position, in `parts` of equal width."""
    T = ratios.mask.shape[1]
    edges = [round(T * i / parts) for i in range(parts + 1)]
    found = []
    for low, high in itertools.pairwise(edges):
        own = ratios.where((np.arange(T) >= low)[None] & (np.arange(T) < high)[None])
        moments = own.moments(group_size)
        one, between = split(moments), share_interval(moments, seed=0)
        facts = {"from": low, "to": high, "tokens": int(own.mask.sum())} | one._asdict()
        found.append(facts | {"share": one.share, "interval": list(between)})
    return found


def by_length(ratios: LogRatios, lengths: Sequence[int]) -> list[dict[str, float]]:
    """Split the variance of the mean over a response's first n tokens, of the responses that have as many.

    `tokens` is n, `effective_tokens` a token's variance over that of the mean: n if a response's tokens are
    independent. Lengths that fewer than two responses reach are left out.
    """
    found = []
    for n in lengths:
        long = ratios.mask.sum(axis=1) >= n
        if long.sum() < 2:
            continue
        first = ratios.where(long[:, None] & (np.cumsum(ratios.mask, axis=1) <= n))
        one, token = split(first.of_responses.moments(1)), split(first.moments(1))
        effective = token.whole / one.whole if one.whole > 0 else math.nan
        facts = {"tokens": n, "responses": int(long.sum())} | one._asdict()
        found.append(facts | {"share": one.share, "effective_tokens": effective})
    return found


def _squares(ratios: LogRatios, group_size: int) -> dict[str, Any]:
    moments = ratios.moments(group_size)
    sums, count = _drawn(moments, 0), int(ratios.mask.sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = sums[Moments._fields.index("rr")] / sums[0]
    facts = {"weights_squared": float(moments.ww.sum()), "routes_squared": float(moments.rr.sum())}
    facts = {name: value / max(1, count) for name, value in facts.items()}
    return {"tokens": count} | facts | {"interval": list(_middle(drawn))}


def metrics(ratios: LogRatios) -> dict[str, float]:
    """Return the split of tokens and of responses, keyed as in metrics.jsonl."""
    found = {}
    for level, these in (("token", ratios), ("sequence", ratios.of_responses)):
        one = split(these.moments(1))
        found |= {f"noise/{level}": one.whole, f"noise/{level}_share": one.share}
        found |= {f"noise/{level}_{part}": getattr(one, part) for part in PARTS}
    token, sequence = found["noise/token"], found["noise/sequence"]
    return found | {"noise/effective_tokens": token / sequence if sequence > 0 else float("nan")}
