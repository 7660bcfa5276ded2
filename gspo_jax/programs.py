"""The programs that an iteration of training runs, with the shapes of what they are given.

For whoever compiles them before there is a machine, or weights: nothing is allocated here.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from gspo_jax import experiment
from gspo_jax.models import transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import decoder
from gspo_jax.training.scoring import make_old_policy
from gspo_jax.training.state import new_state, state_shardings
from gspo_jax.training.update import make_update
from gspo_jax.types import Experience, OldPolicy, Prompts, Rollout, RouterRecord

NAMES = ("update", "score", "sample_prefill", "sample_decode", "reshard")


@dataclasses.dataclass(frozen=True)
class Program:
    """Something jitted, on its mesh, and the shapes of its arguments with where they live."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    """By keyword: static ones."""
    mesh: Mesh

    def trace(self) -> jax.stages.Traced:
        """The program as jax sees it."""
        traceable: Any = self.function
        with jax.set_mesh(self.mesh):
            return traceable.trace(*self.arguments, **self.options)


def make(name: str, config: ConfigDict, model: ModelConfig, mesh: Mesh) -> Program:
    """The program by its name in `NAMES`, for a run with this config on the mesh."""
    return getattr(_Programs(config, model, mesh), name)()


class _Programs:
    """A method for each of `NAMES`."""

    def __init__(self, config: ConfigDict, model: ModelConfig, mesh: Mesh):
        self.config, self.model, self.mesh = config, model, mesh
        self.sampler_mesh = experiment.make_sampler_mesh(config, mesh)
        self.prompts, self.group = config.data.prompts_per_batch, config.sampling.group_size
        self.rows = self.prompts * self.group
        self.S, self.T = config.data.max_prompt_length, config.sampling.max_response_length
        self.dtype = jnp.dtype(config.model.dtype)
        dispatch = experiment.make_dispatch(config)
        self.graph, self.shapes = transformer.abstract(model, dtype=self.dtype, dispatch=dispatch)
        self.critic = experiment.make_critic(config, model)

    def update(self) -> Program:
        """One optimizer step on a mini-batch."""
        config, objective = self.config, experiment.make_objective(self.config)
        optimizer, schedule = experiment.make_update_rule(config)
        places = state_shardings(self.shapes, optimizer, self.mesh, critic=self.critic)
        with jax.set_mesh(self.mesh):
            update = make_update(
                self.graph,
                experiment.scoring(config),
                objective,
                optimizer,
                schedule,
                critic=self.critic,
                penalties=experiment.make_penalties(config),
                replay=config.routing.replay,
                shardings=places,
                minibatches=config.training.minibatches,
                microbatches=config.training.microbatches,
                group_size=self.group,
            )
        state = jax.eval_shape(partial(new_state, optimizer=optimizer, critic=self.critic), self.shapes)
        arguments = _placed(state, places), self._experience(), jax.ShapeDtypeStruct((), jnp.int32)
        return Program(update, arguments, {}, self.mesh)

    def score(self) -> Program:
        """The trainer's log-probs of a whole batch, and the reference's and the critic's say where there are such."""
        config = self.config
        with jax.set_mesh(self.mesh):
            score = make_old_policy(
                self.graph,
                experiment.scoring(config),
                recompute=config.training.old_logprobs == "recompute"
                or not (config.reference.kl_weight or self.critic),
                replay=config.routing.replay,
                critic=None if self.critic is None else self.critic.graph,
                microbatches=config.training.microbatches,
            )
        params = _placed(self.shapes, mesh_lib.param_shardings(self.shapes, self.mesh))
        reference = critic = None
        if config.reference.kl_weight:
            reference = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, self.dtype, sharding=x.sharding), params)
        if self.critic is not None:
            critic = _placed(self.critic.shapes, mesh_lib.param_shardings(self.critic.shapes, self.mesh))
        return Program(score, (params, critic, reference, self._rollout()), {}, self.mesh)

    def sample_prefill(self) -> Program:
        """The prompts of a batch."""
        options = {
            "group_size": self.group,
            "sampling": experiment.make_sampling(self.config),
            "router_logprobs": experiment.keeps_router_logprobs(self.config, self.model),
        }
        rows = partial(_rows, self.sampler_mesh)
        prompts = Prompts(rows((self.prompts, self.S), jnp.int32), rows((self.prompts,), jnp.int32))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.rows))
        arguments = self.graph, self._weights(), prompts, rows(keys.shape, keys.dtype)
        return Program(decoder.prefill, arguments, options, self.sampler_mesh)

    def sample_decode(self) -> Program:
        """The loop that samples the responses of a batch."""
        config, prefill = self.config, self.sample_prefill()
        graph, weights, prompts, keys = prefill.arguments
        with jax.set_mesh(self.sampler_mesh):
            begun = jax.eval_shape(partial(decoder.prefill, graph, **prefill.options), weights, prompts, keys)
            slots = decoder.check_slots(config.sampling.slots, self.rows)
        places = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.sampler_mesh, spec), part),
            decoder.layout(None),
            begun,
        )
        options = {
            "length": self.T,
            "sampling": prefill.options["sampling"],
            "eos_ids": self.model.eos_token_ids,
            "pad_id": self.model.pad_token_id or 0,
            "slots": slots,
        }
        return Program(decoder.decode, (graph, weights, _placed(begun, places), keys), options, self.sampler_mesh)

    def reshard(self) -> Program:
        """The trainer's weights to the sampler."""
        params = _placed(self.shapes, mesh_lib.param_shardings(self.shapes, self.mesh))
        return Program(decoder.to_sampler(self.shapes, self.sampler_mesh, self.dtype), (params,), {}, self.sampler_mesh)

    def _weights(self) -> nnx.State:
        """The sampler's copy."""
        copy = jax.eval_shape(decoder.to_sampler(self.shapes, self.sampler_mesh, self.dtype), self.shapes)
        return _placed(copy, mesh_lib.param_shardings(self.shapes, self.sampler_mesh, mesh_lib.SAMPLER))

    def _rollout(self) -> Rollout:
        rows, model = partial(_rows, self.mesh), self.model
        B, S, T = self.rows, self.S, self.T
        routed = (B, S + T, *model.route_shape)
        kept = experiment.keeps_router_logprobs(self.config, model)
        return Rollout(
            prompts=rows((B, S), jnp.int32),
            prompt_lengths=rows((B,), jnp.int32),
            tokens=rows((B, T), jnp.int32),
            mask=rows((B, T), jnp.bool_),
            action_mask=rows((B, T), jnp.bool_),
            truncated=rows((B,), jnp.bool_),
            behaviour_logprobs=rows((B, T), jnp.float32),
            logprobs=rows((B, T), jnp.float32),
            routes=RouterRecord(rows(routed, model.expert_dtype), rows(routed, jnp.float32) if kept else None),
        )

    def _experience(self) -> Experience:
        config, objective = self.config, experiment.make_objective(self.config)
        rollout, mask = self._rollout(), _rows(self.mesh, (self.rows, self.T), jnp.bool_)
        tokens = _rows(self.mesh, mask.shape, jnp.float32)
        recomputed = config.training.old_logprobs == "recompute"
        routes = None
        if recomputed and self.model.is_routed:
            logprobs: Any = _rows(self.mesh, rollout.routes.experts.shape, jnp.float32)
            routes = RouterRecord(rollout.routes.experts, logprobs)
        old = OldPolicy(
            tokens,
            tokens if config.reference.kl_weight else None,
            None if self.critic is None else tokens,
            routes,
        )
        of_tokens = self.critic is not None or len(config.step_rewards) > 0
        return Experience(
            rollout,
            mask=mask,
            old=old,
            advantages=tokens if of_tokens else _rows(self.mesh, (self.rows,), jnp.float32),
            returns=None if objective.critic is None else tokens,
            correction=None if experiment.make_correction_of(config) is None else tokens,
        )


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.rows_sharding(mesh))
