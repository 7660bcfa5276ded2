"""Random weights of a folder that has only their seed: dtypes, spread, and the same on every mesh."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gspo_jax.models import huggingface, random_weights
from gspo_jax.models.config import STDDEV, by_path
from gspo_jax.models.matrices import SCALE
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import CONFIG


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    random_weights.write(tmp_path, 3)
    return tmp_path


def host(params: nnx.State) -> dict[str, np.ndarray]:
    return {name: np.asarray(jnp.asarray(leaf, jnp.float32)) for name, leaf in by_path(params).items()}


def test_the_same_on_every_mesh(folder: pathlib.Path) -> None:
    mesh = mesh_lib.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        spread = huggingface.load_params(folder, CONFIG, mesh)
    whole = huggingface.load_params(folder, CONFIG)
    assert len(by_path(spread)["embed"].sharding.device_set) == 8
    jax.tree.map(np.testing.assert_array_equal, host(spread), host(whole))
    other = random_weights.make(CONFIG, 4, jax.eval_shape(lambda: whole), None)
    assert (host(other)["embed"] != host(whole)["embed"]).any()


def test_a_frozen_base_in_int8(folder: pathlib.Path) -> None:
    params = by_path(huggingface.load_params(folder, CONFIG, dtype=jnp.bfloat16, base="int8"))
    assert params["embed"].dtype == jnp.bfloat16
    matrices = {name for name, leaf in params.items() if leaf.dtype == jnp.int8}
    assert matrices and all(params[name + SCALE].dtype == jnp.float32 for name in matrices)
    for name in matrices:
        values = np.asarray(params[name], np.float64) * np.asarray(params[name + SCALE], np.float64)[..., None, :]
        assert values.std() == pytest.approx(STDDEV, rel=0.1), name
    norms = [leaf for name, leaf in params.items() if name.endswith("norm")]
    assert norms and all(leaf.dtype == jnp.float32 and (leaf == 1).all() for leaf in norms)


def test_a_folder_with_weights_has_no_seed(tmp_path: pathlib.Path) -> None:
    assert random_weights.seed_of(tmp_path) is None
