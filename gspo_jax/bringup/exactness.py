"""What a kernel must compute, and how far from it a device is.

Inputs are small multiples of 1/64, which bfloat16 holds exactly, so that host and device compute from the same numbers.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ARITHMETIC = 2**-12
"""Error granted to float32 arithmetic, relative to a row's norm. A sum of n terms errs by about √n · 2^-24, a product
of three bfloat16 passes by 2^-16, and a TPU's exp, log and rsqrt by some 2^-20; a recurrence adds up tens of these. An
intermediate result that is wrongly rounded to bfloat16 errs by ten times as much, 2^-8 / √3."""
_SMALL = 1 / 32
"""Rows whose norm is below this share of the rows' average are compared with that share: they are sums of which most
cancelled, or zero."""
_ENTRIES = 2**22
"""Entries compared at once."""

Draws = Callable[[], tuple[Any, ...]]


class Exact(NamedTuple):
    """What an output must be."""

    values: np.ndarray
    """Float64, NaN where anything may stand; or integers, which must be equal."""
    limit: float = 0.0
    """The largest `deviation` of a right kernel."""


class Kernel(NamedTuple):
    """A computation, and the loads that it is tried on."""

    name: str
    run: Callable[..., dict[str, jax.Array]]
    """The package's function of device arrays. It may look at `backend.platform()`."""
    exact: Callable[..., dict[str, Exact]]
    """The formula: (found, *arguments) on the host. It may look at what was found only where a choice hangs on rounding
    that may fall either way."""
    loads: Mapping[str, Draws]
    """Arguments, as host arrays of the same shapes for all loads."""
    only_tpu: bool = False
    """True for kernels that only a TPU's programs have."""


def limit(dtype: Any, roundings: int) -> float:
    """Return u √roundings + `ARITHMETIC`, the largest `deviation` of a result that was rounded so often on its way.

    With u half the dtype's spacing at 1, 2^-8 in bfloat16, a rounding errs by at most u and over many numbers by at most
    u / √3 in the root mean square. Independent ones add up as squares, so that √3 is left as a margin. Up to six in
    bfloat16 stay below 1%.
    """
    return float(jnp.finfo(dtype).eps) / 2 * roundings**0.5 + ARITHMETIC


def deviation(found: Any, exact: np.ndarray) -> float:
    """Return how far a result is from the exact one, in its worst row (the last axis): ∞ if it is not finite.

    Of each row the larger of ‖found − exact‖ / ‖exact‖ and max |found − exact| / max |exact|: row by row, so that what
    is wrong for one token, head or expert alone counts in full. Of integers, the share that differs.
    """
    found = np.asarray(found)
    if found.shape != exact.shape:
        raise ValueError(f"the result has shape {found.shape} instead of {exact.shape}")
    if exact.dtype.kind in "iub":
        return float((found != exact).mean()) if exact.size else 0.0
    width = exact.shape[-1]
    found, exact = found.reshape(-1, width), exact.reshape(-1, width)
    step = max(1, _ENTRIES // max(width, 1))
    parts = [_by_row(found[i : i + step], exact[i : i + step]) for i in range(0, len(exact), step)]
    if not parts:
        return 0.0
    errors, norms, worst, largest = (np.concatenate(x) for x in zip(*parts, strict=True))
    if not np.isfinite(errors).all():
        return float("inf")
    used = norms[norms > 0]
    floor = _SMALL * np.sqrt(np.mean(used**2)) if used.size else 1.0
    most = _SMALL * largest.max(initial=0.0) or 1.0
    return float(max((errors / np.maximum(norms, floor)).max(), (worst / np.maximum(largest, most)).max()))


def _by_row(found: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return norm of the error, norm, largest error and largest entry of each row."""
    defined = ~np.isnan(exact)
    exact = np.where(defined, exact, 0)
    error = np.abs(np.where(defined, found.astype(np.float64), 0) - exact)
    size = np.abs(exact)
    return np.linalg.norm(error, axis=1), np.linalg.norm(size, axis=1), error.max(axis=1), size.max(axis=1)


class Draw:
    """Random inputs of one load of a kernel, always the same."""

    def __init__(self, name: str, dtype: Any):
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: Any = None) -> np.ndarray:
        """Return scale · n / 64, n an integer in [-128, 127] and scale a power of two."""
        return (self.int8(*shape).astype(np.float32) * (scale / 64)).astype(self.dtype if dtype is None else dtype)

    def int8(self, *shape: int) -> np.ndarray:
        return np.frombuffer(self.rng.bytes(int(np.prod(shape))), np.int8).reshape(shape)

    def positive(self, *shape: int) -> np.ndarray:
        """Return float32 numbers in [0.5, 1.5)."""
        return self.rng.uniform(0.5, 1.5, shape).astype(np.float32)

    def zipf(self, count: int, size: int) -> np.ndarray:
        """Return `count` of the numbers below `size`, of which the n-th most frequent comes in proportion to 1 / n."""
        shares = self.rng.permutation(1 / np.arange(1, size + 1))
        return self.rng.choice(size, count, p=shares / shares.sum())


def wide(x: Any) -> np.ndarray:
    """Return x in float64."""
    return np.asarray(x).astype(np.float64)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    """Return x / rms(x) · scale over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
