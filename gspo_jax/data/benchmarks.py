"""Published benchmarks as records: what is asked, and what their answers are judged by.

Each is read from a file or folder as it was published; nothing is downloaded. rows.py reads a file of a user's own.
"""

import base64
import binascii
import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_jax.data import files
from gspo_jax.data.records import Record, Records
from gspo_jax.types import UserError, choices

MOST_BYTES = 1 << 29
"""Bytes of a problem's hidden tests when they are unpacked; more is refused."""
_NUMBER = "Think step by step, then write the final answer as a number after ####."
_BOX = "Think step by step, then write the final answer in \\boxed{}."
_PROGRAM = "Write the program in one block of Python code."
_LISTED = """
def _listed(value):
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
"""
"""LiveCodeBench's own comparison takes a tuple for a list."""
_PRELUDE = """from typing import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from bisect import *
from math import *
import collections, functools, heapq, itertools, bisect, math, operator, random, re, string, sys
"""
"""What LiveCodeBench's programs find imported."""


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is read and judged."""

    read: Callable[[Path], list[Record]]
    """Reads the records of its file or folder."""
    rewards: tuple[str, ...]
    """Names of the rewards that score it, the one that decides first."""
    answers_compare: bool
    """True if its answers can be compared with each other, so that samples have a majority."""


def aime24(place: Path) -> list[Record]:
    """AIME 2024: `problem`, `answer`."""
    return [
        {"id": f"aime24/{row['id']}", "question": row["problem"], "answer": str(row["answer"]), "instruction": _BOX}
        for row in _rows(place, "test.jsonl")
    ]


def gsm8k(place: Path) -> list[Record]:
    """GSM8K's test split: `question`, and `answer` with the number after `####`."""
    return [
        {
            "id": f"gsm8k/test/{number}",
            "question": row["question"].strip(),
            "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
            "instruction": _NUMBER,
        }
        for number, row in enumerate(_test_rows(place))
    ]


def humaneval(place: Path) -> list[Record]:
    """HumanEval: `prompt` begins the function `entry_point`, which `test` checks."""
    return [
        {
            "id": row["task_id"],
            "question": row["prompt"],
            "answer": row["canonical_solution"],
            "instruction": "",
            "entry_point": row["entry_point"],
            "test": row["test"],
        }
        for row in _rows(place, "HumanEval.jsonl.gz", "HumanEval.jsonl")
    ]


def mbpp(place: Path) -> list[Record]:
    """MBPP: `text` asks for a function, which `test_list` checks; the prompt shows the tests, as in its paper."""
    return [
        {
            "id": f"mbpp/{row['task_id']}",
            "question": f"{row['text']}\nYour code should pass these tests:\n" + "\n".join(row["test_list"]),
            "answer": row["code"],
            "instruction": _PROGRAM,
            "test_list": row["test_list"],
            "test_setup_code": row.get("test_setup_code", ""),
        }
        for row in _rows(place, "test.jsonl", "mbpp.jsonl", "train.jsonl")
    ]


def livecodebench(place: Path) -> list[Record]:
    """LiveCodeBench: programs that read standard input, or methods of a class `Solution`.

    Public and private tests count. Private ones are JSON, or that in base64, zlib and pickle.
    """
    return [_livecodebench(row) for row in _rows(place, "test*.jsonl")]


BENCHMARKS = {
    "aime24": Benchmark(aime24, ("math_verify", "math_verify_flexible"), answers_compare=True),
    "gsm8k": Benchmark(gsm8k, ("math_verify", "math_verify_flexible"), answers_compare=True),
    "humaneval": Benchmark(humaneval, ("code_tests",), answers_compare=False),
    "mbpp": Benchmark(mbpp, ("code_tests",), answers_compare=False),
    "livecodebench": Benchmark(livecodebench, ("code_stdin", "code_tests"), answers_compare=False),
}
"""By name."""


def read(name: str, place: str) -> Records:
    """Return the records of a benchmark.

    Raises:
      UserError: it is unknown, or its files are missing or not what was published.
    """
    if name not in BENCHMARKS:
        raise UserError(
            f"unknown benchmark {name!r}; {choices(name, list(BENCHMARKS))}, or a file of your own, FILE.jsonl"
        )
    if not place:
        raise UserError(f"--data is missing: the folder or file of {name}, as it was published")
    try:
        records = BENCHMARKS[name].read(Path(place))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place} is not {name} as it was published ({error!r}); download it again") from error
    if not records:
        raise UserError(f"{place} has no problems of {name}; download it again")
    return Records(place, records, convert=lambda _, record: record, where=lambda _: place)


def _test_rows(place: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, or of the test split of a folder, in any format that files.py reads."""
    for where, row in files.read(str(place), "test"):
        if isinstance(row, files.Defect):
            raise UserError(f"{where}: {row}; download it again")
        yield row


def _rows(place: Path, *names: str) -> Iterator[dict[str, Any]]:
    """The rows of a file, or of the first of these files in a folder; a name may stand for several."""
    there = [place] if place.is_file() else next((f for n in names if (f := sorted(place.glob(n)))), [])
    if not there:
        raise UserError(f"{place} has no {' or '.join(names)}; give the folder of the benchmark's files")
    for file in there:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{file}:{number} is not JSON ({error}); download it again") from error


def _livecodebench(row: dict[str, Any]) -> Record:
    tests = [*json.loads(row["public_test_cases"]), *_hidden(row["private_test_cases"])]
    starter = row.get("starter_code") or ""
    asked = f"{row['question_content']}\n\n{starter}".strip()
    record = {"id": row["question_id"], "question": asked, "answer": "", "instruction": _PROGRAM, "prelude": _PRELUDE}
    record |= {"contest_date": row["contest_date"], "difficulty": row["difficulty"]}
    if all(test["testtype"] == "stdin" for test in tests):
        return record | {
            "inputs": [t["input"] for t in tests],
            "outputs": [t["output"] for t in tests],
            "compare": "number",
        }
    name = json.loads(row["metadata"])["func_name"]
    asserts = []
    for test in tests:
        arguments = ", ".join(repr(json.loads(line)) for line in test["input"].split("\n") if line.strip())
        asserts.append(f"assert _listed(Solution().{name}({arguments})) == {json.loads(test['output'])!r}")
    return record | {"test_list": asserts, "test_setup_code": _LISTED}


def _hidden(packed: str) -> list[dict[str, str]]:
    """Private tests, as JSON or packed; nothing but a string is ever unpickled."""
    try:
        return list(json.loads(packed))
    except ValueError:
        pass
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise UserError(f"hidden tests are more than {MOST_BYTES} bytes; leave that problem out")
        return list(json.loads(_Strings(io.BytesIO(data)).load()))
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError) as error:
        raise UserError(f"hidden tests cannot be unpacked ({error}); download the file again") from error


class _Strings(pickle.Unpickler):
    """An unpickler that knows no classes or functions, only what pickle itself builds."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and may hold only text")
