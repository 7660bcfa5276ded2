"""Held-out evaluation, with the decoder of training."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.data.pipeline import EvalBatches
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import ScoringFailed
from gspo_jax.folder.samples import Sample, make_samples
from gspo_jax.parallel import hosts
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.types import Batch, Rewards

EXAMPLES = 16
"""Maximum prompts whose first response is kept."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of a policy on held-out prompts."""

    accuracy: float
    """mean@k: correct fraction of a prompt's scored responses, averaged over prompts with any."""
    accuracy_stderr: float
    """Standard error over prompts."""
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
    reward: float | None
    """Mean over prompts of the weighted sum of the reward functions, without step rewards; None if there is none."""
    reward_stderr: float | None
    """Standard error over prompts."""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean of each reward function over the responses that it scored."""
    examples: Sequence[Sample] = ()
    """The first response to some prompts, the same ones in every evaluation."""

    def __str__(self) -> str:
        failed = f", {self.failed:.1%} could not be scored" if self.failed else ""
        return (
            f"mean@{self.samples} {self.accuracy:.3f} ± {self.accuracy_stderr:.3f} on {self.prompts} held-out prompts, "
            f"pass@{self.samples} {self.pass_at_k:.3f}, {self.response_length:.1f} tokens, {self.truncated:.1%} cut"
            f"{failed}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the results under their names in metrics.jsonl."""
        left_out = ("prompts", "samples", "scores", "examples")
        own = {f"eval/{name}": x for name, x in vars(self).items() if name not in left_out and x is not None}
        return own | {f"eval/reward/{name}": value for name, value in self.scores.items()}


def evaluate(
    player: Player,
    batches: EvalBatches,
    scorer: BatchScorer,
    key: jax.Array,
    *,
    correct: Callable[[Record], str],
    tokenizer: Tokenizer,
) -> Evaluation:
    """Sample and score k episodes of every held-out prompt, k being the sampler's group size.

    Args:
      player: with weights loaded in its sampler.
      key: fixes the sampling noise, so evaluations of a run are comparable.
      correct: record -> deciding reward function: a score above 0.5 is correct.
      tokenizer: decodes the examples.

    Raises:
      ScoringFailed: no response could be scored.
    """
    columns: list[tuple[np.ndarray, ...]] = []
    scores, examples, wanted = dict[str, list[np.ndarray]](), list[Sample](), -(-EXAMPLES // len(batches))
    for number, prompts in enumerate(batches):
        played = player.answer(prompts, jax.random.fold_in(key, number))
        rewards, k = scorer.score(played), len(played.lengths) // len(prompts.lengths)
        names = [correct(record) for record in played.records]
        verdicts = np.array([rewards.by_name[name][row] for row, name in enumerate(names)], np.float32)
        real = np.repeat(prompts.valid, k)
        of_prompts = (x[real].reshape(-1, k) for x in (verdicts, rewards.total))
        columns.append((*of_prompts, played.lengths[real], played.truncated[real]))
        for name, values in rewards.by_name.items():
            scores.setdefault(name, []).append(values[real])
        examples += _examples(played, rewards, k * _spread(wanted, prompts.valid.sum()), tokenizer)
    verdicts, totals, lengths, truncated = map(np.concatenate, zip(*columns, strict=True))
    if not np.isfinite(verdicts).any():
        raise ScoringFailed(
            f"none of the {verdicts.size} held-out responses could be scored; check the reward functions that decide "
            "correctness, eval.correct"
        )
    found = summarize(verdicts, totals, lengths, truncated)
    whole = {name: np.concatenate(values) for name, values in scores.items()}
    known = {name: values[np.isfinite(values)] for name, values in whole.items()}
    means = {name: float(values.mean(dtype=np.float64)) for name, values in known.items() if len(values)}
    kept = [examples[place] for place in np.unique(_spread(EXAMPLES, len(examples)))]
    return dataclasses.replace(found, scores=means, examples=kept)


def _spread(count: int, total: int) -> Int[np.ndarray, " count"]:
    """Return `count` places of `total`, at equal distances; repeated if there are fewer."""
    return np.arange(count) * int(total) // count


def _examples(played: Batch, rewards: Rewards, rows: Int[np.ndarray, " n"], tokenizer: Tokenizer) -> list[Sample]:
    tokens, mask = hosts.fetch_rows((played.rollout.tokens, played.rollout.mask), rows)
    rows, first = np.unique(rows, return_index=True)
    return samples_of(played, rewards, rows, tokens[first], mask[first], tokenizer)


def samples_of(
    batch: Batch,
    rewards: Rewards,
    rows: Int[np.ndarray, " n"],
    tokens: Int[np.ndarray, "n T"],
    mask: Bool[np.ndarray, "n T"],
    tokenizer: Tokenizer,
) -> list[Sample]:
    """Return samples of some responses of a batch, whose tokens and mask have been fetched from the devices."""
    return make_samples(
        prompts=batch.texts[rows],
        completions=[
            tokenizer.decode(ids[keep].tolist(), skip_special=False) for ids, keep in zip(tokens, mask, strict=True)
        ],
        rewards=rewards.total[rows],
        answers=[record["answer"] for record in batch.records[rows]],
        scores={name: values[rows] for name, values in rewards.by_name.items()},
        special=tokenizer.special,
    )


def summarize(
    verdicts: Float[np.ndarray, "P G"],
    rewards: Float[np.ndarray, "P G"],
    lengths: Int[np.ndarray, " B"],
    truncated: Bool[np.ndarray, " B"],
) -> Evaluation:
    """Return the evaluation of B = P·G responses. Missing verdicts and rewards are NaN, but not all verdicts may be."""
    scored, right = np.isfinite(verdicts), np.where(np.isfinite(verdicts), verdicts > 0.5, np.nan)
    accuracy, accuracy_stderr = _mean_over_prompts(right)
    reward, reward_stderr = _mean_over_prompts(rewards) if np.isfinite(rewards).any() else (None, None)
    return Evaluation(
        accuracy=accuracy,
        accuracy_stderr=accuracy_stderr,
        pass_at_k=float((right == 1)[scored.any(axis=1)].any(axis=1).mean()),
        failed=float(1 - scored.mean()),
        response_length=float(lengths.mean()),
        truncated=float(truncated.mean()),
        prompts=verdicts.shape[0],
        samples=verdicts.shape[1],
        reward=reward,
        reward_stderr=reward_stderr,
    )


def _mean_over_prompts(values: Float[np.ndarray, "P G"]) -> tuple[float, float]:
    """Return the mean over prompts of the mean of their known values, and its standard error."""
    known = values[np.isfinite(values).any(axis=1)].astype(np.float64)
    means = np.nansum(known, axis=1) / np.isfinite(known).sum(axis=1)
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0
