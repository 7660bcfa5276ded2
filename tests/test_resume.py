"""Runs killed with SIGKILL and restarted end bitwise equal to uninterrupted ones; test_train.py has the fast case."""

from pathlib import Path

import pytest

from tests.pods import ROOT, Pod, assert_same_bits, rows_of, run_processes, wait_for

ITERATIONS = 4


def command(kind: str, workdir: Path, data: Path) -> list[str]:
    model = ROOT / "tests" / "golden" / ("counter" if "countdown" in kind else "adder")
    words = [f"--config=tests/pod_config.py:{kind}", f"--workdir={workdir}", f"--config.iterations={ITERATIONS}"]
    return ["-m", "gspo_jax.train", *words, f"--config.data.data_dir={data}", f"--config.model.folder={model}"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["countdown", "countdown,partial", "calculator,partial"])
def test_kill_9_and_resume_is_bitwise_equal(kind, tmp_path):
    whole, broken, data = tmp_path / "whole", tmp_path / "broken", tmp_path / "data"
    run_processes(1, *command(kind, whole, data))
    with Pod(1, *command(kind, broken, data)) as pod:
        wait_for((broken / "checkpoints" / "2").exists, pod.processes[0])
        pod.processes[0].kill()
        pod.processes[0].wait()
    assert not (broken / "checkpoints" / str(ITERATIONS)).exists(), "the run was killed before its end"
    (said,) = run_processes(1, *command(kind, broken, data))
    assert "resuming from iteration" in said
    assert_same_bits(whole, broken, step=ITERATIONS)
    assert max(row.get("actor/grad_norm", 0) for row in rows_of(whole)) > 0.1, "some update has a gradient"
    if "partial" in kind:
        older = [row["response/older"] for row in rows_of(whole) if row.get("iteration", 0) > 2]
        assert max(older) > 0, "some responses resume from the checkpoint's buffer"
