"""A conversation with a policy on a terminal."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from gspo_jax import exits, signals
from gspo_jax.errors import UserError
from gspo_jax.measuring.completions import Response
from gspo_jax.measuring.responder import PromptTooLong, Responder, Sampling
from gspo_jax.parallel.compilation import watch_compilation
from gspo_jax.progress import printable

_COMMANDS = "/reset begins anew, /system TEXT sets a system prompt, /quit leaves"
_POLL_STEPS = 16
"""Tokens between looks for Ctrl-C."""


class _Interrupted(Exception):
    """Ctrl-C during a reply."""


class Conversation:
    """A conversation, answered line by line."""

    def __init__(self, policy: Responder, sampling: Sampling, *, seed: int, console: Console | None = None) -> None:
        """Begin one. Reply i has the key `fold_in(key(seed), i)`: the same lines get the same replies."""
        self._policy, self._sampling, self._seed = policy, sampling, seed
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._system: list[dict[str, str]] = []
        self._turns: list[dict[str, str]] = []
        self._replies = 0

    def run(self) -> None:
        """Answer what is typed until /quit or Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` a history
        self._console.print(f"{self._policy.name}\n{_COMMANDS}", style="dim")
        self._policy.poll_steps = _POLL_STEPS
        while True:
            try:
                line = _typed()
            except KeyboardInterrupt:
                self._console.print()
                continue
            except EOFError:
                self._console.print()
                return
            if line.strip() == "/quit":
                return
            if line.startswith("/"):
                self._obey(*line.split(maxsplit=1))
            elif line.strip():
                self._answer(line)

    def _obey(self, command: str, text: str = "") -> None:
        if command == "/reset":
            self._turns = []
        elif command == "/system":
            self._turns, text = [], text.strip()
            self._system = [{"role": "system", "content": text}] if text else []
        else:
            self._console.print(f"there is no {command}: {_COMMANDS}", style="yellow")
            return
        own = "its own system prompt" if not self._system else "your system prompt"
        self._console.print(f"a new conversation, with {own}", style="dim")

    def _answer(self, said: str) -> None:
        """Print the reply, and keep both turns, unless there is none."""
        turns = [*self._turns, {"role": "user", "content": said}]
        begun, first = time.monotonic(), self._replies
        self._replies += 1
        try:
            asked = self._policy.ask([*self._system, *turns], self._sampling)
            with _interruptible() as poll, waiting(self._console, self._policy, poll=poll):
                (((response,),),) = self._policy.respond([asked], self._sampling, seed=self._seed, first=first)
        except _Interrupted:
            self._console.print("interrupted; the turn is forgotten", style="yellow")
            return
        except PromptTooLong as error:
            self._console.print(f"{error.facts}; /reset begins a new conversation", style="yellow")
            return
        except UserError as error:
            self._console.print(str(error), style="yellow")
            return
        if not response.text.strip():
            self._console.print(f"an empty reply of {length(response)}; the turn is forgotten", style="yellow")
            return
        self._turns = [*turns, {"role": "assistant", "content": response.text}]
        self._console.print(Text(printable(response.text)), soft_wrap=True)
        self._console.print(f"{length(response)}, {time.monotonic() - begun:.1f} s", style="dim")


def length(response: Response) -> str:
    """Return a response's length in words."""
    count = len(response.tokens)
    return f"{count} token{'s' if count != 1 else ''}{', cut there' if response.finish == 'length' else ''}"


@contextlib.contextmanager
def waiting(console: Console, policy: Responder, *, poll: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Show on a terminal what a policy is doing, and call `poll` whenever it looks."""
    looks = 0

    def look() -> None:
        nonlocal looks
        poll()
        if looks and policy.poll_steps is not None:
            status.update(f"writing, {looks * policy.poll_steps} tokens")
        looks += 1

    with console.status("reading") as status:
        stop = watch_compilation(lambda begins: status.update("compiling, once for prompts of about this length"))
        policy.poll = look
        try:
            yield
        finally:
            policy.poll = lambda: None
            stop()


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `_Interrupted` after Ctrl-C, as does the end of the block.

    Pressed often enough, it ends the process: a compilation cannot be interrupted.
    """
    heard = False

    def hear(number: signal.Signals, presses: int) -> None:
        nonlocal heard
        heard = True
        if presses >= signals.INSISTS:
            exits.leave(exits.SIGNALLED + number)

    def look() -> None:
        if heard:
            raise _Interrupted

    with signals.heard(hear, (signal.SIGINT,)):
        yield look
    look()


def _typed() -> str:
    """Return a line, or raise KeyboardInterrupt at Ctrl-C and EOFError at Ctrl-D."""
    with signals.heard(lambda number, presses: None, (signal.SIGINT,)):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return input("> ")
