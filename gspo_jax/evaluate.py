"""Held-out evaluation of a run's newest policy, with mean@k and pass@k or mean rewards, or a published benchmark.

python -m gspo_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny
"""

import dataclasses
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.errors import UserError
from gspo_jax.measuring import completions, held_out, published
from gspo_jax.measuring.held_out import Evaluation
from gspo_jax.measuring.opened import open_policy
from gspo_jax.setup import data, keys


def evaluate_folder(config: ConfigDict, workdir: str | Path, *, keep: str | Path | None = None) -> Evaluation:
    """Evaluate a run's newest checkpoint, or its initial policy without one.

    `keep` is a new file for all responses with their rewards, JSON Lines (measuring/completions.py).

    Raises:
      UserError: there are no rewards, or as `open_policy`.
    """
    if not config.rewards:
        raise UserError(
            "the run has no rewards, so that nothing can be evaluated; give one, such as "
            "--config.rewards.exact_answer=0 --config.eval.correct=exact_answer"
        )
    with open_policy(config, workdir) as opened:
        batches = data.held_out_prompts(config, opened.tokenizer, data.load_records(config, "test"))
        _, name = opened.load()
        key, correct = keys.eval_key(keys.run_key(config)), data.correct_for(config)
        with completions.new_file(keep) as add:
            options = {"correct": correct, "tokenizer": opened.tokenizer, "keep": None if keep is None else add}
            result = held_out.evaluate(opened.player, batches, opened.scorer, key, **options)
    print(f"{name}: {result}")
    if result.accuracy is None:
        print("; ".join(f"{own} {x:.3f} ± {result.scores_stderr[own]:.3f}" for own, x in result.scores.items()))
    if result.warning:
        print(f"warning: {result.warning}")
    return result


def main(config: ConfigDict) -> None:
    """Run the command."""
    name, place, keep = flags.FLAGS.benchmark, flags.FLAGS.data, flags.FLAGS.keep
    if name is None:
        cli.check_new_file(keep, flag="keep")
        cli.write_facts(flags.FLAGS.json, dataclasses.asdict(evaluate_folder(config, flags.FLAGS.workdir, keep=keep)))
        return
    if keep is not None:
        raise UserError(f"--keep={keep} is for held-out prompts, and a benchmark keeps its own answers; leave it out")
    facts = published.run(config, flags.FLAGS.workdir, name=name, place=place or "", samples=flags.FLAGS.samples)
    if facts:
        print(published.described(facts))
        cli.write_facts(flags.FLAGS.json, facts)


if __name__ == "__main__":
    cli.run(main, "evaluate")
