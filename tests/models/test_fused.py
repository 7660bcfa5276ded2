"""A decode step of fused layers, its kernels in interpret mode on CPU, equals the plain XLA step of `Transformer`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from gspo_jax.kernels.backend import platform
from gspo_jax.kernels.kv import ScaledKV
from gspo_jax.models import fused, lora, transformer
from gspo_jax.models.cache import Cache, DecodeSlots, stored
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rows import ROWS
from gspo_jax.rollout.decoder import shard_over_batch
from gspo_jax.types import Weights
from tests.tiny import MIXED, mixed_family, mostly_slow  # noqa: F401

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
ROUTED = {"num_experts": 8, "experts_per_token": 3, "moe_intermediate_size": 16}
QWEN, DENSE = ModelConfig(**SIZES, **ROUTED), ModelConfig(**SIZES)
OLMOE = ModelConfig(**SIZES, **ROUTED, family="olmoe", norm_topk_prob=False)
LLAMA = ModelConfig(**SIZES, family="llama")
ADAPTERS = lora.Adapters(rank=2, expert_rank=3, targets=tuple(lora.TARGETS))
SLOTS, PROMPTS, GROUP, COLUMNS, PAGE, PAGES = 4, 2, 3, 5, 8, 3
"""Slots, prompts, responses per prompt, prompt columns, columns of a page, and pages of a slot; of a batch shard."""


def weights(config, adapters, base):
    """Return the graph and random weights: norms that differ, adapters that change something, int8 of a usual size."""
    graph, state = nnx.split(transformer._make(config, nnx.Rngs(0), adapters, base))
    rng = np.random.default_rng(0)

    def one(path, x):
        if x.dtype == jnp.int8:
            return rng.integers(-127, 128, x.shape).astype(np.int8)
        name = jax.tree_util.keystr(path)
        if "_scale" in name:
            return rng.uniform(1e-3, 4e-3, x.shape).astype(np.float32)
        return (rng.uniform(0.5, 1.5, x.shape) if "norm" in name else rng.normal(0, 0.3, x.shape)).astype(np.float32)

    return graph, Weights.full(jax.tree.map_with_path(one, state))


def step(config, sizes, monkeypatch, *, adapters=None, base="trained", cache_dtype=None, queries=1):
    """Return logits and routes of what is fed and the live pools after a step, fused and plain, of all batch shards.

    Of `queries` tokens, the first slots feed all, none, all and one, others any number.
    """
    graph, own = weights(config, adapters, base)
    mesh = mesh_lib.make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))]) if sizes else None
    shards = mesh_lib.batch_shards(dict(mesh.shape)) if mesh else 1
    rng, (L, Kv, h), M = np.random.default_rng(1), (config.num_layers, config.num_kv_heads, config.head_dim), 14
    B = shards * SLOTS

    def draw(*shape):
        return stored(jnp.asarray(rng.standard_normal(shape), jnp.float32), cache_dtype)

    prompts = tuple(draw(L, shards * PROMPTS, Kv, COLUMNS, h) for _ in range(2))
    pools = tuple(draw(L, shards * M, Kv, PAGE, h) for _ in range(2))
    by_shard = [rng.permutation(M)[: SLOTS * PAGES].reshape(SLOTS, PAGES) for _ in range(shards)]
    responses = np.concatenate([rng.permutation(PROMPTS * GROUP)[:SLOTS] for _ in range(shards)])
    ages = rng.integers(1, PAGE * PAGES + 1, B)
    ages[:4] = [1, 0, PAGE * PAGES - queries + 1, PAGE + 1]
    fed = np.minimum(rng.integers(1, queries + 1, B), PAGE * PAGES + 1 - ages)
    fed[:4] = [queries, 0, queries, 1]
    at = np.arange(queries)[None]
    ages = np.where(at < fed[:, None], ages[:, None] + at, 0)
    lengths = rng.integers(1, COLUMNS + 1, shards * PROMPTS)
    rows = rng.integers(0, config.vocab_size, ages.shape), responses, ages, lengths, np.concatenate(by_shard)
    live = np.ones((shards * M, PAGE), bool)
    for slot in np.flatnonzero(ages.max(axis=1)) if queries > 1 else ():  # dead columns may change
        for t in range(ages[slot].max(), PAGE * PAGES):
            live[slot // SLOTS * M + rows[4][slot, t // PAGE], t % PAGE] = False

    def one(weights, rows, prompts, pools):
        tokens, responses, ages, lengths, table = rows
        cache = Cache(*prompts, lengths, *pools, table, GROUP)
        out, cache = weights.model(graph).decode(tokens, DecodeSlots(responses, ages), cache)
        return out.logits, out.routes, (cache.k, cache.v)

    def run():
        columns = PartitionSpec(None, mesh_lib.BATCH_AXES)
        specs = {"in_specs": (ROWS, columns, columns), "out_specs": (ROWS, columns, columns)}
        arguments = jax.tree.map(jnp.asarray, (rows, prompts, pools))
        jitted = jax.jit(lambda weights, *x: shard_over_batch(one, weights, x, **specs))
        if mesh is None:
            return jitted(own, *arguments)
        with jax.set_mesh(mesh):
            return jitted(jax.device_put(own, mesh_lib.param_shardings(own, mesh, mesh_lib.SAMPLER)), *arguments)

    def found():
        logits, routes, pools = jax.tree.map(np.asarray, run())
        active, pools = ages > 0, jax.tree.map(lambda x: np.moveaxis(x, 3, 2)[:, live], pools)
        return logits[active], routes.experts[:, active], routes.logprobs[:, active], pools

    plain, asked = found(), []

    def interpreted(*arguments):
        asked.append(1)
        return decode(*arguments, interpret=True)

    decode = fused.decode
    monkeypatch.setattr(fused, "platform", lambda: "tpu")
    monkeypatch.setattr(fused, "_fits", lambda config, cache: True)
    monkeypatch.setattr(fused, "decode", interpreted)
    ours = found()
    return ours, plain, bool(asked)


def check(*arguments, **options):
    """Assert equal routes and tokens, and logits and pools equal to rounding; of an int8 pool, to a unit at most."""
    (logits, experts, logprobs, pools), (logits_2, experts_2, logprobs_2, pools_2), asked = step(*arguments, **options)
    assert asked
    np.testing.assert_array_equal(experts, experts_2)
    np.testing.assert_array_equal(logits.argmax(axis=-1), logits_2.argmax(axis=-1))
    np.testing.assert_allclose(logits, logits_2, atol=1e-4 * np.abs(logits_2).max())
    np.testing.assert_allclose(logprobs, logprobs_2, atol=1e-4)
    for a, b in zip(pools, pools_2, strict=True):
        a, b = ((x.values * x.scale[..., None] if isinstance(x, ScaledKV) else x) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


ALL = {"base": "int8", "adapters": ADAPTERS, "cache_dtype": "int8"}
KINDS = {"qwen3": (QWEN, {}), "olmoe": (OLMOE, {}), "llama": (LLAMA, {}), "mixed, all in int8": (MIXED, ALL)}


@pytest.mark.parametrize("kind", mostly_slow(KINDS, always=["qwen3"]))
def test_the_fused_step_equals_the_plain_one(kind, monkeypatch, mixed_family):  # noqa: F811
    config, options = KINDS[kind]
    check(config, None, monkeypatch, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "mixed, all in int8"])
def test_several_tokens_of_a_slot(kind, monkeypatch, mixed_family):  # noqa: F811
    config, options = KINDS[kind]
    check(config, None, monkeypatch, **options, queries=3)


MESHES = [
    (QWEN, {"data": 2, "expert": 2, "tensor": 2}, {}),
    (QWEN, {"data": 1, "tensor": 2}, ALL),
    (DENSE, {"data": 1, "tensor": 2}, {"adapters": ADAPTERS}),
    (QWEN, {"data": 2, "expert": 2}, {"base": "frozen"}),
    (OLMOE, {"data": 1, "expert": 4}, ALL),
]
"""Model, mesh, and kind. A frozen base and one in int8 are spread over `expert`."""


@pytest.mark.slow
@pytest.mark.parametrize(("config", "sizes", "options"), MESHES)
def test_the_fused_step_equals_the_plain_one_on_meshes(config, sizes, options, monkeypatch):
    check(config, sizes, monkeypatch, **options, queries=2)


def test_other_layers_take_the_plain_step(monkeypatch):
    """One function decides: by platform, by whole tiles, and by layers. Here heads have 8 columns, not 64."""
    model = transformer._make(QWEN, nnx.Rngs(0))
    keys, one = jnp.zeros((2, 1, 2, 16, 64)), jnp.ones(1, jnp.int32)
    cache = Cache(keys, keys, one, keys, keys, one[None], 1)
    wide = ModelConfig(**SIZES | {"head_dim": 64, "hidden_size": 128}, **ROUTED)
    assert platform() == "cpu" and not fused.applies(wide, model.layers, cache)
    monkeypatch.setattr(fused, "platform", lambda: "tpu")
    assert fused.applies(wide, model.layers, cache)
    assert not fused.applies(QWEN, model.layers, cache)
    model.layers[0].mlp.choose = partial(model.layers[0].mlp.choose)
    assert not fused.applies(wide, model.layers, cache), "a router of a family's own"
