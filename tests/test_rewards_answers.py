"""What an answer is: thoughts, announcements, numbers, choices, as a person reads them, in all math rewards alike."""

import time

import pytest

from gspo_jax import thoughts
from gspo_jax.rewards import answer_part, answers, certain, functions, isolated
from tests.answer_table import ROWS


def judged(reward):
    """The rows that a reward does not judge as a person does, or as it has to."""
    wrong = []
    for row in ROWS:
        score = reward(row.prompt, row.completion, {"answer": row.reference})
        wanted = row.right
        if reward is functions.exact_answer and row.mathematics:
            wanted = False
        if reward is isolated.math_verify_flexible and row.flexible is not None:
            wanted = row.flexible
        if score != wanted:
            wrong.append((row, score))
    return wrong


@pytest.mark.parametrize(
    "reward", [functions.exact_answer, isolated.math_verify, isolated.math_verify_flexible], ids=lambda f: f.__name__
)
def test_answers_are_judged_as_a_person_judges_them(reward):
    assert len(ROWS) >= 200 and not judged(reward)


@pytest.mark.parametrize("name", ["math_verify", "math_verify_flexible"])
def test_what_needs_no_worker_is_judged_alike(name):
    decided = 0
    for row in ROWS:
        given = row.prompt, row.completion, {"answer": row.reference}
        score = getattr(certain, name)(*given)
        decided += score is not None
        assert score in (None, getattr(isolated, name)(*given)), row
    assert decided > 0.8 * len(ROWS)
