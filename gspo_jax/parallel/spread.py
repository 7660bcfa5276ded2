"""Matrices that every token passes, also sharded over the mesh axis `expert`: a frozen base, or a large head.

They are sharded by columns, the embedding by vocabulary. In training the compiler gathers a layer's weights. In the
sampler the axis is manual and the smaller side moves: in a decode step tokens visit every shard's columns.
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
    """Return True if a parameter is sharded over `expert` this way."""
    if not has_mesh():
        return False
    rules = SAMPLER if _is_manual() else TRAINER
    return spread_dimension(variable, rules, jax.sharding.get_abstract_mesh().shape) is not None


def products(matrices: Sequence[Any], columns: Sequence[str], x: Float[Array, "b T D"]) -> list[Float[Array, "b T _"]]:
    """Return all columns of matrix(x), for every matrix.

    Args:
      matrices: functions of rows that are also trees of arrays, sharded along the last dimension.
      columns: its logical axis, per matrix.
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
    """Return all logits. `run` unembeds with this shard's vocabulary, and `expert` is manual."""
    return _visited(lambda rows: [run(rows)], x)[0]


def lookup(table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return table[tokens]. Where `expert` is manual, both are this shard's parts."""

    def own(table: Array, tokens: Array) -> Array:
        at = jax.lax.all_gather(tokens, "expert", axis=0, tiled=True) - jax.lax.axis_index("expert") * len(table)
        here = (at >= 0) & (at < len(table))
        found = jnp.where(here[..., None], table.at[at].get(mode="clip"), 0)
        # All but one shard send zeros. XLA on CPU aborts on a bfloat16 reduce-scatter where it manages `tensor`.
        return _returned(found).sum(axis=0)

    if _is_manual():
        return own(table, tokens)
    rows = PartitionSpec(BATCH_AXES)
    specs: Any = (PartitionSpec("expert"), rows)
    return jax.shard_map(own, in_specs=specs, out_specs=rows, axis_names=set(BATCH_AXES))(table, tokens)


def _is_manual() -> bool:
    return "expert" in manual_axes()


def _gathered(w: Array, axis: str) -> Array:
    """Gather w's last dimension over `expert`. The compiler decides on the others."""
    free = (PartitionSpec.UNCONSTRAINED,) * (w.ndim - 1)
    return jax.lax.with_sharding_constraint(w, PartitionSpec(*free, *spec((axis,), TRAINER)))


def _visited(run: Callable[[Array], list[Array]], x: Float[Array, "b T D"]) -> list[Float[Array, "b T _"]]:
    """Return all columns of `run` for x: gather rows, run, return results."""
    parts = run(jax.lax.all_gather(x, "expert", axis=0, tiled=True))
    ends = np.cumsum([part.shape[-1] for part in parts])
    back = _returned(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1))
    whole = (jnp.moveaxis(part, 0, -2) for part in jnp.split(back, ends[:-1], axis=-1))
    return [part.reshape(*x.shape[:-1], -1) for part in whole]


def _returned(rows: Float[Array, "n T _"]) -> Float[Array, "E b T _"]:
    """Return this shard's rows from each shard of `expert`, n = E · b."""
    shards = jax.lax.axis_size("expert")
    back = jax.lax.all_to_all(rows, "expert", split_axis=0, concat_axis=0, tiled=True)
    return back.reshape(shards, -1, *rows.shape[1:])
