"""The tiny mixture of experts of configs/tiny.py, trained in six ways that treat its moving routes differently.

    python -m gspo_jax.train --config=configs/routing_ablation.py:grpo_r2,offpolicy --workdir=runs/grpo_r2

About two minutes on two cores; `bash launch/routing.sh` makes them all and compares them (docs/routing.md). The
argument begins with a variant:

- `gspo`: one ratio for a response, so that no single token's route matters much.
- `grpo`: a ratio for every token, routes left free.
- `grpo_r2`: grpo, every update routed as the trainer's old policy routed.
- `grpo_r3`: grpo, every update routed as the sampler routed.
- `rspo`: geometric mean of clipped token ratios, damped where the router has moved.
- `gmpo`: the same without the damping.

After it may follow, joined by commas, `offpolicy` (four times as many updates per batch, twice as large) and
`runlocal`, as in configs/tiny.py.

What is equal in all variants: the cold start of a seed, problems and their order, sampling, reward, group z-score,
weight of a response (sequence mean), optimizer, updates and iterations. All score their old log-probabilities with the
trainer (`old_logprobs="recompute"`), not only the variants that need it: ratios have the same denominator, drift is
measured against the same record, and the first update of a batch starts at a ratio of 1 in each. Where routes are
replayed, they are replayed in that scoring too. What differs: objective and replay, and with an objective its own clip
range, as ratios of tokens and of responses live on different scales. Ranges stay as they are when `offpolicy` is added.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax.types import UserError

VARIANTS = {
    "gspo": ("gspo", "none"),
    "grpo": ("grpo", "none"),
    "grpo_r2": ("grpo", "r2"),
    "grpo_r3": ("grpo", "r3"),
    "rspo": ("rspo", "none"),
    "gmpo": ("gmpo", "none"),
}
"""Name: objective and replayed routes."""
TINY = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
"""Beside this file, wherever that is: no import path leads to `configs/` from other directories."""


def get_config(arg: str = "") -> ConfigDict:
    """`arg` is VARIANT[,offpolicy][,runlocal]."""
    variant, *more = arg.split(",")
    if variant not in VARIANTS:
        raise UserError(
            f"configs/routing_ablation.py begins with a variant, not {variant!r}; there are {', '.join(VARIANTS)}"
        )
    if unknown := set(more) - {"offpolicy", "runlocal"}:
        raise UserError(
            f"configs/routing_ablation.py takes no argument {min(unknown)!r} after its variant; there are offpolicy, "
            "runlocal"
        )
    config = TINY["get_config"]("runlocal" if "runlocal" in more else "")
    config.iterations = min(50, config.iterations)
    config.objective.name, config.routing.replay = VARIANTS[variant]
    config.training.old_logprobs = "recompute"
    if "offpolicy" in more:
        offpolicy(config)
    return config


def offpolicy(config: ConfigDict) -> None:
    """A batch is used up by more and larger updates: its last ones learn from a policy that is far away."""
    config.training.minibatches *= 4
    config.optimizer.learning_rate = 2e-4
