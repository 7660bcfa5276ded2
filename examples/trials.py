"""Tasks that SmolLM2-135M-Instruct may or may not be able to learn: how often is it right before any training?

    python -m gspo_jax.evaluate --config=examples/trials.py:sums --workdir=runs/trials/sums

A policy learns by reinforcement from what it sometimes does: if it is never right, no response is better than another.
docs/smollm2.md has the results. The argument is the name of a task in TASKS, of which 32 prompts are answered 8 times.
"""

import random
import re

from ml_collections import ConfigDict

from configs import smollm2
from gspo_jax.errors import UserError, choices

PROMPTS = 32
OPPOSITES = (
    "hot cold, big small, up down, fast slow, day night, happy sad, open closed, rich poor, hard soft, old new, light "
    "dark, high low, wet dry, full empty, near far, early late, strong weak, thick thin, win lose, love hate, start "
    "end, buy sell, push pull, left right, in out, true false, clean dirty, loud quiet, sweet sour, deep shallow, "
    "first last, alive dead"
)


def _row(question: str, answer: object) -> dict[str, str]:
    return {"question": question, "answer": str(answer)}


def _pairs(low: int, high: int) -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [(rng.randrange(low, high), rng.randrange(low, high)) for _ in range(PROMPTS)]


def sums(split: str) -> list[dict[str, str]]:
    """Return sums of two numbers of two digits."""
    del split
    return [_row(f"What is {a} + {b}?", a + b) for a, b in _pairs(10, 100)]


def small_sums(split: str) -> list[dict[str, str]]:
    """Return sums of two numbers below 15."""
    del split
    return [_row(f"What is {a} + {b}?", a + b) for a, b in _pairs(2, 15)]


def stories(split: str) -> list[dict[str, str]]:
    """Return word problems of one step."""
    del split
    text = "Tom has {a} apples and buys {b} more. How many apples does he have now?"
    return [_row(text.format(a=a, b=b), a + b) for a, b in _pairs(2, 15)]


def opposites(split: str) -> list[dict[str, str]]:
    """Return questions to be answered in one word."""
    del split
    pairs = (pair.split() for pair in OPPOSITES.split(", "))
    return [_row(f"What is the opposite of {word}? Answer with one word.", other) for word, other in pairs]


def commas(split: str) -> list[dict[str, str]]:
    """Return requests for lists in one line."""
    rows = smollm2.lists(split)[:PROMPTS]
    return [row | {"question": f"{row['question'][:-1]}, separated by commas."} for row in rows]


def lines(split: str) -> list[dict[str, str]]:
    """Return requests of configs/smollm2.py."""
    return smollm2.lists(split)[:PROMPTS]


def last_number(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Score 1 if the last number in the completion is the answer."""
    del prompt
    found = re.findall(r"\d+", completion)
    return float(bool(found) and found[-1] == record["answer"])


def one_word(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Score 1 for the answer alone."""
    del prompt
    return float(completion.strip(" .\n").lower() == record["answer"])


def comma_count(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Score 1 for one line of as many names as asked for."""
    del prompt
    names = completion.strip(" .\n").split(", ")
    return float("\n" not in completion.strip() and len(names) == int(record["answer"]))


TASKS = {
    "sums": "last_number",
    "small_sums": "last_number",
    "stories": "last_number",
    "opposites": "one_word",
    "commas": "comma_count",
    "lines": "exact_count",
}
"""Task -> the reward that decides whether a response is right."""


def get_config(task: str = "lines") -> ConfigDict:
    """Return configs/smollm2.py with a task of TASKS."""
    if task not in TASKS:
        raise UserError(f"no task {task!r} in examples/trials.py; {choices(task, list(TASKS))}")
    config, reward = smollm2.get_config(), TASKS[task]
    config.functions[task] = f"{__file__}:{task}"
    if reward not in config.functions:
        config.functions[reward] = f"{__file__}:{reward}"
    config.data.task, config.data.max_prompt_length = task, 64
    config.rewards = ConfigDict({reward: 1.0})
    config.eval.correct = reward
    return config
