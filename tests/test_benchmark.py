"""A benchmark by command: killed and resumed, and the numbers of its answers."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gspo_jax import benchmark
from tests.pods import ROOT

ADDER = ROOT / "tests" / "golden" / "adder"


def rows(verdicts, answers=None, rewards=("r",)):
    """The rows of problems whose samples have these verdicts."""
    return [
        {
            "problem": p,
            "id": str(p),
            "answer": (answers or verdicts)[p][i],
            "scores": dict.fromkeys(rewards, score),
            "truncated": i == 0,
        }
        for p, scores in enumerate(verdicts)
        for i, score in enumerate(scores)
    ]


def summarize(written, **named):
    return benchmark.summarize(written, ("r",), lambda row: "r", seed=0, **{"majority": True, **named})


def test_training_starts_without_math_verify():
    """Which takes a second to import; the workers of rewards do it."""
    code = "import sys, gspo_jax.train; sys.exit('math_verify' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_numbers_of_answers():
    verdicts = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, None], [None] * 4]
    found = summarize(rows(verdicts, [["a", "b", "c", "c"], ["x", "x", "y", "z"], ["a"] * 4]))
    assert found["mean"] == pytest.approx((1 / 4 + 2 / 3) / 2) and found["means"] == {"r": pytest.approx(found["mean"])}
    assert found["pass"]["1"] == pytest.approx(found["mean"]) and found["pass"]["2"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["pass"]["4"] == 1.0, "of the one problem with four judged samples"
    assert found["majority"]["4"] == 0.0, "c is the most frequent"
    assert found["truncated"] == 0.25 and found["failed"] == pytest.approx(5 / 12)
    low, high = found["intervals"]["mean"]
    assert 0 <= low < found["mean"] < high <= 1
    json.dumps(found, allow_nan=False)


def test_programs_have_no_majority():
    assert summarize(rows([[1.0], [0.0]]), majority=False)["majority"] == {}


def test_a_benchmark_without_any_score_is_an_error():
    with pytest.raises(RuntimeError, match="none of the 2 responses could be scored"):
        summarize(rows([[None, None]]))


def test_what_no_problem_has_enough_samples_for_is_none():
    found = summarize(rows([[1.0, None], [None, 0.0]]))
    assert found["pass"]["2"] is None and found["intervals"]["pass"]["2"] is None
    facts = {"benchmark": "b", "problems": 2, "samples": 2, "answers": "a", **found}
    assert "pass@2 –" in benchmark.described(facts)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 1,234.50", "1234.5"),
        (r"so \boxed{x + 1}", "x + 1"),
        ("<think>#### 4</think>#### 5 million", "5000000"),
        ("<think>#### 4", None),
        ("Answer: (C) 12", "C"),
        ("The answer is $18$.", "18"),
        ("Answer: 18 apples\nor so", "18"),
        ("18", None),
        ("", None),
    ],
)
def test_equal_answers_are_equal_texts(completion, answer):
    assert benchmark.answer_of("", completion) == answer


def command(folder, facts, samples=4):
    """Twelve additions in three batches, by the golden adder."""
    problems = folder.parent / "sums.jsonl"
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 7) for b in range(2, 5)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in sums))
    config = {"model.folder": ADDER, "data.prompts_per_batch": 4, "sampling.max_response_length": 8}
    return [
        *(sys.executable, "-m", "gspo_jax.evaluate", "--config=configs/tiny.py:single", f"--workdir={folder}"),
        *(f"--config.{field}={value}" for field, value in config.items()),
        *(f"--benchmark={problems}", f"--samples={samples}", f"--json={facts}"),
    ]


def without_place(facts):
    found = json.loads(facts.read_text())
    return {name: value for name, value in found.items() if name != "answers"}


@pytest.mark.faults
def test_killed_and_resumed_it_finds_the_same(tmp_path):
    """kill -9 after the first batch, a torn line, and again: the JSON is that of an unbroken evaluation."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    subprocess.run(command(tmp_path / "whole", one), cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen(command(tmp_path / "broken", other), cwd=ROOT, stderr=subprocess.DEVNULL)
    answers = tmp_path / "broken" / "benchmarks"
    deadline = time.monotonic() + 300
    while not any(file.stat().st_size for file in answers.glob("*.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (file,) = answers.iterdir()
    with open(file, "a") as written:
        written.write('{"batch": 1, "id": "torn')
    done = subprocess.run(command(tmp_path / "broken", other), cwd=ROOT, check=True, capture_output=True, text=True)
    assert "has the answers of" in done.stdout
    assert without_place(one) == without_place(other)
    found = json.loads(other.read_text())
    assert found["problems"] == 12 and math.isfinite(found["mean"]) and set(found["pass"]) == {"1", "2", "4"}
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(kept) == 48 and np.mean([row["scores"]["exact_answer"] for row in kept]) == pytest.approx(found["mean"])
    assert found["protocol"]["weights"] and found["protocol"]["first_prompt"].startswith("3+2=")
