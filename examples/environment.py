"""An environment of one's own: replies to a wrong answer with a hint, for a second turn.

    python -m gspo_jax.train --config=configs/tiny.py:runlocal --workdir=runs/own_environment \
        --config.functions.hint=examples/environment.py:hint --config.environment.name=hint
"""

from gspo_jax.rewards.answers import final_answer
from gspo_jax.rewards.functions import exact_answer


def hint(prompt: str, completion: str, record: dict[str, str]) -> str | None:
    """Say whether the number of digits is right; None, which ends the episode, after a right answer."""
    if exact_answer(prompt, completion, record):
        return None
    answer = final_answer(prompt, completion) or ""
    return "digits" if len(answer) != len(record["answer"]) else "wrong"
