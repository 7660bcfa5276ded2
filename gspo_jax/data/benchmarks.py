"""Published benchmarks as records.

Each is read as published, in any format of files.py. Nothing is downloaded.
"""

import base64
import binascii
import functools
import itertools
import json
import pickletools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_jax import foreign
from gspo_jax.data import files, rows
from gspo_jax.data.files import Defect
from gspo_jax.data.records import Record, Records
from gspo_jax.errors import UserError, choices

MOST_BYTES = 1 << 29
"""Maximum size of a problem's unpacked tests."""
NUMBER = "Think step by step, then write the final answer as a number after ####."
_BOX = "Think step by step, then write the final answer in \\boxed{}."
_PROGRAM = "Write the program in one block of Python code."
_LISTED = """
def _listed(value):
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
"""
"""LiveCodeBench compares tuples as lists."""
_TEXT = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "SHORT_BINSTRING", "BINSTRING"}
"""Pickle instructions that hold a text."""
_SILENT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
"""Harmless ones: version, lengths and memo."""
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_PRELUDE = "".join(
    (
        *(f"from {module} import *\n" for module in ("typing", *_MODULES, "builtins")),
        f"import {', '.join(_MODULES)}\nsys.setrecursionlimit(50000)\n",
    )
)
"""Imports that LiveCodeBench's programs expect. builtins come last, for their `pow`."""


@dataclass(frozen=True)
class ProblemSet:
    """How a benchmark is read and judged."""

    files: tuple[str, ...]
    """Patterns of problem files: the first found counts, or else test rows."""
    record: Callable[[int, dict[str, Any]], Record]
    """Converts a row, given its number, or raises Defect."""
    rewards: tuple[str, ...]
    """The deciding reward first."""


def _aime24(number: int, row: dict[str, Any]) -> Record:
    """AIME 2024: `problem`, `answer`."""
    answer, question = rows.answer_text(row), rows.text_field(row, "problem")
    return {"id": f"aime24/{row.get('id', number)}", "question": question, "answer": answer, "instruction": _BOX}


def _gsm8k(number: int, row: dict[str, Any]) -> Record:
    """GSM8K's test split: `question`, and `answer` with the number after `####`."""
    answer = rows.answer_text(row).rpartition("####")[2].strip().replace(",", "")
    if not answer:
        raise Defect("no number after ####")
    question = rows.text_field(row, "question").strip()
    return {"id": f"gsm8k/test/{number}", "question": question, "answer": answer, "instruction": NUMBER}


def _humaneval(number: int, row: dict[str, Any]) -> Record:
    """HumanEval: `prompt` begins the function `entry_point`, checked by `test`."""
    del number
    return {
        "id": rows.text_field(row, "task_id"),
        "question": rows.text_field(row, "prompt"),
        "answer": rows.text_field(row, "canonical_solution"),
        "instruction": "",
        "entry_point": rows.text_field(row, "entry_point"),
        "test": rows.text_field(row, "test"),
    }


def _mbpp(number: int, row: dict[str, Any]) -> Record:
    """MBPP: `text` asks for a function, checked by `test_list`. The prompt shows the tests, as in the paper."""
    tests = row.get("test_list")
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise Defect("test_list is no list of texts")
    return {
        "id": f"mbpp/{row.get('task_id', number)}",
        "question": f"{rows.text_field(row, 'text')}\nYour code should pass these tests:\n" + "\n".join(tests),
        "answer": rows.text_field(row, "code"),
        "instruction": _PROGRAM,
        "test_list": tests,
        "test_setup_code": _text_if_any(row, "test_setup_code"),
    }


def _livecodebench(number: int, row: dict[str, Any]) -> Record:
    """LiveCodeBench: programs that read standard input, or methods of a class `Solution`.

    Private tests are JSON, or that in base64, zlib and pickle.
    """
    del number
    text = functools.partial(rows.text_field, row)
    asked = f"{text('question_content')}\n\n{_text_if_any(row, 'starter_code')}".strip()
    record = {"id": text("question_id"), "question": asked, "answer": "", "instruction": _PROGRAM, "prelude": _PRELUDE}
    record |= {name: text(name) for name in ("contest_date", "difficulty")}
    public, private = text("public_test_cases"), text("private_test_cases")
    try:
        return record | _tests([*json.loads(public), *_hidden(private)], row)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Defect(f"tests that are none ({error!r:.200})") from error


def _tests(tests: list[dict[str, str]], row: dict[str, Any]) -> Record:
    for name, value in itertools.chain.from_iterable(test.items() for test in tests):
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r:.50}, and no text")
    if all(test["testtype"] == "stdin" for test in tests):
        return {
            "inputs": [t["input"] for t in tests],
            "outputs": [t["output"] for t in tests],
            "compare": "livecodebench",
        }
    name = json.loads(row["metadata"])["func_name"]
    if not name.isidentifier():
        raise ValueError(f"func_name is {name!r:.50}, and no name")
    asserts = []
    for test in tests:
        arguments = ", ".join(repr(json.loads(line)) for line in test["input"].split("\n") if line.strip())
        asserts.append(f"assert _listed(Solution().{name}({arguments})) == {json.loads(test['output'])!r}")
    return {"test_list": asserts, "test_setup_code": _LISTED}


def _text_if_any(row: dict[str, Any], name: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise Defect(f"{name} is not a text")
    return value


def _hidden(packed: str) -> list[dict[str, str]]:
    try:
        return list(json.loads(packed))
    except ValueError:
        pass
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise Defect(f"hidden tests of more than {MOST_BYTES} bytes")
        return list(json.loads(_pickled_text(data)))
    except (binascii.Error, zlib.error, ValueError, TypeError, RecursionError) as error:
        raise Defect(f"hidden tests cannot be unpacked ({error!s:.200})") from error


def _pickled_text(data: bytes) -> str:
    """Return the only text in a pickle, or raise ValueError.

    Nothing is built or called, and no memory is taken for claimed lengths.
    """
    texts = []
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in _TEXT:
            texts.append(argument)
        elif operation.name not in _SILENT:
            raise ValueError(f"{operation.name} in a pickle that may hold only text")
    if len(texts) != 1:
        raise ValueError(f"{len(texts)} texts in a pickle that may hold one")
    return texts[0]


BENCHMARKS = {
    "aime24": ProblemSet(("test.jsonl", "data/train-*.parquet"), _aime24, ("math_verify", "math_verify_flexible")),
    "gsm8k": ProblemSet((), _gsm8k, ("math_verify", "math_verify_flexible")),
    "humaneval": ProblemSet(("HumanEval.jsonl.gz", "HumanEval.jsonl"), _humaneval, ("code_tests",)),
    "mbpp": ProblemSet(("test.jsonl", "mbpp.jsonl", "train.jsonl"), _mbpp, ("code_tests",)),
    "livecodebench": ProblemSet(("test*.jsonl",), _livecodebench, ("code_stdin", "code_tests")),
}


def read(name: str, place: str) -> Records:
    """Return the records of a benchmark.

    Raises:
      UserError: it is unknown, or its files are missing or not as published.
    """
    if name not in BENCHMARKS:
        raise UserError(
            f"unknown benchmark {name!r}; {choices(name, list(BENCHMARKS))}, or a file of your own, FILE.jsonl"
        )
    if not place:
        raise UserError(f"--data is missing: the folder or file of {name}, as it was published")
    benchmark, records = BENCHMARKS[name], []
    for number, row in enumerate(_rows(place, benchmark.files)):
        try:
            records.append(benchmark.record(number, row.fields()))
        except Defect as defect:
            raise UserError(f"{row.where}: {defect}; download {name} again, as it was published") from defect
    if not records:
        raise UserError(f"{place} has no problems of {name}; download it again")
    return Records(place, records)


def _rows(place: str, patterns: Sequence[str]) -> Iterator[files.Row]:
    there = (sorted(Path(place).glob(pattern)) for pattern in patterns)
    for file in next(filter(None, there), [Path(place)]):
        if file != Path(place):
            foreign.is_file(file, inside=place)
        yield from files.read(str(file), "test", alone=True)
