"""Fields that a cold start and benchmark answers depend on: all but those listed here."""

from typing import Any

from ml_collections import ConfigDict

from gspo_jax.setup.fields import at, names

_OF_NEITHER = {
    "iterations": "how long the run trains",
    "processes.": "what is waited for",
    "step_rewards.": "of training",
    "overlong.": "of training: no score of its own",
    "objective.": "of training",
    "reference.": "of training",
    "teacher.": "of training",
    "critic.": "of training",
    "mismatch.": "of training",
    "optimizer.": "of training; the cold start has coldstart.optimizer",
    "benchmarks.": "what the run takes, and when; problems and samples have their own places in the protocol",
    "log.": "what is shown",
    "checkpoint.": "what is saved",
}

NOT_OF_ANSWERS = _OF_NEITHER | {
    "model.folder": "weights and files count by content, wherever they are",
    "model.published": "a check of the model",
    "model.random": "weights count by content",
    "model.remat": "of the backward pass",
    "adapter.folder": "weights count by content, wherever they are",
    "coldstart.": "made the weights, which count by content",
    "data.data_dir": "of the run's own data",
    "data.options.": "of the run's own data",
    "sampling.partial.": "of training batches",
    "sampling.rounds": "of training batches",
    "sampling.filter": "of training batches",
    "judge.url": "a model counts by its name, wherever it is served",
    "judge.key": "of the server",
    "reward_model.url": "a model counts by its name, wherever it is served",
    "reward_model.key": "of the server",
    "scoring.workers": "how many responses are scored at a time",
    "scoring.concurrency": "how many responses are scored at a time",
    "scoring.tokens_in_flight": "how many responses are scored at a time",
    "scoring.deadline_s": "for failures, which are no scores",
    "scoring.tries": "for failures, which are no scores",
    "scoring.most_failed": "for failures, which are no scores",
    "scoring.environment": "keys",
    "routing.balance_weight": "of training",
    "routing.z_weight": "of training",
    "routing.bias_rate": "of training",
    "routing.noise_every": "of training",
    "training.minibatches": "of training",
    "training.row_tokens": "of training",
    "training.max_skipped": "of training",
    "training.entropy_weight": "of training",
    "training.logprob_chunk": "of training",
    "eval.every": "when the run evaluates",
}
"""Prefixes of fields without effect on answers and scores, and why.

Mesh and batch sizes are not among them: rounding may change a sampled token.
"""

NOT_OF_COLD_START = _OF_NEITHER | {
    "model.random": "made without a cold start",
    "adapter.": "of the run, which adds them",
    "data.prompts_per_batch": "of the run; the cold start has coldstart.batch",
    "sampling.": "of the run, but for the longest response",
    "environment.": "of the run, but for the tools in the prompts",
    "rewards.": "of the run",
    "scoring.": "of the run",
    "judge.": "of the run",
    "reward_model.": "of the run",
    "routing.": "of the run",
    "training.": "of the run, but for the rows that are computed at a time",
    "eval.": "of the run",
}
"""Prefixes of fields without effect on a cold start, and why."""
OF_COLD_START = (
    "environment.name",
    "sampling.max_response_length",
    "training.row_tokens",
    "training.logprob_chunk",
)
"""Exceptions: the environment's tools are in the prompts; the others matter, if only by rounding."""


def of_answers(config: ConfigDict) -> dict[str, Any]:
    """Return the fields that benchmark answers and scores depend on."""
    return _but(config, NOT_OF_ANSWERS)


def of_cold_start(config: ConfigDict) -> dict[str, Any]:
    """Return the fields that a cold start depends on."""
    return _but(config, NOT_OF_COLD_START) | {name: at(config, name) for name in OF_COLD_START}


def _but(config: ConfigDict, unused: dict[str, str]) -> dict[str, Any]:
    return {name: at(config, name) for name in names(config) if not name.startswith(tuple(unused))}
