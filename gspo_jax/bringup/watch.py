"""Watching of the worker: each stage has its limit, and one that dies or hangs does not take the others with it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo_jax.bringup import catalogue, stages
from gspo_jax.bringup.stages import Given, Record
from gspo_jax.doctor import Finding
from gspo_jax.errors import UserError
from gspo_jax.parallel.processes import PARENT

START_S = 360.0
"""Seconds until the worker's first stage: devices start, and the other processes join."""
GRACE_S = 15.0
"""Seconds beyond a stage's limit, in which those of other hosts may end too."""
STARTS = 3
"""Attempts to start a worker that comes to no stage."""
SOON_S, PAUSE_S = 60.0, 5.0
"""Seconds within which it has to end to be started again, and until then."""
DONE = ""
"""What a worker says in place of a stage, once all are done."""
LOG = "log.txt"
_LOOK_S = 0.2
_SHOWN = 3
"""Lines of the log in a finding."""


def watch(given: Given, log: Path, show: Callable[[], object]) -> int | None:
    """Run every stage without a record to its end, its death or its limit. Return the exit code.

    In the first process each leaves a record, `show` is called as they come, and the code is None: it has the records.

    Raises:
      UserError: another process than the first came to no stage.
    """
    again = ["again"]  # stages that failed before are tried again, once
    starts, begun = STARTS, False
    while True:
        since = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gspo_jax-first-") as folder:
            status = Path(folder) / "status.json"
            why = _attend([given.wire, str(status), *again], status, log, show)
            seen = _told(status)
        number, stage = seen.get("number", int(os.environ.get("JAX_PROCESS_ID") or 0)), seen.get("stage")
        if why is None or stage == DONE:
            return int(bool(seen.get("failed"))) if number else None
        why = f"{why}: {_last_lines(log)}"
        if stage is None:
            starts -= 1
            if starts and time.monotonic() - since < SOON_S:
                time.sleep(PAUSE_S)  # the devices may still be held by a process that has just ended
                continue
            if number:
                raise UserError(f"no stage could begin: {why}; see {log}")
        else:
            starts, begun, again = STARTS, True, []
        if number == 0:
            left = [one.name for one in catalogue.STAGES if not begun or stages.read(given.out, one.name) is None]
            for name in [stage] if stage in left else left[:1]:
                _record(given, name, seen, why)
        if stage is None:
            return None


def _attend(words: list[str], status: Path, log: Path, show: Callable[[], object]) -> str | None:
    """Start a worker and wait for it. Return why it did not come to its end, or None."""
    command = [sys.executable, "-m", "gspo_jax.bringup.worker", *words]
    environment = os.environ | {PARENT: str(os.getpid())}
    with open(log, "ab") as file, subprocess.Popen(command, env=environment, stderr=file) as worker:
        begun, last = time.time(), {}
        try:
            while (code := worker.poll()) is None:
                if (told := _told(status)) != last and told.get("number") == 0:
                    show()
                last = told
                limit = told.get("limit", START_S)
                if time.time() > told.get("begun", begun) + limit + GRACE_S:
                    return f"it took more than its {limit:.0f} s and was ended"
                time.sleep(_LOOK_S)
        finally:
            worker.kill()
    if code == 0:
        return None
    return f"the process was ended by signal {-code}" if code < 0 else f"the process ended with exit code {code}"


def _told(status: Path) -> dict[str, Any]:
    try:
        return json.loads(status.read_text())
    except OSError:
        return {}


def _record(given: Given, name: str, seen: dict[str, Any], why: str) -> None:
    remedy = f"See {LOG} beside this page; the same command goes on with the stages that are left."
    found = [Finding(name, stages.FAILED, why, remedy)]
    Record(name, time.time() - seen.get("begun", time.time()), found, {}, {}).write(given.out)


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_SHOWN:])[:400] or "it said nothing"
