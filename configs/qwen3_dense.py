"""GSPO on a dense Qwen3 of 0.6B to 8B parameters, on one host with four v5p chips.

    python -m gspo_jax.train --config=configs/qwen3_dense.py:4B --workdir=runs/qwen3_4b \\
        --config.model.folder=Qwen3-4B --config.data.folder=gsm8k

The settings are the GSPO paper's, as in qwen3_30b_a3b.py. The largest, compiled ahead of time by

    python -m gspo_jax.plan --config=configs/qwen3_dense.py:8B --topology=v5p:2x2x1

needs 54 of a chip's 103 GB for an update of 256 responses, which executes for 36 s. A decode step of 256 responses at
their maximum length executes for 22 ms. Nothing has been measured on a real TPU.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.errors import UserError, choices

SIZES = ("0.6B", "1.7B", "4B", "8B")


def get_config(arg: str = "1.7B") -> ConfigDict:
    """Return the config; `arg` is one of `SIZES`."""
    arg = arg or "1.7B"
    if arg not in SIZES:
        raise UserError(f"configs/qwen3_dense.py takes no argument {arg!r}; {choices(arg, SIZES)}")
    config = on_gsm8k(f"Qwen3-{arg}")
    config.data.prompts_per_batch = 64
    config.data.max_prompt_length = 512
    config.sampling.group_size = 16
    config.sampling.max_response_length = 3584
    config.sampling.slots = 256  # 64 per chip; all 1024 at once would need 181 GB per chip
    config.training.row_tokens = 512 + 4 * 3584  # a prompt and four responses of full length
    config.training.logprob_chunk = 4 * 1024
    config.scoring.workers = 8
    return config
