"""Rewards that a server gives, from the config's sections `judge` and `reward_model`."""

import os
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.errors import UserError
from gspo_jax.rewards import served
from gspo_jax.rewards.judge import Settings as JudgeSettings
from gspo_jax.rewards.judge import make_judge
from gspo_jax.rewards.reward_model import Settings as RewardModelSettings
from gspo_jax.rewards.reward_model import make_reward_model

FILES = ("judge.rubric", "reward_model.template")
"""Fields that name files which scores depend on."""


def make(config: ConfigDict) -> dict[str, Any]:
    """Return the served rewards among the config's, by name. No server is asked anything.

    Raises:
      UserError: a setting, a template or a key cannot be used, or comparisons have no use.
    """
    _check_comparisons(config)
    found: dict[str, served.Served] = {}
    if "judge" in config.rewards:
        found["judge"] = make_judge(JudgeSettings(**config.judge.to_dict()))
    if "reward_model" in config.rewards:
        found["reward_model"] = make_reward_model(RewardModelSettings(**config.reward_model.to_dict()))
    return found


def without_keys(config: ConfigDict) -> tuple[ConfigDict, list[str]]:
    """Return the config without keys that this machine lacks, and what they are, in words."""
    config, left = config.copy_and_resolve_references(), []
    for name in served.NAMES:
        if name in config.rewards and (key := config[name].key) not in os.environ and key.isidentifier():
            config[name].key = ""
            left.append(f"the key in the environment variable {key}")
    return config, left


def _check_comparisons(config: ConfigDict) -> None:
    if not ("judge" in config.rewards and config.judge.pairwise):
        return
    if config.sampling.group_size == 1:
        raise UserError(
            "judge.pairwise compares the responses of a group, and sampling.group_size is 1; set that to 2 or more"
        )
    asked = {"eval.correct": config.eval.correct}
    asked |= {f"data.sources.{name}.correct": source.correct for name, source in config.data.sources.items()}
    for field, correct in asked.items():
        if correct == "judge":
            raise UserError(
                f"{field} is 'judge', and judge.pairwise only compares responses of a policy with each other: half of "
                "them win, however good it is; use another reward, with weight 0 if it is only to be measured"
            )
