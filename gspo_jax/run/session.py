"""What a run's loop stands on, opened from its config and folder, and what it leaves behind: metrics, samples,
evaluations, checkpoints. The algorithm itself is in train.py.
"""

import dataclasses
import itertools
import json
import math
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
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
from gspo_jax.config import base
from gspo_jax.data.pipeline import Batches, EvalBatches, PromptBatch
from gspo_jax.data.records import Record
from gspo_jax.objectives import Objective
from gspo_jax.objectives.guards import clip_range_warning
from gspo_jax.parallel import hosts, processes
from gspo_jax.reporting.progress import Progress
from gspo_jax.reporting.writers import MetricsWriter, SamplesWriter, read_metrics, write_config
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.shaping import overlong
from gspo_jax.rewards.step_scorer import StepScorer, to_tokens
from gspo_jax.rollout.episodes import Buffer, Episodes, Player
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.rounds import Rounds, Scored
from gspo_jax.storage import PUBLISH_S, RunFolder, open_folder
from gspo_jax.training.checkpoint import Checkpointer
from gspo_jax.training.experience import ExperienceFn, Rewards, make_experience
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.scoring import OldPolicyFn, make_old_policy
from gspo_jax.training.state import TrainState
from gspo_jax.training.update import UpdateFn, make_update, take_minibatch
from gspo_jax.types import EpisodeBatch, Experience, OldPolicy, Prompts, Rollout, UserError

SHOWN_CHARACTERS = 400
"""Of a completion, on the terminal; the file under samples/ has all of it."""

MAY_CHANGE = (
    *("iterations", "eval.", "log.", "checkpoint.", "scoring.", "data.data_dir"),
    *(
        "cpu_devices",
        "processes.",
        "mesh.",
        "sampling.slots",
        "model.dispatch",
        "model.remat",
        "training.microbatches",
        "training.logprob_chunk",
    ),
)
"""Fields of a config in which a run may differ from the checkpoint that it goes on from: those that leave its numbers
as they are, up to rounding and to what a capacity factor drops.
"""


class Compiled:
    """Counts what XLA compiles, from now on; a program that comes from a cache on disk counts too."""

    def __init__(self):
        self.programs = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def stop(self) -> None:
        """Counts no longer."""
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs += 1
            self.seconds += duration_secs


class Clock:
    """Times the phases of one iteration and names the running one on the progress bar."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._begun = self._phase_begun = time.perf_counter()
        self._phase = ""
        self.compiled = Compiled()
        """Since the iteration began, until it stopped."""
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
        self.compiled.stop()

    def _end(self) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._phase_begun
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
    player: Player
    buffer: Buffer | None
    """Of partial rollouts; None without them."""
    scorer: Scorer
    step_scorer: StepScorer | None
    objective: Objective
    reference: nnx.State | None
    """The parameters of the reference policy; None without one."""
    make_old_policy: OldPolicyFn
    make_experience: ExperienceFn
    update: UpdateFn
    files: RunFolder
    checkpointer: Checkpointer
    writer: MetricsWriter | None
    """None in all processes but the first, as is `samples`."""
    samples: SamplesWriter | None
    progress: Progress
    evaluations: list[dict[str, float]]
    """By their names in metrics.jsonl, those of earlier starts included."""
    warned: set[str] = dataclasses.field(default_factory=set)

    @property
    def group_size(self) -> int:
        """G."""
        return self.config.sampling.group_size

    @property
    def minibatches(self) -> int:
        """Updates per iteration."""
        return self.config.training.minibatches

    def rounds(self) -> Rounds:
        """The rounds of sampling of one iteration."""
        groups, limit = self.config.data.prompts_per_batch, self.config.sampling.rounds
        return Rounds(groups=groups, group_size=self.group_size, limit=limit)

    def sync_weights(self, state: TrainState) -> None:
        """From now on the sampler draws with the weights of this state."""
        self.sampler.load(state.params)
        if self.buffer is not None:
            self.buffer.on_weight_sync()

    def sample(self, iteration: int, first: int, clock: "Clock") -> EpisodeBatch:
        """The next batch of episodes: of new prompts, or out of the buffer of partial rollouts.

        `first` is the number of responses that the iteration has had before.
        """
        key = experiment.sample_key(self.key, iteration)

        def prompts() -> tuple[Prompts, list[str], list[Record]]:
            clock.phase("data")
            batch = next(self.prompts)
            clock.phase("sample")
            return batch.prompts, batch.texts, batch.records

        if self.buffer is None:
            return self.player.play(*prompts(), key, first=first)
        clock.phase("sample")
        return self.buffer.batch(lambda started: self.player.begin(*prompts(), key, first=started))

    def score(self, played: EpisodeBatch) -> Scored:
        """The rewards of a batch's responses."""
        if self.config.environment.name and played.turns.max() == 1:
            self.warn(
                f"{self.config.environment.name} has replied to no response of a whole batch; see that a turn ends "
                "where it listens (sampling.stop_ids), and that environment.turns is above 1"
            )
        rollout, B = played.rollout, len(played.texts)
        own = hosts.own_rows(self.mesh, B)  # every process scores its own; here on, all columns are of these
        tokens, mask, drawn, truncated = hosts.own(
            self.mesh, (rollout.tokens, rollout.mask, rollout.action_mask, rollout.truncated)
        )
        completions = experiment.completions(self.policy.tokenizer, tokens, mask)
        texts, records = played.texts[own].tolist(), played.records[own].tolist()
        scores = self.scorer.score(texts, completions, records)
        total, by_name = scores.total, scores.by_name
        step_rewards = steps = None
        if self.step_scorer is not None:
            found = self.step_scorer.score(texts, completions, records)
            total, by_name = np.where(found.failed, np.float32(np.nan), total), by_name | found.by_name
            step_rewards, steps = to_tokens(found.steps, tokens, mask, self.policy.tokenizer.decode)
            # What an environment says is no step.
            step_rewards, steps = np.where(drawn, step_rewards, 0), steps & drawn
        columns = {
            "lengths": mask.sum(axis=1),
            "drawn": drawn.sum(axis=1),
            "truncated": truncated,
            "total": total,
            "by_name": by_name,
            "learn": np.isfinite(total),
            "step_rewards": step_rewards,
            "steps": steps,
        }
        return Scored(**played._asdict(), **hosts.shared(self.mesh, columns, B))

    def old_policy(self, state: TrainState, rollout: Rollout) -> OldPolicy:
        """What the old policy, the critic and the reference say of a rollout, before it is learned from."""
        critic = None if state.critic is None else state.critic.params
        return jax.block_until_ready(self.make_old_policy(state.params, critic, self.reference, rollout))

    def experience(self, scored: Scored, old: OldPolicy) -> Experience:
        """Advantages of a scored batch, after length shaping and filters."""
        total = without_failures(scored.total, self.group_size) + self.overlong(scored)
        fields: tuple[Any, ...] = (total, self.learned(scored), scored.step_rewards, scored.steps)
        made = self.make_experience(scored.rollout, old, Rewards(*hosts.to_rows(self.mesh, fields)))
        if self.objective.critic is None and not jnp.any(made.advantages):
            self.warn(
                "no advantage of a whole batch differs from 0, because the responses of every prompt have equal "
                "rewards; use easier or harder prompts, larger groups, or sampling.rounds > 1"
            )
        return made

    def learned(self, scored: Scored) -> np.ndarray:
        """Which responses are learned from, [B]: not those that could not be scored, fill up, or are filtered out."""
        return scored.learn & ~scored.truncated if self.config.overlong.filter else scored.learn

    def overlong(self, scored: Scored) -> np.ndarray:
        """DAPO's punishment of each response, [B]; 0 where the config has none."""
        shaping, limit = self.config.overlong, self.config.sampling.max_response_length
        if not shaping.penalty:
            return np.zeros(len(scored.lengths), np.float32)
        return np.float32(shaping.penalty) * overlong(scored.lengths, limit=limit, cache=shaping.cache)

    def log(
        self, iteration: int, state: TrainState, metrics: list[Metrics], rounds: Rounds, scored: Scored, clock: "Clock"
    ) -> None:
        """One line for each update; what is known of the whole iteration goes on the last."""
        columns, stats = self.columns(scored), self.sampler.stats
        of_iteration = {
            **{f"timing/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
            **rounds.metrics(),
            **({} if self.buffer is None else {"partial/calls": self.buffer.calls, "partial/left": len(self.buffer)}),
            "reward/failed": rounds.failures,
            "reshard/bytes": self.sampler.copy_bytes,
            "timing/prefill_s": stats.prefill_s,
            "timing/decode_s": stats.decode_s,
            "decode/steps": stats.steps,
            "decode/occupancy": stats.occupancy,
            "decode/wasted": stats.slot_steps - stats.decode_tokens,
            "compile/programs": clock.compiled.programs,
            "compile/seconds": clock.compiled.seconds,
            "throughput/tokens_per_s": stats.sampled_tokens / clock.seconds["iteration"],
            "throughput/sample_tokens_per_s": stats.sampled_tokens / clock.seconds["sample"],
        }
        for i, seen in enumerate(metrics):
            own = take_minibatch(columns, i, count=self.minibatches, group_size=self.group_size)
            line = {"iteration": iteration + 1, "minibatch": i, **response_metrics(own)}
            # Only the first mini-batch is seen by the very weights that sampled it.
            line |= {name: value for name, value in seen.items() if i == 0 or not name.startswith("mismatch/")}
            line |= of_iteration if i + 1 == self.minibatches else {}
            self.write(int(state.updates) - self.minibatches + 1 + i, line)
        self.guard_ratios(metrics)
        self.progress.advance(
            reward=float(np.nanmean(scored.total)),
            clip_fraction=float(metrics[-1]["clip_fraction/sequence"]),
            flip_rate=metrics[-1].get("routing/flip_rate"),
            tokens_per_s=of_iteration["throughput/tokens_per_s"],
            accuracy=self.evaluations[-1]["eval/accuracy"] if self.evaluations else None,
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes metrics, which all processes know, into the run folder."""
        if self.writer is not None:
            self.writer.write(step, metrics)

    def columns(self, scored: Scored) -> dict[str, np.ndarray]:
        """What is known of each response on the host, [B] each; what starts with "reward/" is a metric by that name."""
        columns = {"reward/mean": scored.total} | {f"reward/{name}": x for name, x in scored.by_name.items()}
        if self.config.overlong.penalty:
            columns["reward/overlong"] = self.overlong(scored)
        columns["reward/zero_std"] = np.repeat(~scored.contrast(self.group_size), self.group_size).astype(np.float32)
        return columns | {
            "length": scored.lengths,
            "truncated": scored.truncated,
            "learned": self.learned(scored),
            "drawn": scored.drawn,
            **({"turns": scored.turns} if self.config.environment.name or self.config.sampling.prefix else {}),
            **({} if self.buffer is None else {"older": scored.stale_tokens}),
        }

    def guard_config(self) -> None:
        """Warns of settings with which a run looks like training and is none."""
        if text := clip_range_warning(self.objective):
            self.warn(text)
        if self.group_size == 1 and self.objective.critic is None:
            self.warn(
                "sampling.group_size is 1: a response is compared with its group, so every advantage is exactly 0 and "
                "nothing is learned; use 2 or more, or ppo, which has a critic"
            )

    def guard_ratios(self, metrics: list[Metrics]) -> None:
        """Warns of updates in which the policy has moved and its ratios have not."""
        for before, seen in itertools.pairwise(metrics):
            moved = float(before["actor/grad_norm"]) * float(before["actor/lr"]) > 0
            if moved and float(seen["update/tokens"]) and float(seen["ratio/token_log_max"]) == 0:
                self.warn(
                    "the importance ratio is exactly 1 for every token although the policy has been updated since it "
                    "sampled: the old log-probs are the new ones, and nothing is ever clipped"
                )

    def warn(self, text: str) -> None:
        """Prints a warning, once."""
        if text not in self.warned:
            self.warned.add(text)
            self.progress.say(f"warning: {text}")

    def keep_samples(self, iteration: int, state: TrainState, scored: Scored) -> None:
        """Every so many iterations, writes and prints completions from all over the batch."""
        log = self.config.log
        if (iteration + 1) % log.samples_every and iteration + 1 != self.config.iterations:
            return
        shown = np.arange(0, len(scored.total), max(1, len(scored.total) // log.samples))
        tokens, mask = hosts.everywhere((scored.rollout.tokens, scored.rollout.mask))
        completions = experiment.completions(self.policy.tokenizer, tokens[shown], mask[shown])
        if self.samples is not None:
            self.samples.write(
                int(state.updates),
                prompts=scored.texts[shown].tolist(),
                completions=completions,
                rewards=scored.total[shown].tolist(),
                answers=[record["answer"] for record in scored.records[shown]],
            )
        for i, completion in zip(shown, completions, strict=True):
            shortened = textwrap.shorten(completion, SHOWN_CHARACTERS, placeholder=" …")
            self.progress.say(f"  reward {scored.total[i]:g}  {scored.texts[i]!r} -> {shortened!r}")

    def finish(self, iteration: int, state: TrainState) -> None:
        """Evaluates and saves where the config says so, and always after the last iteration."""
        done, last = iteration + 1, iteration + 1 == self.config.iterations
        if last or done % self.config.eval.every == 0:
            self.evaluate(state)
        if last or done % self.config.checkpoint.every == 0:
            self.progress.phase("save")
            self.files.publish()  # the metrics of a step are kept before the step is
            run = {"iteration": done, "prompts": self.prompts.get_state(), "config": self.config.to_dict()}
            run["key"] = jax.random.key_data(self.key).tolist()
            left = None if self.buffer is None else self.buffer.episodes
            if left is not None:
                run["buffer"] = {"texts": left.texts.tolist(), "records": left.records.tolist()}
            self.checkpointer.save(done, state, run, None if left is None else left.to_arrays())
        self.files.publish(every_s=PUBLISH_S)

    def evaluate(self, state: TrainState) -> None:
        """Held-out mean@k of the state's policy, into the line of its last update."""
        self.progress.phase("evaluate")
        self.sampler.load(state.params)
        result = evaluate.evaluate(
            self.player,
            self.held_out,
            self.policy.tokenizer,
            self.scorer,
            experiment.eval_key(self.key),
            self.mesh,
            correct=self.config.eval.correct,
        )
        self.sampler.release()
        self.evaluations.append(result.metrics())
        self.write(int(state.updates), self.evaluations[-1])
        self.progress.say(f"update {int(state.updates)}: {result}")

    def summary(self) -> dict[str, dict[str, float]]:
        """Prints and returns the first and the last evaluation."""
        first, last = self.evaluations[0], self.evaluations[-1]
        rows = [{"": name, "first": first[name], "last": last[name]} for name in first]
        self.progress.table(rows, title=f"{self.config.objective.name}, {self.config.iterations} iterations")
        return {"first": first, "last": last}


@contextmanager
def open_run(config: ConfigDict, place: str | Path) -> Iterator[tuple[Run, TrainState]]:
    """Opens the run in `place`, a folder or a bucket: at its newest checkpoint, or at its beginning, after a cold start
    where there is one.

    What can be wrong with config, data, rewards and model folder comes to light first, before a device is touched.
    """
    experiment.check(config)
    experiment.check_folder(config)
    with ExitStack() as stack:
        files = stack.enter_context(open_folder(place))
        workdir = files.local
        folder = experiment.initial_folder(config, workdir)
        policy = experiment.open_policy(config, folder) if config.model.folder or folder.exists() else None
        records = {split: experiment.load_records(config, split) for split in ("train", "test")}
        scorer = stack.enter_context(experiment.make_scorer(config))
        mesh = experiment.make_mesh(config)
        stack.enter_context(jax.set_mesh(mesh))
        if policy is None:
            coldstart.coldstart(config, records["train"], mesh, folder)
            files.share()
            policy = experiment.open_policy(config, folder)
        policy.config.check_mesh(dict(mesh.shape))
        learners = experiment.make_learners(config, policy, mesh)
        objective = experiment.make_objective(config)
        prompts = experiment.training_prompts(config, policy, records["train"])

        checkpointer = Checkpointer(files.checkpoints, keep=config.checkpoint.keep)
        stack.callback(checkpointer.close)
        restored = learners.restore(checkpointer)
        left = None
        if restored is None:
            iteration, after, key = 0, None, experiment.run_key(config)
            state = learners.begin(folder)
        else:
            check_same_run(config.to_dict(), restored.run["config"], place)
            iteration, state = restored.run["iteration"], restored.state
            after, key = int(state.updates), jax.random.wrap_key_data(jnp.asarray(restored.run["key"], jnp.uint32))
            prompts.set_state(restored.run["prompts"])
            if "buffer" in restored.run:
                left = Episodes.from_arrays(restored.arrays, **restored.run["buffer"])
        writer = samples = None
        if processes.is_first():
            command = shlex.join(["python", "-m", "gspo_jax.train", *sys.argv[1:]])
            write_config(workdir, config.to_dict(), command=command)
            writer = stack.enter_context(MetricsWriter(workdir, after_step=after))
            samples = SamplesWriter(workdir, after_step=after)
        processes.wait_for_all("run folder")  # metrics.jsonl ends at `after`
        progress = stack.enter_context(Progress(config.iterations, label=config.objective.name, done=iteration))
        if restored is not None:
            progress.say(f"resuming from iteration {iteration} in {place}")
        scoring = experiment.scoring(config)
        sampler = experiment.make_sampler(config, policy, mesh)
        player = experiment.make_player(config, policy, sampler)
        run = Run(
            config=config,
            mesh=mesh,
            policy=policy,
            iteration=iteration,
            key=key,
            prompts=prompts,
            held_out=experiment.held_out(config, policy, records["test"]),
            sampler=sampler,
            player=player,
            buffer=experiment.make_buffer(config, player, left),
            scorer=scorer,
            step_scorer=experiment.make_step_scorer(config),
            objective=objective,
            reference=experiment.reference_params(config, folder, policy, mesh),
            make_old_policy=make_old_policy(
                policy.graph,
                scoring,
                recompute=config.training.old_logprobs == "recompute",
                replay=config.routing.replay,
                critic=None if learners.critic is None else learners.critic.graph,
                microbatches=config.training.microbatches,
            ),
            make_experience=make_experience(
                objective,
                group_size=config.sampling.group_size,
                correction=experiment.make_correction_of(config),
                kl_in_reward=config.reference.kl_weight if config.reference.place == "reward" else 0.0,
            ),
            update=make_update(
                policy.graph,
                scoring,
                objective,
                learners.optimizer,
                learners.schedule,
                critic=learners.critic,
                penalties=experiment.make_penalties(config),
                replay=config.routing.replay,
                shardings=learners.shardings,
                minibatches=config.training.minibatches,
                microbatches=config.training.microbatches,
                group_size=config.sampling.group_size,
            ),
            files=files,
            checkpointer=checkpointer,
            writer=writer,
            samples=samples,
            progress=progress,
            evaluations=[] if restored is None else earlier_evaluations(workdir),
        )
        run.guard_config()
        yield run, state


def earlier_evaluations(workdir: Path) -> list[dict[str, float]]:
    """The evaluations in metrics.jsonl."""
    rows = [row for row in read_metrics(workdir) if "eval/accuracy" in row]
    return [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows]


def check_same_run(here: Mapping[str, Any], saved: Mapping[str, Any], workdir: str | Path) -> None:
    """Raises a UserError where the config is another run's than the checkpoint's, but for what may change.

    A field that one of them lacks has its default there: checkpoints outlive the versions that wrote them.
    """
    defaults = _flat(base().to_dict())
    ours, theirs = defaults | _flat(here), defaults | _flat(saved)
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


def response_metrics(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Means over the responses of an update; of a column with nothing but NaN, NaN."""
    lengths = columns["length"]
    rewards = {name: x for name, x in columns.items() if name.startswith("reward/")}
    drawn, of_episodes = columns["drawn"].sum(), {}
    if "turns" in columns:
        of_episodes = {"response/turns": float(columns["turns"].mean()), "response/drawn": float(drawn / lengths.sum())}
    if "older" in columns:
        of_episodes["response/older"] = float(columns["older"].sum() / drawn)
    return {
        **{name: float(np.nanmean(x)) if np.isfinite(x).any() else math.nan for name, x in rewards.items()},
        "response_length/mean": float(lengths.mean()),
        "response_length/max": int(lengths.max()),
        "response/truncated": float(columns["truncated"].mean()),
        "response/learned": float(columns["learned"].mean()),
        **of_episodes,
    }
