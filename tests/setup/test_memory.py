"""The pool of keys and values that a chip's memory leaves room for."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import cli, engine
from gspo_jax.errors import UserError
from gspo_jax.models import huggingface
from gspo_jax.models.published import find
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup import memory
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import Meshes

KEY_BYTES = 2 * 48 * 4 * 128 * 2
"""Of a token of Qwen3-30B-A3B in bfloat16."""


def built(recipe: str, bytes_per_chip: int | None, fields: Mapping[str, Any] = {}, *, trains: bool = True):
    """Return an engine of the 30B recipe with an eighth of 64 chips' work, on 8 devices."""
    config = cli.load_config(f"configs/qwen3_30b_a3b.py:{recipe}")
    config.mesh.update({"data": 1, "fsdp": 8})
    config.sampling.mesh.update({"data": -1, "expert": 8})
    config.update_from_flattened_dict({"data.prompts_per_batch": 64, "sampling.slots": None, **fields})
    model, mesh = check(config), mesh_lib.make_mesh(dict(config.mesh))
    meshes = Meshes(mesh, mesh_lib.reshaped(mesh, {"expert": 8}))
    stop = StopRule(max_length=config.sampling.max_response_length, eos_ids=(1,))
    return engine.build(config, model, meshes, stop, memory=bytes_per_chip, trains=trains)


def pool_tokens(made: engine.Engine, responses: int, share: float = 1.0) -> int:
    pool = made.sampler.decode_options(responses, share)["pool"]
    return pool.pages * pool.columns


def test_whole_responses_get_as_many_slots_as_fit():
    """128 responses of up to 15,872 tokens a device would take 200 GB beside 42 of weights, Adam and the copy."""
    assert built("16k_whole", None).sampler.decode_options(1024)["slots"] == 1024
    assert built("16k_whole", 400 * 10**9).sampler.decode_options(1024)["slots"] == 1024
    made = built("16k_whole", 103 * 10**9)
    found = made.sampler.decode_options(1024)
    slots, pool = found["slots"] // 8, found["pool"]
    used = slots * pool.columns * pool.per_response(15872) * KEY_BYTES
    assert pool.pages == slots * pool.per_response(15872), "each slot has its own pages"
    beside = mesh_lib.shard_bytes((made.placed_state, made.copied))
    assert 0.75 < (used + beside) / 103e9 < 1 - memory.HEADROOM
    fewer = built("16k_whole", 103 * 10**9, {"data.prompts_per_batch": 8}).sampler.decode_options(128)
    assert fewer["slots"] == 128, "16 responses each fit"


def test_partial_rollouts_share_what_is_left_with_their_prefixes():
    fields = {"sampling.partial.prompts": 256, "sampling.pool_tokens": None, "sampling.slots": 768}
    made = built("16k", 103 * 10**9, fields)
    found = made.sampler.decode_options(4096, 0.3)
    tokens = found["pool"].pages * found["pool"].columns
    assert found["slots"] == 768 and 15872 < tokens < 96 * 15872
    rows, width = memory.prefix_rows(made.config, 96, found["pool"])
    assert rows * width > tokens
    beside = mesh_lib.shard_bytes((made.placed_state, made.copied))
    assert 0.7 < ((tokens + rows * width) * KEY_BYTES + beside) / 103e9 < 1 - memory.HEADROOM
    logged = built("16k", 103 * 10**9, fields | {"training.old_logprobs": "sampler"})
    assert 15872 < pool_tokens(logged, 4096, 0.3) < tokens, "router log-probs of all tokens take memory too"
    own = built("16k", 103 * 10**9, (fields | {"sampling.pool_tokens": 8 * 20480}))
    assert own.sampler.decode_options(4096, 0.3)["pool"].pages == 20480 // 1984, "the config's own is kept"


def test_one_response_that_does_not_fit():
    """Weights, Adam, the copy and prompts take 56.6 GB, one response of 15,872 tokens 1.6, one of 1024 tokens 0.1."""
    with pytest.raises(UserError, match=r"one response of 15872 tokens, .* take 1.6 GB, and .* leave 0.9 of 57.5 GB"):
        built("16k_whole", 57_500_000_000)
    shorter = {"sampling.max_response_length": 1024}
    assert pool_tokens(built("16k_whole", 57_500_000_000, shorter), 1024) == 1024


def test_a_teacher_takes_its_room(tmp_path):
    """61.1 GB in bfloat16 over eight chips, 31.2 in int8: as the pool has less, so the message says more."""
    of_teacher = huggingface.config_json(find("Qwen3-30B-A3B"), np.dtype("float32"))
    (tmp_path / "config.json").write_text(json.dumps(of_teacher))
    taught = {"teacher.folder": str(tmp_path), "teacher.form": "full"}
    with pytest.raises(UserError, match=r"weights, teacher, optimizer and prompts leave 1.0 of 65.2 GB; .* int8$"):
        built("16k_whole", 65_200_000_000, taught)
    small = taught | {"teacher.dtype": "int8"}
    assert built("16k_whole", 65_200_000_000, small).sampler.decode_options(1024)["slots"] >= 8
    with pytest.raises(UserError, match=r"teacher, optimizer and prompts leave 0.\d of 61.4 GB; lower it, or use more"):
        built("16k_whole", 61_400_000_000, small)


def test_where_little_is_left_one_response_is_tried():
    """Estimates leave memory free, and refuse nothing that might fit."""
    assert built("16k_whole", 58_500_000_000).sampler.decode_options(1024)["slots"] == 8


def test_an_evaluation_has_the_room_that_training_would_need():
    assert pool_tokens(built("16k_whole", 103 * 10**9, trains=False), 1024) > 1.3 * pool_tokens(
        built("16k_whole", 103 * 10**9), 1024
    )


def test_a_cpu_does_not_say_what_it_has():
    assert hosts.memory_of(mesh_lib.make_mesh({"fsdp": jax.device_count()})) is None


def test_processes_agree_on_the_least_that_their_devices_have(monkeypatch):
    """What they exchange passes through jax, in 32 bits."""

    def gathered(x):
        return np.stack([jnp.asarray(x), jnp.asarray(x) - 5])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.processes, "meet", lambda: None)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", gathered)
    devices = [SimpleNamespace(memory_stats=lambda n=n: {"bytes_limit": n << 20}) for n in (98_000, 97_990)]
    mesh: Any = SimpleNamespace(local_devices=devices)
    assert hosts.memory_of(mesh) == 97_985 << 20
