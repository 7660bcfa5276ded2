"""Held-out evaluation, with the decoder of training."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.data.pipeline import EvalBatches
from gspo_jax.data.records import Record
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rollout.episodes import Player


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Accuracy of a policy on held-out prompts."""

    accuracy: float
    """mean@k: correct fraction of a prompt's scored responses, averaged over prompts with any."""
    accuracy_stderr: float
    """Standard error of the mean over prompts."""
    pass_at_k: float
    """pass@k: fraction of prompts with a correct response, among scored prompts."""
    failed: float
    """Fraction of responses without a score, neither correct nor wrong."""
    response_length: float
    """Mean in tokens, EOS included."""
    truncated: float
    """Fraction cut off at the length limit."""
    prompts: int
    samples: int
    """Responses per prompt, k."""

    def __str__(self) -> str:
        failed = f", {self.failed:.1%} could not be scored" if self.failed else ""
        return (
            f"mean@{self.samples} {self.accuracy:.3f} ± {self.accuracy_stderr:.3f} on {self.prompts} held-out prompts, "
            f"pass@{self.samples} {self.pass_at_k:.3f}, {self.response_length:.1f} tokens, {self.truncated:.1%} cut"
            f"{failed}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the results under their names in metrics.jsonl."""
        return {f"eval/{name}": value for name, value in vars(self).items() if name not in ("prompts", "samples")}


def evaluate(
    player: Player, batches: EvalBatches, scorer: BatchScorer, key: jax.Array, *, correct: Callable[[Record], str]
) -> Evaluation:
    """Sample and score k episodes of every held-out prompt, k being the sampler's group size.

    Args:
      player: with weights loaded in its sampler.
      key: fixes the sampling noise, so evaluations of a run are comparable.
      correct: record -> deciding reward function: a score above 0.5 is correct.

    Raises:
      RuntimeError: no response could be scored.
    """
    columns: list[tuple[np.ndarray, ...]] = []
    for number, prompts in enumerate(batches):
        played = player.answer(prompts, jax.random.fold_in(key, number))
        scores, k = scorer.score(played).by_name, len(played.lengths) // len(prompts.lengths)
        verdicts = np.array([scores[correct(record)][row] for row, record in enumerate(played.records)], np.float32)
        real = np.repeat(prompts.valid, k)
        columns.append((verdicts[real].reshape(-1, k), played.lengths[real], played.truncated[real]))
    by_prompt, lengths, truncated = map(np.concatenate, zip(*columns, strict=True))
    if not np.isfinite(by_prompt).any():
        raise RuntimeError(
            f"none of the {by_prompt.size} held-out responses could be scored; check the reward functions that decide "
            "correctness, eval.correct"
        )
    return summarize(by_prompt, lengths, truncated)


def summarize(
    scores: Float[np.ndarray, "P G"], lengths: Int[np.ndarray, " B"], truncated: Bool[np.ndarray, " B"]
) -> Evaluation:
    """Return the evaluation of B = P·G responses. Missing scores are NaN, but not all may be."""
    scored, right = np.isfinite(scores), scores > 0.5
    judged = scored.any(axis=1)
    means = right[judged].sum(axis=1) / scored[judged].sum(axis=1)
    return Evaluation(
        accuracy=float(means.mean()),
        accuracy_stderr=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0,
        pass_at_k=float(right[judged].any(axis=1).mean()),
        failed=float(1 - scored.mean()),
        response_length=float(lengths.mean()),
        truncated=float(truncated.mean()),
        prompts=scores.shape[0],
        samples=scores.shape[1],
    )
