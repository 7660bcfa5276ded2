"""An open run: logging, evaluation, checkpoints and stops around iterations."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from gspo_jax.data.pipeline import Batches
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.engine import Engine
from gspo_jax.errors import Diverged
from gspo_jax.folder.notes import SAVED_FILE, note
from gspo_jax.folder.storage import PUBLISH_S, RunFolder
from gspo_jax.measuring import bias, noise
from gspo_jax.parallel import processes
from gspo_jax.profiling.phases import PhaseTraces
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rollout.episodes import Buffer, Episodes, Player
from gspo_jax.rollout.rounds import Rounds
from gspo_jax.routing import decomposition
from gspo_jax.run import log as log_lib
from gspo_jax.run.clock import Clock
from gspo_jax.run.evaluations import Evaluations
from gspo_jax.run.log import RunLog
from gspo_jax.run.phases import Phases
from gspo_jax.run.stragglers import slowest
from gspo_jax.setup import keys, learning, players
from gspo_jax.training.checkpoint import Checkpointer, named_leaves
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.shaping import Filter
from gspo_jax.training.state import TrainState
from gspo_jax.types import Batch, Prompts
from gspo_jax.versions import versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """End of the newest iteration. Can be saved until the next update."""

    done: int
    state: TrainState
    """In the trainer's layout. Donated to the next update."""
    prompts: str
    """Position of the training prompts."""
    unfinished: Episodes | None
    evaluated: bool
    """False if evaluations are due."""
    quality: dict[str, float] | None = None
    """Accuracy or mean reward on held-out prompts, by name; None if not evaluated."""


class Watch(Clock):
    """Observer of one iteration: times and traces it, allows a stop before its first update, ends a diverged run."""

    def __init__(self, run: "Run"):
        super().__init__(run.phases)
        self._run = run
        self.bias: dict[str, float] = {}
        """Metrics of the bias meter, if due."""
        if run.traces is not None:
            run.traces.begin(run.boundary.done + 1)

    def enter(self, phase: str) -> None:
        """Begin a phase, and its trace if it is to be traced."""
        self._end_trace()
        super().enter(phase)
        if self._run.traces is not None:
            self._run.traces.start(phase)

    def stop(self) -> None:
        """End the running phase and the iteration."""
        self._end_trace()
        super().stop()

    def _end_trace(self) -> None:
        traces = self._run.traces
        if traces is None or not traces.running:
            return
        super().enter("profile")
        try:
            traces.stop()
        except OSError as error:
            self._run.log.warn(f"a trace is lost: {error}", about="trace")

    def collected(self, state: TrainState, batch: Batch) -> None:
        """Measure the bias of the sampled tokens, if due."""
        run = self._run
        if run.due(run.config.mismatch.bias_every, run.boundary.done + 1):
            self.enter("measure")
            self.bias = bias.metrics(bias.of_sampled(run.engine, run.engine.weights(state), batch))
            self.enter("update")

    def updated(self, state: TrainState, batch: Batch, minibatch: int, measured: Metrics) -> None:
        """Count consecutive skipped updates.

        Raises:
          Diverged: `training.max_skipped` in a row.
        """
        run = self._run
        run.updating = True
        run.skipped = run.skipped + 1 if measured["update/skipped"] else 0
        if run.skipped == run.config.training.max_skipped:
            loss, counts = run.engine.blame(state, batch, minibatch)
            bad = [name for name, count in named_leaves(counts).items() if count]
            what = f"the first leaf of the gradient that is not finite is {bad[0]}" if bad else f"the loss is {loss}"
            raise Diverged(
                f"{run.skipped} updates in a row were skipped ({what}); go on from the newest checkpoint with a lower "
                "learning rate, the same command with "
                f"--config.optimizer.learning_rate={run.config.optimizer.learning_rate / 2:.6g}, or begin another run "
                f"from it with other data (--from={run.files.name})"
            )


@dataclasses.dataclass
class Run:
    """An open run, for train.py."""

    config: ConfigDict
    engine: Engine
    tokenizer: Tokenizer
    base: str | None
    """Digest of the frozen weights."""
    inputs: Mapping[str, str]
    """Digests of the run's inputs, by name in messages."""
    origin: Mapping[str, Any] | None
    """What was taken from another run's checkpoint. None if nothing was."""
    changes: Sequence[Mapping[str, Any]]
    """Fields changed on resuming."""
    boundary: Boundary
    """A stop saves it, and the unfinished iteration is sampled again."""
    key: jax.Array
    prompts: Batches[Prompts]
    evaluations: Evaluations
    player: Player | Buffer
    """A buffer if rollouts are partial."""
    scorer: BatchScorer
    files: RunFolder
    checkpointer: Checkpointer
    log: RunLog
    phases: Phases
    confirm_lease: Callable[[], None]
    """Ends the process if another run took over the folder."""
    traces: PhaseTraces | None = None
    """Traces of phases, if any are wanted."""
    skipped: int = 0
    """Consecutive skipped updates."""
    updating: bool = False
    """True if this iteration has made an update. It then makes all of them."""

    @property
    def settled(self) -> bool:
        """True if a stop has nothing to save."""
        return not self.updating and self.boundary.done == (self.checkpointer.latest or 0)

    @property
    def buffer(self) -> Buffer | None:
        """Buffer of partial rollouts, if any."""
        return self.player if isinstance(self.player, Buffer) else None

    def watch(self) -> Watch:
        """Return the next iteration's observer."""
        return Watch(self)

    def plays(self, watch: Watch) -> Player | Buffer | Rounds:
        """Return the next iteration's player."""
        config, engine = self.config, self.engine
        if config.sampling.rounds == 1:
            return self.player
        kept = Filter(objective=engine.objective, shaping=engine.shaping, reward=config.sampling.filter)
        return Rounds(
            self.player,
            self.scorer.score,
            kept.keeps,
            groups=config.data.prompts_per_batch,
            group_size=config.sampling.group_size,
            limit=config.sampling.rounds,
            mesh=engine.sampler.mesh,
            enter=watch.enter,
        )

    def sample_key(self, iteration: int) -> jax.Array:
        """Return the key of an iteration's sampling noise."""
        return keys.sample_key(self.key, iteration)

    def report(
        self,
        iteration: int,
        state: TrainState,
        batch: Batch,
        metrics: list[Metrics],
        player: Player | Buffer | Rounds,
        watch: Watch,
    ) -> None:
        """Log an iteration and, when due, write samples."""
        watch.stop()
        self.confirm_lease()
        slow = slowest(watch.seconds["iteration"])
        if slow is not None and not watch.compiled.programs:  # compilation times vary across processes
            self.log.warn(slow, about=slow.partition(":")[0])
        done, step, config = iteration + 1, int(state.updates), self.config
        last, buffer = done == config.iterations, self.buffer
        rounds = player if isinstance(player, Rounds) else None
        line = {"iteration": done, **log_lib.iteration_metrics(watch, self.engine, batch, rounds)}
        line |= self.phases.outside() | self.scorer.metrics() | watch.bias | self._noise(state, batch, done)
        if buffer is not None:
            line |= {"partial/calls": buffer.calls, "partial/left": len(buffer)}
        columns = log_lib.response_columns(
            batch,
            self.engine.shaping,
            turns=bool(config.environment.name or config.sampling.prefix),
            older=buffer is not None,
        )
        self.log.updates(step, line, columns, metrics, group_size=config.sampling.group_size)
        self._guard(batch, metrics)
        self.log.advance(batch, metrics, tokens_per_s=line["throughput/tokens_per_s"])
        for text in () if self.traces is None else self.traces.conclude():
            self.log.progress.say(text)
        if last or done % config.log.samples_every == 0:
            self.log.keep_samples(step, batch, self.tokenizer, count=config.log.samples)
        self.boundary = Boundary(
            done=done,
            state=state,
            prompts=self.prompts.get_state(),
            unfinished=None if buffer is None else buffer.episodes,
            evaluated=not self.evaluations.due(done),
        )
        self.updating = False

    def conclude(self) -> None:
        """Evaluate and save a checkpoint, when due after the newest iteration."""
        self.evaluate_if_due()
        done = self.boundary.done
        if done == self.config.iterations or done % self.config.checkpoint.every == 0:
            self.save()
        self.files.publish(every_s=PUBLISH_S)

    def due(self, every: int, done: int) -> bool:
        """Return True if something is measured every so many iterations, 0: never, in iteration `done`, or the last."""
        return bool(every) and (done % every == 0 or done == self.config.iterations)

    def _noise(self, state: TrainState, batch: Batch, done: int) -> dict[str, float]:
        if not self.due(self.config.routing.noise_every, done):
            return {}
        ratios, native, replayed = noise.measure(self.engine, self.engine.weights(state), batch)
        return decomposition.metrics(ratios) | noise.flip_metrics(batch, native, replayed)

    def _guard(self, batch: Batch, metrics: list[Metrics]) -> None:
        config, objective = self.config, self.engine.objective
        if config.environment.name and batch.turns.max() == 1:
            self.log.warn(
                f"{config.environment.name} replied to no response of a whole batch; make turns end where it "
                "listens (sampling.stop_ids), with environment.turns above 1"
            )
        paid = self.engine.teacher is None or any(config.rewards.values())
        if objective.critic is None and paid and not jnp.any(batch.advantages):
            self.log.warn(
                "all advantages of a batch are 0, because the responses to each prompt have equal "
                "rewards; use easier or harder prompts, larger groups, or sampling.rounds > 1"
            )
        if config.sampling.keep_top and players.truncation(config, self.engine.policy.config.vocab_size).truncates:
            self.log.guard_kept(self.engine.sampler.stats.kept_share)
        recomputed = learning.recomputes(config)
        self.log.guard_rounding(objective, metrics[0], stale=int(batch.stale_tokens.sum()), recomputed=recomputed)

    def evaluate_if_due(self) -> None:
        """Run the evaluations due after the newest iteration."""
        at = self.boundary
        if at.evaluated:
            return
        weights, step, key = self.engine.weights(at.state), int(at.state.updates), keys.eval_key(self.key)
        where = {"files": self.files, "log": self.log, "phases": self.phases}
        quality = self.evaluations.measure(weights, step=step, done=at.done, key=key, **where)
        self.boundary = dataclasses.replace(at, evaluated=True, quality=quality)

    def save(self) -> None:
        """Save the newest boundary in the background. The run's first checkpoint is read back at once."""
        self.phases.enter("save")
        self.confirm_lease()
        self.log.sync()  # no checkpoint is newer than the metrics on the disk
        self.files.publish()  # … or in the bucket
        at = self.boundary
        run = {"iteration": at.done, "prompts": at.prompts, "config": self.config.to_dict(), "evaluated": at.evaluated}
        run |= {"key": jax.random.key_data(self.key).tolist(), "inputs": self.inputs}
        run |= {"measured_on": self.evaluations.content, "versions": versions(), "changes": list(self.changes)}
        if self.origin is not None:
            run["origin"] = self.origin
        if self.base is not None:
            run["base"] = self.base
        left = at.unfinished
        if left is not None:
            run["buffer"] = {"texts": left.texts.tolist(), "records": left.records.tolist()}
        arrays = {} if left is None else left.to_arrays()
        if self.player.history is not None:
            arrays |= self.player.history.to_arrays()
        is_first = self.checkpointer.latest is None
        self.checkpointer.save(at.done, at.state, run, arrays, quality=at.quality)
        if is_first:  # detect an unreadable place now, not on resuming
            self.checkpointer.confirm(at.state)
        self._note_saved()

    def stop(self) -> None:
        """Keep the newest boundary after a signal."""
        self.phases.take_notice()  # another process's signal may have ended scoring unnoticed
        self.keep()

    def keep(self) -> None:
        """Save the newest boundary if needed, and wait until it is committed."""
        self.phases.enter("save")
        self.checkpointer.wait()
        if self.checkpointer.latest != self.boundary.done:
            self.save()
            self.checkpointer.wait()
        self._note_saved()

    def _note_saved(self) -> None:
        latest = self.checkpointer.latest
        if latest is not None:
            self.phases.saved = latest
            if processes.is_first():
                note(self.files.local, SAVED_FILE, step=latest)

    def finish(self) -> dict[str, dict[str, float]]:
        """Wait for the last checkpoint and record the end. Print and return the first and last evaluation."""
        self.checkpointer.wait()
        self._note_saved()
        self.phases.record_finish()
        return self.log.summary(f"{self.engine.objective.name}, {self.config.iterations} iterations")
