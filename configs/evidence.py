"""The study of docs/evidence/protocol.md: remedies for routing drift, compared on the testbed of configs/drift.py.

    python -m gspo_jax.coldstart --config=configs/drift.py --workdir=runs/drift-cold
    python -m gspo_jax.sweep --config=configs/evidence.py:screen --jobs=2
    python -m gspo_jax.coldstart --config=configs/drift.py:arithmetic --workdir=runs/arithmetic-cold
    python -m gspo_jax.sweep --config=configs/evidence.py:second_screen --jobs=2
    python -m gspo_jax.sweep --config=configs/evidence.py:bounds --jobs=2
    python -m gspo_jax.sweep --config=configs/evidence.py:tune --jobs=2
    python -m gspo_jax.sweep --config=configs/evidence.py:confirm --jobs=2
    python -m gspo_jax.sweep --config=configs/evidence.py:tuned --jobs=2
    python -m gspo_jax.sweep --config=configs/evidence.py:shallow --jobs=2

The argument is a step of the study. The first screen is on `machine`, all later steps are on `arithmetic`, and all runs
of a testbed start from the same policy; `shallow` is the off-policy regime of configs/routing_ablation.py, in
which a seed has its own. Killed sweeps go on with the same command.
"""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.errors import UserError
from gspo_jax.types import Comparison

STEPS = {
    "screen": ("", 20),
    "second_screen": ("arithmetic", 24),
    "bounds": ("arithmetic", 24),
    "tune": ("arithmetic", 20),
    "confirm": ("arithmetic", 40),
    "tuned": ("arithmetic", 40),
    "shallow": ("shallow", 50),
}
"""Step of the study -> (testbed, iterations of its runs)."""
COLD = {"": "runs/drift-cold", "arithmetic": "runs/arithmetic-cold"}
"""Argument of configs/drift.py -> the policy that every run of this testbed starts from."""
SCREENS = {"screen": (3e-5, 1e-4, 3e-4), "second_screen": (5e-5, 1e-4, 2e-4)}
"""Learning rates of a screen."""
RATE = 1e-4
"""Learning rate of the setting that the screens found."""
CONFIRMED = {
    "confirm": ("Confirmation", RATE),
    "tuned": ("Confirmation at the tuned learning rate", 5e-5),
    "shallow": ("Confirmation at four layers", 2e-4),
}
"""Step that compares all arms -> (title, learning rate); the tuning found the same rate for every objective."""
ARMS: Mapping[str, tuple[str, str]] = {
    "grpo": ("grpo", "none"),
    "grpo_r2": ("grpo", "r2"),
    "grpo_r3": ("grpo", "r3"),
    "gspo": ("gspo", "none"),
    "gspo_r3": ("gspo", "r3"),
    "luspo": ("luspo", "none"),
    "rspo": ("rspo", "none"),
    "gmpo": ("gmpo", "none"),
    "dppo_tv": ("dppo_tv", "none"),
    "vespo": ("vespo", "none"),
    "minirl": ("minirl", "none"),
    "minirl_r2": ("minirl", "r2"),
}
"""Arm -> (objective, routing replay)."""
SCREENED = ("grpo", "grpo_r3", "gspo", "minirl")
"""Arms of the screens."""
UNSEEN = range(10, 15)
"""Seeds of the confirmation."""
DRIFT, ABLATION = (
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py"))) for name in ("drift", "routing_ablation")
)
"""The modules of the testbeds, loaded by path: `configs/` is not importable from other directories."""


def get_config(arg: str = "screen") -> ConfigDict:
    """Return what all runs of a step share."""
    check(arg)
    testbed, iterations = STEPS[arg]
    if testbed == "shallow":
        config = ABLATION["get_config"]("grpo,offpolicy")
        config.objective.luspo = config.objective.gspo.copy_and_resolve_references()
    else:
        config = DRIFT["get_config"](testbed)
        config.model.folder = COLD[testbed]
        config.sampling.weights_dtype = "int8"
        config.objective.rspo.apply = "after"  # the form that the study compares
    config.iterations = iterations
    return config


def get_sweep(arg: str = "screen") -> list[Comparison]:
    """Return the runs of a step."""
    check(arg)
    if arg in SCREENS:
        runs = [{**settings(arm), "optimizer.learning_rate": rate} for rate in SCREENS[arg] for arm in SCREENED]
        title = arg.replace("_", " ").capitalize()
        return [Comparison(name=arg, title=title, runs=runs, seeds=2, panels="routing")]
    if arg == "bounds":
        paper = {"objective.gspo.low": 3e-4, "objective.gspo.high": 4e-4}
        runs = [{**settings("gspo"), **paper, "optimizer.learning_rate": 5e-5}]
        return [Comparison(name=arg, title="Bounds of the GSPO paper", runs=runs, seeds=2, panels="routing")]
    if arg == "tune":
        objectives = [arm for arm, (objective, _) in ARMS.items() if arm == objective]
        runs = [
            {**settings(arm), "optimizer.learning_rate": times * RATE} for times in (0.5, 1, 2) for arm in objectives
        ]
        return [Comparison(name=arg, title="Tuning", runs=runs, panels="routing")]
    title, rate = CONFIRMED[arg]
    runs = [{**settings(arm), "optimizer.learning_rate": rate, "seed": seed} for seed in UNSEEN for arm in ARMS]
    return [Comparison(name=arg, title=title, runs=runs, panels="routing")]


def settings(arm: str) -> dict[str, Any]:
    """Return what an arm changes."""
    objective, replay = ARMS[arm]
    correction = "tis" if objective == "minirl" else ""
    return {"objective.name": objective, "routing.replay": replay, "mismatch.correction": correction}


def check(step: str) -> None:
    """Raise UserError unless `step` is one of the study's."""
    if step not in STEPS:
        raise UserError(f"configs/evidence.py has no step {step!r}; use {', '.join(STEPS)}")
