"""Synthetic workload of `bench`: prompts and responses of given lengths, and their flops."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.lengths import Lengths
from gspo_jax.models import flops as flops_lib
from gspo_jax.models import huggingface
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.setup import checks, policy
from gspo_jax.setup.fields import check_fields
from gspo_jax.setup.meshes import check_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, responses and settings of a benchmark's iterations."""

    model: Path
    """Hugging Face folder."""
    prompts: int = 8
    """Prompts per iteration."""
    group: int = 8
    """Responses per prompt."""
    prompt_length: int = 32
    new_tokens: int = 128
    """Maximum tokens per response."""
    lengths: str | None = None
    """Distribution of response lengths, such as uniform:16:128 or lognormal:64:0.8. None: `new_tokens` for all."""
    slots: int | None = None
    """Responses decoded at a time. None: all."""
    minibatches: int = 4
    """Updates per iteration."""
    row_tokens: int | None = None
    """Tokens per packed row. None: a run's default."""
    dtype: str = "float32"
    """Compute dtype. Parameters are float32."""
    repeats: int = 5
    warmup: int = 1
    """Iterations before the measured ones. The first compiles."""
    devices: int = 1
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"fsdp": -1})
    """Mesh axis sizes. One may be -1 (the rest), others default to 1."""

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens per iteration for the throughput of each part."""
        sampled = int(self.limits.sum())
        read = sampled + self.prompts * self.group * self.prompt_length
        return {"sample": sampled, "score": read, "update": read, "iteration": sampled}

    @property
    def limits(self) -> Int[np.ndarray, " B"]:
        """Tokens of each response, the same in every iteration.

        Raises:
          UserError: `lengths` is malformed, or a uniform distribution exceeds `new_tokens`.
        """
        responses = self.prompts * self.group
        if self.lengths is None:
            return np.full(responses, self.new_tokens, np.int32)
        lengths = Lengths(self.lengths, self.new_tokens, "--new_tokens")
        return lengths.draw(responses, np.random.default_rng(0))

    @property
    def config(self) -> ConfigDict:
        """Config of such a run: the defaults, with matmul outputs saved for backward."""
        config: Any = base()
        config.model.folder = str(self.model)
        config.model.dtype = self.dtype
        config.model.remat = "dots"
        config.data.prompts_per_batch = self.prompts
        config.data.max_prompt_length = self.prompt_length
        config.sampling.group_size = self.group
        config.sampling.max_response_length = self.new_tokens
        config.sampling.slots = self.slots
        config.training.minibatches = self.minibatches
        config.training.row_tokens = self.row_tokens
        config.training.old_logprobs = "recompute"
        config.optimizer.warmup_updates = 0
        return config

    def check(self) -> ModelConfig:
        """Check the workload without devices or weights, and return the model's shape.

        Raises:
          UserError: a number is out of range or does not fit the rest.
        """
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise UserError(f"--{name} is {value}; it must be at least 1")
        _ = self.limits  # raises if --lengths is malformed
        model, config = huggingface.read_config(self.model), self.config
        sizes: dict[str, int] = dict(zip(mesh_lib.AXES, mesh_lib.mesh_sizes(self.mesh, self.devices), strict=True))
        try:
            check_fields(config)
            checks.check_packing(config)
            policy.check_positions(config, model)
            check_sizes(config, model, sizes)
        except UserError as error:
            raise UserError(_as_flags(str(error))) from None
        return model


def _as_flags(text: str) -> str:
    """Name flags instead of config fields in a message."""
    for field, flag in {
        "data.prompts_per_batch": "prompts",
        "data.max_prompt_length": "prompt_length",
        "sampling.group_size": "group",
        "sampling.max_response_length": "new_tokens",
        "sampling.slots": "slots",
        "training.row_tokens": "row_tokens",
        "model.dtype": "dtype",
    }.items():
        text = text.replace(field, f"--{flag}")
    return text


def flops(model: ModelConfig, work: Workload) -> dict[str, int]:
    """Return each part's unavoidable flops if responses share their group's prompt.

    An update costs three forward passes: the gradient takes two matrix products for each forward one.
    """
    forward = forward_flops(model, lengths=work.limits, rows_per_prompt=work.group, prompt_length=work.prompt_length)
    return {"sample": forward, "score": forward, "update": 3 * forward, "iteration": 5 * forward}


def forward_flops(
    model: ModelConfig, *, lengths: Int[np.ndarray, " B"], rows_per_prompt: int, prompt_length: int
) -> int:
    """Return the minimum flops of the responses' log-probs, with a perfect KV cache. See `models.flops.forward`.

    A prompt of S tokens is computed once for its `rows_per_prompt` rows, and a response's last token never. A token at
    position c (from 1) attends to c keys.
    """
    S, fed = prompt_length, lengths.astype(np.int64) - 1
    prompts = len(lengths) // rows_per_prompt
    pairs = prompts * (S * (S + 1) // 2) + int((S * fed + fed * (fed + 1) // 2).sum())
    work = flops_lib.Work(prompts * S + int(fed.sum()), int(lengths.sum(dtype=np.int64)), pairs)
    return int(flops_lib.forward(model, work).forward)
