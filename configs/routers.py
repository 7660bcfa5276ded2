"""Deep mixtures of equal size that differ in the router, or in the layers around it: which routes does an update move?

    python -m gspo_jax.studies.random_models --config=configs/routers.py:sigmoid --out=runs/routers/sigmoid
    python -m gspo_jax.noise --config=configs/routers.py:sigmoid --config.model.folder=runs/routers/sigmoid-0 \
        --workdir=runs/routers/sigmoid-0 --updates=1 --nolayers --out=runs/routers-noise/sigmoid-0

The argument is one of `ARMS`: the testbed of configs/drift.py, 24 layers with 8 of 64 small experts, with another
router or other layers. Models are random, so that no arm has learned more than another. Adam's first step then moves
every weight by the learning rate, in every arm.

A random policy's own reward would be 0. Each response's reward is drawn by a hash instead, so that advantages have
their usual size.

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


SHARED: Mapping[str, Any] = {"num_experts": 63, "experts_per_token": 7, "shared_intermediate_size": 16}
"""One of the experts is every token's, so the size is the same."""


def hybrid(pattern: str) -> dict[str, Any]:
    """Return Qwen3-Next's layers, of a pattern of four: L for linear and F for full attention."""
    return {
        "family": "qwen3_next",
        "zero_centred_norms": True,
        "layer_types": tuple(LINEAR if kind == "L" else FULL for kind in pattern * 6),
        "linear_key_heads": 2,
        "linear_value_heads": 4,
        "linear_key_dim": 16,
        "linear_value_dim": 16,
        **SHARED,
    }


ARMS: Mapping[str, Mapping[str, Any]] = {
    "renormalised": {},
    "softmax": {"norm_topk_prob": False},
    "sigmoid": SIGMOID,
    "bias": SIGMOID,
    "groups": {**SIGMOID, "expert_groups": 8, "groups_per_token": 4},
    "shared": {**SIGMOID, **SHARED},
    "linear_0": hybrid("FFFF"),
    "linear_1": hybrid("LFFF"),
    "linear_2": hybrid("LFLF"),
    "linear_3": hybrid("LLLF"),
}
"""Arm -> what it changes in the testbed's architecture."""
DRIFT = runpy.run_path(str(Path(__file__).with_name("drift.py")))
"""The module configs/drift.py, loaded by path: `configs/` is not importable from other directories."""


def get_config(arm: str = "renormalised") -> ConfigDict:
    """Return an arm's config."""
    if arm not in ARMS:
        raise UserError(f"configs/routers.py has no arm {arm!r}; {choices(arm, ARMS)}")
    config = DRIFT["get_config"]("arithmetic")
    config.model.architecture.update(ARMS[arm])
    config.coldstart.vocab_size = 259  # single bytes
    config.data.prompts_per_batch = config.training.minibatches = 16
    config.data.max_prompt_length = 10
    config.training.row_tokens = 272  # the group of an update
    config.optimizer.warmup_updates = 0
    config.functions.drawn = "configs/routers.py:drawn"
    config.rewards = ConfigDict({"drawn": 1.0})
    config.eval.correct = ""
    config.objective.name = "grpo"
    config.objective.grpo.high = 0.27
    return config


def drawn(prompt: str, completion: str, record: Mapping[str, Any]) -> float:
    """Score from 0 to 1, by a hash of prompt and response."""
    del record
    return int.from_bytes(hashlib.sha256(f"{prompt}\n{completion}".encode()).digest()[:4]) / 2**32
