"""Every TPU generation's compiler accepts the Pallas kernels, forward and backward, and their blocks fit in VMEM.

Compiled ahead of time for a slice that is not attached, in its own process. To print the figures of one slice:

    JAX_PLATFORMS=cpu python -m tests.kernels.test_tpu_kernels v5p:2x2x1
"""

import functools
import json
import math
import re
import sys
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.kernels import pairs_tpu, router_tpu
from gspo_jax.kernels.adapted_matmul import LowRank, adapted_matmuls
from gspo_jax.kernels.decode_attention_tpu import Visits, attend_paged, paged_attention
from gspo_jax.kernels.decode_experts_tpu import experts_sum, packed_width
from gspo_jax.kernels.decode_mlp_tpu import mlp
from gspo_jax.kernels.decode_output_tpu import RouteLog, Router, output_and_routes
from gspo_jax.kernels.decode_qkv_tpu import heads
from gspo_jax.kernels.decode_tpu import Adapter, Stacked
from gspo_jax.kernels.delta_rule import delta_rule
from gspo_jax.kernels.grouped_matmul import Scaled, grouped_matmuls
from gspo_jax.kernels.kv import ScaledKV
from gspo_jax.kernels.logprobs_tpu import softmax_sums
from gspo_jax.kernels.packed_attention import Spans, packed_attention
from gspo_jax.kernels.rotary_tpu import normed_rope
from gspo_jax.kernels.row_sums_tpu import masked_sum
from gspo_jax.kernels.swiglu_tpu import swiglu
from gspo_jax.models.transformer import REMATS
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import topology
from tests import ahead

HEADS, KV_HEADS, WIDTH = 32, 4, 128
EXPERTS, D, F = 32, 2048, 768
ROWS = {"many": 65536, "few": 64, "odd": 1000}
"""Rows of a grouped matmul: of an update, of a decode step, and a number that is no multiple of a tile."""
PACKED = {"long": 16384, "odd": 1000}
"""Tokens per packed row; the second number is no multiple of a block."""
ATTENTION = {name: (tokens, WIDTH) for name, tokens in PACKED.items()} | {"wide": (512, 2 * WIDTH)}
"""Tokens per packed row, and the width of heads."""
PAIRS = {"long": 16384, "short": 128}
"""Tokens that a prefill routes."""
LATENTS = {"GLM-4.7-Flash": (20, 576)}
"""Query heads, and the width of latents with their rotary key."""
MODELS = {
    "30B": (2048, 32, 4, 128, 128, 768, 16, 512),
    "30B, many": (2048, 32, 4, 128, 128, 768, 112, 7168),
    "235B": (4096, 64, 4, 128, 128, 1536, 16, 512),
    "1.7B": (2048, 32, 32, 64, 0, 8192, 16, 16),
}
"""Hidden size, query heads, key heads, their width, experts, F, slots, and gathered tokens, of a decode step."""


def with_gradients(f, *arguments, grads):
    out, vjp = jax.vjp(f, *arguments)
    return out, vjp(grads)


def compiled(f, *shapes, grads):
    """Return `read` of the compiled function with its gradients."""
    return read(topology.lower(lambda *x: with_gradients(f, *x[:-1], grads=x[-1]), *shapes, grads).compile())


def lowered(f, *shapes, grads):
    """Return the Pallas kernels of the function with its gradients, counted by name before it is compiled."""
    text = topology.lower(lambda *x: with_gradients(f, *x[:-1], grads=x[-1]), *shapes, grads).as_text()
    return {"kernels": Counter(re.findall(r'kernel_name = "(\w+)"', text))}


def read(program):
    """Return the Pallas kernels of a compiled program, counted by name, and its temporary bytes on one chip.

    Besides, of kernels with a limit of their own, the most bytes of VMEM that each uses, and that limit.
    """
    calls = re.findall(r"%(\w+?)(?:_\d+)*(?:\.\w+)* = (.*custom_call_target=\"tpu_custom_call\".*)", program.as_text())
    memory, vmem = program.memory_analysis(), {}
    assert memory
    for name, call in calls:
        sizes = (
            re.search(rf'"{key}":\[{{"memory_space":"1",.*?"size":"(\d+)"', call)
            for key in ("used_scoped_memory_configs", "scoped_memory_configs")
        )
        used, most = (0 if size is None else int(size[1]) for size in sizes)
        if most:
            vmem[name] = max((used, most), vmem.get(name, (0, 0)))
    return {
        "kernels": Counter(name for name, _ in calls),
        "temporaries": memory.temp_size_in_bytes,
        "vmem": vmem,
    }


def of_mesh(mesh):
    """Return a function that makes an array's shape with its dimensions sharded by logical axes."""

    def one(shape, dtype, *axes):
        sharding = NamedSharding(mesh, mesh_lib.spec(axes, mesh_lib.TRAINER))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return one


def packed(target, name, dtype, remat="none"):
    """Compile, or with `remat` lower, attention over packed rows, one row and half of the heads per chip."""
    mesh, (tokens, width) = topology.topology_mesh(target, {"fsdp": -1, "tensor": 2}), ATTENTION[name]
    one, rows = of_mesh(mesh), mesh.size // 2
    q = one((rows, tokens, HEADS, width), dtype, "batch", None, "heads")
    k = one((rows, tokens, KV_HEADS, width), dtype, "batch", None, "kv_heads")
    ends = one((rows, tokens), jnp.int32, "batch")
    run = packed_attention if remat == "none" else jax.checkpoint(packed_attention, policy=REMATS[remat])
    with jax.set_mesh(mesh):
        specs = tuple(x.sharding.spec for x in (q, k, k))
        run = jax.shard_map(run, in_specs=(*specs, ends.sharding.spec), out_specs=specs[0])
        finish = compiled if remat == "none" else lowered
        return finish(run, q, k, k, Spans(ends, ends, ends), grads=q)


def recurrent(target, name, dtype):
    """Compile the gated delta rule of one row per chip, with two value heads to each of two key heads."""
    mesh, tokens = topology.topology_mesh(target, {"fsdp": -1}), PACKED[name]
    one, spec = of_mesh(mesh), PartitionSpec(mesh_lib.BATCH_AXES)
    k, v = (one((mesh.size, tokens, heads, WIDTH), dtype, "batch") for heads in (2, 4))
    g, ends = one((mesh.size, tokens, 4), jnp.float32, "batch"), one((mesh.size, tokens), jnp.int32, "batch")
    with jax.set_mesh(mesh):
        run = jax.shard_map(lambda *x: delta_rule(*x)[0], in_specs=spec, out_specs=spec, check_vma=False)
        return compiled(run, k, k, v, g, g, Spans(ends, ends, ends), grads=v)


def experts(target, name, dtype):
    """Compile the grouped matmul with rows and experts of its own on every chip, and two matrices per expert."""
    mesh = topology.topology_mesh(target, {"fsdp": -1})
    rows, chips, one = ROWS[name], mesh.size, of_mesh(mesh)
    x, y = (one((rows * chips, width), dtype, "batch") for width in (D, F))
    w, sizes = one((EXPERTS * chips, D, F), dtype, "batch"), one((EXPERTS * chips,), jnp.int32, "batch")
    spec = PartitionSpec(mesh_lib.BATCH_AXES)
    with jax.set_mesh(mesh):
        run = jax.shard_map(lambda x, v, w, n: grouped_matmuls(x, (v, w), n), in_specs=(spec,) * 4, out_specs=spec)
        return compiled(run, x, w, w, sizes, grads=(y, y))


def experts_int8(target, name, dtype):
    """Compile the same with frozen experts in int8."""
    mesh = topology.topology_mesh(target, {"fsdp": -1})
    rows, chips, one = ROWS[name], mesh.size, of_mesh(mesh)
    x, y = (one((rows * chips, width), dtype, "batch") for width in (D, F))
    w, scale = one((EXPERTS * chips, D, F), jnp.int8, "batch"), one((EXPERTS * chips, F), jnp.float32, "batch")
    sizes, spec = one((EXPERTS * chips,), jnp.int32, "batch"), PartitionSpec(mesh_lib.BATCH_AXES)

    def run(x, w, scale, sizes):
        return grouped_matmuls(x, (Scaled(w, scale),) * 2, sizes)

    with jax.set_mesh(mesh):
        run = jax.shard_map(run, in_specs=(spec,) * 4, out_specs=spec)

        def backward(x, w, scale, sizes, *grads):
            return with_gradients(lambda x: run(x, w, scale, sizes), x, grads=grads)

        return read(topology.lower(backward, x, w, scale, sizes, y, y).compile())


def experts_adapted(target, name, dtype):
    """Compile the same with adapters of rank 16 beside experts in int8."""
    mesh = topology.topology_mesh(target, {"fsdp": -1})
    rows, chips, one = ROWS[name], mesh.size, of_mesh(mesh)
    x, y = (one((rows * chips, width), dtype, "batch") for width in (D, F))
    w, scale = one((EXPERTS * chips, D, F), jnp.int8, "batch"), one((EXPERTS * chips, F), jnp.float32, "batch")
    a, b = (one((EXPERTS * chips, *shape), dtype, "batch") for shape in ((D, 16), (16, F)))
    sizes, spec = one((EXPERTS * chips,), jnp.int32, "batch"), PartitionSpec(mesh_lib.BATCH_AXES)

    def run(x, a, b, w, scale, sizes):
        return tuple(adapted_matmuls(x, (Scaled(w, scale),) * 2, (LowRank(a, b, 2.0),) * 2, sizes))

    with jax.set_mesh(mesh):
        run = jax.shard_map(run, in_specs=(spec,) * 6, out_specs=spec)

        def backward(x, a, b, w, scale, sizes, *grads):
            return with_gradients(lambda *trained: run(*trained, w, scale, sizes), x, a, b, grads=grads)

        return read(topology.lower(backward, x, a, b, w, scale, sizes, y, y).compile())


def experts_swiglu(target, name, dtype):
    """Compile the experts' SwiGLU, with matrices of its own on every chip."""
    mesh = topology.topology_mesh(target, {"fsdp": -1})
    rows, chips, one = ROWS[name], mesh.size, of_mesh(mesh)
    x, share = one((rows * chips, D), dtype, "batch"), one((rows * chips,), dtype, "batch")
    wide, tall = (one((EXPERTS * chips, *shape), dtype, "batch") for shape in ((D, F), (F, D)))
    sizes, spec = one((EXPERTS * chips,), jnp.int32, "batch"), PartitionSpec(mesh_lib.BATCH_AXES)

    def run(x, share, gate, up, down, sizes):
        return swiglu(x, share, (gate, up, down), (None,) * 3, sizes)

    with jax.set_mesh(mesh):
        run = jax.shard_map(run, in_specs=(spec,) * 6, out_specs=spec)

        def backward(*given):
            *given, sizes, grads = given
            return with_gradients(lambda *trained: run(*trained, sizes), *given, grads=grads)

        return read(topology.lower(backward, x, share, wide, wide, tall, sizes, x).compile())


def turned(target, name, dtype):
    """Compile the norm and rotation of one row's heads per chip."""
    mesh, tokens = topology.topology_mesh(target, {"fsdp": -1}), PACKED[name]
    one, spec = of_mesh(mesh), PartitionSpec(mesh_lib.BATCH_AXES)
    x, turn = (one((tokens * mesh.size, width), kind, "batch") for width, kind in ((4096, dtype), (128, jnp.float32)))
    scale = one((WIDTH,), jnp.float32)
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            partial(normed_rope, eps=1e-6), in_specs=(spec, spec, PartitionSpec()), out_specs=spec, check_vma=False
        )

        def backward(x, scale, turn, grads):
            return with_gradients(lambda x, scale: run(x, turn, scale), x, scale, grads=grads)

        return read(topology.lower(backward, x, scale, turn, x).compile())


def sums(target, name, dtype):
    """Compile the sums of eight experts' outputs for one row's tokens per chip."""
    mesh, tokens = topology.topology_mesh(target, {"fsdp": -1}), PACKED[name]
    one, spec = of_mesh(mesh), PartitionSpec(None, mesh_lib.BATCH_AXES)
    rows, has = one((8, tokens * mesh.size, D), dtype, None, "batch"), one((tokens * mesh.size, 8), jnp.bool_, "batch")
    by_token = PartitionSpec(mesh_lib.BATCH_AXES)
    with jax.set_mesh(mesh):
        run = jax.shard_map(masked_sum, in_specs=(spec, by_token), out_specs=by_token, check_vma=False)
        return read(topology.lower(run, rows, has).compile())


def pairs(target, name, dtype):
    """Compile a router's choice, and the index arithmetic of the exchange of its pairs by 32 shards."""
    mesh, tokens, experts, k, shards = topology.topology_mesh(target, {"fsdp": -1}), PAIRS[name], 128, 8, 32

    def run(x, router, counts, me, first):
        ids, *_ = router_tpu.choose(x, router, k=k, renormalise=True)
        return pairs_tpu.places(ids, experts, block=8, none=2**17), pairs_tpu.moves(counts, me, first, room=tokens)

    shapes = (tokens, D), (D, experts), (shards, experts), (), ()
    dtypes = dtype, jnp.float32, jnp.int32, jnp.int32, jnp.int32
    with jax.set_mesh(mesh):
        run = jax.shard_map(run, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        return read(topology.lower(run, *map(jax.ShapeDtypeStruct, shapes, dtypes)).compile())


def stacked(*shape, int8, rank=16):
    """Return the shapes of a matrix of two layers, in int8 with adapters or in bfloat16."""

    def one(dtype, *shape):
        return jax.ShapeDtypeStruct((2, *shape), dtype)

    if not int8:
        return Stacked(one(jnp.bfloat16, *shape))
    *lead, n, m = shape
    low = Adapter(one(jnp.bfloat16, *lead, rank, n), one(jnp.bfloat16, *lead, rank, m), 2.0)
    return Stacked(one(jnp.int8, *shape), one(jnp.float32, *lead, 1, m), low)


def decode(target, name, dtype, cache_dtype=None, queries=1):
    """Compile the kernels of one layer of a decode step; with `cache_dtype`, all of it in int8, with adapters.

    Slots feed so many `queries` each.
    """
    mesh, int8 = topology.topology_mesh(target, {"data": -1}), cache_dtype is not None
    D, H, Kv, h, E, F, slots, N = MODELS[name]
    B, N = queries * slots, queries * N
    matrix, k, held, page, pages = functools.partial(stacked, int8=int8), 8, max(E // 32, 1), 256, 16

    def one(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def keys(*shape):
        values = one(cache_dtype or dtype, *shape)
        return ScaledKV(values, one(jnp.float32, *shape[:-1])) if int8 else values

    def run(x, y, scale, q, k_, v, o, turn, norms, routed, cache, visits, packed, experts, layer, active):
        options = {"layer": layer, "eps": 1e-6}
        found = heads(x, y, scale, q, k_, v, turn, norms, head_norms="head" if norms else "none", **options)
        prompt, pools = cache
        visits = Visits.of(prompt[0], visits[0], pools[0], *visits[1:])
        attended, pools = paged_attention(found, prompt, pools, visits, layer=layer, dtype=x.dtype)
        if not E:
            x, _, _ = output_and_routes(attended, x, y, active, o, None, None, **options)
            return mlp(x, scale, *experts, **options), pools
        router, log = routed
        x, rows, log = output_and_routes(attended, x, y, active, o, router, log, **options)
        return x, rows, log, pools, experts_sum(packed, *experts, layer=layer, first=0, k=k, experts=E)

    rows, norm, own = one(jnp.bfloat16, B, D), one(jnp.float32, 2, 1, D), keys(2, slots * pages, Kv, page, h)
    visits = one(jnp.int32, 4), one(jnp.int32, slots, pages), one(jnp.int32, slots), one(jnp.int32, slots, queries)
    prompt, of_experts = keys(2, 4, Kv, 512, h), () if not E else (held,)
    routed = packed = None
    if E:
        routed = (
            Router(norm, Stacked(one(jnp.float32, 2, D, E)), k, True),
            RouteLog(one(jnp.int32, 2, B, k), one(jnp.float32, 2, B, k)),
        )
        packed = one(jnp.bfloat16, N, packed_width(D, k, E))
    experts = *[matrix(*of_experts, D, F)] * 2, matrix(*of_experts, F, D)
    arguments = (
        *(rows, rows, norm, matrix(D, H * h), matrix(D, Kv * h), matrix(D, Kv * h), matrix(H * h, D)),
        *((one(jnp.float32, B, h),) * 2, (one(jnp.float32, 2, 1, h),) * 2 if h == 128 else (), routed),
        *(((prompt, prompt), (own, own)), visits),
        *(packed, experts, one(jnp.int32), one(jnp.float32, B, 1)),
    )
    with jax.set_mesh(mesh):
        axes = set(mesh.axis_names)
        whole = PartitionSpec()
        run = jax.shard_map(run, in_specs=whole, out_specs=whole, axis_names=axes, check_vma=False)
        return read(topology.lower(run, *arguments).compile())


def vocabulary(target, name, dtype):
    """Compile the sums of a row's softmaxes over 151,936 tokens, with the logits of 20 ids each."""
    mesh, tokens = topology.topology_mesh(target, {"fsdp": -1}), PACKED[name]
    one, spec = of_mesh(mesh), PartitionSpec(mesh_lib.BATCH_AXES)
    hidden, head = one((tokens * mesh.size, D), dtype, "batch"), one((D, 151936), dtype)
    targets, ids = (one((tokens * mesh.size, *more), jnp.int32, "batch") for more in ((), (20,)))
    with jax.set_mesh(mesh):
        run = partial(softmax_sums, temperature=0.9)
        run = jax.shard_map(run, in_specs=(spec, PartitionSpec(), spec, spec), out_specs=spec, check_vma=False)
        return read(topology.lower(run, hidden, head, targets, ids).compile())


def decode_int8(target, name, dtype):
    """Compile `decode` with base, keys and values in int8, and adapters."""
    return decode(target, name, dtype, "int8")


def decode_drafts(target, name, dtype):
    """Compile `decode` of slots that feed four tokens each."""
    return decode(target, name, dtype, queries=4)


def decode_int8_drafts(target, name, dtype):
    """Compile `decode_int8` of slots that feed four tokens each."""
    return decode(target, name, dtype, "int8", queries=4)


def latents(target, name, dtype):
    """Compile a decode step's attention over latents, which are keys and values of all heads."""
    mesh, (heads, width) = topology.topology_mesh(target, {"data": -1}), LATENTS[name]
    slots, page, pages = 16, 256, 16

    def one(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def run(q, new, prompt, pool, visits, layer):
        visits = Visits.of(prompt, visits[0], pool, *visits[1:], arrays=1)
        return attend_paged(q, (new,), (prompt,), (pool,), visits, layer=layer)

    visits = one(jnp.int32, 4), one(jnp.int32, slots, pages), one(jnp.int32, slots), one(jnp.int32, slots, 1)
    rows = one(dtype, slots, 1, heads, width), one(dtype, slots, 1, 1, width)
    cache = one(dtype, 2, 4, 1, 512, width), one(dtype, 2, slots * pages, 1, page, width)
    with jax.set_mesh(mesh):
        axes, whole = set(mesh.axis_names), PartitionSpec()
        run = jax.shard_map(run, in_specs=whole, out_specs=whole, axis_names=axes, check_vma=False)
        return read(topology.lower(run, *rows, *cache, visits, one(jnp.int32)).compile())


KERNELS = {
    latents: LATENTS,
    packed: ATTENTION,
    recurrent: ("long",),
    experts: ROWS,
    experts_int8: ("many", "few"),
    experts_adapted: ("many", "few"),
    experts_swiglu: ROWS,
    turned: PACKED,
    sums: PACKED,
    pairs: PAIRS,
    vocabulary: PACKED,
    decode: MODELS,
    decode_int8: ("30B",),
    decode_drafts: ("30B",),
    decode_int8_drafts: ("30B",),
}
LARGEST = {(of, "many" if of.__name__.startswith("experts") else "long") for of in KERNELS}
LARGEST |= {(decode, name) for name in MODELS} | {(packed, "wide")} | {(latents, name) for name in LATENTS}
LARGEST |= {(of, "30B") for of in (decode_int8, decode_drafts, decode_int8_drafts)}
OF_THE_RECIPE = {(packed, "long"), (experts_swiglu, "many"), (turned, "long")}
"""What an update of the recipe compiles for v5p, in bfloat16, in test_plan.py."""
REMATERIALISED = ("dots", "full")


def cases(target):
    """Return (function, name, dtype) of what is compiled.

    For v5p all but what test_plan.py's update has for it, and the largest in float32 too; elsewhere the largest, with
    adapters beside experts in int8 for all of the grouped matmul's kernels, and drafts in int8 alone. v5e and v6e have
    the same cores and VMEM, and so the same blocks: of what both would compile, v5e gets a kernel of each kind, and v6e
    the decode step's and the widest. tpu7x has v5p's VMEM but one core. Attention has the same blocks everywhere: v5e
    gets the longest rows, and all the widest heads.
    """
    named = [(of, name) for of, names in KERNELS.items() for name in names]
    largest = [case for case in named if case in LARGEST]
    if target.startswith("v5p"):
        whole = [case for case in largest if case[0] in (experts_swiglu, turned, sums, pairs, vocabulary)]
        named = [case for case in named if case not in OF_THE_RECIPE]
        return [*((*case, "bfloat16") for case in named), *((*case, "float32") for case in [(packed, "wide"), *whole])]
    left_out = {experts, experts_int8, decode_drafts}
    if target.startswith("v5e"):
        left_out |= {decode, experts_adapted, decode_int8_drafts}
    else:
        left_out.add((packed, "long"))
    if target.startswith("v6e"):
        left_out |= {recurrent, turned, sums, pairs, vocabulary}
    return [(*case, "bfloat16") for case in largest if not left_out & {case, case[0]}]


def figures(target):
    """Compile the kernels for one slice and return what was read of each; for v5p also what is recomputed of one."""
    remats = REMATERIALISED if target.startswith("v5p") else ()
    kept = {f"packed, {remat}": packed(target, "odd", "bfloat16", remat) for remat in remats}
    return kept | {f"{of.__name__}, {name}, {dtype}": of(target, name, dtype) for of, name, dtype in cases(target)}


@pytest.mark.slow
@ahead.needs_libtpu
@pytest.mark.parametrize("target", ["v4:2x2x1", "v5p:2x2x1", "v5e:4x4", "v6e:4x4", "tpu7x:2x2x1"])
def test_the_tpu_compiler_takes_every_kernel(target):
    """No [T, T] array of scores exists outside the kernels.

    Temporaries stay below 16 times the queries (on one chip: tokens · 16 heads · 128): log-sums on 128 lanes, and
    gradients.
    """
    found = ahead.figures("tests.kernels.test_tpu_kernels", target)
    for of, name, dtype in cases(target):
        result = found[f"{of.__name__}, {name}, {dtype}"]
        if of is packed:
            assert result["kernels"] == {"packed_visits": 1, "packed_attention": 1, "packed_attention_backward": 1}
            queries = math.prod(ATTENTION[name]) * HEADS // 2 * jnp.dtype(dtype).itemsize
            assert result["temporaries"] < 16 * queries
        elif of is recurrent:
            assert result["kernels"] == {"delta_rule": 1, "delta_rule_backward": 1}
        elif of is experts:
            kernels = {"visits": 1, "matmul": 1, "matmul_transposed": 1, "outer": 2}
            assert result["kernels"] == {f"grouped_{k}": n for k, n in kernels.items()}
        elif of is experts_int8:
            assert result["kernels"] == {f"grouped_{k}": 1 for k in ("visits", "matmul", "matmul_transposed")}
        elif of is experts_swiglu:
            kernels = {
                "visits": 1,
                "matmul_gated": 1,
                "matmul": 1,
                "matmul_transposed_gated": 1,
                "matmul_transposed": 1,
            }
            assert result["kernels"] == {f"grouped_{k}": n for k, n in kernels.items()} | {"grouped_outer": 3}
        elif of in (turned, sums, pairs, vocabulary):
            names = {turned: ("normed_rope", "normed_rope_backward"), sums: ("masked_sum",)}
            names |= {pairs: ("router", "pair_places", "pair_moves"), vocabulary: ("softmax_sums",)}
            assert result["kernels"] == dict.fromkeys(names[of], 1)
        elif of is latents:
            assert result["kernels"] == {"paged_attention": 1}
        elif of is experts_adapted:
            kernels = {f"grouped_{k}": 1 for k in ("matmul", "matmul_transposed", "outer_thin")}
            visits = result["kernels"].pop("grouped_visits")
            assert result["kernels"] == kernels and visits <= 2, "tiles are shorter where more is in VMEM at once"
        else:
            end = {"mlp": 1} if name == "1.7B" else {"experts": 1}
            kernels = {f"decode_{k}": n for k, n in ({"qkv": 1, "output": 1} | end).items()}
            assert result["kernels"] == kernels | {"paged_attention": 1}
            assert result["vmem"].keys() == result["kernels"].keys(), "docs/decoding.md states it"
            assert all(0 < used <= 7 / 8 * most for used, most in result["vmem"].values()), "as blocks are chosen"
    if target.startswith("v5p"):
        counts = [found[f"packed, {remat}"]["kernels"]["packed_attention"] for remat in REMATERIALISED]
        assert counts == [1, 2], "dots saves what the backward kernels need of the output"


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1])))
