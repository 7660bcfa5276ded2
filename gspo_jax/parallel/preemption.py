"""Preemption: notices a signal while it arrives, and agrees with the other processes of the run on where to stop.

SIGTERM, Ctrl-C and the end of a terminal all ask for the same (signals.py). A process on its own handles them itself.
Several use jax's preemption service, which tells all of them of a SIGTERM to any one, and picks the poll at which all
stop: the first that none of them has reached yet.
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

from gspo_jax import signals

_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""Key under which jax's preemption service tells all processes that one of them got the signal."""
_LOOK_S = 0.5


class Preemption:
    """Notices a signal in any process of the run; `agreed` says where all processes stop."""

    def __init__(self, on_notice: Callable[[], None], on_press: Callable[[int], None]):
        """Both are called from threads of their own, within about a second of the signal.

        Args:
          on_notice: called once.
          on_press: called with the number of presses, for the second of Ctrl-C in this process and later ones.
        """
        self._on_notice, self._on_press = on_notice, on_press
        self._noticed, self._lock = threading.Event(), threading.Lock()
        self._polls = 0
        self.signal = signal.SIGTERM
        """What the stop is put down to: the first signal that is no SIGTERM, which a launcher sends beside the others.

        Linux delivers the SIGTERM first if both wait, whichever was sent first. SIGTERM if there is no other.
        """

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
        """Notice the signals inside the block instead of dying of them; enter it in the main thread."""
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
        distributed.global_state.initialize_preemption_sync_manager()  # which handles SIGTERM until the process ends
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
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no notice, or no answer
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
