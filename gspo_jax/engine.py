"""The programs of a training iteration, built from a config, the model's shape and the meshes.

`iteration.iterate` runs them, `evaluate` samples with them, and `plan` compiles them for a TPU slice it does not have.
Building an engine allocates nothing on any device.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax.models import huggingface
from gspo_jax.models.config import ModelConfig
from gspo_jax.objectives import Objective
from gspo_jax.parallel import hosts
from gspo_jax.parallel.mesh import SAMPLER, batch_shards, param_shardings, placed, shard_bytes
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup import keys, learning, players, policy
from gspo_jax.setup import memory as memory_lib
from gspo_jax.setup.meshes import Meshes
from gspo_jax.setup.policy import Policy
from gspo_jax.setup.teacher import Teacher, make_teacher
from gspo_jax.training.experience import ExperienceFn, make_experience
from gspo_jax.training.layout import deal
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.packing import Packer
from gspo_jax.training.scoring import OldPolicyFn, make_old_policy
from gspo_jax.training.shaping import Shaping
from gspo_jax.training.sketch import SketchFn, make_sketch
from gspo_jax.training.state import CriticRule, TrainState, new_state, state_shardings
from gspo_jax.training.update import BlameFn, UpdateFn, make_biases, make_blame, make_gradient, make_update
from gspo_jax.types import Batch, OldPolicy, Packing, Rewards, Rollout, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Jitted functions of an iteration, except the sampler's."""

    deal: Callable[[Rollout, Packing], Rollout]
    score: OldPolicyFn
    native: OldPolicyFn
    """Scores any policy with its own routes, recorded."""
    replayed: OldPolicyFn
    """Scores any policy with a rollout's routes, and under r3w with its weights."""
    sketch: SketchFn
    """Sketches the gradient of the sampled tokens' log-probs, for the bias meter."""
    experience: ExperienceFn
    update: UpdateFn
    blame: BlameFn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """An iteration's steps on a batch and their parts. Methods may be called with any mesh in scope."""

    config: ConfigDict
    """Already checked."""
    policy: Policy
    meshes: Meshes
    objective: Objective
    critic: CriticRule | None
    optimizer: optax.GradientTransformation
    sampler: Sampler
    packer: Packer
    shaping: Shaping
    programs: Programs
    frozen: nnx.State = dataclasses.field(default_factory=lambda: nnx.State({}))
    """Weights that no update changes; empty in full training."""
    reference: nnx.State | None = None
    """None without a KL to the reference policy."""
    teacher: Teacher | None = None
    """Static part of the teacher, if any."""
    teacher_params: nnx.State | None = None
    """None without a teacher."""

    @property
    def minibatches(self) -> int:
        """Updates per iteration."""
        return self.packer.minibatches

    def weights(self, state: TrainState) -> Weights:
        return Weights(state.params, self.frozen)

    def sync(self, state: TrainState) -> None:
        """Load this state's weights into the sampler, as the behaviour policy."""
        self.sampler.load(self.weights(state))
        self.sampler.policies += 1

    def pack(self, batch: Batch) -> Batch:
        """Deal the batch to its rows, where it stays until the last update. The sampler's weights are dropped."""
        self.sampler.release()
        packing = self.packer(batch.lengths, batch.prompt_lengths)
        with jax.set_mesh(self.meshes.trainer):
            return dataclasses.replace(batch, rollout=self.programs.deal(batch.rollout, packing), packing=packing)

    def score(self, state: TrainState, batch: Batch) -> OldPolicy:
        """Return the scores that stay fixed during the iteration's updates."""
        critic = None if state.critic is None else state.critic.params
        arguments = self.weights(state), critic, self.reference, batch, self.scoring_teacher(self.teacher_params)
        with jax.set_mesh(self.meshes.trainer):
            return jax.block_until_ready(self.programs.score(*arguments))

    def experience(self, batch: Batch, old: OldPolicy, rewards: Rewards) -> Batch:
        """Add the objective's advantages to the batch, after reward shaping and filters."""
        batch, mesh = dataclasses.replace(batch, old=old, rewards=rewards), self.meshes.trainer
        with jax.set_mesh(mesh):
            shaped = hosts.shard_rows(mesh, self.shaping.rewards(batch))
            return jax.block_until_ready(self.programs.experience(self.objective, batch, shaped))

    def update(self, state: TrainState, batch: Batch, minibatch: int) -> tuple[TrainState, Metrics]:
        """Take one optimizer step on a mini-batch; the old state is donated.

        One update is in flight at a time, since simulated devices share their threads.
        """
        with jax.set_mesh(self.meshes.trainer):
            arguments = state, self.frozen, batch, minibatch, self.updating_teacher(self.teacher_params)
            state, metrics = self.programs.update(self.objective, *arguments)
            return state, jax.device_get(metrics)

    def blame(self, state: TrainState, batch: Batch, minibatch: int) -> tuple[Any, dict[str, Any]]:
        """Return a skipped update's loss and non-finite gradient elements of each leaf."""
        arguments = state, self.frozen, batch, minibatch, self.updating_teacher(self.teacher_params)
        with jax.set_mesh(self.meshes.trainer):
            return jax.device_get(self.programs.blame(self.objective, *arguments))

    def scoring_teacher(self, params: nnx.State | None) -> nnx.State | None:
        """Return the teacher's parameters, or their shapes, if it scores sampled tokens."""
        return None if self.teacher is None or self.teacher.reads_in_update else params

    def updating_teacher(self, params: nnx.State | None) -> nnx.State | None:
        """Return the teacher's parameters, or their shapes, if updates compare it over the whole vocabulary."""
        return params if self.teacher is not None and self.teacher.reads_in_update else None

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.model.dtype)

    @property
    def shardings(self) -> TrainState:
        return state_shardings(self.policy.shapes.trainable, self.optimizer, self.meshes.trainer, critic=self.critic)

    @property
    def state_shapes(self) -> TrainState:
        return jax.eval_shape(self._new, self.policy.shapes)

    @property
    def placed_state(self) -> TrainState:
        """The state's shapes in the trainer's layout."""
        return placed(self.state_shapes, self.shardings)

    @property
    def trained(self) -> Weights:
        """Shapes of the trainer's weights, in its layout."""
        return placed(self.policy.shapes, param_shardings(self.policy.shapes, self.meshes.trainer))

    @property
    def copied(self) -> Weights:
        """Shapes of the sampler's weights, including frozen ones shared with the trainer, in its layout."""
        shapes = jax.eval_shape(self.sampler.copied, self.policy.shapes)
        return placed(shapes, param_shardings(shapes, self.meshes.sampler, SAMPLER))

    @property
    def reference_shapes(self) -> nnx.State | None:
        """Shapes of the reference's parameters, in the trainer's layout; None without a KL."""
        if not self.config.reference.kl_weight:
            return None
        if self.policy.adapters is not None:
            return self.trained.trainable if self.policy.adapter_folder else nnx.State({})
        shapes = huggingface.with_dtype(self.policy.shapes.trainable, self.dtype)
        return placed(shapes, param_shardings(shapes, self.meshes.trainer))

    @property
    def teacher_shapes(self) -> nnx.State | None:
        """Shapes of the teacher's parameters, in the trainer's layout; None without one."""
        if self.teacher is None:
            return None
        return placed(self.teacher.shapes, param_shardings(self.teacher.shapes, self.meshes.trainer))

    def begin(self, weights: Weights) -> TrainState:
        """Return the train state before the first update."""
        return jax.jit(self._new, out_shardings=self.shardings)(weights)

    def load(self, folder: Path) -> Weights:
        """Read a run's initial weights straight into the trainer's layout; see `Policy.first`."""
        return self.policy.first(folder, self.meshes.trainer, keys.adapter_key(self.config))

    def _new(self, weights: Weights) -> TrainState:
        return new_state(weights, self.optimizer, critic=self.critic)


def build(
    config: ConfigDict,
    model: ModelConfig,
    meshes: Meshes,
    stop: StopRule,
    *,
    memory: int | None = None,
    trains: bool = True,
) -> Engine:
    """Build an engine without weights, from a checked config; compiles nothing yet.

    Args:
      memory: bytes of a device, which limit the sampler's pool if `sampling.pool_tokens` does not; None: no limit.
      trains: whether optimizer, reference and teacher are held while sampling.

    Raises:
      UserError: `memory` is too small for one response's keys and values.
    """
    made, critic = policy.make_policy(config, model), learning.make_critic(config, model)
    teacher = make_teacher(config, meshes.trainer.shape)
    optimizer, schedule = learning.make_update_rule(config)
    engine = Engine(
        config=config,
        policy=made,
        meshes=meshes,
        objective=learning.make_objective(config),
        critic=critic,
        optimizer=optimizer,
        sampler=make_sampler(config, made, meshes, stop),
        packer=learning.make_packer(config, model, batch_shards(meshes.trainer.shape)),
        shaping=learning.make_shaping(config),
        programs=_programs(config, made, critic, teacher, optimizer, schedule, meshes),
        teacher=teacher,
    )
    if memory is None or config.sampling.pool_tokens is not None:
        return engine
    pool_tokens = _default_pool(engine, model, memory, trains=trains)
    return dataclasses.replace(engine, sampler=make_sampler(config, made, meshes, stop, pool_tokens))


def _default_pool(engine: Engine, model: ModelConfig, memory: int, *, trains: bool) -> int | None:
    """Return the tokens of the pool that fits beside the weights; see `setup.memory.default_pool`."""
    config, sizes = engine.config, engine.meshes.sampler.shape
    own = engine.copied.trainable if engine.sampler.shares_frozen else engine.copied
    others = engine.reference_shapes, engine.teacher_shapes
    held = (engine.placed_state, engine.trained.frozen, others) if trains else engine.trained
    beside = shard_bytes((held, own))
    prompts = config.sampling.partial.prompts or config.data.prompts_per_batch
    shards = batch_shards(dict(sizes))
    own = -(-prompts // shards)
    beside += own * config.data.max_prompt_length * memory_lib.token_bytes(config, model, sizes)
    beside += own * memory_lib.state_bytes(config, model, sizes)
    slots = engine.sampler.decode_options(prompts * config.sampling.group_size)["slots"] // shards
    options = {"memory": memory, "beside": beside}
    return memory_lib.default_pool(config, model, sizes, slots, engine.sampler.columns, **options)


def _programs(
    config: ConfigDict,
    made: Policy,
    critic: CriticRule | None,
    teacher: Teacher | None,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    meshes: Meshes,
) -> Programs:
    shapes = made.shapes
    shardings = state_shardings(shapes.trainable, optimizer, meshes.trainer, critic=critic)
    penalties, replay, reference = learning.make_penalties(config), config.routing.replay, config.reference
    with jax.set_mesh(meshes.trainer):  # the compiler's options and the scoring depend on the platform
        scoring = learning.make_scoring(config)
        others = {"critic": critic, "teacher_graph": None if teacher is None else teacher.graph}
        others["centering"] = learning.make_centering(config)
        rate = config.routing.bias_rate
        biases = make_biases(made.config, rate=rate) if rate else None
        gradient = make_gradient(made.graph, scoring, penalties=penalties, replay=replay, **others)
        return Programs(
            deal=jax.jit(deal),
            score=make_score(config, made, critic, teacher, recompute=learning.recomputes(config)),
            native=make_old_policy(made.graph, scoring, recompute=True, replay="none"),
            replayed=make_old_policy(made.graph, scoring, recompute=True, replay="r3w" if replay == "r3w" else "r3"),
            sketch=make_sketch(made.graph, scoring, replay=replay),
            experience=make_experience(
                group_size=config.sampling.group_size,
                correction=learning.make_mismatch_correction(config),
                kl_in_reward=reference.kl_weight if reference.place == "reward" else 0.0,
                teacher=penalties.teacher if penalties.teacher_form == "advantage" else 0.0,
            ),
            update=make_update(gradient, optimizer, schedule, critic=critic, shardings=shardings, biases=biases),
            blame=make_blame(gradient, shardings.updates),
        )


def make_score(
    config: ConfigDict, made: Policy, critic: CriticRule | None, teacher: Teacher | None, *, recompute: bool
) -> OldPolicyFn:
    """Build the scoring program; with `recompute` the trainer computes log π_old. Needs the trainer's mesh in scope."""
    return make_old_policy(
        made.graph,
        learning.make_scoring(config),
        recompute=recompute,
        replay=config.routing.replay,
        reference_graph=made.reference,
        teacher_graph=None if teacher is None else teacher.graph,
        critic=None if critic is None else critic.graph,
        energy=learning.make_objective(config).by_energy,
    )


def make_sampler(
    config: ConfigDict, made: Policy, meshes: Meshes, stop: StopRule, pool_tokens: int | None = None
) -> Sampler:
    """Build the sampler that training and evaluation share. `pool_tokens`: if the config has none."""
    return Sampler(
        made.graph,
        made.shapes,
        meshes.sampler,
        dtype=jnp.dtype(config.model.dtype),
        group_size=config.sampling.group_size,
        sampling=players.make_sampling(config),
        stop=stop,
        slots=config.sampling.slots,
        pool_tokens=config.sampling.pool_tokens or pool_tokens,
        page=config.sampling.page,
        router_logprobs=learning.keeps_router_logprobs(config, made.config),
        precision=config.sampling.weights_dtype or None,
        cache_dtype=config.sampling.cache_dtype or None,
        shares_frozen=_shares_frozen(config, made, meshes),
        drafting=players.make_drafting(config),
    )


def _shares_frozen(config: ConfigDict, made: Policy, meshes: Meshes) -> bool:
    frozen = made.shapes.frozen
    if made.adapters is None or made.base_dtype != jnp.dtype(config.model.dtype) or config.sampling.weights_dtype:
        return False
    ours, theirs = param_shardings(frozen, meshes.trainer), param_shardings(frozen, meshes.sampler, SAMPLER)
    leaves = zip(*map(jax.tree.leaves, (frozen, ours, theirs)), strict=True)
    return all(one.is_equivalent_to(other, len(x.shape)) for x, one, other in leaves)
