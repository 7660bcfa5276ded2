"""What XLA itself must compute for routers and samplers: comparisons and sums along rows, draws, donated buffers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import doctor
from gspo_jax.bringup.exactness import Draw, Exact, Kernel, limit, wide
from gspo_jax.bringup.stages import FAILED, OK, WARNING
from gspo_jax.doctor import Finding
from gspo_jax.rollout.draws import VOCABULARY
from gspo_jax.rollout.sampling import SamplingParams, draw

ROWS, K = 4, 8
UPDATES = 64
"""Of a donated cache."""
PAIRS = 2**14
"""Most integers that are sorted or added up: pairs of tokens and experts, not a vocabulary, which takes long to compile
for a TPU."""


def _rows(columns: int, load: str, name: str) -> np.ndarray:
    """Return float32 rows: distinct numbers, seven of them, or mostly -∞, the last row alone and whole."""
    x = Draw(f"{name} {load}", jnp.float32)
    if load == "ties":
        return x.rng.integers(-3, 4, (ROWS, columns)).astype(np.float32)
    rows = x.rng.standard_normal((ROWS, columns)).astype(np.float32)
    if load == "masked":
        rows[x.rng.random(rows.shape) < 0.99] = -np.inf
        rows[-1] = -np.inf
    return rows


def _largest(columns: int, dtype: Any) -> Kernel:
    """The largest of long rows: argmax, the sampler's greedy tokens, and top-k, of equal ones the first."""
    name = f"largest of rows, {jnp.dtype(dtype).name}"

    def load(kind: str) -> tuple[Any, ...]:
        return (_rows(columns, kind, "largest").astype(jnp.dtype(dtype)),)

    def run(x: Any) -> dict[str, jax.Array]:
        values, ids = jax.lax.top_k(x, K)
        greedy = draw(jax.random.split(jax.random.key(0), ROWS), x, SamplingParams(temperature=0)).tokens
        return {"top-k": values, "top-k ids": ids, "greedy tokens": greedy, "argmax": jnp.argmax(x, axis=1)}

    def exact(found: Any, x: Any) -> dict[str, Exact]:
        ids = np.argsort(-wide(x), axis=1, kind="stable")[:, :K]
        values = wide(np.take_along_axis(x, ids, axis=1))
        first = Exact(ids[:, 0])
        return {"top-k": Exact(values), "top-k ids": Exact(ids), "greedy tokens": first, "argmax": first}

    return Kernel(name, run, exact, {kind: partial(load, kind) for kind in ("random", "ties", "masked")})


def _sorted(columns: int) -> Kernel:
    """Sorts of long rows of numbers and of integers, and the order that sorts them stably."""

    def load(kind: str) -> tuple[Any, ...]:
        rows = _rows(columns, kind, "sort")
        return rows, np.nan_to_num(100 * rows[:, :PAIRS], neginf=-1000).astype(np.int32)

    def run(x: Any, n: Any) -> dict[str, jax.Array]:
        return {"sort": jnp.sort(x, axis=1), "sort of integers": jnp.sort(n), "order": jnp.argsort(n, stable=True)}

    def exact(found: Any, x: Any, n: Any) -> dict[str, Exact]:
        order = np.argsort(n, axis=1, kind="stable")
        return {
            "sort": Exact(wide(np.sort(x, axis=1))),
            "sort of integers": Exact(np.sort(n, axis=1)),
            "order": Exact(order),
        }

    return Kernel("sort", run, exact, {kind: partial(load, kind) for kind in ("random", "ties", "masked")})


def _sums(columns: int) -> Kernel:
    """Cumulative sums of long rows."""

    def load(kind: str) -> tuple[Any, ...]:
        x = Draw(f"cumsum {kind}", jnp.float32)
        rows = x.rng.standard_normal((ROWS, columns))
        shares = np.exp(rows - rows.max())
        rows = {"random": rows, "empty": 0 * rows, "probabilities": shares / shares.sum(axis=1, keepdims=True)}[kind]
        return rows.astype(np.float32), x.rng.integers(0, 9, (ROWS, min(columns, PAIRS))).astype(np.int32)

    def run(x: Any, n: Any) -> dict[str, jax.Array]:
        return {"cumsum": jnp.cumsum(x, axis=1), "cumsum of integers": jnp.cumsum(n, axis=1)}

    def exact(found: Any, x: Any, n: Any) -> dict[str, Exact]:
        return {
            "cumsum": Exact(np.cumsum(wide(x), axis=1), limit(jnp.float32, 1)),
            "cumsum of integers": Exact(np.cumsum(n, axis=1)),
        }

    return Kernel("cumsum", run, exact, {kind: partial(load, kind) for kind in ("random", "empty", "probabilities")})


def kernels(*, small: bool) -> list[Kernel]:
    """Return the operations along rows as long as a vocabulary, or shorter if `small`."""
    columns = 1003 if small else VOCABULARY
    return [*(_largest(columns, dtype) for dtype in (jnp.float32, jnp.bfloat16)), _sorted(columns), _sums(columns)]


def donation() -> Finding:
    """Check that a donated cache, updated again and again, holds what was written, and lies where it lay."""
    rng, (L, B, S, h) = np.random.default_rng(0), (2, 8, 128, 128)
    new = rng.standard_normal((UPDATES, L, B, h)).astype(np.float32)
    at = rng.integers(S, size=(UPDATES, B)).astype(np.int32)

    @partial(jax.jit, donate_argnums=0)
    def update(cache: Any, rows: Any, at: Any) -> Any:
        cache = cache.at[:, jnp.arange(B), at].set(rows)
        return cache.at[:, 0].add(0.5 * cache[:, 1])  # reads what it writes beside

    cache, expected = jnp.zeros((L, B, S, h)), np.zeros((L, B, S, h), np.float32)
    places = set()
    for rows, columns in zip(new, at, strict=True):
        cache = update(cache, rows, columns)
        places.add(cache.unsafe_buffer_pointer())
        expected[:, np.arange(B), columns] = rows
        expected[:, 0] += np.float32(0.5) * expected[:, 1]
    wrong = int((~np.isclose(np.asarray(cache), expected, rtol=1e-5, atol=1e-5)).sum())
    if wrong:
        found = f"{wrong} of {cache.size} entries of a donated cache are wrong after {UPDATES} updates in place"
        return Finding("donation", FAILED, found, "Do not train with it: a decode step's cache would be wrong.")
    if len(places) > 2:  # the first, and where a program may have put its result at first
        found = f"right after {UPDATES} updates of a cache, but copied: it lay in {len(places)} places"
        return Finding("donation", WARNING, found, "Decoding will need more memory and time than planned.")
    return Finding("donation", OK, f"right after {UPDATES} updates of a cache, in place")


CHECKS: dict[str, Callable[[], Finding]] = {"draws": doctor.draws, "donation": donation}
"""Checks that are no comparison with a formula, by name."""
