"""Kernels of a decode step: queries, attention over prompts and pages, output and routes, and experts."""

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.bringup.exactness import Draw, Exact, Kernel, limit, log_softmax, rms_norm, silu, wide
from gspo_jax.bringup.expert_kernels import experts_of
from gspo_jax.kernels import rotary
from gspo_jax.kernels.attention import SlotRows, decode_attention
from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.decode_attention_tpu import Visits, attend_paged
from gspo_jax.kernels.decode_experts_tpu import experts_sum, pack
from gspo_jax.kernels.decode_mlp_tpu import mlp
from gspo_jax.kernels.decode_output_tpu import RouteLog, Router, output_and_routes
from gspo_jax.kernels.decode_qkv_tpu import heads, rotation
from gspo_jax.kernels.decode_tpu import Stacked

EPS, LAYERS, LAYER = 1e-6, 2, 1
MARK = 7
"""What other layers' log holds, and must go on to hold."""


class Sizes(NamedTuple):
    """Widths of a layer, and the slots of a decode step."""

    dtype: Any
    slots: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    width: int
    """F, of an expert and of the dense SwiGLU."""
    experts: int
    held: int
    k: int
    gathered: int
    """Tokens that the held experts get."""
    prompts: int
    columns: int
    """Columns of a prompt's keys."""
    page: int
    pages: int


SMALL = Sizes(jnp.float32, 6, 128, 4, 1, 128, 128, 16, 4, 2, 24, 3, 16, 8, 3)
WIDE = Sizes(jnp.bfloat16, 32, 2048, 32, 4, 128, 768, 128, 16, 8, 256, 4, 512, 64, 8)


def _order_one(x: Draw, *shape: int) -> np.ndarray:
    """Return matrices whose products with numbers of order one are of order one."""
    return x(*shape, scale=2.0 ** -round(np.log2(1.3 * shape[-2] ** 0.5)))


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return rotary.rms_norm(x, scale, EPS)


def _heads(size: Sizes) -> Kernel:
    """Heads of q, k and v from the residual stream, q and k normed and turned."""
    B, D, h, dtype, counts = size.slots, size.hidden, size.head, size.dtype, (size.heads, size.kv_heads, size.kv_heads)

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"qkv {load}", dtype)
        stream, y = (x(B, D) * (load != "empty") for _ in range(2))
        matrices = tuple(_order_one(x, LAYERS, D, n * h) for n in counts)
        positions = x.rng.integers(0, 30_000, B).astype(np.int32)
        norms = tuple(x.positive(LAYERS, 1, h) for _ in range(2))
        return stream.astype(x.dtype), y.astype(x.dtype), x.positive(LAYERS, 1, D), matrices, positions, norms

    frequencies = (1e6 ** (-np.arange(h // 2) / (h // 2))).astype(np.float32)

    def run(x: Any, y: Any, scale: Any, matrices: Any, positions: Any, norms: Any) -> dict[str, jax.Array]:
        turn = rotation(positions, jnp.asarray(frequencies))
        if platform() == "tpu":
            options: dict[str, Any] = {"layer": jnp.asarray(LAYER), "head_norms": "head", "eps": EPS}
            q, k, v = map(Stacked, matrices)
            return {"heads": heads(x, y, scale, q, k, v, turn, norms, **options)}
        rows = _norm(x + y, scale[LAYER, 0])
        found = []
        for w, norm in zip(matrices, (*norms, None), strict=True):
            z = (rows @ w[LAYER]).reshape(B, -1, h)
            if norm is not None:
                half = rotary.Rotation.of(positions[:, None], jnp.asarray(frequencies))
                z = rotary.rope(_norm(z, norm[LAYER, 0])[:, :, None], half)[:, :, 0]
            found.append(jnp.swapaxes(z, 0, 1))
        return {"heads": jnp.concatenate(found).astype(jnp.float32)}

    def exact(found: Any, x: Any, y: Any, scale: Any, matrices: Any, positions: Any, norms: Any) -> dict[str, Exact]:
        rows = rms_norm(wide(x) + wide(y), wide(scale[LAYER]), EPS)
        # The turn's angles are products of float32 numbers.
        angle = wide(positions.astype(np.float32)[:, None] * frequencies)[:, None]
        cos, sin = np.cos(angle), np.sin(angle)
        every = []
        for w, norm in zip(matrices, (*norms, None), strict=True):
            z = (rows @ wide(w[LAYER])).reshape(B, -1, h)
            if norm is not None:
                a, b = np.split(rms_norm(z, wide(norm[LAYER]), EPS), 2, axis=-1)
                z = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
            every.append(np.swapaxes(z, 0, 1))
        return {"heads": Exact(np.concatenate(every), limit(dtype, 5))}  # stream, norm, product, norm, turn

    loads = {load: partial(draw, load) for load in ("random", "empty")}
    return Kernel("decode: heads", run, exact, loads, only_tpu=True)


def _attention(size: Sizes) -> Kernel:
    """Attention of slots over prompts and pages, which get the newest keys and values in place."""
    B, H, Kv, h, dtype = size.slots, size.heads, size.kv_heads, size.head, size.dtype
    P, S, C, W = size.prompts, size.columns, size.page, size.pages
    M, G = B * W + 3, -(-B // P)

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"paged {load}", dtype)
        ages, lengths = {
            "random": (x.rng.integers(0, C * W + 1, B), x.rng.integers(1, S + 1, P)),
            "empty": (np.arange(B) == 2, np.full(P, 1)),
            "full": (np.full(B, C * W), np.full(P, S)),
            "skewed": (np.where(np.arange(B) == 1, C * W - 1, x.rng.integers(0, 3, B) + C), np.arange(P) * (S - 3) + 1),
        }[load]
        lengths = np.minimum(lengths, S)
        q, k, v = x(B, 1, H, h), x(B, 1, Kv, h), x(B, 1, Kv, h)
        prompt = tuple(x(LAYERS, P, Kv, S, h) for _ in range(2))
        pools = tuple(x(LAYERS, M, Kv, C, h) for _ in range(2))
        table = x.rng.permutation(M)[: B * W].reshape(B, W)
        return q, (k, v), prompt, pools, *(a.astype(np.int32) for a in (table, lengths, ages[:, None]))

    def run(q: Any, new: Any, prompt: Any, pools: Any, table: Any, lengths: Any, ages: Any) -> dict[str, jax.Array]:
        responses, layer = jnp.arange(B, dtype=jnp.int32), jnp.asarray(LAYER)
        if platform() == "tpu":
            visits = Visits.of(prompt[0], lengths, pools[0], table, responses // G, ages)
            out, pools = attend_paged(q, new, prompt, pools, visits, layer=layer)
        else:
            at = jnp.maximum(ages[:, 0] - 1, 0)
            page = jnp.where(ages[:, 0] > 0, jnp.take_along_axis(table, (at // C)[:, None], axis=1)[:, 0], M)
            pools = tuple(
                x.at[LAYER, page, :, at % C].set(n[:, 0], mode="drop") for x, n in zip(pools, new, strict=True)
            )
            rows = SlotRows.of(responses, ages[:, 0] > 0, P, G)
            options: dict[str, Any] = {"layer": layer, "table": table, "ages": ages, "rows": rows}
            cache: Any = (*prompt, lengths, *pools)
            out = decode_attention(q, *cache, **options)
        return {"output": out[:, 0], "keys": pools[0], "values": pools[1]}

    def exact(found: Any, q: Any, new: Any, prompt: Any, pools: Any, table: Any, lengths: Any, ages: Any) -> Any:
        written, out = [x.copy() for x in pools], np.full((B, H, h), np.nan)
        for b in np.flatnonzero(ages[:, 0]):
            page, column = divmod(int(ages[b, 0]) - 1, C)
            for pool, one in zip(written, new, strict=True):
                pool[LAYER, table[b, page], :, column] = one[b, 0]
            keys, values = (
                np.concatenate(
                    [wide(x[LAYER, b // G, :, : lengths[b // G]])]
                    + [wide(pool[LAYER, p]) for p in table[b, : page + 1]],
                    axis=1,
                )[:, : lengths[b // G] + int(ages[b, 0])]
                for x, pool in zip(prompt, written, strict=True)
            )
            scores = wide(q[b, 0]).reshape(Kv, H // Kv, h) @ keys.swapaxes(1, 2) / np.sqrt(h)
            probs = np.exp(log_softmax(scores))
            out[b] = (probs @ values).reshape(H, h)
        # Rounded are the probabilities and the output; pages are copied.
        results = {"output": Exact(out, limit(dtype, 2))}
        return results | {name: Exact(wide(x)) for name, x in zip(("keys", "values"), written, strict=True)}

    loads = {load: partial(draw, load) for load in ("random", "empty", "full", "skewed")}
    return Kernel("decode: paged attention", run, exact, loads, donated=(3,))


def _output(size: Sizes) -> Kernel:
    """The residual stream after attention, the router's choice, and its log with other layers' entries kept."""
    B, D, E, K, dtype = size.slots, size.hidden, size.experts, size.k, size.dtype
    H, h = size.heads, size.head

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"output {load}", dtype)
        attended = x(B, H, h).astype(np.float32)
        active = (x.rng.random((B, 1)) < {"random": 0.8, "empty": 0, "full": 1}[load]).astype(np.float32)
        attended[active[:, 0] == 0] = np.nan
        log = cast(Any, RouteLog)(*(np.full((LAYERS, B, K), MARK, dtype) for dtype in (np.int32, np.float32)))
        router = x.positive(LAYERS, 1, D), _order_one(x, LAYERS, D, E)
        return attended, x(B, D), x(B, D), active, _order_one(x, LAYERS, H * h, D), router, log

    def run(attended: Any, x: Any, y: Any, active: Any, o: Any, router: Any, log: Any) -> dict[str, jax.Array]:
        scale, weights = router
        if platform() == "tpu":
            choice = Router(scale, Stacked(weights), K, renormalise=True)
            given: Any = attended, x, y, active, Stacked(o), choice, log
            made: Any = output_and_routes(*given, layer=jnp.asarray(LAYER), eps=EPS)
            stream, packed, log = made
        else:
            out = jnp.where(active > 0, attended.reshape(B, -1).astype(x.dtype) @ o[LAYER], 0)
            stream = x + y + out
            rows = _norm(stream, scale[LAYER, 0])
            every = jax.nn.log_softmax(jnp.matmul(rows, weights[LAYER], preferred_element_type=jnp.float32))
            logprobs, ids = jax.lax.top_k(every, K)
            packed = pack(rows, jnp.where(active > 0, ids, E), jax.nn.softmax(logprobs), E)
            log = RouteLog(log.experts.at[LAYER].set(ids), log.logprobs.at[LAYER].set(logprobs))
        names = ("rows", packed[:, :D]), ("shares", packed[:, D : D + K]), ("asked", packed[:, D + K : D + 2 * K])
        return {"stream": stream, **dict(names), "experts": log.experts, "log-probs": log.logprobs}

    def exact(
        found: Any, attended: Any, x: Any, y: Any, active: Any, o: Any, router: Any, log: Any
    ) -> dict[str, Exact]:
        scale, weights = (wide(a[LAYER]) for a in router)
        out = np.nan_to_num(wide(attended)).reshape(B, -1) @ wide(o[LAYER])
        stream = wide(x) + wide(y) + out
        every = log_softmax(wide(found["rows"]) @ weights)  # of the rows as they were rounded
        ids = np.argsort(-every, axis=1, kind="stable")[:, :K]
        chosen = np.take_along_axis(every, ids, axis=1)
        theirs = np.clip(found["experts"][LAYER], 0, E - 1)
        alike = np.abs(np.take_along_axis(every, theirs, axis=1) - chosen) < 1e-5  # float32 may rank them either way
        ids = np.where(alike, theirs, ids)
        experts, logprobs = np.full((LAYERS, B, K), MARK), np.full((LAYERS, B, K), float(MARK))
        experts[LAYER], logprobs[LAYER] = ids, chosen
        shares = np.exp(log_softmax(chosen))
        asked = np.where(active > 0, ids, E)
        return {
            "stream": Exact(stream, limit(dtype, 3)),  # x + y, the projection, and their sum
            "rows": Exact(rms_norm(stream, scale, EPS), limit(dtype, 4)),
            "shares": Exact(shares, limit(dtype, 3)),  # once, but of few numbers a row
            "asked": Exact(asked.astype(np.float64)),
            "experts": Exact(experts),
            "log-probs": Exact(logprobs, limit(jnp.float32, 1)),
        }

    loads = {load: partial(draw, load) for load in ("random", "empty", "full")}
    return Kernel("decode: output and routes", run, exact, loads, only_tpu=True, settled=True, donated=(2, 6))


def _experts(size: Sizes) -> Kernel:
    """The held experts' weighted sums for tokens that come packed with their choices."""
    N, D, F, E, held, K, dtype = size.gathered, size.hidden, size.width, size.experts, size.held, size.k, size.dtype

    def draw(load: str) -> tuple[Any, ...]:
        x, ids = Draw(f"decode experts {load}", dtype), experts_of(load, N, K, E, held)
        ids[0] = E  # an idle slot
        matrices = *(_order_one(x, LAYERS, held, D, F) for _ in range(2)), _order_one(x, LAYERS, held, F, D)
        return x(N, D), ids, x(N, K, dtype=jnp.float32), matrices

    def run(x: Any, ids: Any, shares: Any, matrices: Any) -> dict[str, jax.Array]:
        if platform() == "tpu":
            packed = pack(x, ids, shares, E)
            options: dict[str, Any] = {"layer": jnp.asarray(LAYER), "first": 0, "k": K, "experts": E}
            return {"sums": experts_sum(packed, *map(Stacked, matrices), **options)}
        gate, up, down = (w[LAYER] for w in matrices)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        raised = jax.nn.silu(product("nd,edf->enf", x, gate)) * product("nd,edf->enf", x, up)
        out = product("enf,efd->end", raised.astype(x.dtype), down)
        weights = jnp.where(ids[None] == jnp.arange(held)[:, None, None], shares[None], 0).sum(axis=2)
        return {"sums": (weights[..., None] * out).sum(axis=0).astype(x.dtype)}

    def exact(found: Any, x: Any, ids: Any, shares: Any, matrices: Any) -> dict[str, Exact]:
        sums = np.zeros((N, D))
        for e in range(held):
            n, k = np.nonzero(ids == e)
            gate, up, down = (wide(w[LAYER, e]) for w in matrices)
            rows = wide(x[n])
            sums[n] += wide(shares[n, k])[:, None] * ((silu(rows @ gate) * (rows @ up)) @ down)
        return {"sums": Exact(sums, limit(dtype, 3))}  # the hidden columns, an expert's output, and the sum

    loads = {load: partial(draw, load) for load in ("random", "empty", "full", "skewed")}
    return Kernel("decode: experts", run, exact, loads, only_tpu=True)


def _mlp(size: Sizes) -> Kernel:
    """The dense SwiGLU with the norm before it."""
    B, D, F, dtype = size.slots, size.hidden, 4 * size.width, size.dtype

    def draw(load: str) -> tuple[Any, ...]:
        x = Draw(f"mlp {load}", dtype)
        matrices = *(_order_one(x, LAYERS, D, F) for _ in range(2)), _order_one(x, LAYERS, F, D)
        return (x(B, D) * (load != "empty")).astype(x.dtype), x.positive(LAYERS, 1, D), matrices

    def run(x: Any, scale: Any, matrices: Any) -> dict[str, jax.Array]:
        if platform() == "tpu":
            return {"output": mlp(x, scale, *map(Stacked, matrices), layer=jnp.asarray(LAYER), eps=EPS)}
        gate, up, down = (w[LAYER] for w in matrices)
        rows = _norm(x, scale[LAYER, 0])
        return {"output": (jax.nn.silu(rows @ gate) * (rows @ up)) @ down}

    def exact(found: Any, x: Any, scale: Any, matrices: Any) -> dict[str, Exact]:
        gate, up, down = (wide(w[LAYER]) for w in matrices)
        rows = rms_norm(wide(x), wide(scale[LAYER]), EPS)
        # Norm, hidden columns and output; two cores round the output's parts, XLA both products.
        return {"output": Exact((silu(rows @ gate) * (rows @ up)) @ down, limit(dtype, 5))}

    loads = {load: partial(draw, load) for load in ("random", "empty")}
    return Kernel("decode: dense SwiGLU", run, exact, loads, only_tpu=True)


def kernels(*, small: bool) -> list[Kernel]:
    """Return the kernels of a decode step, of a large model's widths unless `small`."""
    size = SMALL if small else WIDE
    return [make(size) for make in (_heads, _attention, _output, _experts, _mlp)]
