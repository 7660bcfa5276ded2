"""A run killed with SIGKILL and restarted ends bitwise equal to one that was never interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tests.pods import environment
from tests.tiny import mostly_slow

ROOT = Path(__file__).parent.parent
ITERATIONS = 4


def start(kind: str, workdir: Path, data: Path, model: Path | None) -> subprocess.Popen:
    config = f"--config=tests/pod_config.py:{kind}"
    command = [sys.executable, "-m", "gspo_jax.train", config, f"--workdir={workdir}"]
    command += [f"--config.iterations={ITERATIONS}", f"--config.data.data_dir={data}"]
    if model is not None:
        command.append(f"--config.model.folder={model}")
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def parameters(workdir: Path) -> dict[str, np.ndarray]:
    state = ocp.load_checkpointables(str(workdir / "checkpoints" / str(ITERATIONS)), {"state": None})["state"]
    return {name: np.asarray(leaf) for name, leaf in state.items()}


def metrics(workdir: Path) -> list[dict]:
    """Return the metrics rows without wall-clock times and compilation counts."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    clock = ("time", "timing/", "throughput/", "compile/")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "kind", mostly_slow(["countdown", "countdown,partial", "calculator,partial"], always=["countdown"])
)
def test_kill_9_and_resume_is_bitwise_equal(kind, tmp_path):
    whole, broken, data = tmp_path / "whole", tmp_path / "broken", tmp_path / "data"
    finish(start(kind, whole, data, None))
    process = start(kind, broken, data, whole / "coldstart")
    wait_for((broken / "checkpoints" / "2").exists, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (broken / "checkpoints" / str(ITERATIONS)).exists(), "the run was killed before its end"
    assert "resuming from iteration" in finish(start(kind, broken, data, whole / "coldstart"))

    a, b = parameters(whole), parameters(broken)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert metrics(whole) == metrics(broken)
    assert max(row.get("actor/grad_norm", 0) for row in metrics(whole)) > 0.1, "some update has a gradient"
    if "partial" in kind:
        older = [row["response/older"] for row in metrics(whole) if row.get("iteration", 0) > 2]
        assert max(older) > 0, "some responses resume from the checkpoint's buffer"
