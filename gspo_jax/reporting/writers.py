"""Write and read the files of a run folder: metrics.jsonl, tb/, samples/, config.json.

`metrics.jsonl` is the record; everything else is expendable. Only process 0 may open the writers. docs/metrics.md
explains the metric names. Pictures are drawn by report.py, progress is shown by progress.py.
"""

import difflib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from absl import logging
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from gspo_jax import foreign, storage
from gspo_jax.errors import UserError
from gspo_jax.versions import versions

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
STOPPED_FILE = "stopped.json"
FINISHED_FILE = "finished.json"
SAVED_FILE = "saved.json"
MAX_LIST = 1024
"""Maximum length of a list metric, which has one number per layer or expert, never one per token."""
_TB_FLUSH_S = 5.0


class MetricsWriter:
    """Writes `metrics.jsonl`, one JSON object per step, and mirrors its numbers to TensorBoard under `tb/`.

    No step appears twice, even after a crash: with `after_step=N` the run continues from step N, and lines of later
    steps and a half-written last line are removed first, atomically. With `after_step=None` the run starts from the
    beginning, and lines of an earlier start are moved to `metrics.jsonl.old`. If step N is written, and `sync` called,
    before the checkpoint of step N is saved, no step is missing either.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], *, after_step: int | None = None, mirrors: Sequence["Mirror"] = ()
    ):
        """`mirrors` get every number too, beside TensorBoard; whoever opened them closes them."""
        self._path = Path(workdir) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int = -1
        """Newest step in the file, -1 if it is empty."""
        self._names: set[str] = set()  # metric names on the newest step's line
        self._recover(after_step)
        self._path.touch()
        self._file = open(self._path, "r+b")  # noqa: SIM115  held until close()
        self._file.seek(0, os.SEEK_END)
        self._tensorboard = _TensorBoard(self._path.parent / storage.TENSORBOARD, first_step=self.last_step + 1)
        self._mirrors: list[Mirror] = [self._tensorboard, *mirrors]

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write and flush the line of `step`; writing the newest step again appends to its line.

        Values are numbers or one-dimensional lists of at most MAX_LIST numbers, from Python, NumPy or jax; NaN and
        infinities become null. Names that the line already has are ignored, so an evaluation repeated after a resume
        changes nothing. Raises ValueError for a step below the newest one.
        """
        step = int(step)
        if step < self.last_step:
            raise ValueError(f"metrics of step {step} come after step {self.last_step}; write steps in order")
        if clash := {"step", "time"} & set(metrics):
            raise ValueError(
                f"metrics must not be named {' or '.join(sorted(clash))}, which every line has; rename them"
            )
        known = self._names if step == self.last_step else set()
        fresh = {name: _to_python(name, value) for name, value in metrics.items() if name not in known}
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
        numbers = _scalars(fresh)
        for mirror in self._mirrors:
            mirror.write(step, now, numbers)

    def sync(self) -> None:
        """Return once all lines written so far would survive a loss of power; call it before their checkpoint."""
        storage.sync(self._path)
        storage.sync(self._path.parent)

    def close(self) -> None:
        """Close metrics.jsonl and the TensorBoard file; a second call does nothing."""
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
                logging.warning("%s is from a start that left no checkpoint; kept as %s", self._path, aside.name)
                os.replace(self._path, aside)
            return
        rows, broken = _parse(self._path)
        # A line that the checkpoint covers can only be cut in what was added to it later, and is added again.
        cut = [row for line in broken if (row := _whole_fields(line.text)) and row["step"] == after_step]
        if damaged := [line.number for line in broken if not line.is_last]:
            logging.warning("%s: dropped lines %s, which are not metrics", self._path, damaged)
        kept = [row for row in rows if row["step"] <= after_step]
        kept += [] if kept and kept[-1]["step"] == after_step else cut[:1]
        _write_atomically(self._path, "".join(_dumps(row) + "\n" for row in kept))
        if kept:
            self.last_step, self._names = kept[-1]["step"], set(kept[-1])
        if self.last_step < after_step:
            logging.warning(
                "%s ends at step %d, but the run continues from step %d: the steps in between are lost",
                self._path,
                self.last_step,
                after_step,
            )


class Mirror(Protocol):
    """A copy of the metrics elsewhere, which never ends a run."""

    def write(self, step: int, now: float, metrics: Mapping[str, float]) -> None:
        """Copy numbers of a step, written at the time `now`."""


class _TensorBoard:
    """Writes scalars to one event file, in the caller's thread.

    tensorboardX's own SummaryWriter passes events to a thread through a bounded queue: if the disk fails, the thread
    dies, the queue fills up and the next write blocks forever. Here a failure is logged once and TensorBoard turned
    off.
    """

    def __init__(self, folder: Path, *, first_step: int):
        self._writer: EventsWriter | None = None
        self._flushed = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, and the clock in them may have been set back.
            start = f"events.start-{len(list(folder.iterdir())):04}"
            self._writer = writer = EventsWriter(str(folder / start), f".{os.getpid()}.{time.time_ns() % 10**9}")
            # Makes TensorBoard discard events of this and later steps in earlier files.
            begin = Event(step=first_step, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
            writer.write_event(begin)
        except Exception as error:
            self._disable(error)

    def write(self, step: int, now: float, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._writer.write_event(Event(step=step, wall_time=now, summary=Summary(value=values)))
            if time.monotonic() - self._flushed >= _TB_FLUSH_S:
                self._writer.flush()
                self._flushed = time.monotonic()
        except Exception as error:  # whatever the backend raises, training continues
            self._disable(error)

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except Exception as error:
            self._disable(error)
        self._writer = None

    def _disable(self, error: Exception) -> None:
        self._writer = None
        logging.warning("TensorBoard output is off from here on (%s); %s stays complete", error, METRICS_FILE)


class SamplesWriter:
    """Writes sampled completions, one file per step, `samples/step_000010.jsonl`, with one JSON object per completion.

    Files are written atomically. Files of steps after `after_step` (see MetricsWriter) are removed.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, after_step: int | None = None):
        self._folder = Path(workdir) / storage.SAMPLES
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
        special: Sequence[str],
    ) -> Path:
        """Write the completions of one step, replacing its file; each sequence has one entry per completion.

        But for `special`: the texts of the tokenizer's special tokens. Each line lists those in its prompt and its
        completion, so that readers can show them as tokens.
        """
        lines = [
            _dumps(
                {
                    "prompt": prompt,
                    "completion": completion,
                    "reward": _to_python("reward", reward),
                    "answer": answer,
                    "special": [token for token in special if token in prompt or token in completion],
                }
            )
            for prompt, completion, reward, answer in zip(prompts, completions, rewards, answers, strict=True)
        ]
        path = self._folder / f"step_{step:06d}.jsonl"
        _write_atomically(path, "".join(line + "\n" for line in lines))
        return path


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, one per step, without a half-written last line.

    NaN and infinities come back as None. Raises UserError if the folder or the file is missing or a line is malformed.
    """
    path = existing_folder(workdir) / METRICS_FILE
    if not foreign.is_file(path, inside=workdir):
        raise UserError(f"{path} is missing: {workdir} is not a run folder, or its run has not begun to train yet")
    rows, broken = _parse(path)
    for line in broken:
        if not line.is_last:
            raise UserError(f"{path} line {line.number} is not a JSON object with a step; remove that line")
    return rows


def read_samples(workdir: str | os.PathLike[str]) -> dict[int, list[dict[str, Any]]]:
    """Return the sampled completions by step; an empty dict without any. Raises UserError for a malformed file."""
    folder = Path(workdir) / storage.SAMPLES
    samples = {}
    for step, path in _sample_files(folder) if folder.is_dir() else ():
        foreign.is_file(path, inside=workdir)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # a text may have other ends of lines inside
            samples[step] = [json.loads(line) for line in lines if line]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not valid JSON line by line ({error!s:.200}); delete it") from error
        if not all(_is_sample(row) for row in samples[step]):
            raise UserError(f"{path} has a line without prompt, completion, answer and reward; delete it")
    return samples


def _is_sample(row: Any) -> bool:
    """Return whether a row is as SamplesWriter writes it."""
    if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("prompt", "completion", "answer")):
        return False
    special = row.get("special", [])  # files of version 0.1 have none
    listed = isinstance(special, list) and all(isinstance(token, str) and token for token in special)
    return listed and "reward" in row and isinstance(row["reward"], (int, float, type(None)))


def write_config(workdir: str | os.PathLike[str], config: Mapping[str, Any], *, command: str) -> None:
    """Write `config.json`: the config's sections, `versions`, and the `command` that started the run, if any."""
    start = {"command": command, "versions": versions()}
    if both := start.keys() & config.keys():
        raise ValueError(f"a config must not have a field named {min(both)}: config.json has the run's there")
    Path(workdir).mkdir(parents=True, exist_ok=True)
    _write_atomically(Path(workdir) / CONFIG_FILE, json.dumps(start | dict(config), indent=2, default=list) + "\n")


def write_stopped(folder: Path, *, step: int | None, phase: str | None, seconds: float) -> None:
    """Write `stopped.json`, which tells a stopped run from a finished one: both exit with code 0.

    Args:
      folder: the run's, or one of its launcher's.
      step: checkpoint step that the run resumes from; None for the beginning.
      phase: phase in which the run was told to stop.
      seconds: from then until everything was saved.
    """
    facts = {"step": step, "phase": phase, "seconds": round(seconds, 3)}
    _write_atomically(folder / STOPPED_FILE, json.dumps(facts) + "\n")


def write_finished(folder: Path, *, step: int | None) -> None:
    """Write `finished.json`, without which exit code 0 does not say that the run in a folder has done its iterations.

    Args:
      folder: the run's, or one of its launcher's.
      step: its last checkpoint step.
    """
    _write_atomically(folder / FINISHED_FILE, json.dumps({"step": step}) + "\n")


def clear_end(workdir: str | os.PathLike[str]) -> None:
    """Remove `stopped.json` and `finished.json`: the run goes on."""
    for name in (STOPPED_FILE, FINISHED_FILE):
        (Path(workdir) / name).unlink(missing_ok=True)


def write_saved(workdir: str | os.PathLike[str], step: int) -> None:
    """Write `saved.json`: the run has a checkpoint of this step, so that one without any has lost it."""
    _write_atomically(Path(workdir) / SAVED_FILE, json.dumps({"step": step}) + "\n")


def read_saved(workdir: str | os.PathLike[str]) -> int | None:
    """Return the step in `saved.json`; None without that file. Raises UserError if it is damaged."""
    path = Path(workdir) / SAVED_FILE
    if not foreign.is_file(path, inside=workdir):
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is damaged; delete it if the run's checkpoints are there") from None


def read_config(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the contents of `config.json`, `command` and `versions` included; None without that file."""
    path = Path(workdir) / CONFIG_FILE
    if not foreign.is_file(path, inside=workdir):
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore it or delete it") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__}, not an object; restore it or delete it")
    return content


def fields_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the contents of `config.json`, without the command and the versions that stand beside it."""
    return {name: value for name, value in content.items() if name not in ("command", "versions")}


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """Return `folder` as a path; raises UserError naming the most similar folder if it does not exist."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UserError(f"{folder} is not a folder; give the --workdir of a run")
    if not path.is_dir():
        beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the --workdir of a run"
        raise UserError(f"folder {folder} does not exist{hint}")
    return path


class _Broken(NamedTuple):
    """A line that is not an object with an integer step."""

    number: int
    is_last: bool
    text: bytes


def _parse(path: Path) -> tuple[list[dict[str, Any]], list[_Broken]]:
    """Return the valid rows and the other lines."""
    lines = path.read_bytes().split(b"\n")
    rows, broken = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _row(line)
        if row is None:
            broken.append(_Broken(number, number == len(lines), line))  # a line without a line feed is the last
        else:
            rows.append(row)
    return rows, broken


def _row(line: bytes) -> dict[str, Any] | None:
    """Return a line's row; None if it is not an object with an integer step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _whole_fields(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line that was cut off, without the field in which it was cut; None if no step is left."""
    row = None
    while row is None and (line := line.rpartition(b",")[0]):  # which may also stand inside a list
        row = _row(line + b"}")
    return row


def _to_python(name: str, value: Any) -> float | int | list[Any]:
    """Return `value` as a Python number or list of numbers; `_dumps` handles NaN."""
    array = np.asarray(value)
    if array.ndim > 1 or array.size > MAX_LIST:
        raise ValueError(f"metric {name} has shape {array.shape}; log a number or a list of at most {MAX_LIST} numbers")
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
    """Return strict one-line JSON, ASCII since completions may contain any character; NaN and infinities are null."""

    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(x) for x in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: finite(value) for name, value in row.items()}, allow_nan=False)


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers by name, with lists spread out as name/0, name/1 …"""
    spread = {}
    for name, value in metrics.items():
        spread |= {f"{name}/{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {name: value}
    return spread


def _sample_files(folder: Path) -> list[tuple[int, Path]]:
    files = [(path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.jsonl")]
    return sorted((int(step), path) for step, path in files if step.isdigit())


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a crash leaves either the old or the new content. Links are replaced, not followed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "x", encoding="utf-8") as file:  # fails rather than follow a link
        file.write(text)
    storage.sync(temporary)
    os.replace(temporary, path)
