"""A run killed with SIGKILL and resumed ends bitwise equal to an uninterrupted one."""

from pathlib import Path

import pytest

from tests.pods import ROOT, Pod, assert_same_bits, rows_of, run_processes, train_flags, wait_for

ITERATIONS = 4


def command(workdir: Path, data: Path) -> list[str]:
    """Return the words that run multi-turn episodes with partial rollouts."""
    settings = {"model.folder": ROOT / "tests" / "golden" / "adder", "data.data_dir": data, "iterations": ITERATIONS}
    return ["-m", "gspo_jax.train", *train_flags("tests/pod_config.py:calculator,partial", workdir, settings)]


@pytest.mark.slow
def test_kill_9_and_resume_of_unfinished_episodes_is_bitwise_equal(tmp_path):
    whole, broken, data = tmp_path / "whole", tmp_path / "broken", tmp_path / "data"
    run_processes(1, *command(whole, data))
    with Pod(1, *command(broken, data)) as pod:
        wait_for((broken / "checkpoints" / "2").exists, pod.processes[0])
        pod.processes[0].kill()
        pod.processes[0].wait()
    assert not (broken / "checkpoints" / str(ITERATIONS)).exists(), "the run was killed before its end"
    (said,) = run_processes(1, *command(broken, data))
    assert "resuming from iteration" in said
    assert_same_bits(whole, broken, step=ITERATIONS)
    assert max(row.get("actor/grad_norm", 0) for row in rows_of(whole)) > 0.1, "some update has a gradient"
    older = [row["response/older"] for row in rows_of(whole) if row.get("iteration", 0) > 2]
    assert max(older) > 0, "some responses resume from the checkpoint's buffer"
    assert rows_of(whole)[-1]["partial/left"] > 0
    assert max(row.get("partial/calls", 0) for row in rows_of(whole)) > 0
