"""The decoder matches the trainer's scoring, and a response does not depend on the rest of its batch."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from gspo_jax.models import transformer
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rows import shards
from gspo_jax.rollout import decoder, polled
from gspo_jax.rollout.decoder import make_reshard, response_keys
from gspo_jax.rollout.drafting import NO_DRAFTS
from gspo_jax.rollout.pages import Pool
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.prefixes import Prefix, pack
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.training.scoring import Scoring, score
from gspo_jax.types import Prompts, Weights
from tests.alone import Alone
from tests.golden import make_decode
from tests.tiny import CONFIG, EIGHT, generate, load_model, mesh_id, mostly_slow, params, place, prompts, weights

GRAPH, _SHAPES = transformer.abstract(CONFIG)
SHAPES = Weights.full(_SHAPES)
SETTINGS = {
    "sampling": SamplingParams(keep_top=3),
    "stop": StopRule(max_length=70, eos_ids=(3,)),  # two pages a response
    "router_logprobs": True,
}
LIMITS = jnp.asarray(np.random.default_rng(0).integers(1, 71, 32), jnp.int32)


def decode(slots=None, *, seed=0, **changes):
    """Return 32 responses of mixed lengths, each with its own limit, and the decode loop's statistics."""
    keys = response_keys(jax.random.key(seed + 1), jnp.arange(32))
    given = SETTINGS | {"slots": slots, "limits": LIMITS} | changes
    return jax.device_get(generate(GRAPH, weights(), prompts(seed=seed), keys, **given))


@pytest.fixture(scope="module")
def decoded():
    """Return the responses decoded in 8 slots, then in 4, with the statistics."""
    return decode(8)


@pytest.fixture(scope="module")
def rollout(decoded):
    return decoded.rollout


def scored(rollout, *, temperature):
    """Return the trainer's scores of the rollout under the same weights."""
    scoring = Scoring(temperature=temperature, logprob_chunk=64)
    return jax.jit(lambda w, rollout: score(GRAPH, w, Alone(rollout), scoring))(weights(), rollout)


def test_log_probs_equal_the_trainers(rollout):
    """Sampler and trainer log-probs agree to 1e-4 on every sampled token, with ragged prompts."""
    scores = scored(rollout, temperature=1.0)
    mask = rollout.mask
    np.testing.assert_allclose(rollout.logprobs[mask], np.asarray(scores.logprobs)[mask], atol=1e-4)
    np.testing.assert_array_equal(rollout.logprobs[mask], rollout.behaviour_logprobs[mask])
    assert not rollout.logprobs[~mask].any()
    own = rollout.kept.ids == rollout.tokens[..., None]
    np.testing.assert_array_equal(own.sum(axis=2), mask)
    np.testing.assert_array_equal(np.where(own, rollout.kept.logprobs, 0).sum(axis=2), rollout.logprobs)


@pytest.mark.slow
def test_temperature_is_scored_too():
    sampling = SamplingParams(temperature=0.6, top_k=20)
    out = decode(8, sampling=sampling).rollout
    scores = scored(out, temperature=0.6)
    np.testing.assert_allclose(out.logprobs[out.mask], np.asarray(scores.logprobs)[out.mask], atol=1e-4)
    assert (out.behaviour_logprobs[out.mask] >= out.logprobs[out.mask] - 1e-6).all()


def test_routes_equal_the_trainers_where_known(rollout):
    """Sampler and trainer agree on experts and router log-probs, prompt tokens included."""
    routes = scored(rollout, temperature=1.0).routes
    experts, logprobs = (np.moveaxis(np.asarray(x), 0, 2) for x in (routes.experts, routes.logprobs))
    own, known = rollout.routes, (rollout.routes.experts >= 0).all(axis=(2, 3))
    np.testing.assert_array_equal(own.experts[known], experts[known])
    np.testing.assert_allclose(own.logprobs[known], logprobs[known], atol=1e-5)
    assert own.experts.dtype == np.int8
    assert (own.experts[~known] == -1).all()
    assert not own.logprobs[~known].any()
    fed = rollout.prompt_lengths + rollout.mask.sum(axis=1) - 1
    np.testing.assert_array_equal(known.sum(axis=1), fed, "every token but the last was fed")


def test_a_response_ends_with_its_first_eos(rollout):
    for tokens, mask, truncated in zip(rollout.tokens, rollout.mask, rollout.truncated, strict=True):
        n = mask.sum()
        assert mask[:n].all(), "the mask is a prefix"
        stops = tokens[:n] == 3
        assert not stops[:-1].any()
        assert stops[-1] == (not truncated)
        assert not tokens[n:].any(), "tokens after the end are padding"
    assert 0 < rollout.truncated.sum() < len(rollout.truncated), "the case has both finished and truncated responses"


def same(found, expected):
    """Assert equal tokens and experts, and log-probs equal up to float32 rounding."""
    found, expected = jax.device_get((found, expected))
    for name in ("tokens", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_equal(found.routes.experts, expected.routes.experts)
    for a, b in (
        (found.logprobs, expected.logprobs),
        (found.behaviour_logprobs, expected.behaviour_logprobs),
        (found.routes.logprobs, expected.routes.logprobs),
        (found.kept.logprobs, expected.kept.logprobs),
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_array_equal(found.kept.ids, expected.kept.ids)


@pytest.fixture(scope="module")
def one_by_one():
    """Return every response decoded by itself, with no group: the reference for all batched and resumed decoding."""
    batch, keys = prompts(), response_keys(jax.random.key(1), jnp.arange(32))
    each = []
    for i in range(32):
        prompt = Prompts(batch.tokens[i // 4][None], batch.lengths[i // 4][None])
        settings = {"limits": LIMITS[i : i + 1]}
        each.append(jax.device_get(generate(GRAPH, weights(), prompt, keys[i : i + 1], **SETTINGS | settings)[0]))
    return jax.tree.map(lambda *rows: np.concatenate(rows), *each)


@pytest.mark.slow  # test_episodes.py resumes such responses too
def test_responses_resume_after_an_early_exit(one_by_one):
    """Responses cut off by an early exit, prefilled again as prefixes and resumed, equal those that never stopped."""
    cut = decode(7, min_ended=0.4)
    assert 13 <= 32 - cut.unfinished.sum() < 20
    kept, mask = cut.rollout.tokens, cut.rollout.mask
    one_by_one_there = np.where(mask, one_by_one.tokens, 0)
    np.testing.assert_array_equal(kept, one_by_one_there)
    assert not (cut.unfinished & cut.rollout.truncated).any()
    groups = np.unique(np.flatnonzero(cut.unfinished) // 4)  # resumed whole, with finished members at limit 0
    rows = (groups[:, None] * 4 + np.arange(4)).reshape(-1)
    left = cut.unfinished[rows]
    lengths = jnp.where(left, mask[rows].sum(axis=1), 0)
    batch = jax.tree.map(lambda x: x[groups], prompts())
    keys = response_keys(jax.random.key(1), jnp.asarray(rows))
    found = generate(
        GRAPH,
        weights(),
        batch,
        keys,
        **SETTINGS,
        slots=7,
        limits=jnp.where(left, LIMITS[rows], 0),
        prefix=pack(batch, Prefix(kept[rows], lengths), shards=1, limit=70),
    )
    assert not found.unfinished.any()
    assert not found.rollout.mask[~left].any()
    assert cut.stats.decode_tokens + found.stats.decode_tokens == one_by_one.mask.sum() - 32 - left.sum(), (
        "each is drawn once"
    )
    expected = jax.tree.map(lambda x: x[rows[np.asarray(left)]], one_by_one)
    found = jax.tree.map(lambda x: x[np.asarray(left)], jax.device_get(found.rollout))
    own = np.arange(70)[None] >= lengths[left, None]
    for name in ("tokens", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_equal(found.routes.experts, expected.routes.experts)
    np.testing.assert_allclose(found.logprobs, np.where(own, expected.logprobs, 0), atol=1e-5)
    np.testing.assert_allclose(found.routes.logprobs, expected.routes.logprobs, atol=1e-5)


@pytest.mark.parametrize("slots", mostly_slow([7, 8], always=[8]))
def test_slots_change_nothing(slots, one_by_one, decoded):
    found, _, stats = decoded if slots == 8 else decode(slots)
    same(found, one_by_one)
    assert 0 < one_by_one.truncated.sum() < 32 and (one_by_one.mask.sum(axis=1) == 1).any(), (
        "the case has truncated responses, finished ones, and some of one token"
    )
    assert stats.decode_tokens == one_by_one.mask.sum() - 32, (
        "each response's first token comes from prefill, not from decode steps"
    )
    assert stats.steps <= stats.slot_steps <= stats.steps * (slots or 32)


POOLS = [(8, Pool(8, 45)), (7, Pool(70, 2))]


@pytest.mark.parametrize(("slots", "pool"), mostly_slow(POOLS, always=POOLS[:1]))
def test_nor_do_pages(slots, pool, one_by_one):
    """With too few pages for all slots, responses wait for pages in place of slots."""
    found, unfinished, stats = decode(slots, pool=pool)
    same(found, one_by_one)
    assert not unfinished.any()
    assert stats.decode_tokens == one_by_one.mask.sum() - 32
    busy = stats.decode_tokens.sum() / stats.steps.sum()
    assert busy < min(slots, pool.pages * pool.columns / LIMITS.mean()), "the pool limits the responses, not the slots"


@pytest.mark.parametrize(("slots", "pool"), mostly_slow(POOLS, always=POOLS[:1]))
def test_a_call_that_may_return_early_sets_the_youngest_aside(slots, pool, one_by_one):
    """What is sampled equals the beginnings of whole responses, and more is in flight than the pool can hold whole."""
    found, unfinished, stats = decode(slots, pool=pool, min_ended=0.75)
    np.testing.assert_array_equal(found.tokens, np.where(found.mask, one_by_one.tokens, 0))
    np.testing.assert_allclose(found.logprobs, np.where(found.mask, one_by_one.logprobs, 0), atol=1e-5)
    known = (found.routes.experts >= 0).all(axis=(2, 3))
    np.testing.assert_array_equal(found.routes.experts[known], one_by_one.routes.experts[known])
    assert (known.sum(axis=1) == found.prompt_lengths + np.maximum(found.mask.sum(axis=1), 1) - 1).all()
    ended = found.mask.sum(axis=1) == one_by_one.mask.sum(axis=1)
    np.testing.assert_array_equal(unfinished, ~ended)
    assert ended.sum() >= 24
    assert stats.decode_tokens == found.mask.sum() - 32


@pytest.mark.slow
def test_a_shared_pool_is_full_of_live_keys():
    """Over a decode of log-normal lengths with a queue longer than the slots, at least 0.8 of the pool is in use."""
    lengths = np.random.default_rng(0).lognormal(np.log(64) - 0.32, 0.8, 256)
    limits = jnp.asarray(np.clip(lengths, 1, 256), jnp.int32)
    keys, given = (
        response_keys(jax.random.key(1), jnp.arange(256)),
        SETTINGS | {"stop": StopRule(max_length=256, eos_ids=())},
    )
    batch = jax.tree.map(lambda x: jnp.tile(x, (4, *[1] * (x.ndim - 1))), prompts())
    options = {"slots": 64, "pool": Pool(8, 256), "min_ended": 0.5, "limits": limits}
    stats = jax.device_get(generate(GRAPH, weights(), batch, keys, **given | options).stats)
    assert stats.filled.sum() / stats.slot_steps.sum() >= 0.8


def test_a_dense_model_has_no_routes():
    config = dataclasses.replace(CONFIG, num_experts=0, num_layers=1)
    graph, _ = transformer.abstract(config)
    keys = response_keys(jax.random.key(1), jnp.arange(8))
    batch = jax.tree.map(lambda x: x[:2], prompts())
    options = {"sampling": SamplingParams(), "stop": StopRule(max_length=9, eos_ids=(3,)), "slots": 3}
    found = generate(graph, weights(config), batch, keys, **options).rollout
    assert found.routes.experts.shape == (8, batch.tokens.shape[1] + 9, 0, 0) and (found.mask.sum(axis=1) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", make_decode.CASES)
def test_pages_sample_what_rings_did(case):
    """Equal to the decoder of a commit whose slots kept rings of their newest tokens, up to rounding.

    Another processor may round the int8 case's keys otherwise, and so draw another token in a response.
    """
    close = 2e-5 if case == "int8" else 1e-5
    recorded, found = np.load(make_decode.FILE), make_decode.decoded(case)
    equal = (found["tokens"] == recorded[f"{case}/tokens"]).all(axis=1)
    assert (~equal).sum() <= (case == "int8")
    np.testing.assert_array_equal(found["experts"][equal], recorded[f"{case}/experts"][equal])
    np.testing.assert_allclose(found["logprobs"][equal], recorded[f"{case}/logprobs"][equal], atol=close)


@pytest.mark.slow
def test_nor_does_the_order_of_the_queue(one_by_one):
    """Rows are queued in order, so permuting the groups permutes the responses and changes nothing else."""
    batch, groups = prompts(), np.random.default_rng(2).permutation(8)
    rows = (groups[:, None] * 4 + np.arange(4)).reshape(-1)
    keys = response_keys(jax.random.key(1), jnp.asarray(rows))
    settings = SETTINGS | {"slots": 5, "limits": LIMITS[rows]}
    found = generate(GRAPH, weights(), Prompts(batch.tokens[groups], batch.lengths[groups]), keys, **settings)
    same(found.rollout, jax.tree.map(lambda x: x[rows], one_by_one))


LAYOUTS = [
    ({"fsdp": 8}, 16),
    (EIGHT, 16),
    ({"data": 2, "expert": 2, "tensor": 2}, None),
]


@pytest.mark.parametrize(
    ("sizes", "slots"),
    mostly_slow(LAYOUTS, always=[(EIGHT, 16)]),
    ids=lambda x: mesh_id(x) if isinstance(x, dict) else str(x),
)
def test_eight_devices_sample_the_same(sizes, slots, one_by_one):
    mesh = mesh_lib.make_mesh(sizes)
    with jax.set_mesh(mesh):
        copy = make_reshard(SHAPES, mesh, jnp.float32)(Weights.full(place(params(), mesh)))
        batch, numbers, limits = hosts.shard_rows(mesh, (prompts(), np.arange(32), np.asarray(LIMITS)))
        keys = response_keys(jax.random.key(1), numbers)
        out, _, stats = generate(GRAPH, copy, batch, keys, **SETTINGS, slots=slots, limits=limits)
        same(out, one_by_one)
        assert out.tokens.sharding.is_equivalent_to(mesh_lib.rows_sharding(mesh), 2)
    steps = np.asarray(stats.steps).reshape(-1, mesh.shape["expert"])
    assert (steps == steps[:, :1]).all(), "shards of one expert group take the same number of steps"
    assert len(steps) == 1 or len(set(steps[:, 0])) > 1, "shards outside an expert group stop independently"


@pytest.mark.slow
def test_a_frozen_base_spread_over_experts_samples_the_same(one_by_one):
    mesh = mesh_lib.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})
    graph, shapes = transformer.abstract(CONFIG, base="frozen")
    base = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(params()))
    base = jax.device_put(base, mesh_lib.param_shardings(base, mesh, mesh_lib.SAMPLER))
    with jax.set_mesh(mesh):
        batch, numbers, limits = hosts.shard_rows(mesh, (prompts(), np.arange(32), np.asarray(LIMITS)))
        keys = response_keys(jax.random.key(1), numbers)
        same(generate(graph, Weights.full(base), batch, keys, **SETTINGS, slots=16, limits=limits)[0], one_by_one)


@pytest.mark.slow
def test_a_head_spread_over_experts_samples_the_same(one_by_one, monkeypatch):
    monkeypatch.setattr(transformer, "_LARGE_HEAD", 1)
    graph, shapes = transformer.abstract(CONFIG)
    large = jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(params()))
    mesh = mesh_lib.make_mesh(EIGHT)
    with jax.set_mesh(mesh):
        copy = make_reshard(Weights.full(shapes), mesh, jnp.float32)(Weights.full(place(large, mesh)))
        batch, numbers, limits = hosts.shard_rows(mesh, (prompts(), np.arange(32), np.asarray(LIMITS)))
        keys = response_keys(jax.random.key(1), numbers)
        same(generate(graph, copy, batch, keys, **SETTINGS, slots=16, limits=limits)[0], one_by_one)


@pytest.mark.slow
def test_coming_back_to_the_host_changes_no_bit():
    """Polled every 16 steps, the decoder returns what one program does, prefixes and statistics included."""
    mesh = mesh_lib.make_mesh(EIGHT)
    with jax.set_mesh(mesh):
        given = prompts(), jnp.arange(32), jnp.sort(LIMITS)  # the shards end one after the other
        copy = make_reshard(SHAPES, mesh, jnp.float32)(Weights.full(place(params(), mesh)))
        batch, numbers, limits = hosts.shard_rows(mesh, jax.device_get(given))
        keys = response_keys(jax.random.key(1), numbers)
        lengths = jnp.minimum(jnp.arange(32) % 5, limits - 1)
        said = Prefix(jax.random.randint(jax.random.key(2), (32, 4), 4, 60), lengths)
        prefix = pack(*jax.device_get((batch, said)), shards=shards(), limit=70)
        options = {"sampling": SamplingParams(), "router_logprobs": True, "cache_dtype": "int8"}
        prefilled = decoder.prefill(GRAPH, copy, batch, keys, prefix, **options)
        options = {"sampling": SamplingParams(), "stop": SETTINGS["stop"], "slots": 16, "pool": Pool(16, 8)}
        expected = decoder.decode(GRAPH, copy, prefilled, keys, limits, **options)
        polls = []
        options |= {"drafting": NO_DRAFTS, "min_ended": 1.0}
        pieces = PolledDecode(graph=GRAPH, **options, poll_steps=16)
        found = pieces(copy, prefilled, keys, limits, prompt_length=batch.tokens.shape[1], poll=lambda: polls.append(0))
        for part in polled.begin_piece(pieces, copy, (prefilled, keys, limits))[1]:
            spread = NamedSharding(mesh, polled.pool_spec(part.shape))
            assert part.sharding.is_equivalent_to(spread, part.ndim)
        pieces = PolledDecode(graph=GRAPH, **options | {"min_ended": 0.5}, poll_steps=16)
        cut = pieces(copy, prefilled, keys, limits, prompt_length=batch.tokens.shape[1], poll=lambda: None)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert len(polls) >= np.asarray(expected.stats.steps).max() // 16
    ended, steps = ~np.asarray(cut.unfinished), np.asarray(cut.stats.steps)
    assert 16 <= ended.sum() < 32 and not ended[-4:].all(), "half of all have ended, the last shards' have not"
    assert steps.max() % 16 == 0, "all go on until the first piece after which enough have ended"
    masks = np.asarray(cut.rollout.mask)
    np.testing.assert_array_equal(cut.rollout.tokens, np.where(masks, found.rollout.tokens, 0))
    np.testing.assert_array_equal(masks.sum(axis=1)[ended], np.asarray(found.rollout.mask).sum(axis=1)[ended])


def test_a_cache_in_int8_samples_from_a_policy_close_to_the_trainers(rollout):
    """Most responses are the same, and log-probs differ by little."""
    found = decode(8, cache_dtype="int8").rollout
    assert (found.tokens == rollout.tokens).all(axis=1).mean() > 0.5
    error = np.abs(found.logprobs - np.asarray(scored(found, temperature=1.0).logprobs))[found.mask]
    assert 1e-5 < error.mean() < 0.01


@pytest.mark.slow
def test_slots_are_refilled_and_left_when_idle():
    """With lengths uniform in 16 to 512 and 64 responses on 16 slots, more than 90% of slot steps draw a token."""
    batch, limits = prompts(), jnp.asarray(np.random.default_rng(0).integers(16, 513, 64), jnp.int32)
    keys = response_keys(jax.random.key(1), jnp.arange(64))
    settings = {"stop": StopRule(max_length=512, eos_ids=()), "slots": 16, "limits": limits}
    found, _, stats = jax.device_get(generate(GRAPH, weights(), batch, keys, **SETTINGS | settings))
    np.testing.assert_array_equal(found.mask.sum(axis=1), limits)
    assert stats.decode_tokens.sum() / stats.slot_steps.sum() > 0.9
    assert stats.steps.sum() < 1.25 * limits.sum() / 16


@pytest.mark.slow
def test_the_loop_copies_no_cache():
    """The compiled decode loop updates both pools and the responses in place.

    The pools share one zero initialiser, copied before the loop.
    """
    keys = response_keys(jax.random.key(1), jnp.arange(32))
    prefilled = decoder.prefill(GRAPH, weights(), prompts(), keys, sampling=SamplingParams())
    settings = {"sampling": SamplingParams(), "stop": StopRule(max_length=200, eos_ids=(3,)), "slots": 16}
    settings["pool"] = Pool(columns=64, pages=40)
    loop, _, _ = (
        decoder.decode.lower(GRAPH, weights(), prefilled, keys, **settings).compile().as_text().partition("\nENTRY ")
    )
    pool, routes = (
        r"f32\[2,40,2,64,8\]",
        r"s8\[32,12,32,4\]",
    )  # layers, pages, heads, columns, width; responses, blocks of tokens
    assert len(re.findall(rf"= {pool}\S* (?:scatter|fusion)\(", loop)) >= 2
    assert len(re.findall(rf"= {routes}\S* (?:dynamic-update-slice|fusion)\(", loop)) >= 1
    for shape in (pool, routes):
        assert not re.search(rf"= {shape}\S* copy\(", loop)


def test_the_samplers_copy_is_cast_but_for_router_and_norms():
    mesh = mesh_lib.make_mesh(EIGHT)
    with jax.set_mesh(mesh):
        copy = make_reshard(SHAPES, mesh, jnp.bfloat16)(Weights.full(place(params(), mesh)))
    copied = copy.trainable
    assert copied["embed"].dtype == copied["layers"][0]["mlp"]["gate"].dtype == jnp.bfloat16
    assert copied["layers"][0]["mlp"]["router"].dtype == copied["norm"].dtype == jnp.float32
    gate = copied["layers"][0]["mlp"]["gate"]
    assert gate.addressable_shards[0].data.shape == (2, 4, 32, 16), (
        "every data and fsdp shard holds the full expert matrices"
    )


def test_no_second_copy_of_the_weights_is_made_on_the_way_to_the_sampler():
    """Resharding goes layer by layer, so temporaries stay below half of the output of this eight-layer model."""
    mesh = mesh_lib.make_mesh(EIGHT)
    config = dataclasses.replace(CONFIG, hidden_size=128, moe_intermediate_size=64, num_layers=8)
    shapes = Weights.full(transformer.abstract(config)[1])
    shardings = mesh_lib.param_shardings(shapes, mesh)
    given = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    with jax.set_mesh(mesh):
        memory = make_reshard(shapes, mesh, jnp.bfloat16).lower(given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 2


def test_one_program_per_shape():
    before = [program._cache_size() for program in (decoder.prefill, decoder.decode)]
    for seed in (3, 4):
        decode(8, seed=seed)
    after = [program._cache_size() for program in (decoder.prefill, decoder.decode)]
    assert all(b <= a + 1 for a, b in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_moe_fused", "qwen3", "qwen3_tied", "olmoe", "llama", "qwen3_next", "qwen3_5_moe"]
)
def test_greedy_decode_equals_transformers(name):
    """With ragged prompts, the cached decoder's 64 greedy tokens equal those of transformers (tests/golden)."""
    folder = Path(__file__).parents[1] / "golden" / name
    reference = np.load(folder / "reference.npz")
    model, _ = load_model(folder)
    graph, params = nnx.split(model)
    tokens, lengths = reference["tokens"], reference["lengths"]
    tokens = np.where(np.arange(tokens.shape[1])[None] < lengths[:, None], tokens, 1)
    out, _, _ = generate(
        graph,
        Weights.full(params),
        Prompts(np.pad(tokens, ((0, 0), (0, 5)), constant_values=1), lengths),
        response_keys(jax.random.key(0), jnp.arange(len(tokens))),
        sampling=SamplingParams(temperature=0.0),
        stop=StopRule(max_length=64, eos_ids=()),
    )
    np.testing.assert_array_equal(out.tokens, reference["greedy"])
    assert out.truncated.all()
