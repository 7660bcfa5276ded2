"""Processes kept warm, each used by one thread at a time."""

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, Self, TypeVar


class _Process(Protocol):
    @property
    def pid(self) -> int: ...
    def close(self) -> None: ...


Member = TypeVar("Member", bound=_Process)


class Crew(Generic[Member]):
    """Warm processes and as many threads. A subclass says in `_new` how one starts, and in `_CLOSED` what `close` ends.

    A thread takes a process from `_idle`, which never blocks, replaces it once it is unusable, and puts it back.
    """

    _CLOSED: str

    def __init__(self, *, workers: int) -> None:
        self._closed = False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=type(self).__name__.lower())
        self._all: set[Member] = set()
        self._idle: queue.SimpleQueue[Member] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._start())

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return sorted(process.pid for process in self._all)

    def close(self) -> None:
        """End the processes with all that they started, and drop queued calls. Idempotent."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._all):
            self._stop(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _new(self) -> Member:
        raise NotImplementedError

    def _start(self) -> Member:
        process = self._new()
        self._all.add(process)
        return process

    def _stop(self, process: Member) -> None:
        self._all.discard(process)
        process.close()

    def _replace(self, process: Member) -> Member:
        self._stop(process)
        new = self._start()
        if self._closed:  # checked last, so `close` or this thread stops the new one
            self._stop(new)
            raise RuntimeError(self._CLOSED)
        return new
