"""Latent attention: the absorbed step equals the expanded forward, with a cache of latents alone, on any mesh."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.kernels.attention import SlotRows, decode_attention
from gspo_jax.models import flops, huggingface, lora, peft, transformer
from gspo_jax.models.cache import Cache, DecodeSlots, empty_pool, heads_first, stored
from gspo_jax.models.latent import LatentAttention
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rows import shards
from gspo_jax.rollout import polled
from gspo_jax.rollout.decoder import decode, make_reshard, prefill, response_keys
from gspo_jax.rollout.drafting import NO_DRAFTS
from gspo_jax.rollout.pages import Pool
from gspo_jax.rollout.prefixes import Prefix, pack
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.setup.memory import token_bytes
from gspo_jax.types import Weights
from tests.tiny import LATENT, generate, leaf_errors, mesh_id, mostly_slow, params, place, prompts

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = LATENT.latent


def without_queries_latent(config=LATENT):
    """Return the model with queries made of the residual stream."""
    return dataclasses.replace(config, latent=dataclasses.replace(SIZES, query_rank=None))


def filled(shapes, seed=0):
    """Return random values for all parameters, int8 ones and scales too."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = jax.tree_util.keystr(path)
        if x.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8)
        if "_scale" in name:
            return jnp.asarray(rng.uniform(0.0005, 0.0015, x.shape), jnp.float32)
        return jnp.asarray(rng.uniform(0.5, 1.5, x.shape) if "norm" in name else rng.normal(0, 0.1, x.shape), x.dtype)

    return jax.tree.map_with_path(leaf, shapes)


def stepped_and_whole(net, T=3):
    """Return the logits of T steps after prompts, and of one forward of prompts and tokens. One length for all."""
    asked = jnp.asarray(prompts(P=2, S=6).tokens)
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, 64, (2, T)))
    _, kept = net.prefill(asked)
    k, v = map(heads_first, (kept.k, kept.v))
    pools = (empty_pool(x, 2, 4) for x in (k, v))
    cache, found = Cache(k, v, jnp.full(2, 6), *pools, jnp.arange(2)[:, None], 1), []
    for t in range(T):
        slots = DecodeSlots(jnp.arange(2), jnp.full((2, 1), t + 1), aligned=True)
        step, cache = net.decode(tokens[:, t, None], slots, cache)
        found.append(step.logits)
    whole = net(jnp.concatenate([asked, tokens], axis=1)).logits
    return jnp.concatenate(found, axis=1), whole[:, 6:]


@pytest.mark.parametrize(
    ("config", "base", "rank"),
    mostly_slow([(LATENT, "int8", 4), (without_queries_latent(), "trained", 0)], always=[(LATENT, "int8", 4)]),
    ids=["int8 and adapters", "queries without a latent"],
)
def test_a_step_equals_the_forward(config, base, rank):
    """kv_b goes into queries and outputs with its scales and its adapter."""
    adapters = lora.Adapters(rank=rank, targets=tuple(lora.TARGETS)) if rank else None
    graph, shapes = transformer.abstract(config, base=base, adapters=adapters)
    run = jax.jit(lambda w: stepped_and_whole(nnx.merge(graph, w)))
    stepped, whole = run(filled(shapes))
    assert float(jnp.abs(whole).max()) > 0.3
    np.testing.assert_allclose(stepped, whole, atol=1e-4)


@pytest.mark.slow
def test_steps_by_the_attention_kernel_equal_the_forward(monkeypatch):
    """As on TPU, in layers that the fused step does not know."""
    monkeypatch.setattr(transformer.fused, "attends", lambda *_: True)
    monkeypatch.setattr(transformer, "attend_paged", partial(transformer.attend_paged, interpret=True))
    graph, shapes = transformer.abstract(LATENT)
    stepped, whole = jax.jit(lambda w: stepped_and_whole(nnx.merge(graph, w)))(filled(shapes))
    np.testing.assert_allclose(stepped, whole, atol=1e-4)


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("aligned", [True, False])
def test_without_values_keys_are_the_values(dtype, aligned):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(4, 1, 4, 8)), jnp.float32)
    prompt, own = (
        stored(jnp.asarray(rng.normal(size=s), jnp.float32), dtype) for s in ((2, 2, 1, 5, 8), (2, 4, 1, 3, 8))
    )
    active, responses = jnp.ones(4, bool), jnp.arange(4)
    where = {"layer": jnp.int32(1), "table": jnp.arange(4)[:, None], "ages": jnp.asarray([[1], [2], [3], [2]])}
    where["rows"] = None if aligned else SlotRows.of(responses, active, 2, 2)
    lengths = jnp.asarray([5, 3])
    with_values = decode_attention(q, prompt, prompt, lengths, own, own, **where)
    np.testing.assert_array_equal(decode_attention(q, prompt, None, lengths, own, None, **where), with_values)


def test_a_cache_holds_latents_alone():
    """[c | p] of one head, whole on every shard of `tensor`."""
    net = nnx.merge(transformer.abstract(LATENT)[0], params(LATENT))
    kept = jax.eval_shape(lambda: net.prefill(jnp.asarray(prompts().tokens))[1])
    assert kept.v is None
    assert kept.k.shape == (2, 8, 10, 1, 20)
    config = base()
    config.model.dtype = "bfloat16"
    assert token_bytes(config, LATENT, {"tensor": 1}) == token_bytes(config, LATENT, {"tensor": 2}) == 2 * 20 * 2
    config.sampling.cache_dtype = "int8"
    assert token_bytes(config, LATENT, {"tensor": 2}) == 2 * (20 + 4)


ROUTED = dataclasses.replace(LATENT, dense_layers=0)
KEYS, LIMIT = response_keys(jax.random.key(1), jnp.arange(16)), 12
SETTINGS = {"sampling": SamplingParams(), "stop": StopRule(max_length=LIMIT, eos_ids=(3,))}


def alone(**options):
    graph, _ = transformer.abstract(ROUTED)
    given = graph, Weights.full(params(ROUTED)), prompts(P=4), KEYS
    return jax.device_get(generate(*given, **SETTINGS, **options, slots=4)[0])


@pytest.fixture(scope="module")
def unbroken():
    """Return 16 responses of one call on one device."""
    return alone()


def prefix_of(rollout, lengths):
    """Return the first tokens of responses, cut before their last one, as a prefix to continue."""
    lengths = np.minimum(lengths, rollout.mask.sum(axis=1) - 1).astype(np.int32)
    return Prefix(np.where(np.arange(LIMIT)[None] < lengths[:, None], rollout.tokens, 0), lengths)


def continued(mesh, rollout, *, base="trained", poll=0, cache_dtype=None):
    """Return the responses continued from prefixes in half as many slots, with pages, on a mesh."""
    graph, shapes = transformer.abstract(ROUTED, base=base)
    given = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(params(ROUTED)))
    shapes = Weights.full(shapes)
    with jax.set_mesh(mesh):
        trained = jax.device_put(given, mesh_lib.param_shardings(given, mesh))
        copy = make_reshard(shapes, mesh, jnp.float32)(Weights.full(trained))
        batch, numbers = hosts.shard_rows(mesh, (prompts(P=4), np.arange(16)))
        keys = response_keys(jax.random.key(1), numbers)
        prefix = pack(prompts(P=4), prefix_of(rollout, np.arange(16) % 7), shards=shards(), limit=LIMIT)
        ready = prefill(graph, copy, batch, keys, prefix, sampling=SamplingParams(), cache_dtype=cache_dtype)
        options = SETTINGS | {"slots": 8, "pool": Pool(columns=4, pages=8 * 3 // shards())}
        if not poll:
            return jax.device_get(decode(graph, copy, ready, keys, **options)[0]), prefix
        options |= {"drafting": NO_DRAFTS, "min_ended": 1.0, "poll_steps": poll}
        pieces = polled.PolledDecode(graph=graph, **options)
        found = pieces(copy, ready, keys, None, prompt_length=batch.tokens.shape[1], poll=lambda: None)
        return jax.device_get(found[0]), prefix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "base", "poll"),
    [({"fsdp": 2, "expert": 2, "tensor": 2}, "trained", 5), ({"data": 2, "expert": 2}, "frozen", 0)],
    ids=str,
)
def test_prefixes_are_continued_on_a_mesh_as_without_a_break_on_one_device(sizes, base, poll, unbroken):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    found, prefix = continued(mesh_lib.make_mesh(sizes, devices), unbroken, base=base, poll=poll)
    np.testing.assert_array_equal(found.tokens, unbroken.tokens)
    np.testing.assert_array_equal(found.routes.experts, unbroken.routes.experts)
    own = (np.arange(LIMIT)[None] >= prefix.lengths[:, None]) & unbroken.mask
    np.testing.assert_allclose(found.logprobs, np.where(own, unbroken.logprobs, 0), atol=1e-5)


@pytest.mark.slow
def test_a_cache_in_int8_is_close(unbroken):
    found = alone(cache_dtype="int8")
    same = found.tokens == unbroken.tokens
    assert same.all(axis=1).mean() > 0.5
    error = np.abs(found.logprobs - unbroken.logprobs)[same & unbroken.mask & (np.cumsum(~same, axis=1) == 0)]
    assert 1e-7 < error.mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "fsdp": 4}], ids=mesh_id)
def test_gradients_do_not_depend_on_the_mesh(sizes):
    graph, _ = transformer.abstract(LATENT)
    tokens = jnp.asarray(prompts().tokens)

    def loss(weights, remat):
        return jax.nn.log_softmax(nnx.merge(graph, weights)(tokens, remat=remat).logits)[:, :-1, 0].mean()

    alone = jax.jit(jax.grad(partial(loss, remat="none")))(params(LATENT))
    mesh = mesh_lib.make_mesh(sizes)
    with jax.set_mesh(mesh):
        spread = jax.jit(jax.grad(partial(loss, remat="dots")))(place(params(LATENT), mesh, LATENT))
    assert leaf_errors(alone, spread) < 1e-4


def test_flops_of_a_step_are_of_latents():
    """By hand: D 32, H 4, r 16, q 24, plain 6, rotary 4, value 12; cached 20."""
    token, pair = (flops.forward(LATENT, flops.Work(*work)) for work in ((1, 0, 0), (0, 0, 1)))
    queries, keys, output = 24 * (32 + 4 * 10), 32 * 20 + 16 * 4 * 18, 4 * 12 * 32
    dense, routed = 2 * 32 * 48, 32 * 8 + 2 * 32 * (2 * 16 + 16)
    assert token.trunk == 2 * (2 * (queries + keys + output) + dense + routed)
    assert pair.attention == 2 * 2 * 4 * (10 + 12)
    assert flops.forward(LATENT, flops.Work(0, 0, 1), is_step=True).attention == 2 * 2 * 4 * (20 + 20)
    assert flops.forward(LATENT, flops.Work(1, 0, 0), is_step=True) == token


def test_layers_that_predict_further_are_left_out(tmp_path, capsys):
    """Only as many as config.json says."""
    folder = Path(shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "whole"))
    tensors = load_file(folder / "model.safetensors")
    further = {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32), "model.layers.3.enorm.weight": np.ones(2)}
    save_file(tensors | further, folder / "model.safetensors")
    config = huggingface.read_config(folder)
    with pytest.raises(UserError, match="holds 2 tensors that a model"):
        huggingface.load_params(folder, config)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    assert huggingface.read_config(folder) == config
    expected = huggingface.load_params(GOLDEN / "deepseek_v3", config)
    for _ in range(2):
        assert leaf_errors(huggingface.load_params(folder, config), expected) == 0
    assert capsys.readouterr().err.count("left out 2 tensors for multi-token prediction, such as model.la") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"num_kv_heads": 2},
            "num_kv_heads 2 is not num_heads 4, and latent attention makes keys and values for every",
        ),
        (
            {"shared_intermediate_size": 24},
            "shared_intermediate_size 24 is not a multiple of moe_intermediate_size 16, as in every",
        ),
        ({"latent": None}, "a model of the family deepseek_v3 has no sizes of its latent attention; give latent"),
    ],
)
def test_sizes_that_make_no_model(change, says):
    with pytest.raises(UserError, match=says):
        transformer.abstract(dataclasses.replace(LATENT, **change))


def test_sizes_are_checked_against_the_mesh():
    with pytest.raises(
        UserError, match="mesh axis fsdp = 16 does not divide the width of latents 24; use one of 1, 2, 3"
    ):
        LATENT.check_mesh({"data": 1, "fsdp": 16, "expert": 1, "tensor": 1})


def test_the_fused_step_leaves_these_layers_to_the_plain_one():
    attention = LatentAttention(LATENT, LATENT.stacks[0], rngs=nnx.Rngs(0))
    assert not transformer.fused._known(nnx.Dict(attention=attention, mlp=None))


def test_adapters_go_by_their_names_in_peft(tmp_path):
    """And come back from a folder that `peft` reads."""
    adapters = lora.Adapters(rank=2, targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    own = filled(lora.split(transformer.abstract(LATENT, adapters=adapters)[1])[0])
    peft.save(own, LATENT, adapters, tmp_path / "adapters", base="tiny")
    names = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == set(adapters.targets)
    assert names["base_model.model.model.layers.1.self_attn.kv_b_proj.lora_B.weight"].shape == (4 * 18, 2)
    assert leaf_errors(peft.load(tmp_path / "adapters", LATENT, adapters), own) == 0
    with pytest.raises(UserError, match="none of which every token of this model passes; use some of o_proj, q_a_proj"):
        lora.check(LATENT, lora.Adapters(rank=2, targets=("q_proj", "v_proj")))
