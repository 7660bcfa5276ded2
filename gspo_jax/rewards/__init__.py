"""Rewards, step rewards and environments: host-side functions of (prompt, completion, record)."""

from collections.abc import Callable
from typing import Any, TypeVar

from gspo_jax.thoughts import answer_part

__all__ = ["answer_part", "own_process"]

Reward = TypeVar("Reward", bound=Callable[..., Any])


def own_process(reward: Reward) -> Reward:
    """Decorate a reward function of one's own that may hang, crash or exhaust memory: workers call it, with a timeout.

    A call that exceeds `scoring.timeout_s` is killed and has no score. The function sees few environment variables,
    none of which may hold a secret, and an empty home folder; its module must not import jax.
    """
    reward.__dict__["own_process"] = True
    return reward
