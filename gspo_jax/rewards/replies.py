"""Replies of an environment to batches of turns. Programs run concurrently in sandboxes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any

from absl import logging

from gspo_jax.errors import StopRequested, UserError
from gspo_jax.rewards import environments
from gspo_jax.rewards.scorer import LOOK_S, unless_stopped, zip_rows
from gspo_jax.sandbox import Request, Sandbox, Verdict

MAX_CHARACTERS = 1000
"""Maximum characters of shown output. The middle of longer output is cut."""
NO_OUTPUT = "(no output)\n"
BROKEN = "(the program could not be run)\n"


class Replies(AbstractContextManager["Replies"]):
    """Replies of one environment, with sandboxes if it runs programs."""

    def __init__(
        self, name: str, *, own: Mapping[str, str], timeout_s: float, workers: int, unsafe: bool = False
    ) -> None:
        """Look up the environment, and start sandboxes if it needs them.

        Args:
          name: name in environments.py or in `own`.
          own: name -> reference (references.py).
          timeout_s: seconds per program.
          workers: number of sandboxes.
          unsafe: run programs without a sandbox, with this account's rights.

        Raises:
          UserError: the environment is unknown, or there is no sandbox.
        """
        self._name, self._answer, self._timeout_s = name, environments.find(name, own), timeout_s
        self._sandbox = Sandbox(workers=workers, unsafe=unsafe) if name in environments.SANDBOXED else None
        self.interrupted: Callable[[], bool] = lambda: False
        """Polled while programs run. True ends the waiting."""

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[Any]) -> list[str | None]:
        """Return the reply to each completion, None where the episode ends.

        Every process calls it, with its own completions.

        Raises:
          UserError: the environment returned neither a text nor None.
          StopRequested: the waiting was interrupted in any process.
        """
        said = [self._said(*row) for row in zip_rows(prompts, completions, records)]
        if self._sandbox is None:
            return said
        sandbox = self._sandbox
        return unless_stopped(lambda: self._run(sandbox, said))

    def close(self) -> None:
        """End the sandboxes. Idempotent."""
        if self._sandbox is not None:
            self._sandbox.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _said(self, prompt: str, completion: str, record: Any) -> str | None:
        said = self._answer(prompt, completion, record)
        if said is not None and not isinstance(said, str):
            raise UserError(f"environment {self._name} replied {said!r}; return a text, or None to end the episode")
        return said

    def _run(self, sandbox: Sandbox, programs: Sequence[str | None]) -> list[str | None]:
        pending: dict[int, Future[str]] = {
            row: sandbox.submit(Request(program, {"inputs": [""]}, self._timeout_s), shown)
            for row, program in enumerate(programs)
            if program is not None
        }
        waiting = set(pending.values())
        try:
            while waiting:
                waiting = wait(waiting, timeout=LOOK_S).not_done
                if self.interrupted():
                    raise StopRequested
        finally:
            for future in waiting:
                future.cancel()
        return [pending[row].result() if row in pending else None for row in range(len(programs))]


def shown(verdict: Verdict) -> str:
    """Return the reply with a program's result, with at most MAX_CHARACTERS of output."""
    if verdict.broken:
        logging.warning("a program of an environment could not be run: %s", verdict.broken)
        return BROKEN
    output = verdict.output.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    half = MAX_CHARACTERS // 2
    if len(output) > MAX_CHARACTERS:
        output = f"{output[:half]}\n...\n{output[-half:]}"
    if output and not output.endswith("\n"):
        output += "\n"
    return output + (f"{verdict.why}\n" if verdict.why else "") or NO_OUTPUT
