"""Train state, optimizer, and their shardings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from gspo_jax.errors import UserError
from gspo_jax.models.critic import Critic, first_params
from gspo_jax.models.moe import Buffer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import Weights

NO_DECAY = "norm", "bias", "router", "embed", "head"
"""Words in parameter paths that can be left out of weight decay."""


@struct.dataclass
class Learner:
    """Trainable parameters with their optimizer state."""

    params: nnx.State
    """Float32, in the trainer's layout."""
    opt_state: optax.OptState


@struct.dataclass
class TrainState:
    """Everything an update changes, so no frozen weights."""

    policy: Learner
    updates: Int[Array, ""]
    """Updates attempted so far, skipped ones included."""
    skipped: Int[Array, ""]
    """Because of a non-finite gradient or loss."""
    critic: Learner | None = None

    @property
    def params(self) -> nnx.State:
        return self.policy.params


@dataclasses.dataclass(frozen=True)
class CriticRule:
    graph: nnx.GraphDef[Critic]
    shapes: nnx.State
    optimizer: optax.GradientTransformation


def make_optimizer(
    *,
    learning_rate: float,
    schedule: str,
    warmup_updates: int,
    total_updates: int,
    b1: float,
    b2: float,
    weight_decay: float,
    no_decay: Sequence[str],
    max_grad_norm: float,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Build AdamW with global-norm gradient clipping, and its learning-rate schedule.

    `schedule` is "constant" or "cosine" (to zero at `total_updates`), after a linear warm-up. Parameters with a word of
    `no_decay` in their path do not decay, and neither do buffers.

    Raises:
      UserError: the schedule or a word is unknown.
    """
    for word in no_decay:
        if word not in NO_DECAY:
            raise UserError(f"no_decay has {word!r}; use some of {', '.join(NO_DECAY)}, or () to decay everything")

    def decays(params: Any) -> Any:
        def one(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
            kept = isinstance(leaf, Buffer) or any(word in jax.tree_util.keystr(path) for word in no_decay)
            return jax.tree.map(lambda _: not kept, leaf)

        return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, Buffer))

    if schedule == "constant":
        after = optax.constant_schedule(learning_rate)
    elif schedule == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, max(total_updates - warmup_updates, 1))
    else:
        raise UserError(f"unknown learning-rate schedule {schedule!r}; use constant or cosine")
    # The ramp starts above zero so that the first update learns.
    ramp = optax.linear_schedule(learning_rate / (warmup_updates + 1), learning_rate, warmup_updates)
    rate = optax.join_schedules([ramp, after], [warmup_updates])
    adamw = optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw), rate


def new_learner(params: nnx.State, optimizer: optax.GradientTransformation) -> Learner:
    return Learner(params, optimizer.init(params))


def step(learner: Learner, optimizer: optax.GradientTransformation, gradient: nnx.State) -> Learner:
    with jax.named_scope("optimizer"):
        changes, opt_state = optimizer.update(gradient, learner.opt_state, learner.params)
        params: Any = optax.apply_updates(learner.params, changes)
    return Learner(params, opt_state)


def new_state(
    weights: Weights, optimizer: optax.GradientTransformation, *, critic: CriticRule | None = None
) -> TrainState:
    critics = None if critic is None else new_learner(first_params(critic.shapes, weights.whole), critic.optimizer)
    # Separate zeros: a donated buffer must not appear twice.
    return TrainState(
        new_learner(weights.trainable, optimizer), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), critics
    )


def with_new_schedule(opt_state: optax.OptState) -> optax.OptState:
    """Return an optimizer state whose learning-rate schedule begins again. Moments and their bias correction stay."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def restart(node: Any) -> Any:
        if not is_schedule(node):
            return node
        count: Any = node.count
        zero = jax.make_array_from_callback((), count.sharding, lambda _: np.zeros((), count.dtype))
        return optax.ScaleByScheduleState(zero)

    return jax.tree.map(restart, opt_state, is_leaf=is_schedule)


def learner_shardings(shapes: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh) -> Learner:
    """Return a Learner's NamedShardings: moments like their parameters, scalars replicated."""
    params, alike = mesh_lib.param_shardings(shapes, mesh), jax.tree.structure(shapes)

    def moments(node: Any) -> bool:
        return jax.tree.structure(node) == alike

    opt_state = jax.tree.map(
        lambda node: params if moments(node) else mesh_lib.replicated(mesh),
        jax.eval_shape(optimizer.init, shapes),
        is_leaf=moments,
    )
    return Learner(params, opt_state)


def state_shardings(
    shapes: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh, *, critic: CriticRule | None = None
) -> TrainState:
    """Return a TrainState's NamedShardings, for trainable `shapes`."""
    critics = None if critic is None else learner_shardings(critic.shapes, critic.optimizer, mesh)
    everywhere: Any = mesh_lib.replicated(mesh)
    return TrainState(learner_shardings(shapes, optimizer, mesh), everywhere, everywhere, critics)
