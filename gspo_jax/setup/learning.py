"""Objective, optimizer, critic and loss terms, from a config."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from gspo_jax import objectives
from gspo_jax.errors import UserError
from gspo_jax.models import critic as critic_lib
from gspo_jax.models import flops
from gspo_jax.models.config import ModelConfig
from gspo_jax.objectives import Objective, mismatch
from gspo_jax.objectives.mismatch import Correction, make_correction
from gspo_jax.setup import functions, sampling
from gspo_jax.setup.fields import at
from gspo_jax.training import packing
from gspo_jax.training.packing import Packer
from gspo_jax.training.scoring import Scoring
from gspo_jax.training.state import CriticRule, make_optimizer
from gspo_jax.training.update import Penalties


def make_objective(config: ConfigDict) -> Objective:
    """The objective named by `objective.name`, with the hyper-parameters of its section and the off-policy mask."""
    name = config.objective.name
    hyper = _hyper_parameters("objective", config.objective, name, objectives.catalogue.__all__)
    try:
        made = objectives.make(name, functions.load(config), **hyper)
    except UserError as error:
        raise UserError(f"objective.{name}: {error}" if hyper else str(error)) from None
    return dataclasses.replace(made, negative_mask=config.mismatch.negative_mask)


def make_mismatch_correction(config: ConfigDict) -> Correction | None:
    """The correction for sampler–trainer mismatch named by `mismatch.correction`; None if it is empty."""
    name = config.mismatch.correction
    if not name:
        return None
    hyper = _hyper_parameters("mismatch", config.mismatch, name, mismatch.__all__)
    try:
        return make_correction(name, functions.load(config), **hyper)
    except UserError as error:
        raise UserError(f"mismatch.{name}: {error}" if hyper else str(error)) from None


def _hyper_parameters(title: str, section: ConfigDict, name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Hyper-parameters of the named factory.

    Empty for a function of the user's own without a section, and for an unknown name, which is reported where it is
    looked up.
    """
    given: Any = section.get(name)
    if isinstance(given, ConfigDict):
        return given.to_dict()
    if name in known:
        raise UserError(f"the config has no section {title}.{name}; add it; an empty one leaves all defaults")
    return {}


def make_penalties(config: ConfigDict) -> Penalties:
    """Weights of the loss terms beside the objective."""
    reference = config.reference
    return Penalties(
        kl=reference.kl_weight if reference.place == "loss" else 0.0,
        kl_estimator=reference.estimator,
        entropy=config.training.entropy_weight,
        balance=config.routing.balance_weight,
        router_z=config.routing.z_weight,
    )


def make_update_rule(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The policy's optimizer and its learning-rate schedule over the whole run."""
    return make_optimizer(total_updates=total_updates(config), **config.optimizer)


def total_updates(config: ConfigDict) -> int:
    """Optimizer updates in the whole run."""
    return config.iterations * config.training.minibatches


def falling(config: ConfigDict) -> list[str]:
    """Fields by which a learning rate falls over all iterations, so that another number of them changes the run."""
    used = ["optimizer.schedule", *(["critic.optimizer.schedule"] if make_objective(config).critic else [])]
    return [name for name in used if at(config, name) == "cosine"]


def make_critic(config: ConfigDict, model: ModelConfig) -> CriticRule | None:
    """The critic and its optimizer; None if the objective uses none."""
    if make_objective(config).critic is None:
        return None
    graph, shapes = critic_lib.abstract(
        model,
        own_trunk=config.critic.trunk == "own",
        dtype=jnp.dtype(config.model.dtype),
        dispatch=config.model.dispatch,
    )
    return CriticRule(graph, shapes, make_optimizer(total_updates=total_updates(config), **config.critic.optimizer)[0])


def make_packer(config: ConfigDict, model: ModelConfig, shards: int) -> Packer:
    """The packer of a training batch, for the trainer's batch shards."""
    group_size, minibatches = config.sampling.group_size, config.training.minibatches
    responses = config.data.prompts_per_batch * group_size // minibatches
    return _packer(config, model, shards, responses, group_size=group_size, minibatches=minibatches)


def make_demonstration_packer(config: ConfigDict, model: ModelConfig, shards: int) -> Packer:
    """The packer of a cold start's batches."""
    return _packer(config, model, shards, config.coldstart.batch, group_size=1, minibatches=1)


def _packer(
    config: ConfigDict, model: ModelConfig, shards: int, responses: int, *, group_size: int, minibatches: int
) -> Packer:
    """The packer of mini-batches of so many responses; rows are no longer than a shard's share of these can fill."""
    training = config.training
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


def make_scoring(config: ConfigDict) -> Scoring:
    """Settings of the trainer's scoring, at the temperature that responses are sampled with."""
    return Scoring(
        temperature=sampling.make_sampling(config).scoring_temperature,
        logprob_chunk=config.training.logprob_chunk,
        group_size=config.sampling.group_size,
        remat=config.model.remat,
    )
