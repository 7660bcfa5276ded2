"""A run folder's files for people and programs: metrics.jsonl, tb/, samples/, config.json.

`metrics.jsonl` is the record; everything else can be lost. Only process 0 may hold the writers. Names are explained in
docs/metrics.md. Nothing here draws (see report.py) and nothing here shows progress (see progress.py).
"""

import difflib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from gspo_jax.types import UserError

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
MAX_LIST = 1024
"""Longest list a metric may be: one number per layer or expert, never one per token."""
_TB_FLUSH_S = 5.0


class MetricsWriter:
    """Writes `metrics.jsonl`, one JSON object per step, and mirrors its numbers to TensorBoard under `tb/`.

    No step is there twice, also after a crash: `after_step=N` says that the run continues from step N,
    so lines of later steps and a half-written last line are removed first, atomically. `after_step=None` is a run that
    starts at the beginning; lines that an earlier start left there are set aside as `metrics.jsonl.old`. Write step N
    before the checkpoint of step N is committed, and no step is missing either.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, after_step: int | None = None):
        self._path = Path(workdir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int = -1
        """Newest step in the file, -1 when it is empty."""
        self._names: set[str] = set()  # of the newest step
        self._recover(after_step)
        self._path.touch()
        self._file = open(self._path, "r+b")  # noqa: SIM115  held until close()
        self._file.seek(0, os.SEEK_END)
        self._tensorboard = _TensorBoard(self._path.parent / "tb", first_step=self.last_step + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the line of `step` and flushes it; the newest step's line grows when it is written again.

        Values are numbers or one-dimensional lists of at most MAX_LIST numbers, of Python, NumPy or jax; NaN and
        infinities become null. A line takes only names that it lacks: an evaluation repeated after a resume changes
        nothing. A step below the newest one is a ValueError.
        """
        step = int(step)
        if step < self.last_step:
            raise ValueError(f"metrics of step {step} come after step {self.last_step}; write them in order")
        if clash := {"step", "time"} & set(metrics):
            raise ValueError(f"metrics must not be named {' or '.join(sorted(clash))}: every line has those already")
        known = self._names if step == self.last_step else set()
        fresh = {name: _plain(name, value) for name, value in metrics.items() if name not in known}
        if not fresh:
            return
        now = time.time()
        if step == self.last_step:
            self._file.seek(-len("}\n"), os.SEEK_CUR)
            line = ", " + _dumps(fresh)[1:]
        else:
            line = _dumps({"step": step, "time": round(now, 3), **fresh})
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self.last_step, self._names = step, known | set(fresh)
        self._tensorboard.write(step, now, fresh)

    def close(self) -> None:
        """Closes both files; a second call does nothing."""
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _recover(self, after_step: int | None) -> None:
        if not self._path.exists():
            return
        if after_step is None:
            if self._path.stat().st_size:
                aside = self._path.with_name(METRICS_FILE + ".old")
                logging.warning("%s is of a run that left no checkpoint; kept as %s", self._path, aside.name)
                os.replace(self._path, aside)
            return
        rows, broken = _parse(self._path)
        if damaged := [number for number, is_last in broken if not is_last]:
            logging.warning("%s: dropped lines %s, which are no metrics", self._path, damaged)
        kept = [row for row in rows if row["step"] <= after_step]
        _replace(self._path, "".join(_dumps(row) + "\n" for row in kept))
        if kept:
            self.last_step, self._names = kept[-1]["step"], set(kept[-1])
        if self.last_step < after_step:
            logging.warning(
                "%s ends at step %d but the run continues from step %d: the steps between are lost",
                self._path,
                self.last_step,
                after_step,
            )


class _TensorBoard:
    """Scalars to one event file, written in the caller's thread.

    tensorboardX's own SummaryWriter hands events to a thread through a bounded queue: when the disk fails the thread
    dies, the queue fills and the next write waits for ever. Here a failure is an exception, reported once and let go.
    """

    def __init__(self, folder: Path, *, first_step: int):
        self._writer: EventsWriter | None = None
        self._flushed = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.time_ns() % 10**9}")
            # TensorBoard drops what earlier event files say about this step and later ones.
            start = Event(step=first_step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
            self._writer.write_event(start)
        except Exception as error:
            self._give_up(error)

    def write(self, step: int, now: float, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in _scalars(metrics)]
            self._writer.write_event(Event(step=step, wall_time=now, summary=Summary(value=values)))
            if now - self._flushed >= _TB_FLUSH_S:
                self._writer.flush()
                self._flushed = now
        except Exception as error:  # whatever the back-end raises, training goes on
            self._give_up(error)

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except Exception as error:
            self._give_up(error)
        self._writer = None

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        logging.warning("TensorBoard is off from here (%s); %s stays complete", error, METRICS_FILE)


class SamplesWriter:
    """Writes sampled completions, one file per step: `samples/step_000010.jsonl`, one JSON object per completion.

    Files appear whole or not at all. `after_step` as in MetricsWriter: files of later steps are removed.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, after_step: int | None = None):
        self._folder = Path(workdir) / "samples"
        self._folder.mkdir(parents=True, exist_ok=True)
        for step, path in _sample_files(self._folder):
            if step > (-1 if after_step is None else after_step):
                path.unlink()

    def write(
        self,
        step: int,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        rewards: Sequence[Any],
        answers: Sequence[str],
    ) -> Path:
        """Writes the completions of one step, replacing what was there for it; the four sequences run in parallel."""
        lines = [
            _dumps({"prompt": prompt, "completion": completion, "reward": _plain("reward", reward), "answer": answer})
            for prompt, completion, reward, answer in zip(prompts, completions, rewards, answers, strict=True)
        ]
        path = self._folder / f"step_{step:06d}.jsonl"
        _replace(path, "".join(line + "\n" for line in lines))
        return path


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the rows of `metrics.jsonl`, one per step; a half-written last line is left out.

    NaN and infinities come back as None. Raises UserError where the folder or the file is missing or a line is broken.
    """
    path = existing_folder(workdir) / METRICS_FILE
    if not path.exists():
        raise UserError(f"{path} is missing: {workdir} is not the folder of a run, or the run has not begun to train")
    rows, broken = _parse(path)
    for number, is_last in broken:
        if not is_last:
            raise UserError(f"{path} line {number} is not a JSON object with a step; remove that line")
    return rows


def read_samples(workdir: str | os.PathLike[str]) -> dict[int, list[dict[str, Any]]]:
    """Returns the sampled completions by step, an empty dict where there are none."""
    folder = Path(workdir) / "samples"
    files = _sample_files(folder) if folder.is_dir() else []
    return {step: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for step, path in files}


def write_config(workdir: str | os.PathLike[str], config: Mapping[str, Any], *, command: str) -> None:
    """Writes `config.json`: the config's sections, and the command that started the run under `command`."""
    if "command" in config:
        raise ValueError("a config must not have a field named command: config.json keeps the run's command there")
    Path(workdir).mkdir(parents=True, exist_ok=True)
    _replace(Path(workdir) / CONFIG_FILE, json.dumps({"command": command, **config}, indent=2, default=list) + "\n")


def read_config(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns what `write_config` wrote, `command` included; None where there is no `config.json`."""
    path = Path(workdir) / CONFIG_FILE
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); restore it or delete it") from None


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns the folder as a path; where there is none, raises UserError with the nearest name beside it."""
    path = Path(folder)
    if not path.is_dir():
        beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the --workdir of a run"
        raise UserError(f"there is no folder {folder}{hint}")
    return path


def _parse(path: Path) -> tuple[list[dict[str, Any]], list[tuple[int, bool]]]:
    """Returns the good rows, and (line number, is it the last) of each line that is no object with an integer step."""
    lines = path.read_bytes().split(b"\n")
    rows, broken = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            broken.append((number, number == len(lines)))  # the last line is the one without a line feed
    return rows, broken


def _plain(name: str, value: Any) -> float | int | list[Any]:
    """Returns a number or list of numbers of Python; NaN stays for `_dumps`."""
    array = np.asarray(value)
    if array.ndim > 1 or array.size > MAX_LIST:
        raise ValueError(f"metric {name} has shape {array.shape}; log a number or a list of at most {MAX_LIST}")
    if array.dtype.kind in "OUSMm":
        raise ValueError(f"metric {name} is {value!r}; log a number or a list of numbers")
    if array.dtype.kind in "bui":
        numbers = [int(x) for x in array.reshape(-1)]
    elif array.dtype == np.float32:
        # The shortest decimal that reads back as the same float32: 0.1, not 0.10000000149011612.
        numbers = [float(str(x)) for x in array.reshape(-1)]
    else:
        numbers = [float(x) for x in array.reshape(-1)]
    return numbers if array.ndim else numbers[0]


def _dumps(row: Mapping[str, Any]) -> str:
    """Strict JSON on one line, in ASCII (a completion may hold any character): NaN and infinities as null."""

    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(x) for x in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: finite(value) for name, value in row.items()}, allow_nan=False)


def _scalars(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Spreads lists as name/0, name/1 …"""
    spread = []
    for name, value in metrics.items():
        spread += [(f"{name}/{i}", x) for i, x in enumerate(value)] if isinstance(value, list) else [(name, value)]
    return spread


def _sample_files(folder: Path) -> list[tuple[int, Path]]:
    files = [(path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.jsonl")]
    return sorted((int(step), path) for step, path in files if step.isdigit())


def _replace(path: Path, text: str) -> None:
    """Writes a file whole: a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
