"""Which exceptions are failures of a call, by those of real clients."""

import anyio
import httpx
import mcp
import pytest

from gspo_jax.calls import failures
from gspo_jax.calls.calls import Calls, Limits

REFUSED = httpx.ConnectError("All connection attempts failed")
REFUSED.__cause__ = ConnectionRefusedError(111, "refused")


def group(*errors):
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


@pytest.mark.parametrize(
    ("error", "failure", "passes", "cause"),
    [
        (group(REFUSED), True, True, "connection refused"),
        (group(group(REFUSED), TimeoutError()), True, True, "connection refused"),
        (group(REFUSED, KeyError("x")), False, False, "KeyError: 'x'"),
        (group(KeyError("x"), REFUSED), False, False, "KeyError: 'x'"),
        (mcp.MCPError(-32000, "Connection closed"), True, True, "MCPError: Connection closed"),
        (mcp.MCPError(-32602, "Invalid params"), True, False, "MCPError: Invalid params"),
        (anyio.ClosedResourceError(), True, True, "ClosedResourceError"),
    ],
    ids=str,
)
def test_failures_of_groups_and_of_mcp(error, failure, passes, cause):
    assert failures.is_failure(error) == failure and failures.passes(error) == passes
    assert failures.cause_of(error) == cause


def test_the_seconds_that_a_server_asks_for_are_found_in_a_group():
    assert failures.after_s(group(failures.CallFailed.of_status(429, after_s=3.0))) == 3.0


@pytest.mark.parametrize("ends", [SystemExit(3), KeyboardInterrupt()])
def test_a_coroutine_that_ends_the_process_is_a_mistake_and_ends_no_other_call(ends):
    async def leaves():
        raise ends

    async def stays():
        return 1

    with Calls(Limits()) as calls:
        outcome = calls.submit(leaves).result(timeout=30)
        assert outcome.raised and outcome.cause == f"RuntimeError: raised {type(ends).__name__}({ends})"
        assert calls.submit(stays).result(timeout=30).value == 1
