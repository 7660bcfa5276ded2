"""The cache of compiled programs: shared by processes, bounded, off on demand; and the counts of what it saves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from gspo_jax.parallel import compilation
from gspo_jax.parallel.compilation import CompileCounter
from tests.pods import ROOT, assert_same_bits, train_flags

COMPILE = """
import json, jax, jax.numpy as jnp
from gspo_jax.parallel import compilation
folder, count = compilation.use_cache(), compilation.CompileCounter()
found = jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((8, 8)))
size = jax.config.jax_compilation_cache_max_size
print(json.dumps([folder, size, count.programs > 0, count.cached > 0, float(found).hex()]))
"""


def environment(home: Path, **changes: str) -> dict[str, str]:
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    return {k: v for k, v in os.environ.items() if k not in names} | {"XDG_CACHE_HOME": str(home)} | changes


def start(home: Path, **changes: str) -> subprocess.Popen:
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment(home, **changes), **said)


def result(process: subprocess.Popen) -> list:
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(said)


def test_a_later_process_reads_what_one_before_compiled(tmp_path):
    folder = tmp_path / "gspo_jax" / "compiled"
    known = [str(folder), compilation.MAX_CACHE_BYTES]
    *said, value = result(start(tmp_path))
    assert said == [*known, True, False] and list(folder.glob("*-cache"))
    assert result(start(tmp_path)) == [*known, False, True, value]


@pytest.mark.faults
def test_processes_at_once_damaged_programs_and_other_places(tmp_path):
    """A damaged program is compiled again; a folder of the user's own is left to jax's variables."""
    folder = tmp_path / "gspo_jax" / "compiled"
    (tmp_path / "file").touch()
    first, beside = start(tmp_path), start(tmp_path)
    value = result(first)[-1]
    assert result(beside)[-1] == value
    assert result(start(tmp_path))[2:] == [False, True, value]
    for entry in folder.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:20])
    assert result(start(tmp_path))[2:] == [True, False, value]
    own = start(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert result(own) == [str(tmp_path / "own"), -1, True, False, value]
    assert result(start(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")) == [None, -1, True, False, value]
    assert result(start(tmp_path / "file" / "below")) == [None, -1, True, False, value]


def test_compiled_programs_are_counted_and_those_in_memory_are_not():
    count, shown = CompileCounter(), []
    end = compilation.watch_compilation(shown.append)
    x = jax.device_put(np.float32(1.0))
    f = jax.jit(lambda x: x + len(shown))
    for _ in range(2):
        f(x)
    end()
    count.stop()
    jax.jit(lambda x: x - 1)(x)
    assert (count.programs + count.cached, count.seconds > 0) == (1, True)
    assert shown == [True, False]


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_has_the_same_bits(tmp_path):
    settings = {"model.folder": "tests/golden/adder", "data.data_dir": tmp_path / "data", "iterations": 1}
    for name in ("one", "two"):
        words = train_flags("tests/pod_config.py", tmp_path / name, settings)
        command = [sys.executable, "-m", "gspo_jax.train", *words, f"--json={tmp_path}/{name}.json"]
        subprocess.run(command, cwd=ROOT, env=environment(tmp_path), check=True, timeout=400)
    first, second = (json.loads((tmp_path / f"{name}.json").read_text())["compile"] for name in ("one", "two"))
    assert second["programs"] == 0 and second["cached"] == first["programs"] + first["cached"]
    assert_same_bits(tmp_path / "one", tmp_path / "two", step=1)
