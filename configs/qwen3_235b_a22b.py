"""GSPO on Qwen3-235B-A22B, on 128 v5p chips.

    python -m gspo_jax.train --config=configs/qwen3_235b_a22b.py --workdir=gs://BUCKET/RUN \\
        --config.model.folder=Qwen3-235B-A22B --config.data.folder=gsm8k

The settings are the GSPO paper's, as in qwen3_30b_a3b.py, with 16,384 tokens per chip and update. Compiled ahead of
time by

    python -m gspo_jax.plan --config=configs/qwen3_235b_a22b.py --topology=v5p:4x4x8

an update needs 68 of a chip's 103 GB. It executes for 9.5 s, and each chip sends 1.4 TB, which takes 2.4 s, 0.3 s of it
not hidden. Parameters, gradients and Adam's moments alone fill 37 chips. The smallest slice that fits has 64 chips
(--config=configs/qwen3_235b_a22b.py:least --topology=v5p:4x4x4) and needs 97 GB per chip plus 13 GB of host memory.
Nothing has been measured on a real TPU.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.errors import UserError


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is "least" for 64 chips, v5p:4x4x4, or empty."""
    config = on_gsm8k("Qwen3-235B-A22B")
    config.model.dispatch = "ragged_all_to_all"  # the sampler's experts are on more chips than a token has experts
    config.mesh.update({"data": 1, "fsdp": -1})
    config.sampling.mesh.update({"data": -1, "expert": 32})
    config.data.prompts_per_batch = 128
    config.data.max_prompt_length = 512
    config.sampling.group_size = 16
    config.sampling.max_response_length = 3968
    config.training.row_tokens = 512 + 4 * 3968  # a prompt and four responses of full length
    config.training.logprob_chunk = 128 * 512
    config.scoring.workers = 8
    if arg == "least":
        config.model.remat = "offload"
        config.data.prompts_per_batch = 64
        config.training.logprob_chunk = 64 * 512
    elif arg:
        raise UserError(f"configs/qwen3_235b_a22b.py takes no argument {arg!r}; use least, or none")
    return config
