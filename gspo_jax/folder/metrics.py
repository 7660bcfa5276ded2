"""Metrics file of a run, `metrics.jsonl`, with names as in docs/metrics.md."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from absl import logging

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.folder.lines import dumps, to_python, write_atomically
from gspo_jax.folder.notes import existing_folder
from gspo_jax.folder.tensorboard import TensorBoard

METRICS_FILE = "metrics.jsonl"


class Mirror(Protocol):
    """A copy of the metrics, off after its first error."""

    name: str

    def write(self, step: int, now: float, metrics: Mapping[str, float]) -> None:
        """Copy a step's numbers."""

    def close(self) -> None:
        """End the copy."""


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Writes `metrics.jsonl`, one JSON object per step, and mirrors its numbers to TensorBoard. For process 0 only.

    No step appears twice, even after a crash: `after_step=N` continues from step N, after atomically removing later
    steps and a half-written last line. `after_step=None` starts from the beginning, and moves existing lines to
    `metrics.jsonl.old`. No step is missing either if `sync` is called before a checkpoint is saved.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], *, after_step: int | None = None, mirrors: Sequence[Mirror] = ()
    ):
        """`mirrors` are copies besides TensorBoard's."""
        self._path = Path(workdir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int = -1
        """-1 if the file is empty."""
        self._names: set[str] = set()  # names on the newest line
        self._recover(after_step)
        self._path.touch()
        self._file = open(self._path, "r+b")  # noqa: SIM115  held until close()
        self._file.seek(0, os.SEEK_END)
        tensorboard = TensorBoard(self._path.parent / storage.TENSORBOARD, first_step=self.last_step + 1)
        self._mirrors: list[Mirror] = [tensorboard, *mirrors]

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write and flush the line of `step`, or append to the newest line.

        Values are numbers or one-dimensional lists of at most MAX_LIST numbers. Names already on the line are ignored,
        so an evaluation repeated after a resume changes nothing. Raises ValueError for a step below the newest.
        """
        step = int(step)
        if step < self.last_step:
            raise ValueError(f"metrics of step {step} come after step {self.last_step}; write steps in order")
        if clash := {"step", "time"} & set(metrics):
            raise ValueError(
                f"metrics must not be named {' or '.join(sorted(clash))}, which every line has; rename them"
            )
        known = self._names if step == self.last_step else set()
        fresh = {name: to_python(name, value) for name, value in metrics.items() if name not in known}
        if not fresh:
            return
        now = time.time()
        if step == self.last_step:
            self._file.seek(-len("}\n"), os.SEEK_CUR)
            line = ", " + dumps(fresh)[1:]
        else:
            line = dumps({"step": step, "time": round(now, 3), **fresh})
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self.last_step, self._names = step, known | set(fresh)
        numbers = _scalars(fresh)
        self._mirror(lambda mirror: mirror.write(step, now, numbers))

    def sync(self) -> None:
        """Return once all lines would survive a power loss. Call it before saving a checkpoint."""
        storage.sync(self._path)
        storage.sync(self._path.parent)

    def close(self) -> None:
        """Close the file and the mirrors. A second call does nothing."""
        self._file.close()
        self._mirror(lambda mirror: mirror.close())
        self._mirrors.clear()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _mirror(self, use: Callable[[Mirror], None]) -> None:
        for mirror in tuple(self._mirrors):
            try:
                use(mirror)
            except Exception as error:  # training continues after any error
                logging.warning("%s is off from here on (%s); %s stays complete", mirror.name, error, METRICS_FILE)
                self._mirrors.remove(mirror)

    def _recover(self, after_step: int | None) -> None:
        if not self._path.exists():
            return
        if after_step is None:
            if self._path.stat().st_size:
                aside = self._path.with_name(METRICS_FILE + ".old")
                logging.warning("%s is from a start that left no checkpoint; kept as %s", self._path, aside.name)
                os.replace(self._path, aside)
            return
        rows, broken = _parse(self._path)
        # The checkpoint's own line can only be cut in later additions, which are written again.
        cut = [row for line in broken if (row := _whole_fields(line.text)) and row["step"] == after_step]
        if damaged := [line.number for line in broken if not line.is_last]:
            logging.warning("%s: dropped lines %s, which are not metrics", self._path, damaged)
        kept = [row for row in rows if row["step"] <= after_step]
        kept += [] if kept and kept[-1]["step"] == after_step else cut[:1]
        write_atomically(self._path, "".join(dumps(row) + "\n" for row in kept))
        if kept:
            self.last_step, self._names = kept[-1]["step"], set(kept[-1])
        if max(self.last_step, 0) < after_step:  # step 0 may have no line: it is only evaluated
            logging.warning(
                "%s ends at step %d, but the run continues from step %d: the steps in between are lost",
                self._path,
                self.last_step,
                after_step,
            )


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, one per step, without a half-written last line. NaN and infinities are None.

    Raises UserError for a missing file or a malformed line.
    """
    path = existing_folder(workdir) / METRICS_FILE
    if not foreign.is_file(path, inside=workdir):
        raise UserError(f"{path} is missing: {workdir} is not a run folder, or its run has not begun to train yet")
    rows, broken = _parse(path)
    for line in broken:
        if not line.is_last:
            raise UserError(f"{path} line {line.number} is not a JSON object with a step; remove that line")
    return rows


class _Broken(NamedTuple):
    """A line without an integer step."""

    number: int
    is_last: bool
    text: bytes


def _parse(path: Path) -> tuple[list[dict[str, Any]], list[_Broken]]:
    lines = path.read_bytes().split(b"\n")
    rows, broken = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _row(line)
        if row is None:
            broken.append(_Broken(number, number == len(lines), line))  # the last line has no line feed
        else:
            rows.append(row)
    return rows, broken


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _whole_fields(line: bytes) -> dict[str, Any] | None:
    row = None
    while row is None and (line := line.rpartition(b",")[0]):  # the comma may be inside a list
        row = _row(line + b"}")
    return row


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    spread = {}
    for name, value in metrics.items():
        spread |= {f"{name}/{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {name: value}
    return spread
