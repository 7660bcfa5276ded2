"""Checkpoints: every leaf of a pytree by name, with the run's JSON state. No other module uses Orbax.

Leaves are stored under their path in the tree, so that a checkpoint does not depend on the mesh, on the number of
processes, or on the Python classes that hold the leaves.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from orbax.checkpoint import utils as ocp_utils
from orbax.checkpoint import v1 as ocp

from gspo_jax import storage
from gspo_jax.storage import AnyPath
from gspo_jax.types import UserError

Tree = TypeVar("Tree")


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, such as "params.layers.0.mlp.gate", where 0 is the number of the stack."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the tree share a path")
    return named


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint."""

    step: int
    """Step it was saved at."""
    state: Any
    """The saved pytree, each leaf in the requested sharding."""
    run: dict[str, Any]
    """The JSON saved as `run`: iteration, position in the data, key, config."""
    arrays: dict[str, np.ndarray]
    """The arrays saved as `arrays`, on the host."""


class Checkpointer:
    """Saves and restores checkpoints under a folder, one subfolder per step, written in the background."""

    def __init__(self, folder: AnyPath, *, keep: int | None = None):
        """Open the folder, creating it if needed; `keep` is the number of newest steps to retain (None: all)."""
        policies: Any = ocp.training.preservation_policies  # its protocol and its classes disagree on types
        # A killed save leaves a temporary folder behind, which is no checkpoint.
        self._checkpointer = ocp.training.Checkpointer(
            str(storage.find(folder)),
            preservation_policy=policies.PreserveAll() if keep is None else policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._options = ocp.Context()
        # Replicas share the writing of an array by slicing it, a compiled program per shape: of use for large arrays.
        self._options.array.saving.min_slice_bytes_for_replica_parallel = 2**20
        self._pending: Any = None

    @property
    def latest(self) -> int | None:
        """The newest committed step, or None."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: Any, run: dict[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Start a save in the background, after waiting for the previous one, whose error is raised here.

        Args:
          step: number of the checkpoint.
          state: a pytree of arrays whose shapes follow from the config.
          run: values that JSON can hold.
          arrays: host arrays whose shapes do not follow from the config, such as partial rollouts.
        """
        self.wait()
        arrays = arrays or {}
        some = {name: x for name, x in arrays.items() if x.size}  # Orbax refuses to save empty arrays
        none = {name: [list(x.shape), x.dtype.name] for name, x in arrays.items() if not x.size}
        # Orbax warns of an item that has no array, so the step is stored as one.
        beside = {"json": json.dumps(run), "empty": json.dumps(none), "step": np.array([step])}
        saved = {"state": named_leaves(state), "run": beside}
        if some:
            saved["arrays"] = some
        with self._options:
            self._pending = self._checkpointer.save_checkpointables_async(step, saved, overwrite=True)

    def restore(self, shapes: Tree, shardings: Tree) -> Restored | None:
        """The newest checkpoint, each leaf read straight into its sharding; None if there is none.

        Raises:
          UserError: a leaf of the checkpoint is missing from `shapes` or has another shape, or the reverse.
        """
        if self.latest is None:
            return None
        step = self.latest
        saved: Any = self._checkpointer.checkpointables_metadata(step).metadata
        wanted = _abstract(shapes, shardings)
        _check_same(wanted, named_leaves(saved["state"]), step)
        others = {name: None for name in ("run", "arrays") if name in saved}
        return _restored(step, shapes, self._checkpointer.load_checkpointables(step, {"state": wanted} | others))

    def wait(self) -> None:
        """Block until the save in flight is committed; raise its error."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Finish the save in flight and close the folder."""
        self.wait()
        self._checkpointer.close()


def load_newest(folder: AnyPath, shapes: Tree, shardings: Tree) -> Restored | None:
    """The leaves in `shapes` of the newest committed checkpoint; the folder may belong to a run that is still writing.

    Read-only: creates and cleans up nothing. None if there is no checkpoint; errors as `Checkpointer.restore`.
    """
    found = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    # In a bucket nothing is renamed, so an unfinished save already has its final name.
    steps = [int(path.name) for path in found if ocp_utils.is_checkpoint_finalized(path)]
    if not steps:
        return None
    path = str(storage.find(folder) / str(max(steps)))
    saved: Any = ocp.checkpointables_metadata(path).metadata
    names = named_leaves(saved["state"])
    wanted = _abstract(shapes, shardings)
    _check_same(wanted, {name: leaf for name, leaf in names.items() if name in wanted}, max(steps))
    partial = {name: wanted.get(name, ...) for name in names}  # Orbax leaves `...` on disk
    return _restored(max(steps), shapes, ocp.load_checkpointables(path, {"state": partial, "run": None}))


def _restored(step: int, shapes: Any, loaded: Any) -> Restored:
    """The loaded checkpoint, with its state as a tree like `shapes`."""
    state = jax.tree.unflatten(jax.tree.structure(shapes), [loaded["state"][name] for name in named_leaves(shapes)])
    run, arrays = loaded["run"], loaded.get("arrays", {})
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in json.loads(run.get("empty", "{}")).items()}
    return Restored(step, state, json.loads(run["json"]), {name: np.array(x) for name, x in arrays.items()} | empty)


def _abstract(shapes: Any, shardings: Any) -> dict[str, jax.ShapeDtypeStruct]:
    leaves = zip(named_leaves(shapes).items(), jax.tree.leaves(shardings), strict=True)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for (name, leaf), sharding in leaves}


def _check_same(wanted: dict[str, Any], saved: dict[str, Any], step: int) -> None:
    for name in sorted(wanted.keys() | saved.keys()):
        here, there = (tuple(tree[name].shape) if name in tree else None for tree in (wanted, saved))
        if here != there:
            raise UserError(
                f"checkpoint {step} does not fit this config: {name} is {there or 'missing'} in the checkpoint and "
                f"{here or 'absent'} here; use the config it was saved with, or another --workdir"
            )
