"""Held-out evaluation of a run's newest policy, with mean@k and pass@k or mean rewards, or a published benchmark.

python -m gspo_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny
"""

import dataclasses
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.measuring import held_out, published
from gspo_jax.measuring.held_out import Evaluation
from gspo_jax.measuring.opened import open_policy
from gspo_jax.setup import data, keys


def evaluate_folder(config: ConfigDict, workdir: str | Path) -> Evaluation:
    """Evaluate a run's newest checkpoint, or its initial policy without one."""
    with open_policy(config, workdir) as opened:
        batches = data.held_out_prompts(config, opened.tokenizer, data.load_records(config, "test"))
        _, name = opened.load()
        key, correct = keys.eval_key(keys.run_key(config)), data.correct_for(config)
        judge = {"correct": correct, "tokenizer": opened.tokenizer}
        result = held_out.evaluate(opened.player, batches, opened.scorer, key, **judge)
    print(f"{name}: {result}")
    if result.accuracy is None:
        print("; ".join(f"{own} {x:.3f} ± {result.scores_stderr[own]:.3f}" for own, x in result.scores.items()))
    if result.warning:
        print(f"warning: {result.warning}")
    return result


def main(config: ConfigDict) -> None:
    """Run the command."""
    name, place = flags.FLAGS.benchmark, flags.FLAGS.data
    if name is None:
        cli.write_facts(flags.FLAGS.json, dataclasses.asdict(evaluate_folder(config, flags.FLAGS.workdir)))
        return
    facts = published.run(config, flags.FLAGS.workdir, name=name, place=place or "", samples=flags.FLAGS.samples)
    if facts:
        print(published.described(facts))
        cli.write_facts(flags.FLAGS.json, facts)


if __name__ == "__main__":
    cli.run(main, "evaluate")
