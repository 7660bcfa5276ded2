"""The testbed of configs/drift.py with answers of a thousand tokens: how the ratio's noise falls with their number.

    python -m gspo_jax.coldstart --config=configs/length.py --workdir=runs/length/24-drawn-0
    python -m gspo_jax.noise --config=configs/length.py --config.model.folder=runs/length/24-drawn-0 \
        --workdir=runs/length/24-drawn-0 --updates=0,1,4,16 --nolayers --out=runs/length-noise/24-drawn-0

`noise` splits the variance of the mean over a response's first 16, 64, 256 and 1024 tokens (`by_length`). The argument
`rounding` measures sampler and trainer before any update: a sampler with weights rounded to int8, whose log-probs are
π_old. Depths are `--config.model.architecture.num_layers=12`, trained routers `--config.coldstart.train_router=True`.
All of them, with three cold starts each (docs/evidence/length.md):

    bash launch/evidence.sh length
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax.errors import UserError

DRIFT = runpy.run_path(str(Path(__file__).with_name("drift.py")))
"""The module configs/drift.py, loaded by path: `configs/` is not importable from other directories."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is "" or "rounding"."""
    if arg not in ("", "rounding"):
        raise UserError(f"configs/length.py takes no argument {arg!r}; use rounding, or none")
    config = DRIFT["get_config"]()
    config.data.options = ConfigDict({"difficulty": "long"})
    config.coldstart.steps = 80  # as many tokens as 700 steps of short answers
    config.sampling.max_response_length = 1088
    config.sampling.group_size = 4
    config.training.row_tokens = 16 + 4 * 1088  # a prompt's responses, the update's
    config.objective.name = "grpo"
    config.optimizer.warmup_updates = 0  # the measured updates are the first
    if arg:
        config.sampling.weights_dtype = "int8"
        config.training.old_logprobs = "sampler"
    return config
