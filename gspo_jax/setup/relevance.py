"""Which fields of a config a cold start, and the answers to a benchmark, depend on: all that are not listed here.

A field that is new therefore counts until someone says why it does not.
"""

from typing import Any

from ml_collections import ConfigDict

from gspo_jax.setup.fields import at, names

NOT_OF_ANSWERS = {
    "iterations": "how long the run trains",
    "processes.": "what is waited for",
    "model.folder": "weights and files count by content, wherever they are",
    "model.published": "a check of the model",
    "model.remat": "of the backward pass",
    "adapter.folder": "weights count by content, wherever they are",
    "coldstart.": "made the weights, which count by content",
    "data.data_dir": "of the run's own data",
    "data.options.": "of the run's own data",
    "sampling.partial.": "of training batches",
    "sampling.rounds": "of training batches",
    "sampling.filter": "of training batches",
    "step_rewards.": "a benchmark has none",
    "scoring.workers": "how many responses are scored at a time",
    "overlong.": "of training: no score of its own",
    "objective.": "of training",
    "routing.balance_weight": "of training",
    "routing.z_weight": "of training",
    "routing.noise_every": "of training",
    "reference.": "of training",
    "critic.": "of training",
    "mismatch.": "of training",
    "training.minibatches": "of training",
    "training.row_tokens": "of training",
    "training.max_skipped": "of training",
    "training.entropy_weight": "of training",
    "training.logprob_chunk": "of training",
    "optimizer.": "of training",
    "eval.every": "when the run evaluates",
    "benchmarks.": "what the run takes, and when; problems and samples have their own places in the protocol",
    "log.": "what is shown",
    "checkpoint.": "what is saved",
}
"""Fields, by prefix, that neither answers nor their scores depend on, and why.

Fields that change numbers by rounding alone, such as a mesh or the size of a batch, are not among them: a sampled token
may be another one.
"""

NOT_OF_COLD_START = {
    "iterations": "of the run",
    "processes.": "what is waited for",
    "adapter.": "of the run, which adds them",
    "data.prompts_per_batch": "of the run; the cold start has coldstart.batch",
    "sampling.": "of the run, but for the longest response",
    "environment.": "of the run",
    "rewards.": "of the run",
    "step_rewards.": "of the run",
    "scoring.": "of the run",
    "overlong.": "of the run",
    "objective.": "of the run",
    "routing.": "of the run",
    "reference.": "of the run",
    "critic.": "of the run",
    "mismatch.": "of the run",
    "training.": "of the run, but for the rows that are computed at a time",
    "optimizer.": "of the run; the cold start has coldstart.optimizer",
    "eval.": "of the run",
    "benchmarks.": "of the run",
    "log.": "what is shown",
    "checkpoint.": "of the run",
}
"""Config fields, by prefix, that a cold start does not depend on, and why."""
OF_COLD_START = (
    "sampling.max_response_length",
    "training.row_tokens",
    "training.logprob_chunk",
)
"""Fields that it does depend on all the same, be it in rounding only."""


def of_answers(config: ConfigDict) -> dict[str, Any]:
    """The fields that the answers to a benchmark, and their scores, depend on, by name."""
    return _but(config, NOT_OF_ANSWERS)


def of_cold_start(config: ConfigDict) -> dict[str, Any]:
    """The fields that a cold start depends on, by name."""
    return _but(config, NOT_OF_COLD_START) | {name: at(config, name) for name in OF_COLD_START}


def _but(config: ConfigDict, unused: dict[str, str]) -> dict[str, Any]:
    return {name: at(config, name) for name in names(config) if not name.startswith(tuple(unused))}
