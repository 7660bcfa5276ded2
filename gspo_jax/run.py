"""What a run's loop stands on, opened from its config and folder, and what it leaves behind: metrics, samples,
evaluations, checkpoints. The algorithm itself is in train.py.
"""

import dataclasses
import json
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from gspo_jax import coldstart, evaluate, experiment
from gspo_jax.data.pipeline import Batches, EvalBatches, PromptBatch
from gspo_jax.data.records import Record
from gspo_jax.objectives import Objective
from gspo_jax.rewards.scorer import Scorer, Scores
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.training.checkpoint import Checkpointer
from gspo_jax.training.metrics import MetricsWriter, SamplesWriter, read_metrics, write_config
from gspo_jax.training.progress import Progress
from gspo_jax.training.state import TrainState
from gspo_jax.training.update import Metrics, UpdateFn, make_score, make_update, take_minibatch
from gspo_jax.types import Rollout, UserError

SHOWN_CHARACTERS = 400
"""Of a completion, on the terminal; the file under samples/ has all of it."""

MAY_CHANGE = ("iterations", "eval.", "log.", "checkpoint.", "scoring.", "data.data_dir", "cpu_devices", "mesh.")
"""Fields of a config in which a run may differ from the checkpoint that it goes on from."""


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
    """A run that is open."""

    config: ConfigDict
    mesh: Mesh
    policy: experiment.Policy
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
    evaluations: list[dict[str, float]]
    """By their names in metrics.jsonl, those of earlier starts included."""

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
        metrics: list[Metrics],
        rollout: Rollout,
        scores: Scores,
        clock: "Clock",
    ) -> None:
        """One line for each update; what is known of the whole iteration goes on the last."""
        columns = response_columns(rollout, scores)
        tokens = float(columns["length"].sum())
        of_iteration = {
            **{f"timing/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
            "reward/failed": scores.failures,
            "reshard/bytes": self.sampler.copy_bytes,
            "throughput/tokens_per_s": tokens / clock.seconds["iteration"],
            "throughput/sample_tokens_per_s": tokens / clock.seconds["sample"],
        }
        for i, seen in enumerate(metrics):
            own = take_minibatch(columns, i, count=self.minibatches, group_size=self.group_size)
            line = {"iteration": iteration + 1, "minibatch": i, **response_metrics(own)}
            # Only the first mini-batch is seen by the very weights that sampled it.
            line |= {name: value for name, value in seen.items() if i == 0 or not name.startswith("mismatch/")}
            line |= of_iteration if i + 1 == self.minibatches else {}
            self.writer.write(int(state.updates) - self.minibatches + 1 + i, line)
        self.progress.advance(
            reward=float(np.nanmean(scores.total)),
            clip_fraction=float(metrics[-1]["clip_fraction/sequence"]),
            flip_rate=metrics[-1].get("routing/flip_rate"),
            tokens_per_s=of_iteration["throughput/tokens_per_s"],
            accuracy=self.evaluations[-1]["eval/accuracy"] if self.evaluations else None,
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
            shortened = textwrap.shorten(completions[i], SHOWN_CHARACTERS, placeholder=" …")
            self.progress.say(f"  reward {scores.total[i]:g}  {texts[i]!r} -> {shortened!r}")

    def finish(self, iteration: int, state: TrainState) -> None:
        """Evaluates and saves where the config says so, and always after the last iteration."""
        done, last = iteration + 1, iteration + 1 == self.config.iterations
        if last or done % self.config.eval.every == 0:
            self.evaluate(state)
        if last or done % self.config.checkpoint.every == 0:
            self.progress.phase("save")
            run = {"iteration": done, "prompts": self.prompts.get_state(), "config": self.config.to_dict()}
            self.checkpointer.save(done, state, run | {"key": jax.random.key_data(self.key).tolist()})

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
        self.sampler.release()
        self.evaluations.append(result.metrics())
        self.writer.write(int(state.updates), self.evaluations[-1])
        self.progress.say(f"update {int(state.updates)}: {result}")

    def summary(self) -> dict[str, dict[str, float]]:
        """Prints and returns the first and the last evaluation."""
        first, last = self.evaluations[0], self.evaluations[-1]
        rows = [{"": name, "first": first[name], "last": last[name]} for name in first]
        self.progress.table(rows, title=f"{self.config.objective.name}, {self.config.iterations} iterations")
        return {"first": first, "last": last}


@contextmanager
def open_run(config: ConfigDict, workdir: Path) -> Iterator[tuple[Run, TrainState]]:
    """Opens a run folder: at its newest checkpoint, or at the beginning, after a cold start where there is one.

    What can be wrong with config, data, rewards and model folder comes to light first, before a device is touched.
    """
    experiment.check(config)
    folder = experiment.initial_folder(config, workdir)
    policy = experiment.open_policy(config, folder) if config.model.folder or folder.exists() else None
    records = {split: experiment.load_records(config, split) for split in ("train", "test")}
    with ExitStack() as stack:
        scorer = stack.enter_context(experiment.make_scorer(config))
        mesh = experiment.make_mesh(config)
        stack.enter_context(jax.set_mesh(mesh))
        if policy is None:
            coldstart.coldstart(config, records["train"], mesh, folder)
            policy = experiment.open_policy(config, folder)
        policy.config.check_mesh(dict(mesh.shape))
        optimizer, schedule = experiment.make_update_rule(config)
        objective = experiment.make_objective(config)
        prompts = experiment.training_prompts(config, policy, records["train"])

        checkpointer = Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep)
        stack.callback(checkpointer.close)
        restored = experiment.restore(checkpointer, policy, optimizer, mesh)
        if restored is None:
            iteration, after, key = 0, None, experiment.run_key(config)
            state = experiment.first_state(folder, policy, optimizer, mesh)
        else:
            check_same_run(config.to_dict(), restored.run["config"], workdir)
            iteration, state = restored.run["iteration"], restored.state
            after, key = int(state.updates), jax.random.wrap_key_data(jnp.asarray(restored.run["key"], jnp.uint32))
            prompts.set_state(restored.run["prompts"])
        write_config(workdir, config.to_dict(), command=shlex.join(["python", "-m", "gspo_jax.train", *sys.argv[1:]]))
        writer = stack.enter_context(MetricsWriter(workdir, after_step=after))
        progress = stack.enter_context(Progress(config.iterations, label=config.objective.name, done=iteration))
        if restored is not None:
            progress.say(f"resuming from iteration {iteration} in {workdir}")
        scoring = experiment.scoring(config)
        yield (
            Run(
                config=config,
                mesh=mesh,
                policy=policy,
                iteration=iteration,
                key=key,
                prompts=prompts,
                held_out=experiment.held_out(config, policy, records["test"]),
                sampler=experiment.make_sampler(config, policy, mesh),
                scorer=scorer,
                objective=objective,
                old_logprobs=make_old_logprobs(policy, config.training.old_logprobs, scoring),
                update=make_update(
                    policy.graph,
                    objective,
                    optimizer,
                    schedule,
                    shardings=experiment.shardings(policy, optimizer, mesh),
                    minibatches=config.training.minibatches,
                    microbatches=config.training.microbatches,
                    group_size=config.sampling.group_size,
                    **scoring,
                ),
                checkpointer=checkpointer,
                writer=writer,
                samples=SamplesWriter(workdir, after_step=after),
                progress=progress,
                evaluations=[] if restored is None else earlier_evaluations(workdir),
            ),
            state,
        )


def make_old_logprobs(
    policy: experiment.Policy, source: str, scoring: dict[str, Any]
) -> Callable[[nnx.State, Rollout], jax.Array]:
    """Where log π_old comes from: "sampler", as the tokens were drawn, or "recompute", from the trainer's forward."""
    if source == "sampler":
        return lambda params, rollout: rollout.logprobs
    score = make_score(policy.graph, **scoring)
    return lambda params, rollout: score(params, rollout).logprobs


def earlier_evaluations(workdir: Path) -> list[dict[str, float]]:
    """The evaluations in metrics.jsonl."""
    rows = [row for row in read_metrics(workdir) if "eval/accuracy" in row]
    return [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows]


def check_same_run(here: Mapping[str, Any], saved: Mapping[str, Any], workdir: Path) -> None:
    """Raises a UserError where the config is another run's than the checkpoint's, but for what may change."""
    ours, theirs = _flat(here), _flat(saved)
    for name in sorted(ours.keys() | theirs.keys()):
        if not name.startswith(MAY_CHANGE) and ours.get(name) != theirs.get(name):
            raise UserError(
                f"{name} is {ours.get(name)!r} here and {theirs.get(name)!r} in the run in {workdir}; "
                "set it back, or start another run with another --workdir"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in json.loads(json.dumps(tree)).items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def without_failures(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Gives a response that could not be scored (NaN) the mean of its group's others, and so an advantage of zero.

    The group's mean stays what it is without the response; its standard deviation shrinks a little.

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
