"""What the shell gives a command: closed streams, readers that leave, low limits, no home folder."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from gspo_jax import cli, shell
from gspo_jax.data import tasks
from gspo_jax.errors import UserError
from gspo_jax.limited import quoted
from gspo_jax.parallel import compilation
from tests.pods import ROOT, rows_of, small_run


def test_a_stream_goes_on_once_its_reader_is_gone():
    read, write = os.pipe()
    stream = shell.Lasting(os.fdopen(write, "w", buffering=1))
    os.close(read)
    assert stream.write("one\n" * 100_000) == 400_000
    stream.flush()
    print("two", file=stream, flush=True)
    assert not stream.isatty()
    stream.close()


def test_other_errors_of_a_stream_are_raised():
    stream = shell.Lasting(open("/dev/full", "w"))  # noqa: SIM115
    stream.write("x")
    with pytest.raises(OSError, match="No space left"):
        stream.flush()


WARNS = """
import logging
import orbax.checkpoint  # whose import gives the root logger a handler
import absl.logging
from gspo_jax import cli
from gspo_jax.config import base
assert logging.root.handlers
cli.run(lambda config: absl.logging.warning("once"), "doctor", default=base())
"""


@pytest.mark.faults
def test_a_warning_is_printed_once():
    done = subprocess.run([sys.executable, "-c", WARNS], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "warning: once\n")


@pytest.mark.parametrize(
    ("kind", "says"),
    [("NOFILE", r"at most 64 open files are .*\(ulimit -n 256\)$"), ("NPROC", r"at most 64 processes .*ulimit -u 256")],
)
def test_limits_that_are_too_low_are_one_sentence(monkeypatch, kind, says):
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    low = getattr(resource, f"RLIMIT_{kind}")
    monkeypatch.setattr(resource, "getrlimit", lambda of: (32, 64 if of == low else 4096))
    with pytest.raises(UserError, match=says):
        shell.raise_limits()


def test_soft_limits_are_raised(monkeypatch):
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append((kind, limits)))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (32, 4096))
    shell.raise_limits()
    assert (resource.RLIMIT_NOFILE, (4096, 4096)) in raised


@pytest.fixture
def homeless(monkeypatch):
    """An account that is not in the table of users, without HOME."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


def test_an_account_without_a_home_has_no_cache(homeless):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert compilation.use_cache() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_an_account_without_a_home_says_where_data_goes(homeless):
    with pytest.raises(UserError, match=r"account has none \(HOME\); set data.data_dir$"):
        tasks.load(task="arithmetic", split="train")


@pytest.mark.parametrize("check", [cli.check_facts_file, lambda file, flag: cli.check_output_folder(file, flag=flag)])
def test_a_tilde_that_the_shell_has_left_is_one_sentence(check):
    with pytest.raises(
        UserError, match=rf"^--out=~/x: the shell has left ~ .*; write --out={os.path.expanduser('~')}/x"
    ):
        check("~/x", flag="out")


def test_errors_are_quoted_on_one_line_of_200_characters():
    assert quoted(ValueError("a\n  b")) == "a b"
    assert len(quoted(ValueError("x" * 16_000))) == 200


KEPT = "import sys, os; from gspo_jax import shell; shell.keep_streams(); print('said'); sys.stdout.flush(); "
KEPT += "file = open(sys.argv[1], 'w'); os.write(1, b'printed by a library'); os.write(2, b'too'); file.write('mine')"


@pytest.mark.faults
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_never_takes_the_place_of_a_closed_stream(tmp_path, closed):
    words = f'exec "$0" -c "$1" "$2" {closed}'
    done = subprocess.run(["bash", "-c", words, sys.executable, KEPT, tmp_path / "file"], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.faults
@pytest.mark.parametrize("words", ['ulimit -Sn 64; "$@" >&- 2>&- <&-', '"$@" | head -n 1'])
def test_a_run_needs_no_reader(tmp_path, data, words):
    flags = small_run(tmp_path / "run", data)
    command = ["bash", "-o", "pipefail", "-c", words, "bash", sys.executable, "-m", "gspo_jax.train", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(rows_of(Path(tmp_path / "run"))) > 1
