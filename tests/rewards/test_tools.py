"""Tool calls of a turn, and connections held from one call to another."""

import asyncio
import contextlib
import threading
import time

import anyio
import pytest

from gspo_jax.calls import calls
from gspo_jax.calls.failures import CallFailed
from gspo_jax.rewards.tools import MAX_CHARACTERS, Held, tool_replies


def message(*asked):
    """Return a turn with calls: names with arguments."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(asked)
        ],
    }


def replies(functions, *asked):
    return calls.run(tool_replies(message(*asked), functions))


def texts(functions, *asked):
    return [each["content"] for each in replies(functions, *asked)]


def test_every_call_has_its_message_in_order():
    async def slow(text):
        await asyncio.sleep(0.05)
        return text

    said = replies({"slow": slow, "fast": str.upper}, ("slow", {"text": "a"}), ("slow", {"text": "b"}))
    assert said == [
        {"role": "tool", "tool_call_id": f"call{i}", "name": "slow", "content": text} for i, text in enumerate("ab")
    ]
    assert replies({}) == [] and calls.run(tool_replies({"role": "assistant", "content": "12"}, {})) == []


def test_calls_run_side_by_side_and_plain_functions_in_threads():
    met = threading.Barrier(2, timeout=10)

    def plain():
        met.wait()  # until the other one runs too
        return threading.current_thread() is not threading.main_thread()

    assert texts({"plain": plain}, ("plain", {}), ("plain", {})) == ["true", "true"]


@pytest.mark.parametrize(
    ("result", "text"),
    [({"sum": 3, "é": [None]}, '{"sum": 3, "é": [null]}'), (2.5, "2.5"), (None, "null"), ("2.5", "2.5"), ("", "")],
)
def test_results_that_are_no_text_become_json(result, text):
    assert texts({"tool": lambda: result}, ("tool", {})) == [text]


def test_a_long_result_loses_its_middle():
    (text,) = texts({"tool": lambda: ["a" * 5000, "b" * 5000]}, ("tool", {}))
    assert len(text) < MAX_CHARACTERS + 10 and text.startswith('["aaa') and text.endswith('bbb"]') and "\n...\n" in text


def test_an_exception_is_an_error_that_the_policy_reads(monkeypatch):
    monkeypatch.setenv("TOOL_KEY", "s3cret-value")

    def wrong(path):
        raise ValueError(f"s3cret-value does not open\n{path}")

    def absent(path):
        open(path).close()

    async def leaves():
        raise SystemExit(3)

    asked = [("wrong", {"path": "x" * 9000}), ("absent", {"path": "/no/such"}), ("leaves", {}), ("ends", {})]

    async def ends():
        raise asyncio.CancelledError

    said = texts({"wrong": wrong, "absent": absent, "leaves": leaves, "ends": ends}, *asked)
    assert said[0].startswith("Error: ValueError: [TOOL_KEY] does not open xxx") and len(said[0]) < 250
    assert said[1] == "Error: FileNotFoundError: [Errno 2] No such file or directory: '/no/such'"
    assert said[2] == "Error: RuntimeError: raised SystemExit(3)" and said[3] == "Error: CancelledError"


def test_a_server_that_is_not_there_is_no_reply():
    async def refused():
        raise ConnectionRefusedError

    async def busy():
        raise CallFailed.of_status(503)

    async def missing():
        raise CallFailed.of_status(404, detail="no such page")

    for gone, error in ((refused, ConnectionRefusedError), (busy, CallFailed)):
        with pytest.raises(error):
            replies({"gone": gone, "missing": missing}, ("missing", {}), ("gone", {}))
    assert texts({"missing": missing}, ("missing", {})) == ["Error: HTTP status 404: no such page"]


def test_a_tool_without_a_function_is_named():
    with pytest.raises(KeyError, match="add"):
        replies({}, ("add", {}))


@contextlib.asynccontextmanager
async def connection(log, *, fails=False):
    """Be like a client that is made with anyio."""
    async with anyio.create_task_group() as group:
        if fails:
            raise ConnectionRefusedError
        group.start_soon(anyio.sleep, 60)
        log.append("entered")
        yield "client"
        group.cancel_scope.cancel()
    log.append("left")


def test_a_connection_is_left_in_another_call_than_entered():
    log = []

    async def make():
        return Held(connection(log))

    held = calls.run(make())
    assert calls.run(held.enter()) == "client" and log == ["entered"]
    calls.run(held.leave())
    calls.run(held.leave())
    assert log == ["entered", "left"]


def test_a_connection_that_fails_says_so_once():
    held = Held(connection([], fails=True))
    with pytest.raises(ExceptionGroup):
        calls.run(held.enter())
    calls.run(held.leave())


def test_a_connection_whose_time_is_over_is_not_entered_later():
    log = []

    @contextlib.asynccontextmanager
    async def slow():
        try:
            await asyncio.sleep(60)
            yield
        finally:
            log.append("ended")

    with pytest.raises(TimeoutError):
        calls.run(asyncio.wait_for(Held(slow()).enter(), 0.05))
    until = time.monotonic() + 10
    while not log and time.monotonic() < until:
        time.sleep(0.01)
    assert log == ["ended"]
