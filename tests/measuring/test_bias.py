"""The bias meter: its estimates by enumeration, its sketches, its programs against plain gradients, and a run's."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import bias, estimates
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.kernels.logprobs import forward_divergences
from gspo_jax.measuring import bias as meter
from gspo_jax.models import transformer
from gspo_jax.models.moe import Routing
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout.sampling import truncate
from gspo_jax.setup.checks import check
from gspo_jax.studies import bias_figure
from gspo_jax.train import train
from gspo_jax.training.scoring import Scoring
from gspo_jax.training.sketch import SIDE, make_expected_sketch, make_sketch, sketch
from gspo_jax.types import Batch, OldPolicy, Weights
from tests.run.test_family import ADDER, settings
from tests.tiny import CONFIG, dealt, packed, params, responses

V, D, X = 6, 3, 5
"""Vocabulary, features and prefixes of a linear softmax policy."""
GRAPH, _ = transformer.abstract(CONFIG)
G, P, T, M = 2, 8, 6, 2
SCORING = Scoring(logprob_chunk=24, group_size=G, temperature=0.8)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def linear_policy():
    """Return prefixes' features [X, D] and weights [D, V]."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(X, D)), 2 * rng.normal(size=(D, V))


def enumerated(x, p, q):
    """Return the mean score under q, x (q − p)ᵀ over prefixes, and its variance, by enumeration of prefix and token."""
    scores = np.einsum("xd,xyv->xydv", x, np.eye(V)[None] - p[:, None]).reshape(X * V, -1)
    weights = (q / X).reshape(-1)
    mean = weights @ scores
    return mean.reshape(D, V), (weights @ scores**2 - mean**2).sum()


def measurements(x, p, q, *, times: int, blocks: int = 8):
    """Return estimates from tokens that q samples, in blocks of 20 to 40."""
    rng, found = np.random.default_rng(0), []
    for _ in range(times):
        tokens, sums = rng.integers(20, 40, size=blocks), []
        for count in tokens:
            at = rng.integers(X, size=count)
            drawn = (rng.random(count)[:, None] > np.cumsum(q[at], axis=1)[:, :-1]).sum(axis=1)
            sums.append(np.einsum("nd,nv->dv", x[at], np.eye(V)[drawn] - p[at]).reshape(-1))
        found.append(meter.estimate(np.array(sums), tokens))
    return np.array(found).T


SAMPLERS = {
    "the policy": lambda x, w: softmax(x @ w),
    "rounded": lambda x, w: softmax(x @ np.round(w)),
    "truncated": lambda x, w: softmax(np.asarray(truncate(jnp.asarray(x @ w), top_k=0, top_p=0.8), np.float64)),
    "older": lambda x, w: softmax(x @ (w + 0.3 * np.random.default_rng(5).normal(size=w.shape))),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_estimates_are_unbiased_and_intervals_and_tests_hold_what_they_say(sampler):
    x, w = linear_policy()
    p, q = softmax(x @ w), SAMPLERS[sampler](x, w)
    mean, variance = enumerated(x, p, q)
    true = (mean**2).sum()
    squared, low, high, found, chance = measurements(x, p, q, times=200)
    for estimates_of, wanted in ((squared, true), (found, variance)):
        assert abs(estimates_of.mean() - wanted) < 3 * estimates_of.std() / math.sqrt(200), "unbiased"
    assert ((low <= true) & (true <= high)).mean() > 0.92
    if sampler == "the policy":
        assert true < 1e-30 and (chance <= 0.05).mean() < 0.07 and (low > 0).mean() < 0.03
    else:
        assert true > 1e-3 and (chance <= 0.05).mean() > 0.8


def test_an_estimate_converges_to_what_enumeration_gives():
    x, w = linear_policy()
    p, q = softmax(x @ w), SAMPLERS["rounded"](x, w)
    mean, variance = enumerated(x, p, q)
    true, rng, tokens = (mean**2).sum(), np.random.default_rng(1), np.full(8, 100_000)
    sums = []
    for count in tokens:
        seen = rng.multinomial(count, (q / X).reshape(-1)).reshape(X, V)
        sums.append((np.einsum("xy,xd,xyv->dv", seen, x, np.eye(V)[None] - p[:, None])).reshape(-1))
    found = meter.estimate(np.array(sums), tokens)
    assert found.squared == pytest.approx(true, rel=0.03) and found.low < true < found.high and found.p == 1 / 128
    share = found.over(variance)
    assert meter.tokens_to_dominate(share) == pytest.approx(variance / true, rel=0.03)
    assert math.isnan(meter.tokens_to_dominate(share._replace(squared=-share.squared)))


def test_an_estimate_by_hand_and_of_too_few_blocks():
    """Blocks of one, two and three tokens with scores 1, 2, 3 along one direction; an empty one does not count."""
    found = meter.estimate(np.array([[1.0], [0.0], [4.0], [9.0]]), np.array([1, 0, 2, 3]))
    assert found.squared == pytest.approx(2 * (4 + 9 + 36) / (2 * (2 + 3 + 6)))
    low, high = estimates.student_interval(3 * 49 / 11 - 2 * np.array([36 / 6, 9 / 3, 4 / 2]))
    assert found[1:3] == pytest.approx((low, high))
    assert found.variance == pytest.approx((1 * (1 - 14 / 6) ** 2 + 2 * (2 - 14 / 6) ** 2 + 3 * (3 - 14 / 6) ** 2) / 2)
    assert found.p == 1 / 4, "no other sign gives as much"
    assert all(map(math.isnan, meter.estimate(np.ones((4, 2)), np.array([1, 0, 1, 0]))))
    still = meter.estimate(np.zeros((20, 2)), np.ones(20, int))
    assert still[:4] == (0, 0, 0, 0) and still.p == 1


def test_a_sketch_keeps_inner_products():
    rng, errors, one, two = np.random.default_rng(0), [], np.zeros(()), np.zeros(())
    for shape in ((300, 200), (2, 3, 70, 64)):
        for number in range(40):
            mean = number % 2  # elements of one sign are as good
            one, two = (rng.normal(mean, size=shape).astype(np.float32) for _ in range(2))
            found = (np.asarray(sketch([one]), np.float64) * np.asarray(sketch([two]), np.float64)).sum()
            errors.append(SIDE * (found - (one * two).sum()) / np.linalg.norm(one) / np.linalg.norm(two))
    assert np.std(errors) == pytest.approx(1, rel=0.3) and abs(np.mean(errors)) < 0.5
    small = [jnp.arange(6.0).reshape(2, 3), jnp.float32(-2.5), jnp.arange(5.0)]
    for x, found in zip(small, sketch(small), strict=True):
        want = np.atleast_2d(np.asarray(x))
        assert np.abs(found).sum() == np.abs(want).sum()
        np.testing.assert_array_equal(np.abs(found[: want.shape[0], : want.shape[1]]), np.abs(want))
    added = sketch([one + two]) - sketch([one]) - sketch([two])
    np.testing.assert_allclose(added, 0, atol=1e-3)


@pytest.mark.parametrize("top_k", [0, 2])
def test_forward_divergences_and_their_gradients(top_k):
    """The gradient is minus the other policy's expected score, (p − q) ⊗ h in the head."""
    rng = np.random.default_rng(0)
    h, head, other, other_head = (rng.normal(size=size) for size in ((2, 5, D), (D, V), (2, 5, 2), (2, V)))
    given, of_other = rng.normal(size=(2, 5)), other @ other_head / 0.8
    if top_k:
        of_other = np.where(of_other < np.sort(of_other)[..., -top_k, None], -np.inf, of_other)
    p, q = softmax(h @ head / 0.8), softmax(of_other)
    kl = np.where(q > 0, q * (np.log(np.maximum(q, 1e-99)) - np.log(p)), 0).sum(axis=-1)
    slope = given[..., None] * (p - q) / 0.8

    def run(*models):
        return forward_divergences(
            *models, temperature=0.8, chunk=4, kept=lambda logits: truncate(logits, top_k=top_k, top_p=1.0)
        )

    found, pull = jax.vjp(jax.jit(run), *(jnp.float32(x) for x in (h, head, other, other_head)))
    np.testing.assert_allclose(found, kl, rtol=2e-5, atol=2e-6)
    d_h, d_head, *constant = pull(jnp.float32(given))
    np.testing.assert_allclose(d_h, slope @ head.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_head, np.einsum("btd,btv->dv", h, slope), rtol=1e-4, atol=1e-5)
    assert not any(np.any(x) for x in constant)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Return a packed batch of two mini-batches with four groups each, in several rows."""
    rollout = responses(P, G, T)
    silent = Batch(rollout=rollout, mask=rollout.mask, old=OldPolicy(rollout.logprobs))
    return dealt(silent, packed(rollout, group_size=G, minibatches=M, turns=2))


def fake_engine() -> SimpleNamespace:
    sizes = SimpleNamespace(sampling=SimpleNamespace(group_size=G))
    return SimpleNamespace(
        minibatches=M, config=sizes, meshes=SimpleNamespace(trainer=mesh_lib.make_mesh({"data": 1}, jax.devices()[:1]))
    )


@jax.jit
def plain(weights: Weights, chosen, experts):
    """Return log π over the vocabulary, [B, T, V], on routes (-1: its own), and the gradient of Σ chosen · log π."""
    rollout = responses(P, G, T)
    S = rollout.prompts.shape[1]
    texts = jnp.concatenate([rollout.prompts, rollout.tokens], axis=1)
    valid = jnp.concatenate([np.arange(S)[None] < rollout.prompt_lengths[:, None], rollout.mask], axis=1)
    before = np.concatenate([rollout.prompt_lengths[:, None] - 1, S - 1 + np.tile(np.arange(1, T), (P * G, 1))], axis=1)

    def total(trainable):
        routing = Routing(jnp.moveaxis(experts, 2, 0))
        out = Weights(trainable, weights.frozen).model(GRAPH)(texts, valid, routing=routing)
        logprobs = jax.nn.log_softmax(out.logits / SCORING.temperature)[np.arange(P * G)[:, None], before]
        return (chosen * logprobs).sum(), logprobs

    (_, logprobs), gradient = jax.value_and_grad(total, has_aux=True)(weights.trainable)
    return logprobs, gradient


def test_programs_sketch_the_gradients_of_every_block(batch):
    """Those of sampled tokens, and of another policy's expectation on its routes; 0 if the other is the policy."""
    rollout, own = responses(P, G, T), Weights.full(params())
    other = Weights.full(jax.tree.map(lambda x: 1.3 * x, params()))
    drawn, native = np.eye(CONFIG.vocab_size, dtype=np.float32)[rollout.tokens], rollout.routes.experts
    forced = np.random.default_rng(2).permuted(np.tile(np.arange(8, dtype=np.int8), (*native.shape[:3], 1)), axis=-1)
    forced = forced[np.arange(P * G) // G * G, ..., : CONFIG.experts_per_token]  # a group shares its prompt's
    q = np.exp(plain(other, drawn, forced)[0])
    engine, expected = fake_engine(), make_expected_sketch(GRAPH, SCORING)
    places = dealt(Batch(rollout=forced), batch.packing).rollout
    found = {
        "sampled": meter.of_sampled(
            SimpleNamespace(**vars(engine), programs=SimpleNamespace(sketch=make_sketch(GRAPH, SCORING))), own, batch
        ),
        "expected": meter.of_expected(engine, own, batch, other, places, expected),
    }
    group = np.arange(P * G) // G
    for name, chosen in (("sampled", drawn), ("expected", q)):
        one = found[name]
        assert one.tokens.sum() == rollout.mask.sum() and len(one.tokens) == P, "every group is a block"
        for block in (0, 5):  # mini-batch 0's first group, and mini-batch 1's second
            mine = rollout.mask & (group == (block % 4) * M + block // 4)[:, None]
            logprobs, gradient = plain(own, chosen * mine[..., None], native)
            assert one.tokens[block] == mine.sum()
            want = sketch(gradient).reshape(-1)
            np.testing.assert_allclose(one.gradients[block].reshape(-1), want, atol=2e-4 * np.abs(want).max())
            value = float((chosen * logprobs * mine[..., None]).sum())
            if name == "expected":
                value -= float((mine[..., None] * q * np.log(q)).sum())
            assert one.values[block] == pytest.approx(value, rel=1e-3, abs=1e-5)
    whole, exact = plain(own, q * rollout.mask[..., None], native)[1], found["expected"].head.sum(axis=0)
    want = np.abs(np.asarray(whole["head"])).reshape(-1)  # each element in a bucket of its own
    np.testing.assert_allclose(np.abs(exact), want, atol=2e-4 * want.max())
    same = meter.of_expected(engine, own, batch, own, np.full_like(places, -1), expected)
    assert np.abs(same.gradients).max() < 1e-5 * np.abs(found["expected"].gradients).max()
    assert np.abs(same.values).max() < 1e-5 * np.abs(found["expected"].values).max()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "data.prompts_per_batch",
            2,
            "mismatch.bias_every is 2, which compares 3 or more groups of a batch, and data.p",
        ),
        ("sampling.rounds", 4, "mismatch.bias_every is 2, and sampling.rounds 4 keeps groups by their rewards"),
    ],
)
def test_a_batch_in_which_it_cannot_be_measured(field, value, said, tmp_path):
    config = settings(tmp_path, mismatch__bias_every=2, training__minibatches=1)
    check(config)
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=said):
        check(config)


@pytest.mark.slow
def test_the_metric_and_the_command_on_a_run(tmp_path):
    """Sources that are off are 0, all of them explain the sampler's log-probs, and the run folder stays as it was."""
    config = settings(tmp_path / "data", arg="single,runlocal", model__folder=str(ADDER), mismatch__bias_every=2)
    config.sampling.weights_dtype, config.optimizer.learning_rate = "int8", 1e-3
    train(config, tmp_path / "run")
    logged = [row for row in read_metrics(tmp_path / "run") if "noise/bias" in row]
    assert [row["iteration"] for row in logged] == [2, 3], "every second and the last"
    for row in logged:
        assert row["noise/bias_low"] < row["noise/bias"] < row["noise/bias_high"] and 0 < row["noise/bias_p"] <= 1
        assert row["noise/score_std"] > 1 and row["timing/measure_s"] > 0
    before = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*"))
    facts = bias.run(config, str(tmp_path / "run"), 2)
    assert sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*")) == before, "nothing is written"
    json.dumps(facts, allow_nan=False)
    assert facts["unexplained_std"] < 1e-5 < 1e-3 < facts["log_ratio_std"]
    found = {one["source"]: one for one in facts["sources"]}
    assert list(found) == [bias.SAMPLED, "all", "rounding", "routes", "truncation", "staleness"]
    assert abs(found["truncation"]["kl"]) < 1e-7 and abs(found["truncation"]["bias"]) < 1e-12
    assert found["all"]["kl"] == pytest.approx(found["rounding"]["kl"] + found["routes"]["kl"], rel=0.5)
    assert found["staleness"]["kl"] > 1e-6 and found["staleness"]["p"] < 0.1
    for one in found.values():
        assert one["interval"][0] <= one["bias"] <= one["interval"][1]
        assert sum(one["by_tensor"].values()) == pytest.approx(one["bias"], rel=1e-6)
    bias_figure.draw_all(facts, tmp_path)
    assert all((tmp_path / name).stat().st_size > 10_000 for name in bias_figure.LAYOUTS)
    assert bias_figure.table(facts).count("\n") == 2 + len(found)
