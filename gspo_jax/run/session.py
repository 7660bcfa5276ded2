"""An open run: builds the parts that train.py needs, or resumes them, and logs, evaluates and saves."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax import coldstart, engine, evaluate
from gspo_jax.data.pipeline import Batches, EvalBatches, PromptBatch
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.engine import Engine
from gspo_jax.objectives import Objective
from gspo_jax.parallel import hosts
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer
from gspo_jax.rollout.episodes import Buffer, Player
from gspo_jax.run import log as log_lib
from gspo_jax.run import resume
from gspo_jax.run.clock import Clock
from gspo_jax.run.log import RunLog
from gspo_jax.run.rounds import Rounds
from gspo_jax.run.scored import Scored, score_episodes
from gspo_jax.run.shaping import Shaping
from gspo_jax.setup import data, keys, policy, sampling
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.storage import PUBLISH_S, RunFolder, open_folder
from gspo_jax.training.checkpoint import Checkpointer
from gspo_jax.training.experience import Rewards
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.state import TrainState
from gspo_jax.types import EpisodeBatch, Experience, OldPolicy, Prompts, Weights


@dataclasses.dataclass
class Run:
    """An open run: the methods train.py calls, and the parts they use."""

    config: ConfigDict
    engine: Engine
    tokenizer: Tokenizer
    frozen: nnx.State
    """Weights that no update changes; empty in full training."""
    reference: Weights | None
    """Weights of the reference policy; None without a KL to it."""
    iteration: int
    """Iterations done by earlier starts."""
    key: jax.Array
    """PRNG key of the run."""
    prompts: Batches[PromptBatch]
    """Endless training prompts, whose position is part of a checkpoint."""
    held_out: EvalBatches
    """Held-out prompts of the evaluations."""
    player: Player
    buffer: Buffer | None
    """Buffer of partial rollouts; None without them."""
    scorer: Scorer
    step_scorer: StepScorer | None
    shaping: Shaping
    files: RunFolder
    checkpointer: Checkpointer
    log: RunLog

    @property
    def objective(self) -> Objective:
        """The objective that the run optimises."""
        return self.engine.objective

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
        return Clock(self.log.progress)

    def rounds(self) -> Rounds:
        """An empty collection of one iteration's sampling rounds."""
        groups, limit = self.config.data.prompts_per_batch, self.config.sampling.rounds
        return Rounds(groups=groups, group_size=self.group_size, limit=limit)

    def weights(self, state: TrainState) -> Weights:
        """The policy's weights in this state."""
        return Weights(state.params, self.frozen)

    def sync_weights(self, state: TrainState, clock: Clock) -> None:
        """Load this state's weights into the sampler; they are the behaviour policy until the next sync."""
        clock.phase("reshard")
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

    def rewards(self, episodes: EpisodeBatch, clock: Clock) -> Scored:
        """Reward a batch of episodes."""
        clock.phase("reward")
        if self.config.environment.name and episodes.turns.max() == 1:
            self.log.warn(
                f"{self.config.environment.name} replied to no response of a whole batch; make turns end where it "
                "listens (sampling.stop_ids), with environment.turns above 1"
            )
        return score_episodes(episodes, self.tokenizer, self.scorer, self.step_scorer, self.engine.meshes.trainer)

    def batch(self, rounds: Rounds) -> Scored:
        """The batch to learn from; the sampler's weights are released to make room for the updates."""
        self.engine.sampler.release()
        return rounds.batch(self.engine.meshes.trainer)

    def score(self, state: TrainState, scored: Scored, clock: Clock) -> OldPolicy:
        """Log-probs, values and routes that stay fixed during the iteration's updates."""
        clock.phase("score")
        critic = None if state.critic is None else state.critic.params
        return jax.block_until_ready(self.engine.score(self.weights(state), critic, self.reference, scored.rollout))

    def advantages(self, objective: Objective, scored: Scored, old: OldPolicy, clock: Clock) -> Experience:
        """The objective's advantages for a scored batch, after reward shaping and filters."""
        clock.phase("update")
        columns = (self.shaping.rewards(scored), self.shaping.trainable_rows(scored), scored.step_rewards, scored.steps)
        fields: tuple[Any, ...] = hosts.shard_rows(self.engine.meshes.trainer, columns)
        made = self.engine.experience(objective, scored.rollout, old, Rewards(*fields))
        if objective.critic is None and not jnp.any(made.advantages):
            self.log.warn(
                "all advantages of a batch are 0, because the responses to each prompt have equal "
                "rewards; use easier or harder prompts, larger groups, or sampling.rounds > 1"
            )
        return made

    def update(
        self, objective: Objective, state: TrainState, experience: Experience, minibatch: int
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step on the objective's gradient over a mini-batch; the old state is donated."""
        state, metrics = self.engine.update(objective, state, self.frozen, experience, minibatch)
        return state, jax.device_get(metrics)  # one update in flight, since simulated devices share their threads

    def report(
        self, iteration: int, state: TrainState, metrics: list[Metrics], rounds: Rounds, scored: Scored, clock: Clock
    ) -> None:
        """Log an iteration and, when due, write samples, evaluate and save a checkpoint."""
        clock.stop()
        done, step, config = iteration + 1, int(state.updates), self.config
        last = done == config.iterations
        line = {"iteration": done, **log_lib.iteration_metrics(clock, rounds, self.engine.sampler)}
        if self.buffer is not None:
            line |= {"partial/calls": self.buffer.calls, "partial/left": len(self.buffer)}
        columns = log_lib.response_columns(
            scored,
            self.shaping,
            turns=bool(config.environment.name or config.sampling.prefix),
            older=self.buffer is not None,
        )
        self.log.updates(step, line, columns, metrics, group_size=self.group_size)
        self.log.advance(scored, metrics, tokens_per_s=line["throughput/tokens_per_s"])
        if last or done % config.log.samples_every == 0:
            self.log.keep_samples(step, scored, self.tokenizer, count=config.log.samples)
        if last or done % config.eval.every == 0:
            self.evaluate(state)
        if last or done % config.checkpoint.every == 0:
            self.save(done, state)
        self.files.publish(every_s=PUBLISH_S)

    def evaluate(self, state: TrainState) -> None:
        """Evaluate this state's policy on the held-out prompts."""
        self.log.progress.phase("evaluate")
        sampler = self.engine.sampler
        sampler.load(self.weights(state))
        result = evaluate.evaluate(
            self.player,
            self.held_out,
            self.tokenizer,
            self.scorer,
            keys.eval_key(self.key),
            self.engine.meshes.trainer,
            correct=self.config.eval.correct,
        )
        sampler.release()
        self.log.evaluated(int(state.updates), result)

    def save(self, done: int, state: TrainState) -> None:
        """Start saving a checkpoint in the background, after `done` iterations."""
        self.log.progress.phase("save")
        self.files.publish()  # metrics reach a bucket before the checkpoint of their step
        run = {"iteration": done, "prompts": self.prompts.get_state(), "config": self.config.to_dict()}
        run["key"] = jax.random.key_data(self.key).tolist()
        left = None if self.buffer is None else self.buffer.episodes
        if left is not None:
            run["buffer"] = {"texts": left.texts.tolist(), "records": left.records.tolist()}
        self.checkpointer.save(done, state, run, None if left is None else left.to_arrays())

    def summary(self) -> dict[str, dict[str, float]]:
        """Print and return the first and the last evaluation."""
        return self.log.summary(f"{self.objective.name}, {self.config.iterations} iterations")


@contextmanager
def open_run(config: ConfigDict, place: str | Path) -> Iterator[tuple[Run, TrainState]]:
    """Open the run in `place`, a folder or a bucket, at its newest checkpoint or, without one, at its beginning.

    Errors in config, data, rewards and model folder are raised before any device is touched. A cold start, if the
    config has one, is trained first.
    """
    model = check(config)
    policy.check_weights(config)
    with ExitStack() as stack:
        files = stack.enter_context(open_folder(place))
        folder = policy.initial_folder(config, files.local)
        tokenizer = None
        if config.model.folder or folder.exists():
            model, tokenizer = policy.read_folder(config, folder)
        records = {split: data.load_records(config, split) for split in ("train", "test")}
        scorer = stack.enter_context(data.make_scorer(config))
        meshes = make_meshes(config, model)
        stack.enter_context(jax.set_mesh(meshes.trainer))
        if tokenizer is None:
            coldstart.coldstart(config, records["train"], meshes.trainer, folder)
            files.share()
            model, tokenizer = policy.read_folder(config, folder)
        made = engine.build(config, model, meshes, sampling.stop_rule_of(config, tokenizer))
        prompts = data.training_prompts(config, tokenizer, records["train"])
        checkpointer = Checkpointer(files.checkpoints, keep=config.checkpoint.keep)
        stack.callback(checkpointer.close)
        start = resume.start(config, made, checkpointer, prompts, folder=folder, place=place)
        log = stack.enter_context(log_lib.open_log(config, files.local, after_step=start.step, done=start.iteration))
        if start.step is not None:
            log.progress.say(f"resuming from iteration {start.iteration} in {place}")
        log.guard_config(made.objective, group_size=config.sampling.group_size)
        player = sampling.make_player(config, tokenizer, made.sampler)
        run = Run(
            config=config,
            engine=made,
            tokenizer=tokenizer,
            frozen=start.frozen,
            reference=policy.reference_weights(config, folder, made.policy, meshes.trainer),
            iteration=start.iteration,
            key=start.key,
            prompts=prompts,
            held_out=data.held_out_prompts(config, tokenizer, records["test"]),
            player=player,
            buffer=sampling.make_buffer(config, player, start.unfinished),
            scorer=scorer,
            step_scorer=data.make_step_scorer(config),
            shaping=Shaping(
                group_size=config.sampling.group_size,
                limit=config.sampling.max_response_length,
                penalty=config.overlong.penalty,
                cache=config.overlong.cache,
                drop_truncated=config.overlong.filter,
            ),
            files=files,
            checkpointer=checkpointer,
            log=log,
        )
        yield run, start.state
