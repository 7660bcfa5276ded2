"""Peak memory of a process that reads a folder of experts in int8 onto eight simulated devices.

    python -m tests.tools.loading 4    # GB of the folder, which is written first, in four files of bfloat16

The limit is what the devices hold, and 1.3 times the largest file.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from gspo_jax.models import families, huggingface, transformer
from gspo_jax.models.config import ModelConfig, by_path
from gspo_jax.models.tensors import INDEX
from gspo_jax.parallel import mesh as mesh_lib

FILES = 4
LAYER_GB = 0.33
CONFIG = ModelConfig(
    vocab_size=32000,
    hidden_size=2048,
    num_layers=1,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=4096,
    num_experts=32,
    experts_per_token=8,
    moe_intermediate_size=768,
)


def write(folder: pathlib.Path, layers: int) -> None:
    """Write a folder whose tensors are random, and repeat."""
    config = dataclasses.replace(CONFIG, num_layers=layers)
    shapes = {path: leaf.shape for path, leaf in by_path(transformer.abstract(config)[1]).items()}
    block = np.random.default_rng(0).normal(0, 0.02, 2**22).astype(jnp.bfloat16)
    tensors = [
        (name, rule.shape(shapes[path]), rule.layer(at[0]) * FILES // layers if "{L}" in rule.tensor else 0)
        for path, rule in families.of(config).rules(config, ()).items()
        for at, name in rule.entries(shapes[path])
    ]
    folder.mkdir()
    weight_map = {}
    for i in range(FILES):
        own = {name: np.resize(block, shape) for name, shape, file in tensors if file == i}
        weight_map |= dict.fromkeys(own, f"model-{i}.safetensors")
        save_file(own, folder / f"model-{i}.safetensors", metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    fields = huggingface.config_json(config, jnp.dtype(jnp.bfloat16))
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Load the folder in this process and return what it took."""

    def peak() -> int:
        status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])  # getrusage begins with the parent's

    config, mesh = huggingface.read_config(folder), mesh_lib.make_mesh({"expert": 8})
    jax.block_until_ready(jnp.ones(()) + 1)
    before, begin = peak(), time.perf_counter()
    params = jax.block_until_ready(huggingface.load_params(folder, config, mesh, dtype=jnp.bfloat16, base="int8"))
    held = sum(part.data.nbytes for x in jax.tree.leaves(params) for part in x.addressable_shards)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return {
        "folder": sum(sizes),
        "grown": peak() - before,
        "on_devices": held,
        "limit": held + int(1.3 * max(sizes)),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def measure(gigabytes: float) -> dict[str, Any]:
    """Write a folder of about this size, and read it in a process of its own."""
    with tempfile.TemporaryDirectory() as root:
        folder = pathlib.Path(root) / "model"
        write(folder, max(FILES, round(gigabytes / LAYER_GB)))
        eight = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        command = [sys.executable, "-m", "tests.tools.loading", str(folder)]
        done = subprocess.run(command, env=os.environ | eight, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    given = sys.argv[1]
    print(json.dumps(read(pathlib.Path(given)) if pathlib.Path(given).is_dir() else measure(float(given))))
