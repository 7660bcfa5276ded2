"""A deep mixture of small experts on long answers, in which routes drift as they do in large models.

    python -m gspo_jax.coldstart --config=configs/drift.py --workdir=runs/drift
    python -m gspo_jax.train --config=configs/drift.py --workdir=runs/drift

A register machine (`machine`, data/generated.py) is run step by step: answers have as many steps as the program, and
one wrong step spoils the rest, so that a cold start of minutes is right about half of the time. All on one device.
Arguments, joined by commas, change the model and the run:

- `12`, `48`: layers; 24 without.
- `128`: experts; 64 without. 8 of them compute each token.
- `offpolicy`: 16 updates per batch instead of 4.
- `int8`, `bfloat16`: a sampler whose weights are rounded to that.
"""

from collections.abc import Callable

from ml_collections import ConfigDict

from gspo_jax.config import adamw, base
from gspo_jax.types import UserError


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is a comma-separated list of ARGUMENTS."""
    chosen = set(arg.split(",")) - {""}
    if unknown := chosen - ARGUMENTS.keys():
        raise UserError(f"configs/drift.py takes no argument {min(unknown)!r}; use {', '.join(ARGUMENTS)}")
    config = base()
    config.iterations = 100
    config.cpu_devices = 1
    config.mesh.update({"data": 1, "fsdp": -1, "expert": 1})
    config.model.dtype = "float32"
    config.model.remat = "dots"
    config.model.architecture = ConfigDict(
        {
            "hidden_size": 64,
            "num_layers": 24,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "num_experts": 64,
            "experts_per_token": 8,
            "moe_intermediate_size": 16,
        }
    )
    config.coldstart.steps = 600
    config.coldstart.batch = 16
    config.coldstart.optimizer = adamw(learning_rate=3e-3, schedule="cosine", warmup_updates=20)

    config.data.task = "machine"
    config.data.data_dir = "runs/data"
    config.data.options = ConfigDict({"difficulty": "medium"})
    config.data.prompts_per_batch = 8
    config.data.max_prompt_length = 40
    config.sampling.max_response_length = 104
    config.rewards = ConfigDict({"exact_answer": 1.0})
    config.eval.correct = "exact_answer"
    config.eval.prompts = 64
    config.eval.every = 25

    config.training.old_logprobs = "recompute"
    config.optimizer = adamw(learning_rate=3e-4, schedule="constant", warmup_updates=10)
    for name, change in ARGUMENTS.items():
        if name in chosen:
            change(config)
    return config


def _architecture(**sizes: int) -> Callable[[ConfigDict], None]:
    return lambda config: config.model.architecture.update(sizes)


def _sampler(precision: str) -> Callable[[ConfigDict], None]:
    return lambda config: config.sampling.update({"weights_dtype": precision})


def offpolicy(config: ConfigDict) -> None:
    """Learn from each batch in 16 updates."""
    config.data.prompts_per_batch = 16
    config.training.minibatches = 16


ARGUMENTS: dict[str, Callable[[ConfigDict], None]] = {
    "12": _architecture(num_layers=12),
    "48": _architecture(num_layers=48),
    "128": _architecture(num_experts=128),
    "offpolicy": offpolicy,
    "int8": _sampler("int8"),
    "bfloat16": _sampler("bfloat16"),
}
