"""GSPO on one TPU host of eight devices, v5e:2x4, v6e:2x4 or tpu7x:2x2x1: Qwen3-30B-A3B with adapters beside int8.

    python -m gspo_jax.train --config=configs/one_host.py --workdir=gs://BUCKET/RUN \\
        --config.model.folder=Qwen3-30B-A3B --config.data.folder=gsm8k

Nothing has been measured on a TPU, and no accuracy is known. What follows is compiled ahead of time, and projected for
512 responses of 1500 tokens on average (docs/plan.md, "Adapters", has every program):

    python -m gspo_jax.plan --config=configs/one_host.py --topology=v5e:2x4 --lengths=lognormal:1500:0.6 \\
        --config.training.old_logprobs=sampler

Old log-probs that are recomputed, as here, add the time of `score` to an iteration.

- On v5e:2x4, no program needs more than 11.6 of a chip's 16.9 GB. An update of rows of 4480 tokens takes 8.0 GB: the
  base 4.0, saved activations 0.9, the batch 0.7, adapters, gradients and moments 0.2, intermediate results the rest. A
  decode of 128 responses takes 11.4 GB with the base, 6.9 of it keys and values. 552 response tokens a second and
  chip, 168 s an iteration, 9 hours for 200 of them.
- With `partial`, 256 responses in progress and no waiting for the longest: 13.2 GB, 864 tokens a second and chip,
  110 s an iteration, 6 hours.
- On v6e:2x4 with `partial`: 16.7 of 33.6 GB, 1,810 tokens a second and chip, 52 s, 3 hours.

- Qwen3.5-35B-A3B on v5e:2x4: an update takes 11.4 GB and executes for 30 s, a decode step of 128 responses 9.7 GB and
  28 ms.

- On tpu7x:2x2x1, eight devices of 101.7 GB on four chips: an update takes 7.8 GB and executes for 4.9 s, a decode step
  of 128 responses 11.1 GB and 6.1 ms.

Arguments, joined by commas, change the model and what of it is trained:

- a model: `Qwen3.5-35B-A3B`, `GLM-4.7-Flash`, `OLMoE-1B-7B-0924`, `Qwen3-0.6B`, `Qwen3-1.7B`, `Qwen3-4B` or `Qwen3-8B`
  in place of Qwen3-30B-A3B.
- `bf16`: a base in bfloat16, and rows of 2048 tokens instead of 4480.
- `partial`: partial rollouts, of 192 prompts in flight, with 256 slots and keys and values in int8.
- `full`: all weights are trained; there is no base.
- `gpu`: a single device, such as a GPU of 80 GB; untried (docs/gpu.md).

Not all of these fit: run `plan` first. Models of 30B and more with `full` do not, nor does Qwen3-8B with `full` on v5e.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.errors import UserError, choices
from gspo_jax.models.published import find

DEFAULT = "Qwen3-30B-A3B"
MIXTURES = (DEFAULT, "Qwen3.5-35B-A3B", "GLM-4.7-Flash")
"""Mixtures of experts of some 30B parameters."""
MODELS = (*MIXTURES, "OLMoE-1B-7B-0924", "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is a comma-separated list of a model and `ARGUMENTS`."""
    chosen = list(filter(None, arg.split(",")))
    for name in chosen:
        if name not in (*MODELS, *ARGUMENTS):
            raise UserError(f"configs/one_host.py takes no argument {name!r}; {choices(name, (*MODELS, *ARGUMENTS))}")
    names = [name for name in chosen if name in MODELS]
    if len(names) > 1:
        raise UserError(f"configs/one_host.py has one model, not {' and '.join(names)}; name one")
    if {"bf16", "full"} <= set(chosen):
        raise UserError("configs/one_host.py takes bf16 or full, not both: with full there is no base; name one")
    config = on_gsm8k(*names or (DEFAULT,))
    config.model.remat = "full"
    config.data.prompts_per_batch = 64
    config.data.max_prompt_length = 512
    config.sampling.group_size = 8
    config.sampling.max_response_length = 3968
    config.sampling.slots = 64
    config.training.row_tokens = 4480  # a prompt and a response of full length
    config.training.logprob_chunk = 8 * 1024
    config.adapter.base_dtype = "int8"
    config.adapter.rank = 16
    config.optimizer.learning_rate = 1e-5  # ten times that of full training; see docs/adapters.md
    if find(config.model.published).is_routed:
        config.mesh.update({"data": 1, "fsdp": 1, "expert": 8})
    else:
        config.mesh.update({"data": 1, "fsdp": 8, "expert": 1})
        config.sampling.mesh.update({"tensor": 8})
    if config.model.published in MIXTURES:
        config.sampling.slots = 128
    if config.model.published.startswith("OLMoE"):  # which knows 4096 positions
        config.sampling.max_response_length, config.training.row_tokens = 3584, 4096
    for name in ARGUMENTS:
        if name in chosen:
            ARGUMENTS[name](config)
    return config


def bf16(config: ConfigDict) -> None:
    """Store the base in bfloat16, and compute rows of 2048 tokens."""
    config.adapter.base_dtype = "bfloat16"
    config.sampling.max_response_length = 1536
    config.training.row_tokens = 2048


def full(config: ConfigDict) -> None:
    """Train all weights."""
    config.adapter.rank, config.adapter.base_dtype = 0, ""
    config.optimizer.learning_rate = 1e-6


def partial(config: ConfigDict) -> None:
    """Sample without waiting for the longest responses, 256 at a time, with keys and values in int8."""
    config.sampling.cache_dtype, config.sampling.slots = "int8", 256
    config.sampling.partial.prompts, config.sampling.partial.share = 192, 0.45


def gpu(config: ConfigDict) -> None:
    """Run on a single device, with keys and values in int8 to leave room."""
    for mesh in (config.mesh, config.sampling.mesh):
        mesh.update({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.sampling.cache_dtype, config.sampling.slots = "int8", 64


ARGUMENTS = {"bf16": bf16, "full": full, "partial": partial, "gpu": gpu}
