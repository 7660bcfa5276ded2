"""Rewards for programs: what the sandbox is asked about a completion, and the score that its verdict gives.

A function here takes (prompt, completion, record), returns a request to the sandbox, and does not run the program. The
program is the last code block of the completion that is tagged as Python or not tagged and compiles (blocks.py finds
them, the sandbox compiles). Without one it is the completion, or the prompt and the completion if the record has a
`test` and the completion does not define its `entry_point`. record["prelude"], if there is one, is run before it.
Functions run in the trainer's process, so they must be linear in the completion's length. To add a reward, write a
function here and list its name in `__all__`.
"""

import re
from collections.abc import Sequence
from typing import Any

from gspo_jax.rewards import blocks
from gspo_jax.sandbox import Request, Verdict

__all__ = ["code_stdin", "code_stdin_share", "code_tests", "code_tests_share"]

Record = dict[str, Any]
_COMPARISON = "token"
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


def code_tests(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score 1 if the program passes all tests of its functions, else 0.

    Tests are record["test"], which defines `check(candidate)`, for the function record["entry_point"], as in HumanEval;
    or the asserts of record["test_list"], after record["test_setup_code"], as in MBPP.
    """
    tests = [record["test"]] if "test" in record else list(record["test_list"])
    entry_point, given = record["entry_point"] if "test" in record else None, ""
    if entry_point is not None:
        # The prompt itself may be a conversation, of which the question is a part.
        texts = (record.get("prompt"), record.get("question"), prompt)
        given = next((text for text in texts if isinstance(text, str) and defines(text, entry_point)), "")
        prompt = given or prompt
    asked = {
        "tests": tests,
        "given": given,
        "setup": record.get("test_setup_code") or "",
        "entry_point": entry_point,
    }
    return Request(programs_of(prompt, completion, entry_point, tests), asked, timeout_s, record.get("prelude") or "")


def code_tests_share(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score the share of the tests of `code_tests` that the program passes."""
    return code_tests(prompt, completion, record, timeout_s=timeout_s)


def code_stdin(prompt: str, completion: str, record: Record, *, timeout_s: float, stop: bool = True) -> Request:
    """Score 1 if the program prints record["outputs"] for record["inputs"], read from standard input, else 0.

    record["compare"] is how: "token" by words, the default, "exact" by lines, "number" by words with numbers up to
    1e-6; or record["checker"] is the source of a function `check(input, expected, output)`, which runs in the sandbox
    too. Each input has `timeout_s`.
    """
    asked = {
        "inputs": list(record["inputs"]),
        "expected": list(record["outputs"]),
        "compare": record.get("compare") or _COMPARISON,
        "checker": record.get("checker") or "",
        "stop": stop,
    }
    return Request(programs_of(prompt, completion), asked, timeout_s, record.get("prelude") or "")


def code_stdin_share(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score the share of the inputs of `code_stdin` for which the program prints what is expected."""
    return code_stdin(prompt, completion, record, timeout_s=timeout_s, stop=False)


def score(name: str, verdict: Verdict) -> float:
    """Return the score that a verdict gives to the reward `name`."""
    share = sum(verdict.passed) / max(1, len(verdict.passed))
    return share if name.endswith("_share") else float(share == 1)


def programs_of(prompt: str, text: str, entry_point: str | None = None, tests: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the sources in a text that may be its program, best first; the sandbox takes the first that compiles.

    A source that defines `entry_point`, or a function that the tests call, comes before one that does not.
    """
    whole = text if entry_point is None or defines(text, entry_point) else prompt + text
    found = (whole, *blocks.programs(text))  # fences in a text that compiles stand in its docstrings
    names = [entry_point] if entry_point else sorted({name for test in tests for name in _CALLED.findall(test)})
    if len(found) == 1 or not names:
        return found
    return tuple(sorted(found, key=lambda source: not defines(source, *names)))


def defines(source: str, *names: str) -> bool:
    """Return whether a source defines one of the names at its top level, by the look of its lines: it is not parsed."""
    either = "|".join(map(re.escape, names))
    return re.search(rf"^(?:(?:async )?def|class) (?:{either})\b|^(?:{either}) *=", source, re.MULTILINE) is not None
