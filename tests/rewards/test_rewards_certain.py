r"""Verdicts without a call: what is decided so, what is not, and that math-verify agrees where it can read the same."""

import random
import re
import time

import pytest

from gspo_jax.rewards import answers, certain, isolated

WORKED = (
    "She sells 16 - 3 - 4 = 9 duck eggs a day.\nShe makes 9 * 2 = $18 every day at the farmer's market, or 25% of $72."
)


def verdict(completion: str, answer: str) -> float | None:
    return certain.math_verify_flexible("", completion, {"answer": answer})


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (WORKED + "\n#### 18", "18", 1),
        (WORKED + "\n#### 19", "18", 0),
        (WORKED + "\n#### $1,234.50.\n", "1234.5", 1),
        (WORKED + "\n#### -18", "18", 0),
        (WORKED + "\n#### 18 dollars per day.", "18", 1),
        (WORKED + "\nThe answer is $\\boxed{18}$.", "18", 1),
        (WORKED + " So \\[\\boxed{ 1,800 }\\] dollars, not 19.", "1800", 1),
        (WORKED + "\n**Final Answer**\n\\boxed{18.01}", "18", 0),
        (r"It is \boxed{\frac{14}{3}}.", r"\frac{14}{3}", 1),
        (r"We meet on \boxed{\text{Friday}}.", r"\text{Friday}", 1),
        ("I do not know.", "18", 0),
        ("", "18", 0),
    ],
)
def test_the_usual_forms_need_no_worker(completion, answer, expected):
    for name in ("math_verify", "math_verify_flexible"):
        for module in (certain, isolated):
            assert getattr(module, name)("", completion, {"answer": answer}) == expected


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("I do not know.", "x + 1"),  # wrong, if it can be parsed
        ("18", "18"),
        (r"\boxed{18", "18"),
        ("#### 18 apples or 19", "18"),
        ("#### 1,23", "1.23"),
        ("#### 1/2", "0.5"),
        (r"\boxed{17} or \boxed{18}", "18"),
        (r"\boxed{\frac{28}{6}}", r"\frac{14}{3}"),
        (r"\boxed{10^{10^{10}}}", "10^{10^{9}}"),
        ("#### y", "x"),
        ("The answer is that she sells 18 eggs.", "18"),
    ],
)
def test_what_is_not_certain_is_left_to_the_worker(completion, answer):
    assert verdict(completion, answer) is None


@pytest.mark.parametrize("record", [{}, {"answer": ["1"]}, {"answer": True}], ids=str)
def test_a_record_without_a_reference_is_left_to_the_worker(record):
    """The reward function then says what is wrong with it: a failed score."""
    for completion in ("#### 1", "no"):
        assert certain.math_verify_flexible("", completion, record) is None
    assert certain.math_verify("", "#### 1", record) is None
    with pytest.raises(ValueError if record else KeyError):
        isolated.math_verify("", "#### 1", record)


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        ("First 3*6=18. Then we", 0, 1),
        ("So it is 18", 0, 1),
        ("The answer is 18.", 1, 1),
        ("Answer: $18$", 1, 1),
        ("The answer is 17.\n#### 18", 1, 1),
        (r"The answer is 17. No, \boxed{18}", 1, 1),
        ("#### 18\nThe answer is 17", 0, 0),
        ("#### ", 0, 0),
        ("18 ####", 0, 1),
    ],
)
def test_a_strict_answer_is_announced(completion, strict, flexible):
    """What is announced last counts; flexibly, without an announcement, what math-verify finds in the whole text."""
    record = {"answer": "18"}
    assert isolated.math_verify("", completion, record) == strict
    assert isolated.math_verify_flexible("", completion, record) == flexible
    assert certain.math_verify("", completion, record) in (strict, None)


REFERENCES = [
    "18",
    "-7",
    "0",
    "1234",
    "1,234",
    "12.50",
    "0.5",
    "B",
    "1/2",
    r"\frac{1}{2}",
    "x+1",
    r"3\sqrt{13}",
    "(3, 4)",
]
ANSWERS = [
    "{}",
    "{}",
    "{}",
    "{}",
    "-{}",
    "{}.0",
    "{}.5",
    "0{}",
    "{}%",
    "{}\\%",
    "${}",
    " {} ",
    "{} apples",
    "x={}",
    "{},{}",
    "٣",
]
BEFORE = [
    "",
    "\n",
    "$",
    "$$",
    "\\(",
    "\\[",
    "**",
    "The answer is ",
    "Answer: $",
    "The final answer is ",
    "Final answer:\n",
]
BEFORE += [
    "so $5 and $",
    "\\fbox{3} ",
    "\\boxed{3} and ",
    "[",
    "The an\u017fwer is ",
    "5% of ",
    "\\boxed ",
    "-",
    "$3$ and $",
]
AFTER = [
    "",
    "",
    "",
    ".",
    "$",
    "$.",
    "$$",
    " dollars",
    "%",
    "$ %",
    " percent",
    "}",
    " and 5",
    " [3] ",
    "\\)",
    "\\]",
    "\n##",
]
AFTER += ["\nSo 7 apples.", " #### 3", "**", " I hope it is correct.", " $5$", "\nThe answer is 4", "  \n\n", ", 3"]
PIECES = [
    *"$\\()[]{} \n5a=%#x.,",
    "####",
    "answer",
    "\\boxed{",
    "\\frac{1}{2}",
    "final answer",
    " is ",
    " and ",
    "1,000",
]


def disagreements(seed: int, count: int) -> tuple[list[tuple], int]:
    """Compare verdicts on random completions with math-verify's; return those that differ, and how many there were.

    Percentages are left out: math-verify takes 18% for 18, but not 18.5% for 18.5.
    """
    rng, found, decided = random.Random(seed), [], 0
    for _ in range(count):
        answer, got = rng.choice(REFERENCES), rng.choice(REFERENCES)
        got = rng.choice(ANSWERS).replace("{}", answer if rng.random() < 0.7 else got)
        mark = rng.choice(["\\boxed{%s}", "\\boxed{%s}", "#### %s", "#### %s", "####%s", "#### $%s", "####\n%s", "%s"])
        noise = "".join(rng.choices(PIECES, k=rng.randrange(12))) if rng.random() < 0.3 else ""
        completion = rng.choice([WORKED, WORKED, WORKED + "\n", "", noise]) + rng.choice([*BEFORE, *[""] * 20])
        completion += mark % got + rng.choice(AFTER)
        score, said = certain.math_verify("", completion, {"answer": answer}), answers.announced(completion)
        if score is None or said is None or re.search("%|percent", said.text) or not re.fullmatch(r"[-0-9.,]+", answer):
            continue
        decided += 1
        right = isolated._verified(isolated._said(said), answer)
        if score != right:
            found.append((answer, completion, score, right))
    return found, decided


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_verdicts_without_a_call_are_math_verifys_own(count):
    found, decided = disagreements(count, count)
    assert not found and decided > 0.05 * count


@pytest.mark.parametrize("piece", ["#### ", "\\boxed{", "final answer ", " ", "$", "1", "####\n1", "\\boxed{1}", "1,"])
@pytest.mark.parametrize("answer", ["18", "B"])
def test_hostile_completions_cost_little(piece, answer):
    completion, begun = piece * (1_000_000 // len(piece)) + "#### 18", time.process_time()
    verdict(completion, answer)
    assert time.process_time() - begun < 2.0
