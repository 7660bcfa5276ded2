"""One RL run: prompts, decode, rewards, advantages, objective, update, metrics.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Starts a run, or resumes from the newest checkpoint in its folder. `train` is the whole algorithm: the methods it calls
are those of run/session.py, and the programs behind them those of engine.py.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.errors import StopRequested
from gspo_jax.parallel.compilation import CompileCounter
from gspo_jax.run.session import open_run
from gspo_jax.setup.checks import check_elsewhere


def train(config: ConfigDict, workdir: str | Path, *, start_over: bool = False) -> dict[str, Any]:
    """Train until `config.iterations` are done, counting those before a resume; return first and last evaluation.

    It may be called from any program, such as a notebook: `train(cli.load_config("configs/tiny.py"), "runs/tiny")`. On
    CPU, the first call sets the number of simulated devices, `config.cpu_devices`, for the life of the process. With
    `start_over`, a run whose checkpoints are gone or damaged begins again instead of ending with an error.

    Raises:
      UserError: the config, the folder or the devices do not allow the run: one sentence.
      StopRequested: SIGTERM, SIGINT or SIGHUP ended the run early; everything up to the newest iteration is saved.
    """
    cli.prepare(config)
    with open_run(config, workdir, start_over=start_over) as (run, state):
        prompts, objective = run.prompts, run.objective
        run.evaluate_if_due()

        for iteration in range(run.iteration, config.iterations):
            clock = run.clock()
            run.sync_weights(state, clock)  # the sampler samples with this state's weights

            rounds = run.rounds()
            while not rounds.full:
                episodes = run.decode(prompts, iteration, rounds, clock)
                rounds.add(run.start_rewards(episodes, clock))

            batch = run.batch(rounds, clock)
            old = run.score(state, batch)  # the reward functions run beside it
            scored = run.rewards(rounds, batch, clock)
            experience = run.advantages(objective, scored, old, clock)
            metrics = []
            for minibatch in range(run.minibatches):
                state, measured = run.update(objective, state, experience, minibatch)
                metrics.append(measured)

            run.report(iteration, state, metrics, rounds, scored, clock)
        return run.finish()


def main(config: ConfigDict) -> None:
    """Run the command."""
    if flags.FLAGS.check_for is not None:
        left = check_elsewhere(config, devices=flags.FLAGS.check_for)
        print("the config is valid" + (f"; not checked here: {', '.join(left)}" if left else ""))
        return
    compiled = CompileCounter()
    with suppress(StopRequested):
        facts = train(config, flags.FLAGS.workdir, start_over=flags.FLAGS.start_over)
        facts["compile"] = {"programs": compiled.programs, "cached": compiled.cached, "seconds": compiled.seconds}
        cli.write_facts(flags.FLAGS.json, facts)


if __name__ == "__main__":
    cli.run(main, "train")
