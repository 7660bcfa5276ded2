"""The TPU compiler accepts the Qwen3-30B-A3B decoder, which copies neither a KV cache nor a layer's experts.

Compiled ahead of time for a slice that is not attached, in its own process. To print the figures for a number of rows
and write the program's text to a file:

    export JAX_PLATFORMS=cpu
    python -m tests.test_tpu_decode [ROWS [FILE.hlo]]
"""

import json
import math
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.models import transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import topology
from gspo_jax.rollout import decoder
from gspo_jax.rollout.loop import Prefilled, PrefilledKV, SampledTokens
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.types import Prompts, RouterRecord, Weights
from tests import ahead

QWEN3_30B_A3B = ModelConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    num_experts=128,
    experts_per_token=8,
    moe_intermediate_size=768,
)
TARGET = "v5p:4x4x4"
MESH = {"data": -1, "expert": 16}
ROWS = 1024
"""Concurrent responses, a multiple of the number of chips; GROUP share a prompt where each chip has that many."""
PROMPT, LENGTH, GROUP = 512, 4096 - 512, 16


def shapes(mesh, graph_shapes, rows):
    """Return the shapes of bfloat16 weights in the sampler's layout, prefilled prompts, and keys."""

    def one(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, mesh_lib.spec(axes, mesh_lib.SAMPLER)))

    config, prompts = QWEN3_30B_A3B, rows // min(GROUP, rows // mesh.size)
    params = jax.eval_shape(decoder.make_reshard(graph_shapes, mesh, jnp.bfloat16), graph_shapes)
    shardings = mesh_lib.param_shardings(graph_shapes, mesh, mesh_lib.SAMPLER)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
    kv = (config.num_layers, prompts, config.num_kv_heads, PROMPT, config.head_dim)
    k = one(kv, jnp.bfloat16, "layers", "batch", "kv_heads", None, None)
    routes = one((prompts, PROMPT, config.num_layers, config.experts_per_token), jnp.int8, "batch", None, None, None)
    by_row = NamedSharding(mesh, PartitionSpec(mesh_lib.BATCH_AXES))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    prefilled = Prefilled(
        Prompts(one((prompts, PROMPT), jnp.int32, "batch", None), one((prompts,), jnp.int32, "batch")),
        None,
        PrefilledKV(k, k, RouterRecord(routes, None)),
        None,
        SampledTokens(*(one((rows,), dtype, "batch") for dtype in (jnp.int32, jnp.float32, jnp.float32))),
    )
    return params, prefilled, jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=by_row)


def figures(rows=ROWS, file=None):
    """Compile the decode loop for TARGET and return its memory, largest copy and kernels on one chip."""
    rows = int(rows)
    mesh = topology.topology_mesh(TARGET, MESH)
    graph, params = transformer.abstract(QWEN3_30B_A3B, dtype=jnp.bfloat16)
    graph_shapes = Weights.full(params)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        stop = StopRule(max_length=LENGTH, eos_ids=())
        run = partial(decoder.decode, graph, sampling=SamplingParams(), stop=stop, slots=rows)
        compiled = topology.lower(run, *shapes(mesh, graph_shapes, rows)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory
    if file:
        Path(file).write_text(text)
    return {
        "compile_s": round(time.perf_counter() - start),
        "peak_bytes": memory.peak_memory_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "largest_copy": largest_copy(text),
        "kernels": Counter(re.findall(r"%(grouped_\w+?)(?:_\d+)?[.\d]* = ", text)),
    }


def reshard():
    """Return the bytes on one chip of the sampler's copy of the weights, and of the temporaries while resharding."""
    mesh = topology.topology_mesh(TARGET, MESH | {"data": 1, "fsdp": -1})
    graph_shapes = Weights.full(transformer.abstract(QWEN3_30B_A3B)[1])
    shardings = mesh_lib.param_shardings(graph_shapes, mesh)
    given = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), graph_shapes, shardings)
    with jax.set_mesh(mesh):
        compiled = topology.lower(decoder.make_reshard(graph_shapes, mesh, jnp.bfloat16), given).compile()
    memory = compiled.memory_analysis()
    assert memory
    return {"copy": memory.output_size_in_bytes, "on_the_way": memory.temp_size_in_bytes}


def largest_copy(text):
    """Return the bytes of the largest bfloat16 array (weights and cache have that type) that a loop copies."""
    loops = text.partition("\nENTRY ")[0]
    shapes = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|copy-start)\(", loops)
    return max((2 * math.prod(map(int, shape.split(","))) for shape in shapes), default=0)


@pytest.mark.slow
@ahead.needs_libtpu
def test_the_tpu_compiler_takes_the_decoder():
    """1024 rows of 4096 tokens fit into 13 GB per chip; loops copy no cache and not even one expert's matrix.

    Resharding to the sampler holds no second copy of the weights either: temporaries stay near embedding plus head.
    """
    result = ahead.figures("tests.test_tpu_decode")
    cache = 2 * 2 * QWEN3_30B_A3B.num_layers * 4 * 128 * LENGTH * ROWS // 64
    assert cache < result["temporaries"] < 1.1 * cache
    assert result["peak_bytes"] < 13e9
    assert result["largest_copy"] < 2 * 2048 * 768
    # Per layer one kernel for gate and up and one for down, in two branches: the likely number of rows and the worst.
    assert result["kernels"] == {"grouped_visits": 1 * 2, "grouped_matmul": 2 * 2}
    assert result["on_the_way"] < 2.5 * 2 * 151936 * 2048 < result["copy"] / 4


if __name__ == "__main__":
    print(json.dumps(figures(*sys.argv[1:]) | reshard()))
