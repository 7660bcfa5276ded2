"""Held-out evaluation: mean@k and pass@k of a run's newest policy, or a published benchmark's numbers.

python -m gspo_jax.evaluate --config=configs/tiny.py --workdir=runs/tiny
"""

import dataclasses
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.errors import UserError
from gspo_jax.measuring import held_out, published
from gspo_jax.measuring.held_out import Evaluation
from gspo_jax.measuring.opened import open_policy
from gspo_jax.setup import data, keys


def evaluate_folder(config: ConfigDict, workdir: str | Path) -> Evaluation:
    """Evaluate a run's newest checkpoint, or its initial policy without one.

    Raises:
      UserError: no reward decides which responses are correct, or as `open_policy`.
    """
    if not config.eval.correct:
        raise UserError(
            "eval.correct is empty, so that no response is correct or wrong; give a reward, such as "
            "--config.rewards.exact_answer=0 --config.eval.correct=exact_answer"
        )
    with open_policy(config, workdir) as opened:
        batches = data.held_out_prompts(config, opened.tokenizer, data.load_records(config, "test"))
        _, name = opened.load()
        key, correct = keys.eval_key(keys.run_key(config)), data.correct_for(config)
        scorer = opened.scorer.without_steps
        result = held_out.evaluate(opened.player, batches, scorer, key, correct=correct, tokenizer=opened.tokenizer)
    print(f"{name}: {result}")
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
