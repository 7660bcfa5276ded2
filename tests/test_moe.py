"""The mixture of experts equals an all-experts oracle on every mesh, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.models.moe import expert_parallel, route
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import MESHES, leaf_errors, mesh_id

B, T, D, E, F, K = 8, 3, 12, 8, 6, 2


def all_experts(x, experts, weights, gate, up, down):
    """Every expert on every token, then the chosen ones are summed."""
    h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    y = jnp.einsum("btef,efd->bted", h, down)
    chosen = (jax.nn.one_hot(experts, E) * weights[..., None]).sum(axis=2)
    return jnp.einsum("bted,bte->btd", y, chosen)


def inputs(load: str):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((B, T, D)), rng.random((B, T, K))
    kernels = [rng.standard_normal(s) for s in ((E, D, F), (E, D, F), (E, F, D))]
    experts = np.stack([rng.permutation(E)[:K] for _ in range(B * T)]).reshape(B, T, K)
    if load == "overloaded":
        experts[..., 0], experts[..., 1] = 3, np.where(experts[..., 1] == 3, 4, experts[..., 1])
    if load == "padded":
        experts[rng.random((B, T)) < 0.5] = E  # no expert
    return [jnp.asarray(x, jnp.float32), jnp.asarray(experts), jnp.asarray(weights, jnp.float32)] + [
        jnp.asarray(w, jnp.float32) for w in kernels
    ]


@pytest.mark.parametrize("load", ["random", "overloaded", "padded"])
@pytest.mark.parametrize("sizes", [None, *MESHES], ids=lambda s: mesh_id(s) if s else "no-mesh")
def test_dispatch_equals_the_oracle(sizes, load):
    args = inputs(load)
    target = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, D)), jnp.float32)

    def run(f):
        def loss(x, weights, *kernels):
            y = f(x, args[1], weights, *kernels)
            return (y * target).sum(), y

        grad = jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))
        return grad(args[0], *args[2:])

    expected = run(all_experts)
    if sizes is None:
        assert leaf_errors(expected, run(expert_parallel)) < 2e-6
        return
    mesh = mesh_lib.make_mesh(sizes)
    with jax.set_mesh(mesh):
        specs = [PartitionSpec(mesh_lib.BATCH_AXES)] * 3
        specs += [PartitionSpec("expert", "fsdp", "tensor")] * 2 + [PartitionSpec("expert", "tensor", "fsdp")]
        if D % mesh.shape["fsdp"] == 0:
            args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
        assert leaf_errors(expected, run(expert_parallel)) < 2e-6


def test_router_is_softmax_then_top_k_then_renormalise():
    """Worked by hand: softmax of log [4, 3, 2, 1] is [.4, .3, .2, .1]; the top two renormalise to 4/7 and 3/7."""
    logits = jnp.log(jnp.asarray([[[1.0, 4.0, 2.0, 3.0]]]))
    routes, weights = route(logits, k=2, renormalise=True)
    assert routes.experts.tolist() == [[[1, 3]]]
    np.testing.assert_allclose(weights, [[[4 / 7, 3 / 7]]], rtol=1e-6)
    np.testing.assert_allclose(routes.logprobs, np.log([[[0.4, 0.3]]]), rtol=1e-6)
    _, plain = route(logits, k=2, renormalise=False)
    np.testing.assert_allclose(plain, [[[0.4, 0.3]]], rtol=1e-6)
