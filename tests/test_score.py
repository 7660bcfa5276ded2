"""The command `score`: every row is written with its scores, or with the reason why there is none."""

import json

import pytest

from gspo_jax import exits, score

ROWS = [
    {"prompt": "1+1=", "completion": "#### 2", "answer": "2", "id": 7},
    {"completion": "#### 3", "answer": "2"},
    {"completion": "nothing", "answer": 3},
]
OWN = """
def polite(prompt, completion, record):
    return float("thanks" in completion) if record["answer"] == "2" else None
"""


@pytest.fixture
def files(tmp_path):
    source, target, own = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "mine.py"
    source.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    own.write_text(OWN)
    return source, target, own


def test_rows_are_written_with_scores_and_reasons(files, capsys, tmp_path):
    source, target, own = files
    facts = tmp_path / "facts.json"
    words = [f"--reward=exact_answer,{own}:polite", f"--in={source}", f"--out={target}", f"--json={facts}"]
    assert score.main(words) == 0
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert [{k: v for k, v in row.items() if k not in ("scores", "errors")} for row in written] == ROWS
    assert [row["scores"] for row in written[:2]] == [
        {"exact_answer": 1.0, "polite": 0.0},
        {"exact_answer": 0.0, "polite": 0.0},
    ]
    assert written[2]["scores"]["polite"] is None and written[2]["errors"] == {"polite": "returned None"}
    found = json.loads(facts.read_text())
    assert found["rows"] == 3 and found["rewards"]["polite"] == {"mean": 0.0, "failed": 1}
    assert found["rewards"]["exact_answer"]["mean"] == pytest.approx(1 / 3)
    assert "polite" in capsys.readouterr().out


def test_a_reward_that_raises_on_every_row_is_told_row_by_row(files, capsys):
    source, target, own = files
    own.write_text("def lost(prompt, completion, record):\n    return record['wanted']\n")
    assert score.main([f"--reward={own}:lost", f"--in={source}", f"--out={target}"]) == exits.UNSCORED
    assert "reward 'lost' scored none of 3 rows, most often by: KeyError: 'wanted'" in capsys.readouterr().err
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert all(row["scores"] == {"lost": None} and "KeyError: 'wanted'" in row["errors"]["lost"] for row in written)


@pytest.mark.parametrize(
    ("reward", "content", "says"),
    [
        ("exact_anser", "", "no reward 'exact_anser'; did you mean 'exact_answer'?"),
        ("mine.py:f,other.py:f", "", "names two functions alike; rename one"),
        ("nowhere.py:f", "{}", "in.jsonl:1 has no text `completion`"),
        ("nowhere.py:f", '{"completion": ""}', "--reward: there is no file 'nowhere.py'"),
        ("exact_answer", "[1]", "in.jsonl:1 has no text `completion`; each line has to be a JSON object with one"),
        ("exact_answer", '{"completion": ""}\n{', "in.jsonl:2 is not JSON"),
        ("exact_answer", '{"completion": "", "prompt": []}', "has a `prompt` that is no text"),
        ("exact_answer", b"\xff", "cannot be read: it is not UTF-8"),
        ("exact_answer", None, "cannot be read: No such file or directory; give a file of JSON Lines with --in"),
    ],
)
def test_mistakes_are_one_sentence(reward, content, says, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert score.main([f"--reward={reward}", f"--in={source}", f"--out={tmp_path / 'out.jsonl'}"]) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


REFERENCES = {"null": "no answer", '""': "answer is empty", "NaN": "no answer", "-Infinity": "no answer",
              "1e999": "no answer", "true": "answer is not a text", '["2"]': "answer is not a text"}  # fmt: skip


@pytest.mark.parametrize("reward", ["exact_answer", pytest.param("math_verify", marks=pytest.mark.slow)])
def test_a_row_without_a_reference_has_no_score_of_a_reward_that_needs_one(reward, files):
    source, _, own = files
    target = source.parent / "new" / "folder" / "out.jsonl"
    own.write_text("def seen(prompt, completion, record):\n    return 1.0\n")
    source.write_text("".join(f'{{"completion": "#### 2", "answer": {answer}}}\n' for answer in REFERENCES))
    assert score.main([f"--reward={reward},{own}:seen", f"--in={source}", f"--out={target}"]) == 0
    written = [json.loads(line, parse_constant=pytest.fail) for line in target.read_text().splitlines()]
    for row, reason in zip(written, REFERENCES.values(), strict=True):
        assert row["scores"] == {reward: None, "seen": 1.0} and row["errors"] == {reward: reason}


def test_numbers_of_options_are_named_as_they_are_given(files, capsys):
    source, target, _ = files
    assert score.main(["--reward=exact_answer", f"--in={source}", f"--out={target}", "--workers=0"]) == 2
    assert "--workers is 0 and --timeout_s 2.0; both must be above 0, and finite" in capsys.readouterr().err


def test_a_mark_is_no_data_nulls_are_absent_and_a_line_ends_at_its_end(files):
    source, target, own = files
    own.write_text("def seen(prompt, completion, record):\n    return float(prompt == '' and 'answer' not in record)\n")
    row = {"prompt": None, "completion": "a\u2028b\x85", "answer": None, "of": {"x": None}}
    source.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8-sig", newline="\n")
    assert score.main([f"--reward={own}:seen", f"--in={source}", f"--out={target}"]) == 0
    assert json.loads(target.read_text())["scores"] == {"seen": 1.0}
