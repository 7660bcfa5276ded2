"""The replies of an environment to many turns at a time; the programs that make them run side by side in sandboxes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from absl import logging

from gspo_jax.errors import StopRequested, UserError
from gspo_jax.rewards import environments
from gspo_jax.rewards.scorer import LOOK_S, unless_stopped, zip_rows
from gspo_jax.sandbox import Request, Sandbox, Verdict

MAX_CHARACTERS = 1000
"""Characters of a program's output in a reply; the middle of a longer one is left out."""
NO_OUTPUT = "(no output)\n"
BROKEN = "(the program could not be run)\n"


class Replies:
    """Replies of an environment to batches of turns, with sandboxes if it has programs run."""

    def __init__(
        self, name: str, *, own: Mapping[str, str], timeout_s: float, workers: int, unsafe: bool = False
    ) -> None:
        """Look up the environment, and start sandboxes if it needs them.

        Args:
          name: of environments.py, or of `own`, which maps names to references.
          own: functions beside the catalogue's.
          timeout_s: seconds that a program may take.
          workers: number of sandboxes.
          unsafe: whether programs run without a sandbox, with this account's rights.

        Raises:
          UserError: the environment is unknown, or there is no sandbox.
        """
        self._name, self._answer, self._timeout_s = name, environments.find(name, own), timeout_s
        self._sandbox = Sandbox(workers=workers, unsafe=unsafe) if name in environments.SANDBOXED else None
        self.interrupted: Callable[[], bool] = lambda: False
        """Asked while programs run; True ends the waiting."""

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], records: Sequence[Any]) -> list[str | None]:
        """Return the reply to each completion, None where the episode ends.

        In a run of several processes, all call it, each with its own completions.

        Raises:
          UserError: the environment returned something else.
          StopRequested: the waiting for programs was interrupted, in this process or another one.
        """
        said = [self._said(*row) for row in zip_rows(prompts, completions, records)]
        if self._sandbox is None:
            return said
        sandbox = self._sandbox
        return unless_stopped(lambda: self._run(sandbox, said))

    def close(self) -> None:
        """End the sandboxes; repeating is harmless."""
        if self._sandbox is not None:
            self._sandbox.close()

    def __enter__(self) -> "Replies":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _said(self, prompt: str, completion: str, record: Any) -> str | None:
        said = self._answer(prompt, completion, record)
        if said is not None and not isinstance(said, str):
            raise UserError(f"environment {self._name} replied {said!r}; return a text, or None to end the episode")
        return said

    def _run(self, sandbox: Sandbox, programs: Sequence[str | None]) -> list[str | None]:
        """Return what the programs print."""
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
    """Return the reply that tells a policy how its program ran: lines, of at most MAX_CHARACTERS."""
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
