"""Costs read from compiled HLO: loops times their trip counts, slices at their own size, collectives as ring transfers.

Small programs compiled here, with costs worked out by hand, and HLO text as the TPU compiler writes it.
"""

import dataclasses
import math
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.kernels.scopes import RARELY, at_most
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import costs as costs_lib
from gspo_jax.planning import hlo, jaxpr
from gspo_jax.planning.topology import Torus


@pytest.fixture(autouse=True)
def scopes_in_keys():
    """Tell kept programs apart by their scopes, which costs depend on and JAX's keys leave out."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


def compiled(f, *arguments):
    return costs_lib.CostedProgram(jax.jit(f).lower(*arguments).compile().as_text())


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def test_a_product_takes_two_flops_for_each_pair():
    costs = compiled(lambda a, b: a @ b, ones(8, 16), ones(16, 32)).costs()
    assert costs.flops == 2 * 8 * 16 * 32
    assert costs.bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def nested(x, w):
    def outer(x, w):
        inner = jax.lax.fori_loop(2, 9, lambda i, y: y @ w, x)
        return inner, None

    return jax.lax.scan(outer, x, w)[0]


def test_loops_count_as_often_as_they_turn():
    arguments = ones(4, 16), ones(5, 16, 16)
    expected = 5 * 7 * 2 * 4 * 16 * 16
    costs = compiled(nested, *arguments).costs()
    assert (costs.flops, costs.unknown) == (expected, ())
    assert jaxpr.product_flops(jax.make_jaxpr(nested)(*arguments)) == expected


def test_a_counter_turns_from_where_it_starts():
    def f(x, w):
        return jax.lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 3, s[1] @ w), (2, x))[1]

    costs = compiled(f, ones(4, 16), ones(16, 16)).costs()
    assert (costs.flops, costs.unknown) == (3 * 2 * 4 * 16 * 16, ())  # at 2, 5 and 8


def until(x, w, n):
    return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ w), (0, x))[1]


def test_a_loop_that_depends_on_data_counts_once_or_as_its_scope_says():
    arguments, once = (ones(4, 16), ones(16, 16), jnp.int32(3)), 2 * 4 * 16 * 16
    module = compiled(until, *arguments)
    costs, (turn,) = module.costs(), module.loops()
    assert costs.flops == once and len(costs.unknown) == 1
    assert turn.flops == once

    def told(*arguments):
        with jax.named_scope(at_most(6)):
            return until(*arguments)

    module = compiled(told, *arguments)
    assert (module.costs().flops, module.costs().unknown, module.loops()) == (6 * once, (), [])
    assert jaxpr.product_flops(jax.make_jaxpr(told)(*arguments)) == 6 * once


def test_collectives_of_a_mesh():
    mesh = mesh_lib.make_mesh({"fsdp": 4, "expert": 2})
    x = jax.device_put(ones(8, 64), NamedSharding(mesh, PartitionSpec(("fsdp", "expert"))))

    def body(x):
        whole = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
        return jax.lax.psum(whole, "expert")

    with jax.set_mesh(mesh):
        spec = PartitionSpec(("fsdp", "expert"))
        f = jax.shard_map(body, in_specs=spec, out_specs=PartitionSpec("fsdp"), check_vma=True)
        module = costs_lib.CostedProgram(jax.jit(f).lower(x).compile().as_text())
    sent = module.costs().by_group()
    assert sent["all-gather", 4][:2] == (1, 3 * 64 * 4)
    assert sent["all-reduce", 2][:2] == (1, 2 * 0.5 * 4 * 64 * 4)
    assert sent["all-gather", 4][2].endswith("all_gather")


def test_a_traced_product_inside_shard_map_stands_for_one_on_each_shard():
    mesh = mesh_lib.make_mesh({"fsdp": 4, "expert": 2})
    spec = PartitionSpec(("fsdp", "expert"))
    f = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec)
    assert jaxpr.product_flops(jax.make_jaxpr(f)(ones(16, 64))) == 8 * 2 * 2 * 64 * 2
    assert jaxpr.product_flops(jax.make_jaxpr(lambda x: x @ x.T)(ones(16, 64))) == 2 * 16 * 64 * 16


def test_a_branch_for_rare_cases_is_not_counted():
    def f(x, w, n):
        def rarely():
            with jax.named_scope(RARELY):
                return (x @ w) @ w

        return jax.lax.cond(n > 0, rarely, lambda: x @ w)

    arguments, once = (ones(4, 16), ones(16, 16), jnp.int32(3)), 2 * 4 * 16 * 16
    assert compiled(f, *arguments).costs().flops == once
    assert jaxpr.product_flops(jax.make_jaxpr(f)(*arguments)) == once


def test_nor_is_a_loop_for_rare_cases():
    def f(x, w, n):
        with jax.named_scope(RARELY):
            y = jax.lax.fori_loop(0, n, lambda _, y: y @ w, x)
        return y @ w

    arguments, once = (ones(4, 16), ones(16, 16), jnp.int32(3)), 2 * 4 * 16 * 16
    program = compiled(f, *arguments)
    assert program.costs().flops == once
    assert program.loops() == []
    assert jaxpr.product_flops(jax.make_jaxpr(f)(*arguments)) == once


def test_the_likely_branch_is_the_costliest_that_is_not_rare():
    def f(x, w, n):
        return jax.lax.cond(n > 0, lambda: (x @ w) @ w, lambda: x @ w)

    arguments, once = (ones(4, 16), ones(16, 16), jnp.int32(3)), 2 * 4 * 16 * 16
    assert compiled(f, *arguments).costs().flops == 2 * once
    assert jaxpr.product_flops(jax.make_jaxpr(f)(*arguments)) == 2 * once


def module(body, head="HloModule m", inner=""):
    return costs_lib.CostedProgram(
        f"{head}\n\n{textwrap.dedent(inner)}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"
    )


def test_a_slice_moves_what_it_slices_and_on_chip_memory_is_free():
    text = """
  %p = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %v = f32[50,8]{1,0:T(8,128)S(1)} parameter(2)
  %s = f32[1,8]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,8}
  %n = f32[50,8]{1,0:T(8,128)S(1)} negate(%v)
  ROOT %u = f32[100,8]{1,0} dynamic-update-slice(%p, %s, %i, %i)"""
    assert module(text).costs().bytes == 4 * 8 * 2 * 2


def test_a_scatter_moves_its_updates():
    text = """
  %p = f32[100,8]{1,0} parameter(0)
  %i = s32[3,1]{1,0} parameter(1)
  %u = f32[3,8]{1,0} parameter(2)
  ROOT %s = f32[100,8]{1,0} scatter(%p, %i, %u), update_window_dims={1}, index_vector_dim=1, to_apply=%add"""
    assert module(text).costs().bytes == 2 * 4 * 3 * 8


def test_a_part_that_is_copied_between_memories_counts_in_both():
    whole, part = "f32[9,8]{1,0:T(8,128)S(5)}", "f32[1,8]{1,0:T(8,128)}"
    costs = module(f"""
  %p = {whole} parameter(0)
  %i = s32[] parameter(1)
  %u = {part} parameter(2)
  %a = (({whole}, {part}, s32[]{{:T(128)}}), {whole}, u32[]{{:S(2)}}) dynamic-update-slice-start(%p, %u, %i)
  %b = {whole} dynamic-update-slice-done(%a)
  %c = (({whole}, s32[]), {part}, u32[]{{:S(2)}}) dynamic-slice-start(%b, %i), dynamic_slice_sizes={{1,8}}
  %d = (({part}), f32[1,4]{{1,0:S(1)}}, u32[]{{:S(2)}}) slice-start(%u), slice={{[0:1], [0:4]}}
  ROOT %r = {part} dynamic-slice-done(%c)""").costs()
    assert [c.host_bytes for c in costs.operations] == [4 * 8, 4 * 8, 0]
    assert [c.bytes for c in costs.operations] == [4 * 8, 4 * 8, 4 * 4]


def test_a_product_written_as_a_convolution():
    """32 rows of 8 features by 4 heads of 16: with one input place, each of the 4 outputs uses one window place."""
    text = """
  %a = bf16[32,8,1]{1,0,2} parameter(0)
  %b = bf16[4,16,8]{2,1,0} parameter(1)
  ROOT %c = bf16[32,4,16]{2,1,0} convolution(%a, %b), window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->b0f"""
    assert module(text).costs().flops == 2 * 32 * 8 * 4 * 16


def test_kernels_by_their_own_estimate():
    call = 'custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{CONFIG}}'
    estimate = '"cost_estimate":{"flops":"1000","transcendentals":"0","bytes_accessed":"64"}'
    text = f"  %p = bf16[128]{{0}} parameter(0)\n  %gmm.3 = bf16[128]{{0}} {call.replace('CONFIG', estimate)}"
    text += f"\n  ROOT %splash.1 = bf16[128]{{0}} {call.replace('CONFIG', '')}"
    body = costs_lib.CostedProgram(f"ENTRY %main (p: f32[]) -> f32[] {{\n{text}\n}}\n", filled={"gmm": 0.25})
    costs = body.costs()
    assert (costs.flops, costs.bytes) == (250, 64 + 2 * 2 * 128)
    assert costs.kernels == {"splash": 1}


def test_a_kernel_fused_with_the_slice_that_it_reads_or_writes():
    """Its estimate counts, not the stack's bytes."""
    estimate = '"cost_estimate":{"flops":"1000","transcendentals":"0","bytes_accessed":"64"}'
    call = (
        f'custom-call(%s), custom_call_target="tpu_custom_call", backend_config={{"custom_call_config":{{{estimate}}}}}'
    )
    text = "%fused (q: bf16[48,128]) -> bf16[128] {\n  %q = bf16[48,128]{1,0} parameter(0)\n"
    text += "  %s = bf16[1,128]{1,0} slice(%q), slice={[0:1], [0:128]}\n"
    text += f"  ROOT %gmm.3 = bf16[128]{{0}} {call}\n}}\n"
    text += "ENTRY %main (p: bf16[48,128]) -> bf16[128] {\n  %p = bf16[48,128]{1,0} parameter(0)\n"
    text += "  ROOT %gmm.4 = bf16[128]{0} fusion(%p), kind=kCustom, calls=%fused\n}\n"
    costs = costs_lib.CostedProgram(text, filled={"gmm": 0.25}).costs()
    assert (costs.flops, costs.bytes) == (250, 64)


def test_the_largest_bound_counts_for_every_operation():
    costs = compiled(lambda a, b: a @ b, ones(8, 16), ones(16, 32)).costs()
    assert costs.seconds(costs_lib.Rates(costs.flops, 1e30, 1)) == pytest.approx(1)
    assert costs.seconds(costs_lib.Rates(1e30, costs.bytes / 2, 1)) == pytest.approx(2)


def test_a_layer_of_a_stack_that_a_fusion_within_a_fusion_slices():
    """A router's product reads one layer's [8, 4] of the stack [6, 8, 4] and rows [2, 8] in VMEM, and writes [2, 4]."""
    inner = """
%sliced (p: f32[6,8,4], i: s32[]) -> f32[8,4] {
  %p = f32[6,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,8,4]{2,1,0} dynamic-slice(%p, %i, %z, %z), dynamic_slice_sizes={1,8,4}
  ROOT %b = f32[8,4]{1,0} bitcast(%s)
}
%routed (p: f32[6,8,4], i: s32[], x: f32[2,8]) -> f32[2,4] {
  %p = f32[6,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[2,8]{1,0:S(1)} parameter(2)
  %w = f32[8,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%sliced
  ROOT %c = f32[2,4]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}"""
    text = """
  %p = f32[6,8,4]{2,1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %x = f32[2,8]{1,0:S(1)} parameter(2)
  ROOT %r = f32[2,4]{1,0} fusion(%p, %i, %x), kind=kOutput, calls=%routed"""
    assert module(text, inner=inner).costs().bytes == 4 * (8 * 4 + 2 * 4)


def test_what_small_operations_take():
    """An operation takes a latency, in main memory or on the chip; a scalar's none, nor does starting a copy.

    Of 128 numbers, 512 bytes: negated in main memory 1024 bytes, 1.024 ms at 1 MB/s; copied, read once.
    """
    text = """
  %p = f32[128]{0} parameter(0)
  %v = f32[128]{0:S(1)} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  %n = f32[128]{0} negate(%p)
  %m = f32[128]{0:S(1)} negate(%v)
  %j = s32[]{:S(6)} add(%i, %i)
  %s = (f32[128]{0:S(1)}, f32[128]{0}, u32[]{:S(2)}) copy-start(%p)
  %d = f32[128]{0:S(1)} copy-done(%s)
  ROOT %a = f32[128]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add"""
    costs = module(text).costs()
    assert [c.waits for c in costs.operations] == ["operation", "operation", "", "collective"]
    slow, fast = costs_lib.Rates(1, 1e6, 1, 1e-6, 1e-6), costs_lib.Rates(1, 1e12, 1, 2.0, 7.0)
    assert costs.executed(slow) == pytest.approx(1.024e-3 + 1e-6 + 0.512e-3 + 1.024e-3)
    assert costs.seconds(slow) == pytest.approx(1.024e-3 + 0.512e-3 + 1.024e-3)
    assert costs.executed(fast) == pytest.approx(2 + 2 + 7)


def test_the_work_that_a_kernel_says_it_executes():
    """A kernel declares 100 flops of full buffers, half of them in use, and executes 70; its time is that of the 70.

    It declares 64 bytes of them and moves 10.
    """
    call = 'custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{CONFIG}}'
    estimate = '"cost_estimate":{"flops":"100","transcendentals":"0","bytes_accessed":"64"}'
    text = (
        f"  %p = bf16[128]{{0}} parameter(0)\n  ROOT %gmm_8.3 = bf16[2,128]{{1,0}} {call.replace('CONFIG', estimate)}"
    )

    def work(call):
        assert call.name == "gmm_8.3" and call.declared == (100, 64, 1)
        assert [a.dims for a in (*call.operands, *call.results)] == [(128,), (2, 128)]
        return costs_lib.OpWork(70, 10)

    body = f"ENTRY %main (p: f32[]) -> f32[] {{\n{text}\n}}\n"
    costs = costs_lib.CostedProgram(body, filled={"gmm": 0.5}, kernels={"gmm": work}).costs()
    rates = costs_lib.Rates(10, 1e9, 1)
    assert (costs.flops, costs.bytes) == (50, 10)
    assert (costs.seconds(rates), costs.executed(rates)) == (5, 7)


def kernel_call(grid, semantics, *, name="swept"):
    """Return a kernel of this grid over [8, 128] blocks as a line of a compiled program, and its operands.

    The kernel's code is what Pallas lowers for a TPU, here on the CPU. A size of None is the first operand's value.
    """

    def call(n, x):
        sizes = tuple(n[0] if size is None else size for size in grid)
        block = pl.BlockSpec((8, 128), lambda *_: (0, 0))
        return pl.pallas_call(
            lambda _, x, out: out.__setitem__(..., 2 * x[...]),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=sizes, in_specs=[block], out_specs=block
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            name=name,
        )(n, x)

    shapes = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((8, 128), jnp.float32)
    text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    body = re.search(r"body\\22: *\\22([^\\]*)\\22", text)[1]
    config = f'backend_config={{"custom_call_config":{{"body":"{body}"}}}}'
    return f'custom-call(%p), custom_call_target="tpu_custom_call", {config}'


def of_kernel(grid, semantics, *, cores=1, **options):
    text = "  %p = f32[8,128]{1,0} parameter(0)\n  ROOT %swept.1 = f32[8,128]{1,0} " + kernel_call(grid, semantics)
    body = f"ENTRY %main (p: f32[]) -> f32[] {{\n{text}\n}}\n"
    return costs_lib.CostedProgram(body, machine=costs_lib.Machine(cores=cores), **options).costs()


def test_the_grid_of_a_kernel():
    """A grid of 5 x 4 x (known when it runs); two cores share the first dimension, 3 of 5 go to the busiest."""
    grid, semantics = (5, 4, None), ("parallel", "arbitrary", "arbitrary")
    rates = costs_lib.Rates(1e30, 1e30, 1, launch=7.0, grid_step=2.0)
    assert of_kernel(grid, semantics).executed(rates) == 7 + 2 * 5 * 4
    assert of_kernel(grid, semantics).unsized == ("swept",)
    for cores, steps in ((1, 5 * 4 * 6), (2, 3 * 4 * 6)):
        costs = of_kernel(grid, semantics, cores=cores, kernels={"swept": lambda _: costs_lib.OpWork(0, 0, 6)})
        assert costs.executed(rates) == pytest.approx(7 + 2 * steps)
        assert costs.unsized == ()


def test_the_steps_of_a_kernel_are_hidden_by_its_reads_but_not_by_its_products():
    """Of 12 steps of 2 s and 8 s of products; on one core of two, products at the chip's peak take twice as long."""
    work = {"swept": lambda _: costs_lib.OpWork(80.0, 3000.0, 1)}
    for bandwidth, seconds in ((1e30, 24 + 8), (100.0, 24 + 8), (50.0, 60)):
        rates = costs_lib.Rates(10.0, bandwidth, 1, launch=1.0, grid_step=2.0)
        assert of_kernel((4, 3), ("parallel", "arbitrary"), kernels=work).executed(rates) == pytest.approx(1 + seconds)
    rates = costs_lib.Rates(10.0, 1e30, 1, grid_step=2.0)
    shared = of_kernel((4, 3), ("parallel", "arbitrary"), kernels=work, cores=2)
    assert shared.executed(rates) == 12 + 8
    alone = of_kernel((4, 3), ("arbitrary", "arbitrary"), kernels=work, cores=2)
    assert alone.executed(rates) == 24 + 16


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2),)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3),)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4),)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", ((0, 4),)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp':(1)4}", ((0, 2, 4, 6),)),
        ("replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp':(4)2}", ((0, 1),)),
        ("replica_groups=mesh['data'=2,'fsdp'=64] {'fsdp':(16)4}", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", ((0, 1), (1, 2), (2, 0))),
        ("to_apply=%add", ()),
    ],
)
def test_groups_as_they_are_written(written, groups):
    operation = hlo.Operation("a", "all-reduce", "f32[8]", "%p", f", {written}, to_apply=%add", root=False)
    assert operation.groups == groups
    assert operation.group_size == (len(groups[0]) if groups else 0)


def torus(*sides, wraps):
    """Return chips numbered along the last side first."""
    return Torus(np.stack(np.unravel_index(range(math.prod(sides)), sides), axis=1), sides, wraps)


def test_links_between_the_chips_of_a_group():
    line, ring = (torus(4, 4, 4, wraps=(wraps,) * 3) for wraps in (False, True))
    assert line.hops([range(4)]) == 3 and ring.hops([range(4)]) == 2
    assert line.hops([range(64)]) == 9 and ring.hops([range(64)]) == 6
    assert ring.hops([range(32)]) == 2 + 2 + 1  # of 2 x 4 x 4
    assert ring.hops([(0, 1), (1, 2), (3, 0)]) == 1 and line.hops([(0, 1), (1, 2), (3, 0)]) == 3
    assert ring.hops([]) == 0
    chiplets = torus(4, 4, 4, 2, wraps=(True,) * 3 + (False,))
    assert chiplets.hops([(0, 1)]) == 1 and chiplets.hops([range(128)]) == 6 + 1


def test_a_collective_takes_longer_over_a_longer_way():
    """On a ring of 8 an all-gather goes 4 links; an all-reduce twice as far. Each after the first takes 3 s."""
    text = """
  %p = f32[8]{0} parameter(0)
  %g = f32[64]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
  %h = f32[16]{0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add"""
    machine = costs_lib.Machine(torus=torus(1, 1, 8, wraps=(False, False, True)))
    program = costs_lib.CostedProgram(f"ENTRY %main (p: f32[]) -> f32[] {{{text}\n}}\n", machine=machine)
    rates = costs_lib.Rates(1, 1e30, 1e30, collective=10.0, hop=3.0)
    assert [c.seconds(rates) for c in program.costs().operations] == [10 + 3 * 3, 10, 10 + 7 * 3]
    assert module(text).costs().executed(rates) == 30  # of an unknown slice


BETWEEN = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-reduce_0",KIND}'
TWO_SLICES = f"""HloModule m, is_scheduled=true

ENTRY %main (p: f32[8], x: f32[16]) -> f32[16] {{
  %p = f32[8]{{0}} parameter(0)
  %x = f32[16]{{0}} parameter(1)
  %t = token[] after-all()
  %s = (f32[8]{{0}}, u32[]{{:S(2)}}, token[]) send(%p, %t), channel_id=2, {BETWEEN}
  %v = (f32[8]{{0}}, u32[]{{:S(2)}}, token[]) recv(%t), channel_id=1, {BETWEEN}
MIDDLE
  %e = token[] send-done(%s), channel_id=2, is_host_transfer=true
  %d = (f32[8]{{0}}, token[]) recv-done(%v), channel_id=1, is_host_transfer=true
  %o = f32[8]{{0}} get-tuple-element(%d), index=0
  ROOT %r = f32[16]{{0}} negate(%x)
}}
""".replace("KIND", '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"')


@pytest.mark.parametrize("negations", [0, 1, 3])
def test_the_network_between_slices(negations):
    """Of 4 slices: a chip sends 2 · 3/4 of 32 bytes, 48, in 3 s; it is read and written once, 0.5 s each, before.

    A negation hides 2 s of it.
    """
    middle = "\n".join(f"  %n{i} = f32[16]{{0}} negate(%x)" for i in range(negations))
    text = TWO_SLICES.replace("MIDDLE", middle)
    program = costs_lib.CostedProgram(text, machine=costs_lib.Machine(slices=4))
    costs = program.costs()
    assert (costs.sent, costs.dcn) == (0, 48)
    assert costs.by_group() == {("all-reduce between slices", 4): (1, 48, "")}
    rates = costs_lib.Rates(1e30, 64.0, 1e-30, operation=0.1, collective=1e9, dcn=16.0)
    assert costs.executed(rates) == pytest.approx(1 + 2 * negations + 2)
    assert program.elapsed(rates) == pytest.approx(0.5 + max(3, 0.5 + 2 * negations) + 2)


@pytest.mark.parametrize(
    ("kind", "sent"), [("ALL_REDUCE", 48), ("ALL_GATHER", 96), ("REDUCE_SCATTER", 24), ("ONE_TO_ONE", 32)]
)
def test_what_a_chip_sends_to_three_other_slices(kind, sent):
    text = TWO_SLICES.replace("MIDDLE", "").replace("ALL_REDUCE", kind)
    costs = costs_lib.CostedProgram(text, machine=costs_lib.Machine(slices=4)).costs()
    assert costs.dcn == sent


def test_transfers_between_slices_queue():
    """Two of 3 s each, both begun within 0.2 s: the second arrives after 6 s."""
    body = TWO_SLICES.replace("MIDDLE", "")
    twice = [line.replace("%s ", "%s2 ").replace("%v ", "%v2 ").replace('0"', '1"') for line in body.splitlines()]
    starts = [line for line in twice if "%s2 " in line or "%v2 " in line]
    ends = ["  %d2 = (f32[8]{0}, token[]) recv-done(%v2), channel_id=3, is_host_transfer=true"]
    lines = body.splitlines()
    lines[7:7], lines[-4:-4] = starts, ends
    program = costs_lib.CostedProgram("\n".join(lines), machine=costs_lib.Machine(slices=4))
    rates = costs_lib.Rates(1e30, 1e30, 1e30, dcn=16.0)
    assert program.costs().dcn == 96
    assert program.elapsed(rates) == pytest.approx(6)


@pytest.mark.parametrize(("cycles", "seconds"), [(None, 1.024), (3000, 1.024), (3100, 3.1)])
def test_work_on_vectors_that_bytes_do_not_explain(cycles, seconds):
    """Negating 128 numbers moves 1024 bytes; an estimate beyond three times their time is taken for it."""
    config = f', backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}' if cycles else ""
    text = f"  %p = f32[128]{{0}} parameter(0)\n  ROOT %n = f32[128]{{0}} negate(%p){config}"
    (cost,) = module(text).costs().operations
    rates = costs_lib.Rates(1, 1e3, 1, operation=0.5, cycle=1e-3)
    assert cost.seconds(rates) == pytest.approx(seconds)
    assert cost.bound(rates) == ("vector" if seconds > 3 else "memory")


@pytest.mark.parametrize(
    ("cycles", "bounds", "taken"), [(9000, "1", True), (9000, '"3","1"', False), (9001, "3", True)]
)
def test_the_compilers_latency_of_a_window_is_no_work(cycles, bounds, taken):
    """An operation that is estimated at up to 3000 cycles for each of several windows waits for reads."""
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}","iteration_bounds":[{bounds}]}}}}'
    text = f"  %p = f32[128]{{0}} parameter(0)\n  ROOT %n = f32[128]{{0}} negate(%p), {config}"
    (cost,) = module(text).costs().operations
    assert cost.seconds(costs_lib.Rates(1, 1e9, 1, operation=0.5, cycle=1.0)) == (cycles if taken else 0.5)


def test_an_estimate_near_the_latency_is_latency():
    text = """
  %p = f32[2]{0:S(1)} parameter(0)
  ROOT %n = f32[2]{0:S(1)} negate(%p), backend_config={"window_config":{"estimated_cycles":"CYCLES"}}"""
    rates = costs_lib.Rates(1, 1, 1, operation=1.0, cycle=1.0)
    for cycles, seconds, bound in ((0, 1, "latency"), (1, 1, "latency"), (2, 2, "vector")):
        (cost,) = module(text.replace("CYCLES", str(cycles))).costs().operations
        assert (cost.seconds(rates), cost.bound(rates)) == (seconds, bound)


def test_further_passes_through_buffers():
    """A rare loop turns as often as its kernels' buffers are used again, and no product in it is needed anew."""
    inner = """
%cond (s: (s32[], f32[8,128])) -> pred[] {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %c = pred[] custom-call(%s)
}
%body (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%s), index=1
  %gmm.1 = f32[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={ESTIMATE}
  ROOT %r = (s32[], f32[8,128]{1,0}) tuple(%i, %gmm.1)
}""".replace("ESTIMATE", '"cost_estimate":{"flops":"100","bytes_accessed":"64"}')
    text = f"""
  %s = (s32[], f32[8,128]{{1,0}}) parameter(0)
  ROOT %w = (s32[], f32[8,128]{{1,0}}) while(%s), condition=%cond, body=%body, metadata={{op_name="a/{RARELY}/b"}}"""
    rates, asked = costs_lib.Rates(10.0, 1e30, 1), []

    def passes(calls):
        asked.extend(calls)
        return 0.5

    def work(call):
        assert call.rare
        return costs_lib.OpWork(60.0, 0)

    body = f"{inner}\nENTRY %main (p: f32[]) -> f32[] {{{text}\n}}\n"
    program = costs_lib.CostedProgram(body, kernels={"gmm": work}, passes=passes)
    costs = program.costs()
    assert [call.name for call in asked] == ["gmm.1"]
    assert (costs.flops, costs.executed(rates)) == (0, 0.5 * 6)
    assert program.elapsed(rates) == 0.5 * 6
    assert costs_lib.CostedProgram(body).costs().executed(rates) == 0


@pytest.mark.parametrize(("cycles", "found"), [("2120", 2120), (str(2**63 - 1), None), (None, None)])
def test_cycles_as_the_compiler_estimates_them(cycles, found):
    config = f', backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}' if cycles else ""
    text = f"  %p = f32[128]{{0}} parameter(0)\n  ROOT %n = f32[128]{{0}} negate(%p){config}"
    assert [c.cycles for c in module(text).costs().operations] == [found]


GATHER = "all-gather(%{}), channel_id=1, replica_groups=[1,4]<=[4], dimensions={{0}}{}"
"""Gathers 8 numbers, 32 bytes, from each of 4 devices: each device sends 96 bytes."""
RATES = costs_lib.Rates(flops=1e30, bandwidth=64.0, links=96.0)
"""Negating 16 numbers moves 128 bytes: 2 s. A gather reads and writes 160 bytes, 2.5 s, and sends for 1 s."""


def in_line(body: str, *, called: str = "") -> costs_lib.CostedProgram:
    """Return a scheduled program with these instructions before its final negate."""
    return costs_lib.CostedProgram(f"""HloModule m, is_scheduled=true

{called}
ENTRY %main (p: f32[8], x: f32[16]) -> f32[16] {{
  %p = f32[8]{{0}} parameter(0)
  %x = f32[16]{{0}} parameter(1)
{body}
  ROOT %r = f32[16]{{0}} negate(%x)
}}
""")


def test_a_collective_that_nothing_is_done_beside_takes_its_time():
    found = in_line(f"  %g = f32[32]{{0}} {GATHER.format('p', '')}")
    assert found.costs().seconds(RATES) == 2 + 2.5
    assert found.elapsed(RATES) == 2 + 2.5 + 1


APART = """  %s = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %u = ((f32[8]{0}), f32[32]{0}) call-update(%s, %p)
"""
CALLED = f"""%called (q: f32[8]) -> f32[32] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %g = f32[32]{{0}} {GATHER.format("q", "")}
}}
"""


@pytest.mark.parametrize(("between", "waited"), [(0, 1), (1, 0)])
def test_what_stands_between_its_beginning_and_its_end_hides_a_collective(between, waited):
    body = APART + "  %n = f32[16]{0} negate(%x)\n" * between + "  %d = f32[32]{0} call-done(%u)"
    found = in_line(body, called=CALLED)
    assert found.costs().sent == 96
    assert found.elapsed(RATES) - found.costs().seconds(RATES) == waited


def test_two_collectives_share_the_links():
    """On slow links each transfer takes 10 s; they start after 2.5 and 5 s and arrive after 12.5 and 22.5 s."""
    body = APART + APART.replace("%s", "%t").replace("%u", "%v")
    found = in_line(body + "  %d = f32[32]{0} call-done(%u)\n  %e = f32[32]{0} call-done(%v)", called=CALLED)
    assert found.elapsed(dataclasses.replace(RATES, links=9.6)) == pytest.approx(22.5 + 2)


def test_a_collective_in_steps_between_others_work_is_sent_once():
    step = "f32[8]{0}, f32[32]{0}, u32[]{:S(2)}"
    inner = GATHER.format("q", ', frontend_attributes={chain_id="0"}')
    called = "".join(
        f"%{name} (q: f32[8]) -> ({step}) {{\n  %q = f32[8]{{0}} parameter(0)\n"
        f"  %g = f32[32]{{0}} {inner}\n  ROOT %c = ({step}) custom-call(%g)\n}}\n"
        for name in ("begins", "goes_on", "ends")
    )
    body = f"""
  %async-collective-start = ({step}) fusion(%p), kind=kLoop, calls=%begins
  %fusion.1 = (f32[16]{{0}}, {step}) fusion(%x, %p), kind=kOutput, calls=%goes_on
  %async-collective-done = f32[32]{{0}} fusion(%p), kind=kLoop, calls=%ends"""
    found = in_line(body, called=called)
    costs = found.costs()
    assert [(times, traffic.bytes) for times, traffic in costs.collectives] == [(1, 96)]
    assert costs.bytes == 160 + 128 + 128
    assert found.elapsed(RATES) == costs.seconds(RATES), "the middle step takes two seconds and hides the transfer"


def test_of_a_stack_that_is_read_beside_a_collective_only_the_part_counts():
    """64 of 256 bytes, and 128 of the step's own input and output."""
    step = "f32[8]{0}, f32[32]{0}, u32[]{:S(2)}"
    inner = GATHER.format("q", ', frontend_attributes={chain_id="0"}')
    called = f"""%goes_on (x: f32[16], q: f32[8], s: f32[4,16], i: s32[]) -> (f32[16], {step}) {{
  %x = f32[16]{{0}} parameter(0)
  %q = f32[8]{{0}} parameter(1)
  %s = f32[4,16]{{1,0}} parameter(2)
  %i = s32[]{{:S(6)}} parameter(3)
  %part = f32[1,16]{{1,0}} dynamic-slice(%s, %i, %i), dynamic_slice_sizes={{1,16}}
  %b = f32[16]{{0}} bitcast(%part)
  %a = f32[16]{{0}} add(%x, %b)
  %g = f32[32]{{0}} {inner}
  ROOT %c = (f32[16]{{0}}, {step}) custom-call(%a, %g)
}}
"""
    body = f"""  %i = s32[]{{:S(6)}} constant(1)
  %s = f32[4,16]{{1,0}} constant(0)
  %fusion.1 = (f32[16]{{0}}, {step}) fusion(%x, %p, %s, %i), kind=kOutput, calls=%goes_on"""
    assert in_line(body, called=called).costs().bytes == 64 + 128 + 128
