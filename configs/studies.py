"""Four studies, registered before they were run: docs/evidence/repairs.md, clipping.md, length.md, mismatch.md.

    python -m gspo_jax.coldstart --config=configs/drift.py:arithmetic --workdir=runs/arithmetic-cold
    python -m gspo_jax.sweep --config=configs/studies.py:clipping --record=docs/evidence/data/clipping.csv --jobs=2

The argument is a step. All are on `arithmetic`, the testbed of docs/evidence/protocol.md: 24 layers, sixteen updates a
batch, a sampler with weights rounded to int8, and one policy that every run starts from. Killed sweeps go on with the
same command, also on another machine: what is in the record is done. Runs are in the order of their seeds, so a study
that is cut short has every arm on fewer seeds. `bash launch/evidence.sh STEP` does all of it and draws. `length` is
configs/length.py.
"""

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from gspo_jax.errors import UserError, choices
from gspo_jax.types import Comparison

EVIDENCE = runpy.run_path(str(Path(__file__).with_name("evidence.py")))
"""The module configs/evidence.py, loaded by path: `configs/` is not importable from other directories."""
RATE = 1e-4
"""Learning rate at which the arms of docs/evidence/confirm/survival.md differ."""
MISMATCH_RATE = 7e-5
"""Learning rate of `mismatch`, as the screen's rule has it."""
KEPT = 20
"""Ids per token for score centring."""

Arm = Mapping[str, Any]
"""What an arm changes, by dotted name."""


class Step(NamedTuple):
    """A step of a study."""

    title: str
    iterations: int
    rate: float
    runs: Sequence[Arm]
    """In order, with seed and learning rate if they vary."""


SAMPLER: Arm = {"training.old_logprobs": "sampler"}
CENTRED: Arm = {"mismatch.center": True, "sampling.keep_top": KEPT}
TRUNCATED: Arm = {"mismatch.correction": "tis"}
WEIGHTS: Arm = {"routing.replay": "r3w"}

REPAIRS: Sequence[Arm] = (
    {"objective.name": "grpo"},
    {"objective.name": "dppo_tv", **SAMPLER},
    {"objective.name": "vespo", **SAMPLER},
    {"objective.name": "minirl", **TRUNCATED, "routing.replay": "r3"},
    {"objective.name": "gspo", "objective.gspo.low": 3e-4, "objective.gspo.high": 4e-4},
    {"objective.name": "gmpo", "objective.gmpo.log_clip": 0.2},
    {"objective.name": "rspo", "objective.rspo.apply": "before"},
)
CLIPPING = ("grpo", "gspo", "grpo_at_share", "gspo_at_share", "drop_responses", "drop_tokens", "mask_on_tokens")
OWN = CLIPPING[2:]
"""Objectives of gspo_jax/studies/clipping.py."""
TUNED = ("grpo", "gspo", "luspo", "rspo", "gmpo", "dppo_tv", "vespo", "minirl")
GRID = (2.5e-5, 3.5e-5, 7e-5)


def mismatched() -> list[Arm]:
    """Return {GRPO, GSPO} × {recomputed, the sampler's} × {none, centring, truncated weights, R3 with weights}.

    Those of the primary comparisons come first. With the sampler's log-probs as π_old there are no truncated weights,
    which are π_old/μ, and no centring of GRPO, whose ratio weighs each token by π_θ/μ: its mean score is 0 already.
    """
    first: list[Arm] = [
        {"objective.name": "grpo"},
        {"objective.name": "grpo", **CENTRED},
        {"objective.name": "gspo"},
        {"objective.name": "gspo", **SAMPLER},
    ]
    others: list[Arm] = [
        {"objective.name": "grpo", **TRUNCATED},
        {"objective.name": "grpo", **WEIGHTS},
        {"objective.name": "grpo", **SAMPLER},
        {"objective.name": "grpo", **SAMPLER, **WEIGHTS},
        {"objective.name": "gspo", **CENTRED},
        {"objective.name": "gspo", **TRUNCATED},
        {"objective.name": "gspo", **WEIGHTS},
        {"objective.name": "gspo", **SAMPLER, **CENTRED},
        {"objective.name": "gspo", **SAMPLER, **WEIGHTS},
    ]
    return first + others


def seeded(arms: Sequence[Arm], seeds: Sequence[int]) -> list[Arm]:
    return [{**arm, "seed": seed} for seed in seeds for arm in arms]


def of_grid(seeds: Sequence[int]) -> list[Arm]:
    """Return every objective at every rate of the grid, as in `tune` of configs/evidence.py."""
    return seeded(
        [
            {
                "objective.name": name,
                "mismatch.correction": "tis" if name == "minirl" else "",
                "optimizer.learning_rate": rate,
            }
            for rate in GRID
            for name in TUNED
        ],
        seeds,
    )


STEPS: Mapping[str, Step] = {
    "repairs": Step("Arms that the first study lacked", 40, RATE, seeded(REPAIRS, range(15, 20))),
    "grid": Step("Lower learning rates", 20, RATE, of_grid((0,))),
    "clipping": Step(
        "What clipping whole responses is good for",
        40,
        RATE,
        seeded([{"objective.name": name} for name in CLIPPING], range(20, 30)),
    ),
    "mismatch_screen": Step(
        "Screen of the study of mismatch",
        20,
        RATE,
        [
            {**arm, "optimizer.learning_rate": rate, "seed": seed}
            for seed in (2, 3)
            for rate in (5e-5, 7e-5, 1e-4)
            for arm in (
                {"objective.name": name, **old}
                for name in ("grpo", "gspo")
                for old in ({"training.old_logprobs": "recompute"}, SAMPLER)
            )
        ],
    ),
    "mismatch": Step(
        "What helps against an int8 sampler",
        40,
        MISMATCH_RATE,
        seeded(mismatched(), range(30, 35)) + seeded(mismatched()[:4], range(35, 40)),
    ),
    "mismatch_bfloat16": Step(
        "The primary comparisons with a bfloat16 sampler", 40, MISMATCH_RATE, seeded(mismatched()[:4], range(40, 45))
    ),
}


def get_config(arg: str = "repairs") -> ConfigDict:
    """Return what all runs of a step share."""
    step = _step(arg)
    config = EVIDENCE["get_config"]("confirm")
    config.iterations = step.iterations
    config.optimizer.learning_rate = step.rate
    if arg == "clipping":
        for name in OWN:
            config.functions[name] = f"gspo_jax.studies.clipping:{name}"
    if arg == "mismatch_bfloat16":
        config.sampling.weights_dtype = "bfloat16"
    return config


def get_sweep(arg: str = "repairs") -> list[Comparison]:
    """Return the runs of a step."""
    step = _step(arg)
    return [Comparison(name=arg, title=step.title, runs=step.runs, panels="routing")]


def _step(name: str) -> Step:
    if name not in STEPS:
        raise UserError(f"configs/studies.py has no step {name!r}; {choices(name, STEPS)}")
    return STEPS[name]
