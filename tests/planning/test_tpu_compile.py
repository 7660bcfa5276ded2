"""The TPU compiler accepts the mixture-of-experts layer, forward and backward; kernels work only on the chosen pairs.

Compiled ahead of time for a slice that is not attached (gspo_jax/planning/topology.py), each in its own process because
libtpu reads its environment only once. To print the figures of one dispatch:

    JAX_PLATFORMS=cpu python -m tests.planning.test_tpu_compile gather
"""

import dataclasses
import json
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from gspo_jax.errors import UserError
from gspo_jax.kernels.row_sums_tpu import ROW_SUMS
from gspo_jax.models.dispatch import exchange
from gspo_jax.models.experts import ExpertKernels
from gspo_jax.models.matrices import Matrix
from gspo_jax.models.moe import route
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import calibration, topology
from gspo_jax.planning import costs as costs_lib
from gspo_jax.planning.hlo import Module
from gspo_jax.planning.show import show_header
from tests import ahead

EXPERTS, K, D, F = 128, 8, 2048, 768
ROWS, LENGTH = 4, 128
"""Sequences per chip, and tokens per sequence."""
SHARDS = 4
"""Size of the `expert` axis; the remaining chips are on `fsdp`."""
TARGET = "v5p:4x4x4"


def layer(x, router, gate, up, down, *, dispatch):
    """Return a scalar loss of route, dispatch, experts and combine."""
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router)
    routes, weights = route(logits, k=K, renormalise=True)
    kernels = ExpertKernels(*(Matrix(w.astype(x.dtype)) for w in (gate, up, down)))
    y = exchange(x, routes.experts, weights, kernels, dispatch=dispatch)
    return jnp.square(y.astype(jnp.float32)).mean()


def shapes(mesh):
    """Return bfloat16 tokens over the batch axes and float32 parameters in the trainer's layout, as shapes."""

    def one(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, mesh_lib.spec(axes, mesh_lib.TRAINER)))

    wide, tall = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
    return (
        one((ROWS * mesh.size, LENGTH, D), jnp.bfloat16, "batch", None, None),
        one((D, EXPERTS), jnp.float32, "embed", "router"),
        one((EXPERTS, D, F), jnp.float32, *wide),
        one((EXPERTS, D, F), jnp.float32, *wide),
        one((EXPERTS, F, D), jnp.float32, *tall),
    )


def figures(dispatch):
    """Compile the layer's gradient for TARGET and return the memory and flops of one chip."""
    mesh = topology.topology_mesh(TARGET, {"fsdp": -1, "expert": SHARDS})
    start = time.process_time()
    with jax.set_mesh(mesh):
        grad = jax.value_and_grad(partial(layer, dispatch=dispatch), argnums=range(5))
        compiled = topology.lower(grad, *shapes(mesh)).compile()
    memory, costs = (
        compiled.memory_analysis(),
        costs_lib.CostedProgram(compiled.as_text() or "", filled={ROW_SUMS: 0.0}).costs(),
    )
    assert memory
    return {
        "jax": jax.__version__,
        "dispatch": dispatch,
        "compile_cpu_seconds": round(time.process_time() - start),
        "peak_bytes": memory.peak_memory_in_bytes,
        "flops": costs.flops,
    }


@pytest.mark.slow
@ahead.needs_libtpu
def test_the_tpu_compiler_takes_the_layer():
    """All programs of test_plan.py dispatch with gathers, this one by a ragged all-to-all.

    Three matrices with their input and weight gradients: 9 products of the rows of the buffers, which have room for
    1.25 times the pairs that a balanced router sends, a quarter of all pairs of the group. The kernels visit only tiles
    with rows (tests/kernels/test_grouped_matmul_tpu.py). A weight gradient that is dense over the held experts would
    take 32 / K = 4 times the flops asserted here.
    """
    result = ahead.figures("tests.planning.test_tpu_compile", "ragged_all_to_all")
    products = 9 * 2 * D * F * 1.25 * K * ROWS * LENGTH
    assert products <= result["flops"] < 1.02 * products
    assert result["peak_bytes"] < 1.7 * 10**9


def between_slices():
    """Compile sums over two slices of 4 chips each, and return what a chip sends to the other slice and inside."""
    mesh = topology.topology_mesh("v5p:2x2x1", {"data": 2, "fsdp": -1}, slices=2)
    spec = PartitionSpec(("data", "fsdp"))

    def sums(x):
        return jax.lax.psum(x, "data"), jax.lax.psum(x, ("data", "fsdp")), jax.lax.psum(x, "fsdp")

    out = PartitionSpec("fsdp"), PartitionSpec(), PartitionSpec("data")
    x = jax.ShapeDtypeStruct((2**22 * mesh.size, 128), jnp.float32, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        compiled = topology.lower(jax.shard_map(sums, in_specs=(spec,), out_specs=out), x).compile()
    machine = costs_lib.Machine(slices=2, torus=topology.torus("v5p:2x2x1", mesh))
    costs = costs_lib.CostedProgram(compiled.as_text() or "", machine=machine).costs()
    return {"dcn": costs.dcn, "ici": costs.sent, "kinds": sorted(kind for kind, _ in costs.by_group())}


@pytest.mark.slow
@ahead.needs_libtpu
def test_sums_between_slices():
    """The compiler sums a whole array over `data` on the network, and a quarter of it after summing in the slice.

    Of two slices, a chip sends as much as it has; in the slice 2 · 3/4 of it for each of the sums over 4 chips.
    """
    found = ahead.figures("tests.planning.test_tpu_compile", "between_slices")
    size = 4 * 2**22 * 128
    assert found["dcn"] == pytest.approx((1 + 1 / 4) * size)
    assert found["ici"] == pytest.approx(2 * 2 * 3 / 4 * size, rel=0.01)
    assert "all-reduce between slices" in found["kinds"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5q:4x4x4", "unknown TPU generation 'v5q'; did you mean"),
        ("v5p:4x4", "topology 'v5p:4x4' does not have 3 positive sides; write it as v5p:4x4x4"),
        ("v5p-8", r"v5p-8 is 4 chips \(.* TensorCores, 2 to a chip\); .* as v5p:2x2x1$"),
        ("v4-256", "is 128 chips .* write the slice as v4:4x4x8$"),
        ("v5p-24", "is 12 chips .* write the slice as v5p:XxYxZ with sides whose product is 12$"),
        ("v5litepod-8", r"is 8 chips \(its number counts chips\); write the slice as v5e:2x4$"),
        ("v5e-8", r"v5e-8 is 8 chips \(its number counts chips\); write the slice as v5e:2x4$"),
        ("ct5lp-hightpu-8t", r"is 8 chips \(its number counts chips\); write the slice as v5e:2x4$"),
        ("ct5p-hightpu-4t", r"is 4 chips \(its number counts chips\); write the slice as v5p:2x2x1$"),
        ("tpu7x-8", r"is 4 chips \(.* TensorCores, 2 to a chip\); write the slice as tpu7x:2x2x1$"),
        ("tpu7x-standard-4t", r"is 4 chips \(its number counts chips\); write the slice as tpu7x:2x2x1$"),
        ("tpu7x:2x4", "does not have 3 positive sides; write it as tpu7x:4x4x4"),
        ("tpu7:2x2x1", "unknown TPU generation 'tpu7'; did you mean 'tpu7x'"),
        ("v6e-1", "is 1 chip .* write the slice as v6e:1x1$"),
        ("v5p-7", "unknown TPU generation 'v5p-7'; did you mean 'v5p'"),
        ("v6e:16x0", "topology 'v6e:16x0' does not have 2 positive sides; write it as v6e:4x4"),
    ],
)
def test_an_unknown_slice_says_what_there_is(name, message):
    with pytest.raises(UserError, match=message):
        topology.describe(name)


def test_a_chip_of_tpu7x_is_two_devices():
    """Figures of its page on docs.cloud.google.com/tpu are of whole chips, links both ways and the network in bits."""
    chiplet = topology.CHIPS["tpu7x"]
    whole = [2 * x for x in (chiplet.flops, chiplet.bandwidth, chiplet.links, chiplet.dcn)]
    assert whole == [2307e12, 7380e9, 1200e9 / 2, 100e9 / 8]
    assert 94 < chiplet.memory / 2**30 < 192 / 2
    assert chiplet.flops / chiplet.clock == pytest.approx(2 * 4 * 256**2, rel=1e-3)
    assert topology.counted("tpu7x", 8) == "8 chiplets of 4 chips"
    assert topology.counted("v5p", 1) == "1 chip"
    console = Console(record=True, width=200)
    facts = {"topology": "tpu7x:2x2x1", "chip": "tpu7x", "mesh": {"fsdp": 8}, "least_chips": 3, "skew": None}
    show_header(console, facts)
    first, second = console.export_text().splitlines()
    assert first.startswith("tpu7x:2x2x1, 8 chiplets of 4 chips, mesh fsdp 8;") and "of a chiplet" in second


def read_off(target):
    """Return what the compiler grants a program in HBM, and how many FLOPs of a matmul it counts per cycle."""
    mesh = topology.topology_mesh(target, {"data": -1})

    def shape(*sides, dtype):
        return jax.ShapeDtypeStruct(sides, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    with jax.set_mesh(mesh), pytest.raises(jax.errors.JaxRuntimeError) as error:
        topology.lower(lambda x: jnp.cumsum(2 * x, axis=0) + x, shape(2**20, 2**18, dtype=jnp.float32)).compile()
    found, side = {"gib": float(str(error.value).partition("exceeds available HBM (")[2].partition("G)")[0])}, 8192
    for dtype in ("bfloat16", "float8_e4m3fn"):
        square = shape(side, side, dtype=dtype)
        with jax.set_mesh(mesh):
            compiled = topology.lower(partial(jnp.matmul, preferred_element_type=jnp.float32), square, square).compile()
        operations = Module(compiled.as_text() or "").computations.values()
        cycles = sum(one.cycles or 0 for inside in operations for one in inside.values())
        found[dtype] = 2 * side**3 / cycles
    return found


@pytest.mark.slow
@ahead.needs_libtpu
def test_the_compiler_has_the_figures_of_tpu7x():
    """Its matmuls come within a fifth of the peak at the clock that is assumed; those in fp8 are twice as fast."""
    found, chiplet = ahead.figures("tests.planning.test_tpu_compile", "read_off"), topology.CHIPS["tpu7x"]
    assert found["gib"] == pytest.approx(chiplet.memory / 2**30)
    assert 0.8 < found["bfloat16"] * chiplet.clock / chiplet.flops < 1
    assert found["float8_e4m3fn"] / found["bfloat16"] == pytest.approx(2, rel=0.05)


def test_chiplets_are_one_link_apart():
    @dataclasses.dataclass(frozen=True)
    class Device:
        id: int
        coords: tuple[int, int, int]
        core_on_chip: int
        process_index: int = 0
        platform: str = "tpu"
        device_kind: str = "TPU7x"

    devices = [Device(i, (i // 2 % 2, i // 4, 0), i % 2) for i in range(8)]
    mesh = mesh_lib.make_mesh({"fsdp": 4, "expert": 2}, devices)
    torus = topology.torus("tpu7x:2x2x1", mesh)
    assert torus.hops([(0, 1), (2, 3), (4, 5), (6, 7)]) == 1
    assert torus.hops([range(0, 8, 2), range(1, 8, 2)]) == 2 and torus.hops([range(8)]) == 3
    assert calibration._longest_way(devices[:2], devices) == 1
    assert calibration._longest_way(devices, devices) == 3


@pytest.mark.slow
@ahead.needs_libtpu
def test_a_slice_may_have_one_chip_or_odd_sides_but_not_any_number():
    script = "import sys; from gspo_jax.planning.topology import describe; print(len(describe(sys.argv[1])))"
    for name, says in (("v6e:1x1", "1\n"), ("tpu7x:1x1x1", "2\n"), ("v5e:3x3", "9\n"), ("v5e:99999999x1", "")):
        done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=False)
        assert done.stdout == says, done.stderr
    assert "UserError: libtpu knows no topology 'v5e:99999999x1' (INVALID_ARGUMENT" in done.stderr


if __name__ == "__main__":
    others = {"between_slices": between_slices, "read_off": partial(read_off, "tpu7x:1x1x1")}
    print(json.dumps(others.get(sys.argv[1], partial(figures, sys.argv[1]))()))
