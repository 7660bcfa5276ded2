"""Routing ablation: the tiny mixture of experts of configs/tiny.py, trained with six treatments of routing drift.

    python -m gspo_jax.train --config=configs/routing_ablation.py:grpo_r2,offpolicy --workdir=runs/grpo_r2

A run takes about a minute on one core: it has one device, where configs/tiny.py simulates eight. All of them, in both
regimes and with three seeds, are trained and compared (docs/routing.md) by

    python -m gspo_jax.sweep --config=configs/routing_ablation.py

The argument begins with a variant, without which it is `gspo`:

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

from gspo_jax.errors import UserError
from gspo_jax.types import Comparison

VARIANTS = {
    "gspo": ("gspo", "none"),
    "grpo": ("grpo", "none"),
    "grpo_r2": ("grpo", "r2"),
    "grpo_r3": ("grpo", "r3"),
    "rspo": ("rspo", "none"),
    "gmpo": ("gmpo", "none"),
}
"""Variant -> (objective, routing replay)."""
ADDITIONS = ("offpolicy", "runlocal")
"""What may follow a variant."""
TINY = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
"""The module configs/tiny.py, loaded by path: `configs/` is not importable from other directories."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is [VARIANT][,offpolicy][,runlocal]."""
    variant, *more = arg.split(",")
    if variant in ("", *ADDITIONS):
        variant, more = "gspo", [word for word in (variant, *more) if word]
    if variant not in VARIANTS:
        raise UserError(
            f"configs/routing_ablation.py has no variant {variant!r}; begin with one of {', '.join(VARIANTS)}"
        )
    if unknown := set(more) - set(ADDITIONS):
        raise UserError(
            f"configs/routing_ablation.py takes no argument {min(unknown)!r} after the variant; use offpolicy, "
            "runlocal or both"
        )
    config = TINY["get_config"]("single,runlocal" if "runlocal" in more else "single")
    config.iterations = min(50, config.iterations)
    config.objective.name, config.routing.replay = VARIANTS[variant]
    config.objective.grpo.high = 0.27  # the GSPO paper's tuned baseline
    config.objective.rspo.apply = "after"  # the form whose results docs/routing.md has
    config.training.old_logprobs = "recompute"
    if "offpolicy" in more:
        config.update_from_flattened_dict(offpolicy(config))
    return config


def get_sweep(arg: str = "") -> list[Comparison]:
    """Return all variants in both regimes, with three seeds; `arg` may only be `runlocal`."""
    if arg not in ("", "runlocal"):
        raise UserError(f"the sweep has every variant and regime; leave {arg!r} out, or use runlocal")
    runs = [{"objective.name": name, "routing.replay": replay} for name, replay in VARIANTS.values()]
    more = offpolicy(get_config(arg))
    regimes = {
        "on_policy": ("On-policy, but for the updates of a batch", runs),
        "off_policy": ("Strongly off-policy", [run | more for run in runs]),
    }
    return [
        Comparison(name=name, title=title, runs=chosen, panels="routing", seeds=3)
        for name, (title, chosen) in regimes.items()
    ]


def offpolicy(config: ConfigDict) -> dict[str, float]:
    """Return what takes the policy far from the one that sampled: more and larger updates per batch."""
    return {"training.minibatches": 4 * config.training.minibatches, "optimizer.learning_rate": 2e-4}
