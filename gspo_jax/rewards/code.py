"""Rewards for programs: what the sandbox is asked about a completion, and the score that its verdict gives.

A function here takes (prompt, completion, record), returns a request to the sandbox, and does not run the program. The
program is the last code block of the completion that is tagged as Python or not tagged and compiles (blocks.py finds
them, the sandbox compiles), of those that define what is called, or print. Without one it is the completion, or the
prompt and the completion if the record has a `test` and the completion does not define its `entry_point`.
record["prelude"], if there is one, is run before it. Functions run in the trainer's process, so they must be linear in
the completion's length. To add a reward, write a function here and list its name in `__all__`.
"""

import builtins
import re
from collections.abc import Sequence
from typing import Any

from gspo_jax.rewards import blocks
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
"""A line that gives names a value, by its look, behind the end of another; the one character is found fast."""
_PRINTS = re.compile(r"print|write|stdout")


def code_tests(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score 1 if the program passes all tests of its functions, else 0.

    Tests are record["test"], which defines `check(candidate)`, for the function record["entry_point"], as in HumanEval;
    or the asserts of record["test_list"], after record["test_setup_code"], as in MBPP.
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


def code_tests_share(prompt: str, completion: str, record: Record, *, timeout_s: float) -> Request:
    """Score the share of the tests of `code_tests` that the program passes."""
    return code_tests(prompt, completion, record, timeout_s=timeout_s)


def code_stdin(prompt: str, completion: str, record: Record, *, timeout_s: float, stop: bool = True) -> Request:
    """Score 1 if the program prints record["outputs"] for record["inputs"], read from standard input, else 0.

    record["compare"] is how, by a function of sandbox/inside/compare.py: "token", the default, "exact", "number" or
    "livecodebench"; or record["checker"] is the source of a function `check(input, expected, output)`, which runs in
    the sandbox too. Each input has `timeout_s`.
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


def programs_of(
    prompt: str, text: str, tests: Sequence[str] = (), entry_point: str | None = None, given: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the sources in a text that may be its program, best first; the sandbox takes the first that compiles.

    First come those that define the entry point, or a function that the tests call; without tests, those that print. A
    text that does not define the entry point goes on from one of `given`, which do, as its blocks may; or else from the
    prompt. A block that the prompt leaves open goes on in the text.
    """
    opened = blocks.left_open(prompt)
    found = [*(blocks.programs(opened + text) if opened else ()), *blocks.programs(text)]
    whole = [text]
    if entry_point is not None and not defines(text, {_name(entry_point)}):
        whole = [source + text for source in given or [prompt]]
        found += [source + block for source in given for block in found]
    found = [*whole, *found]  # fences in a text that compiles stand in its docstrings
    if entry_point is None and not tests:
        return tuple(sorted(found, key=lambda source: not _PRINTS.search(source)))
    names = {_name(entry_point)} if entry_point else called_by(tests)
    return tuple(sorted(found, key=lambda source: _distance(source, names)))


def given_by(prompt: str, record: Record) -> tuple[str, ...]:
    """Return the question, if it defines the entry point, and its blocks that do, as it may be in words."""
    names = {_name(record["entry_point"])}
    # The prompt itself may be a conversation, of which the question is a part.
    for text in (record.get("prompt"), record.get("question"), prompt):
        if isinstance(text, str) and defines(text, names):
            return (text, *(block for block in blocks.programs(text) if defines(block, names)))
    return ()


def called_by(tests: Sequence[str]) -> set[str]:
    """Return the names that tests call by their look, but for builtins beside others."""
    called = {name for test in tests for name in _CALLED.findall(test)}
    return called.difference(vars(builtins)) or called


def _distance(source: str, names: set[str]) -> int:
    """Return 0 if a source defines one of the names at its top level, 1 if it binds one elsewhere, 2 if it does not.

    This goes by the look of its lines; it is not parsed. Methods bind their names elsewhere, and so do imports, which
    may be those of an example.
    """
    nearest = 2
    for line in _BINDS.finditer(f"\n{source}"):
        bound = line["defined"] or line["assigned"] or line["imported"] or ""
        if not names.isdisjoint(_WORD.findall(bound)):
            nearest = min(nearest, int(bool(line["indent"] or line["imported"])))
    return nearest


def defines(source: str, names: set[str]) -> bool:
    """Return whether a source defines one of the names at its top level, by its look."""
    return _distance(source, names) == 0


def _name(entry_point: str) -> str:
    """Return the name that an entry point such as `Solution().solve` begins with."""
    return re.split(r"\W", entry_point, maxsplit=1)[0]
