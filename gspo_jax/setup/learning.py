"""Objective, optimizer, critic and loss terms, from a config."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from gspo_jax import objectives
from gspo_jax.errors import UserError
from gspo_jax.kernels.backend import platform
from gspo_jax.models import critic as critic_lib
from gspo_jax.models import flops
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.transformer import LEAN
from gspo_jax.objectives import Objective, advantages, mismatch
from gspo_jax.objectives.mismatch import Correction, make_correction
from gspo_jax.setup import functions, players
from gspo_jax.setup.fields import at
from gspo_jax.training import packing
from gspo_jax.training.packing import Packer
from gspo_jax.training.scoring import Scoring
from gspo_jax.training.shaping import OVERLONG, Shaping
from gspo_jax.training.state import CriticRule, make_optimizer
from gspo_jax.training.terms import Penalties
from gspo_jax.training.update import Centering


def make_objective(config: ConfigDict) -> Objective:
    """Return the objective `objective.name`, with its advantages and the off-policy mask.

    Raises:
      UserError: also if `objective.advantage` or `objective.turn_discount` does not fit the objective or the rewards.
    """
    made = _made(config, "objective", config.objective.name, objectives.catalogue.__all__, objectives.make)
    made = dataclasses.replace(made, negative_mask=config.mismatch.negative_mask)
    return _with_turns(config, _with_advantage(config, made))


def _with_advantage(config: ConfigDict, made: Objective) -> Objective:
    name, penalty = config.objective.advantage, config.overlong.penalty
    if not name:
        return made
    if made.advantage is None:
        raise UserError(
            f"objective.advantage is {name!r}, and {made.name} takes its advantages from a critic; leave it empty"
        )
    weights: dict[str, float] = {reward: weight for reward, weight in config.rewards.items() if weight}
    if name == "gdpo":
        if penalty and OVERLONG in weights:
            raise UserError(
                f"with objective.advantage 'gdpo' the length penalty is a reward {OVERLONG!r}, the name of one of the "
                "config's rewards; rename that, or set overlong.penalty to 0"
            )
        if not weights:
            raise UserError(
                "objective.advantage is 'gdpo', and no reward has a weight; give one of them one, or leave it empty"
            )
        weights |= {OVERLONG: 1.0} if penalty else {}  # it is weighted already
        return dataclasses.replace(made, advantage=partial(advantages.gdpo, weights=weights), by_reward=True)
    if name == "optimal_token_baseline":
        if not made.token_advantages:
            raise UserError(
                f"objective.advantage {name!r} gives each token its advantage, and {made.name} has one per response; "
                "use gspo_token, grpo, dapo, cispo or reinforce, or another advantage"
            )
        return dataclasses.replace(made, advantage=advantages.optimal_token_baseline, by_energy=True)
    if name == "max_rl" and (penalty or min(weights.values(), default=0) < 0):
        least = min(weights, key=weights.__getitem__, default="")
        what = f"overlong.penalty is {penalty}" if penalty else f"rewards.{least} is {weights[least]}"
        raise UserError(
            f"{what}, but objective.advantage 'max_rl' divides by the mean reward of a group, which must not be "
            "negative; set it to 0, or choose another advantage"
        )
    return dataclasses.replace(made, advantage=getattr(advantages, name))


def _with_turns(config: ConfigDict, made: Objective) -> Objective:
    discount = config.objective.turn_discount
    if discount is None:
        return made
    if made.critic is not None:
        raise UserError(
            f"objective.turn_discount is {discount}, and {made.name} discounts per token by its gamma; leave it None"
        )
    if not made.token_advantages:
        raise UserError(
            f"objective.turn_discount is {discount}, which gives each turn its advantage, and {made.name} has one per "
            "response; use gspo_token, grpo, dapo, cispo or sapo, or None"
        )
    if made.by_reward or made.by_energy:
        raise UserError(
            f"objective.turn_discount is {discount}, and objective.advantage {config.objective.advantage!r} compares "
            "whole responses; leave objective.advantage empty, or set objective.turn_discount to None"
        )
    return dataclasses.replace(made, turn_discount=discount)


def make_mismatch_correction(config: ConfigDict) -> Correction | None:
    """Return the correction `mismatch.correction`, if any."""
    name = config.mismatch.correction
    return _made(config, "mismatch", name, mismatch.__all__, make_correction) if name else None


def make_centering(config: ConfigDict) -> Centering | None:
    """Return the score centring of `mismatch.center`, if it is on."""
    return Centering(make_mismatch_correction(config)) if config.mismatch.center else None


def _made(config: ConfigDict, title: str, name: str, known: Sequence[str], make: Callable[..., Any]) -> Any:
    """Make `name` with the hyper-parameters of its section, which only a user function may lack."""
    section: Any = config[title].get(name)
    if not isinstance(section, ConfigDict):
        if name in known:
            raise UserError(f"the config has no section {title}.{name}; add it; an empty one leaves all defaults")
        section = ConfigDict()
    try:
        return make(name, functions.load(config), **section.to_dict())
    except UserError as error:
        raise UserError(f"{title}.{name}: {error}" if len(section) else str(error)) from None


ROUNDING: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.12}
"""Standard deviation of a token's log μ − log π, in nats, of a sampler in this dtype and a trainer with the same
weights, no less than was measured (docs/metrics.md#the-first-mini-batch)."""
SIGMAS: Mapping[str, int] = {"token": 3, "sequence": 5}
"""Standard deviations of rounding that a bound must leave, by the level of its ratio. Responses shorter than the limit
round by more."""


def recomputes(config: ConfigDict) -> bool:
    """Return True if the trainer scores responses before a batch's first update, as `training.old_logprobs` says."""
    choice = config.training.old_logprobs
    return choice == "recompute" or (choice == "auto" and why_recomputed(config) != "")


def why_recomputed(config: ConfigDict) -> str:
    """Return a sentence on why `training.old_logprobs="auto"` has old log-probs recomputed, empty if it has not.

    Replay "r2", mismatch corrections and the centring of objectives that weigh tokens by their ratio need them, and
    with the advantage "optimal_token_baseline" the trainer scores responses anyway. Else a bound of the objective has
    to be within `SIGMAS` · σ of a ratio of 1: σ = `ROUNDING` for a token's ratio, and over √T for the mean over a
    response of T tokens, the limit. An objective without bounds keeps the sampler's: `vespo`'s weight of a response, a
    product of its ratios, is its correction for the sampler, and the guard tells what rounding takes from it.
    """
    says, sampling = "old log-probs are recomputed (training.old_logprobs='auto')", config.sampling
    if config.routing.replay == "r2":
        return f"{says}: routing.replay 'r2' replays their routes"
    if config.mismatch.correction:
        return f"{says}: mismatch.correction weighs them against the sampler's"
    objective = make_objective(config)
    if config.mismatch.center and objective.weighs_tokens:
        return f"{says}: mismatch.center is for tokens that no ratio to the sampler weighs"
    if objective.by_energy:
        return f"{says}: the trainer scores responses anyway, for the energies of the advantage"
    dtypes = (sampling.weights_dtype or config.model.dtype, sampling.cache_dtype or config.model.dtype)
    dtype = max(dtypes, key=ROUNDING.__getitem__)
    sigma = ROUNDING[dtype]
    if objective.level == "sequence":
        sigma /= math.sqrt(sampling.max_response_length)
    name = min(objective.bounds, key=objective.bounds.__getitem__, default="")
    most = SIGMAS[objective.level]
    if not name or objective.bounds[name] >= most * sigma:
        return ""
    return (
        f"{says}: {objective.name}'s {name}={objective.bounds[name]:g} is less than {most} times what a sampler in "
        f"{dtype} rounds, {sigma:.2g}"
    )


def keeps_router_logprobs(config: ConfigDict, model: ModelConfig) -> bool:
    """Return True if the sampler records router log-probs: for drift unless the trainer does, and to replay weights."""
    return model.is_routed and (config.routing.replay == "r3w" or not recomputes(config))


def make_penalties(config: ConfigDict) -> Penalties:
    """Return the weights of additional loss terms."""
    reference = config.reference
    return Penalties(
        kl=reference.kl_weight if reference.place == "loss" else 0.0,
        kl_estimator=reference.estimator,
        teacher=config.teacher.weight if config.teacher.folder else 0.0,
        teacher_form=config.teacher.form,
        entropy=config.training.entropy_weight,
        balance=config.routing.balance_weight,
        router_z=config.routing.z_weight,
    )


def make_update_rule(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return the policy's optimizer and learning-rate schedule."""
    return make_optimizer(total_updates=total_updates(config), **config.optimizer)


def total_updates(config: ConfigDict) -> int:
    """Return the number of optimizer updates in the run."""
    return config.iterations * config.training.minibatches


def falling(config: ConfigDict) -> list[str]:
    """Return the schedule fields that depend on the number of iterations."""
    used = ["optimizer.schedule", *(["critic.optimizer.schedule"] if make_objective(config).critic else [])]
    return [name for name in used if at(config, name) == "cosine"]


def make_critic(config: ConfigDict, model: ModelConfig) -> CriticRule | None:
    """Return the critic and its optimizer, if the objective uses one."""
    if make_objective(config).critic is None:
        return None
    graph, shapes = critic_lib.abstract(
        model,
        own_trunk=config.critic.trunk == "own",
        dtype=jnp.dtype(config.model.dtype),
        dispatch=config.model.dispatch,
    )
    return CriticRule(graph, shapes, make_optimizer(total_updates=total_updates(config), **config.critic.optimizer)[0])


def make_packer(config: ConfigDict, model: ModelConfig, shards: int, *, cold_start: bool = False) -> Packer:
    """Return the packer of training batches, or of a cold start's."""
    training = config.training
    group_size, minibatches = (1, 1) if cold_start else (config.sampling.group_size, training.minibatches)
    responses = config.coldstart.batch if cold_start else config.data.prompts_per_batch * group_size // minibatches
    size: dict[str, int] = {
        "prompt": config.data.max_prompt_length,
        "response": config.sampling.max_response_length,
        "group_size": group_size,
    }
    share = responses // shards
    budget = packing.default_budget(share, **size) if training.row_tokens is None else training.row_tokens
    return Packer(
        group_size=group_size,
        minibatches=minibatches,
        shards=shards,
        row_lengths=packing.row_lengths(min(budget, packing.tokens_at_full_length(share, **size))),
        pair_cost=flops.pair_cost(model),
    )


def make_shaping(config: ConfigDict) -> Shaping:
    """Return the reward shaping and gradient mask."""
    return Shaping(
        group_size=config.sampling.group_size,
        limit=config.sampling.max_response_length,
        penalty=config.overlong.penalty,
        cache=config.overlong.cache,
        drop_truncated=config.overlong.filter,
    )


_AT_ONCE = 4
"""Micro-batches that the old policy reads in one pass on TPU, of a model whose activations are saved elsewhere."""


def make_scoring(config: ConfigDict) -> Scoring:
    """Return the trainer's scoring settings, for the mesh in scope.

    A pass of several micro-batches takes less memory than one micro-batch's saved activations. On TPU it gathers and
    reads weights less often, and fills more of the experts' tiles. On CPU only an empty last one would cost.
    """
    one = platform() != "tpu" or config.model.remat in LEAN
    return Scoring(
        temperature=players.make_sampling(config).scoring_temperature,
        logprob_chunk=config.training.logprob_chunk,
        group_size=config.sampling.group_size,
        remat=config.model.remat,
        at_once=1 if one else math.gcd(config.training.minibatches, _AT_ONCE),
    )
