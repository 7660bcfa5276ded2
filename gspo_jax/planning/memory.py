"""Memory of a chip at a program's peak, by kind."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import jax

from gspo_jax.parallel.mesh import shard_bytes
from gspo_jax.planning import hlo
from gspo_jax.planning.ahead import Compiled, LiveBuffer
from gspo_jax.planning.setting import Setting

PARAMETERS, OPTIMIZER, FROZEN = "parameters", "optimizer", "frozen weights"
REFERENCE, TEACHER = "reference", "teacher"
"""Kinds of arguments. Frozen weights are the base of adapters."""
FROZEN_AGAIN = "copies or gradients of frozen weights"
"""Kind of avoidable update buffers as large as frozen weights."""


def held(setting: Setting) -> dict[str, int]:
    """Return bytes per chip that the trainer keeps in HBM, by kind."""
    engine = setting.engine
    state, frozen = engine.placed_state, engine.trained.frozen
    learners = [learner for learner in (state.policy, state.critic) if learner is not None]
    return {
        PARAMETERS: shard_bytes([learner.params for learner in learners]),
        OPTIMIZER: shard_bytes([learner.opt_state for learner in learners]),
        FROZEN: shard_bytes(frozen),
        REFERENCE: shard_bytes(engine.reference_shapes),
        TEACHER: shard_bytes(engine.teacher_shapes),
    }


def resident(module: hlo.Module, setting: Setting, name: str) -> int:
    """Return bytes per chip that the trainer keeps in HBM outside a program's arguments.

    jax drops unread arguments. The sampler's weights are freed before programs that do not sample.
    """
    given: Counter[str] = Counter()
    for operation in module.computations.get(module.entry, {}).values():
        if operation.opcode == "parameter":
            given[argument_kind(operation.scope)] += round(operation.arrays[0].bytes)
    if name.startswith("sample"):
        given = Counter({FROZEN: given[FROZEN]} if setting.engine.sampler.shares_frozen else {})
    return sum(max(0, size - given[kind]) for kind, size in held(setting).items())


def by_kind(module: hlo.Module, compiled: Compiled, setting: Setting, name: str) -> dict[str, int]:
    """Return bytes in use at the peak by kind, largest first."""
    kinds: Counter[str] = Counter()
    model, shapes = setting.model, parameter_shapes(setting)
    layers = {model.num_layers, *(stack.layers for stack in model.stacks)}
    for buffer in without_aliases(module, compiled.live):
        kinds[kind_of(module, buffer, layers, shapes, name)] += buffer.bytes
    if compiled.fits:
        kinds["unused between buffers"] += max(0, compiled.peak_bytes - sum(kinds.values()))
    return {kind: size for kind, size in kinds.most_common() if size}


def producer(module: hlo.Module, buffer: LiveBuffer) -> tuple[hlo.Operation | None, hlo.Array | None]:
    """Return a buffer's operation and array, None if not in the compiled text."""
    operation = module.find(buffer.name)
    arrays = operation.arrays[buffer.element or 0 :] if operation is not None else ()
    return operation, arrays[0] if arrays else None


def without_aliases(module: hlo.Module, live: Sequence[LiveBuffer]) -> list[LiveBuffer]:
    """Drop loop-body arguments that alias an outer buffer (loops update in place)."""
    found, seen, inner = [], Counter[object](), []
    for buffer in live:
        operation, array = producer(module, buffer)
        content = array and (array.dtype, tuple(size for size in array.dims if size > 1))  # as a bitcast leaves it
        if operation is not None and operation.opcode == "parameter" and buffer.element is not None:
            inner.append((buffer, content))
        else:
            found.append(buffer)
            seen[content] += 1
    for buffer, content in inner:
        if seen[content]:
            seen[content] -= 1
        else:
            found.append(buffer)
    return found


def parameter_shapes(setting: Setting) -> dict[tuple[int, ...], str]:
    """Map shapes of parameter shards to a buffer's kind in an update.

    Frozen weights have no gradients, and an update needs no copy of them.
    """
    weights = setting.engine.trained
    kinds = {FROZEN_AGAIN: weights.frozen, "gradients": weights.trainable}
    return {x.sharding.shard_shape(x.shape): kind for kind, part in kinds.items() for x in jax.tree.leaves(part)}


def argument_kind(path: str) -> str:
    """Return an argument's kind by its path, such as `state.policy.params['embed'].value`."""
    if "opt_state" in path:
        return OPTIMIZER
    if path.startswith("reference"):
        return REFERENCE
    if path.startswith("teacher"):
        return TEACHER
    if path.startswith(("frozen", "weights.frozen")):
        return FROZEN
    if "params" in path or "trainable" in path:
        return PARAMETERS
    cached = any(part in path for part in (".k", ".v", ".states"))
    return "cache" if cached or path.startswith("pools") else "batch"


def kind_of(
    module: hlo.Module, buffer: LiveBuffer, layers: Collection[int], shapes: Mapping[tuple[int, ...], str], name: str
) -> str:
    """Return a buffer's kind.

    A first dimension in `layers` means stacked over layers. `shapes`: see `parameter_shapes`.
    """
    operation, array = producer(module, buffer)
    if operation is None:
        return "other"
    if operation.opcode == "parameter" and buffer.element is None:
        return argument_kind(operation.scope)
    if operation.opcode.removesuffix("-start").removesuffix("-done") in hlo.COLLECTIVES:
        return "collectives"
    dims = array.dims if array else ()
    if name == "update" and dims in shapes:
        return shapes[dims]
    if len(dims) > 1 and dims[0] in layers:
        kinds = {"update": "saved activations", "score": "routes", "reshard": "the sampler's weights"}
        return kinds.get(name, "cache")
    for scope in ("attention", "feed_forward", "logits", "optimizer"):
        if scope in operation.scope:
            return scope.replace("_", " ")
    return "other"


def described(module: hlo.Module, buffer: LiveBuffer) -> str:
    """Return a one-line description: size, shape, operation, scope."""
    operation, array = producer(module, buffer)
    if operation is None or array is None:
        return f"{buffer.bytes / 1e9:.2f} GB {buffer.name}"
    shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
    return f"{buffer.bytes / 1e9:.2f} GB {shape} {operation.opcode}: {shortened(operation.scope)}"


def shortened(scope: str) -> str:
    """Return a scope's last four parts, without loops and transformations."""
    parts = [p for p in scope.split("/") if p not in ("while", "body", "eval_jaxpr", "checkpoint", "closed_call")]
    return "/".join(parts[-4:])
