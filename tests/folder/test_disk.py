"""Disks that are full, read-only or not there: one sentence with path and remedy, before any work where possible."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_jax import cli
from gspo_jax.errors import UserError, fault
from gspo_jax.evaluate import evaluate_folder
from gspo_jax.folder.storage import check_folder, open_folder
from gspo_jax.train import train

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs/tiny.py:runlocal")


def on_tmpfs(folder: Path, options: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a namespace in which `folder` is a tmpfs of its own; skip where that is not allowed."""
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"', options]
    try:
        allowed = subprocess.run([*mount, str(folder), "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this machine lets users mount no tmpfs")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*mount, str(folder), *command], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def chained(outer: Exception, *, cause: Exception | None = None, context: Exception | None = None) -> Exception:
    outer.__cause__, outer.__context__ = cause, context
    return outer


FULL, GONE = OSError(errno.ENOSPC, "full", "runs/a"), FileNotFoundError(errno.ENOENT, "gone", "runs/b")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FULL, "runs/a: No space left on device; make room on that disk, for data and for inodes"),
        (OSError(errno.ENOSPC, "full"), "a file, probably in runs: No space left on device; make room"),
        (OSError(errno.EDQUOT, "full", "runs/a"), "runs/a: Disk quota exceeded; make room within the quota"),
        (OSError(errno.EROFS, "no", "runs/a"), "runs/a: Read-only file system; make that file system writable"),
        (OSError(errno.EIO, "no", "runs/a"), "runs/a: Input/output error; check that disk"),
        (PermissionError(errno.EACCES, "no", "runs/a"), "runs/a: Permission denied; give this account access"),
        (GONE, "runs/b: No such file or directory; check that it exists"),
        (chained(RuntimeError("save"), cause=GONE), "runs/b: No such"),
        (ExceptionGroup("two", [KeyError("a"), chained(ValueError("b"), cause=FULL)]), "runs/a: No space"),
        (chained(KeyError("a"), context=FULL), "runs/a: No space"),
        (chained(KeyError("a"), context=GONE), None),  # a file that was looked for and handled is not the cause
        (
            Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
            "a file, probably in runs",
        ),
        (KeyError("a"), None),
        (ConnectionResetError(errno.ECONNRESET, "reset"), None),
    ],
)
def test_the_fault_behind_an_error(error, says):
    found = fault(error, "runs")
    assert found is None if says is None else found.startswith(says)


def test_a_disk_that_fills_up_at_the_end_names_the_file(capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with pytest.raises(SystemExit) as ended:
        cli._guarded(lambda: cli.write_facts("/dev/full", {"loss": 1.0}))
    assert ended.value.code == 1
    says = capsys.readouterr().err
    assert says.startswith("error: /dev/full: No space left on device; make room") and says.count("\n") == 1


def test_an_error_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli._guarded(lambda: 1 / 0)


@pytest.mark.parametrize("below", ["", "run", "a/b/run"])
def test_a_run_folder_that_is_a_file_is_refused_before_any_work(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    config = cli.load_config(TINY)
    config.data.data_dir = str(tmp_path / "data")
    with pytest.raises(UserError, match=r"run folder, because .*file is not a folder; give another --workdir"):
        train(config, tmp_path / "file" / below)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_looking_at_a_run_folder_leaves_nothing_behind(tmp_path):
    with open_folder(tmp_path / "a" / "run"):
        assert not any(tmp_path.iterdir())
    with pytest.raises(UserError):
        evaluate_folder(cli.load_config(TINY), tmp_path / "none")
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        evaluate_folder(cli.load_config(TINY), tmp_path / "file" / "run")
    assert "cannot be a run folder" not in str(error.value), "evaluation asks for no right to write"


@pytest.mark.faults
def test_a_run_folder_on_a_disk_that_cannot_take_it(tmp_path):
    """A real file system that is full, then read-only: `check_folder` says so and removes what it tried to write."""
    file, disk = tmp_path / "look.py", tmp_path / "disk"
    file.write_text(LOOK)
    disk.mkdir()
    done = on_tmpfs(disk, "size=1m", [sys.executable, str(file), str(disk)])
    full, read_only, left = done.stdout.splitlines()
    assert full == f"OSError [Errno 28] No space left on device: '{disk}'", done.stderr
    assert read_only.startswith(
        f"UserError {disk}/a/run cannot be a run folder, because {disk} cannot be written (Read-"
    )
    assert left == "['big']"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\); give another --workdir, or this"):
        check_folder(tmp_path / "run")


@pytest.mark.parametrize(
    ("file", "says"),
    [("", "is a folder; give a file in it"), ("file/facts.json", "cannot be written, because .*file is not a folder")],
)
def test_facts_that_could_not_be_written_are_refused_before_any_work(tmp_path, file, says):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=says):
        cli.check_facts_file(str(tmp_path / file))
    cli.check_facts_file(None)
    cli.check_facts_file(str(tmp_path / "new" / "facts.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


LOOK = """
import os, subprocess, sys
from pathlib import Path
from gspo_jax.folder.storage import check_folder

def look():
    try:
        check_folder(disk / "a" / "run")
    except Exception as error:
        print(type(error).__name__, error)

disk = Path(sys.argv[1])
try:
    (disk / "big").write_bytes(bytes(2**21))
except OSError:
    look()
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
look()
print(os.listdir(disk))
"""

SAVE = """
import subprocess
import jax, jax.numpy as jnp
from absl import flags
from gspo_jax import cli
from gspo_jax.folder import storage
from gspo_jax.config import base
from gspo_jax.training.checkpoint import Checkpointer, restore, steps

def shell(line):
    subprocess.run(["sh", "-c", line], cwd=flags.FLAGS.workdir, capture_output=True)

def main(config):
    folder = storage.find(flags.FLAGS.workdir) / "checkpoints"
    checkpointer = Checkpointer(folder, keep=2)
    checkpointer.save(1, {"w": jnp.ones(4)}, {})
    checkpointer.wait()
    shell(flags.FLAGS.breaks)
    try:
        checkpointer.save(2, {"w": jax.random.normal(jax.random.key(0), (2**21,))}, {})
        checkpointer.save(3, {"w": jnp.ones(4)}, {})
    finally:
        shell(flags.FLAGS.mends)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = {"w": jax.ShapeDtypeStruct((4,), "float32")}
        found = restore(folder, shapes, {"w": here}, check=lambda run: None)
        again = Checkpointer(folder, keep=2)
        again.save(2, found.state, {})
        again.close()
        print(found.step, steps(folder))

for name in ("breaks", "mends"):
    flags.DEFINE_string(name, "", "")
cli.run(main, "doctor", default=base())
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("breaks", "mends", "says"),
    [
        ("", "", "No space left on device; make room on that disk, for data and for inodes"),
        (
            "while true >filler$i; do i=$((i + 1)); done",
            "rm filler*",
            "No space left on device; make room on that disk, for data and for inodes",
        ),
        (
            "mount -o remount,ro .",
            "mount -o remount,rw .",
            "Read-only file system; make that file system writable, or use another",
        ),
    ],
    ids=["too small", "no inodes", "read-only"],
)
def test_a_disk_that_cannot_take_a_checkpoint(breaks, mends, says, tmp_path):
    """By the next save the command ends with one sentence, also though Orbax reports no OSError.

    The previous checkpoint is whole, and a run can go on from it.
    """
    file = tmp_path / "save.py"
    file.write_text(SAVE)
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = [f"--workdir={disk}", f"--breaks={breaks}", f"--mends={mends}"]
    done = on_tmpfs(disk, "size=4m,nr_inodes=500", [sys.executable, str(file), *flags])
    assert done.returncode == 1, done.stderr
    assert done.stdout == "1 [2, 1]\n", done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    # The system names the file when it cannot be opened, and does not when a write into it fails.
    place = rf"{disk}/checkpoints/2\.orbax\S*|a file, probably in {disk}"
    assert re.match(rf"error: ({place}): {says}", last), last
    assert "Traceback" not in done.stderr, done.stderr
