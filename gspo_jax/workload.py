"""The synthetic workload that `bench` times: prompts and responses of given lengths, and the flops they require."""

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
from gspo_jax.setup.meshes import check_sizes

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and responses of a benchmark's iterations, and the settings they run with."""

    model: Path
    """Hugging Face folder of the model."""
    prompts: int = 8
    """Prompts per iteration."""
    group: int = 8
    """Responses per prompt."""
    prompt_length: int = 32
    """Tokens per prompt."""
    new_tokens: int = 128
    """Maximum tokens per response."""
    lengths: str | None = None
    """Distribution of response lengths, such as uniform:16:128 or lognormal:64:0.8; None: `new_tokens` for all."""
    slots: int | None = None
    """Responses decoded at a time; None: all."""
    minibatches: int = 4
    """Updates per iteration."""
    row_tokens: int | None = None
    """Tokens of a packed row; None: as a run's default."""
    dtype: str = "float32"
    """Compute dtype; parameters are float32."""
    repeats: int = 5
    """Measured iterations."""
    warmup: int = 1
    """Iterations before the measured ones; the first one compiles."""
    devices: int = 1
    """Devices of the mesh."""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"fsdp": -1})
    """Sizes of the mesh axes; one may be -1 (the rest of the devices), and an axis left out has size 1."""

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens per iteration from which the throughput of each part is computed."""
        sampled = int(self.limits.sum())
        read = sampled + self.prompts * self.group * self.prompt_length
        return {"sample": sampled, "score": read, "update": read, "iteration": sampled}

    @property
    def limits(self) -> Int[np.ndarray, " B"]:
        """Length of each response in tokens, the same in every iteration.

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
        """The config of a training run with these iterations: the defaults, with matmul outputs saved for backward."""
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
        config.optimizer.learning_rate = 1e-6
        config.optimizer.warmup_updates = 0
        config.optimizer.max_grad_norm = 1.0
        return config

    def check(self) -> ModelConfig:
        """Check the workload and return the model's shape, without touching devices or weights.

        Raises:
          UserError: a number is out of range, or does not fit the other numbers or the model.
        """
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise UserError(f"--{name} is {value}; it must be at least 1")
        least = self.prompt_length + self.new_tokens
        if self.row_tokens is not None and self.row_tokens < least:
            raise UserError(
                f"--row_tokens is {self.row_tokens}, too few for --prompt_length {self.prompt_length} and --new_tokens "
                f"{self.new_tokens}; use {least} or more"
            )
        _ = self.limits  # raises if --lengths is malformed
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype is {self.dtype!r}; use {' or '.join(DTYPES)}")
        model = huggingface.read_config(self.model)
        length, limit = self.prompt_length + self.new_tokens, model.max_position_embeddings
        if length > limit:
            raise UserError(
                f"--prompt_length {self.prompt_length} and --new_tokens {self.new_tokens} need {length} positions, and "
                f"the model has {limit}; take {length - limit} off either"
            )
        sizes: dict[str, int] = dict(zip(mesh_lib.AXES, mesh_lib.mesh_sizes(self.mesh, self.devices), strict=True))
        try:
            check_sizes(self.config, model, sizes)
        except UserError as error:
            raise UserError(_as_flags(str(error))) from None
        return model


def _as_flags(text: str) -> str:
    """Rewrite a message about config fields in terms of this command's flags."""
    for field, flag in {
        "data.prompts_per_batch": "prompts",
        "sampling.group_size": "group",
        "sampling.slots": "slots",
    }.items():
        text = text.replace(field, f"--{flag}")
    return text


def flops(model: ModelConfig, work: Workload) -> dict[str, int]:
    """Return the flops of each part that no implementation can avoid if responses share their group's prompt.

    An update costs three forward passes: the gradient takes two matrix products for each one of the forward pass.
    """
    forward = forward_flops(model, lengths=work.limits, rows_per_prompt=work.group, prompt_length=work.prompt_length)
    return {"sample": forward, "score": forward, "update": 3 * forward, "iteration": 5 * forward}


def forward_flops(
    model: ModelConfig, *, lengths: Int[np.ndarray, " B"], rows_per_prompt: int, prompt_length: int
) -> int:
    """Return the minimum flops of the responses' log-probs, with a perfect KV cache; see `models.flops.forward`.

    A prompt of S tokens is computed once for the `rows_per_prompt` rows that share it. All tokens of a response but the
    last are computed, since nothing is predicted from that one. A token at position c (from 1) attends to c keys.
    """
    S, fed = prompt_length, lengths.astype(np.int64) - 1
    prompts = len(lengths) // rows_per_prompt
    pairs = prompts * (S * (S + 1) // 2) + int((S * fed + fed * (fed + 1) // 2).sum())
    work = flops_lib.Work(prompts * S + int(fed.sum()), int(lengths.sum(dtype=np.int64)), pairs)
    return int(flops_lib.forward(model, work).forward)
