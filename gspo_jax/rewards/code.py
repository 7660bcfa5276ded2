"""Rewards for programs: requests to the sandbox, and scores from its verdicts.

A function here takes (prompt, completion, record) and returns a request. The program is the completion's last Python or
untagged block that compiles, preferably one that defines what is called, or prints. Without blocks it is the
completion, prefixed with the prompt if the record has a `test` and the completion does not define its `entry_point`.
record["prelude"], if any, runs first. Functions run in the trainer's process, so they must be linear in the
completion's length. Add new ones to `__all__`.
"""

import builtins
import re
from collections.abc import Sequence
from typing import Any

from gspo_jax.rewards import blocks, graded
from gspo_jax.sandbox import Request, Verdict

__all__ = ["code_stdin", "code_stdin_share", "code_tests", "code_tests_share"]

Record = dict[str, Any]
_COMPARISON = "token"
_WORD = re.compile(r"\w+")
_CALLED = re.compile(r"(?<![.\w])([A-Za-z_]\w*)\s*\(")
_BINDS = re.compile(
    r"\n(?P<indent>[ \t]*)(?:"
    r"(?:async +)?(?:def|class) +(?P<defined>\w+)"
    r"|(?P<assigned>[A-Za-z_]\w*(?: *[,=] *[A-Za-z_]\w*)*) *(?::[^=\n]*)?=(?!=)"
    r"|(?:from [\w.]+ )?import (?P<imported>\([^()]*|[^()\n]*))"
)
"""A line that seems to bind names, from its line break, which is found fast."""
_PRINTS = re.compile(r"print|write|stdout")


def code_tests(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score 1 if the program passes all tests of its functions, else 0.

    Tests are record["test"], which defines `check(candidate)` for record["entry_point"], as in HumanEval, or the
    asserts of record["test_list"], after record["test_setup_code"], as in MBPP.
    """
    whole = record.get("test") is not None
    tests = [record["test"]] if whole else list(record["test_list"])
    entry_point = record["entry_point"] if whole else None
    given = given_by(prompt, record) if whole else ()
    asked = {
        "tests": tests,
        "given": given,
        "setup": record.get("test_setup_code") or "",
        "entry_point": entry_point,
    }
    sources = programs_of(prompt, completion, tests, entry_point, given)
    return Request(sources, asked, timeout_s, record.get("prelude") or "")


@graded
def code_tests_share(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score the share of `code_tests` tests that pass."""
    return code_tests(prompt, completion, record, timeout_s=timeout_s)


def code_stdin(prompt: str, completion: str, record: Record, *, timeout_s: float, stop: bool = True) -> Request:
    """Score 1 if the program prints record["outputs"] for record["inputs"] on standard input, else 0.

    record["compare"] names a comparison of sandbox/inside/compare.py: "token" (default), "exact", "number" or
    "livecodebench". Alternatively, record["checker"] is the source of `check(input, expected, output)`, also run in the
    sandbox. Each input has `timeout_s`.
    """
    asked = {
        "inputs": list(record["inputs"]),
        "expected": list(record["outputs"]),
        "compare": record.get("compare") or _COMPARISON,
        "checker": record.get("checker") or "",
        "stop": stop,
    }
    return Request(programs_of(prompt, completion), asked, timeout_s, record.get("prelude") or "")


@graded
def code_stdin_share(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score the share of `code_stdin` inputs with the expected output."""
    return code_stdin(prompt, completion, record, timeout_s=timeout_s, stop=False)


def score(name: str, verdict: Verdict) -> float:
    """Return the reward `name` for a verdict."""
    share = sum(verdict.passed) / max(1, len(verdict.passed))
    return share if name.endswith("_share") else float(share == 1)


def programs_of(
    prompt: str, text: str, tests: Sequence[str] = (), entry_point: str | None = None, given: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return candidate sources of the program, best first. The sandbox takes the first that compiles.

    First come sources that define the entry point or a function that the tests call. Without tests, sources that print
    come first. A text without the entry point continues each of `given` (as do its blocks), or else the prompt. A block
    left open by the prompt continues in the text.
    """
    opened = blocks.left_open(prompt)
    found = [*(blocks.programs(opened + text) if opened else ()), *blocks.programs(text)]
    whole = [text]
    if entry_point is not None and not defines(text, {_name(entry_point)}):
        whole = [source + text for source in given or [prompt]]
        found += [source + block for source in given for block in found]
    found = [*whole, *found]  # fences in it are in docstrings
    if entry_point is None and not tests:
        return tuple(sorted(found, key=lambda source: not _PRINTS.search(source)))
    names = {_name(entry_point)} if entry_point else called_by(tests)
    return tuple(sorted(found, key=lambda source: _distance(source, names)))


def given_by(prompt: str, record: Record) -> tuple[str, ...]:
    """Return the question and its blocks, where they define the entry point."""
    names = {_name(record["entry_point"])}
    # The prompt may be a conversation.
    for text in (record.get("prompt"), record.get("question"), prompt):
        if isinstance(text, str) and defines(text, names):
            return (text, *(block for block in blocks.programs(text) if defines(block, names)))
    return ()


def called_by(tests: Sequence[str]) -> set[str]:
    """Return the names that tests seem to call, without builtins unless there are only those."""
    called = {name for test in tests for name in _CALLED.findall(test)}
    return called.difference(vars(builtins)) or called


def _distance(source: str, names: set[str]) -> int:
    """Return 0 if a source seems to define one of the names at top level, 1 if it binds one elsewhere, else 2.

    Imports count as elsewhere: they may belong to an example.
    """
    nearest = 2
    for line in _BINDS.finditer(f"\n{source}"):
        bound = line["defined"] or line["assigned"] or line["imported"] or ""
        if not names.isdisjoint(_WORD.findall(bound)):
            nearest = min(nearest, int(bool(line["indent"] or line["imported"])))
    return nearest


def defines(source: str, names: set[str]) -> bool:
    """Return True if a source seems to define one at top level."""
    return _distance(source, names) == 0


def _name(entry_point: str) -> str:
    return re.split(r"\W", entry_point, maxsplit=1)[0]
