"""Runs whose rewards and environments ask servers that are flaky, dead, wrong or slow: real runs, real servers."""

import collections
import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_jax import exits
from gspo_jax.folder.samples import read_samples
from gspo_jax.training.checkpoint import steps
from tests import servers
from tests.pods import (
    ROOT,
    assert_same_bits,
    copy_of_launchers,
    launch_faulty,
    rows_of,
    run_commands,
    run_faulty,
    run_processes,
    train_flags,
)
from tests.servers import Asked, serving

pytestmark = pytest.mark.faults
ITERATIONS = 3

JUDGE = """
from gspo_jax.calls.http import post_json

async def judge(prompt, completion, record):
    return (await post_json("URL", {"text": prompt + completion}))["score"]

def refused(prompt, completion, record):
    import urllib.request
    return float(urllib.request.urlopen("URL", b"{}").read())
"""


def command(workdir: Path, data: Path, own: Path | str, **settings: object) -> list[str]:
    """Return the flags of a run with partial rollouts on one device, whose function `own` a file has.

    All runs with and all without an environment share their compiled programs.
    """
    chosen = {"model.folder": ROOT / "tests" / "golden" / "adder", "data.data_dir": data, "iterations": ITERATIONS}
    chosen |= {"training.minibatches": 1, "checkpoint.every": 1, "log.samples_every": 1, "log.samples": 1000}
    chosen |= {"eval.every": 100, "overlong.penalty": 0.0, "sampling.slots": 4}  # never halved: one loop is compiled
    return train_flags(
        f"{ROOT}/tests/pod_config.py:single,partial", workdir, chosen | {"functions.own": own} | settings
    )


def judged(workdir: Path, data: Path, folder: Path, url: str, name: str = "judge", **settings: object) -> list[str]:
    """Return the flags of a run that a server judges."""
    folder.mkdir(exist_ok=True)
    (folder / "judge.py").write_text(JUDGE.replace("URL", url))
    own = f"{folder / 'judge.py'}:{name}"
    return command(workdir, data, own, **{"rewards.own": 1.0, "rewards.exact_answer": 0.0} | settings)


class Judging:
    """A server's answers: a score, one of the wrong answers a tenth of the time, or none once a file is there."""

    WRONG = (servers.reset, servers.cut, servers.half_json, lambda asked: asked.reply({}, 503))

    def __init__(self, dies_at: Path) -> None:
        self.random, self.dies_at, self.died, self.wrong = random.Random(0), dies_at, 0.0, 0

    def __call__(self, asked: Asked) -> None:
        if self.dies_at.exists():
            self.died = self.died or time.monotonic()
            servers.reset(asked)
        elif self.random.random() < 0.1:
            self.wrong += 1
            self.random.choice(self.WRONG)(asked)
        else:
            asked.reply({"score": len(asked.body["text"]) % 2})


def test_a_server_that_fails_now_and_then_costs_nothing_and_a_dead_one_ends_the_run_until_it_is_back(data, tmp_path):
    """Through a launcher that restarts what it can, and does not restart this. Nothing that was done is lost."""
    root, run = copy_of_launchers(tmp_path / "repository"), tmp_path / "run"
    answers = Judging(run / "checkpoints" / "1")
    with serving(lambda asked: answers(asked)) as server:
        words = judged(run, data, tmp_path / "own", server.url)
        codes, said = launch_faulty("TERM:none:1", words, count=1, root=root, restarts=True)
        assert codes == [exits.UNSCORED], said
        assert time.monotonic() - answers.died < 60
        (error,) = re.findall(r"^error: (.*)$", said, re.MULTILINE)[:1]
        assert re.match(r"reward 'own' failed on \d+ of \d+ responses, most often by: connection reset; ", error), error
        assert "restarting" not in said and "Traceback" not in said
        done = steps(run / "checkpoints")[0]
        answers = Judging(tmp_path / "never")
        codes, said = run_faulty("TERM:none:1", words)
        assert codes == [0] and answers.wrong, said
    assert f"resuming from iteration {done}" in said
    rows = rows_of(run)
    assert [row["iteration"] for row in rows if "reward/failed" in row] == list(range(1, ITERATIONS + 1))
    for step, samples in read_samples(run).items():
        scored = sum(sample["reward"] is not None for sample in samples)
        assert scored + rows[step]["reward/failed"] == len(samples) == 32
        assert rows[step]["reward/own/failed"] == rows[step]["reward/failed"]
        assert step <= done or rows[step]["reward/failed"] <= 1, "of four attempts one succeeds"


def hang(asked: Asked) -> None:
    """Answer after everybody has gone."""
    del asked
    time.sleep(60)


def wrong_key(asked: Asked) -> None:
    """Refuse the request, and repeat a secret."""
    asked.reply({"error": {"message": "no such key: sk-0123456789abcdef"}}, 401)


ENDS = {
    "certificate": ("judge", "the server's certificate is not valid"),
    "hangs": ("judge", "no answer within 2 s"),
    "refused": ("judge", "connection refused"),
    "refused in a thread": ("refused", "connection refused"),
    "wrong key": ("judge", "HTTP status 401"),
    "endless": ("judge", "the reply is longer than 4 MiB"),
}


def test_every_way_of_not_answering_is_one_sentence(data, tmp_path):
    """At the first evaluation, in one process that imports and compiles once."""
    words = []
    with (
        serving(hang, certificate=servers.self_signed(tmp_path)) as certificate,
        serving(hang) as hangs,
        serving(wrong_key) as refuses,
        serving(servers.endless) as endless,
    ):
        nobody = f"http://127.0.0.1:{servers.closed_port()}"
        urls = {"certificate": certificate.url, "hangs": hangs.url, "wrong key": refuses.url, "endless": endless.url}
        for name, (function, _) in ENDS.items():
            place, settings = (
                tmp_path / name.replace(" ", "-"),
                {"scoring.deadline_s": 2.0 if name == "hangs" else 45.0},
            )
            url = urls.get(name, nobody)
            words.append(judged(place / "run", data, make(place), url, function, **settings))
        ended = run_commands([["gspo_jax.train", *each] for each in words])
    for (name, (_, cause)), (code, _, said) in zip(ENDS.items(), ended, strict=True):
        assert code == exits.UNSCORED, f"{name}: {code}, {said}"
        assert re.search(
            rf"^error: reward 'own' failed on \d+ of \d+ responses, most often by: {cause}; ", said, re.M
        ), said
        assert "Traceback" not in said and "0123456789" not in said


def make(folder: Path) -> Path:
    """Make a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


TOY = """
import itertools, json, os, threading, time

LOG, SLEEP = "LOGFILE", SECONDS
numbers, lock = itertools.count(), threading.Lock()

def note(**facts):
    with lock, open(LOG, "a") as log:
        log.write(json.dumps({"pid": os.getpid(), "at": time.monotonic(), **facts}) + "\\n")

class Toy:
    def __init__(self):
        self.number, self.turns = next(numbers), 0
    def reset(self, record):
        self.answer = record["answer"]
        note(does="reset", number=self.number)
    def step(self, message):
        self.turns += 1
        begun = time.monotonic()
        if SLEEP:
            time.sleep(SLEEP)
        note(does="step", number=self.number, turn=self.turns, begun=begun)
        right = message["content"].endswith(self.answer)
        if len(message["content"]) % 5 == 0:
            return None, float(right)
        return f"{len(message['content'])}+{self.turns}=", float(right) / 2
    def close(self):
        note(does="close", number=self.number)
"""


def playing(folder: Path, data: Path, *, seconds: float = 0.0, **settings: object) -> list[str]:
    """Return the flags of a run in `folder` / "run" with an environment whose replies take some time."""
    make(folder)
    (folder / "toy.py").write_text(TOY.replace("LOGFILE", str(folder / "log")).replace("SECONDS", str(seconds)))
    chosen = {
        "environment.name": "own",
        "environment.turns": 3,
        "rewards.environment": 1.0,
        "rewards.exact_answer": 0.0,
    }
    chosen |= {"environment.patience_s": 60.0, "data.max_prompt_length": 16}
    return command(folder / "run", data, f"{folder / 'toy.py'}:Toy", **chosen | settings)


def noted(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each process's environments have noted, the first process first."""
    found = collections.defaultdict(list)
    for line in (folder / "log").read_text().splitlines():
        found[json.loads(line)["pid"]].append(json.loads(line))
    return dict(found)


def count(events: list[dict[str, Any]], does: str) -> int:
    return sum(event["does"] == does for event in events)


def test_episodes_with_objects_go_on_after_a_kill_as_if_there_was_none(data, tmp_path):
    """The objects are gone, and new ones are given the earlier turns of unfinished episodes again; no bit changes."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_processes(1, "-m", "gspo_jax.train", *playing(whole, data))
    codes, said = run_faulty("KILL:score:2", playing(broken, data))
    assert codes == [-signal.SIGKILL], said
    (said,) = run_processes(1, "-m", "gspo_jax.train", *playing(broken, data))
    assert "resuming from iteration 1" in said
    assert_same_bits(whole / "run", broken / "run", step=ITERATIONS)
    samples = read_samples(whole / "run")
    assert samples == read_samples(broken / "run") and len(samples) == ITERATIONS
    rows = rows_of(whole / "run")
    assert max(row.get("response/older", 0) for row in rows) > 0, "some episodes are resumed"
    assert 1 < max(row.get("response/turns", 0) for row in rows) <= 3
    assert any(row.get("reward/environment", 0) > 0 for row in rows)
    (unbroken,), (_, resumed) = noted(whole).values(), noted(broken).values()
    evaluated = 2 * 64  # at the beginning and at the end
    begun = 4 * (16 + 8 * (ITERATIONS - 1))
    assert count(unbroken, "reset") == evaluated + begun, "each episode has one object, and is asked about once a turn"
    for events in (unbroken, resumed):
        assert count(events, "close") == count(events, "reset")
        turns = collections.Counter((event["number"], event["turn"]) for event in events if event["does"] == "step")
        assert set(turns.values()) == {1}


def test_hundreds_of_slow_replies_come_side_by_side(data, tmp_path):
    """200 ms each; what counts is for how long any was awaited, whatever else the machine does."""
    run_processes(1, "-m", "gspo_jax.train", *playing(tmp_path, data, seconds=0.2, iterations=2))
    (events,) = noted(tmp_path).values()
    spans = sorted((event["begun"], event["at"]) for event in events if event["does"] == "step")
    assert len(spans) > 150
    awaited, ends = 0.0, -np.inf
    for begun, ended in spans:
        awaited += max(0.0, ended - max(begun, ends))
        ends = max(ends, ended)
    assert awaited < 0.2 * len(spans) / 5, f"{len(spans)} replies were awaited for {awaited:.1f} s"
