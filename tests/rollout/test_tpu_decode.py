"""The TPU compiler takes the decoder as a run of Qwen3-30B-A3B executes it: in pieces that copy no cache and no log.

Compiled ahead of time for a slice that is not attached, in its own process. To print the figures, and write the
programs' texts to a folder:

    export JAX_PLATFORMS=cpu
    python -m tests.rollout.test_tpu_decode [FOLDER]
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

from gspo_jax import cli, plan
from gspo_jax.kernels.attention import decode_attention
from gspo_jax.models.cache import write_tokens
from gspo_jax.planning import programs, topology
from gspo_jax.planning.loads import SKEW
from gspo_jax.setup.checks import check
from tests import ahead

RECIPE, TARGET = "configs/qwen3_30b_a3b.py:16k", "v5p:4x4x4"
PIECES = ("begin_piece", "advance_piece")
"""What is compiled: all but the one that writes the responses."""
KERNEL = 'custom_call_target="tpu_custom_call"'
BYTES = {"bf16": 2, "f32": 4, "s32": 4, "s8": 1}


def plain_step():
    """Return the text of a step's attention in layers that are not fused: two key heads, 256 wide, in pages."""
    mesh = topology.topology_mesh("v5e:2x2", {"data": -1})
    L, B, W, C, Kv, h = 4, 16, 16, 256, 2, 256

    def step(q, new, prompt, lengths, k, v, table, ages):
        def layer(carry, number):
            x, k, v = carry
            at = jnp.take_along_axis(table, (ages - 1) // C, axis=1), (ages - 1) % C
            k, v = (write_tokens(pool, number, new, *at) for pool in (k, v))
            options = {"layer": number, "table": table, "ages": ages, "rows": None}
            return (decode_attention(x, prompt, prompt, lengths, k, v, **options), k, v), None

        return jax.lax.scan(layer, (q, k, v), jnp.arange(L))[0]

    def one(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    pool, ints = one(L, B * W, Kv, C, h), partial(one, dtype=jnp.int32)
    shapes = one(B, 1, 16, h), one(B, 1, Kv, h), one(L, 1, Kv, C, h), ints(1), pool, pool, ints(B, W), ints(B, 1)
    with jax.set_mesh(mesh):
        traced = jax.jit(step, donate_argnums=(4, 5)).trace(*shapes)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def figures(folder=None):
    """Return memory, largest copies and kernels of the recipe's pieces on one chip of TARGET, and those of reshard."""
    config = cli.load_config(RECIPE)
    setting, _, _ = plan.prepare(config, check(config), TARGET, slices=1, rates=None, skew=SKEW)
    made = [*programs.make("reshard", setting.engine), *programs.make("sample_decode", setting.engine)[: len(PIECES)]]
    found: dict = {"plain": {"copies": largest_copies(plain_step())}}
    for name, program in zip(("reshard", *PIECES), made, strict=True):
        start = time.perf_counter()
        with jax.set_mesh(program.mesh):
            compiled = program.trace().lower(lowering_platforms=("tpu",)).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory and text
        if folder:
            (Path(folder) / f"{name}.hlo").write_text(text)
        found[name] = {
            "compile_s": round(time.perf_counter() - start),
            "peak_bytes": memory.peak_memory_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "copies": largest_copies(text),
            "kernels": Counter(re.findall(rf"%(\w+?)(?:_\d+)*(?:\.\w+)* = .*{KERNEL}", text)),
        }
    return found


def largest_copies(text):
    """Return the bytes of the largest array of each dtype that is copied: caches are bf16, logs f32 and s8."""
    shapes = re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:copy|copy-start)\(", text)
    found = dict.fromkeys(BYTES, 0)
    for dtype, shape in shapes:
        if dtype in BYTES:
            found[dtype] = max(found[dtype], BYTES[dtype] * math.prod(map(int, shape.split(","))))
    return found


@pytest.mark.slow
@ahead.needs_libtpu
def test_the_tpu_compiler_takes_the_decoder():
    """The recipe's slots and pool, and prefixes as large, fit on a chip, and loops update them where they are.

    Resharding to the sampler holds no second copy of the weights either: temporaries stay near embedding plus head.
    """
    found = ahead.figures("tests.rollout.test_tpu_decode")
    assert found["plain"]["copies"]["bf16"] < 2 * 16 * 256 * 2 * 256 * 2, "no pool: less than two pages of every slot"
    for name in PIECES:
        assert found[name]["peak_bytes"] < 85e9
        assert found[name]["copies"]["bf16"] < 2 * 2048 * 768, "no pool, and not even one expert's matrix"
    advance, reshard = found["advance_piece"], found["reshard"]
    assert advance["temporaries"] < 1e9, "pools, records and log are updated in place"
    for kernel in ("paged_attention", "decode_experts"):
        assert advance["kernels"][kernel] == 4, "one of each per layer, in each of four phases"
    assert not any(name.startswith("grouped") for name in advance["kernels"])
    assert reshard["temporaries"] < reshard["results"] / 3


if __name__ == "__main__":
    print(json.dumps(figures(*sys.argv[1:])))
