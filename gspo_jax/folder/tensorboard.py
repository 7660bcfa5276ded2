"""A copy of the metrics for TensorBoard, in `tb/`."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

_TB_FLUSH_S = 5.0


class TensorBoard:
    """Writes scalars to one event file, in the caller's thread.

    tensorboardX's SummaryWriter has a thread and a bounded queue: if the disk fails, the thread dies and a later write
    blocks forever.
    """

    name = "TensorBoard output"

    def __init__(self, folder: Path, *, first_step: int):
        """The file, begun by the first write, replaces earlier files' events from `first_step` on."""
        self._folder, self._first_step = folder, first_step
        self._writer: EventsWriter | None = None
        self._flushed = 0.0

    def _open(self) -> EventsWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in name order. The clock may have been set back.
        start = f"events.start-{len(list(self._folder.iterdir())):04}"
        writer = EventsWriter(str(self._folder / start), f".{os.getpid()}.{time.time_ns() % 10**9}")
        session = SessionLog(status=SessionLog.START)
        writer.write_event(Event(step=self._first_step, wall_time=time.time(), session_log=session))
        return writer

    def write(self, step: int, now: float, metrics: Mapping[str, float]) -> None:
        """Write numbers of a step."""
        writer = self._writer = self._writer or self._open()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.write_event(Event(step=step, wall_time=now, summary=Summary(value=values)))
        if time.monotonic() - self._flushed >= _TB_FLUSH_S:
            writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
