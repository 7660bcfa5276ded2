"""A chip's memory at a program's peak, by kind of content."""

from collections import Counter
from collections.abc import Collection, Sequence

import jax

from gspo_jax.parallel import hlo
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.ahead import Buffer, Compiled
from gspo_jax.planning.setting import Setting


def by_kind(module: hlo.Module, compiled: Compiled, setting: Setting, name: str) -> dict[str, int]:
    """Bytes in use at the peak, by kind of content, the largest first."""
    kinds: Counter[str] = Counter()
    model, shapes = setting.model, parameter_shapes(setting)
    layers = {model.num_layers, *(stack.layers for stack in model.stacks)}
    for buffer in without_aliases(module, compiled.live):
        kinds[kind_of(module, buffer, layers, shapes, name)] += buffer.bytes
    if compiled.fits:
        kinds["unused between buffers"] += max(0, compiled.peak_bytes - sum(kinds.values()))
    return dict(kinds.most_common())


def producer(module: hlo.Module, buffer: Buffer) -> tuple[hlo.Operation | None, hlo.Array | None]:
    """The operation that produces a buffer, and its array; None where the compiled text does not contain them."""
    operation = module.find(buffer.name)
    arrays = operation.arrays[buffer.element or 0 :] if operation is not None else ()
    return operation, arrays[0] if arrays else None


def without_aliases(module: hlo.Module, live: Sequence[Buffer]) -> list[Buffer]:
    """The live buffers, without the arguments of loop bodies that alias a buffer outside (loops update in place)."""
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


def parameter_shapes(setting: Setting) -> set[tuple[int, ...]]:
    """Shapes of the trainer's parameter shards on one chip."""
    shapes = setting.engine.policy.shapes
    placed = mesh_lib.param_shardings(shapes, setting.mesh)
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True)
    return {tuple(sharding.shard_shape(x.shape)) for x, sharding in leaves}


def kind_of(
    module: hlo.Module, buffer: Buffer, layers: Collection[int], shapes: set[tuple[int, ...]], name: str
) -> str:
    """Kind of content of one buffer: parameters, optimizer, gradients, saved activations, cache, collectives, …

    A buffer whose first dimension is in `layers` is stacked over layers; `shapes` are those of the parameters' shards.
    """
    operation, array = producer(module, buffer)
    if operation is None:
        return "other"
    if operation.opcode == "parameter" and buffer.element is None:
        path = operation.scope
        if "opt_state" in path:
            return "optimizer"
        if "params" in path or "trainable" in path:
            return "parameters"
        return "cache" if ".k" in path or ".v" in path or path.startswith("rings") else "batch"
    if operation.opcode.removesuffix("-start").removesuffix("-done") in hlo.COLLECTIVES:
        return "collectives"
    dims = array.dims if array else ()
    if name == "update" and dims in shapes:
        return "gradients"
    if len(dims) > 1 and dims[0] in layers:
        kinds = {"update": "saved activations", "score": "routes", "reshard": "the sampler's weights"}
        return kinds.get(name, "cache")
    for scope in ("attention", "feed_forward", "logits", "optimizer"):
        if scope in operation.scope:
            return scope.replace("_", " ")
    return "other"


def described(module: hlo.Module, buffer: Buffer) -> str:
    """One line about a buffer: size, shape, operation, scope."""
    operation, array = producer(module, buffer)
    if operation is None or array is None:
        return f"{buffer.bytes / 1e9:.2f} GB {buffer.name}"
    shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
    return f"{buffer.bytes / 1e9:.2f} GB {shape} {operation.opcode}: {shortened(operation.scope)}"


def shortened(scope: str) -> str:
    """The last four parts of a scope, without those that loops and transformations add."""
    parts = [p for p in scope.split("/") if p not in ("while", "body", "eval_jaxpr", "checkpoint", "closed_call")]
    return "/".join(parts[-4:])
