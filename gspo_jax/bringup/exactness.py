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

_PERIOD = 4_194_301
"""A prime, so that no two rows or matrices of an array are alike."""

Draws = Callable[[], tuple[Any, ...]]


class Exact(NamedTuple):
    """An output's exact values, with the largest error that rounding excuses."""

    values: np.ndarray
    """Float64, NaN where anything may stand; or integers, which must be equal."""
    limit: float = 0.0
    """The largest `deviation` of a right kernel."""
    scale: np.ndarray | None = None
    """Norm of what each row is a difference of, where most may cancel; None: of the row itself."""


class Kernel(NamedTuple):
    """A computation, and the loads that it is tried on."""

    name: str
    run: Callable[..., dict[str, jax.Array]]
    """The package's function of device arrays. It may look at `backend.platform()`."""
    exact: Callable[..., dict[str, Exact]]
    """The formula on the host, of what was found and the arguments. It looks at what was found only if `settled`, where
    a choice hangs on rounding that may fall either way."""
    loads: Mapping[str, Draws]
    """Arguments, as host arrays of the same shapes for all loads."""
    only_tpu: bool = False
    """True for kernels that only a TPU's programs have."""
    long: bool = False
    """True if interpreting it takes too long for a CPU."""
    settled: bool = False
    """True if `exact` looks at what was found."""
    donated: tuple[int, ...] = ()
    """Arguments whose buffers the outputs may take."""


def limit(dtype: Any, roundings: int) -> float:
    """Return u √(roundings / 3) + `ARITHMETIC`, the largest `deviation` of a result rounded so often on its way.

    With u half the dtype's spacing at 1, 2^-8 in bfloat16, a rounding errs by at most u of a number, and over numbers
    between two powers of two by at most u / √3 in the root mean square (by 0.75 of that over all of them, the margin).
    Independent ones add up as squares. Twelve in bfloat16 stay below 1%.
    """
    return float(jnp.finfo(dtype).eps) / 2 * (roundings / 3) ** 0.5 + ARITHMETIC


def deviation(found: Any, exact: Exact) -> float:
    """Return how far a result is from the exact one, in its worst row (the last axis): ∞ if it is not finite.

    Of each row the larger of ‖found − exact‖ / ‖exact‖ and of half of max |found − exact| / max |exact|, since single
    entries err more than the root mean square: row by row, so that what is wrong for one token, head or expert alone
    counts in full. Of integers, the share that differs.
    """
    found, values = np.asarray(found), exact.values
    if found.shape != values.shape:
        raise ValueError(f"the result has shape {found.shape} instead of {values.shape}")
    if values.dtype.kind in "iub":
        return float((found != values).mean()) if values.size else 0.0
    width = values.shape[-1]
    found, values = found.reshape(-1, width), values.reshape(-1, width)
    step = max(1, _ENTRIES // width)
    parts = [_by_row(found[i : i + step], values[i : i + step]) for i in range(0, len(values), step)]
    errors, norms, worst, largest = (np.concatenate(x) for x in zip(*parts, strict=True))
    if not np.isfinite(errors).all():
        return float("inf")
    if exact.scale is not None:
        scale = exact.scale.reshape(-1)
        norms, largest = np.maximum(norms, scale), np.maximum(largest, 2 * scale / width**0.5)
    used = norms[norms > 0]
    norms = np.maximum(norms, _SMALL * np.sqrt(np.mean(used**2)) if used.size else 1)
    largest = np.maximum(largest, _SMALL * largest.max() or 1)
    return float(max((errors / norms).max(), (worst / largest).max() / 2))


def _by_row(found: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return norm of the error, norm, largest error and largest entry of each row; equal infinities count nothing."""
    found = found.astype(np.float64)
    counts = ~np.isnan(exact) & ~(np.isinf(exact) & (found == exact))
    exact = np.where(counts, exact, 0)
    error, size = np.abs(np.where(counts, found, 0) - exact), np.abs(exact)
    return np.linalg.norm(error, axis=1), np.linalg.norm(size, axis=1), error.max(axis=1), size.max(axis=1)


class Draw:
    """Random inputs of one load of a kernel, always the same."""

    def __init__(self, name: str, dtype: Any):
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.dtype = jnp.dtype(dtype)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: Any = None) -> np.ndarray:
        """Return scale · n / 64, n an integer in [-128, 127] and scale a power of two."""
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        found = self.int8(*shape).astype(np.float32)
        found *= scale / 64
        if dtype != jnp.bfloat16:
            return found.astype(dtype)
        # Its upper half, which is all there is: several times as fast as a conversion.
        return np.ascontiguousarray(found.view("<u2").reshape(*shape, 2)[..., 1]).view(dtype)

    def int8(self, *shape: int) -> np.ndarray:
        """Return random bytes, of which those of large arrays recur after `_PERIOD`."""
        size = int(np.prod(shape))
        drawn = np.frombuffer(self.rng.bytes(min(size, _PERIOD)), np.int8)
        return np.resize(drawn, size).reshape(shape)

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
