"""A minimal mixture-of-experts model with every component of a real one, and helpers to place it on a mesh."""

import contextlib
import dataclasses
import functools
import shutil
import types
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gspo_jax.models import families, huggingface, tensors, transformer
from gspo_jax.models.config import Latent, ModelConfig, YarnRope
from gspo_jax.models.families import qwen3
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import decoder
from gspo_jax.rollout.drafting import NO_DRAFTS
from gspo_jax.rollout.loop import Decoded
from gspo_jax.training.packing import Packer, tokens_at_full_length
from gspo_jax.types import Batch, KeptRecord, Packing, Prompts, Responses, Rollout, RouterRecord, Weights

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=16,
)

LATENT = ModelConfig(
    family="deepseek_v3",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    intermediate_size=48,
    latent=Latent(rank=16, query_rank=24, plain_dim=6, value_dim=12, interleaved=True),
    num_experts=8,
    dense_layers=1,
    experts_per_token=2,
    moe_intermediate_size=16,
    expert_groups=4,
    groups_per_token=2,
    routed_scaling_factor=2.5,
    shared_intermediate_size=16,
    attention_bias=True,
    rope_theta=100.0,
    rope_scaling=YarnRope(factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3),
)
"""Latent attention, whose values are wider than its keys: one dense layer, then a routed one."""


def blurred(model: Path, folder: Path) -> Path:
    """Copy a model's folder, with noise of half their standard deviation in its weights; return `folder`."""
    rng = np.random.default_rng(0)
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: x + 0.5 * x.std() * rng.standard_normal(x.shape).astype(x.dtype) for name, x in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


MIXED = dataclasses.replace(CONFIG, family="mixed", num_layers=3)
"""One dense layer, then a stack of two routed layers; its tests use the fixture `mixed_family`."""


def _mixed_stacks(config: ModelConfig) -> tuple:
    dense, routed = (dataclasses.replace(config, num_layers=n, num_experts=e) for n, e in ((1, 0), (2, 8)))
    return (*qwen3.stacks(dense), *qwen3.stacks(routed))


@pytest.fixture
def mixed_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the family of `MIXED` for the test."""
    attention = tensors.ATTENTION | tensors.HEAD_NORMS
    own = {
        "stacks": _mixed_stacks,
        "rules": lambda config, names: tensors.of_model(
            config, attention | tensors.DENSE, attention | tensors.experts(names)
        ),
    }
    monkeypatch.setitem(families.FAMILIES, "mixed", types.SimpleNamespace(**vars(qwen3) | own))


EIGHT = {"data": 2, "fsdp": 2, "expert": 2}
MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"expert": 8},
    EIGHT,
    {"data": 2, "expert": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 2},
]
"""Meshes of eight devices that can shard the tiny model."""


@contextlib.contextmanager
def full_optimisation() -> Iterator[None]:
    """Compile as outside the tests, with the passes that conftest.py turns off."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def mostly_slow(cases: Iterable[Any], *, always: Container[Any]) -> list:
    """Return a parametrised test's cases, with those not in `always` marked `slow`."""
    marks = {False: pytest.mark.slow, True: ()}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in always]) for case in cases
    ]


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Have meshes consist of one device, as those of `single` of configs/tiny.py in a process of its own.

    Compiling for it takes less than half of the time, if `sampling.slots` are at most four, which are never halved.
    """
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        patch.setattr(jax, "device_count", lambda *_: 1)
        yield


def mesh_id(sizes: dict[str, int]) -> str:
    """Return a mesh's id for parametrised tests."""
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


@functools.cache
def _host_params(config: ModelConfig, scale: float) -> nnx.State:
    rng = np.random.default_rng(0)

    def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return np.ones(shape.shape, np.float32)
        return rng.normal(0, 0.02 * scale if "layers" in name else 0.02, shape.shape).astype(np.float32)

    return jax.tree.map_with_path(leaf, transformer.abstract(config)[1])


def params(config: ModelConfig = CONFIG, scale: float = 4.0) -> nnx.State:
    """Return random parameters in fresh buffers, without compiling `init_params`.

    The layers' are `scale` times as large as `init_params`'s, so that logits and router probabilities vary.
    """
    return jax.tree.map(jnp.array, _host_params(config, scale))


def weights(config: ModelConfig = CONFIG) -> Weights:
    """Return the random parameters as weights, all trainable."""
    return Weights.full(params(config))


def load_model(
    folder: Path, mesh: jax.sharding.Mesh | None = None, *, dtype=jnp.float32, param_dtype=jnp.float32
) -> tuple[transformer.Transformer, ModelConfig]:
    """Return a Hugging Face folder's model, which computes in `dtype`, and its config."""
    config = huggingface.read_config(folder)
    graph, _ = transformer.abstract(config, dtype=dtype)
    return nnx.merge(graph, huggingface.load_params(folder, config, mesh, dtype=param_dtype)), config


def save_model(model: transformer.Transformer, config: ModelConfig, folder: Path, **options) -> None:
    """Write a model as a Hugging Face folder."""
    huggingface.save(nnx.state(model), config, folder, **options)


def place(state: nnx.State, mesh: jax.sharding.Mesh, config: ModelConfig = CONFIG) -> nnx.State:
    """Return the parameters sharded in the trainer's layout."""
    return jax.device_put(state, mesh_lib.param_shardings(transformer.abstract(config)[1], mesh))


def prompts(P: int = 8, S: int = 10, seed: int = 0, vocab: int = 64) -> Prompts:
    """Return random prompts of random lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, S + 1, P).astype(np.int32)
    lengths[0] = S
    tokens = rng.integers(1, vocab, (P, S)).astype(np.int32)
    return Prompts(np.where(np.arange(S)[None] < lengths[:, None], tokens, 0), lengths)


def responses(P: int, G: int, T: int) -> Rollout:
    """Return G responses of random tokens to each of P prompts, 1 to T long, which no sampler has scored or routed."""
    asked, rng, B = prompts(P=P), np.random.default_rng(1), P * G
    lengths = rng.permutation(np.arange(B) % T + 1)
    mask = np.arange(T)[None] < lengths[:, None]
    nothing = np.zeros((B, T), np.float32)
    return Rollout(
        prompts=np.repeat(asked.tokens, G, axis=0),
        prompt_lengths=np.repeat(asked.lengths, G),
        tokens=np.where(mask, rng.integers(1, CONFIG.vocab_size, (B, T)), 0).astype(np.int32),
        mask=mask,
        action_mask=mask,
        truncated=lengths == T,
        behaviour_logprobs=nothing,
        logprobs=nothing,
        routes=RouterRecord(np.full((B, asked.tokens.shape[1] + T, *CONFIG.route_shape), -1, np.int8), None),
    )


def some_kept(rollout: Rollout, K: int = 5) -> KeptRecord:
    """Return kept ids with each token among them, of which half are whole, with a sampler's probabilities."""
    rng, V, shape = np.random.default_rng(4), CONFIG.vocab_size, rollout.mask.shape
    ids = (rollout.tokens[..., None] + np.cumsum(rng.integers(1, V // K, (*shape, K)), axis=2)) % V
    ids[..., 1] = rollout.tokens
    used, whole = np.arange(K) < rng.integers(2, K + 1, (*shape, 1)), rng.random(shape) < 0.5
    used &= rollout.mask[..., None]
    left = np.where(used, rng.random((*shape, K)), 0)
    left /= np.maximum(left.sum(axis=2, keepdims=True), 1e-9) * np.where(whole, 1, 1.2)[..., None]
    logprobs = np.where(used, np.log(np.where(used, left, 1)), 0)
    return KeptRecord(np.where(used, ids, -1).astype(np.int32), logprobs.astype(np.float32), whole & rollout.mask)


def packed(
    rollout: Responses, *, group_size: int, minibatches: int = 1, shards: int = 1, turns: int | None = None
) -> Packing:
    """Return rows that compute the responses: one on each shard, or the shortest of which each takes `turns`."""
    columns = np.asarray(rollout.mask).sum(axis=1), np.asarray(rollout.prompt_lengths)
    size = {"prompt": rollout.prompts.shape[1], "response": rollout.tokens.shape[1]}
    own = len(columns[0]) // minibatches // shards
    most = max(tokens_at_full_length(own, **size, group_size=group_size), sum(size.values()))
    for budget in [most] if turns is None else range(sum(size.values()), most + 1):
        packing = Packer(group_size=group_size, minibatches=minibatches, shards=shards, row_lengths=(budget,))(*columns)
        if turns is None or packing.turns[-1, 0] == turns:
            return packing
    raise AssertionError(f"no budget gives {turns} micro-batches")


def dealt(batch: Batch, packing: Packing) -> Batch:
    """Return a batch whose arrays are [B, …] in the places of a packing, by NumPy's indexing."""

    def places(x) -> np.ndarray:
        x, live = np.asarray(x), packing.responses >= 0
        return np.where(live.reshape(*live.shape, *(1,) * (x.ndim - 1)), x[packing.responses], np.zeros((), x.dtype))

    return dataclasses.replace(jax.tree.map(places, batch), packing=packing)


def generate(
    graph,
    weights,
    prompts,
    keys,
    *,
    slots=None,
    pool=None,
    limits=None,
    prefix=None,
    sampling,
    stop,
    min_ended=1.0,
    drafting=NO_DRAFTS,
    **prefill,
) -> Decoded:
    """Return the decoder's responses to prompts, in so many slots, all for None."""
    prefilled = decoder.prefill(graph, weights, prompts, keys, prefix, sampling=sampling, **prefill)
    options = {"sampling": sampling, "stop": stop, "slots": slots or len(keys), "pool": pool, "min_ended": min_ended}
    options["drafting"] = drafting
    return decoder.decode(graph, weights, prefilled, keys, limits, **options)


def leaf_errors(a, b) -> float:
    """Return the largest difference of two trees of arrays, relative to each leaf's largest entry."""
    pairs = zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True)
    return max(float(np.abs(x - y).max() / (np.abs(x).max() + 1e-30)) for x, y in pairs)
