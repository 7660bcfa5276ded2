"""Deep mixtures of equal size that differ in the router, or in the layers around it: which routes does an update move?

    python -m gspo_jax.train --config=configs/routers.py:sigmoid --workdir=runs/routers/sigmoid-0
    python -m gspo_jax.noise --config=configs/routers.py:sigmoid --workdir=runs/routers/sigmoid-0 --updates=1 \
        --nolayers --out=runs/routers-noise/sigmoid-0

The argument is one of `ARMS`: the testbed of configs/drift.py, 24 layers with 8 of 64 small experts, with another
router or other layers. Each arm has the same short cold start, which leaves the routers as they were drawn, and one
iteration, which takes the optimizer past its warm-up.

After so few steps no policy solves the task, and its own reward would be 0. Each response is rewarded by the toss of a
coin instead, so that advantages and updates have their usual size in every arm, whatever it has learned.

All arms, with five seeds (docs/evidence/routers.md):

    bash launch/evidence.sh routers
"""

import hashlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.errors import UserError, choices

LINEAR, FULL = "linear_attention", "full_attention"
SIGMOID: Mapping[str, Any] = {"family": "glm4_moe", "qk_norm": True}
"""GLM-4.5's router. Its layers are Qwen3's otherwise: positions turn whole heads, and none is dense."""


def hybrid(linear: int, **others: Any) -> dict[str, Any]:
    """Return Qwen3-Next's layers without a shared expert, the first `linear` of every four with linear attention."""
    return {
        "family": "qwen3_next",
        "zero_centred_norms": True,
        "layer_types": (*(LINEAR,) * linear, *(FULL,) * (4 - linear)) * 6,
        "linear_key_heads": 2,
        "linear_value_heads": 4,
        "linear_key_dim": 16,
        "linear_value_dim": 16,
        **others,
    }


ARMS: Mapping[str, Mapping[str, Any]] = {
    "renormalised": {},
    "softmax": {"norm_topk_prob": False},
    "sigmoid": SIGMOID,
    "bias": SIGMOID,
    "groups": {**SIGMOID, "expert_groups": 8, "groups_per_token": 4},
    "linear_0": hybrid(0),
    "linear_1": hybrid(1),
    "linear_2": hybrid(2),
    "linear_3": hybrid(3),
    "shared": hybrid(0, num_experts=63, experts_per_token=7, shared_intermediate_size=16),
}
"""Arm -> what it changes in the testbed's architecture."""
BIASED = ("bias", "groups")
"""Arms whose biases move against their experts' load during the iteration. All others' are, or stay, 0."""
BIAS_RATE = 2e-3
DRIFT = runpy.run_path(str(Path(__file__).with_name("drift.py")))
"""The module configs/drift.py, loaded by path: `configs/` is not importable from other directories."""


def get_config(arm: str = "renormalised") -> ConfigDict:
    """Return an arm's config."""
    if arm not in ARMS:
        raise UserError(f"configs/routers.py has no arm {arm!r}; {choices(arm, ARMS)}")
    config = DRIFT["get_config"]()
    config.model.architecture.update(ARMS[arm])
    config.routing.bias_rate = BIAS_RATE if arm in BIASED else 0.0
    config.coldstart.steps = 70
    config.functions.coin = "configs/routers.py:coin"
    config.rewards = ConfigDict({"coin": 1.0})
    config.eval.update({"correct": "", "prompts": 8})
    config.objective.name = "grpo"
    config.objective.grpo.high = 0.27
    config.iterations = 1
    return config


def coin(prompt: str, completion: str, record: Mapping[str, Any]) -> float:
    """Score 0 or 1, by a hash of the response."""
    del record
    return float(hashlib.sha256(f"{prompt}\n{completion}".encode()).digest()[0] % 2)
