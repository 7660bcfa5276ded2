"""Random models for studies of what an architecture does by itself, before any training.

    python -m gspo_jax.studies.random_models --config=configs/routers.py:bias --bias=0.1 --seeds=5 --out=runs/bias

Writes the Hugging Face folders OUT-0, OUT-1, … of the config's `model.architecture`, one per seed, with a tokenizer of
single bytes. Matrices are drawn with a variance of one over their inputs, embeddings with one of 1, so that every layer
adds as much to the residual stream as its inputs vary. The initial weights of a cold start are far smaller: experts
hardly matter then, and neither do routes. Parameters that architectures have in common are equal for equal seeds if
they are drawn in the same order. Folders that are complete are left as they are.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx
from jaxtyping import Array, Key
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.models import huggingface, transformer
from gspo_jax.models.config import ModelConfig, dotted
from gspo_jax.models.moe import BIAS
from gspo_jax.parser import Parser
from gspo_jax.setup import keys, policy

DRAWN = 0.02
"""Standard deviation of a new model's matrices, which `params` scales."""
MATRICES = ("q", "k", "v", "o", "qkvz", "ba", "out", "router", "gate", "up", "down", "shared_gate", "head")
"""Last parts of the paths of matrices [*L, inputs, outputs]."""


def params(model: ModelConfig, key: Key[Array, ""], *, bias: float = 0.0) -> nnx.State:
    """Return random parameters: matrices of variance 1 / inputs, routers' biases of standard deviation `bias`."""

    def one(path: jax.tree_util.KeyPath, x: Array) -> Array:
        name = dotted(path).rpartition(".")[2]
        if name == BIAS:
            return bias * jax.random.normal(jax.random.fold_in(key, 1), x.shape)
        if name == "embed":
            return x / DRAWN
        inputs = x.shape[-2] if name in MATRICES else x.shape[-1] if name == "conv" else None
        return x if inputs is None else x / (DRAWN * math.sqrt(inputs))

    return jax.tree_util.tree_map_with_path(one, transformer.init_params(model, key))


def write(config: ConfigDict, folder: Path, *, bias: float) -> None:
    """Write the random model of a config and its seed."""
    tokenizer = Tokenizer.train((), config.coldstart.vocab_size)
    model = policy.cold_start_model(config, eos_token_ids=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id)
    huggingface.save(params(model, keys.init_key(config), bias=bias), model, folder)
    tokenizer.save(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser("python -m gspo_jax.studies.random_models", str(__doc__).rpartition("\n\n")[2])
    parser.add_argument("--config", required=True, metavar="FILE[:arg]", help="config with model.architecture")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many, from the config's")
    parser.add_argument("--bias", type=float, default=0.0, metavar="X", help="standard deviation of routers' biases")
    parser.add_argument("--out", required=True, metavar="OUT", help="beginning of the folders' names")
    return parser.run(_command, arguments)


def _command(given: Namespace) -> None:
    config = cli.load_config(given.config)
    for seed in range(config.seed, config.seed + given.seeds):
        config.seed, folder = seed, Path(f"{given.out}-{seed}")
        if not (folder / "tokenizer.json").exists():  # written last
            write(config, folder, bias=given.bias)
        print(folder)


if __name__ == "__main__":
    sys.exit(main())
