"""The TPU's compiler takes the mixture of experts, forward and backward, and its kernels work for the chosen pairs.

Compiled ahead of time for a slice that is not there (gspo_jax/parallel/topology.py), each in a process of its own,
for libtpu reads its environment once. The figures of one:

    JAX_PLATFORMS=cpu python -m tests.test_tpu_compile gather
"""

import functools
import json
import re
import sys
import time
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from gspo_jax.models.dispatch import Dispatch, ExpertKernels, exchange
from gspo_jax.models.moe import route
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import topology
from gspo_jax.types import UserError
from tests import ahead

EXPERTS, K, D, F = 128, 8, 2048, 768
ROWS, LENGTH = 4, 4096
"""Of a chip: its sequences and their tokens."""
SHARDS = 4
"""The axis `expert`; all other chips are on `fsdp`."""
TARGET = "v5p:4x4x4"


def layer(x, router, gate, up, down, *, dispatch):
    """Route, exchange, and something to differentiate."""
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router)
    routes, weights = route(logits, k=K, renormalise=True)
    kernels = ExpertKernels(*(w.astype(x.dtype) for w in (gate, up, down)))
    y, _ = exchange(x, routes.experts, weights, kernels, dispatch=Dispatch(dispatch))
    return jnp.square(y.astype(jnp.float32)).mean()


def shapes(mesh):
    """bfloat16 tokens over the batch axes; float32 parameters in the trainer's layout."""

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


def kernel_flops(hlo):
    """Flops of the Pallas kernels in a compiled module without loops, by name, as their cost estimates say."""
    flops = Counter()
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            kernel, estimate = re.search(r"%(\w+)", line), re.search(r'"flops":"(\d+)"', line)
            assert kernel and estimate, line[:200]
            flops[kernel[1]] += int(estimate[1])
    return flops


def figures(dispatch):
    """Compiles the layer's gradient for TARGET and reads what one chip would hold and do."""
    mesh = topology.topology_mesh(TARGET, {"fsdp": -1, "expert": SHARDS})
    start = time.process_time()
    with jax.set_mesh(mesh):
        grad = jax.value_and_grad(functools.partial(layer, dispatch=dispatch), argnums=range(5))
        compiled = topology.lower(grad, *shapes(mesh)).compile()
    memory, cost, flops = compiled.memory_analysis(), compiled.cost_analysis(), kernel_flops(compiled.as_text())
    assert memory and cost
    return {
        "jax": jax.__version__,
        "dispatch": dispatch,
        "compile_cpu_seconds": round(time.process_time() - start),
        "peak_bytes": memory.peak_memory_in_bytes,
        "flops": cost["flops"],  # there is no loop whose trips it would not count
        "matmul_flops": flops["grouped_matmul"] + flops["grouped_matmul_transposed"],
        "weight_gradient_flops": flops["grouped_outer"],
    }


@pytest.mark.slow
@ahead.needs_libtpu
@pytest.mark.parametrize("dispatch", ["gather", "ragged_all_to_all"])
def test_the_tpu_compiler_takes_the_layer(dispatch):
    """Three matrices, their inputs' gradients and their own: 9 products of N·K rows, N being the group's tokens.

    The cost estimates are of the buffers, which have room for every pair of the expert group; a balanced router fills
    a quarter, and the kernels visit only tiles with rows (tests/test_grouped_matmul_tpu.py). A weight gradient that is
    dense over the held experts would take 32 / K = 4 times the flops asserted here, and stand outside the kernels.
    """
    result = ahead.figures("tests.test_tpu_compile", dispatch)
    product = 2 * D * F * K * SHARDS * ROWS * LENGTH
    assert result["weight_gradient_flops"] == 3 * product
    assert result["matmul_flops"] == 6 * product
    assert 9 * product <= result["flops"] < 1.02 * 9 * product
    assert result["peak_bytes"] < 14 * 2**30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5q:4x4x4", "unknown TPU generation 'v5q'; did you mean"),
        ("v5p:4x4", "topology 'v5p:4x4' does not have 3 positive sides; write it as v5p:4x4x4"),
        ("v6e:16x0", "topology 'v6e:16x0' does not have 2 positive sides; write it as v6e:4x4"),
    ],
)
def test_an_unknown_slice_says_what_there_is(name, message):
    with pytest.raises(UserError, match=message):
        topology.describe(name)


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1])))
