"""GSPO on Qwen3-235B-A22B, on 128 chips of v5p.

    python -m gspo_jax.train --config=configs/qwen3_235b_a22b.py --workdir=gs://BUCKET/RUN \\
        --config.model.folder=Qwen3-235B-A22B --config.data.folder=gsm8k

The settings are the GSPO paper's, as in qwen3_30b_a3b.py, with 16,384 tokens a chip and update. Ahead of time, by

    python -m gspo_jax.plan --config=configs/qwen3_235b_a22b.py --topology=v5p:4x4x8

an update takes 58 GB of a chip's 103, its operations' bounds add up to 7.6 s beside 1.2 s of attention, and a chip
sends 1.4 TB, of whose 2.4 s 1.0 s are not hidden. Parameters, gradients and Adam's moments alone need 37 chips; 64 are
the least slice that has room (--config=configs/qwen3_235b_a22b.py:least --topology=v5p:4x4x4): 78 GB, and 13 GB of the
host's. No figure of a real TPU is known.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.types import UserError


def get_config(arg: str = "") -> ConfigDict:
    """`arg` may be "least": 64 chips, v5p:4x4x4."""
    config = on_gsm8k("Qwen3-235B-A22B")
    config.mesh.update({"data": 1, "fsdp": -1})
    config.sampling.mesh.update({"data": -1, "expert": 32})
    config.data.prompts_per_batch = 128
    config.data.max_prompt_length = 512
    config.sampling.group_size = 16
    config.sampling.max_response_length = 3968
    config.training.logprob_chunk = 128 * 512
    config.scoring.workers = 8
    if arg == "least":
        config.model.remat = "offload"
        config.data.prompts_per_batch = 64
        config.training.logprob_chunk = 64 * 512
    elif arg:
        raise UserError(f"configs/qwen3_235b_a22b.py takes no argument {arg!r}; use least or none")
    return config
