"""The scorer, with real worker processes that really hang and are really killed."""

import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from gspo_jax import signals
from gspo_jax.errors import StopRequested, UserError
from gspo_jax.rewards.scorer import Scorer, attempt
from tests.pods import ROOT

TIMEOUT_S = 2.0

FAKE = """
import mmap, os, signal, time
from decimal import Decimal
from fractions import Fraction
from math import inf, nan
import numpy as np

def moody(prompt, completion, record):
    if completion == "slow":
        time.sleep(0.05)
    if completion == "nap":
        time.sleep(0.2)
    if completion == "raise":
        raise ValueError("no mood for " + prompt)
    return {"none": None, "lenient": None, "nan": float("nan"), "inf": float("inf"), "true": True}.get(completion, 0.5)

def any_(prompt, completion, record):
    return eval(completion)

def broken(prompt, completion, record):
    raise ZeroDivisionError("always")

def picky(prompt, completion, record):
    if completion == "lenient":
        return 0.5
    if completion == "hang":
        time.sleep(60)
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "die once" and not os.path.exists(record["file"]):
        open(record["file"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "exit":
        os._exit(3)
    if completion == "eat":
        mmap.mmap(-1, 5 << 30)
    if completion == "print":
        print("{} not a reply", flush=True)
        os.write(1, b"nor this\\n")
    return moody(prompt, completion, record)
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """Return the references of functions in two modules: `fake_here` for this process and `fake_there` for workers."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "fake_here.py").write_text(FAKE.replace("any_", "here"))
    isolated = "\nfor reward in (there, picky): reward.own_process = True"
    (folder / "fake_there.py").write_text(FAKE.replace("any_", "there") + isolated)
    (folder / "fake_unimportable.py").write_text(
        'import sys\nif "pytest" not in sys.modules: raise ImportError("missing library")\n'
        "def picky(prompt, completion, record): return 1.0\n"
        "picky.own_process = True"
    )
    sys.path.insert(0, str(folder))
    yield {
        **{name: f"fake_here:{name}" for name in ("moody", "broken", "here")},
        **{name: f"fake_there:{name}" for name in ("picky", "there")},
    }
    sys.path.remove(str(folder))


UNCERTAIN = r"\boxed{\frac{9}{3}}"
"""An answer that math-verify itself has to compare."""


@pytest.fixture(scope="module")
def verifier():
    with Scorer({"math_verify": 1.0}, timeout_s=TIMEOUT_S, workers=2) as scorer:
        run(scorer, [UNCERTAIN] * 8)  # until both workers have started
        yield scorer


def run(scorer, completions, answer="3", **record):
    rows = len(completions)
    return scorer.score([f"prompt {i}" for i in range(rows)], completions, [{"answer": answer, **record}] * rows)


def pids(scorer):
    return scorer._pool.pids


def test_scores_are_weighted_and_kept_apart():
    with Scorer({"exact_answer": 1.0, "answer_format": 0.25, "countdown": 0.0}) as scorer:
        assert scorer._pool is None  # no function needs a process
        scores = run(scorer, ["#### 3", "#### 4", "3", "#### 1+2"], numbers="1 2", target="3")
    np.testing.assert_array_equal(scores.total, np.asarray([1.25, 0.25, 0.0, 0.25], np.float32))
    assert scores.total.dtype == np.float32 and scores.failures == 0
    assert {name: s.tolist() for name, s in scores.by_name.items()} == {
        "exact_answer": [1, 0, 0, 0],
        "answer_format": [1, 1, 0, 1],
        "countdown": [0, 0, 0, 1],
    }


RETURNED = {
    # what a function returns: its score, or why it has none
    "0.5": 0.5, "True": 1.0, "False": 0.0, "-3": -3.0, "1e18": 1e18, "Decimal('0.25')": 0.25, "Fraction(1, 4)": 0.25,
    "np.float32(0.5)": 0.5, "np.int64(7)": 7.0, "np.bool_(True)": 1.0, "np.array(0.5)": 0.5, "-0.0": 0.0, "1e-320": 0.0,
    "None": "returned None", "nan": "returned nan", "-inf": "returned -inf", "Decimal('NaN')": "returned nan",
    "1e39": "returned 1e+39; scores are from -1e+18 to 1e+18", "-1e39": "returned -1e+39; scores are",
    "np.float64(1e39)": "returned 1e+39; scores are", "Decimal('1e39')": "returned 1e+39; scores are",
    "Decimal('1e999')": "returned inf", "10**39": "returned 1e+39; scores are", "-10**400": "returned -inf",
    "Fraction(10**400)": "returned inf", "3.5e38": "returned 3.5e+38; scores are", "1e19": "returned 1e+19; scores are",
    "np.float32(3e38)": "returned 3e+38; scores are", "2**63 * 2**63": "returned 8.50706e+37; scores are",
    "'0.5'": "a score is a number, and not the text '0.5'", "b'1'": "a score is a number, and not the text b'1'",
    "[1.0]": "TypeError", "1j": "TypeError", "np.zeros(2)": "TypeError",
}  # fmt: skip
"""Of functions here and in workers alike."""


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_score_is_a_number_that_float32_can_reckon_with(where, fakes):
    """Beyond float32 a reward would be inf; the squares of one beyond 1e19 would, and all advantages 0 or NaN."""
    with Scorer({where: 1.0}, own=fakes, timeout_s=10) as scorer:
        found = scorer.outcomes([("", returned, {}) for returned in RETURNED])[where]
        scores = scorer.score(["a"] * 3, ["0.5", "1e39", "-10**400"], [{}] * 3)
    for (returned, expected), outcome in zip(RETURNED.items(), found, strict=True):
        if isinstance(expected, str):
            assert outcome.value is None and expected in (outcome.error or ""), returned
            assert outcome.raised == ("returned" not in expected), returned
        else:
            assert outcome.value == pytest.approx(expected, abs=1e-300), returned
    assert scores.failures == 2 and scores.total[0] == 0.5 and np.isnan(scores.total[1:]).all()


def test_weights_make_no_infinite_reward_of_scores():
    with Scorer({"exact_answer": 1e30, "answer_format": -1e39}) as scorer:
        scores = run(scorer, ["#### 3", "3"])
    assert scores.failures == 2 and np.isnan(scores.total).all() and scores.by_name["exact_answer"].tolist() == [1, 0]


def test_an_empty_batch_is_empty():
    with Scorer({"answer_format": 1.0}) as scorer:
        assert scorer.score([], [], []).total.shape == (0,)
        with pytest.raises(ValueError, match="1 prompts, 0 completions and 0 records"):
            scorer.score(["a"], [], [])


def test_without_functions_all_rewards_are_0():
    """A teacher may stand in for them."""
    scores = Scorer({}).score(["a", "b"], ["c", "d"], [{}, {}])
    assert scores.total.tolist() == [0, 0] and scores.by_name == {} and scores.failures == 0


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ({"exact_anwser": 1.0}, {}, "no reward 'exact_anwser'; did you mean 'exact_answer'"),
        ({"math_verfy": 1.0}, {}, "did you mean 'math_verify'"),
        ({"zzz": 1.0}, {}, "there are answer_format, countdown, environment, exact_answer, math_verify"),
        ({"final_answer": 1.0}, {}, "no reward 'final_answer'"),  # an importable function, but no reward
        ({"answer_format": math.nan}, {}, "weight nan of reward 'answer_format' is not finite"),
        (
            {"answer_format": 1.0},
            {"workers": 0},
            "scoring.workers is 0 and scoring.timeout_s 2.0; both must be above 0, and finite",
        ),
        ({"answer_format": 1.0}, {"timeout_s": 0.0}, "must be above 0"),
        ({"answer_format": 1.0}, {"timeout_s": math.inf}, "scoring.timeout_s inf; both must be above 0, and finite"),
        ({"answer_format": 1.0}, {"timeout_s": math.nan}, "scoring.timeout_s nan"),
    ],
)
def test_wrong_settings_are_told(functions, options, message):
    with pytest.raises(UserError, match=message):
        Scorer(functions, **options)


GOOD, BAD = ["", "", "", ""], ["raise", "raise", "raise", "raise"]


@pytest.mark.parametrize("name", ["moody", "picky"])
@pytest.mark.parametrize(
    ("records", "completions", "broken"),
    [
        ([["a"] * 4], [BAD], False),  # one record, and nothing else to judge the function by
        ([["a"] * 4, ["b"] * 4], [BAD, BAD], True),
        ([["a", "a", "b", "b"]], [BAD], True),
        ([["a"] * 4, ["b"] * 4, ["c"] * 4], [BAD, GOOD, BAD], False),
        ([["a"] * 4, ["b", "b", "c", "c"], ["d", "d", "e", "e"]], [GOOD, BAD, BAD], False),  # it has worked before
        ([["a"] * 4, *[[f"{i}"] * 4 for i in range(9)]], [GOOD, *[BAD] * 9], True),  # … but not for long
    ],
)
def test_a_function_that_raises_on_one_record_is_not_broken(fakes, name, records, completions, broken):
    """Other records of the batch are of another source, which the function is not asked about."""
    with Scorer({name: 1.0}, own=fakes, scores=mine) as scorer:
        batches = list(zip(records, completions, strict=True))
        for i, (prompts, answers) in enumerate(batches):
            rows = [{"prompt": prompt} for prompt in prompts]
            given = ([*prompts, "other"], [*answers, ""], [*rows, {"other": 1}])
            if broken and i + 1 == len(batches):
                with pytest.raises(RuntimeError, match=r"(?s)raised on all 4 completions; .*no mood for"):
                    scorer.score(*given)
            else:
                assert np.isnan(scorer.score(*given).by_name[name][:4]).all() == (answers is BAD)


def mine(name, record):
    return "other" not in record


@pytest.mark.parametrize("name", ["moody", "picky"])
def test_what_is_no_score_is_nan_and_counted(fakes, name, caplog):
    with Scorer({name: 2.0}, own=fakes) as scorer:
        scores = run(scorer, ["", "none", "nan", "inf", "raise", "true"])
    np.testing.assert_array_equal(scores.total, np.asarray([1, math.nan, math.nan, math.nan, math.nan, 2], np.float32))
    assert scores.failures == 4
    assert f"reward '{name}' failed on 4 of 6 completions: returned None (1 x), " in caplog.text


def test_a_weight_of_zero_only_records(fakes):
    with Scorer({"moody": 0.0, "picky": 1.0}, own=fakes) as scorer:
        scores = run(scorer, ["none", "print", "lenient"])
    assert scores.failures == 1 and np.isnan(scores.by_name["moody"]).tolist() == [True, False, True]
    np.testing.assert_array_equal(scores.total, np.asarray([math.nan, 0.5, 0.5], np.float32))


@pytest.mark.faults
def test_a_function_that_always_raises_ends_the_run(fakes):
    with (
        Scorer({"moody": 1.0, "broken": 1.0}, own=fakes) as scorer,
        pytest.raises(RuntimeError, match=r"(?s)'broken' raised on all 3 completions.*fake_here\.py.*Zero"),
    ):
        run(scorer, ["a", "b", "c"])
    with (
        Scorer({"picky": 1.0}, own=fakes) as scorer,
        pytest.raises(RuntimeError, match=r"(?s)'picky' raised on all 2.*fake_there\.py.*no mood for prompt 0"),
    ):
        run(scorer, ["raise", "raise"])


def test_all_that_hang_are_counted_not_raised(fakes):
    with Scorer({"picky": 1.0}, timeout_s=0.3, own=fakes) as scorer:
        assert run(scorer, ["hang", "hang"]).failures == 2
        assert run(scorer, ["fine"]).total.tolist() == [0.5]


@pytest.mark.faults
def test_a_process_that_dies_is_replaced_and_the_sample_retried_once(fakes, tmp_path, caplog):
    with Scorer({"picky": 1.0}, own=fakes) as scorer:
        before = pids(scorer)
        scores = run(scorer, ["a", "die once", "b", "die", "c"], file=str(tmp_path / "died"))
        np.testing.assert_array_equal(scores.total, np.asarray([0.5, 0.5, 0.5, math.nan, 0.5], np.float32))
        assert "the call's process ended with signal 9, 2 times" in caplog.text
        assert run(scorer, ["exit", "a"]).failures == 1
        assert pids(scorer) == before  # the calls died, not their worker
        os.kill(before[0], signal.SIGKILL)  # killed while idle
        assert run(scorer, ["a", "b"]).failures == 0
        assert not {*before} & {*pids(scorer)}


def test_memory_is_limited(fakes):
    with Scorer({"picky": 1.0}, own=fakes) as scorer:
        scores = run(scorer, ["eat", "a"])
    assert np.isnan(scores.total).tolist() == [True, False]


def test_a_worker_that_cannot_start_is_an_error(fakes, capfd):
    with (
        Scorer({"picky": 1.0}, own={"picky": "fake_unimportable:picky"}) as scorer,
        pytest.raises(RuntimeError, match="reward worker for fake_unimportable could not start: exit code 1"),
    ):
        run(scorer, ["a"] * 50)
    assert "missing library" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{(1, 2)}", "(2, 1)", 0),
        ("#### 3", "3", 1),
        ("#### 4", "3", 0),
        ("nothing", "3", 0),
        ("", "3", 0),
    ],
)
def test_math_verify(verifier, completion, answer, expected):
    assert run(verifier, [completion], answer).total.tolist() == [expected]


HANGS = {
    "power": r"\boxed{10^{10^{10}}}",
    "tower": r"\boxed{9^{9^{9^{9}}}}",
}
TOO_LONG = {
    "brackets": r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "megabyte": r"\boxed{" + "1+" * 500_000 + "1}",
}


@pytest.mark.faults
def test_hanging_answers_are_killed_and_the_others_scored(verifier):
    """An answer that hangs scores NaN in time and costs no worker, one that is too long 0; others keep their scores."""
    fine = [r"\boxed{3}", r"\boxed{4}", UNCERTAIN] * 3
    expected = run(verifier, fine).total.tolist()
    before = pids(verifier)
    for name, hang in HANGS.items():
        start = time.monotonic()
        scores = run(verifier, [*fine[:4], hang, *fine[4:]])
        took = time.monotonic() - start
        assert np.isnan(scores.total[4]) and scores.failures == 1, name
        assert np.delete(scores.total, 4).tolist() == expected, name
        assert took < TIMEOUT_S + 1, (name, took)
    for name, answer in TOO_LONG.items():
        assert run(verifier, [*fine, answer]).total.tolist() == [*expected, 0], name
    assert pids(verifier) == before
    assert run(verifier, fine).total.tolist() == expected


def test_close_ends_the_workers_and_can_be_repeated(fakes):
    scorer = Scorer({"picky": 1.0}, workers=2, own=fakes)
    run(scorer, ["a"])
    workers = pids(scorer)
    assert len(workers) == 2
    scorer.close()
    scorer.close()
    assert not any(alive(pid) for pid in workers)
    with pytest.raises(RuntimeError):
        run(scorer, ["a"])


def alive(pid):
    """Return whether a process runs; False for a zombie, which has ended but is not yet reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_closing_ends_a_scoring_in_another_thread(fakes):
    """Be it between two rows of a function of this process, or while workers score."""
    for rows in (["slow"] * 1000, ["hang"]):
        name = "moody" if rows[0] == "slow" else "picky"
        scorer, ended = Scorer({name: 1.0}, timeout_s=60.0, own=fakes), []

        def score(scorer=scorer, rows=rows, ended=ended):
            with pytest.raises((StopRequested, RuntimeError, CancelledError)):
                scorer.score_here([f"p{i}" for i in range(len(rows))], rows, [{}] * len(rows))
            ended.append(True)

        thread = threading.Thread(target=score)
        thread.start()
        time.sleep(0.1)
        scorer.close()
        thread.join(timeout=10.0)
        assert ended


def test_how_scores_were_found_is_told(verifier, fakes):
    scores = run(verifier, ["#### 3", r"\boxed{4}", "#### 6/2"])
    assert scores.total.tolist() == [1, 0, 1] and scores.without_worker.tolist() == [True, True, False]
    assert len(scores.queued_s) == 1 and 0 <= scores.queued_s[0] <= scores.seconds
    with Scorer({"picky": 1.0}, own=fakes) as scorer:  # one worker, for which the second call has to wait
        scores = run(scorer, ["nap", "nap"])
    assert sorted(seconds > 0.15 for seconds in scores.queued_s) == [False, True]
    assert not scores.without_worker.any()
    with Scorer({"answer_format": 1.0}) as scorer:
        scores = run(scorer, ["#### 3"])
    assert scores.without_worker is None and scores.queued_s == []


def test_scoring_ends_soon_after_it_is_interrupted(fakes):
    """Whatever calls are running or queued."""
    with Scorer({"picky": 1.0}, timeout_s=60.0, own=fakes) as scorer:
        begun = time.monotonic()
        scorer.interrupted = lambda: time.monotonic() - begun > 1.0
        with pytest.raises(StopRequested):
            scorer.score(["p"] * 4, ["hang"] * 4, [{}] * 4)
        assert time.monotonic() - begun < 3.0
    with Scorer({"moody": 1.0}, own=fakes) as scorer:
        scorer.interrupted = lambda: True
        with pytest.raises(StopRequested):
            scorer.score(["p"], ["fine"], [{}])


@pytest.mark.parametrize("name", ["exits", "parses", "cancels"])
def test_what_is_no_exception_is_a_failure_of_the_function_too(name):
    """So a completion ends no run, and a function that does so on each is broken, as one that raises is."""
    scorer = Scorer({name: 1.0}, own={name: f"{ROOT}/tests/leaving.py:{name}"})
    row = ("1+1=", "2", {"answer": "2"})
    (outcome,) = scorer.outcomes([row])[name]
    assert outcome.raised and outcome.error is not None and f"in {name}" in outcome.error
    with pytest.raises(RuntimeError, match=rf"reward '{name}' raised on all 2 completions; .*"):
        scorer.score(["1+1=", "1+2="], ["2", "3"], [row[2], {"answer": "3"}])


def test_a_signal_is_no_failure_of_the_function_that_it_interrupts():
    def interrupted(*row: object) -> None:
        raise signals.Ended(130)

    with pytest.raises(signals.Ended):
        attempt(lambda function, row: function(*row), interrupted, ("", "", {}))
