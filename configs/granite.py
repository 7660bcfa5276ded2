"""GSPO on GSM8K with a small mixture of experts, on one small host or GPU: granite-3.1-1b-a400m, all weights trained.

    python -m gspo_jax.train --config=configs/granite.py --workdir=runs/granite \\
        --config.model.folder=granite-3.1-1b-a400m-instruct --config.data.folder=gsm8k

24 layers, each with 8 of 32 experts: the cheapest published mixture whose routes can be studied in depth. It is set up
for four chips of a TPU host, such as v5e:2x2. Nothing has been measured, and no accuracy is known; plan it first:

    python -m gspo_jax.plan --config=configs/granite.py --topology=v5e:2x2

Arguments, joined by commas:

- a model: `granite-3.1-3b-a800m` (8 of 40 experts, 32 layers) or `OLMoE-1B-7B-0924` (8 of 64, 16 layers) in place of
  granite-3.1-1b-a400m. Both need adapters on four small chips.
- `adapters`: adapters beside a base in int8, instead of all weights.
- `r3`: the trainer replays the sampler's routes.
- `gpu`: a single device, such as a GPU of 80 GB; untried (docs/gpu.md).
- `runlocal`: the same programs for two short iterations.
"""

from ml_collections import ConfigDict

from gspo_jax.config import on_gsm8k
from gspo_jax.errors import UserError, choices

DEFAULT = "granite-3.1-1b-a400m"
MODELS = (DEFAULT, "granite-3.1-3b-a800m", "OLMoE-1B-7B-0924")


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is a comma-separated list of a model and `ARGUMENTS`."""
    chosen = list(filter(None, arg.split(",")))
    for name in chosen:
        if name not in (*MODELS, *ARGUMENTS):
            raise UserError(f"configs/granite.py takes no argument {name!r}; {choices(name, (*MODELS, *ARGUMENTS))}")
    names = [name for name in chosen if name in MODELS]
    if len(names) > 1:
        raise UserError(f"configs/granite.py has one model, not {' and '.join(names)}; name one")
    config = on_gsm8k(*names or (DEFAULT,))
    config.mesh.update({"data": 1, "fsdp": 1, "expert": 4})
    config.model.remat = "full"
    config.data.prompts_per_batch = 32
    config.data.max_prompt_length = 256
    config.sampling.group_size = 8
    config.sampling.max_response_length = 768
    config.sampling.slots = 64
    config.training.row_tokens = 2048
    config.training.logprob_chunk = 8 * 1024
    for name in ARGUMENTS:
        if name in chosen:
            ARGUMENTS[name](config)
    return config


def adapters(config: ConfigDict) -> None:
    """Train adapters beside a base in int8."""
    config.adapter.base_dtype = "int8"
    config.adapter.rank = 16
    config.optimizer.learning_rate = 1e-5  # ten times that of full training; see docs/adapters.md


def r3(config: ConfigDict) -> None:
    """Replay the sampler's routes."""
    config.routing.replay = "r3"


def gpu(config: ConfigDict) -> None:
    """Run on a single device."""
    for mesh in (config.mesh, config.sampling.mesh):
        mesh.update({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})


def runlocal(config: ConfigDict) -> None:
    """Shorten everything, for a laptop."""
    gpu(config)
    config.iterations = 2
    config.data.prompts_per_batch = 4
    config.sampling.group_size = 4
    config.sampling.max_response_length = 64
    config.sampling.slots = 16
    config.eval.prompts = 8


ARGUMENTS = {"adapters": adapters, "r3": r3, "gpu": gpu, "runlocal": runlocal}
