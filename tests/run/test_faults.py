"""Runs that are stopped, hang, go bad or lose their checkpoints: what the user sees, and how they go on."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gspo_jax import exits
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.samples import read_samples
from gspo_jax.training.checkpoint import steps
from tests.pods import (
    ROOT,
    Pod,
    assert_same_bits,
    assert_same_metrics,
    copy_of_launchers,
    field_run,
    launch_faulty,
    rows_of,
    run_commands,
    run_faulty,
    run_processes,
    small_run,
    stopped,
)

pytestmark = pytest.mark.faults
ITERATIONS = 6
"""Iterations of `field_run`."""


def command(workdir: Path, data: Path, **settings: object) -> list[str]:
    """Return the flags of a run that saves nothing before its end, unless it is stopped."""
    return field_run(workdir, data, **{"checkpoint.every": 100} | settings)


def test_stops_and_kills_at_any_point_change_no_bit(whole, data, tmp_path):
    """At most the iteration in hand is done again, sampled with the same keys, and a cut-off evaluation is made up.

    The clock jumps by hours at every stop and during the last run, and no deadline or lease takes notice.
    """
    for phase, number, iterations in (
        ("updated", 1, 1),  # between two updates: the other is made too
        ("score", 2, 2),  # after sampling for iteration 3, while iteration 2 is not saved yet
        ("evaluate", 1, 3),
    ):
        codes, said = run_faulty(f"TERM:{phase}:{number},clock:{phase}:1", command(tmp_path, data))
        facts = stopped(tmp_path)
        assert codes == [0], said
        assert (facts["step"] or 0) == iterations and phase.startswith(facts["phase"]), said
        assert 0 <= facts["seconds"] < 10
        assert f"SIGTERM in phase {facts['phase']}" in said
        assert re.search("stopped: (iteration|nothing to save yet)", said)
    codes, said = run_faulty("KILL:reshard:2", command(tmp_path, data, **{"checkpoint.every": 1}))
    assert codes == [-signal.SIGKILL], said
    assert not (tmp_path / "stopped.json").exists()
    codes, said = run_faulty("clock:sample:1", command(tmp_path, data))
    assert codes == [0] and re.search("resuming from iteration [34]", said), said  # the last save may have been cut off
    assert_same_bits(whole, tmp_path, step=ITERATIONS)
    assert sum("eval/accuracy" in row for row in rows_of(tmp_path)) == 1 + ITERATIONS
    assert not list(tmp_path.rglob("*tmp*"))
    assert max(row.get("actor/grad_norm", 0) for row in rows_of(whole)) > 0.1, "some update has a gradient"
    assert max(row.get("response/older", 0) for row in rows_of(whole)) > 0, "some responses are resumed"


def test_two_processes_stop_together_go_on_where_one_was_and_name_a_slow_one(whole, data, tmp_path):
    """A run of one process, then two, then one: the metrics are those of one, unfinished responses included."""
    run_processes(1, "-m", "gspo_jax.train", *field_run(tmp_path, data, iterations=1))
    codes, said = run_faulty("slow:reward:1:1,TERM:update:4:1", command(tmp_path, data), count=2)
    assert codes == [0, 0], said
    facts = stopped(tmp_path)
    assert facts["seconds"] < 10 and len(re.findall(rf"stopped: iteration {facts['step']} is saved", said)) == 2, said
    (warning,) = re.findall(r"warning: process (\d) is slow: it works (\S+) s of an iteration, (\S+) times", said)
    assert warning[0] == "1" and float(warning[1]) >= 3 and float(warning[2]) > 1.5
    (said,) = run_processes(1, "-m", "gspo_jax.train", *field_run(tmp_path, data))
    assert f"resuming from iteration {facts['step']}" in said and facts["step"] in (4, 5)
    assert_same_metrics(whole, tmp_path)
    samples = read_samples(tmp_path)
    assert samples == read_samples(whole), "the same prompts in the same batches, and the same responses"
    assert read_samples(tmp_path, "held_out") == read_samples(whole, "held_out")
    assert len(samples) == ITERATIONS and all(len(rows) == 32 for rows in samples.values())
    assert max(row.get("response/older", 0) for row in rows_of(tmp_path)[-2:]) > 0, "some responses are resumed"


def test_an_elastic_pod_goes_on_without_the_process_that_it_lost(whole, data, tmp_path):
    """On half of the devices, with the same global batch: every step is there once, those before as on all of them."""
    root, run = copy_of_launchers(tmp_path / "root"), tmp_path / "run"
    words = command(run, data, **{"checkpoint.every": 1, "mesh.data": -1})
    codes, said = launch_faulty("KILL:updated:5:1", [*words, "--elastic"], count=2, root=root)
    assert codes == [0], said
    assert "process 1 exited with code 137: going on with 1, 4 devices, from the newest checkpoint" in said
    rows = rows_of(run)
    assert rows[-1]["iteration"] == ITERATIONS and len(rows) == len(rows_of(whole))
    before = [row for row in rows if row.get("iteration", 0) <= 2]
    for row, other in zip(before, rows_of(whole), strict=False):
        assert row.get("reward/mean") == other.get("reward/mean")
    assert json.loads((run / "config.json").read_text())["cpu_devices"] == 4


def test_after_a_loss_of_power_a_run_goes_on_from_the_newest_whole_checkpoint_and_a_lost_folder_is_refused(
    whole, data, tmp_path
):
    """The newest checkpoint is half written and a byte of the one before has flipped; the bits become the same."""
    folder = tmp_path / "run"
    words = command(folder, data, **{"checkpoint.every": 1, "checkpoint.keep": 3, "checkpoint.keep_best": True})
    codes, said = run_faulty(f"power:update:{ITERATIONS}", words)
    assert codes == [-signal.SIGKILL], said
    half, flipped, best = steps(folder / "checkpoints")[:3]
    assert max(row["iteration"] for row in read_metrics(folder)[1:]) >= half, "what a checkpoint covers is on the disk"
    files = [
        [path for path in (folder / "checkpoints" / str(step)).rglob("*") if path.is_file()] for step in (half, flipped)
    ]
    for path in sorted(files[0])[::2]:
        os.truncate(path, path.stat().st_size // 2)
    largest = max(files[1], key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 8
    largest.write_bytes(content)
    for name in ("config.json", "saved.json"):  # as a file system leaves them that does not keep its promises
        os.truncate(folder / name, 0)
    (folder / "lease.json").unlink()  # a cut one expires after a minute
    (said,) = run_processes(1, "-m", "gspo_jax.train", *words)
    assert f"checkpoint {half}: " in said and f"checkpoint {flipped}: " in said
    assert f"resuming from iteration {best}" in said
    assert_same_bits(whole, folder, step=ITERATIONS)

    shutil.rmtree(folder / "checkpoints")
    codes, said = run_faulty("TERM:none:1", words)
    assert codes == [exits.MISTAKE]
    assert re.search(
        rf"error: the run in .* had saved checkpoint {ITERATIONS}, but .* holds none; .*--start_over", said
    )
    codes, said = run_faulty("TERM:sample:1", [*words, "--start_over"])
    assert codes == [0] and stopped(folder)["step"] in (None, 0), said


def test_mistakes_are_one_sentence_and_leave_a_run_as_it_is(whole, data, tmp_path):
    """A mistyped field, a mesh that divides nothing, and another model than the run's."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    mistakes = (
        ({"iteratons": 3}, "did you mean 'iterations'"),
        ({"mesh.data": 3}, "mesh data=3, .* needs 12 devices but there are 8; choose sizes whose product is 8"),
        ({"data.prompts_per_batch": 6}, "prompts_per_batch 6 is not divisible by what"),
        ({"model.folder": ROOT / "tests" / "golden" / "counter"}, "counter' here and .*adder' in the run .*--workdir"),
    )
    ended = run_commands([["gspo_jax.train", *command(folder, data, **setting)] for setting, _ in mistakes])
    for (_, says), (code, _, said) in zip(mistakes, ended, strict=True):
        assert code == exits.MISTAKE and re.search(rf"^error: .*{says}", said, re.MULTILINE), said
        assert "Traceback" not in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


WITHOUT_TENSORFLOW = """
import runpy, sys
try:
    runpy.run_module("gspo_jax.train", run_name="__main__")
finally:
    assert "tensorflow" not in sys.modules
"""


def test_a_run_needs_neither_network_nor_tensorflow(tmp_path):
    """In a network namespace without any interface, where users may make one."""
    words = [sys.executable, "-c", WITHOUT_TENSORFLOW, *small_run(tmp_path / "run", tmp_path / "data")]
    alone = ["unshare", "-rn"]
    if shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
        words = [*alone, *words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert max(row["iteration"] for row in rows_of(tmp_path / "run")[1:]) == 1


def test_gradients_that_are_not_finite_end_the_run_and_are_never_saved(data, tmp_path):
    """The run ends after `training.max_skipped` updates in a row, and names a leaf of the gradient."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "tests" / "golden" / "adder", model)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name] = np.full_like(weights[name], 3e38)  # finite, but its products are not
    save_file(weights, model / "model.safetensors")
    settings = {"model.folder": model, "iterations": 6, "training.max_skipped": 3, "checkpoint.every": 1}
    codes, said = run_faulty("TERM:none:1", small_run(tmp_path / "run", data, **settings))
    assert codes == [exits.DIVERGED], said
    assert re.search(r"error: 3 updates in a row were skipped \(.*policy\.|error: 3 updates .*the loss is nan", said), (
        said
    )


def test_a_run_that_diverged_goes_on_as_its_error_says(data, tmp_path):
    """From its newest checkpoint, by the same command with the printed flag."""
    words = small_run(tmp_path / "run", data, **{"checkpoint.every": 1, "iterations": 4, "training.max_skipped": 2})
    codes, said = run_faulty("skip:updated:5", words)
    assert codes == [exits.DIVERGED], said
    (flag,) = re.findall(r"the same command with (--config\.optimizer\.learning_rate=\S+), or begin another run", said)
    (said,) = run_processes(1, "-m", "gspo_jax.train", *words, flag)
    assert "resuming from iteration 2" in said and "optimizer.learning_rate 0.0001 → 5e-05 from update 5 on" in said
    rates = [row["actor/lr"] for row in rows_of(tmp_path / "run")[1:]]
    np.testing.assert_allclose(rates[4] / rates[3], 0.5 * 5 / 4, rtol=1e-5)  # in the warm-up
    assert json.loads((tmp_path / "run" / "changes.json").read_text())["changes"][0]["update"] == 5


WATCHED = """
import sys, time
time.strftime = lambda form: "now"  # as after a clock was set back
from pathlib import Path
import jax
from etils import epath
from gspo_jax.config import base
from gspo_jax.parallel import processes
from gspo_jax.run import phases as phases_lib
from gspo_jax.run.phases import open_phases
from gspo_jax.folder.storage import RunFolder
config = base()
phases_lib.FACTOR, config.processes.deadline_s = 4.0, float(sys.argv[3])
config.processes.grace_s = int(sys.argv[4])
folder = Path(sys.argv[1])
(folder / "local").mkdir(parents=True, exist_ok=True)
processes.start(heartbeat_s=5, start_s=60)
jax.devices()
def stuck(seconds):
    time.sleep(seconds)
with open_phases(config, RunFolder(name="run", local=folder / "local", bucket=epath.Path(folder / "bucket"))) as phases:
    phases.settled = lambda: sys.argv[2] == "settled"
    phases.enter("reward")
    time.sleep(1)
    phases.enter("update")
    phases.enter("reward")
    print("begun", file=sys.stderr)
    stuck(60)
"""


def hang(
    folder: Path, *, settled: bool, floor_s: float, grace_s: int, sent: Sequence[signal.Signals], count: int = 1
) -> tuple[int, float, str]:
    """Let a phase that took a second before hang; return the first process's code, its seconds, and what it said.

    The last process gets the signals `sent`. The run's files are published to `folder / "bucket"`.
    """
    words = [folder, "settled" if settled else "unsaved", floor_s, grace_s]
    with Pod(count, "-c", WATCHED, *map(str, words)) as pod:
        for process in pod.processes:
            assert process.stdout is not None and "begun\n" in iter(process.stdout.readline, "")
        begun, first = time.monotonic(), pod.processes[0]
        for number in sent:
            pod.processes[-1].send_signal(number)
            time.sleep(0.3)
        said, _ = first.communicate(timeout=30)
    return first.returncode, time.monotonic() - begun, said


def test_a_phase_that_hangs_ends_with_its_stacks(tmp_path):
    """After four times the longest that it took before, which here is more than the floor."""
    earlier = tmp_path / "local" / "stacks" / "now-process-0.txt"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("kept")
    code, seconds, said = hang(tmp_path, settled=True, floor_s=2, grace_s=30, sent=())
    assert code == exits.LATE and 4 < seconds < 8, said
    kept, stacks = ((tmp_path / "bucket" / "stacks" / f"now-process-0{more}.txt").read_text() for more in ("", "-2"))
    assert kept == "kept" and "in stuck" in stacks
    assert "now-process-0-2.txt" in said and "phase reward has taken" in said


@pytest.mark.parametrize("count", [1, 2])
def test_a_stop_that_cannot_save_in_time_says_so(count, tmp_path):
    """Although the signal reached another process, and this one hangs."""
    code, seconds, said = hang(tmp_path, settled=False, floor_s=30, grace_s=1, sent=[signal.SIGTERM], count=count)
    assert code == exits.LATE and 1 < seconds < 5, said
    assert "nothing was saved within 1 s of SIGTERM" in said and "phase reward" in said
    assert len(list((tmp_path / "bucket" / "stacks").glob("*-process-0.txt"))) == 1


def test_a_second_ctrl_c_does_not_disturb_a_stop_and_a_third_ends_it(tmp_path):
    """Although a launcher hands each on as a SIGTERM, which says nothing about a person's patience."""
    sent = [signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
    code, seconds, said = hang(tmp_path / "two", settled=False, floor_s=30, grace_s=4, sent=sent)
    assert code == exits.LATE and seconds > 4 and "already stopping, which takes at most 4 s; a third Ctrl-C" in said
    code, seconds, said = hang(tmp_path / "three", settled=False, floor_s=30, grace_s=30, sent=[*sent, signal.SIGINT])
    assert code == exits.SIGNALLED + signal.SIGINT and seconds < 10 and "ended by the third Ctrl-C" in said


def test_a_stop_with_nothing_to_save_does_not_wait_for_a_poll(tmp_path):
    """As in a compilation, which cannot be interrupted: the newest iteration is saved already, or none is done."""
    code, seconds, said = hang(tmp_path, settled=True, floor_s=30, grace_s=30, sent=[signal.SIGTERM])
    assert code == 0 and 2 < seconds < 5, said
    assert stopped(tmp_path / "bucket")["phase"] == "reward" and "stopped: nothing to save yet" in said
    assert not (tmp_path / "bucket" / "stacks").exists()


LEAVING = "tests/leaving.py"
OWN = f"--config=configs/tiny.py:runlocal --config.functions.own={LEAVING}"
RUN = "--workdir=TMP/run"
CONFIG = rf"the config cannot be made, \S*{LEAVING}:10 raises SystemExit: None"
EXITS = rf"\S*{LEAVING}:21, in exits, raises SystemExit\(0\); a command ends once its work is done"
LEAVES = rf"\S*{LEAVING}:27, in leaves, calls os\._exit\(0\); a command ends once its work is done"
ENDS = {
    f"train --config={LEAVING}:exit {RUN}": CONFIG,
    f"train --config={LEAVING}:quit {RUN}": CONFIG,
    f"train --config={LEAVING}:os {RUN}": rf"\S*{LEAVING}:10, in <lambda>, calls os\._exit\(0\)",
    f"train {OWN}:exits --config.objective.name=own {RUN}": EXITS,
    f"train {OWN}:leaves --config.objective.name=own {RUN}": LEAVES,
    f"train {OWN}:reads --config.data.task=own --config.data.data_dir= {RUN}": rf"\S*{LEAVING}:33, in reads, raises",
    f"coldstart {OWN}:exits --config.objective.name=own --workdir=TMP/cold": EXITS,
    f"sweep --config={LEAVING}:exit --runs=TMP/sweep": CONFIG,
    f"score --in=TMP/in.jsonl --out=TMP/out.jsonl --reward={LEAVING}:leaves": LEAVES,
}
"""Commands in which code of the user's ends the process, and what they say; TMP is a folder."""


def test_code_of_the_user_s_that_ends_a_command_is_named_and_the_exit_code_says_so(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "1"}\n')
    ended = run_commands([f"gspo_jax.{command}".replace("TMP", str(tmp_path)).split() for command in ENDS])
    for (command, says), (code, _, said) in zip(ENDS.items(), ended, strict=True):
        assert code == exits.MISTAKE and re.search(f"^error: {says}", said, re.MULTILINE), f"{command}: {code}, {said}"
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "field", "code", "says"),
    [
        ("leaves", "rewards.own=1.0", exits.MISTAKE, r"error: \S*leaving.py:27, in leaves, calls os\._exit\(0\)"),
        ("exits", "environment.name=own", exits.UNSCORED, r"RuntimeError: raised SystemExit\(0\)"),
        ("becomes_another", "rewards.own=1.0", 1, "error: the trainer ended with exit code 0, but its run is neither"),
    ],
)
def test_a_run_that_code_of_the_user_s_ends_is_not_finished(name, field, code, says, data, tmp_path):
    """Through the launcher, which does not believe a code alone."""
    root = copy_of_launchers(tmp_path / "repository")
    words = small_run(tmp_path / "run", data, **{"functions.own": f"{ROOT}/tests/leaving.py:{name}"})
    codes, said = launch_faulty("TERM:none:1", [*words, f"--config.{field}"], count=1, root=root)
    assert codes == [code] and re.search(f"^{says}", said, re.MULTILINE), said
    assert not (tmp_path / "run" / "finished.json").exists()


@pytest.mark.usefixtures("hears_hangups")
def test_ctrl_c_and_a_closed_terminal_save_a_run(whole, data, tmp_path):
    """Typed twice in a real terminal, and then the terminal is closed under the launcher; no bit changes."""
    root, run = copy_of_launchers(tmp_path / "repository"), tmp_path / "run"
    words = ["bash", str(root / "launch" / "local.sh"), *command(run, data)]

    def done() -> int:
        found = read_metrics(run) if (run / "metrics.jsonl").exists() else []
        return max((row.get("iteration", 0) for row in found), default=0)

    for typed in (b"\x03", b""):
        before = done()
        process, terminal = pty.fork()
        if not process:
            os.execvp(words[0], words)
        said, struck, deadline = b"", 0, time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                said += os.read(terminal, 1 << 16) if select.select([terminal], [], [], 0.1)[0] else b""
            except OSError:  # it has ended
                break
            begun = done() > before
            if begun and not typed:
                break
            if begun and struck < 2:
                os.write(terminal, typed)
                struck += 1
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, said.decode(errors="replace")
        assert stopped(run)["step"] > before
        if typed:
            assert b"the run is saved; start it again" in said and b"SIGINT in phase" in said
    run_processes(1, "-m", "gspo_jax.train", *command(run, data))
    assert_same_bits(whole, run, step=ITERATIONS)
