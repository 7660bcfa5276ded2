"""Rewards, step rewards and environments: host-side functions of (prompt, completion, record)."""

from collections.abc import Callable
from typing import Any, TypeVar

from gspo_jax.thoughts import answer_part

__all__ = ["answer_part", "batched", "graded", "own_process"]

Reward = TypeVar("Reward", bound=Callable[..., Any])


def own_process(reward: Reward) -> Reward:
    """Mark a reward function that may hang, crash or exhaust memory, to run it in workers with a timeout.

    A call beyond `scoring.timeout_s` is killed and has no score. The function sees few environment variables, none of
    them secret but those of `scoring.environment`, and an empty home folder. Its module must not import jax.
    """
    reward.__dict__["own_process"] = True
    return reward


def batched(reward: Reward) -> Reward:
    """Mark a reward function of lists, `(prompts, completions, records)`, that returns a list of scores.

    It is called once per batch and process. A score may be None, or an exception where there is none.
    """
    reward.__dict__["batched"] = True
    return reward


def graded(reward: Reward) -> Reward:
    """Mark a reward function with scores other than 0 and 1: it cannot decide what is correct (`eval.correct`)."""
    reward.__dict__["graded"] = True
    return reward
