"""GSPO on Qwen3-30B-A3B, on 64 v5p chips; arguments select v6e, v5e, another number of chips, or longer responses.

    python -m gspo_jax.train --config=configs/qwen3_30b_a3b.py --workdir=gs://BUCKET/RUN \\
        --config.model.folder=Qwen3-30B-A3B --config.data.folder=gsm8k

The settings are the GSPO paper's: four updates per batch, sequence ratios clipped to [1 - 3e-4, 1 + 4e-4]. An update
reads rows of 16,384 tokens per chip, one if all responses have the full length; parameters and Adam are float32.
Compiled ahead of time by

    python -m gspo_jax.plan --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4

an update of one such row needs 56 of a chip's 103 GB. The lower bounds of its operations add up to 0.95 s, plus 0.24 s
of attention; it executes for 1.33 s, and each chip sends 180 GB, which takes 0.30 s, 0.02 s of it not hidden. A decode
step of all 1024 responses at their maximum length, 4480 tokens, takes 4.2 ms by its bytes, and executes for 5.6 ms.
Others, in memory per chip and seconds that an update executes for:

    --config=configs/qwen3_30b_a3b.py:v6e --topology=v6e:8x8       20 of 34 GB, 1.3 s
    --config=configs/qwen3_30b_a3b.py:v5e --topology=v5e:16x16     15 of 17 GB, 4.0 s
    --config=configs/qwen3_30b_a3b.py:long --topology=v5p:4x4x4    28 of 103 GB, 27 s
    --config=configs/qwen3_30b_a3b.py:256 --topology=v5p:4x8x8     as on 64 chips
    --config=configs/qwen3_30b_a3b.py:16 --topology=tpu7x:2x2x2    88 of 102 GB, 0.8 s, on 16 devices of eight chips

docs/plan.md has the details. Nothing has been measured on a real TPU, and no accuracy is known.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.errors import UserError, choices


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is a comma-separated list of `ARGUMENTS` and a number of chips, empty for v5p:4x4x4."""
    config = on_gsm8k("Qwen3-30B-A3B")
    config.model.remat = "dots"
    config.model.dispatch = "ragged_all_to_all"  # the sampler's experts are on more chips than a token has experts
    config.mesh.update({"data": 1, "fsdp": -1})  # on 64 chips, two whole experts of each layer per chip
    config.sampling.mesh.update({"data": -1, "expert": 32})
    config.data.prompts_per_batch = 64
    config.data.max_prompt_length = 512
    config.sampling.group_size = 16
    config.sampling.max_response_length = 3968
    config.training.row_tokens = 16384  # per chip; a prompt and four responses of full length
    config.training.logprob_chunk = 64 * 1024
    config.scoring.workers = 8
    for name in sorted(filter(None, arg.split(",")), key=str.isdigit):
        if name.isdigit():
            chips(config, int(name))
        elif name in ARGUMENTS:
            ARGUMENTS[name](config)
        else:
            raise UserError(
                f"configs/qwen3_30b_a3b.py takes no argument {name!r}; {choices(name, ARGUMENTS)}, a number of chips, "
                "or none for v5p:4x4x4"
            )
    return config


def chips(config: ConfigDict, count: int) -> None:
    """Set the number of v5p chips, with as much work for each as on 64, every 64 of which hold all weights.

    Raises:
      UserError: the experts cannot be divided over this number of chips.
    """
    if count < 16 or (64 % count and count % 64):
        raise UserError(f"configs/qwen3_30b_a3b.py cannot be laid out on {count} chips; use 16, 32 or a multiple of 64")
    config.mesh.update({"data": -1, "fsdp": min(64, count)})
    config.sampling.mesh.update({"expert": min(config.sampling.mesh.expert, count)})
    config.training.logprob_chunk = count * 1024
    for part, name in (
        (config.data, "prompts_per_batch"),
        (config.sampling.partial, "prompts"),
        (config.sampling, "slots"),
        (config.sampling, "pool_tokens"),
    ):
        if part[name] is not None:
            part[name] = part[name] * count // 64


def v6e(config: ConfigDict) -> None:
    """Fit 64 chips of 31 GB, v6e:8x8."""
    config.model.remat = "full"


def v5e(config: ConfigDict) -> None:
    """Fit 256 chips of 16 GB, v5e:16x16, whose compiler lacks the exchange of pairs."""
    config.model.remat = "full"
    config.model.dispatch = "gather"
    config.mesh.update({"data": 2})
    config.data.prompts_per_batch = 256
    config.training.logprob_chunk = 256 * 512


def long(config: ConfigDict) -> None:
    """Train on sequences of 32,768 tokens, one per chip at a time."""
    config.model.remat = "full"
    config.data.max_prompt_length = 1024
    config.sampling.max_response_length = 31744
    config.training.row_tokens = 32768


def whole_16k(config: ConfigDict) -> None:
    """Sample 8192 responses of up to 15,872 tokens, 2048 at a time, and train on rows of 16,384 tokens per chip."""
    config.data.prompts_per_batch = 512
    config.sampling.max_response_length = 15872
    config.sampling.slots = 2048
    config.training.row_tokens = 16384


def partial_16k(config: ConfigDict) -> None:
    """The same with partial rollouts: 2048 prompts in flight until 40% of the unfinished responses end.

    A chip's pool holds 288 × 1024 tokens, what 88 responses in progress have on average.
    """
    whole_16k(config)
    config.sampling.slots = 64 * 96  # of 88, reduce-scatters over 32 chips compile to more collectives
    config.sampling.pool_tokens = 64 * 288 * 1024
    config.sampling.partial.prompts = 2048
    config.sampling.partial.share = 0.4


def int8_16k(config: ConfigDict) -> None:
    """The same with keys and values in int8: a chip's pool holds 512 × 1024 tokens, of 120 responses in progress."""
    partial_16k(config)
    config.sampling.cache_dtype = "int8"
    config.sampling.slots = 64 * 120
    config.sampling.pool_tokens = 64 * 512 * 1024


ARGUMENTS = {
    "v6e": v6e,
    "v5e": v5e,
    "long": long,
    "16k": partial_16k,
    "16k_int8": int8_16k,
    "16k_whole": whole_16k,
}
