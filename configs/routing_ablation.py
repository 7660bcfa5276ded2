"""Routing ablation: the tiny mixture of experts of configs/tiny.py, trained with six treatments of routing drift.

    python -m gspo_jax.train --config=configs/routing_ablation.py:grpo_r2,offpolicy --workdir=runs/grpo_r2

A run takes about two minutes on two cores; `bash launch/routing.sh` trains and compares all of them (docs/routing.md).
The argument begins with a variant:

- `gspo`: one ratio per response, so that no single token's route matters much.
- `grpo`: one ratio per token, no replay.
- `grpo_r2`: grpo; every update replays the routes of the trainer's old policy.
- `grpo_r3`: grpo; every update replays the routes of the sampler.
- `rspo`: geometric mean of clipped token ratios, damped where the router has shifted.
- `gmpo`: the same without damping.

It may be followed, after commas, by `offpolicy` (four times as many updates per batch, at twice the learning rate) and
`runlocal`, as in configs/tiny.py.

All variants share a seed's cold start, the problems and their order, sampling, reward, group z-score, token weights
(sequence mean), optimizer, updates and iterations. All score old log-probs with the trainer
(`old_logprobs="recompute"`), even if they do not need it: ratios then have the same denominator, drift is measured
against the same record, and every batch's first update starts at a ratio of 1. Variants with replay also replay in that
scoring. Variants differ in objective, replay, and the objective's clip range, since ratios of tokens and of responses
have different scales. `offpolicy` does not change the clip ranges.
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
"""Variant -> (objective, routing replay)."""
TINY = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
"""The module configs/tiny.py, loaded by path: `configs/` is not importable from other directories."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is VARIANT[,offpolicy][,runlocal]."""
    variant, *more = arg.split(",")
    if variant not in VARIANTS:
        raise UserError(
            f"configs/routing_ablation.py has no variant {variant!r}; begin with one of {', '.join(VARIANTS)}"
        )
    if unknown := set(more) - {"offpolicy", "runlocal"}:
        raise UserError(
            f"configs/routing_ablation.py takes no argument {min(unknown)!r} after the variant; use offpolicy, "
            "runlocal or both"
        )
    config = TINY["get_config"]("runlocal" if "runlocal" in more else "")
    config.iterations = min(50, config.iterations)
    config.objective.name, config.routing.replay = VARIANTS[variant]
    config.training.old_logprobs = "recompute"
    if "offpolicy" in more:
        offpolicy(config)
    return config


def offpolicy(config: ConfigDict) -> None:
    """Make more and larger updates per batch, so that the policy moves far from the one that sampled it."""
    config.training.minibatches *= 4
    config.optimizer.learning_rate = 2e-4
