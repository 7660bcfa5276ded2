"""Numbers of files become the texts that a person would write."""

import json

import numpy as np
import pytest

from gspo_jax import score
from gspo_jax.data import files, rows
from gspo_jax.data.rows import Source
from gspo_jax.data.written import number_text, widen


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00001, "0.00001"),
        (1e16, "10000000000000000"),
        (-1.5e-7, "-0.00000015"),
        (5.0, "5"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (18.90, "18.9"),
        (100000.0, "100000"),
        (1 / 3, "0.3333333333333333"),
        (1e300, "1" + "0" * 300),
        (2**70, str(2**70)),
    ],
)
def test_numbers_are_positional_and_short(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_narrow_floats_are_as_short_as_they_were(kind):
    found = widen(np.array([0.1, 1e-5, 2.5], kind))
    assert [number_text(value) for value in found.tolist()] == ["0.1", "0.00001", "2.5"]
    assert number_text(float(widen(kind(0.1)))) == "0.1"


def test_answers_of_parquet_have_the_precision_of_their_column(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    inner = pa.struct([("value", pa.float32()), ("all", pa.list_(pa.float32()))])
    columns = {
        "question": ["a", "b"],
        "answer": pa.array([0.1, 1e-5], pa.float32()),
        "wide": pa.array([0.1, 1e-5], pa.float64()),
        "half": pa.array([np.float16(0.1), np.float16(2.5)], pa.float16()),
        "inner": pa.array([{"value": 0.7, "all": [0.1, None]}, None], inner),
        "pairs": pa.array([[("x", 0.1)], None], pa.map_(pa.string(), pa.float32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")

    def answers(name):
        source = Source(str(tmp_path / "rows.parquet"))
        return [row["answer"] for row in rows.load({"": source}, split="train", held_out=0, answer=name, limit=None)]

    assert answers("answer") == answers("wide") == ["0.1", "0.00001"]
    assert answers("half") == ["0.1", "2.5"]
    assert answers("inner.value") == ["0.7"]
    (first, _) = files.read(str(tmp_path / "rows.parquet"), "train")
    assert first.content["pairs"] == [["x", 0.1]] and first.content["inner"]["all"] == [0.1, None]


def test_answers_of_json_are_read_and_scored_as_numbers(tmp_path):
    lines = [
        {"question": "a", "completion": "#### 0.00001", "answer": 1e-05},
        {"question": "b", "completion": "\\boxed{e-5}", "answer": 1e-05},
        {"question": "c", "completion": "#### 5", "answer": 5.0},
        {"question": "d", "completion": "#### 5", "answer": 5},
    ]
    place, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    place.write_text("\n".join(map(json.dumps, lines)))
    records = rows.load({"": Source(str(place))}, split="train", held_out=0, limit=None)
    assert [record["answer"] for record in records] == ["0.00001", "0.00001", "5", "5"]
    assert score.main(["--reward=exact_answer", f"--in={place}", f"--out={target}"]) == 0
    scored = [json.loads(line)["scores"]["exact_answer"] for line in target.read_text().splitlines()]
    assert scored == [1.0, 0.0, 1.0, 1.0]
