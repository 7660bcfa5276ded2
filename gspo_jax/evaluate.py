"""Held-out evaluation: mean@k and pass@k of a policy, with the decoder that training samples with.

python -m gspo_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict

from gspo_jax import benchmark, cli, engine
from gspo_jax.data.pipeline import EvalBatches
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer, decode_responses
from gspo_jax.parallel import hosts
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.setup import data, keys, policy, sampling
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.storage import open_folder


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Accuracy of a policy on held-out prompts, with k responses to each."""

    accuracy: float
    """mean@k: fraction of a prompt's scored responses that are correct, averaged over prompts that have any."""
    accuracy_stderr: float
    """Standard error of the mean over prompts."""
    pass_at_k: float
    """pass@k: fraction of prompts with at least one correct response, of those with a scored one."""
    failed: float
    """Fraction of responses that could not be scored; they are neither correct nor wrong."""
    response_length: float
    """Mean response length in tokens, EOS included."""
    truncated: float
    """Fraction of responses cut off at the length limit."""
    prompts: int
    """Number of held-out prompts."""
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
        """Return the results by their names in metrics.jsonl."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_stderr": self.accuracy_stderr,
            "eval/pass_at_k": self.pass_at_k,
            "eval/failed": self.failed,
            "eval/response_length": self.response_length,
            "eval/truncated": self.truncated,
        }


def evaluate(
    player: Player,
    batches: EvalBatches,
    tokenizer: Tokenizer,
    scorer: Scorer,
    key: jax.Array,
    mesh: Mesh,
    *,
    correct: Callable[[Record], str],
) -> Evaluation:
    """Sample k episodes for every held-out prompt and score them; k is the sampler's group size.

    Args:
      player: plays the episodes, with the sampler's loaded weights.
      batches: the held-out prompts.
      tokenizer, scorer: turn responses into text, and text into rewards.
      key: the same key gives the same sampling noise, so that evaluations of a run are comparable.
      mesh: the trainer's.
      correct: record -> name of the reward function that decides correctness: a score above 0.5 is correct.

    Raises:
      RuntimeError: no response could be scored.
    """
    scores_of, lengths, truncated = [], [], []
    for number, batch in enumerate(batches):
        played = player.play(batch.prompts, batch.texts, batch.records, jax.random.fold_in(key, number))
        rollout, B = played.rollout, len(played.texts)
        own, k = hosts.own_rows(mesh, B), B // len(batch.texts)
        tokens, mask, cut = hosts.fetch_own_rows(mesh, (rollout.tokens, rollout.mask, rollout.truncated))
        completions = decode_responses(tokenizer, tokens, mask)
        records = played.records[own].tolist()
        scores = scorer.score(played.texts[own].tolist(), completions, records)
        verdicts = np.asarray([scores.by_name[correct(record)][row] for row, record in enumerate(records)], np.float32)
        found = (verdicts, mask.sum(axis=1), cut)
        real = np.repeat(batch.valid, k)
        found = [column[real] for column in hosts.allgather_rows(mesh, found, B)]
        scores_of.append(found[0].reshape(-1, k))
        lengths.append(found[1])
        truncated.append(found[2])
    by_prompt = np.concatenate(scores_of)
    if not np.isfinite(by_prompt).any():
        raise RuntimeError(
            f"none of the {by_prompt.size} held-out responses could be scored; check the reward functions that decide "
            "correctness, eval.correct"
        )
    return summarize(by_prompt, np.concatenate(lengths), np.concatenate(truncated))


def summarize(
    scores: Float[np.ndarray, "P G"], lengths: Int[np.ndarray, " B"], truncated: Bool[np.ndarray, " B"]
) -> Evaluation:
    """Return the evaluation of B = P·G responses from their scores, NaN where there is none; not all may be NaN."""
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


def evaluate_folder(config: ConfigDict, workdir: str | Path) -> Evaluation:
    """Evaluate the newest checkpoint of a run folder, or the run's initial policy if there is no checkpoint."""
    check(config, count_devices=jax.device_count)
    policy.check_weights(config)
    with open_folder(workdir, write=False) as files:
        model, tokenizer = policy.read_run(config, files)
        batches = data.held_out_prompts(config, tokenizer, data.load_records(config, "test"))
        meshes = make_meshes(config, model)
        with (
            jax.set_mesh(meshes.trainer),
            data.make_scorer(config) as scorer,
            sampling.make_replies(config) as replies,
        ):
            made = engine.build(config, model, meshes, sampling.stop_rule_of(config, tokenizer))
            weights, name = policy.newest_weights(config, files, made.policy, meshes.trainer)
            made.sampler.load(weights)
            key = keys.eval_key(keys.run_key(config))
            player = sampling.make_player(config, tokenizer, made.sampler, replies)
            correct = data.correct_for(config)
            result = evaluate(player, batches, tokenizer, scorer, key, meshes.trainer, correct=correct)
    print(f"{name}: {result}")
    return result


def main(config: ConfigDict) -> None:
    """Run the command."""
    name, place = flags.FLAGS.benchmark, flags.FLAGS.data
    if name is None:
        cli.write_facts(flags.FLAGS.json, dataclasses.asdict(evaluate_folder(config, flags.FLAGS.workdir)))
        return
    facts = benchmark.run(config, flags.FLAGS.workdir, name=name, place=place or "", samples=flags.FLAGS.samples)
    if facts:
        print(benchmark.described(facts))
        cli.write_facts(flags.FLAGS.json, facts)


if __name__ == "__main__":
    cli.run(main, "evaluate")
