"""Matrices that every token passes, sharded over the mesh axis `expert` too, as those of a frozen base are.

A matrix is sharded along its last dimension, its columns; the embedding along the vocabulary. Rows of tokens are
sharded over the same axis. Where it is left to the compiler, in training, a layer's weights are gathered to compute
with them. Where it is manual, in the sampler, what is smaller moves: in a decode step that is the tokens, which visit
every shard's columns. Embedding and head look up and unembed in the same way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from gspo_jax.parallel.mesh import BATCH_AXES, SAMPLER, TRAINER, has_mesh, manual_axes, spec, spread_dimension


def is_spread(variable: nnx.Variable) -> bool:
    """True if the mesh in scope shards a parameter over `expert` in this way."""
    if not has_mesh():
        return False
    rules = SAMPLER if _is_manual() else TRAINER
    return spread_dimension(variable, rules, jax.sharding.get_abstract_mesh().shape) is not None


def products(matrices: Sequence[Any], columns: Sequence[str], x: Float[Array, "b T D"]) -> list[Float[Array, "b T _"]]:
    """matrix(x) of every matrix, with all of its columns.

    Args:
      matrices: functions of rows that are also trees of arrays, the last dimension of which is sharded.
      columns: that dimension's logical axis, for each of the matrices.
      x: this shard's rows where `expert` is manual, else all rows.
    """
    if not _is_manual():
        whole = [jax.tree.map(lambda w, c=c: _gathered(w, c), m) for m, c in zip(matrices, columns, strict=True)]
        return [matrix(x) for matrix in whole]
    leaves = jax.tree.leaves(matrices)
    across = sum(w.shape[-1] for w in leaves if w.ndim > 1)
    if x.nbytes + x.nbytes // x.shape[-1] * across < sum(w.nbytes for w in leaves):
        return _visited(lambda rows: [matrix(rows) for matrix in matrices], x)
    whole = jax.tree.map(lambda w: jax.lax.all_gather(w, "expert", axis=w.ndim - 1, tiled=True), matrices)
    return [matrix(x) for matrix in whole]


def logits(run: Callable[[Array], Array], x: Float[Array, "b T D"]) -> Float[Array, "b T V"]:
    """run(x), which unembeds with this shard's part of the vocabulary, for all of it; `expert` is manual."""
    return _visited(lambda rows: [run(rows)], x)[0]


def lookup(table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """table[tokens]; where `expert` is manual, of this shard's part of the table and its own tokens."""

    def own(table: Array, tokens: Array) -> Array:
        at = jax.lax.all_gather(tokens, "expert", axis=0, tiled=True) - jax.lax.axis_index("expert") * len(table)
        here = (at >= 0) & (at < len(table))
        found = jnp.where(here[..., None], table.at[at].get(mode="clip"), 0)
        # All but one shard send zeros. XLA aborts on a reduce-scatter of bfloat16 on CPU where it manages `tensor`.
        return _returned(found).sum(axis=0)

    if _is_manual():
        return own(table, tokens)
    rows = PartitionSpec(BATCH_AXES)
    specs: Any = (PartitionSpec("expert"), rows)
    return jax.shard_map(own, in_specs=specs, out_specs=rows, axis_names=set(BATCH_AXES))(table, tokens)


def _is_manual() -> bool:
    return "expert" in manual_axes()


def _gathered(w: Array, axis: str) -> Array:
    """w with its last dimension as the trainer's layout has it without `expert`; the compiler decides on the others."""
    free = (PartitionSpec.UNCONSTRAINED,) * (w.ndim - 1)
    return jax.lax.with_sharding_constraint(w, PartitionSpec(*free, *spec((axis,), TRAINER)))


def _visited(run: Callable[[Array], list[Array]], x: Float[Array, "b T D"]) -> list[Float[Array, "b T _"]]:
    """The columns that `run` gives for x on all shards of `expert`: rows are gathered, and their results returned."""
    parts = run(jax.lax.all_gather(x, "expert", axis=0, tiled=True))
    ends = np.cumsum([part.shape[-1] for part in parts])
    back = _returned(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1))
    whole = (jnp.moveaxis(part, 0, -2) for part in jnp.split(back, ends[:-1], axis=-1))
    return [part.reshape(*x.shape[:-1], -1) for part in whole]


def _returned(rows: Float[Array, "n T _"]) -> Float[Array, "E b T _"]:
    """This shard's rows as each shard of `expert` has them, n = E · b being all shards' rows in order."""
    shards = jax.lax.axis_size("expert")
    back = jax.lax.all_to_all(rows, "expert", split_axis=0, concat_axis=0, tiled=True)
    return back.reshape(shards, -1, *rows.shape[1:])
