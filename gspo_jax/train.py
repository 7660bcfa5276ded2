"""One RL run: prompts, decode, rewards, advantages, objective, update, metrics.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Trains, or goes on from the newest checkpoint in the run folder. `train` is the algorithm; run.py is what it stands on.
"""

from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli, experiment
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.run import Clock, open_run, without_failures
from gspo_jax.types import Experience


def train(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Trains for `config.iterations` iterations, counted over all starts; returns the first and the last evaluation."""
    with open_run(config, workdir) as (run, state):
        if run.iteration == 0:
            run.evaluate(state)

        for iteration in range(run.iteration, config.iterations):
            clock = Clock(run.progress)

            clock.phase("data")
            prompts = next(run.prompts)

            clock.phase("reshard")
            run.sampler.load(state.params)

            clock.phase("sample")
            rollout = jax.block_until_ready(run.sampler(prompts.prompts, experiment.sample_key(run.key, iteration)))
            run.sampler.release()

            clock.phase("reward")
            completions = experiment.completions(run.policy.tokenizer, rollout)
            texts, records = experiment.per_response(prompts, run.group_size)
            scores = run.scorer.score(texts, completions, records)
            rewards = without_failures(scores.total, run.group_size)

            clock.phase("score")
            old_logprobs = jax.block_until_ready(run.old_logprobs(state.params, rollout))

            clock.phase("update")
            advantages = run.objective.advantage(rewards, group_size=run.group_size)
            experience = Experience(rollout, old_logprobs, mesh_lib.to_rows(run.mesh, jax.device_get(advantages)))
            metrics = []
            for minibatch in range(run.minibatches):
                state, seen = run.update(state, experience, minibatch)
                metrics.append(jax.device_get(seen))  # one update in flight: simulated devices share their threads

            clock.stop()
            run.log(iteration, state, metrics, rollout, scores, clock)
            run.keep_samples(iteration, state, texts, completions, records, scores)
            run.finish(iteration, state)
        return run.summary()


def main(config: ConfigDict) -> None:
    """The command line."""
    cli.write_facts(flags.FLAGS.json, train(config, Path(flags.FLAGS.workdir)))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Run folder; what is in it is resumed.", required=True)
    flags.DEFINE_string("json", None, "Also write the first and the last evaluation to this file.")
    cli.run(main)
