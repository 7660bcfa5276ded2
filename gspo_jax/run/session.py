"""An open run: builds the parts that train.py needs, or resumes them, and logs, evaluates and saves."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax import benchmark, coldstart, engine, evaluate, noise
from gspo_jax.benchmark import Benchmark
from gspo_jax.data.pipeline import Batches, EvalBatches, PromptBatch
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.engine import Engine
from gspo_jax.errors import Diverged, StopRequested
from gspo_jax.objectives import Objective
from gspo_jax.parallel import hosts, processes
from gspo_jax.reporting.writers import write_saved
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer
from gspo_jax.rollout.episodes import Buffer, Episodes, Player
from gspo_jax.routing import decomposition
from gspo_jax.run import lease, resume
from gspo_jax.run import log as log_lib
from gspo_jax.run.clock import Clock
from gspo_jax.run.log import RunLog
from gspo_jax.run.phases import Phases, open_phases
from gspo_jax.run.rounds import Rounds
from gspo_jax.run.scored import Responses, Round, Scored, start_round
from gspo_jax.run.shaping import Filter, Shaping
from gspo_jax.run.stragglers import slowest
from gspo_jax.setup import data, keys, learning, policy, sampling
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.same import MAY_CHANGE
from gspo_jax.storage import BENCHMARKS, PUBLISH_S, RunFolder, check_place, open_folder
from gspo_jax.training.checkpoint import Checkpointer, named_leaves, steps
from gspo_jax.training.experience import Rewards
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.state import TrainState
from gspo_jax.types import EpisodeBatch, Experience, OldPolicy, Prompts, Weights
from gspo_jax.versions import versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """The newest end of an iteration, where a run can be saved at any time before the next update."""

    done: int
    """Iterations done."""
    state: TrainState
    """Train state, donated to the next update."""
    prompts: str
    """Position of the training prompts."""
    unfinished: Episodes | None
    """Partial rollouts in flight; None if there are none."""
    evaluated: bool
    """False if evaluations of this state are due."""
    accuracy: float | None = None
    """Held-out accuracy of this state; None if it was not evaluated."""

    @classmethod
    def of(cls, start: resume.Start, prompts: Batches[PromptBatch]) -> "Boundary":
        """The boundary that a run starts from."""
        return cls(
            done=start.iteration,
            state=start.state,
            prompts=prompts.get_state(),
            unfinished=start.unfinished,
            evaluated=start.evaluated,
        )


@dataclasses.dataclass
class Run:
    """An open run: the methods train.py calls, and the parts they use."""

    config: ConfigDict
    engine: Engine
    tokenizer: Tokenizer
    frozen: nnx.State
    """Weights that no update changes; empty in full training."""
    base: str | None
    """Digest of the frozen weights; None in full training."""
    reference: nnx.State | None
    """Parameters of the reference policy; None without a KL to it."""
    inputs: Mapping[str, str]
    """Digests of what the run reads, by what messages call it."""
    measured_on: Mapping[str, Mapping[str, str]]
    """Digests of each evaluation's records by field, by what messages call the evaluation."""
    boundary: Boundary
    """State and positions at the end of the newest iteration, which a stop saves; the one in hand is sampled again."""
    key: jax.Array
    """PRNG key of the run."""
    prompts: Batches[PromptBatch]
    """Endless training prompts, whose position is part of a checkpoint."""
    held_out: EvalBatches
    """Held-out prompts of the evaluations."""
    benchmarks: dict[str, tuple[Benchmark, EvalBatches]]
    """Benchmarks that the run takes, with their prompts."""
    player: Player
    buffer: Buffer | None
    """Buffer of partial rollouts; None without them."""
    scorer: Scorer
    step_scorer: StepScorer | None
    shaping: Shaping
    files: RunFolder
    checkpointer: Checkpointer
    log: RunLog
    phases: Phases
    confirm_lease: Callable[[], None]
    """Ends the process if another run has taken over the folder."""
    skipped: int = 0
    """Updates skipped in a row, up to the newest."""
    packed: dict[str, float] = dataclasses.field(default_factory=dict)
    """How well the newest batch is packed, by metric name."""
    noise: dict[str, float] = dataclasses.field(default_factory=dict)
    """Split of the newest batch's log-ratios into weights and routes, by metric name; empty if not measured."""
    updating: bool = False
    """Whether the iteration in hand has made an update, and will therefore make all of them."""

    @property
    def objective(self) -> Objective:
        """The objective that the run optimises."""
        return self.engine.objective

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.boundary.done

    @property
    def settled(self) -> bool:
        """Whether the newest boundary is saved, or is the beginning of the run, and no update was made since."""
        return not self.updating and self.boundary.done == (self.checkpointer.latest or 0)

    @property
    def minibatches(self) -> int:
        """Updates per iteration."""
        return self.config.training.minibatches

    @property
    def group_size(self) -> int:
        """Responses per prompt, G."""
        return self.config.sampling.group_size

    def clock(self) -> Clock:
        """A new clock for one iteration."""
        return Clock(self.phases)

    def rounds(self) -> Rounds:
        """An empty collection of one iteration's sampling rounds."""
        groups, sampling = self.config.data.prompts_per_batch, self.config.sampling
        kept = Filter(objective=self.objective, shaping=self.shaping, reward=sampling.filter)
        return Rounds(groups=groups, group_size=self.group_size, limit=sampling.rounds, keeps=kept.keeps)

    def weights(self, state: TrainState) -> Weights:
        """The policy's weights in this state."""
        return Weights(state.params, self.frozen)

    def sync_weights(self, state: TrainState, clock: Clock) -> None:
        """Load this state's weights into the sampler; they are the behaviour policy until the next sync."""
        clock.phase("reshard")
        self.phases.poll()
        self.engine.sampler.load(self.weights(state))
        if self.buffer is not None:
            self.buffer.on_weight_sync()

    def decode(self, prompts: Batches[PromptBatch], iteration: int, rounds: Rounds, clock: Clock) -> EpisodeBatch:
        """Sample the next batch of episodes, for new prompts or from the buffer's partial rollouts."""
        key = keys.sample_key(self.key, iteration)

        def take() -> tuple[Prompts, list[str], list[Record]]:
            clock.phase("data")
            batch = next(prompts)
            clock.phase("sample")
            return batch.prompts, batch.texts, batch.records

        if self.buffer is None:
            return self.player.play(*take(), key, first=rounds.sampled)
        clock.phase("sample")
        return self.buffer.batch(lambda started: self.player.begin(*take(), key, first=started))

    def start_rewards(self, episodes: EpisodeBatch, clock: Clock) -> Round:
        """Start to reward a batch of episodes; with dynamic sampling, whose next round depends on it, finish too."""
        clock.phase("reward")
        self.phases.poll()
        if self.config.environment.name and episodes.turns.max() == 1:
            self.log.warn(
                f"{self.config.environment.name} replied to no response of a whole batch; make turns end where it "
                "listens (sampling.stop_ids), with environment.turns above 1"
            )
        mesh = self.engine.meshes.trainer
        sampled = start_round(episodes, self.tokenizer, self.scorer, self.step_scorer, mesh)
        if self.config.sampling.rounds > 1:
            sampled.wait()
        return sampled

    def batch(self, rounds: Rounds, clock: Clock) -> Responses:
        """The batch to learn from; the sampler's weights are released to make room for the updates."""
        clock.phase("score")
        self.phases.poll()
        self.engine.sampler.release()
        batch, packer = rounds.batch(self.engine.meshes.trainer), self.engine.packer
        columns = batch.lengths, hosts.allgather(batch.rollout.prompt_lengths)
        packing = packer(*columns)
        self.packed = packer.metrics(packing, *columns)
        return dataclasses.replace(batch, packing=packing)

    def score(self, state: TrainState, batch: Responses) -> OldPolicy:
        """Log-probs, values and routes that stay fixed during the iteration's updates."""
        critic = None if state.critic is None else state.critic.params
        weights = self.weights(state)
        assert batch.packing is not None
        return jax.block_until_ready(self.engine.score(weights, critic, self.reference, batch.rollout, batch.packing))

    def rewards(self, rounds: Rounds, batch: Responses, clock: Clock) -> Scored:
        """The batch with its rewards, once the reward functions have returned."""
        clock.phase("reward")
        return rounds.scored(batch)

    def advantages(self, objective: Objective, scored: Scored, old: OldPolicy, clock: Clock) -> Experience:
        """The objective's advantages for a scored batch, after reward shaping and filters."""
        clock.phase("update")
        columns = (self.shaping.rewards(scored), self.shaping.trainable_rows(scored), scored.step_rewards, scored.steps)
        fields: tuple[Any, ...] = hosts.shard_rows(self.engine.meshes.trainer, columns)
        made = self.engine.experience(objective, scored.rollout, old, Rewards(*fields))
        made = dataclasses.replace(made, packing=scored.packing)
        if objective.critic is None and not jnp.any(made.advantages):
            self.log.warn(
                "all advantages of a batch are 0, because the responses to each prompt have equal "
                "rewards; use easier or harder prompts, larger groups, or sampling.rounds > 1"
            )
        self.phases.poll()  # for the last time before the updates, all of which are made
        return made

    def update(
        self, objective: Objective, state: TrainState, experience: Experience, minibatch: int
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step on the objective's gradient over a mini-batch; the old state is donated.

        Raises:
          Diverged: `training.max_skipped` updates in a row were skipped.
        """
        state, metrics = self.engine.update(objective, state, self.frozen, experience, minibatch)
        metrics = jax.device_get(metrics)  # one update in flight, since simulated devices share their threads
        self.updating = True
        self.skipped = self.skipped + 1 if metrics["update/skipped"] else 0
        if self.skipped == self.config.training.max_skipped:
            loss, counts = jax.device_get(self.engine.blame(objective, state, self.frozen, experience, minibatch))
            bad = [name for name, count in named_leaves(counts).items() if count]
            what = f"the first leaf of the gradient that is not finite is {bad[0]}" if bad else f"the loss is {loss}"
            raise Diverged(
                f"{self.skipped} updates in a row were skipped ({what}); the run can go on from its newest checkpoint, "
                "with a lower learning rate or other data"
            )
        every = self.config.routing.noise_every
        if minibatch + 1 == self.minibatches:
            due = every and self._is_due(every, self.boundary.done + 1)
            self.noise = self._measure_noise(state, experience) if due else {}
        return state, metrics

    def _measure_noise(self, state: TrainState, experience: Experience) -> dict[str, float]:
        rollout, old, packing = experience.rollout, experience.old, experience.packing
        assert packing is not None
        ratios, _ = noise.measure(self.engine, self.weights(state), rollout, old, packing)
        return decomposition.metrics(ratios)

    def report(
        self, iteration: int, state: TrainState, metrics: list[Metrics], rounds: Rounds, scored: Scored, clock: Clock
    ) -> None:
        """Log an iteration and, when due, write samples, evaluate and save a checkpoint."""
        clock.stop()
        self.confirm_lease()
        slow = slowest(clock.seconds["iteration"])
        if slow is not None and not clock.compiled.programs:  # compilation takes every process another time
            self.log.warn(slow, about=slow.partition(":")[0])
        done, step, config = iteration + 1, int(state.updates), self.config
        last = done == config.iterations
        line = {"iteration": done, **log_lib.iteration_metrics(clock, rounds, self.engine.sampler), **self.packed}
        line |= self.noise
        if self.buffer is not None:
            line |= {"partial/calls": self.buffer.calls, "partial/left": len(self.buffer)}
        columns = log_lib.response_columns(
            scored,
            self.shaping,
            turns=bool(config.environment.name or config.sampling.prefix),
            older=self.buffer is not None,
        )
        self.log.updates(step, line, columns, metrics, group_size=self.group_size)
        self.log.guard_rounding(
            self.objective,
            metrics[0],
            stale=int(scored.stale_tokens.sum()),
            recomputed=config.training.old_logprobs == "recompute",
        )
        self.log.advance(scored, metrics, tokens_per_s=line["throughput/tokens_per_s"])
        if last or done % config.log.samples_every == 0:
            self.log.keep_samples(step, scored, self.tokenizer, count=config.log.samples)
        self.boundary = Boundary(
            done=done,
            state=state,
            prompts=self.prompts.get_state(),
            unfinished=None if self.buffer is None else self.buffer.episodes,
            evaluated=not any(self._is_due(every, done) for every in self._evaluations()),
        )
        self.updating = False
        self.evaluate_if_due()
        if last or done % config.checkpoint.every == 0:
            self.save()
        self.files.publish(every_s=PUBLISH_S)

    def evaluate_if_due(self) -> None:
        """Evaluate the policy on the held-out prompts and on benchmarks, where due after the newest iteration."""
        if self.boundary.evaluated:
            return
        state, sampler, accuracy = self.boundary.state, self.engine.sampler, None
        mesh, key = self.engine.meshes.trainer, keys.eval_key(self.key)
        step, weights = int(state.updates), self.weights(state)
        self.phases.enter("evaluate")
        self.phases.poll()
        sampler.load(weights)
        if self._is_due(self.config.eval.every, self.boundary.done):
            correct = data.correct_for(self.config)
            result = evaluate.evaluate(
                self.player, self.held_out, self.tokenizer, self.scorer, key, mesh, correct=correct
            )
            self.log.evaluated(step, self.boundary.done, result)
            accuracy = result.accuracy
        for label, (taken, batches) in self.benchmarks.items():
            if self._is_due(self.config.benchmarks[label].every, self.boundary.done):
                answering = benchmark.Answering(
                    self.player, self.tokenizer, weights, f"update {step}", self.inputs, mesh
                )
                with taken.make_scorer() as scorer:
                    scorer.interrupted = self.phases.noticed
                    place, tick = self.files.local / BENCHMARKS, self.phases.tick("benchmark")
                    facts = taken.measure(answering, batches, scorer, key, place, on_call=tick)
                self.log.measured(step, label, facts)
        sampler.release()
        self.boundary = dataclasses.replace(self.boundary, evaluated=True, accuracy=accuracy)

    def _evaluations(self) -> list[int]:
        """Iterations between two of each kind of evaluation."""
        return [self.config.eval.every, *(self.config.benchmarks[label].every for label in self.benchmarks)]

    def _is_due(self, every: int, done: int) -> bool:
        """Whether what happens every so many iterations, and at the end, does after `done` of them."""
        return done % every == 0 or done == self.config.iterations

    def save(self) -> None:
        """Start saving a checkpoint of the newest boundary in the background; the run's first is read back at once."""
        self.phases.enter("save")
        self.confirm_lease()
        self.log.sync()  # no checkpoint is newer than the metrics on the disk
        self.files.publish()  # … or in the bucket
        at = self.boundary
        run = {"iteration": at.done, "prompts": at.prompts, "config": self.config.to_dict(), "evaluated": at.evaluated}
        run |= {"key": jax.random.key_data(self.key).tolist(), "inputs": self.inputs, "measured_on": self.measured_on}
        run["versions"] = versions()
        if self.base is not None:
            run["base"] = self.base
        left = at.unfinished
        if left is not None:
            run["buffer"] = {"texts": left.texts.tolist(), "records": left.records.tolist()}
        arrays = None if left is None else left.to_arrays()
        is_first = self.checkpointer.latest is None
        self.checkpointer.save(at.done, at.state, run, arrays, accuracy=at.accuracy)
        if is_first:  # a place that cannot be read is noticed now, and not when the run is to go on
            self.checkpointer.confirm(at.state)
        self._note_saved()

    def stop(self) -> None:
        """Save the newest boundary, unless it is saved, and wait until the checkpoint is committed."""
        self.phases.take_notice()  # the signal of another process may have ended the scoring before it was known here
        self.phases.enter("save")
        self.checkpointer.wait()
        if self.checkpointer.latest != self.boundary.done:
            self.save()
            self.checkpointer.wait()
        self._note_saved()

    def _note_saved(self) -> None:
        """Note in the run folder that there is a committed checkpoint."""
        latest = self.checkpointer.latest
        if latest is not None:
            self.phases.saved = latest
            if processes.is_first():
                write_saved(self.files.local, latest)

    def finish(self) -> dict[str, dict[str, float]]:
        """Wait for the last checkpoint, and record the end; print and return the first and the last evaluation."""
        self.checkpointer.wait()
        self._note_saved()
        self.phases.record_finish()
        return self.log.summary(f"{self.objective.name}, {self.config.iterations} iterations")


def _make_shaping(config: ConfigDict) -> Shaping:
    return Shaping(
        group_size=config.sampling.group_size,
        limit=config.sampling.max_response_length,
        penalty=config.overlong.penalty,
        cache=config.overlong.cache,
        drop_truncated=config.overlong.filter,
    )


@contextmanager
def open_run(config: ConfigDict, place: str | Path, *, start_over: bool = False) -> Iterator[tuple[Run, TrainState]]:
    """Open the run in `place`, a folder or a bucket, at its newest checkpoint or, without one, at its beginning.

    Errors in config, data, rewards and model folder are raised before anything is compiled, and so is one if another
    run uses the folder or has left it. A cold start, if the config has one, is trained first. With `start_over`, a run
    whose checkpoints are gone or damaged begins again. `StopRequested` passes through, after the state has been saved.
    """
    check_place(place)
    model = check(config, count_devices=jax.device_count)
    policy.check_weights(config)
    with ExitStack() as stack:
        confirm_lease = stack.enter_context(lease.hold(place))
        files = stack.enter_context(open_folder(place))
        phases = stack.enter_context(open_phases(config, files))
        phases.saved = next(iter(steps(files.checkpoints)), None)
        if phases.saved is not None and not start_over:
            resume.check_folder(config, files)
        folder = policy.initial_folder(config, files.local)
        tokenizer = None
        if phases.saved is None and not config.model.folder:
            coldstart.check_reuse(config, folder, may_change=MAY_CHANGE)
        if config.model.folder or folder.exists():
            model, tokenizer = policy.read_folder(config, folder)
        records = {split: data.load_records(config, split) for split in ("train", "test")}
        shown = coldstart.load(config) if config.coldstart.conversations and tokenizer is None else records["train"]
        taken = benchmark.of_run(config)
        scorer = stack.enter_context(data.make_scorer(config))
        replies = stack.enter_context(sampling.make_replies(config))
        meshes = make_meshes(config, model)
        stack.enter_context(jax.set_mesh(meshes.trainer))
        if tokenizer is None:
            coldstart.coldstart(config, shown, meshes.trainer, folder, on_step=phases.tick("cold start"))
            phases.enter("start")
            files.share()
            model, tokenizer = policy.read_folder(config, folder)
        made = engine.build(config, model, meshes, sampling.stop_rule_of(config, tokenizer))
        made.sampler.poll, scorer.interrupted = phases.poll, phases.noticed
        if replies is not None:
            replies.interrupted = phases.noticed
        prompts = data.training_prompts(config, tokenizer, records["train"])
        held_out = data.held_out_prompts(config, tokenizer, records["test"])
        benchmarks = {label: (each, each.prompts(tokenizer)) for label, each in taken.items()}
        measured_on = {"the evaluation on held-out records": held_out.content | {"eval.correct": config.eval.correct}}
        measured_on |= {f"the benchmark {label}": batches.content for label, (_, batches) in benchmarks.items()}
        start = resume.start(
            config, made, files, prompts, measured_on=measured_on, folder=folder, start_over=start_over
        )
        checkpointer = Checkpointer(
            files.checkpoints, keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
        )
        stack.callback(checkpointer.close)
        phases.saved = checkpointer.latest
        log = stack.enter_context(log_lib.open_log(config, files.local, after_step=start.step, done=start.iteration))
        phases.show = log.progress.phase
        resumed = start.step is not None
        where = {"done": start.iteration, "total": config.iterations, "resumed": resumed}
        for text in log_lib.opening_lines(files.name, **where, extensible=not learning.falling(config)):
            log.progress.say(text)
        log.guard_config(made.objective, group_size=config.sampling.group_size)
        for text in start.changed:
            log.warn(text)
        player = sampling.make_player(config, tokenizer, made.sampler, replies)
        run = Run(
            config=config,
            engine=made,
            tokenizer=tokenizer,
            frozen=start.frozen,
            base=start.base,
            reference=start.reference,
            inputs=start.inputs,
            boundary=Boundary.of(start, prompts),
            key=start.key,
            prompts=prompts,
            measured_on=measured_on,
            held_out=held_out,
            benchmarks=benchmarks,
            player=player,
            buffer=sampling.make_buffer(config, player, start.unfinished),
            scorer=scorer,
            step_scorer=data.make_step_scorer(config),
            shaping=_make_shaping(config),
            files=files,
            checkpointer=checkpointer,
            log=log,
            phases=phases,
            confirm_lease=confirm_lease,
        )
        phases.settled = lambda: run.settled
        try:
            yield run, start.state
        except StopRequested:
            run.stop()
            raise
