"""A run's evaluations: held-out prompts and published benchmarks."""

import dataclasses
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from gspo_jax.data.pipeline import EvalBatches
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.engine import Engine
from gspo_jax.folder.storage import BENCHMARKS, RunFolder
from gspo_jax.measuring import held_out
from gspo_jax.measuring.published import Answering, Benchmark
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.run.log import RunLog
from gspo_jax.run.phases import Phases
from gspo_jax.setup import data
from gspo_jax.types import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Evaluates a run's policies when due."""

    config: ConfigDict
    engine: Engine
    player: Player
    tokenizer: Tokenizer
    scorer: Scorer
    """Reward functions for the held-out prompts."""
    steps: StepScorer | None
    """Step-reward functions for them, which are logged."""
    prompts: EvalBatches
    benchmarks: Mapping[str, tuple[Benchmark, EvalBatches]]
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the run's inputs, by name in messages."""

    @property
    def content(self) -> dict[str, Mapping[str, str]]:
        """Digests of each evaluation's records, by evaluation and field."""
        own: Mapping[str, str] = self.prompts.content | {"eval.correct": self.config.eval.correct}
        each: dict[str, Mapping[str, str]] = {
            f"the benchmark {label}": batches.content for label, (_, batches) in self.benchmarks.items()
        }
        return {"the evaluation on held-out records": own} | each

    def due(self, done: int) -> bool:
        """Return True if any evaluation is due after `done` iterations."""
        every = (self.config.benchmarks[label].every for label in self.benchmarks)
        return self._judges(done) or any(self._is_due(each, done) for each in every)

    def _judges(self, done: int) -> bool:
        """Return True if held-out prompts are due, and there are rewards for responses to them."""
        return bool(self.config.rewards) and self._is_due(self.config.eval.every, done)

    def _is_due(self, every: int, done: int) -> bool:
        return done % every == 0 or done == self.config.iterations

    def measure(
        self, weights: Weights, *, step: int, done: int, key: jax.Array, files: RunFolder, log: RunLog, phases: Phases
    ) -> dict[str, float] | None:
        """Run the evaluations due after `done` iterations. Return the held-out `Evaluation.quality` if measured."""
        phases.enter("evaluate")
        phases.poll()
        quality, mesh = None, self.engine.meshes.trainer
        self.engine.sampler.load(weights)
        if self._judges(done):
            scorer = BatchScorer(self.scorer, self.tokenizer.decode, mesh, steps=self.steps)
            result = held_out.evaluate(
                self.player,
                self.prompts,
                scorer,
                key,
                correct=data.correct_for(self.config),
                tokenizer=self.tokenizer,
            )
            log.evaluated(step, done, result)
            quality = result.quality
        answering = Answering(self.player, self.tokenizer, weights, f"update {step}", self.inputs, mesh)
        for label, (taken, batches) in self.benchmarks.items():
            if self._is_due(self.config.benchmarks[label].every, done):
                with taken.make_scorer() as functions:
                    functions.interrupted = phases.noticed
                    scorer, tick = BatchScorer(functions, self.tokenizer.decode, mesh), phases.tick("benchmark")
                    facts = taken.measure(answering, batches, scorer, key, files.local / BENCHMARKS, on_call=tick)
                log.measured(step, label, facts)
        self.engine.sampler.release()
        return quality
