"""A run of several turns with partial rollouts, resumed, ends bitwise equal to an uninterrupted one."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.pods import ROOT, Pod, assert_same_bits, rows_of, run_processes, train_flags, wait_for

ITERATIONS = 4


def command(workdir: Path, data: Path) -> list[str]:
    """Return the words that run multi-turn episodes with partial rollouts."""
    settings = {"model.folder": ROOT / "tests" / "golden" / "adder", "data.data_dir": data, "iterations": ITERATIONS}
    return ["-m", "gspo_jax.train", *train_flags("tests/pod_config.py:calculator,partial", workdir, settings)]


@pytest.mark.slow
def test_unfinished_episodes_of_several_turns_resume_to_the_same_bits(tmp_path):
    """From a copy of the run folder as `kill -9` would leave it, made while the process is suspended."""
    whole, broken, data = tmp_path / "whole", tmp_path / "broken", tmp_path / "data"
    with Pod(1, *command(whole, data)) as pod:
        wait_for((whole / "checkpoints" / "2").exists, pod.processes[0])
        pod.processes[0].send_signal(signal.SIGSTOP)
        shutil.copytree(whole, broken)
        pod.processes[0].send_signal(signal.SIGCONT)
        (said,) = pod.finish()
    assert pod.processes[0].returncode == 0, said
    assert not (broken / "checkpoints" / str(ITERATIONS)).exists(), "the copy was made before the end"
    (said,) = run_processes(1, *command(broken, data))
    assert "resuming from iteration" in said
    assert_same_bits(whole, broken, step=ITERATIONS)
    assert max(row.get("actor/grad_norm", 0) for row in rows_of(whole)) > 0.1, "some update has a gradient"
    older = [row["response/older"] for row in rows_of(whole) if row.get("iteration", 0) > 2]
    assert max(older) > 0, "some responses resume from the checkpoint's buffer"
    assert rows_of(whole)[-1]["partial/left"] > 0
    assert max(row.get("partial/calls", 0) for row in rows_of(whole)) > 0
