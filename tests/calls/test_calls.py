"""Many calls at a time: limits, deadlines, retries, and functions that do everything wrong."""

import asyncio
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gspo_jax.calls import calls
from gspo_jax.calls.calls import Calls, Limits
from gspo_jax.calls.failures import CallFailed
from gspo_jax.calls.outcomes import Outcome
from gspo_jax.errors import ScoringFailed
from gspo_jax.rewards.scorer import check_loop

KEY = "sk-0123456789abcdef"
LONG_S = 10.0
"""Seconds within which anything is over, on a busy machine."""


class Gauge:
    """Counts calls in flight."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self.now -= 1


def results(futures: Any) -> list[Outcome[Any]]:
    """Return what became of calls, none of which may raise."""
    return [future.result(timeout=LONG_S) for future in futures]


def one(function: Callable[..., Any], *arguments: Any, **limits: Any) -> Outcome[Any]:
    """Return what becomes of one call."""
    with Calls(Limits(**{"tries": 1} | limits)) as made:
        return made.submit(function, *arguments).result(timeout=LONG_S)


def awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coroutine function that does the same."""

    async def same(*arguments: Any) -> Any:
        return function(*arguments)

    return same


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_no_more_calls_are_in_flight_than_may_be_and_the_first_come_first(kind):
    gauge, order = Gauge(), []

    def slow(i: int) -> int:
        with gauge:
            order.append(i)
            time.sleep(0.01)
        return i

    async def slow_too(i: int) -> int:
        with gauge:
            order.append(i)
            await asyncio.sleep(0.01)
        return i

    with Calls(Limits(concurrency=3)) as made:
        found = results([made.submit(slow if kind == "thread" else slow_too, i) for i in range(30)])
    assert [each.value for each in found] == list(range(30)) and gauge.most == 3
    assert order == list(range(30)) if kind == "coroutine" else sorted(order) == list(range(30))
    assert (found[0].queued_s or 0) <= 0.5 * (found[-1].queued_s or 0), "the last have waited for the first"


def test_tokens_in_flight_are_limited_and_one_larger_than_all_goes_alone():
    held, most = [0], []

    async def call(tokens: int) -> int:
        held[0] += tokens
        most.append(held[0])
        await asyncio.sleep(0.01)
        held[0] -= tokens
        return tokens

    sizes = [40, 50, 60, 500, 10, 90, 1, 0, 100, 101]
    with Calls(Limits(tokens=100)) as made:
        found = results([made.submit(call, size, tokens=size) for size in sizes])
    assert [each.value for each in found] == sizes
    assert sorted(most)[-2:] == [101, 500] and max(most[:2]) == 90, "40 + 50, and the larger ones alone"


def hang(seconds: float = LONG_S) -> None:
    """Hang in a thread."""
    time.sleep(seconds)


async def hang_too() -> None:
    """Hang in the loop, without holding others up."""
    await asyncio.sleep(LONG_S)


async def hang_for_good() -> None:
    """Hang, and do not heed being cancelled."""
    for _ in range(100):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("function", [hang, hang_too, hang_for_good])
def test_a_call_ends_by_its_deadline_whatever_the_function_does(function):
    begun = time.monotonic()
    with Calls(Limits(concurrency=1, deadline_s=0.1)) as made:
        late, next_one = made.submit(function), made.submit(lambda: time.monotonic() - begun)
        (found, other) = results([late, next_one])
    assert (found.value, found.raised, found.cause) == (None, False, "no answer within 0.1 s")
    assert other.error == "not called, as the last 1 calls failed: no answer within 0.1 s"
    assert time.monotonic() - begun < 5


class Failing:
    """Fails some times, then answers 1; remembers when it was asked."""

    def __init__(self, times: int, error: Callable[[], BaseException]) -> None:
        self.times, self.error, self.asked = times, error, list[float]()

    def __call__(self) -> int:
        self.asked.append(time.monotonic())
        if len(self.asked) <= self.times:
            raise self.error()
        return 1

    @property
    def waits(self) -> list[float]:
        """Seconds between attempts."""
        return [b - a for a, b in zip(self.asked, self.asked[1:], strict=False)]


def passing(**how: Any) -> Callable[[], CallFailed]:
    return lambda: CallFailed("busy", retry=True, **how)


def test_failures_that_pass_are_tried_again_with_longer_and_longer_waits(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 0.1)
    failing = Failing(2, passing())
    found = one(failing, tries=3)
    assert (found.value, found.retries) == (1, 2)
    assert failing.waits[0] >= 0.05 and failing.waits[1] >= 0.1
    over = one(Failing(9, passing()), tries=2)
    assert (over.value, over.error, over.cause, over.retries) == (None, "busy", "busy", 1)
    assert len((once := Failing(9, lambda: CallFailed("bad"))).asked) == 0 and one(once, tries=3).retries == 0
    assert len(once.asked) == 1, "a failure that does not pass is not tried again"


def test_a_server_says_when_to_come_again_and_is_not_waited_for_beyond_the_deadline(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 20.0)  # what the server says counts
    told = Failing(1, passing(after_s=0.2))
    assert one(told, tries=2).value == 1 and 0.2 <= told.waits[0] < 5
    for after_s, limits in ((21.0, {}), (5.0, {"deadline_s": 1.0})):
        begun, never = time.monotonic(), Failing(9, passing(after_s=after_s))
        assert one(never, tries=4, **limits).cause == "busy"
        assert len(never.asked) == 1 and time.monotonic() - begun < 5
    assert one(Failing(3, passing(after_s=0.0)), tries=4).value == 1


def test_once_as_many_as_may_be_in_flight_failed_in_a_row_no_more_are_made_until_renewed():
    asked, broken = [], [True]

    async def call(i: int) -> int:
        asked.append(i)
        if broken[0]:
            raise ConnectionRefusedError
        return i

    with Calls(Limits(concurrency=4, tries=1)) as made:
        found = results([made.submit(call, i) for i in range(20)])
        assert 4 <= len(asked) < 8, "others had begun before the fourth failed"
        assert {each.cause for each in found} == {"connection refused"}
        assert re.fullmatch(r"not called, as the last [4-7] calls failed: connection refused", found[-1].error or "")
        broken[0] = False
        assert made.submit(call, 0).result(timeout=LONG_S).value is None
        made.renew()
        assert [each.value for each in results([made.submit(call, i) for i in range(20)])] == list(range(20))
        broken[0] = True
        results([made.submit(call, 0) for _ in range(3)])
        broken[0] = False
        assert made.submit(call, 7).result(timeout=LONG_S).value == 7, "three are not four"
        broken[0] = True
        asked.clear()
        results([made.submit(call, 0) for _ in range(9)])
        assert 4 <= len(asked) < 8, "an answer begins the count anew"


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_a_thousand_calls_are_made_side_by_side(kind):
    async def wait() -> int:
        await asyncio.sleep(0.05)
        return 1

    def wait_too() -> int:
        time.sleep(0.05)
        return 1

    begun = time.monotonic()
    with Calls(Limits(concurrency=64)) as made:
        found = results([made.submit(wait if kind == "coroutine" else wait_too) for _ in range(1024)])
    assert sum(each.value for each in found) == 1024
    assert time.monotonic() - begun < 15, "sixteen rounds take 0.8 s; one after the other they would take 51 s"


def test_thousands_of_cheap_calls_leave_few_threads():
    before = threading.active_count()
    with Calls(Limits(concurrency=64)) as made:
        assert all(each.value == 1 for each in results([made.submit(lambda: 1) for _ in range(2000)]))
    assert threading.active_count() - before <= 64


@pytest.mark.parametrize("function", [hang, hang_too, hang_for_good])
def test_closing_ends_all_calls_that_run_and_that_wait(function):
    made = Calls(Limits(concurrency=2, tokens=10))
    futures = [made.submit(function, tokens=5) for _ in range(8)]
    time.sleep(0.05)
    begun = time.monotonic()
    made.close()
    made.close()
    assert {each.error for each in results(futures)} == {"the calls were closed"}
    assert made.submit(lambda: 1).result(timeout=LONG_S).error == "the calls were closed"
    assert time.monotonic() - begun < 5


class Unspeakable(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Odd(Exception):
    """Has attributes that cannot be had, as a client's exception without a request."""

    @property
    def response(self) -> None:
        raise RuntimeError("there was none")


class OddFailure(Odd, ConnectionError):
    """Is a failure, too."""


RAISED = {
    ValueError("wrong"): "ValueError: wrong",
    SystemExit(0): "SystemExit",
    KeyboardInterrupt(): "KeyboardInterrupt",
    GeneratorExit("gone"): "GeneratorExit",
    StopIteration(3): "StopIteration",
    StopAsyncIteration(3): "StopAsyncIteration",
    BaseExceptionGroup("many", [ValueError("a"), KeyboardInterrupt()]): "many",
    Unspeakable(): "Unspeakable",
    Odd("no response"): "no response",
}


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_whatever_a_function_raises_is_the_outcome_and_calls_go_on(kind, error):
    def function() -> None:
        raise error

    found = one(awaited(function) if kind == "coroutine" else function)
    assert found.value is None and found.raised, found
    assert RAISED[error] in (found.error or "") and "in function" in (found.error or ""), found.error
    assert found.failed_by and "\n" not in found.failed_by
    assert one(lambda: 1).value == 1 and one(awaited(lambda: 1)).value == 1, "the loop is still there"


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_failures_of_every_form_are_outcomes(kind):
    for error, cause in (
        (OddFailure(), "OddFailure"),
        (asyncio.CancelledError(), None),
        (TimeoutError(), "timed out"),
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error"),
        (CallFailed("\x1b[31m" + "x" * 1000), None),
    ):

        def function(error: BaseException = error) -> None:
            raise error

        found = one(awaited(function) if kind == "coroutine" else function)
        assert found.value is None and found.error
        assert cause is None or (found.cause == cause and not found.raised)
        assert len(found.cause or "") <= 200


def test_what_is_returned_may_be_awaited_too():
    async def answer() -> int:
        return 3

    class Callable_:
        async def __call__(self) -> int:
            return 4

    assert one(lambda: answer()).value == 3 and one(Callable_()).value == 4


@pytest.fixture
def said(caplog) -> Iterator[Callable[[], str]]:
    """Return a function that returns what was logged."""
    caplog.set_level("DEBUG")
    yield lambda: caplog.text


def test_no_secret_is_in_an_outcome_or_a_log(monkeypatch, said):
    monkeypatch.setenv("JUDGE_KEY", "a certain word")

    def leak() -> None:
        raise ValueError(f"Authorization: Bearer {KEY}; a certain word")

    async def leak_late() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            leak()

    async def leak_apart() -> int:
        async def apart() -> None:
            leak()

        asyncio.get_running_loop().create_task(apart())
        await asyncio.sleep(0.01)
        return 1

    with Calls(Limits(deadline_s=0.05)) as made:
        found = results([made.submit(each) for each in (leak, awaited(leak), leak_late, leak_apart)])
        left = made.submit(leak_late)
    found.append(left.result(timeout=LONG_S))
    assert found[0].raised and found[3].value == 1
    time.sleep(0.1)
    gc.collect()
    assert KEY not in str(found) + said() and "certain word" not in str(found) + said()


def test_a_coroutine_that_blocks_all_others_is_named_after_a_deadline():
    async def blocks() -> int:
        time.sleep(2.5)
        return 1

    limits = Limits(deadline_s=0.2)
    with Calls(limits) as made:
        made.submit(blocks)
        time.sleep(1.2)
        with pytest.raises(ScoringFailed, match=r"kept all calls waiting for .* among those of judge: .*time\.sleep"):
            check_loop(limits, "judge")
    assert one(lambda: 1).value == 1
    time.sleep(0.6)
    calls._beating[0].beat -= 100.0  # as after the whole process was suspended
    check_loop(limits, "judge")
