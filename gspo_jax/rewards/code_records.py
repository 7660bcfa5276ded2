"""Defects of records for code rewards, found before any program runs.

The sandbox finds the rest, such as tests that do not compile.
"""

import ast
import functools
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_jax.rewards import blocks
from gspo_jax.rewards.code import Record, called_by, defines, given_by
from gspo_jax.sandbox.inside.compare import COMPARISONS

_MOST_CHARACTERS = 1 << 20
"""Maximum length of a source searched for imports."""
_OURS = frozenset({"__main__", "program", "test", "tests"})
"""Modules outside the standard library that a test finds."""


def defect(name: str, prompt: str, record: Record) -> str:
    """Return a record's first defect for the reward `name`, beginning with a field, or "" if it has none."""
    defects = _of_whole_programs(record) if name.startswith("code_stdin") else _of_functions(prompt, record)
    return next(defects, "")


def _of_whole_programs(record: Record) -> Iterator[str]:
    yield from _not_texts(record, "inputs")
    yield from _not_texts(record, "outputs")
    if len(record["inputs"]) != len(record["outputs"]):
        yield "inputs and outputs are not of the same length"
    compare = record.get("compare")
    if compare not in (None, "", *COMPARISONS):
        yield f"compare is {compare!s:.40} instead of one of {' '.join(COMPARISONS)}"
    for field in ("checker", "prelude"):
        yield from _not_source(record, field)
    if record.get("checker"):
        yield from filter(None, [_checker_defect(record["checker"])])


def _of_functions(prompt: str, record: Record) -> Iterator[str]:
    for field in ("test_setup_code", "prelude"):
        yield from _not_source(record, field)
    if record.get("test") is None:
        if "test_list" not in record:
            yield "test_list and test are missing"
        yield from _not_texts(record, "test_list")
        tests, given = record["test_list"], _begun(prompt, record)
        if not any(map(str.strip, tests)):
            yield "test_list has no tests"
    else:
        for field in ("test", "entry_point"):
            if field not in record:
                yield f"{field} is missing"
            yield from _not_source(record, field)
            if not (record[field] or "").strip():
                yield f"{field} is empty"
        if _parsed(record["entry_point"].strip(), "eval") is None:
            yield "entry_point does not name a function"
        tests, given = [record["test"]], given_by(prompt, record)
    for test in tests:
        yield from _lacking("test_list" if record.get("test") is None else "test", test)
    for source in given:
        yield from _lacking("prompt", source)


def _not_texts(record: Record, field: str) -> Iterator[str]:
    value = record.get(field)
    if value is None:
        yield f"{field} is missing"
    elif not isinstance(value, list | tuple):
        yield f"{field} is of type {_type(value)} instead of a list of texts"
    elif not value:
        yield f"{field} is empty"
    for item in value or ():
        if not isinstance(item, str):
            yield f"{field} holds values of type {_type(item)} instead of texts"


def _not_source(record: Record, field: str) -> Iterator[str]:
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        yield f"{field} is of type {_type(value)} instead of a text"
    yield from _lacking(field, value or "")


@functools.lru_cache(maxsize=256)
def _checker_defect(source: str) -> str:
    tree = _parsed(source)
    if tree is None:
        return "checker does not compile"
    names = {name for node in ast.walk(tree) for name in _bound(node)}
    return "checker does not define check" if names.isdisjoint({"check", "*"}) else ""


def _bound(node: ast.AST) -> tuple[str | None, ...]:
    if isinstance(node, ast.Name):
        return (node.id,) if isinstance(node.ctx, ast.Store) else ()
    return getattr(node, "asname", None), getattr(node, "name", None)


def _lacking(field: str, source: str) -> Iterator[str]:
    if "import" in source and len(source) <= _MOST_CHARACTERS and (module := _missing_module(source)):
        yield f"{field} imports {module} from outside the standard library"


@functools.lru_cache(maxsize=256)
def _missing_module(source: str) -> str:
    """Return the first module outside the standard library that a source always imports."""
    tree = _parsed(source) or _parsed(f"{source}\n    pass")  # a prompt may end before a body
    names: list[str] = []
    for node in () if tree is None else tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    modules = (name.partition(".")[0] or name for name in names)
    return next((name for name in modules if name not in sys.stdlib_module_names and name not in _OURS), "")


def _parsed(source: str, mode: str = "exec") -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(source, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _begun(prompt: str, record: Record) -> Sequence[str]:
    """Return the question and its blocks that begin a function called by `test_list`."""
    question = record.get("question")
    text = question if isinstance(question, str) else prompt
    if "import" not in text:
        return ()
    names = called_by(record["test_list"])
    return [source for source in (text, *blocks.programs(text)) if defines(source, names)]


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__
