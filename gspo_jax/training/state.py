"""What training carries from update to update, the optimizer, and where it all lives on the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import UserError


@struct.dataclass
class TrainState:
    """Everything an update changes."""

    params: nnx.State
    """Float32 parameters in the trainer's layout."""
    opt_state: optax.OptState
    """AdamW's moments, laid out like the parameters."""
    updates: Int[Array, ""]
    """Optimizer updates tried so far, skipped ones included."""
    skipped: Int[Array, ""]
    """Updates skipped because a gradient was not finite."""


def make_optimizer(
    *,
    learning_rate: float,
    schedule: str,
    warmup_updates: int,
    total_updates: int,
    b1: float,
    b2: float,
    weight_decay: float,
    max_grad_norm: float,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW behind a global-norm clip, and its learning-rate schedule.

    `schedule` is "constant" or "cosine" (to zero at `total_updates`), each after a linear warm-up.
    """
    if schedule == "constant":
        after = optax.constant_schedule(learning_rate)
    elif schedule == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, max(total_updates - warmup_updates, 1))
    else:
        raise UserError(f"there is no learning-rate schedule {schedule!r}; use constant or cosine")
    # The first update is number 0: it gets a step of the ramp, not a rate of zero.
    ramp = optax.linear_schedule(learning_rate / (warmup_updates + 1), learning_rate, warmup_updates)
    rate = optax.join_schedules([ramp, after], [warmup_updates])
    adamw = optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw), rate


def new_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """A state before the first update."""
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def state_shardings(shapes: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The NamedSharding of every leaf of a TrainState: moments like their parameters, scalars everywhere."""
    params = mesh_lib.param_shardings(shapes, mesh)
    everywhere: Any = mesh_lib.replicated(mesh)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params, opt_state, everywhere, everywhere)
