"""GSPO on a published mixture of experts, all weights trained: Qwen3.5-35B-A3B, GLM-4.7-Flash or GLM-4.5-Air, on v5p.

    python -m gspo_jax.train --config=configs/mixtures.py:GLM-4.7-Flash --workdir=gs://BUCKET/RUN \\
        --config.model.folder=GLM-4.7-Flash --config.data.folder=gsm8k

The settings are the GSPO paper's, as in qwen3_30b_a3b.py. Nothing has been measured on a real TPU, and no accuracy is
known. configs/one_host.py trains the first two with adapters on one host. Compiled ahead of time by

    python -m gspo_jax.plan --config=configs/mixtures.py:GLM-4.7-Flash --topology=v5p:4x4x4

an update of GLM-4.7-Flash needs 21 of a chip's 103 GB and executes for 2.3 s, 2.2 times its floor. A decode step
of all 1024 responses at their maximum length executes for 10.6 ms. An update of GLM-4.5-Air, on v5p:4x4x8, needs 41 GB
and executes for 6.2 s. docs/plan.md has more.

Arguments, joined by commas:

- a model: `Qwen3.5-35B-A3B`, the default, or `GLM-4.7-Flash`, on 64 chips, v5p:4x4x4; `GLM-4.5-Air` on 128, v5p:4x4x8.
- `r3`: the trainer replays the sampler's routes.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.errors import UserError, choices

CHIPS = {"Qwen3.5-35B-A3B": 64, "GLM-4.7-Flash": 64, "GLM-4.5-Air": 128}
"""Models, and the chips that their recipes are for."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is a comma-separated list of a model and `r3`."""
    chosen = list(filter(None, arg.split(",")))
    for name in chosen:
        if name not in (*CHIPS, "r3"):
            raise UserError(f"configs/mixtures.py takes no argument {name!r}; {choices(name, (*CHIPS, 'r3'))}")
    names = [name for name in chosen if name in CHIPS]
    if len(names) > 1:
        raise UserError(f"configs/mixtures.py has one model, not {' and '.join(names)}; name one")
    (model,) = names or ("Qwen3.5-35B-A3B",)
    config = on_gsm8k(model)
    config.model.remat = "full"
    config.model.dispatch = "ragged_all_to_all"  # the sampler's experts are on more chips than a token has experts
    config.mesh.update({"data": 1, "fsdp": -1})
    config.sampling.mesh.update({"data": -1, "expert": 32})
    config.data.prompts_per_batch = CHIPS[model]
    config.data.max_prompt_length = 512
    config.sampling.group_size = 16
    config.sampling.max_response_length = 3968
    config.training.row_tokens = 16384  # per chip; a prompt and four responses of full length
    config.training.logprob_chunk = CHIPS[model] * 1024
    config.scoring.workers = 8
    if "r3" in chosen:
        config.routing.replay = "r3"
    return config
