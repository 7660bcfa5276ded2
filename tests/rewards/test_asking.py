"""Rewards that wait for others: each question asked once, whole batches, failures, and no secrets."""

import asyncio
import collections
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gspo_jax.calls import calls
from gspo_jax.calls.calls import Calls, Limits
from gspo_jax.calls.failures import CallFailed
from gspo_jax.errors import ScoringFailed
from gspo_jax.rewards.asking import Questions
from gspo_jax.rewards.scorer import Scorer, Scores

KEY = "sk-0123456789abcdef"
LONG_S = 20.0


def rows(*completions: str, prompt: str = "p", **record: Any) -> list[tuple[str, str, dict[str, Any]]]:
    return [(prompt, completion, dict(record)) for completion in completions]


def values(answers: Any) -> list[float | None]:
    return [answer.result(timeout=LONG_S).value for answer in answers]


class Judge:
    """Gives a completion's length, counts what it is asked, and fails on what it is told to."""

    def __init__(self) -> None:
        self.asked: collections.Counter[str] = collections.Counter()
        self.fails_on: dict[str, BaseException] = {}
        self._lock = threading.Lock()

    def __call__(self, prompt: str, completion: str, record: dict[str, Any]) -> float:
        del prompt, record
        with self._lock:
            self.asked[completion] += 1
        if completion in self.fails_on:
            raise self.fails_on[completion]
        return float(len(completion))


def score(scorer: Scorer, *completions: str, prompt: str = "p") -> Scores:
    return scorer.score([prompt] * len(completions), completions, [{"answer": "3"}] * len(completions))


def test_equal_questions_are_asked_once_also_ahead_and_in_later_batches():
    judge = Judge()
    with Calls(Limits()) as made:
        questions = Questions(judge, made)
        questions.ahead(rows("a", "bb", "a"))
        assert values(questions.ask(rows("a", "bb", "a", "ccc", "ccc"))) == [1, 2, 1, 3, 3]
        assert values(questions.ask(rows("ccc"))) == [3]
        assert values(questions.ask([])) == []
    assert judge.asked == {"a": 1, "bb": 1, "ccc": 1}


def test_other_prompts_and_records_are_other_questions():
    judge = Judge()
    with Calls(Limits()) as made:
        questions = Questions(judge, made)
        for prompt, record in (("p", {}), ("q", {}), ("p", {"x": 1}), ("p", {"x": 2}), ("p", {"x": {"a": 1, 2: 3}})):
            assert values(questions.ask(rows("a", prompt=prompt, **record) * 2)) == [1, 1]
        long = [np.arange(5000), np.where(np.arange(5000) == 2500, 7, np.arange(5000))]
        assert values(questions.ask([("p", "a", {"x": x}) for x in long])) == [1, 1]
    assert judge.asked == {"a": 7}


def test_texts_that_are_no_unicode_are_asked_about_like_others():
    with Calls(Limits(tokens=1)) as made:
        questions = Questions(Judge(), made)
        questions.ahead(rows("\ud800"))
        assert values(questions.ask(rows("\ud800", "\x00", prompt="\udfff", x="\ud800"))) == [1, 1]


def test_a_failure_is_asked_again_in_a_later_batch_and_not_in_its_own():
    judge = Judge()
    judge.fails_on["bb"] = CallFailed("gone")
    with Calls(Limits(tries=1)) as made:
        questions = Questions(judge, made)
        questions.ahead(rows("bb"))
        assert values(questions.ask(rows("bb", "a", "bb"))) == [None, 1, None]
        assert judge.asked["bb"] == 1
        assert values(questions.ask(rows("bb"))) == [None]
        del judge.fails_on["bb"]
        assert values(questions.ask(rows("bb"))) == [2]
        assert judge.asked["bb"] == 3


BATCHES: dict[str, tuple[Callable[[list[str]], Any], list[float | str]]] = {
    "list": (lambda found: [1.0, 2, True], [1, 2, 1]),
    "array": (lambda found: np.asarray([1.0, 2.0, 3.0]), [1, 2, 3]),
    "iterator": (lambda found: (float(len(each)) for each in found), [1, 2, 3]),
    "none": (lambda found: [None, 2.0, math.nan], ["returned None", 2, "returned nan"]),
    "exceptions": (lambda found: [CallFailed("lost"), 2.0, KeyError("x")], ["lost", 2, "KeyError: 'x'"]),
    "short": (lambda found: [1.0], ["returned 1 scores for 3 completions; return one score for each"] * 3),
    "number": (lambda found: 1.0, ["returned no list for 3 completions; return one score for each"] * 3),
    "nothing": (lambda found: None, ["returned no list for 3 completions; return one score for each"] * 3),
    "text": (lambda found: ["1", 2.0, 3.0], ["TypeError: a score is a number, and not the text '1'", 2, 3]),
    "raises": (lambda found: 1 / 0, ["ZeroDivisionError: division by zero"] * 3),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_functions_of_whole_batches(name, kind):
    answer, wants = BATCHES[name]

    def whole(prompts: list[str], completions: list[str], records: list[Any]) -> Any:
        assert prompts == ["p"] * 3 and records == [{"n": 1}] * 3
        asked.append(completions)
        return answer(completions)

    async def whole_too(*columns: Any) -> Any:
        await asyncio.sleep(0)
        return whole(*columns)

    function: Any = whole if kind == "thread" else whole_too
    function.batched, asked = True, []
    with Calls(Limits()) as made:
        questions = Questions(function, made)
        questions.ahead(rows("a", "bb", "ccc", n=1))
        found = [each.result(timeout=LONG_S) for each in questions.ask(rows("a", "bb", "ccc", n=1))]
        assert questions.ask([]) == []
    assert asked == [["a", "bb", "ccc"]]
    assert [each.failed_by if each.value is None else each.value for each in found] == wants


def test_questions_take_tokens_by_the_length_of_their_texts():
    held, most = [0], [0]

    async def slow(prompt: str, completion: str, record: dict[str, Any]) -> float:
        del record
        size = (len(prompt) + len(completion)) // 4
        held[0] += size
        most[0] = max(most[0], held[0])
        await asyncio.sleep(0.002)
        held[0] -= size
        return size

    with Calls(Limits(tokens=100)) as made:
        asked = [each[0] for each in (rows(f"{i:0160d}", prompt="p" * 40) for i in range(20))]
        assert values(Questions(slow, made).ask(asked)) == [50] * 20
    assert most[0] == 100


def test_what_failed_is_counted_apart_from_what_has_no_score():
    judge = Judge()
    judge.fails_on = {"bb": CallFailed("gone"), "ccc": ValueError("odd")}
    with Scorer({"judge": 1.0}, askers={"judge": judge}, limits=Limits(tries=1)) as scorer:
        found = score(scorer, "a", "bb", "ccc", "dddd")
        none = scorer.score(["p"], ["a"], [{}])
    assert found.failed["judge"].tolist() == [False, True, True, False]
    np.testing.assert_array_equal(found.by_name["judge"], np.asarray([1, np.nan, np.nan, 4], np.float32))
    assert found.failures == 2 and none.failures == 0
    nothing = Scorer({"judge": 1.0}, askers={"judge": lambda *row: None})
    with nothing as scorer:
        assert not score(scorer, "a", "b").failed["judge"].any(), "None is an answer"


@pytest.mark.parametrize(
    ("failed", "answered", "most", "ends"),
    [
        (7, 0, 0.5, False),
        (8, 0, 0.5, True),
        (8, 8, 0.5, False),
        (9, 8, 0.5, True),
        (8, 0, 1.0, False),
        (8, 99, 0, True),
    ],
)
def test_a_run_ends_with_more_failures_than_it_may_have(failed, answered, most, ends):
    judge = Judge()
    judge.fails_on = {f"bad {i}": CallFailed("gone" if i else KEY) for i in range(failed)}
    asked = [*judge.fails_on, *(f"good {i}" for i in range(answered))]
    limits = Limits(tries=1)
    with Scorer({"judge": 1.0}, askers={"judge": judge}, limits=limits, most_failed=most) as scorer:
        found = score(scorer, *asked)
        assert found.failed["judge"].sum() == failed
        if not ends:
            scorer.confirm(found.failed, found.by_name)
            return
        with pytest.raises(
            ScoringFailed, match=rf"^reward 'judge' failed on {failed} of {failed + answered} responses, "
        ) as error:
            scorer.confirm(found.failed, found.by_name)
    assert f"most often by: gone; the limit is scoring.most_failed={most:g}" in str(error.value)


def test_a_server_that_fails_a_tenth_of_the_time_costs_no_score(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 0.01)
    failing, lock = random.Random(0), threading.Lock()

    def flaky(prompt: str, completion: str, record: dict[str, Any]) -> float:
        with lock:
            fails = failing.random() < 0.1
        if fails:
            raise ConnectionResetError
        return float(completion)

    with Scorer({"flaky": 1.0}, askers={"flaky": flaky}) as scorer:
        found = score(scorer, *map(str, range(256)))
        scorer.confirm(found.failed, found.by_name)
    np.testing.assert_array_equal(found.by_name["flaky"], np.arange(256))
    assert not found.failed["flaky"].any() and found.failures == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_asked_about_anew_after_one_that_nobody_answered(ahead):
    """A server that was away for a batch is asked again in the next, also ahead of it."""
    judge = Judge()
    judge.fails_on = {f"{i}": ConnectionRefusedError() for i in range(20)}
    with Scorer({"judge": 1.0}, askers={"judge": judge}, limits=Limits(concurrency=4, tries=1)) as scorer:
        assert score(scorer, *judge.fails_on).failures == 20 and 4 <= judge.asked.total() < 8
        judge.fails_on = {}
        asked = [f"again {i}" for i in range(20)]
        if ahead:
            for each in asked:
                scorer.ahead(["p"], [each], [{"answer": "3"}])
        assert score(scorer, *asked).failures == 0


LEAKS = f"""
import os
def leaks(prompt, completion, record):
    if completion == "ok":
        return 1.0
    raise RuntimeError("Authorization: Bearer {KEY} and " + os.environ.get("SERVICE_WORD", "no word") + completion)
"""


@pytest.mark.parametrize("where", ["here", "worker"])
def test_secrets_in_errors_reach_neither_logs_nor_messages(where, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("SERVICE_WORD", "a certain word")  # given to workers by name, so that it is a secret
    (tmp_path / "leaks.py").write_text(LEAKS + ("leaks.own_process = True" if where == "worker" else ""))
    own = {"leaks": f"{tmp_path / 'leaks.py'}:leaks"}
    caplog.set_level("DEBUG")
    said = []
    with Scorer({"leaks": 1.0}, own=own, most_failed=0.1, timeout_s=10.0, environment=["SERVICE_WORD"]) as scorer:
        found = score(scorer, "ok", *([" no"] * 12))
        with pytest.raises(ScoringFailed) as few:
            scorer.confirm(found.failed, found.by_name)
        with pytest.raises(ScoringFailed) as all_:
            for i in range(20):
                score(scorer, " no", prompt=f"{i}")
        said += [str(few.value), str(all_.value)]
        with pytest.raises(ScoringFailed) as long:
            for i in range(20):  # a worker keeps the end of a traceback, which may begin within a secret
                score(scorer, *(" " * (5000 - 40 - i) for i in range(0, 60, 7)), prompt=f"{i}")
        said.append(str(long.value))
    assert "leaks.py" in said[1] and "RuntimeError" in said[0]
    text = "".join(said) + caplog.text + "".join(capfd.readouterr())
    assert "failed on 12 of 13" in text
    for word in (KEY, KEY[-8:], "certain word"):
        assert word not in text, text[max(0, text.index(word) - 200) : text.index(word) + 50]


def test_scoring_waits_no_longer_than_the_deadline_for_what_hangs():
    begun, limits = time.monotonic(), Limits(deadline_s=0.2)
    hangs = {"hangs": lambda *row: time.sleep(LONG_S)}
    with Scorer({"hangs": 1.0}, askers=hangs, limits=limits, most_failed=0.5) as scorer:
        found = score(scorer, *map(str, range(100)))
        assert found.failed["hangs"].all() and time.monotonic() - begun < 5
        with pytest.raises(ScoringFailed, match=r"most often by: no answer within 0\.2 s"):
            scorer.confirm(found.failed, found.by_name)
