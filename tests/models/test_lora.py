"""Adapters: gradients by the chain rule, nothing added before they learn, and no gradient of the base anywhere."""

import collections
import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax import cli, engine
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.kernels import grouped_matmul
from gspo_jax.models import huggingface, lora, transformer
from gspo_jax.models.config import ModelConfig, by_path, dotted
from gspo_jax.models.lora import Adapters
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup import policy
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.types import Weights
from tests.tiny import CONFIG, leaf_errors, params

DENSE = dataclasses.replace(CONFIG, num_experts=0, experts_per_token=0, moe_intermediate_size=0)
EVERYWHERE = Adapters(rank=3, expert_rank=2, alpha=4.0, targets=tuple(lora.TARGETS))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, CONFIG.vocab_size, (8, 13)))


class Adapted(NamedTuple):
    """A model with adapters that have learned something."""

    graph: nnx.GraphDef
    weights: Weights


def adapted(config: ModelConfig) -> Adapted:
    """Return the tiny model with random adapters beside every matrix that may have one."""
    graph, shapes = transformer.abstract(config, adapters=EVERYWHERE)
    rng = np.random.default_rng(1)
    trainable = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape).astype(np.float32)), lora.split(shapes)[0]
    )
    return Adapted(graph, Weights(trainable, params(config)))


def by_matrix(tree: nnx.State) -> dict[str, dict[str, np.ndarray]]:
    """Return the leaves of adapters in float64: the path of the matrix -> {"a": …, "b": …}."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, leaf in by_path(tree).items():
        name, own = lora.matrix_of(path)
        found.setdefault(name, {})[own] = np.asarray(leaf, np.float64)
    return found


def loss(graph: nnx.GraphDef, weights: Weights) -> jax.Array:
    """Return a loss that every parameter has a part in."""
    logits = weights.model(graph)(TOKENS).logits
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), TOKENS[:, 1:, None], -1).mean()


def gradient(graph: nnx.GraphDef, weights: Weights) -> nnx.State:
    """Return the loss's gradient of what is trainable."""
    return jax.jit(jax.grad(lambda trainable: loss(graph, Weights(trainable, weights.frozen))))(weights.trainable)


@pytest.mark.parametrize("config", [pytest.param(CONFIG, marks=pytest.mark.slow), DENSE], ids=["routed", "dense"])
def test_gradients_are_the_chain_rule_of_the_full_gradient(config):
    """Gradients of A and B are s dW Bᵀ and s Aᵀ dW in float64, dW that of W + s A B, beside every target."""
    model = adapted(config)
    pairs = by_matrix(model.weights.trainable)

    def merge(path, w):
        name = dotted(path)
        if name not in pairs:
            return w
        a, b = pairs[name]["a"], pairs[name]["b"]
        return jnp.asarray(np.asarray(w, np.float64) + 4.0 / np.sqrt(a.shape[-1]) * a @ b, jnp.float32)

    whole = jax.tree.map_with_path(merge, model.weights.frozen)
    graph, _ = transformer.abstract(config)
    assert loss(graph, Weights.full(whole)) == pytest.approx(float(loss(model.graph, model.weights)), rel=1e-5)
    full = {name: np.asarray(dw, np.float64) for name, dw in by_path(gradient(graph, Weights.full(whole))).items()}
    found = by_matrix(gradient(model.graph, model.weights))
    kinds = {name.split(".", 2)[2] for name in found}
    own = {"q_proj", "k_proj", "v_proj", "o_proj", *lora.EXPERTS} | ({"router"} if config.is_routed else set())
    places = {lora.TARGETS[name][0] for name in own}
    assert kinds == places
    for name, own in found.items():
        a, b, dw = pairs[name]["a"], pairs[name]["b"], full[name]
        scale = 4.0 / np.sqrt(a.shape[-1])
        for which, expected in (("a", scale * dw @ b.mT), ("b", scale * a.mT @ dw)):
            error = np.abs(own[which] - expected).max() / np.abs(expected).max()
            assert error < 2e-5, (name, which, error)


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["routed", "dense"])
def test_new_adapters_change_no_bit(config):
    new = transformer.init_params(config, jax.random.key(0), adapters=EVERYWHERE)
    base, (graph, _) = params(config), transformer.abstract(config)
    expected = Weights.full(base).model(graph)(TOKENS).logits
    model = Weights(new, base).model(transformer.abstract(config, adapters=EVERYWHERE)[0])
    np.testing.assert_array_equal(model(TOKENS).logits, expected)
    for name, own in by_matrix(new).items():
        bound = 1 / np.sqrt(own["a"].shape[-2])
        assert not own["b"].any() and 0.9 * bound < np.abs(own["a"]).max() <= bound, name


@pytest.mark.slow
def test_a_mesh_changes_no_gradient():
    model = adapted(CONFIG)
    expected = gradient(model.graph, model.weights)
    mesh = mesh_lib.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})
    _, shapes = transformer.abstract(CONFIG, adapters=EVERYWHERE)
    placed = Weights(*lora.split(mesh_lib.param_shardings(shapes, mesh)))
    with jax.set_mesh(mesh):
        found = gradient(model.graph, jax.device_put(model.weights, placed))
    assert leaf_errors(expected, found) < 2e-5


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"expert": 8}, marks=pytest.mark.slow)], ids=["one device", "expert8"]
)
def test_no_gradient_of_the_base_is_computed(sizes, monkeypatch):
    """Outer products are those of adapters alone; on several devices there is no second copy of the base either."""
    widths = []

    def outer(rows, grads, group_sizes):
        widths.extend(g.shape[1] for g in grads)
        return blocked.outer(rows, grads, group_sizes)

    blocked = grouped_matmul._BLOCKED
    monkeypatch.setattr(grouped_matmul, "_BLOCKED", blocked._replace(outer=outer))
    model = adapted(CONFIG)
    run = jax.jit(jax.grad(lambda trainable, frozen: loss(model.graph, Weights(trainable, frozen))))
    with jax.set_mesh(mesh_lib.make_mesh(sizes, jax.devices()[: 8 if sizes else 1])):
        lowered = run.lower(model.weights.trainable, model.weights.frozen)
    # Of gate, up and down: A [·, 2], B [2, 16], [2, 16] and [2, 32]. The base's would be 16, 16 and 32 wide too.
    times = widths.count(32)
    assert times and collections.Counter(widths) == {2: 3 * times, 16: 2 * times, 32: times}
    if not sizes:
        return
    text = lowered.compile().as_text()
    assert text is not None
    made = re.findall(r"= f32\[([\d,]+)\]\S* (\w[\w-]*)\(", text)
    for shape in {w.shape for w in jax.tree.leaves(model.weights.frozen) if w.ndim > 2}:
        ops = {op for dims, op in made if dims == ",".join(map(str, shape))}
        assert ops <= {"parameter", "get-tuple-element", "copy", "bitcast"}, (shape, ops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kind", "shares"),
    [({"expert": 8}, "", True), ({"fsdp": 2, "expert": 4}, "", False), ({"expert": 8}, "int8", True)],
)
def test_sampler_and_trainer_compute_the_same_in_bfloat16(sizes, kind, shares, tmp_path):
    """With one base, or with a copy of it; the sampler's adapters are rounded, and its routers' are not."""
    config = cli.load_config("configs/tiny.py")
    config.update_from_flattened_dict({"adapter.rank": 3, "adapter.expert_rank": 2, "model.dtype": "bfloat16"})
    config.adapter.targets, config.adapter.base_dtype = tuple(lora.TARGETS), kind
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1} | sizes)
    meshes = make_meshes(config, CONFIG)
    made = policy.make_policy(config, CONFIG)
    sampler = engine.make_sampler(config, made, meshes, StopRule(max_length=8, eos_ids=(1,)))
    places = mesh_lib.param_shardings(made.shapes.trainable, meshes.trainer)
    huggingface.save(params(CONFIG), CONFIG, tmp_path / "base")
    stored = made.frozen(tmp_path / "base", meshes.trainer)
    weights = Weights(jax.device_put(adapted(CONFIG).weights.trainable, places), stored)
    with jax.set_mesh(meshes.sampler):
        copy = sampler.copied(weights)
    shared = [x is y for x, y in zip(jax.tree.leaves(copy.frozen), jax.tree.leaves(weights.frozen), strict=True)]
    assert all(shared) if shares else not any(shared)
    kinds = {path.rpartition(".")[0].rpartition(".")[2]: x.dtype for path, x in by_path(copy.trainable).items()}
    assert kinds["router_adapter"] == jnp.float32 and kinds["q_adapter"] == kinds["gate_adapter"] == jnp.bfloat16
    with jax.set_mesh(meshes.trainer):
        ours, theirs = (each.model(made.graph)(TOKENS) for each in (weights, copy))
    np.testing.assert_array_equal(ours.routes.experts, theirs.routes.experts)
    np.testing.assert_array_equal(ours.logits, theirs.logits)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rank": 4, "targets": ("q_prj",)}, r"adapter.targets has no 'q_prj'; did you mean 'q_proj'\? there are"),
        ({"expert_rank": 4, "expert_targets": ("router",)}, "adapter.expert_targets has no 'router'"),
        ({"rank": 4, "targets": ()}, "no matrix has an adapter; set adapter.rank or adapter.expert_rank, with targets"),
    ],
)
def test_mistakes(fields, says):
    with pytest.raises(UserError, match=says):
        Adapters(**fields)


def test_default_targets_are_all_matrices_but_those_that_steer():
    assert set(base().adapter.targets) == set(lora.TARGETS) - set(lora.STEERING)


@pytest.mark.parametrize(
    ("config", "adapters", "says"),
    [
        (DENSE, Adapters(expert_rank=4), "adapter.expert_rank is 4, and the model has no experts; set it to 0"),
        (CONFIG, Adapters(rank=4, targets=("up_proj",)), "adapter.targets is up_proj, none of .*; use some of q_proj,"),
    ],
)
def test_targets_that_the_model_does_not_have(config, adapters, says):
    with pytest.raises(UserError, match=says):
        lora.check(config, adapters)
