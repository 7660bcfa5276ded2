"""Preemption: notices SIGTERM while it arrives, and agrees with the other processes of the run on where to stop.

A process on its own handles the signal itself. Several use jax's preemption service, which tells all of them of a
signal to any one, and picks the poll at which all stop: the first that none of them has reached yet.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed  # the service is started, and its notice read, by no public function
from jax.experimental import multihost_utils

_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""Key under which jax's preemption service tells all processes that one of them got the signal."""
_LOOK_S = 0.5


class Preemption:
    """Notices SIGTERM in any process of the run; `agreed` says where all processes stop."""

    def __init__(self, on_notice: Callable[[], None]):
        """`on_notice` is called once, from a thread of its own, within about a second of the signal."""
        self._on_notice = on_notice
        self._noticed, self._lock = threading.Event(), threading.Lock()
        self._polls = 0

    @property
    def alone(self) -> bool:
        """Whether this process is the whole run."""
        return distributed.global_state.client is None

    def agreed(self) -> bool:
        """Whether all processes stop here; each has to ask at the same points of the program."""
        if self.alone:
            return self._noticed.is_set()
        self._polls += 1
        if not multihost_utils.reached_preemption_sync_point(self._polls):
            return False
        self._notice()  # the thread that waits for it may be late
        return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notice SIGTERM inside the block instead of dying of it; enter it in the main thread."""
        with self._listen_alone() if self.alone else self._listen_together():
            yield

    @contextmanager
    def _listen_alone(self) -> Iterator[None]:
        # Python runs a handler only between two of its own instructions, and a compilation is one of them. The signal's
        # number is written to the pipe at once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)

        def read() -> None:
            while number := os.read(reader, 1):
                if number[0] == signal.SIGTERM:
                    self._notice()

        thread = threading.Thread(target=read, name="preemption", daemon=True)
        thread.start()
        earlier = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(writer)
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier[1])
            signal.signal(signal.SIGTERM, earlier[0])
            os.close(writer)
            thread.join()
            os.close(reader)

    @contextmanager
    def _listen_together(self) -> Iterator[None]:
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()
        client: Any = distributed.global_state.client
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_S):
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no notice, or no answer
                    client.key_value_try_get(_NOTICE)
                    self._notice()
                    return

        thread = threading.Thread(target=look, name="preemption", daemon=True)
        thread.start()
        try:
            yield
        finally:  # jax keeps handling the signal until the process ends, but takes no calls while it shuts down
            over.set()
            thread.join()

    def _notice(self) -> None:
        with self._lock:
            if not self._noticed.is_set():
                self._on_notice()
                self._noticed.set()
