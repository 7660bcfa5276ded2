"""Kernels of routed experts: matmuls grouped by expert, adapters, SwiGLU, sums of rows, and the router's choice."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.bringup.exactness import Draw, Draws, Exact, Kernel, limit, log_softmax, silu, wide
from gspo_jax.kernels import pairs, router_tpu
from gspo_jax.kernels.adapted_matmul import LowRank, adapted_matmuls
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.grouped_matmul import Scaled, grouped_matmuls, stacked_matmuls
from gspo_jax.kernels.row_sums_tpu import by_target, row_sums
from gspo_jax.models.experts import ExpertKernels, combine_experts, swiglu, weighted_sum
from gspo_jax.models.matrices import Matrix
from gspo_jax.models.moe import route


class Sizes(NamedTuple):
    """Widths of a layer, and how much of it is tried."""

    dtype: Any
    rows: int
    """No multiple of a tile."""
    hidden: int
    width: int
    """F, of an expert."""
    experts: int
    """E of the whole layer."""
    trained: int
    """Experts whose weights get a gradient, which the host has to compute."""
    k: int
    tokens: int


SMALL = Sizes(jnp.float32, 147, 128, 256, 16, 6, 2, 128)
WIDE = Sizes(jnp.bfloat16, 1000, 2048, 768, 128, 8, 8, 2048)
"""Of Qwen3-30B-A3B."""
RANK, LAYERS, SENDERS, BLOCK = 8, 2, 4, 8
LOADS = ("random", "empty", "full", "skewed")


def group_sizes(load: str, rows: int, groups: int) -> np.ndarray:
    """Return sizes of groups: alike, none, all rows in one of them, or like 1 / n with rows that no group has."""
    rng = Draw(f"sizes {load}", jnp.int32)
    if load == "random":
        found = np.bincount(rng.rng.integers(groups, size=rows - 5), minlength=groups)
    elif load == "skewed":
        found = np.bincount(rng.zipf(rows - 3, groups), minlength=groups)
    else:
        found = np.zeros(groups, int)
        found[groups // 2] = rows if load == "full" else 0
    return found.astype(np.int32)


def experts_of(load: str, tokens: int, k: int, experts: int, held: int) -> np.ndarray:
    """Return distinct experts of each token [N, K]: "empty" chooses none of those held, "full" always the second."""
    draw = Draw(f"experts {load}", jnp.int32)
    if load == "empty":
        choices = np.arange(held, experts)
        return np.stack([draw.rng.choice(choices, k, replace=False) for _ in range(tokens)]).astype(np.int32)
    noise = draw.rng.gumbel(size=(tokens, experts))
    if load == "skewed":
        noise -= 1.5 * np.log(1 + draw.rng.permutation(experts))
    if load == "full":
        noise[:, 1] = np.inf
    return np.argsort(-noise, axis=1)[:, :k].astype(np.int32)


def _groups(sizes: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield the groups that have rows, and where these are."""
    ends = np.cumsum(sizes)
    for e in np.flatnonzero(sizes):
        yield int(e), slice(int(ends[e] - sizes[e]), int(ends[e]))


def _undefined(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan)


def _each(loads: Sequence[str], draw: Callable[[str], tuple[Any, ...]]) -> dict[str, Draws]:
    return {load: partial(draw, load) for load in loads}


def grouped(size: Sizes) -> Kernel:
    """Products of two matrices, and the gradients of rows and matrices."""
    E, D, F, N = size.trained, size.hidden, size.width, size.rows

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"grouped {load}", size.dtype)
        matrices = tuple(x(E, D, F) for _ in range(2))
        return x(N, D), matrices, group_sizes(load, N, E), tuple(x(N, F) for _ in range(2))

    def run(rows: Any, weights: Any, sizes: Any, grads: Any) -> dict[str, jax.Array]:
        out, back = jax.vjp(lambda rows, weights: grouped_matmuls(rows, weights, sizes), rows, weights)
        d_rows, d_weights = back(grads)
        names = "first product", "second product", "gradient of rows", "first matrix's", "second matrix's"
        return dict(zip(names, (*out, d_rows, *d_weights), strict=True))

    def exact(found: Any, rows: Any, weights: Any, sizes: Any, grads: Any) -> dict[str, Exact]:
        out = [_undefined(N, F) for _ in weights]
        d_rows, d_weights = _undefined(N, D), [np.zeros((E, D, F)) for _ in weights]
        for e, at in _groups(sizes):
            d_rows[at] = 0
            for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
                x, w, g = wide(rows[at]), wide(w[e]), wide(g[at])
                out[i][at], d_weights[i][e] = x @ w, x.T @ g
                d_rows[at] += g @ w.T
        once = limit(size.dtype, 1)
        return {
            "first product": Exact(out[0], once),
            "second product": Exact(out[1], once),
            "gradient of rows": Exact(d_rows, limit(size.dtype, 3)),  # XLA rounds two products and their sum
            "first matrix's": Exact(d_weights[0], once),
            "second matrix's": Exact(d_weights[1], once),
        }

    return Kernel("grouped matmul", run, exact, _each(LOADS, draw))


def _grouped_int8(size: Sizes) -> Kernel:
    """As `grouped`, of frozen int8 matrices with scales."""
    E, D, F, N = size.experts // 2, size.hidden, size.width, size.rows

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"int8 {load}", size.dtype)
        weights = cast(Any, Scaled)(x.int8(E, D, F), x.positive(E, F) / 64)
        return x(N, D), weights, group_sizes(load, N, E), x(N, F)

    def run(rows: Any, weights: Any, sizes: Any, grads: Any) -> dict[str, jax.Array]:
        out, back = jax.vjp(lambda rows: grouped_matmuls(rows, (weights,), sizes)[0], rows)
        return {"product": out, "gradient of rows": back(grads)[0]}

    def exact(found: Any, rows: Any, weights: Any, sizes: Any, grads: Any) -> dict[str, Exact]:
        out, d_rows = _undefined(N, F), _undefined(N, D)
        for e, at in _groups(sizes):
            values, scale = wide(weights.values[e]), wide(weights.scale[e])
            out[at], d_rows[at] = wide(rows[at]) @ values * scale, (wide(grads[at]) * scale) @ values.T
        return {
            "product": Exact(out, limit(size.dtype, 3)),  # XLA rounds before it scales
            "gradient of rows": Exact(d_rows, limit(size.dtype, 3)),
        }

    return Kernel("grouped matmul, int8", run, exact, _each(LOADS, draw))


def _stacked(size: Sizes) -> Kernel:
    """Products with one layer's matrices, read where all layers lie."""
    E, D, F, N = size.experts // 4, size.hidden, size.width, size.rows

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"stacked {load}", size.dtype)
        return x(N, D), x(LAYERS, E, D, F), group_sizes(load, N, E), np.int32(1)

    def run(rows: Any, weights: Any, sizes: Any, layer: Any) -> dict[str, jax.Array]:
        return {"product": stacked_matmuls(rows, (weights,), sizes, layer=layer)[0]}

    def exact(found: Any, rows: Any, weights: Any, sizes: Any, layer: Any) -> dict[str, Exact]:
        out = _undefined(N, F)
        for e, at in _groups(sizes):
            out[at] = wide(rows[at]) @ wide(weights[layer, e])
        return {"product": Exact(out, limit(size.dtype, 1))}

    return Kernel("grouped matmul of a layer", run, exact, _each(LOADS, draw))


def _adapted(size: Sizes) -> Kernel:
    """Products with frozen matrices and adapters, and the gradients of rows and adapters."""
    E, D, F, N, s = size.experts // 4, size.hidden, size.width, size.rows, 0.5

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"adapted {load}", size.dtype)
        low = cast(Any, LowRank)(x(E, D, RANK), x(E, RANK, F), s)
        return x(N, D), x(E, D, F), low, group_sizes(load, N, E), x(N, F)

    def run(rows: Any, weights: Any, low: Any, sizes: Any, grads: Any) -> dict[str, jax.Array]:
        out, back = jax.vjp(lambda rows, low: adapted_matmuls(rows, (weights,), (low,), sizes)[0], rows, low)
        d_rows, d_low = back(grads)
        d_a, d_b = (x.reshape(E, -1) for x in (d_low.a, d_low.b))
        return {"product": out, "gradient of rows": d_rows, "gradient of A": d_a, "gradient of B": d_b}

    def exact(found: Any, rows: Any, weights: Any, low: Any, sizes: Any, grads: Any) -> dict[str, Exact]:
        out, d_rows = _undefined(N, F), _undefined(N, D)
        d_a, d_b = np.zeros((E, D, RANK)), np.zeros((E, RANK, F))
        for e, at in _groups(sizes):
            x, g, w, a, b = (wide(y) for y in (rows[at], grads[at], weights[e], low.a[e], low.b[e]))
            out[at], d_rows[at] = x @ w + s * (x @ a) @ b, g @ w.T + s * (g @ b.T) @ a.T
            d_a[e], d_b[e] = s * x.T @ (g @ b.T), s * (x @ a).T @ g
        # XLA rounds x A, its product with B, x W and the sum; the kernel x A and the sum.
        four = limit(size.dtype, 4)
        return {
            "product": Exact(out, four),
            "gradient of rows": Exact(d_rows, four),
            "gradient of A": Exact(d_a.reshape(E, -1), four),
            "gradient of B": Exact(d_b.reshape(E, -1), four),
        }

    return Kernel("adapted matmul", run, exact, _each(LOADS, draw))


def _swiglu_weights(x: Draw, E: int, D: int, F: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return gate, up and down whose products are of order one."""
    of_rows, of_hidden = (2.0 ** -round(np.log2(1.3 * n**0.5)) for n in (D, F))
    return x(E, D, F, scale=of_rows), x(E, D, F, scale=of_rows), x(E, F, D, scale=of_hidden)


class _Experts(NamedTuple):
    """One expert's outputs and gradients, of rows x with shares w and cotangents g."""

    out: np.ndarray
    rows: np.ndarray
    shares: np.ndarray
    matrices: tuple[np.ndarray, np.ndarray, np.ndarray]

    @classmethod
    def of(cls, x: np.ndarray, w: np.ndarray, g: np.ndarray, gate: Any, up: Any, down: Any) -> "_Experts":
        gate, up, down = wide(gate), wide(up), wide(down)
        a, b, w = x @ gate, x @ up, w[:, None]
        sigmoid = 1 / (1 + np.exp(-a))
        slope = sigmoid * (1 + a * (1 - sigmoid))
        hidden, d = silu(a) * b, g @ down.T
        d_a, d_b = d * w * b * slope, d * w * silu(a)
        return cls(
            (hidden * w) @ down,
            d_a @ gate.T + d_b @ up.T,
            (d * hidden).sum(axis=1),
            (x.T @ d_a, x.T @ d_b, (hidden * w).T @ g),
        )


def _swiglu(size: Sizes) -> Kernel:
    """The experts' SwiGLU of sorted rows, with all gradients."""
    E, D, F, N = size.trained, size.hidden, size.width, size.rows
    names = "gate", "up", "down"

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"swiglu {load}", size.dtype)
        return x(N, D), x(N, 1), _swiglu_weights(x, E, D, F), group_sizes(load, N, E), x(N, D)

    def run(rows: Any, shares: Any, weights: Any, sizes: Any, grads: Any) -> dict[str, jax.Array]:
        def apply(rows: Any, shares: Any, weights: Any) -> jax.Array:
            return swiglu(rows, shares, ExpertKernels(*map(Matrix, weights)), group_sizes=sizes)

        out, back = jax.vjp(apply, rows, shares, weights)
        d_rows, d_shares, d_weights = back(grads)
        d_gate, d_up, d_down = d_weights
        # Of an expert's only token, all columns of a row of `down` hang on one rounded number.
        d_weights = {f"gradient of {name}": d for name, d in zip(names, (d_gate, d_up, d_down.mT), strict=True)}
        return {"output": out, "gradient of rows": d_rows, "gradient of shares": d_shares[:, 0], **d_weights}

    def exact(found: Any, rows: Any, shares: Any, weights: Any, sizes: Any, grads: Any) -> dict[str, Exact]:
        out, d_rows, d_shares = _undefined(N, D), _undefined(N, D), _undefined(N)
        d_weights = [np.zeros(w.shape) for w in weights]
        for e, at in _groups(sizes):
            one = _Experts.of(wide(rows[at]), wide(shares[at, 0]), wide(grads[at]), *(w[e] for w in weights))
            out[at], d_rows[at], d_shares[at] = one.out, one.rows, one.shares
            for whole, own in zip(d_weights, one.matrices, strict=True):
                whole[e] = own
        d_weights[2] = d_weights[2].swapaxes(1, 2)
        # XLA rounds every operation of silu, of its slope and of the products; and adds up F products of a share so.
        most, of_shares = limit(size.dtype, 16), limit(size.dtype, 32)
        exact = {f"gradient of {name}": Exact(d, most) for name, d in zip(names, d_weights, strict=True)}
        exact |= {"output": Exact(out, most), "gradient of rows": Exact(d_rows, most)}
        return exact | {"gradient of shares": Exact(d_shares, of_shares)}

    return Kernel("experts' SwiGLU", run, exact, _each(LOADS, draw))


def _combined(size: Sizes) -> Kernel:
    """The held experts' weighted sum for tokens, in buffers that a balanced load fills, with two gradients."""
    D, F, N, K, held = size.hidden, size.width, size.tokens, size.k, size.trained

    def draw(load: str) -> tuple[Any, ...]:
        x, ids = Draw(f"combined {load}", size.dtype), experts_of(load, N, K, size.experts, held)
        return x(N, D), ids, x(N, K, dtype=jnp.float32), _swiglu_weights(x, held, D, F), x(N, D)

    def run(x: Any, ids: Any, shares: Any, weights: Any, grads: Any) -> dict[str, jax.Array]:
        def apply(x: Any, shares: Any) -> jax.Array:
            kernels = ExpertKernels(*map(Matrix, weights))
            return combine_experts(x, ids, shares, kernels, likely=N * K * held // size.experts)

        out, back = jax.vjp(apply, x, shares)
        d_x, d_shares = back(grads)
        return {"output": out, "gradient of tokens": d_x, "gradient of weights": d_shares.reshape(-1)}

    def exact(found: Any, x: Any, ids: Any, shares: Any, weights: Any, grads: Any) -> dict[str, Exact]:
        out, d_x, d_shares = np.zeros((N, D)), np.zeros((N, D)), np.zeros((N, K))
        for e in range(held):
            n, k = np.nonzero(ids == e)
            if len(n):
                one = _Experts.of(wide(x[n]), wide(shares[n, k]), wide(grads[n]), *(w[e] for w in weights))
                out[n] += one.out
                d_x[n] += one.rows
                d_shares[n, k] = one.shares
        most = limit(size.dtype, 16)  # as of the SwiGLU
        return {
            "output": Exact(out, most),
            "gradient of tokens": Exact(d_x, most),
            "gradient of weights": Exact(d_shares.reshape(-1), limit(size.dtype, 32)),
        }

    return Kernel("experts, combined", run, exact, _each(LOADS, draw), long=True)


def _row_sums(size: Sizes) -> Kernel:
    """Sums of rows by target, some rows without one."""
    N, D, M = size.rows, size.hidden, size.tokens // 4 + 3

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"row sums {load}", size.dtype)
        targets = {"random": x.rng.integers(M, size=N), "skewed": x.zipf(N, M)}.get(load, np.full(N, M // 2))
        return x(N, D), targets.astype(np.int32), np.int32({"empty": 0, "full": N}.get(load, N - 7))

    def run(rows: Any, targets: Any, count: Any) -> dict[str, jax.Array]:
        if platform() == "tpu":
            return {"sums": row_sums(rows, by_target(targets, count, M), M)}
        used = (jnp.arange(N) < count)[:, None]
        sums = jax.ops.segment_sum(jnp.where(used, rows, 0).astype(jnp.float32), targets, M)
        return {"sums": sums.astype(rows.dtype)}

    def exact(found: Any, rows: Any, targets: Any, count: Any) -> dict[str, Exact]:
        sums = np.zeros((M, D))
        np.add.at(sums, targets[:count], wide(rows[:count]))
        return {"sums": Exact(sums, limit(size.dtype, 1))}

    return Kernel("row sums", run, exact, _each(LOADS, draw), only_tpu=True)


def _weighted(size: Sizes) -> Kernel:
    """Weighted sums of a token's rows, some of which it has not."""
    N, D, K, M = size.tokens, size.hidden, size.k, size.rows

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"weighted {load}", size.dtype)
        slots = {"random": x.rng.integers(M + M // 3, size=(N, K)), "skewed": x.zipf(N * K, 2 * M).reshape(N, K)}
        other = np.full((N, K), M if load == "empty" else 0)
        return x(M, D), slots.get(load, other).astype(np.int32), x(N, K, dtype=jnp.float32)

    def run(rows: Any, slots: Any, weights: Any) -> dict[str, jax.Array]:
        return {"sums": weighted_sum(rows, slots, weights)}

    def exact(found: Any, rows: Any, slots: Any, weights: Any) -> dict[str, Exact]:
        sums, rows = np.zeros((N, D)), wide(rows)
        for k in range(K):
            n = np.flatnonzero(slots[:, k] < M)
            sums[n] += wide(weights[n, k])[:, None] * rows[slots[n, k]]
        return {"sums": Exact(sums, limit(size.dtype, 1))}

    return Kernel("weighted sums of rows", run, exact, _each(LOADS, draw))


def _router(size: Sizes) -> Kernel:
    """The top K of a softmax over experts, of equal ones the first.

    Logits are multiples of 2^-15 with less than 2^24 of them in a sum, so exact in float32: choices must be equal.
    """
    N, D, E, K = size.tokens, size.hidden, max(size.experts, 128), size.k

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"router {load}", size.dtype)
        tokens, router = x(N, D, scale=2**-3), x(D, E)
        if load == "ties":
            router = router[:, np.arange(E) // 3]
            tokens[: N // 4] = 0
        if load == "skewed":  # one expert far ahead
            router[:, E // 2] = np.sign(tokens[0].astype(np.float32)).astype(router.dtype)
        return tokens, router

    def run(x: Any, router: Any) -> dict[str, jax.Array]:
        if router_tpu.applies(N, D, E):
            ids, logprobs, shares = (a.T for a in router_tpu.choose(x, router, k=K, renormalise=True))
        else:
            routes, shares = route((x.astype(jnp.float32) @ router.astype(jnp.float32))[None], k=K, renormalise=True)
            ids, logprobs, shares = routes.experts[0], routes.logprobs[0], shares[0]
        return {"experts": ids, "log-probs": logprobs, "weights": shares}

    def exact(found: Any, x: Any, router: Any) -> dict[str, Exact]:
        every = wide(x) @ wide(router)
        ids = np.argsort(-every, axis=1, kind="stable")[:, :K]
        logprobs = np.take_along_axis(log_softmax(every), ids, axis=1)
        shares = np.exp(logprobs - logprobs[:, :1])
        shares /= shares.sum(axis=1, keepdims=True)
        most = limit(jnp.float32, 1)
        return {
            "experts": Exact(ids),
            "log-probs": Exact(logprobs, most),
            "weights": Exact(shares, most),
        }

    return Kernel("router", run, exact, _each(("random", "ties", "skewed"), draw))


def _places(size: Sizes) -> Kernel:
    """Places of pairs in a buffer sorted by expert, where each expert begins a new block."""
    N, K, E = size.tokens, size.k, size.experts
    none = K * N + BLOCK * E

    def draw(load: str) -> tuple[Any, ...]:
        ids = experts_of(load, N, K, 2 * E, E).T
        return (np.where(ids < E, ids, E).astype(np.int32),)

    def run(ids: Any) -> dict[str, jax.Array]:
        found, spare, blocks = pairs.places(ids, E, block=BLOCK, none=none)
        return {"places": found, "spare": spare[:, :E], "blocks": blocks}

    def exact(found: Any, ids: Any) -> dict[str, Exact]:
        places, spare, counts, start = np.full((K, N), none), np.full((BLOCK, E), none), np.zeros(E, int), 0
        for e in range(E):
            n, k = np.nonzero(e == ids.T)
            counts[e] = -(-len(n) // BLOCK)
            places[k, n] = start + np.arange(len(n))
            filled = np.arange(start + len(n), start + BLOCK * counts[e])
            spare[: len(filled), e] = filled
            start += BLOCK * counts[e]
        return {"places": Exact(places), "spare": Exact(spare), "blocks": Exact(counts)}

    return Kernel("pair places", run, exact, _each(LOADS, draw))


def _moves(size: Sizes) -> Kernel:
    """Offsets and sizes of an exchange of pairs between shards of experts."""
    E, S, room = max(size.experts, 128), SENDERS, 50
    held = E // S

    def draw(load: str) -> tuple[Any, ...]:
        x, of_one = Draw(f"moves {load}", jnp.int32), np.arange(E) // held == 1
        counts = x.rng.integers(0, 9, (S, E))
        counts *= {"random": 1, "empty": 0, "full": 500 * of_one, "skewed": 1 + 40 * (np.arange(E) % 37 == 1)}[load]
        return counts.astype(np.int32), np.int32(1), np.int32(40)

    def run(counts: Any, me: Any, first: Any) -> dict[str, jax.Array]:
        there, back, arriving = pairs.moves(counts, me, first, room=room)
        return {"there": jnp.stack(there), "back": jnp.stack(back), "arriving": arriving}

    def exact(found: Any, counts: Any, me: Any, first: Any) -> dict[str, Exact]:
        lands, leaves = np.zeros((S, E), int), np.zeros((S, E), int)
        for s in range(S):
            for e in range(E):
                own = e // held * held
                leaves[s, e] = counts[s, :e].sum()
                lands[s, e] = counts[:, own:e].sum() + counts[:s, e].sum()
        begin, end = (np.clip(x - first, 0, room) for x in (lands, lands + counts))
        size, leaves = end - begin, leaves + np.clip(first - lands, 0, counts)
        mine = slice(me * held, (me + 1) * held)
        received, landed, left = (x[:, mine].reshape(-1) for x in (size, begin, leaves))
        there, back = (leaves[me], size[me], begin[me], received), (landed, received, left, size[me])
        return {
            "there": Exact(np.stack(there)),
            "back": Exact(np.stack(back)),
            "arriving": Exact(size[:, mine].sum(axis=0)),
        }

    return Kernel("pair moves", run, exact, _each(LOADS, draw))


def kernels(*, small: bool) -> list[Kernel]:
    """Return the kernels of experts, of a large model's widths unless `small`."""
    size = SMALL if small else WIDE
    made = grouped, _grouped_int8, _stacked, _adapted, _swiglu, _combined, _row_sums, _weighted, _router, _places
    return [make(size) for make in (*made, _moves)]
