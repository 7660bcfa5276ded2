"""Random weights, made on the devices, of a model folder that has only their seed: to try a machine with any shape."""

import json
import math
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from gspo_jax.models import transformer
from gspo_jax.models.config import STDDEV, ModelConfig, by_path, dotted
from gspo_jax.models.config_json import read_if_any
from gspo_jax.models.int8 import LARGEST
from gspo_jax.models.matrices import SCALE
from gspo_jax.parallel import mesh as mesh_lib

FILE = "random_weights.json"


def write(folder: Path, seed: int) -> None:
    """Make a folder's weights random."""
    (folder / FILE).write_text(json.dumps({"seed": seed}) + "\n", encoding="utf-8")


def seed_of(folder: Path) -> int | None:
    """Return the seed of a folder's random weights; None if it has weights of its own."""
    return read_if_any(folder / FILE).get("seed")


def make(config: ModelConfig, seed: int, shapes: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Return weights of these shapes and dtypes in the trainer's layout, equal on every mesh.

    Those of a new model for the seed, but int8 matrices are uniform, with a scale that gives them the same spread.
    """

    def draw(key: jax.Array) -> nnx.State:
        new = by_path(transformer.init_params(config, key))

        def one(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            name = dotted(path)
            if leaf.dtype == jnp.int8:
                own = jax.random.fold_in(key, zlib.crc32(name.encode()))
                return jax.random.randint(own, leaf.shape, -LARGEST, LARGEST + 1, jnp.int8)
            if name.endswith(SCALE):
                return jnp.full(leaf.shape, STDDEV * math.sqrt(3) / LARGEST, leaf.dtype)
            return new[name].astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(one, shapes)

    shardings = None if mesh is None else mesh_lib.param_shardings(shapes, mesh)
    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed))
