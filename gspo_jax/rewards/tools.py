"""For environments with tools: the calls of a turn run side by side, and connections held from reset to close."""

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from gspo_jax.calls import failures
from gspo_jax.calls.calls import called

MAX_CHARACTERS = 1000
"""Maximum characters of shown output. The middle of longer output is cut."""

Value = TypeVar("Value")


async def tool_replies(message: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, str]]:
    """Run a turn's tool calls and return the tools' messages in order, none for a turn without calls.

    Functions get their arguments by name; coroutine functions share the event loop, others run in threads. A result
    that is no text becomes JSON, and of a long one the middle is cut. An exception is an error that the policy reads,
    without a traceback.

    Args:
      message: the argument of an environment's `step`.
      functions: by the names of the environment's tools.

    Raises:
      KeyError: a tool has no function.
      Exception: whom a function asks is not there (no connection, HTTP 503), which is not the policy's fault.
    """
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    asked = [functools.partial(functions[call["name"]], **call["arguments"]) for _, call in calls]
    results = await asyncio.gather(*map(called, asked), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and failures.passes(result):
            raise result
    return [
        {"role": "tool", "tool_call_id": id, "name": call["name"], "content": _said(result)}
        for (id, call), result in zip(calls, results, strict=True)
    ]


def shortened(text: str) -> str:
    """Return a text of at most about MAX_CHARACTERS, without the middle of a longer one."""
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"


def _said(result: Any) -> str:
    if isinstance(result, BaseException):
        return f"Error: {failures.sentence_of(result)}"
    return shortened(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))


class Held(Generic[Value]):
    """An async context manager that one call enters and another leaves.

    A task of its own does both: connections made with anyio, as those of MCP, must be left by the task that entered.
    """

    def __init__(self, context: AbstractAsyncContextManager[Value]) -> None:
        self._context, self._over = context, asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def enter(self) -> Value:
        """Enter, and return what the context manager gives. Raises what it raises."""
        entered: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._hold(entered))
        try:
            await asyncio.wait([task, entered], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not entered.done():
            await task  # raises
        self._task = task
        return entered.result()

    async def leave(self) -> None:
        """Leave, if entered. Raises what the context manager has raised meanwhile."""
        self._over.set()
        if self._task is not None:
            await self._task

    async def _hold(self, entered: "asyncio.Future[Value]") -> None:
        async with self._context as value:
            entered.set_result(value)
            await self._over.wait()
