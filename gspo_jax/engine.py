"""The programs of one training iteration, built once from a config, the model's shape and the meshes.

`train` runs them, `bench` times them, `evaluate` samples with them, and `plan` compiles them for a TPU slice without
having one. Building an engine allocates nothing on any device.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from gspo_jax.models.config import ModelConfig
from gspo_jax.objectives import Objective
from gspo_jax.parallel.mesh import SAMPLER, batch_shards, param_shardings
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup import keys, learning, policy, sampling
from gspo_jax.setup.meshes import Meshes
from gspo_jax.setup.policy import Policy
from gspo_jax.training.experience import ExperienceFn, make_experience
from gspo_jax.training.packing import Packer
from gspo_jax.training.scoring import OldPolicyFn, make_old_policy
from gspo_jax.training.state import CriticRule, TrainState, new_state, state_shardings
from gspo_jax.training.update import BlameFn, UpdateFn, make_blame, make_gradient, make_update
from gspo_jax.types import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """The programs of an iteration (sample, score, experience, update, reshard) and the parts they are built from."""

    config: ConfigDict
    """The checked config."""
    policy: Policy
    """Graph and parameter shapes of the policy."""
    meshes: Meshes
    """The trainer's and the sampler's mesh."""
    objective: Objective
    critic: CriticRule | None
    """None if the objective uses no critic."""
    optimizer: optax.GradientTransformation
    """The policy's optimizer."""
    sampler: Sampler
    """Reshards weights from trainer to sampler, prefills and decodes."""
    score: OldPolicyFn
    """Log-probs of the old policy and of the reference, and the critic's values, before an iteration's updates."""
    native: OldPolicyFn
    """Log-probs of any policy with the routes of its own routers, which it records."""
    replayed: OldPolicyFn
    """Log-probs of any policy with the routes that a rollout has."""
    packer: Packer
    """Decides which row computes which response."""
    experience: ExperienceFn
    """Advantages, returns and mismatch corrections of a scored batch."""
    update: UpdateFn
    """One optimizer step on a mini-batch."""
    blame: BlameFn
    """The loss of an update that was skipped, and the non-finite elements in the gradient of each leaf."""

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return jnp.dtype(self.config.model.dtype)

    @property
    def shardings(self) -> TrainState:
        """Sharding of every leaf of the train state."""
        return state_shardings(self.policy.shapes.trainable, self.optimizer, self.meshes.trainer, critic=self.critic)

    @property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every leaf of the train state."""
        return jax.eval_shape(self._new, self.policy.shapes)

    def begin(self, weights: Weights) -> TrainState:
        """The train state before the first update, in the trainer's layout."""
        return jax.jit(self._new, out_shardings=self.shardings)(weights)

    def load(self, folder: Path) -> Weights:
        """Weights that a run starts from, read straight into the trainer's layout; see `Policy.first`."""
        return self.policy.first(folder, self.meshes.trainer, keys.adapter_key(self.config))

    def _new(self, weights: Weights) -> TrainState:
        return new_state(weights, self.optimizer, critic=self.critic)


def build(config: ConfigDict, model: ModelConfig, meshes: Meshes, stop: StopRule) -> Engine:
    """The engine for a model of this shape; compiles nothing yet.

    Args:
      config: a checked config.
      model: the policy's shape.
      meshes: the trainer's and the sampler's mesh.
      stop: the rule that ends a response.
    """
    made, objective = policy.make_policy(config, model), learning.make_objective(config)
    optimizer, schedule = learning.make_update_rule(config)
    critic = learning.make_critic(config, model)
    training, reference = config.training, config.reference
    with jax.set_mesh(meshes.trainer):  # the compiler's options depend on the platform
        gradient = make_gradient(
            made.graph,
            learning.make_scoring(config),
            critic=critic,
            penalties=learning.make_penalties(config),
            replay=config.routing.replay,
            minibatches=training.minibatches,
            group_size=config.sampling.group_size,
        )
        shardings = state_shardings(made.shapes.trainable, optimizer, meshes.trainer, critic=critic)
        update = make_update(gradient, optimizer, schedule, critic=critic, shardings=shardings)
        score = make_score(config, made, critic, recompute=training.old_logprobs == "recompute")
        native, replayed = (
            make_old_policy(made.graph, learning.make_scoring(config), recompute=True, replay=replay)
            for replay in ("none", "r3")
        )
    return Engine(
        config=config,
        policy=made,
        meshes=meshes,
        objective=objective,
        critic=critic,
        optimizer=optimizer,
        sampler=make_sampler(config, made, meshes, stop),
        score=score,
        native=native,
        replayed=replayed,
        packer=learning.make_packer(config, model, batch_shards(meshes.trainer.shape)),
        experience=make_experience(
            group_size=config.sampling.group_size,
            correction=learning.make_mismatch_correction(config),
            kl_in_reward=reference.kl_weight if reference.place == "reward" else 0.0,
        ),
        update=update,
        blame=make_blame(gradient, shardings.updates),
    )


def make_score(config: ConfigDict, made: Policy, critic: CriticRule | None, *, recompute: bool) -> OldPolicyFn:
    """The scoring program; with `recompute` the trainer computes log π_old. Needs the trainer's mesh in scope."""
    return make_old_policy(
        made.graph,
        learning.make_scoring(config),
        recompute=recompute,
        replay=config.routing.replay,
        reference_graph=made.reference,
        critic=None if critic is None else critic.graph,
    )


def make_sampler(config: ConfigDict, made: Policy, meshes: Meshes, stop: StopRule) -> Sampler:
    """The sampler, shared by training and evaluation, so that both use the same distribution and compiled programs."""
    return Sampler(
        made.graph,
        made.shapes,
        meshes.sampler,
        dtype=jnp.dtype(config.model.dtype),
        group_size=config.sampling.group_size,
        sampling=sampling.make_sampling(config),
        stop=stop,
        slots=config.sampling.slots,
        router_logprobs=sampling.keeps_router_logprobs(config, made.config),
        precision=config.sampling.weights_dtype or None,
        cache_dtype=config.sampling.cache_dtype or None,
        shares_frozen=_shares_frozen(config, made, meshes),
    )


def _shares_frozen(config: ConfigDict, made: Policy, meshes: Meshes) -> bool:
    """Whether the trainer has the frozen weights in the sampler's layout and precision."""
    frozen = made.shapes.frozen
    if made.adapters is None or made.base_dtype != jnp.dtype(config.model.dtype) or config.sampling.weights_dtype:
        return False
    ours, theirs = param_shardings(frozen, meshes.trainer), param_shardings(frozen, meshes.sampler, SAMPLER)
    leaves = zip(*map(jax.tree.leaves, (frozen, ours, theirs)), strict=True)
    return all(one.is_equivalent_to(other, len(x.shape)) for x, one, other in leaves)
