"""One update: the same gradient on any mesh and with any micro-batching; skipped if the gradient is not finite."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from gspo_jax import objectives
from gspo_jax.config import adamw
from gspo_jax.errors import UserError
from gspo_jax.models import critic as critic_lib
from gspo_jax.models import lora, transformer
from gspo_jax.models.config import by_path
from gspo_jax.models.lora import TARGETS, Adapters
from gspo_jax.models.moe import Routing, layers_first
from gspo_jax.objectives.mismatch import tis
from gspo_jax.objectives.regularizers import value_loss
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.compilation import CompileCounter
from gspo_jax.parallel.rows import PLACES
from gspo_jax.routing.drift import router_shift
from gspo_jax.routing.replay import to_replay
from gspo_jax.run.log import response_columns, response_metrics
from gspo_jax.training import metrics as metrics_lib
from gspo_jax.training.checkpoint import Checkpointer, restore
from gspo_jax.training.experience import make_experience
from gspo_jax.training.packing import Packer, take_minibatch
from gspo_jax.training.scoring import Scoring, kept_ids, make_old_policy, score, values
from gspo_jax.training.shaping import Shaping
from gspo_jax.training.state import CriticRule, TrainState, make_optimizer, new_state, state_shardings
from gspo_jax.training.update import Centering, Penalties, make_blame, make_gradient, make_update
from gspo_jax.types import Batch, KeptRecord, OldPolicy, Packing, Rewards, Rollout, RouterRecord, Weights
from tests.alone import Alone
from tests.tiny import CONFIG, EIGHT, dealt, leaf_errors, mostly_slow, packed, params, responses, some_kept, weights

GRAPH, SHAPES = transformer.abstract(CONFIG)
NONE = nnx.State({})
"""Empty frozen weights, as in full training."""
G, P, T = 4, 16, 10
SCORING = Scoring(logprob_chunk=64, group_size=4)
OLD_POLICY = make_old_policy(GRAPH, SCORING, recompute=True)
CRITIC_GRAPH, CRITIC_SHAPES = critic_lib.abstract(CONFIG, own_trunk=True, dtype=jnp.float32)


def recompute(weights: Weights, rollout: Rollout) -> OldPolicy:
    """Return the old policy's log-probs and routes, computed in one row."""
    packing = packed(rollout, group_size=G)
    return packing.in_order(jax.device_get(OLD_POLICY(weights, None, None, dealt(Batch(rollout=rollout), packing))))


def optimizer(**changes):
    settings = {"learning_rate": 1e-3, "schedule": "constant", "warmup_updates": 0, "total_updates": 10}
    settings |= {"b1": 0.9, "b2": 0.95, "weight_decay": 0.0, "no_decay": (), "max_grad_norm": 1.0}
    return make_optimizer(**(settings | changes))


def recorder():
    """Return gradient descent whose state is the latest gradient, so that tests can read it."""
    return optax.chain(optax.trace(decay=0.0), optax.scale(-1.0)), optax.constant_schedule(1.0)


@pytest.fixture(scope="module")
def experience() -> Batch:
    """Return ragged responses whose old log-probs are slightly off the policy's, so that ratios are not 1."""
    rng, silent = np.random.default_rng(0), responses(P, G, T)
    scored, mask = recompute(weights(), silent), silent.mask
    logprobs = np.where(mask, scored.logprobs, 0)
    # A sampler never feeds a response's last token.
    fed = np.arange(-silent.prompts.shape[1], T)[None] != mask.sum(axis=1, keepdims=True) - 1
    routes = dataclasses.replace(scored.routes, experts=np.where(fed[..., None, None], scored.routes.experts, -1))
    rollout = dataclasses.replace(silent, behaviour_logprobs=logprobs, logprobs=logprobs, routes=routes)
    old = logprobs + 1e-3 * rng.standard_normal(mask.shape).astype(np.float32)
    advantages = rng.standard_normal(len(mask)).astype(np.float32)
    return Batch(rollout=rollout, mask=mask, old=OldPolicy(old), advantages=advantages)


@pytest.fixture(scope="module")
def whole(experience) -> Batch:
    """Return the experience with values, returns, reference, routes, kept ids and corrections, used or not.

    Old policy and sampler recorded different experts, and neither those that the policy itself would choose.
    """
    rng = np.random.default_rng(1)
    r = dataclasses.replace(experience.rollout, kept=some_kept(experience.rollout))
    scored = recompute(weights(), r)
    routes, logprobs = scored.routes, np.where(r.mask, scored.logprobs, 0)
    apart = experience.old.logprobs - experience.rollout.logprobs
    r = dataclasses.replace(r, logprobs=logprobs, behaviour_logprobs=logprobs)
    noise, S = rng.normal(scale=0.1, size=routes.logprobs.shape).astype(np.float32), r.prompts.shape[1]
    noise[:, :S] = np.repeat(noise[::G, :S], G, axis=0)  # one record of a group's prompt
    old = dataclasses.replace(
        experience.old,
        logprobs=logprobs + apart,
        reference_logprobs=r.logprobs + rng.normal(scale=0.1, size=r.mask.shape).astype(np.float32),
        values=rng.normal(size=r.mask.shape).astype(np.float32),
        routes=RouterRecord(others(routes.experts, 1), routes.logprobs + noise),
    )
    rollout = dataclasses.replace(r, routes=RouterRecord(others(r.routes.experts, 2), r.routes.logprobs))
    returns, correction = (rng.uniform(size=r.mask.shape).astype(np.float32) for _ in range(2))
    return jax.device_get(
        dataclasses.replace(experience, rollout=rollout, old=old, returns=returns, correction=correction)
    )


def others(experts, by: int) -> np.ndarray:
    """Return expert ids shifted by `by` modulo E; -1 stays."""
    experts = np.asarray(experts)
    return np.where(experts < 0, experts, (experts + by) % CONFIG.num_experts).astype(experts.dtype)


class Trainer(NamedTuple):
    """A first state, and the update with which one objective learns from mini-batch i of 2."""

    start: Callable[[], TrainState]
    update: Callable[[TrainState, Batch, int], tuple[TrainState, dict]]


def make_trainer(
    *, name="gspo", sizes=None, turns=None, replay="none", rule=None, centering=None, **penalties
) -> Trainer:
    """Return the trainer of an objective; without a mesh if `sizes` is None, with a recorder if `rule` is.

    A batch that is not packed yet takes `turns` micro-batches, one if that is None.
    """
    record, schedule = rule or recorder()
    objective = objectives.make(name)
    critic = CriticRule(CRITIC_GRAPH, CRITIC_SHAPES, record) if objective.critic else None
    options = {"critic": critic, "replay": replay, "centering": centering}
    gradient = make_gradient(GRAPH, SCORING, penalties=Penalties(**penalties), **options)
    shards = math.prod((sizes or {}).values()) // (sizes or {}).get("tensor", 1)

    def rows(batch: Batch) -> Batch:
        packing: Packing | None = batch.packing
        if packing is None:
            packing = packed(batch.rollout, group_size=G, minibatches=2, shards=shards, turns=turns)
        return dealt(dataclasses.replace(batch, packing=None), packing)

    first = partial(new_state, optimizer=record, critic=critic)
    if sizes is None:
        compiled = make_update(gradient, record, schedule, critic=critic)

        def update_here(state, batch, i):
            return compiled(objective, state, NONE, rows(batch), i)

        return Trainer(lambda: first(weights()), update_here)
    mesh = mesh_lib.make_mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        shardings = state_shardings(SHAPES, record, mesh, critic=critic)
        compiled = make_update(gradient, record, schedule, critic=critic, shardings=shardings)

    def update(state, batch, i):
        with jax.set_mesh(mesh):
            batch = rows(batch)
            there = jax.device_put(dataclasses.replace(batch, packing=None), NamedSharding(mesh, PLACES))
            after, metrics = compiled(objective, state, NONE, dataclasses.replace(there, packing=batch.packing), i)
        for leaf, sharding in zip(jax.tree.leaves(after), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), "the update keeps the state's sharding"
        return after, metrics

    return Trainer(lambda: jax.device_put(first(weights()), shardings), update)


def gradient_and_loss(experience, *, trainer: Trainer | None = None, **settings):
    """Return (gradients, metrics) of mini-batch 1 of 2, with a trainer of these settings by default."""
    trainer = trainer or make_trainer(**settings)
    after, metrics = trainer.update(trainer.start(), experience, 1)
    learners = [after.policy] if after.critic is None else [after.policy, after.critic]
    return jax.device_get([learner.opt_state[0].trace for learner in learners]), jax.device_get(metrics)


def distance(expected, found) -> float:
    """Return the norm of the difference of two gradients, relative to the norm of the first."""
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    difference = sum(((np.asarray(a, np.float64) - b) ** 2).sum() for a, b in pairs)
    return math.sqrt(difference / sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(expected)))


@pytest.fixture(scope="module")
def reference(experience):
    return gradient_and_loss(experience)


@pytest.mark.slow
def test_one_checkpoint_on_two_meshes_has_the_same_bits_and_next_loss(experience, tmp_path):
    """The state is the same to the last bit; the loss of the next update differs by at most 1e-5.

    That is 1e-5 of the loss, unless its terms cancel: with advantages that sum to zero in each group, as a run has
    them, the loss is a small rest of terms whose rounding it shares.
    """
    centred = experience.advantages.reshape(-1, G) - experience.advantages.reshape(-1, G).mean(axis=1, keepdims=True)
    batches = [experience, dataclasses.replace(experience, advantages=centred.reshape(-1))]
    run, state = {"key": [1, 2], "prompts": "7"}, new_state(weights(), optimizer=optimizer()[0])
    rng = np.random.default_rng(2)
    moments = jax.tree.map(lambda x: jnp.float32(1e-3 * rng.random(x.shape)) if x.ndim else x, state.policy.opt_state)
    state = dataclasses.replace(state, policy=dataclasses.replace(state.policy, opt_state=moments))
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, state, run)
    losses, norms = [], []
    for sizes in ({"data": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}):
        trainer = make_trainer(sizes=sizes, rule=optimizer())
        there = trainer.start()
        shapes, places = jax.eval_shape(lambda there=there: there), jax.tree.map(lambda leaf: leaf.sharding, there)
        for batch in batches:
            found = restore(tmp_path, shapes, places, check=lambda run: None)
            assert found.run == run
            jax.tree.map(np.testing.assert_array_equal, found.state, state)
            _, metrics = trainer.update(found.state, batch, 1)
            losses.append(float(metrics["actor/loss"]))
            norms.append(float(metrics["actor/grad_norm"]))
    terms = float(np.abs(experience.advantages).mean())
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5) and losses[3] == pytest.approx(losses[1], abs=1e-5 * terms)
    assert abs(losses[1]) < 0.01 * terms, "the terms cancel"


def _said(trained, batch, replay, weigh_by):
    """Return scores and values of whole rows, without prompt sharing."""
    scoring, alone = Scoring(logprob_chunk=1024), Alone(batch.rollout)
    watch = layers_first(batch.old.routes).experts
    routing, kept = Routing(replay, watch, weigh_by=weigh_by), kept_ids(batch.rollout)
    scores = score(GRAPH, Weights.full(trained[0]), alone, scoring, routing=routing, kept=kept)
    return scores, values(CRITIC_GRAPH, trained[1], alone, scoring, policy_hidden=scores.hidden)


SAID = jax.jit(_said)


@jax.jit
def pulled_back(trained, batch, replay, weigh_by, gradients):
    """Return the gradient in the parameters, given gradients in log-probs, entropies and values."""

    def learned_from(trained):
        scores, value = _said(trained, batch, replay, weigh_by)
        return scores.logprobs, scores.entropy, value, scores.kept_logprobs

    return jax.vjp(learned_from, trained)[1](gradients)[0]


def by_the_definition(batch: Batch, name: str, replay: str):
    """Return gradients, metrics and scores of a whole mini-batch: one forward, the objective on it, one backward.

    The forward and backward programs are compiled once; only the objective between them differs.
    """
    objective, r, old, mask = objectives.make(name), batch.rollout, batch.old, batch.mask
    trained = (params(), critic_lib.first_params(CRITIC_SHAPES, params()))
    routes = layers_first(old.routes)
    asked, weigh_by = to_replay(replay, layers_first(r.routes), routes)
    following = np.full_like(routes.experts, -1) if asked is None else asked, weigh_by
    scores, value = SAID(trained, batch, *following)
    alone = Alone(r)
    shift = alone.predicting(router_shift(routes.logprobs, scores.routes.watched))
    weights = objective.weights(mask)

    def loss(logprobs, entropy, value, at_kept):
        total, info = objectives.loss(
            objective,
            logprobs,
            old_logprobs=old.logprobs,
            mask=mask,
            advantages=batch.advantages,
            weights=weights * batch.correction,
            router_shift=shift if objective.router_shift else None,
        )
        c = centred(at_kept, r.kept, mask, batch.correction if objective.one_gain else None)
        total += (weights * info.advantages * (c * at_kept).sum(axis=2)).sum()
        apart = jnp.where(mask, old.reference_logprobs - logprobs, 0)
        divergence = jnp.exp(apart) - 1 - apart
        sums = {"reference_kl": divergence.sum(), "center": size_by_hand(c, at_kept, r.kept, mask)}
        total += (0.1 * divergence - 0.01 * jnp.where(mask, entropy, 0)).sum() / mask.sum()
        if objective.critic:
            losses, clipped = value_loss(value, old.values, batch.returns, mask, clip=objective.critic.value_clip)
            total += objective.critic.value_weight * losses.sum() / mask.sum()
            sums["critic"] = metrics_lib.of_critic(value, batch.returns, losses, clipped, mask)
        return total, (info, {"loss": total, **sums})

    @jax.jit
    def pull_back(scores, value):
        said = (scores.logprobs, scores.entropy, value, scores.kept_logprobs)
        back, (info, sums) = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*said)
        more, maxima = metrics_lib.of_policy(
            scores, batch, info, config=CONFIG, layout=alone, routes=routes, replayed=asked
        )
        return back, metrics_lib.from_sums(sums | more, maxima)

    back, metrics = pull_back(scores, value)
    policy, critic = pulled_back(trained, batch, *following, back)
    return [policy, critic] if objective.critic else [policy], metrics, scores


def centred(log_p, kept: KeptRecord, mask, factor) -> jax.Array:
    """Return the coefficients of score centring, of weights clamped at 1.5, or of a factor's mean over the response."""
    there = (kept.ids >= 0) & mask[..., None]
    p, q = (jnp.where(there, jnp.exp(jax.lax.stop_gradient(x)), 0) for x in (log_p, kept.logprobs))
    rho = (1 - q.sum(axis=2)) / jnp.maximum(1 - p.sum(axis=2), 1e-6)
    rho = jnp.where(kept.whole, 1, rho)[..., None]
    if factor is None:
        return jnp.where(there, jnp.minimum(p, 1.5 * q) - jnp.minimum(1, 1.5 * rho) * p, 0)
    mean = (factor * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    return jnp.where(there, mean[:, None, None] * (q - rho * p), 0)


def size_by_hand(c, log_p, kept: KeptRecord, mask) -> jax.Array:
    """Return the sum over tokens and logits of |Σ_v c_v·∂log p_v/∂z|: c_v − p_v·Σc, and the rest of p by |Σc|."""
    p = jnp.where((kept.ids >= 0) & mask[..., None], jnp.exp(log_p), 0)
    total = c.sum(axis=2, keepdims=True)
    return jnp.abs(c - p * total).sum() + ((1 - p.sum(axis=2)) * jnp.abs(total[..., 0]))[mask].sum()


def metrics_by_hand(scores, batch: Batch) -> dict[str, float]:
    """Return some metrics of the policy, in float64."""
    mask = batch.mask
    new, old, sampled = (
        np.asarray(x, np.float64)[mask] for x in (scores.logprobs, batch.old.logprobs, batch.rollout.logprobs)
    )
    d, x = new - old, new - sampled
    return {
        "actor/kl": (np.exp(d) - 1 - d).mean(),
        "actor/entropy": np.asarray(scores.entropy)[mask].mean(),
        "ratio/token_log_max": np.abs(d).max(),
        "ratio/token_log_std": d.std(),
        "mismatch/kl": (np.exp(x) - 1 - x).mean(),
        "mismatch/max": np.abs(x).max(),
        "mismatch/beyond_2x": (np.abs(x) > np.log(2)).mean(),
        "mismatch/pearson": np.corrcoef(new, sampled)[0, 1],
        "update/tokens": mask.sum(),
    }


OWN = {"gspo": "r3", "gspo_token": "none", "ppo": "r2", "rspo": "r3w"}
"""An objective of each kind that an update knows: by sequences, with advantages per token, with a critic, with a router
shift; and the replay of its trainer on eight devices. test_objectives_catalogue.py has what the others are, and that
rows may be split.
"""


on_eight = partial(make_trainer, sizes=EIGHT, turns=2, kl=0.1, entropy=0.01, centering=Centering(tis(cap=1.5)))


@pytest.fixture(scope="module")
def gspo() -> Trainer:
    """Return the trainer of gspo on eight devices."""
    return on_eight(name="gspo", replay=OWN["gspo"])


@pytest.mark.parametrize("name", mostly_slow(OWN, always=("gspo",)))
def test_objectives_are_their_definition_on_eight_devices_and_in_micro_batches(name, whole, gspo):
    """Gradients agree to 1e-6 with one forward, the objective, and one backward on a row for each response.

    The loss includes critic, reference KL, entropy bonus, mismatch correction and score centring; log-probs are over
    kept sets; some responses have an environment's tokens, and one is not learned from.
    """
    whole = in_turns(whole, of_tokens=objectives.make(name).token_advantages)
    batch = take_minibatch(whole, 1, count=2, group_size=G)
    expected, expected_metrics, scores = by_the_definition(batch, name, OWN[name])
    trainer = gspo if name == "gspo" else on_eight(name=name, replay=OWN[name])
    grads, metrics = gradient_and_loss(whole, trainer=trainer)
    assert distance(expected, grads) < 1e-6
    for metric, value in expected_metrics.items():
        # Float32 variances lose digits as differences of sums of squares.
        atol = {"mismatch/pearson": 3e-4, "critic/explained_variance": 1e-5}.get(metric, 1e-6)
        np.testing.assert_allclose(metrics[metric], value, rtol=2e-5, atol=atol, err_msg=metric)
    for metric, value in metrics_by_hand(scores, batch).items():
        # Without replay the sampler agrees with the trainer, and the mismatch is rounding.
        atol = 1e-5 if metric.startswith("mismatch/") else 1e-8
        np.testing.assert_allclose(metrics[metric], value, rtol=2e-4, atol=atol, err_msg=metric)
    if OWN[name] == "none":
        assert metrics["mismatch/max"] < 1e-4


@pytest.mark.slow
def test_gradient_is_that_of_the_objective_on_whole_logits(experience, reference):
    """Chunks, scans and donation give the gradient of a plain jax.grad over whole [B, T, V] logits, to 2e-4."""
    batch = take_minibatch(experience, 1, count=2, group_size=G)
    r = batch.rollout

    def loss(p):
        logits, S = [], r.prompts.shape[1]
        in_prompt = np.arange(S)[None] < r.prompt_lengths[:, None]
        out = nnx.merge(GRAPH, p)(
            jnp.concatenate([r.prompts, r.tokens], 1), valid=jnp.concatenate([in_prompt, r.mask], 1)
        ).logits
        for b, n in enumerate(r.prompt_lengths):
            logits.append(jnp.concatenate([out[b, n - 1][None], out[b, S : S + T - 1]]))
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(jnp.stack(logits)), r.tokens[..., None], -1)[..., 0]
        d = jnp.where(r.mask, logprobs - batch.old.logprobs, 0)
        s = jnp.exp(d.sum(1) / r.mask.sum(1))
        return -jnp.minimum(s * batch.advantages, jnp.clip(s, 1 - 3e-4, 1 + 4e-4) * batch.advantages).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params())
    expected, metrics = reference
    assert leaf_errors(expected, [grads]) < 2e-4
    np.testing.assert_allclose(metrics["actor/loss"], value, rtol=1e-4)


def test_minibatches_are_whole_groups_and_a_partition():
    rows = np.arange(P * G)
    parts = [take_minibatch(rows, i, count=4, group_size=G) for i in range(4)]
    assert sorted(np.concatenate(parts)) == rows.tolist()
    for part in parts:
        assert (part.reshape(-1, G) // G == part.reshape(-1, G)[:, :1] // G).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad, whole, gspo):
    advantages = np.full_like(whole.advantages, bad)
    before = gspo.start()
    state, metrics = gspo.update(gspo.start(), dataclasses.replace(whole, advantages=advantages), 0)
    assert metrics["update/skipped"] == state.skipped == 1
    assert state.updates == 1
    chex.assert_trees_all_equal(state.policy, before.policy)
    state, metrics = gspo.update(state, whole, 0)
    assert metrics["update/skipped"] == 0
    assert state.skipped == 1
    assert leaf_errors(before.params, state.params) > 0


def test_the_blame_for_a_skipped_update_counts_what_is_not_finite_in_each_leaf():
    def gradient(objective, state, frozen, experience, index, teacher):
        policy, critic = {"a": jnp.array([jnp.nan, 1, jnp.inf]), "b": jnp.ones(3)}, None
        return (policy, critic), {"actor/loss": jnp.nan * index}

    loss, counts = make_blame(gradient)(None, None, NONE, None, 1)
    assert np.isnan(loss) and counts == {"policy": {"a": 2, "b": 0}, "critic": None}


@pytest.mark.faults
def test_batches_with_nothing_to_learn_from_are_finite_and_counted():
    """Rewards that are all equal, responses of nothing but an EOS, and only truncated ones, which are to be dropped."""
    trainer, plain, B = make_trainer(), responses(P, G, T), P * G
    experience = make_experience(group_size=G, correction=None, kl_in_reward=0.0)
    shaping = Shaping(group_size=G, limit=T, penalty=0.0, cache=0, drop_truncated=True)
    varied = np.random.default_rng(0).standard_normal(B).astype(np.float32)
    first = np.broadcast_to(np.arange(T) == 0, (B, T))
    logprobs = np.full((B, T), -math.log(CONFIG.vocab_size), np.float32)
    cases = {  # rewards, mask, truncated; the share's metric
        "equal": (np.full(B, 0.3, np.float32), plain.mask, np.zeros(B, bool), "reward/zero_std"),
        "empty": (varied, first, np.zeros(B, bool), "response/empty"),
        "truncated": (varied, plain.mask, np.ones(B, bool), "response/truncated"),
    }
    for case, (total, mask, truncated, share) in cases.items():
        silent = dataclasses.replace(plain, mask=mask, action_mask=mask, truncated=truncated)
        routes = RouterRecord(np.zeros_like(silent.routes.experts), None)
        rollout = dataclasses.replace(silent, logprobs=logprobs, behaviour_logprobs=logprobs, routes=routes)
        lengths, none = mask.sum(axis=1), np.zeros(B, int)
        counts = {"lengths": lengths, "drawn": lengths, "turns": none + 1, "stale_tokens": none}
        rewards = Rewards(total=total, learn=np.isfinite(total), by_name={"exact_answer": total})
        old, packing = OldPolicy(logprobs), packed(rollout, group_size=G, minibatches=2)
        scored = Batch(rollout=rollout, old=old, truncated=truncated, rewards=rewards, **counts)
        found = jax.device_get(experience(objectives.gspo(), dealt(scored, packing), shaping.rewards(scored)))
        batch = dataclasses.replace(scored, **{x: packing.in_order(getattr(found, x)) for x in ("mask", "advantages")})
        gradients, metrics = gradient_and_loss(batch, trainer=trainer)
        metrics |= response_metrics(response_columns(scored, shaping, turns=True, older=True))
        assert all(np.isfinite(value).all() for value in metrics.values()), case
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)), case
        assert metrics["update/skipped"] == 0, case
        # An EOS at once is an action like any other, and learned from.
        assert (metrics["actor/grad_norm"] > 0.1) if case == "empty" else (metrics["actor/grad_norm"] == 0), case
        assert metrics["response/learned"] == (0 if case == "truncated" else 1), case
        assert metrics[share] == 1, case
        assert all(metrics[other] < 0.2 for *_, other in cases.values() if other != share), case


def test_updates_make_good_responses_likelier(whole, gspo):
    rollout, state = whole.rollout, gspo.start()
    old = dataclasses.replace(whole.old, logprobs=rollout.logprobs, reference_logprobs=rollout.logprobs)
    for minibatch in range(2):
        state, _ = gspo.update(state, dataclasses.replace(whole, old=old), minibatch)
    after = recompute(Weights.full(jax.device_get(state.params)), rollout).logprobs
    gain = np.where(rollout.mask, np.asarray(after) - rollout.logprobs, 0)
    gain = gain.sum(axis=1) / rollout.mask.sum(axis=1)
    assert gain[whole.advantages > 0.5].mean() > gain[whole.advantages < -0.5].mean()


def test_explained_variance_by_hand():
    """Errors 0, 0 and 3 have a variance of 2, returns 1, 2 and 6 one of 14/3; without variance none is explained."""
    mask = jnp.array([[True, True, True, False]])
    returns, values = jnp.array([[1.0, 2.0, 6.0, 9.0]]), jnp.array([[1.0, 2.0, 3.0, 0.0]])

    @jax.jit
    def explained(values, returns):
        sums = metrics_lib.of_critic(values, returns, returns, mask, mask)
        return metrics_lib._critic_metrics(sums, mask.sum())["critic/explained_variance"]

    np.testing.assert_allclose(explained(values, returns), 1 - 2 / (14 / 3), rtol=1e-6)
    assert explained(values, jnp.full((1, 4), 2.0)) == 0


def test_learning_rate_warms_up_from_above_zero_and_ends_as_told():
    _, constant = optimizer(warmup_updates=4)
    np.testing.assert_allclose([constant(i) for i in (0, 2, 4, 100)], [2e-4, 6e-4, 1e-3, 1e-3], rtol=1e-6)
    _, cosine = optimizer(schedule="cosine", total_updates=10)
    np.testing.assert_allclose([cosine(0), cosine(5), cosine(10)], [1e-3, 5e-4, 0], atol=1e-9)


MATRICES = {f"attention.{name}" for name in "qkvo"} | {"mlp.gate", "mlp.up", "mlp.down"}


@pytest.mark.parametrize(
    ("no_decay", "left_out"),
    [
        (adamw(learning_rate=1.0, schedule="constant", warmup_updates=0).no_decay, {"norm", "router"}),
        ((), set()),
        (("norm", "embed", "head"), {"norm", "embed", "head"}),
    ],
)
def test_weight_decay_shrinks_matrices_and_leaves_out_what_the_field_names(no_decay, left_out):
    """Of a policy, a critic and adapters, one beside the router; the gradient is zero, so that only decay is left."""
    adapters = Adapters(rank=2, expert_rank=2, targets=(*TARGETS,))
    beside = lora.split(transformer.abstract(CONFIG, adapters=adapters)[1])[0]
    kinds = {
        **{f"layers.0.{name}": "" for name in MATRICES},
        **{f"layers.0.{name}_adapter.{which}": "" for name in MATRICES for which in "ab"},
        **{f"layers.0.mlp.router{which}": "router" for which in ("", "_adapter.a", "_adapter.b")},
        **{f"layers.0.{name}": "norm" for name in ("attention_norm", "mlp_norm")},
        **{f"layers.0.attention.{name}_norm.scale": "norm" for name in "qk"},
        "norm": "norm",
        "embed": "embed",
        "head": "head",
    }
    rule, _ = optimizer(learning_rate=1.0, weight_decay=0.5, no_decay=no_decay)
    seen = set()
    for shapes in (SHAPES, beside, CRITIC_SHAPES):
        ones, none = (jax.tree.map(lambda _, fill=fill: jnp.float32(fill), shapes) for fill in (1, 0))
        changes, _ = rule.update(none, rule.init(ones), ones)
        for name, change in by_path(changes).items():
            kind = kinds[name.removeprefix("trunk.")]
            np.testing.assert_array_equal(change, 0.0 if kind in left_out else -0.5, err_msg=name)
            seen.add(name.removeprefix("trunk."))
    assert seen == set(kinds)


def test_no_update_touches_a_buffer():
    rule, _ = optimizer(learning_rate=1.0, weight_decay=0.5, no_decay=())
    config = dataclasses.replace(CONFIG, family="glm4_moe")
    ones, none = (
        jax.tree.map(lambda x, n=n: jnp.full(x.shape, n), transformer.abstract(config)[1]) for n in (1.0, 0.0)
    )
    changes = by_path(rule.update(none, rule.init(ones), ones)[0])
    assert not changes.pop("layers.0.mlp.choice_bias").any() and all(
        (change == -0.5).all() for change in changes.values()
    )


def test_a_word_that_names_no_parameters_is_told():
    with pytest.raises(UserError, match=r"no_decay has 'norms'; use some of norm, bias, router, embed, head, or \(\)"):
        optimizer(no_decay=("norms",))


@pytest.mark.slow
def test_no_buffer_holds_the_whole_logits():
    """With Qwen3's vocabulary, temporaries stay below a third of one float32 [B, T, V] array plus two gradients."""
    V, B, S, length = 151_936, 8, 64, 192
    config = dataclasses.replace(CONFIG, vocab_size=V, num_layers=1)
    graph, shapes = transformer.abstract(config)
    opt, schedule = optimizer()
    update = make_update(make_gradient(graph, SCORING), opt, schedule)

    def of(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    packer = Packer(group_size=4, minibatches=1, shards=1, row_lengths=(B * length + 2 * S,))
    rows = packer(np.full(B, length), np.full(B, S))
    places = rows.responses.shape
    rollout = Rollout(
        prompts=of((*places, S), jnp.int32),
        prompt_lengths=of(places, jnp.int32),
        tokens=of((*places, length), jnp.int32),
        mask=of((*places, length), bool),
        action_mask=of((*places, length), bool),
        truncated=of(places, bool),
        behaviour_logprobs=of((*places, length)),
        logprobs=of((*places, length)),
        routes=RouterRecord(of((*places, S + length, 1, 2), jnp.int8), of((*places, S + length, 1, 2))),
    )
    state: TrainState = jax.eval_shape(partial(new_state, optimizer=opt), Weights.full(shapes))
    old, mask = OldPolicy(of((*places, length))), of((*places, length), bool)
    experience = Batch(rollout=rollout, mask=mask, old=old, advantages=of(places), packing=rows)
    compiled = update.lower(objectives.gspo(), state, NONE, experience, 0).compile()
    memory = compiled.memory_analysis()
    logits = 4 * B * length * V
    gradients = 4 * 2 * V * config.hidden_size
    assert memory.temp_size_in_bytes < logits // 3 + 2 * gradients, f"{memory.temp_size_in_bytes:,} of {logits:,}"
    assert f"[{B},{length},{V}]" not in compiled.as_text()
    assert f"[{B},{S + length},{V}]" not in compiled.as_text()


def in_turns(experience: Batch, *, of_tokens: bool) -> Batch:
    """Return the experience with an environment's tokens amid some responses, and tokens' advantages if asked for."""
    rng, mask = np.random.default_rng(3), np.array(experience.mask)
    mask[::3, 2:4] = False
    mask[5] = False  # a response that is not learned from
    rollout = dataclasses.replace(experience.rollout, action_mask=experience.rollout.action_mask & mask)
    advantages = rng.standard_normal(mask.shape).astype(np.float32) if of_tokens else experience.advantages
    return dataclasses.replace(experience, rollout=rollout, mask=mask, advantages=advantages)


WEIGHTED = ("ppo", "grpo", "dr_grpo", "luspo")
"""Objectives with each kind of weights, and the one with a critic."""


def test_the_catalogue_has_no_other_weights():
    mask = jnp.arange(5)[None] < jnp.asarray([1, 5, 3, 0, 2, 4])[:, None]
    known = {objectives.make(name).weights(mask).tobytes() for name in WEIGHTED}
    assert {objectives.make(name).weights(mask).tobytes() for name in objectives.catalogue.__all__} <= known


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_every_kind_of_weights_has_the_same_penalties_means_over_tokens(name, whole):
    """With their coefficients in the loss, it grows by these times the metrics, which are means over the tokens.

    The terms are added by one function, which sees no objective but the critic's.
    """
    batch, objective = in_turns(whole, of_tokens=False), objectives.make(name)
    batch = dealt(batch, packed(batch.rollout, group_size=G, minibatches=2, turns=4))
    critic = CriticRule(CRITIC_GRAPH, CRITIC_SHAPES, recorder()[0]) if objective.critic else None
    coefficients = {"reference/kl": 0.1, "actor/entropy": -0.2, "routing/balance_loss": 0.3, "routing/z_loss": 0.4}
    chosen = Penalties(), Penalties(kl=0.1, entropy=0.2, balance=0.3, router_z=0.4)
    made = [make_gradient(GRAPH, SCORING, penalties=penalties, critic=critic) for penalties in chosen]
    state = new_state(weights(), optimizer()[0], critic=critic)
    found = jax.jit(lambda batch: [gradient(objective, state, NONE, batch, 1)[1] for gradient in made])(batch)
    added = float(found[1]["actor/loss"]) - float(found[0]["actor/loss"])
    means = {metric: float(found[1][metric]) for metric in coefficients}
    assert added == pytest.approx(sum(c * means[metric] for metric, c in coefficients.items()), rel=1e-4)


@pytest.mark.slow
def test_rows_agree_on_any_number_of_devices_and_micro_batches(whole):
    """With all penalties, gradient and metrics are those of a single row on one device."""
    batch = in_turns(whole, of_tokens=False)
    trainer = partial(make_trainer, name="rspo", replay=OWN["rspo"], kl=0.1, entropy=0.01, balance=0.1, router_z=0.1)
    expected, expected_metrics = gradient_and_loss(batch, trainer=trainer())
    # Eight shards have four responses each, which fit in two of the shortest rows.
    for sizes, turns in ((None, 4), ({"expert": 4, "tensor": 2}, 2)):
        grads, metrics = gradient_and_loss(batch, trainer=trainer(sizes=sizes, turns=turns))
        assert leaf_errors(expected, grads) < 1e-5 and distance(expected, grads) < 1e-6
        assert metrics.keys() == expected_metrics.keys()
        for metric, value in expected_metrics.items():
            # Float32 variances lose digits as differences of sums of squares.
            atol = 3e-4 if metric == "mismatch/pearson" else 1e-6
            np.testing.assert_allclose(metrics[metric], value, rtol=2e-5, atol=atol, err_msg=metric)


@pytest.mark.slow
def test_one_program_serves_every_number_of_micro_batches(whole):
    trainer, long = make_trainer(replay="r2"), packed(whole.rollout, group_size=G, minibatches=2, turns=4)
    state, _ = trainer.update(trainer.start(), dataclasses.replace(whole, packing=long), 1)
    short = dataclasses.replace(whole.rollout, mask=whole.rollout.mask & (np.arange(T)[None] < 3))
    batch = dataclasses.replace(whole, rollout=short, mask=short.mask)
    packer = Packer(group_size=G, minibatches=2, shards=1, row_lengths=long.row_lengths)
    packing = packer(short.mask.sum(axis=1), np.asarray(short.prompt_lengths))
    assert packing.turns[1, 0] < 4
    count = CompileCounter()
    trainer.update(state, dataclasses.replace(batch, packing=packing), 1)
    count.stop()
    assert count.programs == 0
