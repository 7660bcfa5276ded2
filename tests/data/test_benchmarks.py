"""Benchmarks as they were published: read whole, judged by their own solutions, and nothing in them is executed."""

import base64
import gzip
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from gspo_jax.data import benchmarks
from gspo_jax.errors import UserError
from gspo_jax.rewards import code

DATA = Path(__file__).parents[3] / "shared" / "data"


def squeezed(data):
    return base64.b64encode(zlib.compress(data)).decode()


def packed(content, protocol=None):
    return squeezed(pickle.dumps(content, protocol))


PICKLES = {
    f"{code!r} {claimed}": b"\x80\x05" + code + claimed.to_bytes(size, "little") + b"[]."
    for codes, size in ((b"\x8d\x8e\x96\x95", 8), (b"XBT\x8b", 4))
    for code in (codes[at : at + 1] for at in range(4))
    for claimed in (2 ** (8 * size) - 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 3))
} | {
    "places of a memo": b"V[1]\np99999999999\n]r\xff\xff\xff\xff.",
    "two texts": b"V[]\nV[]\n.",
    "no text": b"\x80\x05N.",
    "tuples of tuples": b"\x80\x03)" + b"2\x86" * 60 + b".",
    "a number": b"L" + b"9" * 5000 + b"L\n.",
    "by the registry of extensions": b"\x82\x01.",
    "by a persistent id": b"V[]\nQ.",
    "marks": b"(" * 100_000 + b".",
    "no end": b"V[]\n",
    "nothing": b"",
}
"""Pickles that claim lengths which they do not have, text, bytes, frames and numbers, or hold more than a text."""


def problem(number, tests, hidden, **fields):
    """Return a row of LiveCodeBench's schema."""
    return {
        "question_title": "T",
        "question_content": f"Problem {number}",
        "platform": "atcoder",
        "question_id": f"abc{number}",
        "contest_id": "abc",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(tests),
        "private_test_cases": hidden,
        "metadata": "{}",
        **fields,
    }


STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
CALLS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
SOLUTION = "class Solution:\n    def add(self, values: List[int], more: int) -> List[int]:\n"


@pytest.fixture
def folder(tmp_path):
    rows = [
        problem(1, STDIN, packed(json.dumps([{"input": "5 6", "output": "11", "testtype": "stdin"}]))),
        problem(2, STDIN, json.dumps(STDIN)),
        problem(3, CALLS, packed(json.dumps(CALLS)), starter_code=SOLUTION, metadata='{"func_name": "add"}'),
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_livecodebench_is_read_with_its_hidden_tests(folder):
    one, two, three = benchmarks.read("livecodebench", str(folder))
    assert (one["id"], one["inputs"], one["outputs"]) == ("abc1", ["1 2\n", "5 6"], ["3\n", "11"])
    assert two["inputs"] == ["1 2\n"] * 2 and "test_list" not in two
    assert three["test_list"] == ["assert _listed(Solution().add([1, 2], 3)) == [4, 5]"] * 2 and "inputs" not in three
    assert three["question"].endswith("List[int]:") and "_listed" in three["test_setup_code"]


def test_its_programs_find_what_they_expect_imported(folder):
    *_, three = benchmarks.read("livecodebench", str(folder))
    request = code.code_tests("", f"```python\n{SOLUTION}        pass\n```", three, timeout_s=1.0)
    assert request.prelude.startswith("from typing import *") and request.program[-1].endswith("pass\n")


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch /tmp/gspo_jax-unpickled",))


@pytest.mark.parametrize(
    ("hidden", "says"),
    [
        (packed(Bomb()), "STACK_GLOBAL in a pickle that may hold only text"),
        (packed({"a": 1}), "EMPTY_DICT in a pickle that may hold only text"),
        (packed("[" * 100_000), "hidden tests cannot be unpacked .maximum recursion depth"),
        (packed("9" * 5000), "hidden tests cannot be unpacked .Exceeds the limit"),
        *(pytest.param(squeezed(PICKLES[name]), "hidden tests cannot be unpacked", id=name) for name in PICKLES),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "cannot be unpacked"),
        (base64.b64encode(b"no zlib").decode(), "cannot be unpacked"),
        ("no base64", "cannot be unpacked"),
    ],
)
def test_hidden_tests_hold_only_text(hidden, says, tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps(problem(1, STDIN, hidden)))
    with pytest.raises(UserError, match=says):
        benchmarks.read("livecodebench", str(file))
    assert not os.path.exists("/tmp/gspo_jax-unpickled")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_hidden_tests_are_those_that_pickle_would_read(protocol, tmp_path):
    hidden = [{"input": f"{text}\n", "output": "\u2028é", "testtype": "stdin"} for text in ("", "日\x85" * 999)]
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps(problem(1, STDIN, packed(json.dumps(hidden, ensure_ascii=False), protocol))))
    (found,) = benchmarks.read("livecodebench", str(file))
    assert found["inputs"][1:] == [test["input"] for test in hidden] and found["outputs"][2] == "\u2028é"


def test_a_bomb_of_hidden_tests_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "MOST_BYTES", 1 << 20)
    bomb = base64.b64encode(zlib.compress(bytes(1 << 24))).decode()
    (tmp_path / "test.jsonl").write_text(json.dumps(problem(1, STDIN, bomb)))
    with pytest.raises(UserError, match="hidden tests of more than 1048576 bytes"):
        benchmarks.read("livecodebench", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gsm9k", "{}", "unknown benchmark 'gsm9k'; did you mean 'gsm8k'?"),
        ("gsm8k", "{}", "test.jsonl, line 1: no answer; download gsm8k again, as it was published"),
        ("gsm8k", "[1]", "test.jsonl, line 1: not an object; download gsm8k again"),
        ("gsm8k", "{", "test.jsonl, line 1: not JSON; download gsm8k again"),
        ("aime24", "{", "test.jsonl, line 1: not JSON; download aime24 again"),
        ("gsm8k", "", "has no problems of gsm8k"),
        ("aime24", None, "has no test rows: they are looked for in .*; put them there, or give a file itself"),
        ("aime24", '{"problem": "1+1=", "answer": null}', "line 1: no answer; download aime24 again"),
        ("aime24", '{"problem": null, "answer": "2"}', "line 1: no problem; download aime24 again"),
        ("aime24", '{"problem": "1+1=", "answer": true}', "line 1: answer is not a text; download aime24 again"),
        ("aime24", '{"problem": "1+1=", "answer": 1e999}', "line 1: answer is not a finite number; download"),
        ("gsm8k", '{"question": "1+1=", "answer": "so ####"}', "line 1: no number after ####; download gsm8k again"),
        ("mbpp", '{"text": "f", "code": "f", "test_list": "f"}', "line 1: test_list is no list of texts; download"),
        ("humaneval", '{"task_id": "f", "prompt": "f"}', "line 1: no canonical_solution; download humaneval again"),
        ("mbpp", '{"text": "f", "code": "f", "test_list": [], "test_setup_code": 5}', "test_setup_code is not a text"),
        ("livecodebench", json.dumps(problem(1, STDIN, "[1]")), "line 1: tests that are none .*; download livec"),
        ("livecodebench", json.dumps(problem(1, STDIN, "[]", starter_code=5)), "starter_code is not a text; downl"),
        ("livecodebench", json.dumps(problem(1, STDIN, "[]", public_test_cases="[" * 9999)), "tests that are none"),
        ("livecodebench", json.dumps(problem(1, [STDIN[0] | {"input": 1}], "[]")), "input is 1, and no text"),
        ("livecodebench", json.dumps(problem(1, CALLS, "[]", metadata='{"func_name": "f("}')), "'f.', and no name"),
        ("livecodebench", json.dumps(problem(1, {}, "[]") | {"public_test_cases": "{"}), "line 1: tests that are none"),
    ],
)
def test_other_files_are_refused(name, content, says, tmp_path):
    if content is not None:
        (tmp_path / "test.jsonl").write_text(content)
    with pytest.raises(UserError, match=says) as error:
        benchmarks.read(name, str(tmp_path))
    assert "\n" not in str(error.value)


AIME = b'{"id": 0, "problem": "1+1=", "answer": "2"}\n'
FILES = {
    # the name of a file and its bytes: the answers, or what is said
    "marks and blank lines": ("test.jsonl", b"\xef\xbb\xbf" + AIME + b"\n" + AIME, ["2", "2"]),
    "an array": ("a.json", b"[" + AIME + b"," + AIME + b"]", ["2", "2"]),
    "compressed": ("test.jsonl.gz", gzip.compress(AIME), ["2"]),
    "a table": ("a.csv", b"id,problem,answer\n0,1+1=,2\n", ["2"]),
    "numbers": (
        "a.jsonl",
        b'{"problem": "1+1=", "answer": 204.0}\n{"problem": "1+1=", "answer": 1e-5}',
        ["204", "0.00001"],
    ),
    "400 digits": ("test.jsonl", b'{"problem": "1+1=", "answer": %s}' % (b"9" * 400), ["9" * 400]),
    "other ends of lines in a text": (
        "test.jsonl",
        AIME.replace(b"1+1", "1\u2028+\x851\ufeff".encode()) * 2,
        ["2", "2"],
    ),
    "5000 digits": ("test.jsonl", b'{"problem": "1+1=", "answer": %s}' % (b"9" * 5000), "number with too many digits"),
    "not compressed": ("test.jsonl.gz", AIME, "cannot be read: Not a gzipped file"),
    "cut off": ("test.jsonl.gz", gzip.compress(AIME * 99)[:-20], "cannot be read: Compressed file ended"),
    "Latin-1": ("test.jsonl", '{"problem": "\xe9", "answer": "2"}'.encode("latin-1"), "line 1: not UTF-8; download"),
    "another suffix": ("test.txt", AIME, "is not a file of JSON Lines, JSON, CSV or Parquet"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_benchmark_is_read_in_every_format(name, as_folder, tmp_path):
    file, content, wanted = FILES[name]
    (tmp_path / file).write_bytes(content)
    place = str(tmp_path if as_folder and file != "test.txt" else tmp_path / file)
    if isinstance(wanted, list):
        assert [record["answer"] for record in benchmarks.read("aime24", place)] == wanted
        return
    with pytest.raises(UserError, match=wanted) as error:
        benchmarks.read("aime24", place)
    assert "\n" not in str(error.value)


def test_the_hubs_folders_are_read(tmp_path):
    (tmp_path / "data").mkdir()
    for folder in (".", "data"):  # of one split, which is called train
        table = pyarrow.Table.from_pylist([json.loads(AIME)])
        pyarrow.parquet.write_table(table, tmp_path / folder / "train-00000-of-00001.parquet")
    for place in (tmp_path, tmp_path / "data" / "train-00000-of-00001.parquet"):
        assert [record["id"] for record in benchmarks.read("aime24", str(place))] == ["aime24/0"]
    shutil.rmtree(tmp_path / "data")
    task = {"task_id": "f", "prompt": "f", "canonical_solution": " f", "entry_point": "f", "test": "f"}
    (tmp_path / "openai_humaneval").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([task]), tmp_path / "openai_humaneval" / "test-00000-of-00001.parquet"
    )
    assert [record["answer"] for record in benchmarks.read("humaneval", str(tmp_path))] == [" f"]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data")
@pytest.mark.parametrize(("name", "count"), [("aime24", 30), ("gsm8k", 1319), ("humaneval", 164), ("mbpp", 474)])
def test_published_files_are_read_whole(name, count):
    records = benchmarks.read(name, str(DATA / name))
    assert len(records) == count == len({record["id"] for record in records}) and records.name == str(DATA / name)
    assert all(record["question"] and record["answer"] for record in records)
