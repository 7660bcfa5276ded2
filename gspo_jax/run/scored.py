"""A batch of responses, and with their rewards. The reward functions run in a thread, beside the device's programs.

In-process rewards hold the interpreter lock while they run, and the device's programs do not need it once they are
dispatched. So the two overlap, but whatever the main thread itself does meanwhile takes longer. All collectives are in
the main thread, in the same order in every process.
"""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Shaped

from gspo_jax.data.tokenizer import Tokenizer, decode_responses
from gspo_jax.parallel import hosts
from gspo_jax.rewards.scorer import Scorer, Scores, unless_stopped
from gspo_jax.rewards.step_scorer import StepScorer, place_step_rewards
from gspo_jax.types import EpisodeBatch, Packing, Rollout

Value = TypeVar("Value")


@struct.dataclass(kw_only=True)
class Responses:
    """A batch of finished responses: the rollout on the devices, everything else on the host of every process."""

    rollout: Rollout
    """The responses."""
    texts: Shaped[np.ndarray, " B"]
    """Prompt text of each response."""
    lengths: Int[np.ndarray, " B"]
    """Tokens of each response, including an environment's replies."""
    drawn: Int[np.ndarray, " B"]
    """Tokens of each response that the policy sampled."""
    truncated: Bool[np.ndarray, " B"]
    """True for responses cut off at the length limit."""
    turns: Int[np.ndarray, " B"]
    """Turns the policy took."""
    stale_tokens: Int[np.ndarray, " B"]
    """Tokens sampled by policies older than the current one (partial rollouts)."""
    records: Shaped[np.ndarray, " B"]
    """Data record of each prompt, such as its answer."""
    packing: Packing | None = None
    """Rows that compute the responses; None before the batch is complete."""


@struct.dataclass(kw_only=True)
class Rewarded:
    """Rewards of a batch of responses, on the host of every process."""

    total: Float[np.ndarray, " B"]
    """Weighted sum of the reward functions; NaN if one of them, or of the step rewards, failed."""
    by_name: dict[str, Float[np.ndarray, " B"]]
    """Score of each reward function, and mean score per step of each step-reward function; NaN without a score."""
    learn: Bool[np.ndarray, " B"]
    """False for responses excluded from learning: not scored, or padding of a dynamic batch."""
    without_worker: Bool[np.ndarray, " B"] | None = None
    """True for responses scored without a call in a worker process; None if no function is isolated."""
    step_rewards: Float[np.ndarray, "B T"] | None = None
    """Weighted reward of a step at the token that ends it, 0 elsewhere; None without step rewards."""
    steps: Bool[np.ndarray, "B T"] | None = None
    """True at tokens that end a step; None without step rewards."""


@struct.dataclass(kw_only=True)
class Scored(Responses, Rewarded):
    """A batch of responses with their rewards."""

    @classmethod
    def of(cls, responses: Responses, rewarded: Rewarded) -> "Scored":
        """Join the two."""
        return cls(**_columns(responses), **_columns(rewarded))


class Round:
    """A round of responses whose reward functions run in a thread."""

    def __init__(
        self,
        responses: Responses,
        work: Callable[[], tuple[Scores, dict[str, Any]]],
        gather: Callable[[dict[str, Any]], dict[str, Any]],
    ):
        """Start `work`: scores of this process's rows, and their columns of `Rewarded`, which `gather` completes."""
        self.responses, self._gather = responses, gather
        self._found: Future[tuple[Scores, dict[str, Any]]] = Future()
        self._rewarded: Rewarded | None = None
        threading.Thread(target=_fulfil, args=(self._found, work), name="rewards", daemon=True).start()

    @property
    def scores(self) -> Scores:
        """The scores of this process's rows, after `wait`."""
        return self._found.result()[0]

    def wait(self) -> Rewarded:
        """The rewards, once all reward functions have returned; every process calls it at the same point.

        Raises:
          RuntimeError: a function is broken; with its first traceback.
          StopRequested: the scoring was interrupted, in this process or another one.
        """
        if self._rewarded is None:
            _, columns = unless_stopped(self._found.result)
            self._rewarded = Rewarded(**self._gather(columns))
        return self._rewarded


def start_round(
    episodes: EpisodeBatch, tokenizer: Tokenizer, scorer: Scorer, step_scorer: StepScorer | None, mesh: Mesh
) -> Round:
    """Start to score a batch of finished episodes; every process scores its own rows, and all receive all of them."""
    rollout, B = episodes.rollout, len(episodes.texts)
    own = hosts.own_rows(mesh, B)
    texts, records = episodes.texts[own].tolist(), episodes.records[own].tolist()
    tokens, mask, drawn, truncated = hosts.fetch_own_rows(
        mesh, (rollout.tokens, rollout.mask, rollout.action_mask, rollout.truncated)
    )

    def score() -> tuple[Scores, dict[str, Any]]:
        completions = decode_responses(tokenizer, tokens, mask)
        scores = scorer.score_here(texts, completions, records)
        total, by_name = scores.total, scores.by_name
        step_rewards = steps = None
        if step_scorer is not None:
            found = step_scorer.score(texts, completions, records)
            total, by_name = np.where(found.failed, np.float32(np.nan), total), by_name | found.by_name
            step_rewards, steps = place_step_rewards(found.steps, tokens, mask, tokenizer.decode)
            # An environment's reply is not a step of the policy.
            step_rewards, steps = np.where(drawn, step_rewards, 0), steps & drawn
        return scores, {
            "total": total,
            "by_name": by_name,
            "learn": np.isfinite(total),
            "without_worker": scores.without_worker,
            "step_rewards": step_rewards,
            "steps": steps,
        }

    columns = {"lengths": mask.sum(axis=1), "drawn": drawn.sum(axis=1), "truncated": truncated}
    responses = Responses(**episodes._asdict(), **hosts.allgather_rows(mesh, columns, B))
    return Round(responses, score, lambda columns: hosts.allgather_rows(mesh, columns, B))


def _fulfil(future: Future[Value], work: Callable[[], Value]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised in the main thread, which waits for the result
        future.set_exception(error)


def _columns(record: Responses | Rewarded) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
