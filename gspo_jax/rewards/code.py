"""Rewards for programs: what the sandbox is asked about a completion, and the score that its verdict gives.

A function here takes (prompt, completion, record), returns a request to the sandbox, and does not run the program. The
program is the last fenced block of the completion. Without one it is the completion, or the prompt and the completion
if the record has a `test` and the completion does not define its `entry_point`. record["prelude"], if there is one,
stands before it. Functions run in the trainer's process, so they must be linear in the completion's length. To add a
reward, write a function here and list its name in `__all__`.
"""

import re
from collections.abc import Sequence
from typing import Any

from gspo_jax.sandbox import Request, Verdict

__all__ = ["code_stdin", "code_stdin_share", "code_tests", "code_tests_share"]

Record = dict[str, Any]
_FENCE = "```"
_COMPARISON = "token"


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
    return Request(record.get("prelude", "") + program_of(prompt, completion, entry_point), asked, timeout_s)


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
    return Request(record.get("prelude", "") + program_of(prompt, completion, None), asked, timeout_s)


def code_stdin_share(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score the share of the inputs of `code_stdin` for which the program prints what is expected."""
    return code_stdin(prompt, completion, record, timeout_s=timeout_s, stop=False)


def score(name: str, verdict: Verdict) -> float:
    """Return the score that a verdict gives to the reward `name`."""
    share = sum(verdict.passed) / max(1, len(verdict.passed))
    return share if name.endswith("_share") else float(share == 1)


def program_of(prompt: str, completion: str, entry_point: str | None) -> str:
    """Return the program in a completion; see the module docstring."""
    block = last_block(completion)
    if block is not None:
        return block
    if entry_point is None or defines(completion, entry_point):
        return completion
    return prompt + completion


def last_block(text: str) -> str | None:
    """Return the content of the last block between lines of three backquotes that closes; None if there is none."""
    lines = text.splitlines(keepends=True)
    found = _last_fences(lines)
    return None if found is None else "".join(lines[found[0] + 1 : found[1]])


def final_block(text: str) -> str | None:
    """Return the content of the block that closes in the last line of a text, spaces aside; None if none does."""
    lines = text.rstrip().splitlines(keepends=True)
    found = _last_fences(lines)
    return "".join(lines[found[0] + 1 : -1]) if found is not None and found[1] == len(lines) - 1 else None


def _last_fences(lines: Sequence[str]) -> tuple[int, int] | None:
    """Return the numbers of the lines that open and close the last block."""
    found, begun = None, None
    for number, line in enumerate(lines):
        if begun is None:
            mark = line.lstrip(" \t")
            begun = number if mark.startswith(_FENCE) and "`" not in mark[len(_FENCE) :] else None
        elif line.strip(" \t\r\n") == _FENCE:
            found, begun = (begun, number), None
    return found


def defines(source: str, name: str) -> bool:
    """Return whether a source defines a name at its top level, by the look of its lines: it is not parsed here."""
    name = re.escape(name)
    return re.search(rf"^(?:(?:async )?def|class) {name}\b|^{name} *=", source, re.MULTILINE) is not None
