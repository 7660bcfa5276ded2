"""Held-out evaluation, with the decoder of training."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.data.pipeline import EvalBatches
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import ScoringFailed
from gspo_jax.folder.samples import Sample, make_samples
from gspo_jax.measuring.completions import line, responses_of
from gspo_jax.parallel import hosts
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.types import Batch, Rewards

EXAMPLES = 16
"""Maximum prompts whose first response is kept."""
OF_REWARD = "eval/reward/"
"""Prefix of the metrics of a single reward."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of a policy on held-out prompts."""

    accuracy: float | None
    """mean@k: correct fraction of a prompt's judged responses, averaged over prompts with any. None: no reward says
    what is correct."""
    accuracy_stderr: float | None
    """Standard error over prompts."""
    pass_at_k: float | None
    """pass@k: fraction of prompts with a correct response, among judged prompts."""
    failed: float
    """Fraction of responses without a verdict, or without a reward where none decides."""
    response_length: float
    """Mean in tokens, EOS included."""
    truncated: float
    """Fraction cut off at the length limit."""
    prompts: int
    samples: int
    """Responses per prompt, k."""
    reward: float | None
    """Mean over prompts of the weighted sum of the reward functions, without step rewards; None without any."""
    reward_stderr: float | None
    """Standard error over prompts."""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean of each reward and step reward over the responses that it scored."""
    scores_stderr: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Their standard errors over prompts."""
    graded: Sequence[str] = ()
    """Rewards that were to decide, but gave scores other than 0 and 1."""
    examples: Sequence[Sample] = ()
    """The first response to some prompts, the same ones in every evaluation."""

    def __str__(self) -> str:
        failed = f", {self.failed:.1%} could not be scored" if self.failed else ""
        shared = f"{self.response_length:.1f} tokens, {self.truncated:.1%} cut{failed}"
        where = f"on {self.prompts} held-out prompts"
        if self.accuracy is not None:
            mean = f"mean@{self.samples} {self.accuracy:.3f} ± {self.accuracy_stderr:.3f}"
            return f"{mean} {where}, pass@{self.samples} {self.pass_at_k:.3f}, {shared}"
        mean = "no reward" if self.reward is None else f"reward {self.reward:.3f} ± {self.reward_stderr:.3f}"
        return f"{mean} {where}, {self.samples} responses each, {shared}"

    @property
    def quality(self) -> dict[str, float]:
        """The number by which policies are compared, by name: the accuracy, or else the mean reward; {} without."""
        known = {"accuracy": self.accuracy, "reward": self.reward}
        return dict([(name, x) for name, x in known.items() if x is not None][:1])

    @property
    def warning(self) -> str:
        """Why there is no accuracy though a reward was to decide, or ""."""
        if not self.graded:
            return ""
        name = self.graded[0]
        return (
            f"the reward {name!r} is to decide what is correct, but has scores other than 0 and 1 on held-out "
            "responses: evaluations show mean rewards, and no accuracy; set --config.eval.correct to a reward of "
            "verdicts, or to ''"
        )

    def metrics(self) -> dict[str, float]:
        """Return the results under their names in metrics.jsonl."""
        left_out = ("prompts", "samples", "scores", "scores_stderr", "graded", "examples")
        own = {f"eval/{name}": x for name, x in vars(self).items() if name not in left_out and x is not None}
        for name, mean in self.scores.items():
            own |= {f"{OF_REWARD}{name}": mean, f"{OF_REWARD}{name}_stderr": self.scores_stderr[name]}
        return own


def is_evaluated(metrics: Mapping[str, Any]) -> bool:
    """Return True if a row of metrics has an evaluation's."""
    return any(name.startswith("eval/") for name in metrics)


def rewards_in(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the metric of each reward's mean in an evaluation's metrics, by the reward's name."""
    found = [name for name in metrics if name.startswith(OF_REWARD)]
    return {
        name.removeprefix(OF_REWARD): name
        for name in found
        if name.removesuffix("_stderr") not in found or not name.endswith("_stderr")
    }


def evaluate(
    player: Player,
    batches: EvalBatches,
    scorer: BatchScorer,
    key: jax.Array,
    *,
    correct: Callable[[Record], str],
    tokenizer: Tokenizer,
    keep: Callable[[Iterable[dict[str, Any]]], None] | None = None,
) -> Evaluation:
    """Sample and score k episodes of every held-out prompt, k being the sampler's group size.

    Args:
      player: with weights loaded in its sampler.
      key: fixes the sampling noise, so evaluations of a run are comparable.
      correct: record -> reward function that decides by 1 (correct) or 0; "" for none.
      tokenizer: decodes the examples.
      keep: takes all responses, as lines (completions.py), batch by batch.

    Raises:
      ScoringFailed: no response could be scored.
    """
    columns, graded = list[tuple[np.ndarray, ...]](), set[str]()
    scores, examples, wanted = dict[str, list[np.ndarray]](), list[Sample](), -(-EXAMPLES // len(batches))
    for number, prompts in enumerate(batches):
        played = player.answer(prompts, jax.random.fold_in(key, number))
        rewards, k = scorer.score(played), len(played.lengths) // len(prompts.lengths)
        names = [correct(record) for record in played.records]
        verdicts = np.array(
            [rewards.by_name[name][row] if name else np.nan for row, name in enumerate(names)], np.float32
        )
        real, asked = np.repeat(prompts.valid, k), np.array([name != "" for name in names], bool)
        of_prompts = (x[real].reshape(-1, k) for x in (verdicts, asked, rewards.total))
        graded |= {name for name, verdict in zip(names, verdicts, strict=True) if not _is_verdict(verdict)}
        if keep is not None:
            found = responses_of(played, tokenizer, rewards)
            keep(line(played.records[row], found[row], sample=int(row % k)) for row in np.flatnonzero(real))
        columns.append((*of_prompts, played.lengths[real], played.truncated[real]))
        for name, values in rewards.by_name.items():
            scores.setdefault(name, []).append(values[real].reshape(-1, k))
        examples += _examples(played, rewards, k * _spread(wanted, prompts.valid.sum()), tokenizer)
    verdicts, asked, totals, lengths, truncated = map(np.concatenate, zip(*columns, strict=True))
    whole = {name: np.concatenate(values) for name, values in scores.items()}
    known = {name: _mean_over_responses(x) for name, x in whole.items() if np.isfinite(x).any()}
    if not (np.isfinite(verdicts).any() if asked.any() else known):
        which = " that decide correctness, eval.correct" if asked.any() else ""
        raise ScoringFailed(
            f"none of the {verdicts.size} held-out responses could be scored; check the reward functions{which}"
        )
    found = summarize(verdicts, totals, lengths, truncated, asked=asked & (not graded))
    means, errors = ({name: pair[i] for name, pair in known.items()} for i in range(2))
    kept = [examples[place] for place in np.unique(_spread(EXAMPLES, len(examples)))]
    each = {"scores": means, "scores_stderr": errors, "graded": sorted(graded), "examples": kept}
    return dataclasses.replace(found, **each)


def _is_verdict(score: float) -> bool:
    """Return True for 0, 1 and a missing score."""
    return score in (0, 1) or bool(np.isnan(score))


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
    *,
    asked: Bool[np.ndarray, "P G"],
) -> Evaluation:
    """Return the evaluation of B = P·G responses.

    Verdicts are 0, 1, or NaN where missing, rewards NaN where missing. `asked` is True where a reward decides.
    """
    verdicts = np.where(asked, verdicts, np.nan)
    judged = np.isfinite(verdicts)
    accuracy, accuracy_stderr = _mean_over_prompts(verdicts) if judged.any() else (None, None)
    reward, reward_stderr = _mean_over_prompts(rewards) if np.isfinite(rewards).any() else (None, None)
    passed = (verdicts == 1)[judged.any(axis=1)].any(axis=1)
    return Evaluation(
        accuracy=accuracy,
        accuracy_stderr=accuracy_stderr,
        pass_at_k=float(passed.mean()) if judged.any() else None,
        failed=float(np.isnan(np.where(asked, verdicts, rewards)).mean()),
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


def _mean_over_responses(values: Float[np.ndarray, "P G"]) -> tuple[float, float]:
    """Return the mean of the known values, and its standard error, where the values of a prompt are not independent."""
    known = np.isfinite(values)
    count, total = known.sum(axis=1), np.where(known, values, 0).sum(axis=1, dtype=np.float64)
    mean, prompts = total.sum() / count.sum(), int((count > 0).sum())
    off = np.square(total - mean * count).sum() * prompts / max(prompts - 1, 1)
    return float(mean), float(np.sqrt(off) / count.sum()) if prompts > 1 else 0.0
