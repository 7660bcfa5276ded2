"""Rewards for programs: which program is judged, by what, and what the verdict scores, in the real sandbox."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.data import benchmarks
from gspo_jax.errors import UserError
from gspo_jax.rewards import code
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.sandbox import Sandbox, Verdict, box
from gspo_jax.sandbox.inside.border import Border
from gspo_jax.sandbox.inside.choose import choose
from gspo_jax.sandbox.inside.compare import same
from gspo_jax.sandbox.inside.values import Unsendable, encode
from gspo_jax.setup.checks import check

ROOT = Path(__file__).parents[2]
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


def _short(value):
    return repr(value[:20])


@pytest.fixture(scope="module")
def judged():
    """Judge completions in a sandbox: (name, completions, record, prompt) -> outcomes."""
    try:
        started = Scorer(dict.fromkeys(code.__all__, 1.0), timeout_s=5.0, workers=2)
    except UserError as error:
        pytest.skip(str(error))

    def judge(name, completions, record, prompt=""):
        rows = [(prompt, completion, record) for completion in completions]
        return started.outcomes(rows, {each: [each == name] * len(rows) for each in code.__all__})[name]

    with started:
        yield judge


@pytest.fixture
def scored(judged):
    """Score completions in a sandbox: (name, completions, record, prompt) -> scores, None where there is none."""
    return lambda *asked: [outcome.value for outcome in judged(*asked)]


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
        ({"compare": "number"}, "print(2 * int(input()) + 1e-5)", 0),
        ({"compare": "livecodebench"}, "print(2.0 * int(input()))", 1),
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


RIGHT, WRONG, BAD = "def f(x):\n    return x + 1", "def f(x):\n    return x + 2", "def f(x):\n    return ("
AT_FAULT = [
    ({"test_setup_code": "from collections import Mapping"}, "set-up of a test: ImportError"),
    ({"test_setup_code": "__import__('numpy')"}, "No module named 'numpy'"),
    ({"test_setup_code": "if True:\n    import numpy"}, "No module named 'numpy'"),
    ({"test_setup_code": "1 / 0"}, "set-up of a test: ZeroDivisionError"),
    ({"test_setup_code": "raise SystemExit"}, "set-up of a test: SystemExit"),
    ({"test_setup_code": "x = ("}, "does not compile"),
    ({"test_list": ["assert f(1) == 2", "assert f(("]}, "does not compile"),
    ({"test_list": ["if True:\n    import numpy\nassert f(1) == 2"]}, "No module named 'numpy'"),
    ({"test_list": ["# assert f(1) == 2"]}, "the tests assert nothing"),
    ({"test_list": ["f(1)"]}, "the tests assert nothing"),
    ({"test_list": ["assert True"]}, "the tests ask nothing of the program"),
    ({"test": "def check(candidate):\n    candidate(1)", "entry_point": "f"}, "the tests assert nothing"),
    ({"test_list": [], "test_setup_code": ""}, "test_list is empty"),
    ({"test_setup_code": "import numpy"}, "test_setup_code imports numpy"),
]


def test_a_record_that_is_at_fault_has_no_score_whatever_the_program(judged):
    for fields, says in AT_FAULT:
        record = {"test_list": ["assert f(1) == 2"], **fields}
        for outcome in judged("code_tests", [RIGHT, WRONG, BAD], record):
            assert outcome.value is None and says in outcome.error, (fields, outcome)


@pytest.mark.parametrize(
    "record",
    [
        {"test_setup_code": "try:\n    import numpy\nexcept ImportError:\n    numpy = None"},
        {"test_setup_code": "def near(a, b):\n    assert a == b", "test_list": ["near(f(1), 2)"]},
        {
            "test_list": [
                "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)"
            ]
        },
        {"test_list": ["import sys\nif f(1) != 2: sys.exit(1)"]},
        {"test_list": ["wanted = 2", "assert f(1) == wanted"]},
        {"test_setup_code": "found = f(1)", "test_list": ["assert found == 2"]},
    ],
    ids=str,
)
def test_other_records_judge_programs(scored, record):
    record = {"test_list": ["assert f(1) == 2"], **record}
    assert scored("code_tests", [RIGHT, WRONG, BAD, "x = 1"], record) == [1, 0, 0, 0]


CASES = """import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(f(1), 2)
    def test_b(self):
        self.assertEqual(f(2), 3)"""
CAUGHT = """raised = []
for x in (1, 2):
    try:
        assert f(x) == x + 1
    except BaseException as error:
        raised.append(error)
if raised:
    raise raised[0]"""


@pytest.mark.parametrize("test", [CASES, CAUGHT], ids=["unittest", "caught"])
def test_whatever_a_program_raises_more_than_once_is_its_own_fault(scored, test):
    """Neither what ends a run well, nor what says that a test lacks something."""
    raised = (
        "SystemExit(0)",
        "ImportError('numpy')",
        "FileNotFoundError()",
        "TypeError(\"'module' object is not callable\")",
    )
    programs = [f"import math\ndef f(x):\n    raise {error}" for error in raised]
    assert scored("code_tests", [RIGHT, *programs], {"test_list": [test]}) == [1, 0, 0, 0, 0]


NAMED = {
    "called": {"test_list": ["assert {0}(1) == 2"]},
    "imported by the set-up": {"test_setup_code": "import {0}", "test_list": ["assert {0}(1) == 2"]},
    "imported by the test": {"test": "import {0}\ndef check(c):\n    assert c(1) == 2", "entry_point": "{0}"},
    "called by name": {"test": "def check(c):\n    assert {0}(1) == 2", "entry_point": "{0}"},
    "handed over": {"test_list": ["assert list(map({0}, [1])) == [2]"]},
}


@pytest.mark.parametrize("how", NAMED)
def test_a_function_named_like_a_module_is_the_programs(scored, how):
    for name in ("copy", "heapq", "string", "random"):
        record = json.loads(json.dumps(NAMED[how]).replace("{0}", name))
        programs = [program.replace("f(", f"{name}(") for program in (RIGHT, WRONG, "x = 1")]
        assert scored("code_tests", programs, record) == [1, 0, 0], name


@pytest.mark.parametrize(
    ("setup", "test"),
    [("", "import math\nassert math(1) == 2"), ("import math", "assert math.isclose(math(1), 2)")],
)
def test_a_test_that_takes_a_module_for_the_function_has_no_score(judged, setup, test):
    record = {"test_setup_code": setup, "test_list": [test]}
    right, missing = judged("code_tests", ["def math(x):\n    return x + 1", "x = 1"], record)
    assert right.value is None and "'module' object is not callable" in right.error and missing.value == 0


CHECKERS = {
    "raises": ("return int(output) == int(expected)", "print('six')"),
    "asserts": ("assert output.split()\nreturn output.split()[0] == expected", "print()"),
    "gives no verdict": ("return {'6': True, '7': False}.get(output.strip())", "print(8)"),
    "is no number": ("return float(output) / 6", "print('nan')"),
    "ends": ("import os\nif output == 'x\\n':\n    os._exit(0)\nreturn output.strip() == expected", "print('x')"),
    "is nested deeply": ("import json\nreturn json.loads(output) == 6", "print('[' * 100000)"),
    "cannot be handed over": ("return output.strip() == expected", "import os\nos.write(1, b'\\xff' * (3 << 20))"),
    "eats memory": ("return len([0] * int(output)) == 6", "print(10 ** 12)"),
}


@pytest.mark.parametrize("how", CHECKERS)
def test_a_checker_that_breaks_on_the_output_is_the_programs_fault(scored, how):
    body, breaking = CHECKERS[how]
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    record = {"inputs": ["3"], "outputs": ["6"], "checker": f"def check(input, expected, output):\n{lines}"}
    assert scored("code_stdin", ["print(6)", breaking, "print(0)"], record) == [1, 0, 0]


@pytest.mark.parametrize(
    "body",
    ["raise ValueError", "return None", "if output == expected:\n        return False\n    raise ValueError"],
)
def test_a_checker_that_breaks_on_what_is_expected_gives_no_score(scored, body):
    record = {"inputs": ["3"], "outputs": ["6"], "checker": f"def check(input, expected, output):\n    {body}"}
    assert scored("code_stdin", ["print('six')", "print(6)"], record) == [None, None]


def test_programs_of_livecodebench_find_builtins_that_no_module_replaces(scored):
    """`from math import *` would leave a `pow` without a modulus."""
    program = (
        "class Solution:\n    def f(self, x):\n        return pow(x, 5, 7) + len(list(accumulate([randint(0, 0)])))"
    )
    record = {"test_list": ["assert Solution().f(3) == 6"], "prelude": benchmarks._PRELUDE}
    assert scored("code_tests", [program], record) == [1]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data")
@pytest.mark.parametrize("benchmark", ["humaneval", pytest.param("mbpp", marks=pytest.mark.slow)])
def test_published_solutions_pass_their_tests(judged, benchmark):
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


_LONG = "1" * 1_000_000


@pytest.mark.parametrize(
    ("expected", "output", "how"),
    [
        *((("1 2\n3", "1 2 \n3\n\n", "exact"), ("1 2\n3", "1  2 3", "token"), ("0.5 a", "0.5000001 a", "number"))),
        *((("inf", "inf", "number"), ("1e3", "1000", "number"))),
        *((("1", "1.0", "number"), ("5", "+5", "number"), ("5", "5.", "number"), ("1000", "1e3", "number"))),
        *(
            (
                ("7", "007", "number"),
                ("0", "-0", "number"),
                (".5", "0.5e0", "number"),
                ("Case #1: 5", "Case #1: 5.0", "number"),
            )
        ),
        *((("2", "1.9999999999", "number"), ("0", "5.6e-17", "number"), ("1e9", "1000000500", "number"))),
        *((("-Infinity", "-inf", "number"), ("nan", "-NaN", "number"), ("a  b", "a\n\nb \n", "number"))),
        *(((_LONG, f"+0{_LONG}.0", "number"), ("1e1000000", "1" + "0" * 1_000_000, "number"))),
        *((("1e999999999", "1.0000001e999999999", "number"), ("0.0", "1e-999999999", "number"))),
        *((("1 2\n3", " 1.0  2 \r\n3e0\n\n", "livecodebench"), ("a b\n", "\n a b ", "livecodebench"))),
        *((("1000", "1_000", "livecodebench"), ("nan", "nan", "livecodebench"), ("", " \n", "livecodebench"))),
    ],
    ids=_short,
)
def test_outputs_that_are_the_same(expected, output, how):
    assert same(expected, output, how)


@pytest.mark.parametrize(
    ("expected", "output", "how"),
    [
        *((("1 2\n3", "1 2 3", "exact"), (" 1", "1", "exact"), ("1 2", "1 2 3", "token"), ("0.5", "0.51", "number"))),
        *((("a", "b", "number"), ("1", "", "number"), ("nan", "1", "number"))),
        *((("1000000007", "1000000008", "number"), ("998244352", "998244000", "number"), ("0", "1", "number"))),
        *((("9007199254740993", "9007199254740992.0", "number"), ("1000000007", "1000000007.01", "number"))),
        *((("123456789012345678901", "123456789012345678902", "number"), ("1" + "0" * 20, "1e20 1", "number"))),
        *(((_LONG, _LONG[1:] + "2", "number"), ("1000.0", "1000.1", "number"), ("-1.5", "1.5", "number"))),
        *(
            (
                ("1", "inf", "number"),
                ("1.5", "nan", "number"),
                ("inf", "1e999999999", "number"),
                ("inf", "-inf", "number"),
            )
        ),
        *((("1", "1e999999999", "number"), ("1e999999999", "2e999999999", "number"), ("1.5", "1e" + _LONG, "number"))),
        *((("16", "0x10", "number"), ("1000", "1_000", "number"), ("1", "١", "number"), ("YES", "yes", "number"))),
        *((("1.5", _LONG + "x", "number"), ("1", "- 1", "number"), ("1", "1\0", "number"))),
        *(
            (
                ("1 2\n3", "1 2 3", "livecodebench"),
                ("1\n2", "1\n\n2", "livecodebench"),
                ("0.5", "0.5000001", "livecodebench"),
            )
        ),
        *((("a", "A", "livecodebench"), ("1 a", "1.0 a", "livecodebench"), ("nan", "NaN", "livecodebench"))),
        *(
            (
                ("1", "sNaN", "livecodebench"),
                ("1", "1e" + "9" * 30, "livecodebench"),
                (_LONG, _LONG + "1", "livecodebench"),
            )
        ),
    ],
    ids=_short,
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
        UserError, match=r"no program bwrap; run .*apt-get install -y bubblewrap, or set scoring.unsafe=True"
    ):
        check(config)
    with pytest.raises(UserError, match="apt-get install -y bubblewrap"):
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
