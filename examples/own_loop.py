"""Iterations in a loop of your own: no run folder, a metric of your own, and the weights at the end.

    python examples/own_loop.py MODEL_FOLDER OUT

See docs/own.md. Everything that `iterate` takes can be an object of yours: who plays, who rewards, who looks on.
"""

import sys
from pathlib import Path

import jax

from gspo_jax import cli
from gspo_jax.iteration import iterate
from gspo_jax.measuring.opened import open_policy
from gspo_jax.models import huggingface


def main(folder: str, out: str) -> None:
    """Train for two iterations, print a metric of each, and write the weights to a Hugging Face folder."""
    config = cli.load_config("configs/tiny.py")
    config.model.folder, config.data.options.difficulty = folder, "easy"
    cli.prepare(config)
    with open_policy(config) as opened:
        (engine, state, _), prompts = opened.start(), opened.prompts()
        for number in range(2):
            key = jax.random.fold_in(jax.random.key(0), number)
            state, batch, _ = iterate(engine, opened.player, opened.scorer, state, prompts, key)
            right = batch.rewards.total > 0.5
            print(f"iteration {number}: {right.mean():.2f} right, {batch.lengths[~right].mean():.1f} tokens if wrong")
            del batch  # or two would be on the devices in the next iteration
        huggingface.save(engine.weights(state).whole, opened.model, Path(out))
        opened.tokenizer.save(Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
