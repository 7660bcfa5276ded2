"""Preemption: notice a signal, and agree with other processes on where to stop.

SIGTERM, Ctrl-C and a closing terminal all ask for a stop (signals.py). Several processes use jax's preemption service:
it tells all of a SIGTERM to any, and stops them at the first poll that none has reached.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed  # no public API starts the service or reads its notice
from jax.experimental import multihost_utils

from gspo_jax import signals

_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""Key that jax's preemption service sets on a signal."""
_LOOK_S = 0.5


class Preemption:
    """Notice of a signal in any process of the run."""

    def __init__(self, on_notice: Callable[[], None], on_press: Callable[[int], None]):
        """Store callbacks, called from their own threads within about a second of the signal.

        Args:
          on_notice: called once.
          on_press: called with the number of presses, from the second Ctrl-C in this process on.
        """
        self._on_notice, self._on_press = on_notice, on_press
        self._noticed, self._lock = threading.Event(), threading.Lock()
        self._polls = 0
        self.signal = signal.SIGTERM
        """First signal other than SIGTERM, else SIGTERM. Launchers add a SIGTERM, which Linux delivers first."""

    @property
    def alone(self) -> bool:
        """True if this process is the whole run."""
        return distributed.global_state.client is None

    def agreed(self) -> bool:
        """Return True if all processes stop here. Each must ask at the same points of the program."""
        if self.alone:
            return self._noticed.is_set()
        self._polls += 1
        if not multihost_utils.reached_preemption_sync_point(self._polls):
            return False
        self._notice()  # the waiting thread may be late
        return True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notice signals inside the block instead of dying. Enter it in the main thread."""
        with signals.heard(self._hear_alone) if self.alone else self._listen_together():
            yield

    def _hear_alone(self, number: signal.Signals, presses: int) -> None:
        self._put_down_to(number)
        self._notice()
        if presses > 1:
            self._on_press(presses)

    def _put_down_to(self, number: signal.Signals) -> None:
        if self.signal == signal.SIGTERM:
            self.signal = number

    @contextmanager
    def _listen_together(self) -> Iterator[None]:
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()  # handles SIGTERM until the process ends
        client: Any = distributed.global_state.client
        over = threading.Event()

        def hear(number: signal.Signals, presses: int) -> None:
            is_first = self.signal == signal.SIGTERM and not self._noticed.is_set()
            self._put_down_to(number)
            if is_first:
                os.kill(os.getpid(), signal.SIGTERM)  # jax tells the other processes
            if presses > 1:
                self._on_press(presses)

        def look() -> None:
            while not over.wait(_LOOK_S):
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # no notice, or no answer
                    client.key_value_try_get(_NOTICE)
                    self._notice()
                    return

        thread = threading.Thread(target=look, name="preemption", daemon=True)
        thread.start()
        try:
            with signals.heard(hear, [signal.SIGINT, signal.SIGHUP]):
                yield
        finally:  # jax takes no calls while it shuts down
            over.set()
            thread.join()

    def _notice(self) -> None:
        with self._lock:
            if not self._noticed.is_set():
                self._on_notice()
                self._noticed.set()
