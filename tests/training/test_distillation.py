"""On-policy distillation: each form's values and gradients against float64 NumPy, and its place in score and update."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gspo_jax import objectives
from gspo_jax.kernels.logprobs import divergences, token_logprobs
from gspo_jax.models import huggingface, transformer
from gspo_jax.objectives.regularizers import kl
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.setup.policy import abstract_frozen, load_frozen
from gspo_jax.training.experience import add_teacher
from gspo_jax.training.scoring import Scoring, make_old_policy
from gspo_jax.training.state import new_state
from gspo_jax.training.terms import Penalties
from gspo_jax.training.update import make_gradient, make_update
from gspo_jax.types import Batch, OldPolicy, Weights
from tests.alone import Alone
from tests.tiny import CONFIG, EIGHT, dealt, leaf_errors, mostly_slow, packed, params, responses, weights

V, D, E = 7, 5, 3
TEMPERATURE = 0.8
G, P, T = 4, 8, 10
GRAPH, _ = transformer.abstract(CONFIG)
DENSE = dataclasses.replace(CONFIG, family="llama", hidden_size=48, num_layers=3, num_heads=6, num_experts=0)
"""A teacher of another family, width, depth and kind."""
SCORING = Scoring(logprob_chunk=24, group_size=G, temperature=TEMPERATURE)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def reverse_kl(x, y):
    """Return Σ_v p_v (log p_v − log q_v) over the ids of both, p, q = softmax of x, y, and its gradient in x."""
    log_p, log_q, both = log_softmax(x), log_softmax(y), min(np.shape(x)[-1], np.shape(y)[-1])
    p, f, one = np.exp(log_p), np.zeros_like(log_p), np.zeros_like(log_p)
    f[..., :both], one[..., :both] = log_p[..., :both] - log_q[..., :both], 1
    whole, share = (p * f).sum(axis=-1), (p * one).sum(axis=-1)
    return whole, p * (f - whole[..., None]) + p * (one - share[..., None])


@pytest.mark.parametrize("size", [V, V + 2, V - 2])
@pytest.mark.parametrize("chunk", [2, 6, 1000])
def test_divergences_and_their_gradients(size, chunk):
    """Vocabularies of one size, and padded to another; chunks that divide the tokens, and that do not."""
    rng = np.random.default_rng(0)
    h, head = rng.normal(size=(2, 5, D)), rng.normal(size=(D, V))
    other, other_head = rng.normal(size=(2, 5, E)), rng.normal(size=(E, size))
    given = rng.normal(size=(2, 5))
    expected, slope = reverse_kl(h @ head / TEMPERATURE, other @ other_head / TEMPERATURE)
    slope = slope * given[..., None] / TEMPERATURE
    run = partial(divergences, temperature=TEMPERATURE, chunk=chunk)
    found, pull = jax.vjp(run, *(jnp.float32(x) for x in (h, head, other, other_head)))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    d_h, d_head, *constant = pull(jnp.float32(given))
    np.testing.assert_allclose(d_h, slope @ head.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_head, np.einsum("btd,btv->dv", h, slope), rtol=1e-4, atol=1e-5)
    assert not any(np.any(x) for x in constant), "the teacher is constant"


def test_of_equal_distributions_it_is_exactly_0_and_always_finite():
    h, head = jnp.ones((1, 2, D)) * 100, jnp.linspace(-3, 3, D * V).reshape(D, V)
    far = -head
    assert (divergences(h, head, h, head) == 0).all()
    value, slope = jax.value_and_grad(lambda h: divergences(h, head, h, far).sum())(h)
    assert value > 100 and np.isfinite(slope).all()


def expected_gradient(form: str, x, y, objective=None):
    """Return the expectation over a token ~ softmax(x) of the gradient in x of a one-token response's loss."""
    p = np.exp(log_softmax(x))
    mask = jnp.ones((V, 1), bool)

    def loss(x):
        own = jax.nn.log_softmax(x)[:, None]
        old, teacher = jax.lax.stop_gradient(own), jax.nn.log_softmax(y)[:, None]
        if form != "advantage":
            return (jnp.float32(p)[:, None] * kl(own, teacher, mask, estimator=form)).sum()
        scored = OldPolicy(old[None], teacher_logprobs=teacher[None])
        (advantages,) = add_teacher(jnp.zeros((1, V)), scored, mask[None], weight=1.0)
        options = {"mask": mask, "advantages": advantages, "weights": jnp.float32(p)[:, None]}
        return objectives.loss(objective, own, old_logprobs=old, **options)[0]

    return jax.grad(loss)(jnp.float32(x))


@pytest.mark.parametrize("name", ["gspo_token", "grpo", "reinforce", "dapo", "cispo", "ppo"])
def test_the_advantage_s_expected_gradient_is_that_of_the_reverse_kl(name):
    """By enumeration of the vocabulary; the estimate's own gradient is not needed."""
    x, y = np.random.default_rng(1).normal(size=(2, V))
    expected = reverse_kl(x, y)[1]
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(expected_gradient("advantage", x, y, objectives.make(name)), expected, atol=1e-6)


def test_expected_gradients_of_the_estimators():
    """k2's is the reverse KL's; k3's is the forward KL's, p − q; k1's is none, so that it is no form."""
    x, y = np.random.default_rng(2).normal(size=(2, V))
    np.testing.assert_allclose(expected_gradient("k2", x, y), reverse_kl(x, y)[1], atol=1e-6)
    np.testing.assert_allclose(
        expected_gradient("k3", x, y), np.exp(log_softmax(x)) - np.exp(log_softmax(y)), atol=1e-6
    )
    np.testing.assert_allclose(expected_gradient("k1", x, y), 0, atol=1e-6)


def test_the_advantage_is_added_to_that_of_rewards():
    """Of responses or of tokens; nothing is added outside the mask, whatever is there."""
    old = OldPolicy(jnp.array([[[-1.0, -2.0, jnp.nan]]]), teacher_logprobs=jnp.array([[[-3.0, -0.5, 7.0]]]))
    mask = jnp.array([[[True, True, False]]])
    of_rows = add_teacher(jnp.array([[0.5]]), old, mask, weight=0.1)
    np.testing.assert_allclose(of_rows, [[[0.3, 0.65, 0.5]]], rtol=1e-6)
    of_tokens = jnp.array([[[1.0, 2.0, 0.0]]])
    np.testing.assert_allclose(add_teacher(of_tokens, old, mask, weight=0.1), [[[0.8, 2.15, 0.0]]], rtol=1e-6)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Return ragged responses whose old log-probs are slightly off the policy's."""
    silent = responses(P, G, T)
    hidden = alone_hidden(GRAPH, weights(), silent)
    logprobs = np.where(silent.mask, token_logprobs(*hidden, jnp.asarray(silent.tokens), temperature=TEMPERATURE)[0], 0)
    rollout = dataclasses.replace(silent, behaviour_logprobs=logprobs, logprobs=logprobs)
    advantages = np.zeros(len(silent.mask), np.float32)
    return Batch(rollout=rollout, mask=silent.mask, old=OldPolicy(logprobs), advantages=advantages)


def alone_hidden(graph, weights: Weights, rollout):
    """Return hidden states before each token and the head, of unpacked rows."""
    layout = Alone(rollout)
    out = layout.forward(weights.model(graph), None, "none")
    return layout.predicting(out.hidden), out.head


TEACHERS = {
    "larger": dataclasses.replace(DENSE, vocab_size=CONFIG.vocab_size + 16),
    "smaller": dataclasses.replace(CONFIG, vocab_size=CONFIG.vocab_size - 16, hidden_size=16),
}


@pytest.mark.parametrize("teacher", mostly_slow(TEACHERS, always=["smaller"]))
def test_scoring_by_a_teacher_of_another_shape(batch, teacher):
    """Tokens that it lacks score as the policy's own; on their way in, its last embedding stands for them."""
    model = TEACHERS[teacher]
    graph, taught, rollout = transformer.abstract(model)[0], Weights.full(params(model)), batch.rollout
    packing = packed(rollout, group_size=G)
    score = make_old_policy(GRAPH, SCORING, recompute=False, teacher_graph=graph)
    found = score(weights(), None, None, dealt(Batch(rollout=rollout), packing), taught.trainable)
    found = packing.in_order(jax.device_get(found))
    hidden, head = alone_hidden(graph, taught, rollout)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / TEMPERATURE
    inside = np.minimum(rollout.tokens, model.vocab_size - 1)[..., None]
    expected = np.take_along_axis(log_softmax(logits), inside, axis=-1)[..., 0]
    expected = np.where(rollout.tokens < model.vocab_size, expected, rollout.logprobs)
    np.testing.assert_allclose(found.teacher_logprobs[rollout.mask], expected[rollout.mask], atol=1e-5)
    np.testing.assert_array_equal(found.logprobs, rollout.logprobs)
    assert (rollout.tokens[rollout.mask] >= model.vocab_size).any() == (teacher == "smaller")


def updated(batch: Batch, taught=None, graph=None, **penalties):
    """Return the gradient and metrics of mini-batch 0 of 1 by gspo, whose own advantages are 0."""
    record = optax.chain(optax.trace(decay=0.0), optax.scale(-1.0))
    gradient = make_gradient(GRAPH, SCORING, penalties=Penalties(**penalties), teacher_graph=graph)
    update = make_update(gradient, record, optax.constant_schedule(1.0))
    packed_batch = dealt(batch, packed(batch.rollout, group_size=G, turns=2))
    state, metrics = update(
        objectives.gspo(), new_state(weights(), optimizer=record), nnx.State({}), packed_batch, 0, taught
    )
    return jax.device_get((state.policy.opt_state[0].trace, metrics))


@pytest.mark.parametrize("teacher", mostly_slow(TEACHERS, always=["smaller"]))
def test_the_whole_vocabulary_in_an_update(batch, teacher):
    """Loss and metric are the mean over tokens of the exact KL, and so is the gradient, through unpacked rows."""
    model = TEACHERS[teacher]
    graph, taught = transformer.abstract(model)[0], params(model)
    found, metrics = updated(batch, taught, graph, teacher=0.5, teacher_form="full")
    hidden, head = alone_hidden(GRAPH, weights(), batch.rollout)
    others = alone_hidden(graph, Weights.full(taught), batch.rollout)
    logits = (np.asarray(x, np.float64) @ np.asarray(w, np.float64) / TEMPERATURE for x, w in ((hidden, head), others))
    value, slope = reverse_kl(*logits)
    mask = batch.mask
    assert metrics["teacher/kl"] == pytest.approx(value[mask].mean(), rel=1e-5)
    assert metrics["actor/loss"] == pytest.approx(0.5 * value[mask].mean(), rel=1e-5)
    slope = jnp.float32(np.where(mask[..., None], slope, 0) * 0.5 / mask.sum() / TEMPERATURE)

    def linear(trained):
        h, w = alone_hidden(GRAPH, Weights.full(trained), batch.rollout)
        return (slope * jnp.einsum("btd,dv->btv", h, w)).sum()

    assert leaf_errors(jax.device_get(jax.grad(linear)(params())), found) < 1e-4


@pytest.mark.parametrize("form", mostly_slow(["advantage", "k2", "k3"], always=["advantage"]))
def test_sampled_tokens_in_an_update(batch, form):
    """The metric is the mean of log π_θ − log π_T, whatever the form; the loss is the estimator's mean, or none."""
    rng, mask = np.random.default_rng(3), batch.mask
    apart = rng.normal(scale=0.3, size=mask.shape)
    taught = np.where(mask, batch.rollout.logprobs - apart, np.nan).astype(np.float32)
    taught_batch = dataclasses.replace(batch, old=dataclasses.replace(batch.old, teacher_logprobs=taught))
    gradient, metrics = updated(taught_batch, teacher=2.0, teacher_form=form)
    x = -apart[mask]
    expected = {"advantage": 0.0, "k2": (x**2 / 2).mean(), "k3": (np.exp(x) - 1 - x).mean()}[form]
    assert metrics["teacher/kl"] == pytest.approx(apart[mask].mean(), abs=1e-6)
    assert metrics["actor/loss"] == pytest.approx(2 * expected, rel=1e-4, abs=1e-6)
    assert (sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(gradient)) > 0) == (form != "advantage")


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_a_dense_teacher_beside_a_mixture_on_eight_devices(batch, stored, tmp_path):
    """Its columns are spread over `expert` too, and in int8 it is what its folder rounds to."""
    model = dataclasses.replace(DENSE, num_heads=4)
    huggingface.save(params(model), model, tmp_path)
    graph, shapes = abstract_frozen(model, stored, dtype=jnp.dtype("float32"), dispatch="gather")
    score = partial(make_old_policy, GRAPH, SCORING, recompute=False, teacher_graph=graph)
    found = {}
    for name, sizes in (("one", {"data": 1}), ("eight", EIGHT)):
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        mesh = mesh_lib.make_mesh(sizes, devices=devices)
        packing = packed(batch.rollout, group_size=G, shards=len(devices))
        with jax.set_mesh(mesh):
            taught = load_frozen(tmp_path, model, shapes, mesh)
            scored = score()(weights(), None, None, dealt(Batch(rollout=batch.rollout), packing), taught)
        found[name] = packing.in_order(jax.device_get(scored.teacher_logprobs))
        axes = {axis for leaf in jax.tree.leaves(taught) for part in leaf.sharding.spec for axis in (part or ())}
    assert {"fsdp", "expert"} <= axes
    assert {leaf.dtype.name for leaf in jax.tree.leaves(taught)} == {"float32", stored}
    mask = batch.mask
    np.testing.assert_allclose(found["one"][mask], found["eight"][mask], atol=1e-5)
    exact = make_old_policy(GRAPH, SCORING, recompute=False, teacher_graph=transformer.abstract(model)[0])
    packing = packed(batch.rollout, group_size=G)
    whole = exact(weights(), None, None, dealt(Batch(rollout=batch.rollout), packing), params(model))
    error = np.abs(packing.in_order(jax.device_get(whole.teacher_logprobs)) - found["one"])[mask].max()
    assert error < 1e-5 if stored == "float32" else 1e-4 < error < 0.05
