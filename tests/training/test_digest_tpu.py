"""Digests of the 30B's train state cost one pass over it, and no copy. To print the figures:

JAX_PLATFORMS=cpu python -m tests.training.test_digest_tpu
"""

import json
import math

import jax
import pytest

from gspo_jax import cli
from gspo_jax import engine as engine_lib
from gspo_jax.planning import costs, topology
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.players import make_stop_rule
from gspo_jax.training.digest import digest_all
from tests import ahead

CONFIG, TARGET = "configs/qwen3_30b_a3b.py", "v5p:4x4x4"


def figures():
    """Compile the digests of the config's train state for TARGET; return the bytes and the time bound of one chip."""
    config = cli.load_config(CONFIG)
    model = check(config)
    mesh = topology.topology_mesh(TARGET, dict(config.mesh))
    stop = make_stop_rule(config, eos_ids=model.eos_token_ids, pad_id=model.pad_token_id or 0)
    engine = engine_lib.build(config, model, make_meshes(config, model, mesh), stop)
    leaves = jax.tree.leaves(engine.state_shapes)
    places = jax.tree.leaves(engine.shardings)
    state = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x, place in zip(leaves, places, strict=True)]
    with jax.set_mesh(mesh):
        traced = digest_all.trace(state, places=tuple(places))
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    memory, found = compiled.memory_analysis(), costs.CostedProgram(compiled.as_text(), filled={}).costs()
    assert memory is not None
    shards = [math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize for x, place in zip(leaves, places, strict=True)]
    return {
        "state_bytes": sum(shards),
        "read_bytes": found.bytes,
        "sent_bytes": found.sent,
        "peak_bytes": memory.peak_memory_in_bytes,
        "milliseconds": round(1e3 * found.bytes / topology.CHIPS[topology.generation(TARGET)].bandwidth, 2),
    }


@pytest.mark.slow
@ahead.needs_libtpu
def test_a_digest_reads_the_state_once_and_copies_nothing():
    result = ahead.figures("tests.training.test_digest_tpu")
    assert result["read_bytes"] < 1.01 * result["state_bytes"]
    assert result["peak_bytes"] < 1.02 * result["state_bytes"]
    assert result["sent_bytes"] < 10_000


if __name__ == "__main__":
    print(json.dumps(figures()))
