"""A frozen base in int8: read as it is quantised, and computed with as its values say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.models import huggingface, int8, lora, transformer
from gspo_jax.models.config import by_path, dotted
from gspo_jax.models.matrices import SCALE
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import Weights
from tests.models.test_lora import DENSE, EVERYWHERE, TOKENS, adapted, gradient
from tests.tiny import CONFIG, leaf_errors, mesh_id, params
from tests.tools import loading


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of the routed and of the dense model."""
    root = tmp_path_factory.mktemp("int8")
    for name, config in (("routed", CONFIG), ("dense", DENSE)):
        huggingface.save(params(config), config, root / name)
    return {CONFIG: root / "routed", DENSE: root / "dense"}


def dequantized(base):
    """Return the parameters whose values a base in int8 stands for, in float32."""
    scales, values = int8.split(base)

    def one(key, x):
        scale = scales.get(dotted(key))
        return x if scale is None else x * scale[..., None, :]

    return jax.tree.map_with_path(one, values)


def test_host_and_devices_quantise_alike():
    w = np.random.default_rng(0).normal(0, 0.02, (3, 40, 24)).astype(np.float32)
    w[1, :, 5] = 0
    here, there = int8.quantize(w), int8.quantize(jnp.asarray(w))
    assert all(isinstance(x, np.ndarray) for x in here) and here[0].dtype == np.int8 and here[1].dtype == np.float32
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (np.abs(here[0]).max(axis=1) == np.where(w.any(axis=1), 127, 0)).all()
    assert (np.abs(here[0] * here[1] - w) <= here[1] * 0.5001).all()


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["routed", "dense"])
def test_matrices_are_read_in_int8_and_nothing_else_is(config, folders):
    whole = by_path(huggingface.load_params(folders[config], config))
    found = by_path(huggingface.load_params(folders[config], config, dtype=jnp.bfloat16, base="int8"))
    matrices = {path.removesuffix(SCALE) for path in found if path.endswith(SCALE)}
    assert {path.rpartition(".")[2] for path in matrices} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert found.keys() - {path + SCALE for path in matrices} == whole.keys()
    for path, w in whole.items():
        if path not in matrices:
            assert found[path].dtype == (jnp.bfloat16 if path in ("embed", "head") else jnp.float32), path
            continue
        values, scale = int8.quantize(np.asarray(w))
        np.testing.assert_array_equal(found[path], values)
        np.testing.assert_array_equal(found[path + SCALE], scale[..., 0, :])


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "expert": 2, "tensor": 2}, pytest.param({"fsdp": 8}, marks=pytest.mark.slow)], ids=mesh_id
)
def test_shards_have_the_whole_column_s_scale(sizes, folders):
    """Also those that hold only some of its rows."""
    mesh = mesh_lib.make_mesh(sizes)
    alone = huggingface.load_params(folders[CONFIG], CONFIG, base="int8")
    split = huggingface.load_params(folders[CONFIG], CONFIG, mesh, base="int8")
    for (path, one), other in zip(by_path(alone).items(), by_path(split).values(), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=path)


@pytest.mark.parametrize("config", [pytest.param(CONFIG, marks=pytest.mark.slow), DENSE], ids=["routed", "dense"])
def test_logits_and_gradients_are_those_of_the_values(config, folders):
    """Both equal those of the model whose base is values times scales; logits are near those of the base as read."""
    base = huggingface.load_params(folders[config], config, base="int8")
    graph, _ = transformer.abstract(config, adapters=EVERYWHERE, base="int8")
    model = adapted(config)
    ours, theirs = Weights(model.weights.trainable, base), model.weights
    values = Weights(model.weights.trainable, dequantized(base))
    found, expected, exact = (
        each.model(of)(TOKENS).logits for each, of in ((ours, graph), (values, model.graph), (theirs, model.graph))
    )
    merged = lora.merge(ours.trainable, int8.split(base)[1], EVERYWHERE, scales=int8.split(base)[0])
    plain, _ = transformer.abstract(config)
    assert leaf_errors(found, Weights.full(merged).model(plain)(TOKENS).logits) < 1e-5
    scale = np.abs(exact).max()
    assert np.abs(found - expected).max() < 1e-5 * scale
    assert 1e-3 * scale < np.abs(found - exact).max() < 0.2 * scale
    assert leaf_errors(gradient(model.graph, values), gradient(graph, ours)) < 2e-5


@pytest.mark.slow
def test_a_mesh_changes_no_gradient(folders):
    mesh, trainable = mesh_lib.make_mesh({"expert": 8}), adapted(CONFIG).weights.trainable
    graph, _ = transformer.abstract(CONFIG, adapters=EVERYWHERE, base="int8")
    expected = gradient(graph, Weights(trainable, huggingface.load_params(folders[CONFIG], CONFIG, base="int8")))
    placed = jax.device_put(trainable, mesh_lib.param_shardings(trainable, mesh))
    base = huggingface.load_params(folders[CONFIG], CONFIG, mesh, base="int8")
    with jax.set_mesh(mesh):
        assert leaf_errors(expected, gradient(graph, Weights(placed, base))) < 2e-5


@pytest.mark.slow
def test_a_folder_is_never_whole_in_host_memory():
    found = loading.measure(1.3)
    assert found["folder"] > 1.2e9 and found["grown"] <= found["limit"], found
