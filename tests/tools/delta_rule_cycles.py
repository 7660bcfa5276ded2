"""A layer's gated delta rule on one TPU chip, as `plan` counts it: XLA's form, and the Pallas kernels in its place.

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true" JAX_PLATFORMS=cpu \\
        python -m tests.tools.delta_rule_cycles v5p:2x2x1 kernels    # or XLA

Compiled ahead of time for the heads of Qwen3.5-35B-A3B and a row of 16,384 tokens per chip, in bfloat16. With DIR it
also prints what the compiler scheduled for the kernels: numbers of instructions (cycles, if none waits) between
branches, from a hundred on. `delta_rule_tpu.CYCLES` is made of them.
"""

import os
import re
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.kernels import delta_rule_tpu
from gspo_jax.kernels.delta_rule import delta_rule
from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import costs, executed, rates, topology

TOKENS, KEYS, VALUES, WIDTH = 16384, 16, 32, 128


def rule(qkv, g, beta, spans):
    """Return the outputs, from what the convolution gives."""
    q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], KEYS, -1), [WIDTH, 2 * WIDTH], axis=-1)
    out, _ = delta_rule(q, k, v.reshape(*g.shape, WIDTH), g, beta, spans)
    return out.reshape(*g.shape[:2], -1)


def count(target, *, backward):
    """Return the executed milliseconds of one chip, by what bounds them; apart from copies, and XLA's inverse."""
    mesh, chip = topology.topology_mesh(target, {"fsdp": -1}), topology.CHIPS[topology.generation(target)]
    spec = PartitionSpec(mesh_lib.BATCH_AXES)

    def one(dtype, *shape):
        return jax.ShapeDtypeStruct((mesh.size, TOKENS, *shape), dtype, sharding=NamedSharding(mesh, spec))

    qkv, out = (one(jnp.bfloat16, heads * WIDTH) for heads in (2 * KEYS + VALUES, VALUES))
    g, ends = one(jnp.float32, VALUES), one(jnp.int32)
    given = qkv, g, g, Spans(ends, ends, ends)
    run = jax.shard_map(rule, in_specs=spec, out_specs=spec, check_vma=False)

    def with_gradients(*arguments):
        *given, spans, grads = arguments
        out, back = jax.vjp(lambda *given: run(*given, spans), *given)
        return out, back(grads)

    with jax.set_mesh(mesh):
        lowered = topology.lower(with_gradients, *given, out) if backward else topology.lower(run, *given)
        text = lowered.compile().as_text()
    kernels = {delta_rule_tpu.NAME: executed.delta_rule(chip)}
    program = costs.CostedProgram(text, kernels=kernels, machine=costs.Machine(cores=chip.cores))
    assumed, found = rates.assumed(topology.generation(target)), Counter()
    for cost in program.costs().operations:
        kind = "copies" if cost.operation.startswith(("copy", "reshape", "transpose")) else cost.bound(assumed)
        kind = "inverse" if "triangular_solve" in cost.scope else kind
        found[kind] += 1e3 * cost.times * cost.seconds(assumed)
    return found


def show_schedules(folder):
    """Print the lengths of the kernels' stretches of instructions."""
    for path in sorted(Path(folder).glob(f"*{delta_rule_tpu.NAME}*-final_bundles.txt")):
        if "schedule-analysis" in path.name:
            continue
        last, found = 0, []
        for line in path.read_text().splitlines():
            if at := re.match(r" *(0x[0-9a-f]+|0) ", line):
                place = int(at[1], 16)
                if "sbr.rel" in line:
                    found, last = [*found, place - last], place
        print(path.name, [n for n in found if n >= 100])


def main() -> None:
    target, form = sys.argv[1:]
    fits = {"kernels": delta_rule_tpu.fits, "XLA": lambda *_: False}[form]
    with mock.patch.object(delta_rule_tpu, "fits", fits):
        for name, backward in (("forward", False), ("forward and backward", True)):
            found = count(target, backward=backward)
            parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in found.most_common())
            print(f"{form}, {name}: {sum(found.values()):.2f} ms ({parts})", flush=True)
    if dumped := re.search(r"--xla_jf_dump_to=(\S+)", os.environ.get("LIBTPU_INIT_ARGS", "")):
        show_schedules(dumped[1])


if __name__ == "__main__":
    main()
