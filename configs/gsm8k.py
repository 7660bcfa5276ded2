"""GSPO on GSM8K, starting from a model of any known family in Hugging Face format.

    python -m gspo_jax.train --config=configs/gsm8k.py --workdir=runs/gsm8k \\
        --config.model.folder=Qwen3-0.6B --config.data.folder=gsm8k

`data.folder` holds train.jsonl and test.jsonl (question, answer), the hub's folder of `openai/gsm8k`, or a prepared
TFDS directory. The settings are the GSPO paper's: four updates per batch, sequence ratios clipped to
[1 - 3e-4, 1 + 4e-4]. Adapt the mesh to the machine, such as --config.mesh.expert=4 for a mixture of experts. Cost and
accuracy depend on the model; no figure is claimed here. `configs/gsm8k.py:runlocal` runs two short iterations on a
laptop.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.errors import UserError


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is "runlocal" or empty."""
    config = on_gsm8k()
    config.iterations = 500
    config.data.prompts_per_batch = 32
    config.data.max_prompt_length = 256
    config.sampling.max_response_length = 512

    if arg == "runlocal":
        config.iterations = 2
        config.data.prompts_per_batch = 8
        config.sampling.group_size = 4
        config.sampling.max_response_length = 64
        config.eval.prompts = 8
        config.training.minibatches = 4
    elif arg:
        raise UserError(f"configs/gsm8k.py takes no argument {arg!r}; use runlocal, or none")
    return config
