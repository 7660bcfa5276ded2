"""One RL run: prompts, decode, rewards, advantages, objective, update, metrics.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Trains, or goes on from the newest checkpoint in the run folder. `train` is the algorithm; run.py is what it stands on.
"""

from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.run.session import Clock, open_run


def train(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Trains for `config.iterations` iterations, counted over all starts; returns the first and the last evaluation."""
    with open_run(config, workdir) as (run, state):
        if run.iteration == 0:
            run.evaluate(state)

        for iteration in range(run.iteration, config.iterations):
            clock = Clock(run.progress)

            clock.phase("reshard")
            run.sync_weights(state)

            rounds = run.rounds()
            while not rounds.full:
                episodes = run.sample(iteration, rounds.sampled, clock)  # prompts, and the decoder's responses
                clock.phase("reward")
                rounds.add(run.score(episodes))
            run.sampler.release()
            scored = rounds.batch(run.mesh)

            clock.phase("score")
            old = run.old_policy(state, scored.rollout)

            clock.phase("update")
            experience = run.experience(scored, old)  # with advantages
            metrics = []
            for minibatch in range(run.minibatches):
                state, seen = run.update(state, experience, minibatch)
                metrics.append(jax.device_get(seen))  # one update in flight: simulated devices share their threads

            clock.stop()
            run.log(iteration, state, metrics, rounds, scored, clock)
            run.keep_samples(iteration, state, scored)
            run.finish(iteration, state)
        return run.summary()


def main(config: ConfigDict) -> None:
    """The command line."""
    cli.write_facts(flags.FLAGS.json, train(config, flags.FLAGS.workdir))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Run folder, or gs://BUCKET/RUN; what is in it is resumed.", required=True)
    flags.DEFINE_string("json", None, "Also write the first and the last evaluation to this file.")
    cli.run(main)
