"""A step reward of one's own: credits each line of the work, for objectives with an advantage per token.

    python -m gspo_jax.train --config=configs/tiny.py:runlocal --workdir=runs/own_step_reward \
        --config.objective.name=gspo_token \
        --config.functions.equations=examples/step_reward.py:equations --config.step_rewards.equations=0.2
"""

import re

_EQUATION = re.compile(r"(\d+)\+(\d+)=(\d+)")


def equations(prompt: str, completion: str, record: dict[str, str]) -> list[tuple[int, float]]:
    """Reward each sum in the completion at the character that ends it: 1 if it is right, else -1."""
    return [
        (found.end(), 1.0 if int(found[1]) + int(found[2]) == int(found[3]) else -1.0)
        for found in _EQUATION.finditer(completion)
    ]
