"""One RL run: prompts, decode, rewards, advantages, objective, update, metrics.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Starts a run, or resumes from the newest checkpoint in its folder. `train` is the whole algorithm: the methods it calls
are those of run/session.py, and the programs behind them those of engine.py.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.run.session import open_run


def train(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Train until `config.iterations` are done, counting those before a resume; return first and last evaluation."""
    with open_run(config, workdir) as (run, state):
        prompts, objective = run.prompts, run.objective
        if run.iteration == 0:
            run.evaluate(state)

        for iteration in range(run.iteration, config.iterations):
            clock = run.clock()
            run.sync_weights(state, clock)  # the sampler samples with this state's weights

            rounds = run.rounds()
            while not rounds.full:
                episodes = run.decode(prompts, iteration, rounds, clock)
                rounds.add(run.rewards(episodes, clock))
            batch = run.batch(rounds)

            old = run.score(state, batch, clock)
            experience = run.advantages(objective, batch, old, clock)
            metrics = []
            for minibatch in range(run.minibatches):
                state, measured = run.update(objective, state, experience, minibatch)
                metrics.append(measured)

            run.report(iteration, state, metrics, rounds, batch, clock)
        return run.summary()


def main(config: ConfigDict) -> None:
    """Run the command."""
    cli.write_facts(flags.FLAGS.json, train(config, flags.FLAGS.workdir))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Run folder, or gs://BUCKET/RUN; a run in it is resumed.", required=True)
    flags.DEFINE_string("json", None, "Also write the first and the last evaluation to this file.")
    cli.run(main)
