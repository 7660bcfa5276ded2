"""The cache of compiled programs: shared by processes, bounded, off on demand; and the counts of what it saves."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import compilation_cache

from gspo_jax.parallel import compilation
from gspo_jax.parallel.compilation import CompileCounter
from gspo_jax.planning import ahead
from tests.pods import ROOT, Pod, assert_same_bits, train_flags

COMPILE = """
import json, jax, jax.numpy as jnp
from gspo_jax.parallel import compilation
folder, count = compilation.use_cache(), compilation.CompileCounter()
found = jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((8, 8)))
size = jax.config.jax_compilation_cache_max_size
print(json.dumps([folder, size, count.programs > 0, count.cached > 0, float(found).hex()]))
"""


COMPILE_TOGETHER = f"""
import sys
from gspo_jax.parallel import processes
processes.start()
sys.stdout = sys.stderr  # nothing that process 1 prints is shown
{COMPILE}
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


def flipped(data: bytes, *bits: int) -> bytes:
    """Return the data with these bits flipped, counted from its end if negative."""
    found = bytearray(data)
    for bit in bits:
        found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, bit=bit: flipped(data, bit) for bit in (0, 7, 1234, -1, -8, -256, -257)),
        *(lambda data, size=size: data[:size] for size in (0, 1, 31, 32, 100, -1, -32)),
        lambda data: data + b"\0",
        lambda data: bytes(len(data)),
        lambda data: data[:100] + bytes(100) + data[200:],
        lambda data: data[-32:],
    ],
)
def test_a_program_that_is_not_as_it_was_written_is_not_read_and_makes_room(tmp_path, damage):
    cache, program = compilation.SealedCache(str(tmp_path), max_size=10_000), bytes(range(256)) * 2
    cache.put("key", program)
    assert cache.get("key") == program
    (file,) = tmp_path.glob("key-cache")
    file.write_bytes(damage(file.read_bytes()))
    assert cache.get("key") is None and not file.exists()
    cache.put("key", program)
    assert cache.get("key") == program


def test_a_program_under_another_key_or_without_a_seal_is_not_read(tmp_path, caplog):
    cache = compilation.SealedCache(str(tmp_path), max_size=-1)
    cache.put("one", b"first" * 20)
    (tmp_path / "one-cache").rename(tmp_path / "two-cache")
    (tmp_path / "three-cache").write_bytes(b"as jax keeps it" * 20)
    assert cache.get("two") is None and cache.get("three") is None and cache.get("one") is None
    assert not list(tmp_path.glob("*-cache"))
    (said,) = caplog.messages  # one line for all
    assert said == f"{tmp_path}: programs that are damaged, or that gspo_jax did not keep there, are compiled again"


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, bit=bit: flipped(data, bit) for bit in (3, 200, 1000, -1, -20, -40)),
        *(lambda data, size=size: data[:size] for size in (0, 10, -4)),
        lambda data: gzip.compress(b"[]"),
        lambda data: gzip.compress(gzip.decompress(data).replace(b'"digest": "', b'"digest": "0')),
    ],
)
def test_a_damaged_plan_is_compiled_again(tmp_path, monkeypatch, damage):
    compiled = ahead.Compiled("HloModule", 3, 0, True, (ahead.LiveBuffer("dot", None, 2),), "", 0.5)
    calls = []
    monkeypatch.setattr(ahead, "_compile", lambda lowered: calls.append(lowered) or compiled)
    lowered: Any = SimpleNamespace(as_text=lambda: "module")
    for _ in range(2):
        assert ahead.compile_ahead(lowered, key="v5p", cache=tmp_path) == compiled
    assert len(calls) == 1
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        assert ahead.compile_ahead(lowered, key="v5p", cache=tmp_path) == compiled
    assert len(calls) == 2


def rotten_inside(entries: list[Path]) -> None:
    """Flip bits of the programs, which are then compressed as whole ones are."""
    for seed, entry in enumerate(entries):
        program = compilation_cache.decompress_executable(entry.read_bytes())
        bits = np.random.default_rng(seed).integers(64, 8 * len(program), 3).tolist()
        entry.write_bytes(compilation_cache.compress_executable(flipped(program, *bits)) + entry.read_bytes()[-32:])


def exchanged(entries: list[Path]) -> None:
    """Move every program to the next one's place."""
    programs = [entry.read_bytes() for entry in entries]
    for entry, other in zip(entries, programs[1:] + programs[:1], strict=True):
        entry.write_bytes(other)


def cut_off(entries: list[Path]) -> None:
    """Leave the beginning of each."""
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:20])


@pytest.mark.faults
@pytest.mark.parametrize("damage", [rotten_inside, exchanged, cut_off])
def test_a_rotten_cache_is_compiled_again_once(tmp_path, damage):
    """A start would otherwise die of a signal or compute something else, and so would the next."""
    folder = tmp_path / "gspo_jax" / "compiled"
    value = result(start(tmp_path))[-1]
    damage(sorted(folder.glob("*-cache")))
    again = start(tmp_path)
    said, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert json.loads(said)[2:] == [True, False, value] and errors.count("are compiled again") == 1
    assert result(start(tmp_path))[2:] == [False, True, value]


@pytest.mark.faults
def test_processes_at_once_and_other_places(tmp_path):
    """A folder of the user's own is left to jax's variables."""
    (tmp_path / "file").touch()
    first, beside = start(tmp_path), start(tmp_path)
    value = result(first)[-1]
    assert result(beside)[-1] == value
    assert result(start(tmp_path))[2:] == [False, True, value]
    own = start(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert result(own) == [str(tmp_path / "own"), -1, True, False, value]
    assert result(start(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")) == [None, -1, True, False, value]
    assert result(start(tmp_path / "file" / "below")) == [None, -1, True, False, value]


@pytest.mark.faults
def test_each_process_keeps_what_it_compiles(tmp_path):
    """As hosts have disks of their own, and simulated devices have keys that differ by process."""
    found = []
    for _ in range(2):
        with Pod(2, "-c", COMPILE_TOGETHER, inherited=environment(tmp_path)) as pod:
            found.append([json.loads(said.splitlines()[-1])[2:4] for said in pod.finish(120)])
    assert found == [[[True, False]] * 2, [[False, True]] * 2]


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


def test_simulated_devices_never_read_the_program_that_moves_weights(tmp_path):
    """Nor one that an earlier version has kept."""
    cache = compilation.SealedCache(str(tmp_path), max_size=-1)
    for key in ("jit_reshard-1", "jit_update-1"):
        cache.put(key, b"program")
    assert [path.name for path in tmp_path.glob("*-cache")] == ["jit_update-1-cache"]
    (tmp_path / "jit_update-1-cache").rename(tmp_path / "jit_reshard-1-cache")
    assert cache.get("jit_reshard-1") is None and (tmp_path / "jit_reshard-1-cache").exists()
    cache.put("jit_update-1", b"program")
    assert cache.get("jit_update-1") == b"program"


@pytest.mark.slow
def test_a_second_start_compiles_one_program_and_has_the_same_bits(tmp_path):
    settings = {"model.folder": "tests/golden/adder", "data.data_dir": tmp_path / "data", "iterations": 1}
    settings |= {"cpu_devices": 2, "mesh.data": 1, "mesh.expert": 1, "sampling.slots": 8}
    for name in ("one", "two"):
        words = train_flags("tests/pod_config.py", tmp_path / name, settings)
        command = [sys.executable, "-m", "gspo_jax.train", *words, f"--json={tmp_path}/{name}.json"]
        subprocess.run(command, cwd=ROOT, env=environment(tmp_path), check=True, timeout=400)
    first, second = (json.loads((tmp_path / f"{name}.json").read_text())["compile"] for name in ("one", "two"))
    assert second["programs"] == 1, "the reshard of simulated devices"
    assert second["cached"] == first["programs"] + first["cached"] - 1
    assert_same_bits(tmp_path / "one", tmp_path / "two", step=1)
