"""Rewards for programs: which program is judged, by what, and what the verdict scores, in the real sandbox."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.rewards import code
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.sandbox import Sandbox, Verdict, box
from gspo_jax.sandbox.inside.border import Border
from gspo_jax.sandbox.inside.choose import choose
from gspo_jax.sandbox.inside.compare import same
from gspo_jax.sandbox.inside.values import Unsendable, encode
from gspo_jax.setup.checks import check
from gspo_jax.types import UserError

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
"""HumanEval and MBPP, where they are."""
TRIPLE = {
    "entry_point": "triple",
    "test": "def check(candidate):\n    assert candidate(2) == helper(2)\n    assert candidate([1]) == [1, 1, 1]\n",
}
PROMPT = '''def helper(x):
    return 3 * x

def triple(x):
    """Return three times x."""
'''


@pytest.fixture(scope="module")
def scored():
    """Score completions with rewards in a sandbox: (names, completions, record, prompt) -> scores by name."""
    try:
        with Sandbox(workers=1):
            pass
    except UserError as error:
        pytest.skip(str(error))

    def score(name, completions, record, prompt=""):
        with Scorer({name: 1.0}, timeout_s=5.0, workers=2) as scorer:
            rows = len(completions)
            return scorer.score([prompt] * rows, completions, [record] * rows).by_name[name].tolist()

    return score


@pytest.mark.parametrize(
    ("completion", "entry_point", "program"),
    [
        ("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\nc", None, "y = 2\n"),
        ("```python\nx = 1", None, "x = 1"),  # a block that never closes runs to the end
        ("    return 3 * x", "triple", PROMPT + "    return 3 * x"),
        ("def triple(x):\n    return 3 * x", "triple", "def triple(x):\n    return 3 * x"),
        ("triple = lambda x: 3 * x", "triple", "triple = lambda x: 3 * x"),
        ("x = 1", None, "x = 1"),
        ("  ```py\nx = '```'\n  ```", None, "x = '```'\n"),
    ],
)
def test_which_program_is_judged(completion, entry_point, program):
    assert choose(code.programs_of(PROMPT, completion, entry_point=entry_point)) == program


def test_in_a_conversation_the_question_is_what_the_completion_goes_on_from():
    record, chat = {**TRIPLE, "question": PROMPT}, f"<user>\n{PROMPT}<assistant>\n"
    request = code.code_tests(chat, "    return 3 * x", record, timeout_s=1.0)
    assert request.program == (PROMPT + "    return 3 * x",) and request.asked["given"] == (PROMPT,)


def test_functions_are_tested_with_what_the_prompt_gives(scored):
    """A program that changes the prompt's helper does not change the test's."""
    right, cheat = "    return 3 * x", "    return x\n\ndef helper(x):\n    return x"
    wrong = "    return 3 * x if isinstance(x, int) else x"
    assert scored("code_tests", [right, cheat, wrong, "    return ("], TRIPLE, PROMPT) == [1, 0, 0, 0]


def test_asserts_are_counted_apart(scored):
    record = {
        "test_list": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"],
        "test_setup_code": "import math",
    }
    programs = [
        "def f(x):\r\n    return x * x",
        "def f(x):\n    return x",
        "def f(x):\n    return 4",
        "def g(x):\n    pass",
    ]
    assert scored("code_tests_share", programs, record) == pytest.approx([1, 1 / 3, 1 / 3, 0])
    assert scored("code_tests", programs, record) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("record", "completion", "score"),
    [
        ({}, "n = int(input())\nprint(2 * n)", 1),
        ({}, "import sys\nprint(2 * int(sys.stdin.read()))", 1),
        ({}, "import threading\nt = threading.Thread(target=lambda: print(2 * int(input())))\nt.start()", 1),
        ({}, "n = int(input())\nprint(2 * n if n < 9 else 0)", 0),
        ({}, "print(2 * int(input()))\nraise SystemExit(3)", 0),
        ({"compare": "number"}, "print(2 * int(input()) + 1e-7)", 1),
        ({"compare": "exact"}, "print(2 * int(input()), end='  \\n')", 1),
        ({"compare": "exact"}, "print('', 2 * int(input()))", 0),
        ({"checker": "def check(i, e, o):\n    return int(o) % 2 == 0"}, "print(4)", 1),
        ({"checker": "def check(i, e, o):\n    return int(o) % 2 == 0"}, "print(3)", 0),
    ],
)
def test_whole_programs(scored, record, completion, score):
    assert scored("code_stdin", [completion], {"inputs": ["3\n", "20\n"], "outputs": ["6\n", "40\n"], **record}) == [
        score
    ]


def test_the_share_of_inputs(scored):
    record = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "0", "4"]}
    assert scored("code_stdin_share", ["print(input())", "print(0)"], record) == pytest.approx([0.75, 0.25])


def test_what_is_at_fault_has_no_score(scored):
    """A record without tests, tests that do not compile or hand over what cannot cross: NaN, and never 0."""
    fine = {"test_list": ["assert f(1) == 1"]}
    for tests in (["assert f(("], ["assert f(lambda: 1) == 1"]):
        with Scorer({"code_tests": 1.0}, timeout_s=5.0, workers=1) as scorer:
            scores = scorer.score(["", ""], ["def f(x):\n    return x"] * 2, [fine, {"test_list": tests}])
        assert scores.total[0] == 1 and scores.total[1] != scores.total[1] and scores.failures == 1
        assert len(scores.queued_s) == 2 and not scores.without_worker.any()


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data")
@pytest.mark.parametrize("benchmark", ["humaneval", pytest.param("mbpp", marks=pytest.mark.slow)])
def test_published_solutions_pass_their_tests(scored, benchmark):
    if benchmark == "humaneval":
        with gzip.open(DATA / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
            rows = [json.loads(line) for line in file]
        rows = [(row["prompt"], row["canonical_solution"], row) for row in rows]
    else:
        lines = (DATA / "mbpp" / "train.jsonl").read_text().splitlines()
        rows = [(row["text"], row["code"], row) for row in map(json.loads, lines)]
    assert len(rows) == {"humaneval": 164, "mbpp": 474}[benchmark]
    with Scorer({"code_tests": 1.0}, timeout_s=20.0, workers=2) as scorer:
        scores = scorer.score(*map(list, zip(*rows, strict=True)))
    assert scores.total.tolist() == [1.0] * len(rows)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            0,
            -(10**30),
            1.5,
            float("inf"),
            "a\udcff",
            b"a",
            1 + 2j,
            (1, [2, {3: {4}}]),
            {},
            frozenset([()]),
        ),
        *(range(1, 9, 2), int, ValueError, bytearray(b"x")),
    ],
    ids=repr,
)
def test_plain_values_cross_whole(value):
    here, there = Border(first=0), Border(first=1)
    got = there.accept(json.loads(json.dumps(here.message(value))))
    assert got == value and type(got) is type(value)


def test_a_container_stays_one_container_on_both_sides():
    """[a, a] is two names for one list; what changes there, changes here; one that nobody holds is forgotten."""
    here, there = Border(first=0), Border(first=1)
    inner: list[object] = [1]
    outer = {"a": inner, "b": inner}
    got = there.accept(here.message(outer))
    assert got["a"] is got["b"]
    got["a"].append(got)
    assert here.accept(there.message(None)) is None
    assert inner[1] is outer
    del got["a"][1]
    here.accept(there.message(None))
    assert inner == [1] and not here.sweep()
    assert here.message(None)["state"] == []  # nothing has changed
    numbers = len(here._entries)
    del inner, outer
    assert len(here.sweep()) == numbers == 2


def test_what_has_no_end_or_no_copy_does_not_cross():
    with pytest.raises(Unsendable, match="more than 1000000 items"):
        Border(first=0).message(iter(range(1_000_001)))
    assert encode(lambda: 1, lambda item: item) is None


@pytest.mark.parametrize(
    ("expected", "output", "how"),
    [
        *((("1 2\n3", "1 2 \n3\n\n", "exact"), ("1 2\n3", "1  2 3", "token"), ("0.5 a", "0.5000001 a", "number"))),
        *((("inf", "inf", "number"), ("1e3", "1000", "number"))),
    ],
)
def test_outputs_that_are_the_same(expected, output, how):
    assert same(expected, output, how)


@pytest.mark.parametrize(
    ("expected", "output", "how"),
    [
        *((("1 2\n3", "1 2 3", "exact"), (" 1", "1", "exact"), ("1 2", "1 2 3", "token"), ("0.5", "0.51", "number"))),
        *((("a", "b", "number"), ("1", "", "number"), ("nan", "1", "number"))),
    ],
)
def test_outputs_that_differ(expected, output, how):
    assert not same(expected, output, how)


def test_a_score_of_no_tests_is_0():
    assert code.score("code_tests", Verdict()) == code.score("code_tests_share", Verdict()) == 0


def test_without_bubblewrap_a_run_is_refused_before_any_work(monkeypatch):
    config = cli.load_config(str(ROOT / "configs" / "tiny.py"))
    assert not config.scoring.unsafe
    config.rewards = ConfigDict({"code_tests": 1.0})
    config.eval.correct = "code_tests"
    if shutil.which("bwrap"):
        check(config)
    monkeypatch.setattr(box.shutil, "which", lambda name: None)
    with pytest.raises(
        UserError, match=r"no program bwrap; run apt-get install bubblewrap, or set scoring.unsafe=True"
    ):
        check(config)
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        Sandbox(workers=1)
    config.scoring.unsafe = True
    check(config)


def test_without_a_sandbox_programs_are_still_judged_and_ended(monkeypatch):
    """As `scoring.unsafe=True` has it: the limits hold, and what a program leaves behind is ended."""
    monkeypatch.setattr(box.shutil, "which", lambda name: None)
    record = {"test_list": ["assert f(1) == 2"]}
    leave = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(99)\n"
    with Scorer({"code_tests": 1.0}, timeout_s=2.0, workers=1, unsafe=True) as scorer:
        programs = ["def f(x):\n    return x + 1", leave + "def f(x):\n    return 2", "while True:\n    pass"]
        assert scorer.score([""] * 3, programs, [record] * 3).total.tolist() == [1, 1, 0]
