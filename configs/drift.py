"""A deep mixture of small experts on long answers, in which updates move many routes.

    python -m gspo_jax.coldstart --config=configs/drift.py --workdir=runs/drift-cold
    python -m gspo_jax.train --config=configs/drift.py --config.model.folder=runs/drift-cold --workdir=runs/drift

A loop on three registers (`machine`, data/generated.py) is run for sixteen steps: an answer has about a hundred tokens,
and one wrong step spoils the rest. With the argument `arithmetic` the task is that of configs/tiny.py: about twenty
tokens, with more to gain, since the policy has to find out that showing the work pays off. The cold start leaves the
routers as they were drawn: their scores lie close together, and so a small change of the weights moves routes. All on
one device. Other depths and numbers of experts are `--config.model.architecture.num_layers=48`,
`--config.model.architecture.num_experts=128`; a sampler whose weights are rounded is
`--config.sampling.weights_dtype=int8`.

What moves the flip rate (docs/evidence.md) is measured from the runs of

    python -m gspo_jax.sweep --config=configs/drift.py
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax.config import adamw, base
from gspo_jax.errors import UserError
from gspo_jax.types import Comparison

TINY = runpy.run_path(str(Path(__file__).with_name("tiny.py")))
"""The module configs/tiny.py, loaded by path: `configs/` is not importable from other directories."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is "" or "arithmetic"."""
    if arg not in ("", "arithmetic"):
        raise UserError(f"configs/drift.py takes no argument {arg!r}; use arithmetic, or none")
    config = base()
    config.iterations = 100
    config.cpu_devices = 1
    config.mesh.update({"data": 1, "fsdp": -1, "expert": 1})
    config.model.dtype = "float32"
    config.model.remat = "none"
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
    config.coldstart.steps = 700
    config.coldstart.batch = 8
    config.coldstart.train_router = False
    config.coldstart.optimizer = adamw(learning_rate=2e-3, schedule="cosine", warmup_updates=20)

    config.data.task = "machine"
    config.data.data_dir = "runs/data"
    config.data.options = ConfigDict({"difficulty": "medium"})
    config.data.prompts_per_batch = 16
    config.data.max_prompt_length = 16
    config.sampling.max_response_length = 104
    config.rewards = ConfigDict({"exact_answer": 1.0})
    config.eval.correct = "exact_answer"
    config.eval.prompts = 64
    config.eval.every = 25
    config.checkpoint.every = 5

    config.training.minibatches = 16
    config.training.old_logprobs = "recompute"
    config.training.row_tokens = 896  # a prompt and eight responses of full length, or eight worked answers
    # Means over a hundred tokens spread more than those over thousands, so these clip ranges are ten times the paper's.
    config.objective.gspo = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.objective.gspo_token = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.objective.luspo = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.optimizer = adamw(learning_rate=1e-4, schedule="constant", warmup_updates=10)
    if arg:
        arithmetic(config)
    return config


def arithmetic(config: ConfigDict) -> None:
    """Train on the task of configs/tiny.py, with its cold start but for the routers."""
    tiny = TINY["get_config"]()
    config.coldstart, config.data = tiny.coldstart, tiny.data
    config.coldstart.train_router = False
    config.sampling.max_response_length = tiny.sampling.max_response_length
    config.training.row_tokens = 528  # the two groups of an update


def get_sweep(arg: str = "") -> list[Comparison]:
    """Return one iteration of GRPO of the testbed, and of models and runs that differ from it in one thing each.

    That is past the optimizer's warm-up; `gspo_jax.noise` goes on from there.
    """
    del arg  # the same for either task
    changes = [
        *({"optimizer.learning_rate": rate} for rate in (1e-4, 3e-4, 1e-3)),
        *({"model.architecture.num_layers": layers} for layers in (12, 48)),
        {"model.architecture.num_experts": 128},
        {"coldstart.train_router": True},
        *({"sampling.weights_dtype": name, "training.old_logprobs": "sampler"} for name in ("bfloat16", "int8")),
    ]
    shared = {"objective.name": "grpo", "objective.grpo.high": 0.27, "iterations": 1, "eval.prompts": 32}
    return [
        Comparison(name="one", title="One iteration", runs=[shared | change for change in changes], panels="routing")
    ]
