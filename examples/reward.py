"""Two rewards of one's own: the second runs in killable worker processes, as it may hang.

    python -m gspo_jax.train --config=configs/tiny.py:runlocal --workdir=runs/own_reward \
        --config.functions.brief=examples/reward.py:brief --config.rewards.brief=0.1 \
        --config.functions.balanced=examples/reward.py:balanced --config.rewards.balanced=0.1
"""

import re

from gspo_jax.rewards import own_process


def brief(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Score 1 for an empty completion, falling to 0 at four times the length of the answer."""
    return max(0.0, 1 - len(completion) / (4 * len(record["answer"]) + 4))


@own_process
def balanced(prompt: str, completion: str, record: dict[str, str]) -> float:
    """Score 1 if brackets nest, at most two deep; a pattern like this one may backtrack for hours."""
    return float(re.fullmatch(r"([^()]*\(([^()]*|\([^()]*\))*\))*[^()]*", completion) is not None)
