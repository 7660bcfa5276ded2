"""What an answer is: thoughts, announcements, numbers, choices, as a person reads them, in all math rewards alike."""

import itertools
import time

import pytest

from gspo_jax.rewards import answer_part, answers, certain, comparison, functions, isolated, notation, quantities
from gspo_jax.rewards.environments import countdown_feedback
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.thoughts import PAIRS
from tests.answer_table import ROWS


def verdict(reward, row):
    """How a person judges a row under the rules of a reward."""
    if reward is functions.exact_answer and row.mathematics:
        return False
    if reward is isolated.math_verify_flexible and row.flexible is not None:
        return row.flexible
    return row.right


@pytest.mark.parametrize(
    "reward", [functions.exact_answer, isolated.math_verify, isolated.math_verify_flexible], ids=lambda f: f.__name__
)
def test_answers_are_judged_as_a_person_judges_them(reward):
    wrong = [
        (row, score)
        for row in ROWS
        if (score := reward(row.prompt, row.completion, {"answer": row.reference})) != verdict(reward, row)
    ]
    assert len(ROWS) >= 200 and not wrong


@pytest.mark.parametrize("name", ["math_verify", "math_verify_flexible"])
def test_what_needs_no_worker_is_judged_alike(name):
    decided = 0
    for row in ROWS:
        given = row.prompt, row.completion, {"answer": row.reference}
        score = getattr(certain, name)(*given)
        decided += score is not None
        assert score in (None, getattr(isolated, name)(*given)), row
    assert decided > 0.7 * len(ROWS)


@pytest.mark.parametrize(("opening", "closing"), PAIRS)
def test_every_familys_thoughts_are_cut(opening, closing):
    thought, answer = f"{opening}\nIs it #### 5?\n", "\n\n#### 6"
    assert answer_part("2*3=", thought + closing + answer) == answer
    assert answer_part(f"2*3={opening}\n", "5?" + closing + answer) == answer
    assert answer_part("2*3=", thought + answer) is None
    assert answer_part(f"2*3={opening}\n", answer) is None
    assert answer_part(f"Think inside {opening} and {closing}. 2*3=", answer) == answer


PROGRAM = "```python\ndef f(x):\n    return 2 * x\n```"


@pytest.mark.parametrize(
    ("prompt", "completion", "right"),
    [
        ("", f"<think>{PROGRAM}</think>\n{PROGRAM}", 1),
        ("", f"<think>{PROGRAM.replace('2', '3')}</think>\n{PROGRAM}", 1),
        ("", f"<think>{PROGRAM}</think>\n{PROGRAM.replace('2', '3')}", 0),
        ("", f"<think>{PROGRAM}</think>\nI gave it.", 0),
        ("", f"<think>{PROGRAM}", 0),
        ("<think>\n", PROGRAM, 0),
        ("<think>\n", f"Hm.</think>{PROGRAM}", 1),
        ("", PROGRAM.replace("2 * x", 'x if str(x) == "</think>" else 2 * x'), 1),
    ],
)
def test_programs_are_not_taken_from_thoughts(scorer, prompt, completion, right):
    record = {"test_list": ["assert f(4) == 8"]}
    (outcome,) = scorer.outcomes([(prompt, completion, record)])["code_tests"]
    assert outcome.value == right


@pytest.fixture(scope="module")
def scorer():
    with Scorer({"code_tests": 1.0}, unsafe=True) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("prompt", "completion", "formatted", "solved"),
    [
        ("", "<think>#### 3*5</think>#### 3*5+7", 1, 1),
        ("", "<think>#### 3*5+7</think>22", 0, 0),
        ("", "<think>#### 3*5+7", 0, 0),
        ("<think>\n", "#### 3*5+7", 0, 0),
        ("<think>\n", "\\boxed{1}</think>\\boxed{3*5+7}", 1, 1),
        ("", "The answer is 3*5+7.", 0, 1),
    ],
)
def test_other_rewards_read_what_follows_the_thought(prompt, completion, formatted, solved):
    record = {"question": "22 from 3 5 7:", "numbers": "3 5 7", "target": "22"}
    assert functions.answer_format(prompt, completion, record) == formatted
    assert functions.countdown(prompt, completion, record) == solved
    assert (countdown_feedback(prompt, completion, record) is None) == solved


@pytest.mark.parametrize(
    ("texts", "canonical"),
    [
        (("1,234.50", "$1234.5", "1234.5 dollars"), "1234.5"),
        (("C", "(C)", "\\text{C}", "c) 12"), "C"),
        (("San  Francisco", "san francisco."), "san francisco"),
        (("5 million", "5,000,000"), "5000000"),
    ],
)
def test_answers_that_are_the_same_have_one_form(texts, canonical):
    assert {comparison.canonical(text) for text in texts} == {canonical}
    assert all(comparison.same(one, other) for one, other in itertools.product(texts, texts))


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "<think>",
            "</think>",
            "<",
            "[THINK]",
            '"</think>"',
            "####",
            "#### \n",
            "#### 1 ",
            "\\boxed{",
            "\\boxed{1}, ",
        ),
        *("answer is ", "answer to a ", "answer (", "Answer\n", "<answer>", "**", "\\[", "$", "1 ", "1,", "a", " "),
        *(
            "correct option is ",
            "<|begin_of_box|>",
            "Here is my thought process:",
            "#### 1. A",
            "½",
            ", or A",
            "\\text{a}",
        ),
        *(
            "if the answer would be ",
            "might think the answer is ",
            "-\\boxed1\\pi ",
            "$ million",
            "</think>'",
            "<|channel|>",
        ),
    ],
)
def test_hostile_completions_cost_little(piece):
    """Every step is linear: quadratic ones would take minutes. An answer of full length takes no time."""
    begun = time.process_time()
    part = answer_part("", piece * (250_000 // len(piece)))
    answers.announced(part or "")
    assert time.process_time() - begun < 1.0
    begun = time.process_time()
    text = piece * (notation.MAX_CHARACTERS // len(piece))
    comparison.same(text, "12")
    quantities.stated(text)
    assert time.process_time() - begun < 0.1
