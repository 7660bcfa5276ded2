"""Checkpoints: every leaf of a pytree by name, with the run's JSON state. Only this module uses Orbax.

Tree paths name the leaves, independent of mesh, number of processes and Python classes. Orbax does not notice most
damage, so checkpoints hold digests of their content.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import utils as ocp_utils
from orbax.checkpoint import v1 as ocp

from gspo_jax.errors import Diverged, UserError
from gspo_jax.folder import storage
from gspo_jax.folder.storage import AnyPath
from gspo_jax.limited import quoted
from gspo_jax.parallel import hosts
from gspo_jax.training.digest import Digest, digests

Tree = TypeVar("Tree")
Check = Callable[[Mapping[str, Any]], None]
"""Raises UserError if a checkpoint's `run` does not belong to the config."""
FieldOf = Callable[[str], str]
"""Leaf -> config fields that set its shape; "" for none."""

_QUALITIES = ("accuracy", "reward")
"""Names of the number that `keep_best` compares."""
_PART_BYTES = 2**30
_READ_ONLY: dict[str, Any] = {"check": lambda run: None, "whole": False, "notes": None}
"""Rules of a read that checks no run, leaves out what is not asked for, and writes nothing."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return a pytree's leaves by path, such as "params.layers.0.mlp.gate" in stack 0."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the tree share a path")
    return named


class AllDamaged(UserError):
    """A folder has checkpoints, but none can be restored."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint."""

    step: int
    state: Any
    """Each leaf in the requested sharding."""
    run: dict[str, Any]
    """Iteration, position in the data, key, config."""
    arrays: dict[str, np.ndarray]


class Checkpointer:
    """Background writer of checkpoints, one subfolder per step."""

    def __init__(self, folder: AnyPath, *, keep: int | None = None, keep_best: bool = False):
        """Open the folder, creating it if needed.

        Retains the `keep` newest steps (None: all) and, with `keep_best`, the one of the highest `quality`.
        """
        policies: Any = ocp.training.preservation_policies
        kept = [policies.PreserveAll() if keep is None else policies.LatestN(keep)]
        if keep_best:
            best = policies.BestN(get_metric_fn=_quality, n=1, keep_checkpoints_without_metrics=False)
            kept.append(best)
        self._folder = storage.find(folder)
        _drop_unreadable_qualities(self._folder)
        # A killed save leaves a temporary folder.
        self._checkpointer = ocp.training.Checkpointer(
            str(self._folder),
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )
        self._options = ocp.Context()
        # Slicing an array over replicas compiles a program per shape, which pays only for large arrays.
        self._options.array.saving.min_slice_bytes_for_replica_parallel = 2**20
        # Otherwise, if a folder cannot be made, threads wait for it and block the process's exit.
        self._options.async_options.create_directories_asynchronously = False
        # Orbax's clock may be set ahead. The watchdog's deadline covers waiting for a save.
        self._options.async_options.timeout_secs = 7 * 24 * 3600
        self._pending: tuple[int, Any] | None = None
        self.latest: int | None = next(iter(steps(self._folder)), None)
        """Newest step known to be committed; a save in flight counts only after `wait`."""

    def save(
        self,
        step: int,
        state: Any,
        run: dict[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        quality: Mapping[str, float] | None = None,
    ) -> None:
        """Start a save in the background, after waiting for the previous one and raising its error.

        `run` is JSON. Shapes of `arrays`, on the host, need not follow from the config. `keep_best` compares `quality`,
        one number by name, "accuracy" or "reward".

        Raises:
          Diverged: a leaf of `state` is not finite; nothing is saved.
        """
        self.wait()
        arrays, leaves = arrays or {}, named_leaves(state)
        content = digests(leaves)
        _check_finite(content, step)
        text = json.dumps(
            {
                "run": run,
                "state": {name: [list(x.shape), x.dtype.name, content[name].words] for name, x in leaves.items()},
                "arrays": {name: [list(x.shape), x.dtype.name, _sha256(x.tobytes())] for name, x in arrays.items()},
            }
        )
        # Orbax warns of an item without arrays.
        beside = {"json": text, "sha256": _sha256(text.encode()), "step": np.array([step])}
        saved = {"state": leaves, "run": beside}
        if some := {name: x for name, x in arrays.items() if x.size}:  # Orbax refuses empty arrays
            saved["arrays"] = some
        metrics: Any = dict(quality) if quality else None
        with self._options:
            pending = self._checkpointer.save_checkpointables_async(step, saved, overwrite=True, metrics=metrics)
        self._pending = step, pending

    def wait(self) -> None:
        """Block until the save in flight is committed and on disk; raise its error."""
        if self._pending is not None:
            (step, pending), self._pending = self._pending, None
            pending.result()
            self._sync(step)
            self.latest = step

    def confirm(self, state: Any) -> None:
        """Wait for the save in flight, of this `state`, read it back and compare it with its digests.

        Reads in parts, within the memory of one part or the largest leaf. Every process must call it.

        Raises:
          UserError: it cannot be read, or is not what was saved.
        """
        self.wait()
        assert self.latest is not None
        for part in _parts(named_leaves(state)):
            shardings = {name: leaf.sharding for name, leaf in part.items()}
            found = _try(self._folder, self.latest, part, shardings, field_of=str, **_READ_ONLY)
            if isinstance(found, str):
                raise UserError(
                    f"checkpoint {self.latest} in {self._folder} does not read back as it was saved ({found}); use "
                    "another --workdir, or check that disk"
                )

    def _sync(self, step: int) -> None:
        """Sync a local checkpoint's JSON files and renamed folders, as Orbax does not, before older ones go."""
        if isinstance(self._folder, Path) and jax.process_index() == 0:
            storage.sync_tree(self._folder / str(step))

    def close(self) -> None:
        """Finish the save in flight and close the folder."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()


def restore(
    folder: AnyPath, shapes: Tree, shardings: Tree, *, check: Check, field_of: FieldOf = lambda leaf: ""
) -> Restored | None:
    """Restore the newest intact checkpoint, each leaf read into its sharding; None without checkpoints.

    Newer damaged ones move to the sibling folder `damaged`, with a warning. Every process must call it, before one
    opens the folder with a `Checkpointer`.

    Raises:
      UserError: `check` raised it, or a checkpoint's state does not have these `shapes`.
      AllDamaged: no checkpoint matches its digests.
    """
    notes = folder.parent / storage.DAMAGED
    found, damaged = _newest(folder, shapes, shardings, check=check, field_of=field_of, whole=True, notes=notes)
    if found is not None:
        _set_aside(folder, damaged)
    elif damaged:
        raise AllDamaged(
            f"no checkpoint in {folder} can be restored ({_list(damaged)}); put back a copy of one, or begin the run "
            "again with --start_over"
        )
    return found


def load_newest(
    folder: AnyPath, shapes: Tree, shardings: Tree, *, field_of: FieldOf = lambda leaf: ""
) -> Restored | None:
    """Load the leaves in `shapes` from the newest intact checkpoint, even while a run writes others.

    Read-only. None without checkpoints; errors as in `restore`.
    """
    found, damaged = _newest(folder, shapes, shardings, field_of=field_of, **_READ_ONLY)
    if found is None and damaged:
        raise AllDamaged(f"no checkpoint in {folder} can be read ({_list(damaged)}); put back a copy of one")
    if found is not None and damaged:
        logging.warning("%s: damaged: %s; using checkpoint %d", folder, _list(damaged), found.step)
    return found


def load_step(
    folder: AnyPath, step: int, shapes: Tree, shardings: Tree, *, field_of: FieldOf = lambda leaf: ""
) -> Restored:
    """Load the leaves in `shapes` from the checkpoint of a step, even while a run writes others.

    Read-only. Every process must call it.

    Raises:
      UserError: there is none, it is damaged, or its state does not have these `shapes`.
    """
    if step not in (there := steps(folder)):
        which = f"there are {', '.join(map(str, sorted(there)))}" if there else "there is none yet"
        raise UserError(f"{folder} has no checkpoint of iteration {step}; {which}")
    found = _try(folder, step, shapes, shardings, field_of=field_of, **_READ_ONLY)
    if isinstance(found, str):
        raise UserError(f"checkpoint {step} in {folder}: {found}; {_other(folder, step)}")
    return found


def read_description(folder: AnyPath, step: int) -> dict[str, Any]:
    """Return the JSON of the checkpoint of a step, see `describe`. Every process must call it.

    Raises:
      UserError: it is damaged.
    """
    content, why = _attempt(lambda: describe(str(storage.find(folder) / str(step))), None)
    if why:
        raise UserError(f"checkpoint {step} in {folder}: {why}; {_other(folder, step)}")
    return content


def _other(folder: AnyPath, step: int) -> str:
    others = [str(each) for each in steps(folder) if each != step]
    return f"use another one, of {', '.join(others)}" if others else "put back a copy of it"


def steps(folder: AnyPath) -> list[int]:
    """Return the steps of committed checkpoints, newest first."""
    found = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    # In a bucket, an unfinished save already has its final name.
    return sorted((int(path.name) for path in found if ocp_utils.is_checkpoint_finalized(path)), reverse=True)


def set_all_aside(folder: AnyPath) -> None:
    """Move all checkpoints, unread, to the sibling folder `damaged`."""
    _set_aside(folder, dict.fromkeys(steps(folder), "the run starts over"))


def _set_aside(folder: AnyPath, reasons: Mapping[int, str]) -> None:
    if not reasons:
        return
    aside = folder.parent / storage.DAMAGED
    if jax.process_index() == 0:
        aside.mkdir(parents=True, exist_ok=True)
        for step in reasons:
            (folder / str(step)).rename(storage.unused(aside / f"{step}-{time.strftime('%Y%m%d-%H%M%S')}"))
        logging.warning("%s: moved to %s: %s", folder, aside, _list(reasons))
    multihost_utils.sync_global_devices("damaged checkpoints")


def _quality(metrics: Mapping[str, Any]) -> float:
    """Return a checkpoint's quality. Raises KeyError if there is none."""
    (name,) = [name for name in _QUALITIES if name in metrics] or _QUALITIES[:1]
    return float(metrics[name])


def _drop_unreadable_qualities(folder: AnyPath) -> None:
    """Remove damaged files of accuracies or rewards, or Orbax could not open the folder. The checkpoints stay good."""
    if jax.process_index() == 0:
        for step in steps(folder):
            file = folder / str(step) / "metrics" / "metrics"
            try:
                _quality(json.loads(file.read_text()))
            except FileNotFoundError:
                pass
            except (ValueError, KeyError, TypeError, RecursionError):
                logging.warning("%s: the held-out quality of checkpoint %d is damaged, and is removed", folder, step)
                file.unlink()
    multihost_utils.sync_global_devices("qualities")


def _list(reasons: Mapping[int, str]) -> str:
    return "; ".join(f"checkpoint {step}: {why}" for step, why in reasons.items())


def _newest(folder: AnyPath, shapes: Any, shardings: Any, **rules: Any) -> tuple[Restored | None, dict[int, str]]:
    """Return the newest intact checkpoint, if any, and why newer ones are damaged."""
    damaged = {}
    for step in steps(folder):
        found = _try(folder, step, shapes, shardings, **rules)
        if isinstance(found, Restored):
            return found, damaged
        damaged[step] = found
    return None, damaged


def _try(
    folder: AnyPath, step: int, shapes: Any, shardings: Any, *, notes: AnyPath | None, **rules: Any
) -> Restored | str:
    """Return a checkpoint, or why it is damaged. Tries twice, since storage may fail briefly."""
    found = _load(folder, step, shapes, shardings, note=None, **rules)
    if isinstance(found, str):
        logging.warning("%s: checkpoint %d: %s; reading it once more", folder, step, found)
        note = None if notes is None else notes / f"{step}-process-{jax.process_index()}.txt"
        found = _load(folder, step, shapes, shardings, note=note, **rules)
    return found


def _load(
    folder: AnyPath,
    step: int,
    shapes: Any,
    shardings: Any,
    *,
    check: Check,
    field_of: FieldOf,
    whole: bool,
    note: AnyPath | None,
) -> Restored | str:
    """Read and verify one checkpoint, or return why it is damaged; all processes agree.

    `whole` allows no leaves but those in `shapes`.
    """
    path = str(storage.find(folder) / str(step))
    content, why = _attempt(lambda: describe(path), note)
    if why:
        return why
    check(content["run"])
    wanted, leaves = _abstract(shapes, shardings), content["state"]
    there = {name: (tuple(x[0]), x[1]) for name, x in leaves.items() if whole or name in wanted}
    _check_same({name: (x.shape, x.dtype.name) for name, x in wanted.items()}, there, step, field_of)
    items: dict[str, Any] = {"state": {name: wanted.get(name, ...) for name in leaves}}
    extra = content["arrays"] if whole else {}
    if any(math.prod(shape) for shape, _, _ in extra.values()):
        items["arrays"] = None
    loaded, why = _attempt(lambda: _verified(ocp.load_checkpointables(path, items), wanted, extra), note)
    if why:
        return why
    state, arrays = loaded
    if wrong := [name for name, found in digests(state).items() if found.words != leaves[name][2]]:
        return f"{_some(wrong)} differs from its digest"
    return Restored(step, jax.tree.unflatten(jax.tree.structure(shapes), state.values()), content["run"], arrays)


def _attempt(read: Callable[[], Any], note: AnyPath | None) -> tuple[Any, str]:
    """Return the result of `read`, and "" or why it failed on any process, with the full error in `note`."""
    value, why = None, ""
    try:
        value = read()
    except Exception as error:
        why = f"it cannot be read ({type(error).__name__}: {quoted(error)})"
        if note is not None:
            with contextlib.suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
                why = f"{why[:-1]}; all of it is in {note})"
    return value, hosts.first_nonempty(why)


def describe(path: str) -> dict[str, Any]:
    """Return a checkpoint's JSON: `run`, and shape, dtype and digest of every leaf and array."""
    beside = ocp.load_checkpointables(path, {"run": None})["run"]
    if _sha256(beside["json"].encode()) != beside["sha256"]:
        raise ValueError("its description differs from its digest")
    return json.loads(beside["json"])


def _verified(
    loaded: dict[str, Any], wanted: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    arrays = {}
    for name, (shape, dtype, digest) in extra.items():
        arrays[name] = np.array(loaded["arrays"][name]) if math.prod(shape) else np.zeros(shape, dtype)
        if _sha256(arrays[name].tobytes()) != digest:
            raise ValueError(f"{name} differs from its digest")
    return {name: loaded["state"][name] for name in wanted}, arrays


def _parts(leaves: Mapping[str, jax.Array]) -> list[dict[str, jax.Array]]:
    """Group leaves to at most `_PART_BYTES` on a device, or one larger leaf."""
    parts, filled = [{}], 0
    for name, leaf in leaves.items():
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        if parts[-1] and filled + size > _PART_BYTES:
            parts, filled = [*parts, {}], 0
        parts[-1][name] = leaf
        filled += size
    return parts


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _abstract(shapes: Any, shardings: Any) -> dict[str, jax.ShapeDtypeStruct]:
    leaves = zip(named_leaves(shapes).items(), jax.tree.leaves(shardings), strict=True)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for (name, leaf), sharding in leaves}


def _check_same(wanted: Mapping[str, Any], saved: Mapping[str, Any], step: int, field_of: FieldOf) -> None:
    def shown(table: Mapping[str, Any], name: str) -> str:
        return "{} {}".format(*reversed(table[name])) if name in table else "missing"

    for name in sorted(wanted.keys() | saved.keys()):
        if wanted.get(name) != saved.get(name):
            fields = field_of(name)
            raise UserError(
                f"checkpoint {step} does not fit this config: {name} is {shown(saved, name)} in the checkpoint and "
                f"{shown(wanted, name)} here{f' (see {fields})' if fields else ''}; use the config it was saved with, "
                "or another --workdir"
            )


def _check_finite(content: Mapping[str, Digest], step: int) -> None:
    if bad := [name for name, found in content.items() if found.nonfinite]:
        raise Diverged(
            f"checkpoint {step} is not saved, because {_some(bad)} holds NaN or infinite elements; the one before "
            "it stays the newest: go on from there with a lower learning rate, the same command with a lower "
            "--config.optimizer.learning_rate"
        )
