"""One sandbox: bubblewrap around a judge (inside/judge.py) that runs programs.

The judge sees a read-only system without home folders, its own processes and no network. Its programs see even less
(inside/jail.py).
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_jax import installs
from gspo_jax.errors import UserError

_INSIDE = Path(__file__).parent / "inside"
_START = "import sys; sys.path.insert(0, {folder!r}); from inside.judge import main; main()"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_PACKAGES = ("lib*/py*/site-packages", "lib*/py*/dist-packages", "share/python-wheels", "envs", "pkgs")
"""Folders of installed packages, hidden from programs."""
_DEVICES = ("null", "full", "random", "urandom")
"""Visible devices. /dev/zero links to /dev/full: memory mapped from zero is charged to no process."""
_MARGIN_S = 5.0
"""Seconds beyond its limits before a silent judge is killed."""


class BoxFailed(RuntimeError):
    """The judge ended or did not answer in time. The box is unusable."""


@contextlib.contextmanager
def deadline(seconds: float, expire: Callable[[], object]) -> Iterator[None]:
    """Call `expire` in another thread unless the block ends within `seconds`."""
    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_bubblewrap() -> None:
    """Raise UserError if programs cannot be isolated on this machine."""
    if sys.platform != "linux":
        raise UserError("the sandbox for code needs Linux; set scoring.unsafe=True to run code without one")
    if shutil.which("bwrap") is None:
        raise UserError(
            "running the model's programs needs bubblewrap, and there is no program bwrap; run "
            f"{installs.of_system('bubblewrap')}, or set scoring.unsafe=True to run them with this account's rights"
        )


class Box:
    """A judge in a sandbox, for one thread at a time."""

    def __init__(self, *, unsafe: bool = False) -> None:
        """Start the judge. If `unsafe`, it has no sandbox: programs have this account's rights, within limits."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the box
        self._process = subprocess.Popen(
            _command(unsafe=unsafe),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            cwd="/",
            start_new_session=True,
        )
        self._closing = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id of the sandbox."""
        return self._process.pid

    def judge(self, request: Mapping[str, Any], *, within_s: float) -> dict[str, Any]:
        """Return the judge's reply to a request (inside/judge.py).

        Raises:
          BoxFailed: there is no reply.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with deadline(within_s + _MARGIN_S, self._process.kill):
            try:
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
                reply = json.loads(stdout.readline())
            except (OSError, ValueError):
                raise BoxFailed(f"the sandbox has ended, or did not answer in time{self._said()}") from None
        return reply

    def close(self) -> None:
        """Kill the sandbox with all its processes. Idempotent."""
        with self._closing:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""


def _command(*, unsafe: bool) -> list[str]:
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    judge = [python, "-I", "-S", "-c"]
    if unsafe:
        return [*judge, _START.format(folder=str(_INSIDE.parent)), "--unsafe"]
    words = ["bwrap", "--die-with-parent", "--new-session", "--clearenv", "--setenv", "LANG", "C.UTF-8"]
    words += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
    words += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--hostname", "sandbox"]
    if os.geteuid() == 0:
        # The spawner becomes nobody, and the judge kills nobody's processes.
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        words += ["--unshare-user"]
    for place in _SYSTEM:
        if os.path.islink(place):
            words += ["--symlink", os.readlink(place), place]
        elif os.path.exists(place):
            words += ["--ro-bind", place, place]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        words += _bind(sys.base_prefix, sys.base_prefix)
    for folder in _packages():
        words += ["--tmpfs", folder, "--remount-ro", folder]
    words += ["--proc", "/proc", "--tmpfs", "/dev", "--dir", "/dev/shm", "--symlink", "full", "/dev/zero"]
    words += [word for name in _DEVICES for word in ("--dev-bind-try", f"/dev/{name}", f"/dev/{name}")]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    words += ["--symlink", "/proc/self/fd", "/dev/fd"]
    words += ["--tmpfs", "/tmp", *_bind(str(_INSIDE), "/judge/inside")]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [*words, "--", *judge, _START.format(folder="/judge")]


def _packages() -> list[str]:
    prefixes = [Path(sys.base_prefix), Path("/usr"), Path("/usr/local")]
    found = {place.resolve() for prefix in prefixes for pattern in _PACKAGES for place in prefix.glob(pattern)}
    return sorted(str(place) for place in found if place.is_dir() and any(map(place.is_relative_to, prefixes)))


def _bind(place: str, inside: str) -> list[str]:
    above = (["--perms", "0755", "--dir", str(folder)] for folder in reversed(Path(inside).parents[:-1]))
    return [*itertools.chain(*above), "--ro-bind", place, inside]
