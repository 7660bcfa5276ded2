"""One RL run: prompts, decode, rewards, advantages, objective, update, metrics.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Trains, or goes on from the newest checkpoint in the run folder. `train` is the algorithm; `Run` is what it stands on.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from gspo_jax import cli, coldstart, evaluate, experiment
from gspo_jax.data.pipeline import Batches, EvalBatches, PromptBatch
from gspo_jax.data.records import Record
from gspo_jax.objectives import Objective
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rewards.scorer import Scorer, Scores
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.training.checkpoint import Checkpointer
from gspo_jax.training.metrics import MetricsWriter, SamplesWriter, write_config
from gspo_jax.training.progress import Progress
from gspo_jax.training.state import TrainState
from gspo_jax.training.update import UpdateFn, make_score, make_update, take_minibatch
from gspo_jax.types import Experience, Rollout


def train(config: ConfigDict, workdir: Path) -> dict[str, float]:
    """Trains for `config.iterations` iterations, counted over all starts of the run; returns its last evaluation."""
    experiment.check(config)
    mesh = experiment.make_mesh(config)
    with jax.set_mesh(mesh), open_run(config, workdir, mesh) as run:
        state = run.state
        if run.iteration == 0:
            run.evaluate(state)

        for iteration in range(run.iteration, config.iterations):
            clock = Clock(run.progress)

            clock.phase("reshard")
            run.sampler.load(state.params)

            clock.phase("sample")
            prompts = next(run.prompts)
            rollout = jax.block_until_ready(run.sampler(prompts.prompts, experiment.sample_key(run.key, iteration)))

            clock.phase("reward")
            completions = experiment.completions(run.policy.tokenizer, rollout)
            texts, records = experiment.per_response(prompts, run.group_size)
            scores = run.scorer.score(texts, completions, records)
            rewards = without_failures(scores.total, run.group_size)

            clock.phase("score")
            old_logprobs = jax.block_until_ready(run.old_logprobs(state.params, rollout))

            clock.phase("update")
            advantages = run.objective.advantage(rewards, group_size=run.group_size)
            experience = Experience(rollout, old_logprobs, mesh_lib.to_rows(mesh, jax.device_get(advantages)))
            lines = []
            for minibatch in range(run.minibatches):
                state, metrics = run.update(state, experience, minibatch)
                lines.append(jax.device_get(metrics))

            clock.stop()
            run.log(iteration, state, lines, rollout, scores, clock)
            run.keep_samples(iteration, state, texts, completions, records, scores)
            run.finish(iteration, state)
    return run.newest_evaluation


class Clock:
    """Times the phases of one iteration and names the running one on the progress bar."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._begun = self._phase_begun = time.perf_counter()
        self._phase = ""
        self.seconds: dict[str, float] = {}
        """By phase, and "iteration" for all of it once stopped."""

    def phase(self, name: str) -> None:
        """Ends the running phase and begins the next."""
        self._end()
        self._phase = name
        self._progress.phase(name)

    def stop(self) -> None:
        """Ends the running phase and the iteration."""
        self._end()
        self.seconds["iteration"] = time.perf_counter() - self._begun

    def _end(self) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = now - self._phase_begun
        self._phase_begun = now


@dataclasses.dataclass
class Run:
    """What the loop stands on, opened from the config and the run folder, and what it leaves behind."""

    config: ConfigDict
    policy: experiment.Policy
    state: TrainState
    """Where the loop begins."""
    iteration: int
    """Iterations done by earlier starts."""
    key: jax.Array
    prompts: Batches[PromptBatch]
    held_out: EvalBatches
    sampler: Sampler
    scorer: Scorer
    objective: Objective
    old_logprobs: Callable[[nnx.State, Rollout], jax.Array]
    """(params, rollout) -> log π_old [B, T], the sampler's or the trainer's."""
    update: UpdateFn
    checkpointer: Checkpointer
    writer: MetricsWriter
    samples: SamplesWriter
    progress: Progress
    newest_evaluation: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def group_size(self) -> int:
        """G."""
        return self.config.sampling.group_size

    @property
    def minibatches(self) -> int:
        """Updates per iteration."""
        return self.config.training.minibatches

    def log(
        self,
        iteration: int,
        state: TrainState,
        lines: list[dict[str, Any]],
        rollout: Rollout,
        scores: Scores,
        clock: Clock,
    ) -> None:
        """One line of metrics for each update; what was timed over the iteration goes on the last."""
        columns = response_columns(rollout, scores)
        first = int(state.updates) - self.minibatches + 1
        for i, line in enumerate(lines):
            if i > 0:  # only the first mini-batch is seen by the very weights that sampled it
                line = {name: value for name, value in line.items() if not name.startswith("mismatch/")}
            line |= response_metrics(take_minibatch(columns, i, count=self.minibatches, group_size=self.group_size))
            line |= {"iteration": iteration + 1, "minibatch": i}
            if i + 1 == self.minibatches:
                tokens = float(columns["length"].sum())
                line |= {f"timing/{phase}_s": seconds for phase, seconds in clock.seconds.items()}
                line |= {
                    "reshard/bytes": self.sampler.reshard_bytes,
                    "reward/failed": scores.failures,
                    "throughput/tokens_per_s": tokens / clock.seconds["iteration"],
                    "throughput/sample_tokens_per_s": tokens / clock.seconds["sample"],
                }
            self.writer.write(first + i, line)
        last = lines[-1]
        self.progress.advance(
            reward=float(np.nanmean(scores.total)),
            clip_fraction=float(last["clip_fraction/sequence"]),
            flip_rate=float(last["routing/flip_rate"]),
            tokens_per_s=float(columns["length"].sum()) / clock.seconds["iteration"],
            accuracy=self.newest_evaluation.get("eval/accuracy"),
        )

    def keep_samples(
        self,
        iteration: int,
        state: TrainState,
        texts: list[str],
        completions: list[str],
        records: list[Record],
        scores: Scores,
    ) -> None:
        """Every so many iterations, writes and prints completions from all over the batch."""
        log = self.config.log
        if (iteration + 1) % log.samples_every and iteration + 1 != self.config.iterations:
            return
        shown = range(0, len(completions), max(1, len(completions) // log.samples))
        self.samples.write(
            int(state.updates),
            prompts=[texts[i] for i in shown],
            completions=[completions[i] for i in shown],
            rewards=[float(scores.total[i]) for i in shown],
            answers=[records[i]["answer"] for i in shown],
        )
        for i in shown:
            self.progress.say(f"  reward {scores.total[i]:g}  {texts[i]!r} -> {completions[i]!r}")

    def finish(self, iteration: int, state: TrainState) -> None:
        """Evaluates and saves where the config says so, and always after the last iteration."""
        done, last = iteration + 1, iteration + 1 == self.config.iterations
        if last or done % self.config.eval.every == 0:
            self.evaluate(state)
        if last or done % self.config.checkpoint.every == 0:
            self.progress.phase("save")
            run = {
                "iteration": done,
                "prompts": self.prompts.get_state(),
                "key": jax.random.key_data(self.key).tolist(),
            }
            self.checkpointer.save(done, state, run)

    def evaluate(self, state: TrainState) -> None:
        """Held-out mean@k of the state's policy, into the line of its last update."""
        self.progress.phase("evaluate")
        self.sampler.load(state.params)
        result = evaluate.evaluate(
            self.sampler,
            self.held_out,
            self.policy.tokenizer,
            self.scorer,
            experiment.eval_key(self.key),
            correct=self.config.eval.correct,
        )
        self.newest_evaluation = result.metrics()
        self.writer.write(int(state.updates), self.newest_evaluation)
        self.progress.say(f"update {int(state.updates)}: {result}")


@contextmanager
def open_run(config: ConfigDict, workdir: Path, mesh: Mesh) -> Iterator[Run]:
    """Opens the run folder: from its newest checkpoint, or at the beginning, after a cold start where there is one."""
    folder = experiment.initial_folder(config, workdir)
    if not config.model.folder and not folder.exists():
        coldstart.coldstart(config, mesh, folder)
    policy = experiment.open_policy(config, folder, dict(mesh.shape))
    optimizer, schedule = experiment.make_update_rule(config)
    objective = experiment.make_objective(config)
    prompts = experiment.training_prompts(config, policy)
    sampler = experiment.make_sampler(config, policy, mesh)
    scoring = {
        "temperature": experiment.make_sampling(config).scoring_temperature,
        "logprob_chunk": config.training.logprob_chunk,
        "remat": config.model.remat,
    }
    update = make_update(
        policy.graph,
        objective,
        optimizer,
        schedule,
        minibatches=config.training.minibatches,
        microbatches=config.training.microbatches,
        group_size=config.sampling.group_size,
        **scoring,
    )
    score = make_score(policy.graph, **scoring)
    old_logprobs: dict[str, Callable[[nnx.State, Rollout], jax.Array]] = {
        "sampler": lambda _, rollout: rollout.logprobs,
        "recompute": lambda params, rollout: score(params, rollout).logprobs,
    }

    with ExitStack() as stack:
        checkpointer = Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep)
        stack.callback(checkpointer.close)
        restored = experiment.restore(checkpointer, policy, optimizer, mesh)
        if restored is None:
            iteration, key = 0, jax.random.key(config.seed)
            state = experiment.first_state(folder, policy, optimizer, mesh)
        else:
            iteration, state = restored.run["iteration"], restored.state
            key = jax.random.wrap_key_data(jnp.asarray(restored.run["key"], jnp.uint32))
            prompts.set_state(restored.run["prompts"])
        after = None if restored is None else int(state.updates)
        write_config(workdir, config.to_dict(), command=" ".join(sys.argv))
        scorer = stack.enter_context(experiment.make_scorer(config))
        writer = stack.enter_context(MetricsWriter(workdir, after_step=after))
        progress = stack.enter_context(Progress(config.iterations, label=config.objective.name, done=iteration))
        if restored is not None:
            progress.say(f"resuming from iteration {iteration} in {workdir}")
        yield Run(
            config=config,
            policy=policy,
            state=state,
            iteration=iteration,
            key=key,
            prompts=prompts,
            held_out=experiment.held_out(config, policy),
            sampler=sampler,
            scorer=scorer,
            objective=objective,
            old_logprobs=old_logprobs[config.training.old_logprobs],
            update=update,
            checkpointer=checkpointer,
            writer=writer,
            samples=SamplesWriter(workdir, after_step=after),
            progress=progress,
        )


def without_failures(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Gives a response that could not be scored (NaN) the mean of its group, so that its advantage is zero.

    Raises:
      RuntimeError: no response of the batch could be scored.
    """
    valid = np.isfinite(rewards).reshape(-1, group_size)
    if not valid.any():
        raise RuntimeError("none of the batch's responses could be scored: see the reward functions")
    grouped = np.where(valid, rewards.reshape(-1, group_size), 0)
    means = grouped.sum(axis=1, keepdims=True) / np.maximum(valid.sum(axis=1, keepdims=True), 1)
    return np.where(valid, grouped, means).reshape(-1).astype(np.float32)


def response_columns(rollout: Rollout, scores: Scores) -> dict[str, np.ndarray]:
    """What is known of each response on the host, [B] each."""
    rewards = {f"reward/{name}": values for name, values in scores.by_name.items()}
    lengths = np.asarray(rollout.mask).sum(axis=1)
    return {"reward/mean": scores.total, **rewards, "length": lengths, "truncated": np.asarray(rollout.truncated)}


def response_metrics(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Means over the responses of an update."""
    columns = dict(columns)
    lengths, truncated = columns.pop("length"), columns.pop("truncated")
    return {
        **{name: float(np.nanmean(values)) for name, values in columns.items()},
        "response_length/mean": float(lengths.mean()),
        "response_length/max": int(lengths.max()),
        "response/truncated": float(truncated.mean()),
    }


def main(config: ConfigDict) -> None:
    """The command line."""
    evaluation = train(config, Path(flags.FLAGS.workdir))
    if flags.FLAGS.json:
        Path(flags.FLAGS.json).write_text(json.dumps(evaluation, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Run folder; what is in it is resumed.", required=True)
    flags.DEFINE_string("json", None, "Also write the last evaluation to this file.")
    cli.run(main)
