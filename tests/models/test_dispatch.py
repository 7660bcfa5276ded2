"""Every dispatch matches a dense all-experts oracle, forward and backward, on every mesh; a new dispatch adds a row."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.kernels.adapted_matmul import LowRank
from gspo_jax.models import dispatch as dispatch_lib
from gspo_jax.models.dispatch import DISPATCHES, exchange
from gspo_jax.models.experts import ExpertKernels, room_for
from gspo_jax.models.matrices import Matrix
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import leaf_errors, mesh_id, mostly_slow

B, T, D, E, F, K = 8, 4, 12, 8, 6, 2

MESHES = [
    {},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"expert": 4, "fsdp": 2},
    {"expert": 8},
]
"""No mesh, then expert parallelism of 1, 2, 4 and 8 combined with other axes."""
ALWAYS = [MESHES[2]]
ALIKE = {("", "ragged_all_to_all"), ("data2-fsdp2-tensor2", "gather"), ("expert4-fsdp2", "gather")}
"""Left out: without expert parallelism nothing is exchanged, and gathers are tried on 2 and 8 shards."""


def all_experts(x, experts, weights, kernels):
    """Run every expert on every token, then combine the chosen outputs with their weights."""
    gate, up, down = (matrix.weights for matrix in kernels)
    h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    y = jnp.einsum("btef,efd->bted", h, down)
    chosen = (jax.nn.one_hot(experts, E) * weights[..., None]).sum(axis=2)
    return jnp.einsum("bted,bte->btd", y, chosen)


def routed(load):
    """Return expert ids int32 [B, T, K], distinct within a token, with the given kind of load."""
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(E)[:K] for _ in range(B * T)]).reshape(B, T, K).astype(np.int32)
    if load == "one expert":
        experts[..., 0], experts[..., 1] = 3, np.where(experts[..., 1] == 3, 4, experts[..., 1])
    if load == "one shard":
        experts = experts % 2
        experts[..., 1] = 1 - experts[..., 0]
    if load == "padded":
        experts[rng.random((B, T)) < 0.5] = E  # one past the last id: no expert
        experts[rng.random((B, T)) < 0.1] = -1  # -1: no expert either
    return experts


@functools.cache
def numbers():
    """Return tokens, routing weights, expert kernels and the output cotangent."""
    rng = np.random.default_rng(1)
    shapes = (B, T, D), (B, T, K), (E, D, F), (E, D, F), (E, F, D), (B, T, D)
    x, weights, *kernels, target = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    return x, weights, ExpertKernels(*map(Matrix, kernels)), target


def reference_ragged(operand, output, sent_from, sent, lands_at, received, *, axis_name):
    """Return what `jax.lax.ragged_all_to_all` documents, built from portable collectives; NaN if the sizes disagree."""
    shards, me, rows = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    operands = jax.lax.all_gather(operand, axis_name)
    plans = jax.lax.all_gather(jnp.stack([sent_from, sent, lands_at]), axis_name).reshape(shards, 3, shards, -1)[
        :, :, me
    ]
    for source, slices in zip(operands, plans, strict=True):
        for start, size, at in slices.T:
            inside = (rows >= at) & (rows < at + size)
            inside = inside.reshape(-1, *(1,) * (output.ndim - 1))
            output = jnp.where(inside, source.at[rows - at + start].get(mode="clip"), output)
    return jnp.where((plans[:, 1].reshape(-1) == received).all(), output, jnp.nan)


def gradients(f):
    """Return a function of (ids, weights) to the gradients in x, weights and the three kernels, and y."""

    def loss(x, weights, kernels, experts, target):
        y = f(x, experts, weights, kernels)
        return (y * target).sum(), y

    grad = jax.jit(jax.grad(loss, argnums=range(3), has_aux=True))
    x, weights, kernels, target = numbers()
    return lambda experts, weights=weights: grad(x, weights, kernels, experts, target)


@functools.cache
def compiled(name, dispatch):
    """Return a dispatch's gradient function, compiled once for all loads.

    `ragged_all_to_all` does not compile on CPU; its reference implementation replaces it.
    """
    mesh = next(m for m in MESHES if mesh_id(m) == name)
    run = gradients(functools.partial(exchange, dispatch=dispatch))
    if not mesh:
        return run

    def on_mesh(*args):
        with jax.set_mesh(mesh_lib.make_mesh(mesh)), ragged_on_cpu():
            return run(*args)

    return on_mesh


@contextlib.contextmanager
def ragged_on_cpu():
    with (
        mock.patch.object(dispatch_lib, "check_dispatch"),
        mock.patch.object(jax.lax, "ragged_all_to_all", reference_ragged),
    ):
        yield


@functools.cache
def oracle():
    """Return the oracle's gradient function."""
    return gradients(all_experts)


@pytest.mark.parametrize("load", ["random", "one expert", "one shard", "padded"])
@pytest.mark.parametrize(
    ("mesh", "dispatch"),
    mostly_slow(
        [(mesh, name) for mesh in MESHES for name in DISPATCHES if (mesh_id(mesh), name) not in ALIKE],
        always=[(mesh, name) for mesh in ALWAYS for name in DISPATCHES],
    ),
    ids=lambda x: x if isinstance(x, str) else mesh_id(x) or "none",
)
def test_dispatch_equals_the_oracle(mesh, dispatch, load):
    """Output and all gradients agree to 2e-6."""
    experts = routed(load)
    assert leaf_errors(oracle()(experts), compiled(mesh_id(mesh), dispatch)(experts)) < 2e-6


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("load", ["random", "one expert", "padded"])
def test_a_forward_has_room_for_every_load(load, layer):
    """Without a gradient, on 8 shards, the usual buffers hold 16 of 32 pairs; every load gets through all the same.

    The random load fits, the 32 pairs of one expert do not. A layer is read from a stack whose other layer is NaN.
    """
    experts = jnp.asarray(routed(load))
    x, weights, kernels, _ = numbers()
    given = kernels if layer is None else jax.tree.map(lambda w: jnp.stack([jnp.full_like(w, jnp.nan), w]), kernels)
    held = np.bincount(experts.reshape(-1)[(experts.reshape(-1) >= 0) & (experts.reshape(-1) < E)], minlength=E)
    assert (held.max() > room_for(B * T, B * T * K // 8)) == (load == "one expert")
    with jax.set_mesh(mesh_lib.make_mesh({"expert": 8})):
        y = jax.jit(functools.partial(exchange, dispatch="gather"))(
            x, experts, weights, given, layer=None if layer is None else jnp.asarray(layer)
        )
    assert leaf_errors(all_experts(x, experts, weights, kernels), y) < 2e-6


@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize("load", ["random", "one expert", "one shard", "padded"])
def test_blocks_of_pairs_equal_the_oracle(load, is_few):
    """Without a gradient `ragged_all_to_all` sends blocks of 8 rows, in a buffer for all pairs or in several passes.

    Each of 4 shards sends at most 2 blocks to each of the other's 2 experts: up to 16 where all choose one, and 8 fit.
    """
    experts = jnp.asarray(routed(load))
    x, weights, kernels, _ = numbers()
    given = jax.tree.map(lambda w: jnp.stack([jnp.full_like(w, jnp.nan), w]), kernels)
    rooms = {"_FEW": 2**17 if is_few else 0, "_ROOM": 1}
    with (
        jax.set_mesh(mesh_lib.make_mesh({"expert": 4, "tensor": 2})),
        ragged_on_cpu(),
        mock.patch.multiple(dispatch_lib, **rooms),
    ):
        room, most, _ = dispatch_lib.block_rooms(B * T // 4, K, E // 4, 4)
        y = jax.jit(functools.partial(exchange, dispatch="ragged_all_to_all"))(
            x, experts, weights, given, layer=jnp.asarray(1)
        )
    assert (room < most) == (not is_few)
    assert leaf_errors(all_experts(x, experts, weights, kernels), y) < 2e-6


def test_no_buffer_is_for_the_worst_case():
    """There is room for 16 pairs at a shard with one expert, where 32 may arrive, and 8 do if experts are balanced."""
    x, weights, kernels, _ = numbers()
    experts = jnp.asarray(routed("random"))

    def loss(x, weights, kernels):
        return exchange(x, experts, weights, kernels, dispatch="gather").sum()

    with jax.set_mesh(mesh_lib.make_mesh({"expert": 8})):
        text = jax.jit(jax.grad(loss, argnums=range(3))).lower(x, weights, kernels).as_text()
    assert f"tensor<16x{F}xf32>" in text
    assert f"tensor<32x{F}xf32>" not in text


def test_a_token_without_experts_touches_nothing():
    """A token with no expert outputs zero and leaves the others bitwise unchanged, even if its value is infinite."""
    x, weights, kernels, _ = numbers()
    experts = jnp.asarray(routed("padded"))
    nowhere = ((experts < 0) | (experts >= E)).all(axis=-1, keepdims=True)
    run = jax.jit(functools.partial(exchange, dispatch="gather"))
    y, y_ = (run(jnp.where(nowhere, fill, x), experts, weights, kernels) for fill in (jnp.inf, 0))
    assert nowhere.any()
    assert not y[nowhere[..., 0]].any()
    np.testing.assert_array_equal(y, y_)


def test_bfloat16_stays_bfloat16():
    x, weights, kernels, _ = numbers()
    low, narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, kernels))
    y = jax.jit(functools.partial(exchange, dispatch="gather"))(low, routed("random"), weights, narrow)
    assert y.dtype == jnp.bfloat16
    expected = all_experts(x, jnp.asarray(routed("random")), weights, kernels)
    assert leaf_errors(expected, y.astype(jnp.float32)) < 2e-2


def test_ragged_all_to_all_is_refused_on_cpu():
    """The error is raised while tracing. An expert axis of size one exchanges nothing and is allowed."""
    x, weights, kernels, _ = numbers()
    ragged = functools.partial(exchange, dispatch="ragged_all_to_all")
    with (
        jax.set_mesh(mesh_lib.make_mesh({"expert": 8})),
        pytest.raises(UserError, match="does not compile on cpu, only on tpu; use 'gather'"),
    ):
        jax.eval_shape(ragged, x, jnp.asarray(routed("random")), weights, kernels)
    with jax.set_mesh(mesh_lib.make_mesh({"data": 8})):
        jax.eval_shape(ragged, x, jnp.asarray(routed("random")), weights, kernels)


@contextlib.contextmanager
def picked_on_cpu():
    """Interpret the kernel, which knows no axes that values vary over."""
    with (
        mock.patch.object(dispatch_lib, "_takes_picked", lambda *_: True),
        mock.patch.object(dispatch_lib, "_picked", functools.partial(dispatch_lib._picked, interpret=True)),
        mock.patch.object(jax, "shard_map", functools.partial(jax.shard_map, check_vma=False)),
    ):
        yield


@pytest.mark.parametrize("mesh", [{"expert": 4, "tensor": 2}, {"data": 8}], ids=mesh_id)
@pytest.mark.parametrize("load", ["random", "one expert", "padded"])
def test_tokens_that_are_picked_equal_the_oracle(load, mesh):
    """The experts' kernel of a decode step beside layers that it does not know, with and without a gather of tokens."""
    experts = jnp.asarray(routed(load))
    x, weights, kernels, _ = numbers()
    given = jax.tree.map(lambda w: jnp.stack([jnp.full_like(w, jnp.nan), w]), kernels)
    x = jnp.where(((experts < 0) | (experts >= E)).all(axis=-1, keepdims=True), jnp.inf, x)
    with jax.set_mesh(mesh_lib.make_mesh(mesh)), picked_on_cpu():
        run = jax.jit(functools.partial(exchange, dispatch="gather"))
        y = run(x, experts, weights, given, layer=jnp.asarray(1))
    expected = all_experts(jnp.where(jnp.isfinite(x), x, 0), experts, weights, kernels)
    assert leaf_errors(expected, y) < 2e-6


def test_picked_tokens_have_the_scales_and_adapters_of_their_layer():
    """Int8 weights are of all layers, what stands beside them of one."""
    rng, (x, weights, kernels, _) = np.random.default_rng(2), numbers()

    def adapted(m):
        (e, n, w), scale = m.weights.shape, jnp.abs(m.weights).max(axis=1) / 127
        low = LowRank(*(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((e, n, 3), (e, 3, w))), 0.5)
        rounded = jnp.round(m.weights / scale[:, None]).astype(jnp.int8)
        return Matrix(jnp.stack([jnp.zeros_like(rounded), rounded]), scale, low)

    given = ExpertKernels(*map(adapted, kernels))
    whole = (m.weights[1] * m.scale[:, None] + m.low.scale * m.low.a @ m.low.b for m in given)
    experts = jnp.asarray(routed("random"))
    with jax.set_mesh(mesh_lib.make_mesh({"expert": 4, "tensor": 2})), picked_on_cpu():
        run = jax.jit(functools.partial(exchange, dispatch="gather"))
        y = run(x, experts, weights, given, layer=jnp.asarray(1))
    assert leaf_errors(all_experts(x, experts, weights, ExpertKernels(*map(Matrix, whole))), y) < 1e-5
