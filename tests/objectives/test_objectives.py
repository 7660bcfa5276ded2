"""The library's entry points: rewards or advantages, lookup by name, clip fractions, and errors for bad input."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import objectives
from gspo_jax.errors import UserError
from gspo_jax.objectives import catalogue
from gspo_jax.objectives.surrogates import TokenBatch

OLD = jnp.log(jnp.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]))
# Token ratios 1.5, 0.5 and 1.1 in every row; the rows have 3, 2, 1 and 0 tokens.
NEW = OLD + jnp.log(jnp.array([[1.5, 0.5, 1.1]] * 4))
MASK = jnp.array([[True, True, True], [True, True, False], [True, False, False], [False] * 3])


def test_the_example_of_the_readme():
    rewards = jnp.array([1.0, 0.0, 0.0, 1.0])
    loss, info = objectives.loss(
        objectives.gspo(low=3e-4, high=4e-4), NEW, old_logprobs=OLD, mask=MASK, rewards=rewards, group_size=4
    )
    # Â = ±0.866024 as in test_objectives_advantages; the empty row still counts in its group. Sequence ratios:
    # (1.5·0.5·1.1)^(1/3) = 0.937889, 0.75^(1/2) = 0.866025, and 1.5. Row 0 (+) is below the range and passes, row 1 (−)
    # is clipped at 0.9997, row 2 (−) is above and passes.
    want = -0.866024 * (0.937889 - 0.9997 - 1.5) / 3
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_array_equal(info.gated, [[False] * 3, [True, True, False], [False] * 3, [False] * 3])
    np.testing.assert_allclose(info.ratio[0], [0.937889] * 3, rtol=1e-5)
    np.testing.assert_allclose(info.weights[:, 0], [1 / 9, 1 / 6, 1 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(info.advantages[:, 0], [0.866024, -0.866024, -0.866024, 0], rtol=1e-5)


def test_rewards_are_the_advantages_of_the_objective():
    # Groups (1, 0) and (3, 1): centred ±0.5 and ±1; divided by the deviation ±√½; leave-one-out ±1 and ±2.
    rewards = jnp.array([1.0, 0.0, 3.0, 1.0])
    zscore, centered, others = [0.7071, -0.7071, 0.7071, 0], [0.5, -0.5, 1, 0], [1, -1, 2, 0]
    for name in catalogue.__all__:
        objective = objectives.make(name)
        batch = {"old_logprobs": OLD, "mask": MASK}
        batch |= {"router_shift": jnp.ones((4, 3))} if objective.router_shift else {}
        if name == "ppo":
            continue
        _, info = objectives.loss(objective, NEW, **batch, rewards=rewards, group_size=2)
        want = {"dr_grpo": centered, "minirl": centered, "reinforce": others, "rloo": others}.get(name, zscore)
        np.testing.assert_allclose(info.advantages[:, 0], want, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("gspo", "the objective is 'gspo', not an Objective; pass what its factory returns, objectives.gspo()"),
        ("GSPO-token", "the objective is 'GSPO-token', not an Objective; .*, objectives.gspo_token()"),
        ("banana", "no objective 'banana'; there are cispo"),
        (objectives.dr_grpo, "the objective is <function dr_grpo.*, not an Objective; .*, objectives.dr_grpo()"),
        (objectives, "the objective is <module .*, not an Objective; .*, objectives.gspo()"),
        (None, "the objective is None, not an Objective; pass what its factory returns, objectives.gspo()"),
    ],
)
def test_what_is_no_objective_is_told(given, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(").replace(")", r"\)")):
        objectives.loss(given, NEW, old_logprobs=OLD, mask=MASK, rewards=jnp.ones(4), group_size=4)


def test_ppo_takes_advantages_from_a_critic_and_never_rewards_alone():
    batch = {"old_logprobs": OLD, "mask": MASK}
    with pytest.raises(
        UserError, match=r"ppo takes its advantages from a critic, not from rewards \[B\]; pass advantages=gae"
    ):
        objectives.loss(objectives.ppo(), NEW, **batch, rewards=jnp.ones(4), group_size=2)
    for advantages in (jnp.ones(4), jnp.ones((4, 3))):
        loss, _ = objectives.loss(objectives.ppo(), NEW, **batch, advantages=advantages)
        np.testing.assert_allclose(loss, -(3 * 1.2 + 2 * 0.5 + 1.1) / 6, rtol=1e-6)


def test_the_router_shift_is_asked_for_where_it_is_needed_and_nowhere_else():
    batch = {"old_logprobs": OLD, "mask": MASK, "advantages": jnp.ones(4)}
    with pytest.raises(UserError, match=r"rspo damps tokens .* pass router_shift \[B, T\]"):
        objectives.loss(objectives.rspo(), NEW, **batch)
    with pytest.raises(ValueError, match="gmpo does not use router_shift; leave it out"):
        objectives.loss(objectives.gmpo(), NEW, **batch, router_shift=jnp.ones((4, 3)))
    with pytest.raises(ValueError, match=r"router_shift has shape \[4\]; it must be \[B, T\] = \[4, 3\]"):
        objectives.loss(objectives.rspo(), NEW, **batch, router_shift=jnp.ones(4))
    with pytest.raises(AssertionError, match=r"rspo needs TokenBatch.router_shift"):
        objectives.rspo().surrogate(TokenBatch(NEW, OLD, MASK, jnp.ones((4, 3))))


def test_given_weights_replace_the_batch_s_own():
    weights = jnp.full((4, 3), 0.125)
    loss, info = objectives.loss(
        objectives.grpo(), NEW, old_logprobs=OLD, mask=MASK, advantages=jnp.ones(4), weights=weights
    )
    # Six tokens: 1.5 is clipped to 1.2 three times, 0.5 passes twice, 1.1 once.
    np.testing.assert_allclose(loss, -0.125 * (3 * 1.2 + 2 * 0.5 + 1.1), rtol=1e-6)
    np.testing.assert_array_equal(info.weights, np.where(MASK, 0.125, 0))


def test_all_of_it_runs_in_one_program():
    @jax.jit
    def program(new, rewards):
        objective = objectives.make("grpo", low=0.2)
        loss, info = objectives.loss(objective, new, old_logprobs=OLD, mask=MASK, rewards=rewards, group_size=2)
        return loss, info, objectives.clip_fractions(objectives.clip_sums(info, MASK))

    loss, info, fractions = program(NEW, jnp.array([1.0, 0, 0, 1]))
    assert np.isfinite(loss) and isinstance(info, objectives.Info)
    assert info.gated.any() and fractions["clip_fraction/token"] > 0


def test_clip_fractions_by_hand():
    # Row 0 (+): 1.5 is clipped above, 1 of 3. Row 1 (−): 0.5 is clipped below, 1 of 2. Row 2 (+): 1.5 is clipped above,
    # 1 of 1.
    advantages = jnp.array([1.0, -1.0, 1.0, 1.0])
    _, info = objectives.loss(objectives.grpo(), NEW, old_logprobs=OLD, mask=MASK, advantages=advantages)
    sums = objectives.clip_sums(info, MASK)
    assert sums == (6, 3, 1, 2, 0.5, pytest.approx(4 / 3))
    assert all(x.dtype == jnp.float32 for x in sums)
    assert objectives.clip_fractions(sums) == pytest.approx(
        {
            "clip_fraction/token": 3 / 6,
            "clip_fraction/token_low": 1 / 6,
            "clip_fraction/token_high": 2 / 6,
            "clip_fraction/sequence": (1 / 3 + 1 / 2 + 1) / 3,
            "clip_fraction/sequence_low": (1 / 2) / 3,
            "clip_fraction/sequence_high": (1 / 3 + 1) / 3,
        }
    )


@pytest.mark.parametrize("name", catalogue.__all__)
def test_the_catalogue_is_reached_by_name_and_documented(name):
    factory = getattr(objectives, name)
    assert objectives.make(name).name == name and name in objectives.__all__
    assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(factory).parameters.values())
    summary = inspect.getdoc(factory).splitlines()
    assert summary[0].endswith(".") and not summary[1]
    assert "gain[i,t] = " in factory.__doc__ and re.search(r"arxiv\.org/abs/\d{4}\.\d{5}", factory.__doc__)


def test_hyper_parameters_reach_the_objective():
    batch = {"old_logprobs": OLD, "mask": MASK, "advantages": jnp.ones(4)}
    for high in (0.2, 0.4):
        _, info = objectives.loss(objectives.make("grpo", high=high), NEW, **batch)
        np.testing.assert_allclose(info.ratio[0], [1.5, 0.5, 1.1], rtol=1e-6)
        assert info.gated_high.sum() == 3
    assert not objectives.loss(objectives.make("grpo", high=0.6), NEW, **batch)[1].gated.any()


def test_none_is_a_value_of_the_options_that_can_be_off():
    """Unset config placeholders are None, which options that can be off accept as a value."""
    assert objectives.make("grpo", dual_clip=None) and objectives.make("dr_grpo", length=None)
    assert objectives.make("cispo", mask=None)


NAN = float("nan")


@pytest.mark.parametrize(
    "name, hyper, message",
    [
        ("gsop", {}, "no objective 'gsop'; did you mean 'gspo'? there are cispo, dapo, dppo_kl, "),
        ("clipped", {}, "no objective 'clipped'; "),
        ("GSPO", {}, "no objective 'GSPO'; did you mean 'gspo'? there are"),
        ("gspo-token", {}, "no objective 'gspo-token'; did you mean 'gspo_token'? "),
        ("GSPO-Token", {}, "did you mean 'gspo_token'? "),
        ("Dr. GRPO", {}, "did you mean 'dr_grpo'? "),
        ("drgrpo", {}, "did you mean 'dr_grpo'? "),
        ("dapo ", {}, "no objective 'dapo '; did you mean 'dapo'? "),
        ("DPPO-TV", {}, "did you mean 'dppo_tv'? "),
        ("MiniRL", {}, "did you mean 'minirl'? "),
        ("", {}, "no objective ''; there are cispo"),
        ("gspo", {"hihg": 1.0}, "gspo has no hyper-parameter 'hihg'; did you mean 'high'? there are low, high, dual_"),
        ("rloo", {"low": 1.0}, "rloo has no hyper-parameter 'low'; it has none"),
        ("gspo", {"low": -0.1}, "low=-0.1 lies outside [0, 1]; it is an offset from 1, so low=0.2 clips at 0.8"),
        ("grpo", {"low": 1.2}, "low=1.2 lies outside [0, 1]; it is an offset from 1"),
        ("gspo_token", {"high": -1e-9}, "high=-1e-09 is below 0; it is an offset from 1, so high=0.2 clips at 1.2"),
        ("dapo", {"high": NAN}, "high=nan is below 0"),
        (
            "grpo",
            {"dual_clip": 1.0},
            "dual_clip=1.0 is not above 1; it caps the ratio where Â < 0, use 3 or None for off",
        ),
        ("gspo", {"dual_clip": 0.5}, "dual_clip=0.5 is not above 1"),
        ("gspo_token", {"dual_clip": NAN}, "dual_clip=nan is not above 1"),
        ("dr_grpo", {"length": 0}, "length=0 is not a positive number; it divides every response alike"),
        ("cispo", {"low": 1.5}, "low=1.5 lies outside [0, 1]"),
        ("cispo", {"mask": "pop"}, "no mask 'pop'; did you mean 'ppo'? there are ppo"),
        ("gmpo", {"log_clip": 0.0}, "log_clip=0.0 is not a positive number; it bounds log r, so 0.4 clips r at 0.67"),
        ("gmpo", {"log_clip": float("inf")}, "log_clip=inf is not a positive number"),
        ("rspo", {"log_clip": -1.0}, "log_clip=-1.0 is not a positive number"),
        ("rspo", {"gamma_min": 0.0}, "gamma_min=0.0 lies outside (0, 1]; it is the smallest damping factor of a token"),
        ("rspo", {"gamma_min": 1.1}, "gamma_min=1.1 lies outside (0, 1]; it is the smallest damping factor of a token"),
        ("rspo", {"apply": "befor"}, "no apply 'befor'; did you mean 'before'? there are before, after"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos=0.0 is not a positive number; it is the steepness of the gate"),
        ("sapo", {"tau_neg": -1.0}, "tau_neg=-1.0 is not a positive number"),
        ("ppo", {"gamma": 1.1}, "gamma=1.1 lies outside [0, 1]; 1 means no discount"),
        ("ppo", {"lam": -0.1}, "lam=-0.1 lies outside [0, 1]; 1 means no discount"),
        ("ppo", {"value_clip": 0.0}, "value_clip=0.0 is not a positive number; it bounds how far a value may move"),
        (
            "ppo",
            {"value_weight": -1.0},
            "value_weight=-1.0 is not a finite number of at least 0; it is the weight of the critic's loss",
        ),
        ("ppo", {"low": 2.0}, "low=2.0 lies outside [0, 1]"),
        ("dppo_tv", {"high": 1.5}, "high=1.5 lies outside [0, 1]; it bounds the change of a token's probability"),
        ("dppo_tv", {"low": -0.1}, "low=-0.1 lies outside [0, 1]"),
        ("dppo_tv", {"cap": 0.0}, "cap=0.0 is not a positive number; it is the largest importance weight of a token"),
        ("dppo_kl", {"low": -0.1}, "low=-0.1 is not a finite number of at least 0; it bounds a KL divergence, in nats"),
        ("dppo_kl", {"high": NAN}, "high=nan is not a finite number of at least 0"),
        ("luspo", {"low": 2.0}, "low=2.0 lies outside [0, 1]; it is an offset from 1"),
        ("minirl", {"high": -1.0}, "high=-1.0 is below 0"),
        ("vespo", {"k_pos": 0.0}, "k_pos=0.0 is not a positive number; it shapes the weight W^k·exp(λ·(1 − W))"),
        ("vespo", {"lambda_pos": -1.0}, "lambda_pos=-1.0 is not a positive number"),
        ("vespo", {"k_neg": NAN}, "k_neg=nan is not a positive number"),
        ("vespo", {"lambda_neg": 0.0}, "lambda_neg=0.0 is not a positive number"),
        ("dro", {"beta": 0.0}, "beta=0.0 is not a positive number; it is the weight of the penalty, usually 0.05"),
        ("tbpo", {"high_neg": 0.0}, "high_neg=0.0 is not a positive number; it is an offset from 1, so high_neg=7e-4"),
        ("tbpo", {"low": -0.1}, "low=-0.1 lies outside [0, 1]"),
        ("minpro", {"high": NAN}, "high=nan is below 0"),
    ],
)
def test_what_a_config_can_get_wrong(name, hyper, message):
    with pytest.raises(UserError, match=re.escape(message)):
        objectives.make(name, **hyper)


def test_an_rspo_that_damps_nothing_is_allowed():
    assert objectives.make("rspo", gamma_min=1.0)


def test_factories_beside_the_catalogue_are_built_likewise():
    def mine(*, low):
        return objectives.grpo(low=low)

    assert objectives.make("mine", {"mine": mine}, low=0.1).bounds == {"low": 0.1, "high": 0.2}
    with pytest.raises(UserError, match=r"no objective 'mien'; did you mean 'mine'\? there are .*gspo.*, mine$"):
        objectives.make("mien", {"mine": mine})
    with pytest.raises(UserError, match=r"mine needs its hyper-parameter 'low'; give it, or a default to the function"):
        objectives.make("mine", {"mine": mine})
    with pytest.raises(UserError, match=r"mine returns 3; return a gspo_jax.objectives.Objective"):
        objectives.make("mine", {"mine": lambda: 3})


@pytest.mark.parametrize("name", [name for name in catalogue.__all__ if "low" in objectives.make(name).bounds])
def test_offsets_at_their_limits_are_allowed(name):
    assert objectives.make(name, low=0.0, high=0.0) and objectives.make(name, low=1.0, high=4.0)
    for bad in ({"low": 1.001}, {"low": -0.001}, {"high": -0.001}):
        with pytest.raises(UserError, match="offset from 1"):
            objectives.make(name, **bad)


def test_an_advantage_for_each_token_is_for_those_whose_definition_allows_it():
    allowed = {"gspo_token", "grpo", "ppo", "dapo", "cispo", "sapo", "reinforce", "dro", "minpro"}
    assert {name for name in catalogue.__all__ if objectives.make(name).token_advantages} == allowed
    for name in set(catalogue.__all__) - allowed:
        says = rf"{name} takes one advantage per response, \[B\], but got \[4, 3\]; .* gspo_token"
        with pytest.raises(UserError, match=says):
            objectives.loss(objectives.make(name), NEW, old_logprobs=OLD, mask=MASK, advantages=jnp.ones((4, 3)))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"old_logprobs": OLD[:, :2]},
            "the shapes are logprobs [4, 3], old_logprobs [4, 2], mask [4, 3]; all must be the same [B, T]",
        ),
        ({"mask": MASK[:3]}, "mask [3, 3]; all must be the same [B, T]"),
        ({"mask": MASK.astype(jnp.float32)}, "mask is float32, not bool; use mask != 0"),
        ({"advantages": jnp.ones(3)}, "advantages have shape [3]; it must be [B] or [B, T], here [B, T] = [4, 3]"),
        ({"advantages": jnp.ones((4, 1))}, "advantages have shape [4, 1]; it must be"),
        ({"advantages": jnp.ones(())}, "advantages have shape []; it must be"),
        ({"weights": jnp.ones(4)}, "weights has shape [4]; it must be [B, T] = [4, 3]"),
        ({"weights": jnp.ones((4, 1))}, "weights has shape [4, 1]; it must be [B, T] = [4, 3]"),
        ({"advantages": None}, "either rewards with group_size, or advantages"),
        ({"rewards": jnp.ones(4)}, "either rewards with group_size, or advantages"),
        ({"group_size": 2}, "either rewards with group_size, or advantages"),
        ({"rewards": jnp.ones(4), "group_size": 2}, "either rewards with group_size, or advantages"),
        ({"rewards": jnp.ones(4), "advantages": None}, "either rewards with group_size, or advantages"),
        ({"group_size": 2, "advantages": None}, "either rewards with group_size, or advantages"),
        ({"rewards": jnp.ones(4), "advantages": None, "group_size": 3}, "4 rewards do not split into groups of 3"),
        ({"rewards": jnp.ones(2), "advantages": None, "group_size": 2}, "advantages have shape [2]; it must be"),
    ],
)
def test_what_a_caller_can_get_wrong(change, message):
    arguments = {"old_logprobs": OLD, "mask": MASK, "advantages": jnp.ones(4)} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        objectives.loss(objectives.grpo(), NEW, **arguments)


def test_logprobs_of_the_wrong_rank():
    with pytest.raises(ValueError, match=re.escape("logprobs [3], old_logprobs [3], mask [3]; all must be the same")):
        objectives.loss(objectives.grpo(), NEW[0], old_logprobs=OLD[0], mask=MASK[0], advantages=jnp.ones(1))
