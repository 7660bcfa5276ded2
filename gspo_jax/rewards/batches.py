"""Rewards of whole batches, computed in a thread while the device runs.

In-process rewards hold the interpreter lock, which slows the main thread but not dispatched device programs. All
collectives run in the main thread, in the same order in every process.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jax.sharding import Mesh

from gspo_jax.parallel import hosts
from gspo_jax.rewards.functions import EPISODE
from gspo_jax.rewards.scorer import Scorer, Scores, unless_stopped
from gspo_jax.rewards.step_scorer import StepScorer, Turns, place_step_rewards, place_turn_rewards
from gspo_jax.types import Batch, Rewards

_KEPT = 64
"""Batches that `BatchScorer.metrics` remembers at most."""


class BatchScorer:
    """Rewards batches of responses. Every process scores its own and receives all."""

    def __init__(
        self, scorer: Scorer, decode: Callable[[list[int]], str], mesh: Mesh, *, steps: StepScorer | None = None
    ):
        """Wrap the reward functions.

        Args:
          scorer: reward functions of whole responses.
          decode: token ids -> text, without special tokens.
          mesh: its batch shards assign responses to processes.
          steps: step-reward functions.
        """
        self.scorer, self._decode, self._mesh, self._steps = scorer, decode, mesh, steps
        self._scores = deque[Scores](maxlen=_KEPT)
        self._waited_s = 0.0

    def begin(self, batch: Batch) -> Callable[[], Rewards]:
        """Start scoring a batch that is not packed yet, and return a function that waits for its rewards.

        Every process calls that at the same point. It raises like `Scorer.score` and `Scorer.confirm`. Known rewards
        are kept.
        """
        if (rewards := batch.rewards) is not None:
            return lambda: rewards
        mesh, rollout, B = self._mesh, batch.rollout, len(batch.lengths)
        own = hosts.own_rows(mesh, B)
        texts, records = batch.texts[own].tolist(), batch.records[own].tolist()
        lost, turns = None if batch.failed is None else batch.failed[own].tolist(), _own_turns(batch, own)
        tokens, mask, drawn = hosts.fetch_own_rows(mesh, (rollout.tokens, rollout.mask, rollout.action_mask))

        def score() -> dict[str, Any]:
            responses = [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
            completions, told = list(map(self._decode, responses)), self._with_turns(records, turns, responses)
            scores = self.scorer.score_here(texts, completions, told, lost=lost)
            self._scores.append(scores)
            found = {"total": scores.total, "by_name": scores.by_name, "without_worker": scores.without_worker}
            found["failed"] = scores.failed
            if self._steps is not None:
                seen = self._steps.score(texts, completions, told)
                found["total"] = np.where(seen.failed, np.float32(np.nan), scores.total)
                found["by_name"] = scores.by_name | seen.by_name
                of_steps, steps = place_step_rewards(seen.steps, tokens, mask, self._decode)
                if turns is not None and (weight := self._steps.turn_weight):
                    of_turns, ends = place_turn_rewards(turns, mask)
                    of_steps, steps = of_steps + np.float32(weight) * of_turns, steps | ends
                # Environment replies are not steps of the policy.
                found |= {"of_steps": np.where(drawn, of_steps, 0), "steps": steps & drawn}
            return found | {"learn": np.isfinite(found["total"])}

        scored = _in_thread(score)

        def wait() -> Rewards:
            begun = time.monotonic()
            own_rewards = unless_stopped(scored.result)
            self._waited_s += time.monotonic() - begun
            rewards = Rewards(**hosts.allgather_rows(mesh, own_rewards, B))
            self.scorer.confirm(rewards.failed, rewards.by_name, batch.failed)
            return rewards

        return wait

    def ahead(self, texts: Sequence[str], responses: Sequence[list[int]], records: Sequence[Any]) -> None:
        """Begin to score this process's responses that have ended while others of their batch are being sampled."""
        self.scorer.ahead(texts, [self._decode(tokens) for tokens in responses], records)

    def _with_turns(self, records: list[Any], turns: list[Turns] | None, responses: list[list[int]]) -> list[Any]:
        """Return records with the environment's rewards: of each turn, and the characters up to its end."""
        if turns is None:
            return records
        found = []
        for record, (ends, rewards), response in zip(records, turns, responses, strict=True):
            places = [len(self._decode(response[:end])) for end in ends]
            found.append({**record, EPISODE: list(zip(places, rewards, strict=True))})
        return found

    def score(self, batch: Batch) -> Rewards:
        """Return a batch's rewards."""
        return self.begin(batch)()

    def metrics(self) -> dict[str, float]:
        """Return metrics of scoring speed since the last call."""
        scores, waited_s = list(self._scores), self._waited_s
        self._scores.clear()
        self._waited_s = 0.0
        if not scores:
            return {}
        took_s = sum(each.until - each.since for each in scores)
        found = {"throughput/answers_per_s": sum(len(each.total) for each in scores) / sum(s.seconds for s in scores)}
        found |= {"timing/scoring_s": took_s, "timing/scoring_hidden": max(0.0, 1 - waited_s / max(took_s, 1e-9))}
        if retries := sum(each.retries for each in scores):
            found["reward/retries"] = retries
        found |= self.scorer.take_metrics()
        if any(each.without_worker is not None for each in scores):
            queued = [wait for each in scores for wait in each.queued_s]
            found["timing/queue_s"] = sum(queued) / max(1, len(queued))
        return found


def _own_turns(batch: Batch, own: np.ndarray) -> list[Turns] | None:
    """Return each of these episodes' rewarded turns, None if the environment gives no rewards."""
    ends, rewards = batch.turn_ends, batch.turn_rewards
    if ends is None or rewards is None:
        return None
    given = [np.isfinite(row) for row in rewards[own]]
    rows = zip(ends[own], rewards[own], given, strict=True)
    return [(a[there].tolist(), b[there].tolist()) for a, b, there in rows]


def _in_thread(work: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
    future = Future[dict[str, Any]]()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fulfil, name="rewards", daemon=True).start()
    return future
