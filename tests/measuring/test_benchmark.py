"""A benchmark by command: killed and resumed, and the numbers of its answers."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gspo_jax import cli, references
from gspo_jax import config as config_lib
from gspo_jax.measuring import published
from gspo_jax.measuring.answers import Answers, Call
from gspo_jax.setup import relevance
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
    return published.summarize(written, ("r",), lambda row: "r", seed=0, **{"majority": True, **named})


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
    assert "pass@2 –" in published.described(facts)


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
    assert published.answer_of("", completion) == answer


def test_what_a_file_of_answers_has_of_whole_calls_is_kept_once(tmp_path):
    """Four problems in two batches, four samples in two calls of each: whatever the file has, 16 rows become of it."""
    calls = [Call(range(p, p + 2), range(s, s + 2)) for p in (0, 2) for s in (0, 2)]

    def made(call, text=""):
        return [{"problem": p, "sample": s, "text": text} for p in call.problems for s in call.samples]

    def opened(protocol="a"):
        return Answers(tmp_path, "b", {"protocol": protocol}, calls)

    answers = opened()
    assert answers.done == 0
    for call in calls[:2]:
        answers.add(made(call))
    answers.add(made(calls[0], "of a second command"))
    answers.add(made(calls[2])[:3])
    with open(answers.file, "a") as file:
        file.write('{"problem": 2, "sam')
    again = opened()
    assert again.done == 2 and again.file == answers.file and len(again.rows()) == 8
    for call in calls[2:]:
        again.add(made(call))
    rows = [(row["problem"], row["sample"], row["text"]) for row in again.rows()]
    assert rows == [(p, s, "") for p in range(4) for s in range(4)]
    assert opened().done == 4 and opened("another").done == 0
    for damage in (b"5\n", b"null\n", b"{}\n", b"\xff\xfe\n", b"[" * 99_999):
        with open(again.file, "ab") as file:
            file.write(damage)
        assert opened().done == 4 and len(opened().rows()) == 16


def write_sums(file, **change):
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 7) for b in range(2, 5)]
    sums[-1] |= change
    file.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return str(file)


JUDGE = """
def grader(prompt, completion, record):
    return float(record["answer"] UNLIKE "0")
"""


@pytest.mark.faults
def test_a_second_evaluation_measures_what_it_is_asked_for(tmp_path):
    """Every change of settings, problems and files is measured anew, in a file of its own with as many rows as it has.

    Nothing else is: with all kinds of fields changed that are not to count, no answer is sampled, or would be another.
    """
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE.replace("UNLIKE", "!="))
    config = cli.load_config(str(ROOT / "configs" / "tiny.py"))
    config.update_from_flattened_dict(
        {"model.folder": str(ADDER), "data.prompts_per_batch": 8, "sampling.max_response_length": 8}
        | {"data.max_prompt_length": 16, "eval.correct": "grader"}
    )
    config.functions.grader, config.rewards.grader = f"{judge}:grader", 1.0
    files = []

    def run(changes, workdir="run", **change):
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(changes)
        rows = write_sums(tmp_path / "sums.jsonl", **change)
        facts = published.run(changed, tmp_path / workdir, name=rows, place="", samples=4)
        files.append(facts["answers"])
        with open(files[-1]) as lines:
            found = list(map(json.loads, lines))
        assert len(found) == 4 * facts["problems"] == 48
        return facts["mean"], {(row["problem"], row["sample"]): row["completion"] for row in found}

    for folder in ("run", "other"):
        (tmp_path / folder).mkdir()
    mean, answers = run({})
    assert mean == 1.0 and len(set(answers.values())) > 4
    assert run({"data.prompts_per_batch": 16})[1] == answers, "noise is that of problem and sample"
    assert all(said.startswith("1") for said in run({"sampling.prefix": "1"})[1].values())
    run({"environment.name": "calculator", "sampling.stop_ids": ("=",)})
    run({"environment.name": "calculator", "sampling.stop_ids": ("=",), "environment.turns": 3})
    assert run({}, answer="0")[0] == pytest.approx(11 / 12)
    assert run({}, question="1+1=")[0] == 1.0
    judge.write_text(JUDGE.replace("UNLIKE", "=="))
    for cached in (references.module, references.function):
        cached.cache_clear()
    assert run({})[0] == 0.0
    assert len(set(files)) == len(files) == 8
    values = {"iterations": 7, "processes.grace_s": 1, "processes.deadline_s": 2.0, "model.remat": "full"}
    values |= {"coldstart.steps": 1, "sampling.rounds": 2, "objective.name": "dapo", "routing.z_weight": 0.1}
    values |= {"reference.kl_weight": 0.1, "training.row_tokens": 64, "optimizer.b1": 0.1, "eval.every": 3}
    values |= {
        "benchmarks.gsm8k": config_lib.benchmark(),
        "log.samples": 1,
        "checkpoint.every": 1,
        "scoring.workers": 1,
    }
    assert all(name.startswith(tuple(relevance.NOT_OF_ANSWERS)) for name in values)
    run(values)
    assert files[-1] == files[-2] and run(values, "other")[1] == answers
    assert Path(files[-1]).name == Path(files[-2]).name


def command(folder, facts, samples=4):
    """Twelve additions in three batches, by the golden adder."""
    problems = write_sums(folder.parent / "sums.jsonl")
    config = {"model.folder": ADDER, "data.prompts_per_batch": 4, "sampling.max_response_length": 8}
    config["sampling.slots"] = 4  # never halved: one loop is compiled
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
