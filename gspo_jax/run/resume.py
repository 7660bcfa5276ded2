"""Start of a run, at its newest checkpoint or its beginning.

Resuming requires the checkpoint's config, but for fields that may change (`setup.same`) and are then recorded with
their update, its data, model files and frozen weights. User functions, evaluation records and package versions may
differ, with a warning. Files that user functions read are not compared.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax.data.contents import changes
from gspo_jax.data.pipeline import Batches
from gspo_jax.engine import Engine
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import change_line, fields_of, read_config, read_saved
from gspo_jax.folder.storage import RunFolder
from gspo_jax.rollout.episodes import Episodes
from gspo_jax.run import branch
from gspo_jax.run.branch import Request, Source
from gspo_jax.run.session import Boundary
from gspo_jax.setup import inputs, keys, policy
from gspo_jax.setup.inputs import FUNCTION
from gspo_jax.setup.policy import field_of
from gspo_jax.setup.same import check_same_run, differences
from gspo_jax.training.checkpoint import AllDamaged, Restored, restore, set_all_aside
from gspo_jax.training.digest import digest_tree
from gspo_jax.types import Prompts
from gspo_jax.versions import versions

_REFERENCE, _TEACHER = "the weights of the reference policy", "the weights of the teacher"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """State at the start of a new or resumed run."""

    boundary: Boundary
    step: int | None
    """Newest update. None for a new run."""
    key: jax.Array
    frozen: nnx.State
    """Weights that no update changes. Empty in full training."""
    base: str | None
    """Digest of the frozen weights."""
    reference: nnx.State | None
    """Reference policy's parameters. None without a KL."""
    teacher: nnx.State | None
    """Teacher's parameters, if any."""
    inputs: Mapping[str, str]
    """Digests kept in checkpoints, by name in messages."""
    changed: list[str]
    """Warnings about permitted changes."""
    arrays: Mapping[str, np.ndarray]
    """Arrays of the checkpoint beside the state."""
    origin: Mapping[str, Any] | None
    """What was taken from another run's checkpoint, see `branch.take`. None if nothing was."""
    changes: list[dict[str, Any]]
    """Fields changed on resuming, now and before, as in `changes.json`."""
    said: list[str]
    """Lines about the run's origin and what changes now."""


def start(
    config: ConfigDict,
    engine: Engine,
    files: RunFolder,
    prompts: Batches[Prompts],
    *,
    measured_on: Mapping[str, Mapping[str, str]],
    folder: Path,
    source: Source | None,
    asked: Request | None,
    start_over: bool,
) -> Start:
    """Restore the newest checkpoint and move `prompts` to its position, or load initial weights from `folder`.

    A run that begins takes what its `source`, if any, gives. One that resumes must have begun as `asked`, if given.
    With `start_over`, damaged checkpoints are set aside, and a run without checkpoints begins again.

    Raises:
      UserError: config, data, files or weights differ from the checkpoint, or all checkpoints are damaged or lost.
    """
    read = inputs.of_run(config, folder) | inputs.of_teacher(config)
    restored = _restore(config, engine, files, prompts, read, asked=asked, start_over=start_over)
    reference = policy.reference_params(config, folder, engine.policy, engine.meshes.trainer)
    if reference is not None:
        read[_REFERENCE] = digest_tree(reference)
    teacher = None if engine.teacher is None else engine.teacher.load(engine.meshes.trainer)
    if teacher is not None:
        read[_TEACHER] = digest_tree(teacher)
    if restored is None:
        origin = None
        if source is None:
            weights = engine.load(folder)
            state, frozen = engine.begin(weights), weights.frozen
        else:
            branch.check_files(source, read)
            state, frozen, origin = branch.take(source, config, engine, prompts, folder)
            branch.settle(source, config, files, origin)
        return Start(
            boundary=Boundary(done=0, state=state, prompts=prompts.get_state(), unfinished=None, evaluated=False),
            step=None,
            key=keys.run_key(config),
            frozen=frozen,
            base=digest_tree(frozen) if jax.tree.leaves(frozen) else None,
            reference=reference,
            teacher=teacher,
            inputs=read,
            changed=[],
            arrays={},
            origin=origin,
            changes=[],
            said=[] if origin is None else branch.lines(origin, config),
        )
    run, state = restored.run, restored.state
    if reference is None and _REFERENCE in run["inputs"]:
        read[_REFERENCE] = run["inputs"][_REFERENCE]  # of a KL that is off, and may be on again
    _check_inputs({name: read[name] for name in (_REFERENCE,) if name in read} | run["inputs"], read, files.name)
    prompts.set_state(run["prompts"])
    step, origin = int(state.updates), run.get("origin")
    new = [
        {"field": name, "before": before, "after": after, "update": step + 1, "iteration": run["iteration"] + 1}
        for name, (before, after) in differences(config, run["config"]).items()
    ]
    unfinished = Episodes.from_arrays(restored.arrays, **run["buffer"]) if "buffer" in run else None
    where = {"done": run["iteration"], "prompts": run["prompts"], "evaluated": run["evaluated"]}
    return Start(
        boundary=Boundary(state=state, unfinished=unfinished, **where),
        step=step,
        key=jax.random.wrap_key_data(jnp.asarray(run["key"], jnp.uint32)),
        frozen=engine.policy.frozen(folder, engine.meshes.trainer, run=run),
        base=run.get("base"),
        reference=reference,
        teacher=teacher,
        inputs=read,
        changed=changed_since(run, inputs=read, measured_on=measured_on, versions=versions()),
        arrays=restored.arrays,
        origin=origin,
        changes=run["changes"] + new,
        said=[*([] if origin is None else [branch.reminder(origin)]), *map(change_line, new)],
    )


def _restore(
    config: ConfigDict,
    engine: Engine,
    files: RunFolder,
    prompts: Batches[Prompts],
    read: Mapping[str, str],
    *,
    asked: Request | None,
    start_over: bool,
) -> Restored | None:
    def check(run: Mapping[str, Any]) -> None:
        branch.check_same_origin(asked, run.get("origin"), files.name)
        check_same_run(config, run["config"], files.name)
        _check_inputs(_without_weights(run["inputs"]), _without_weights(read), files.name)
        prompts.check_state(run["prompts"])

    try:
        restored = restore(files.checkpoints, engine.state_shapes, engine.shardings, check=check, field_of=field_of)
    except AllDamaged:
        if not start_over:
            raise
        set_all_aside(files.checkpoints)
        return None
    if restored is not None or start_over:
        return restored
    saved = read_saved(files.local)
    if saved is not None:
        raise UserError(
            f"the run in {files.name} had saved checkpoint {saved}, but {files.checkpoints} holds none; put the folder "
            "back, or begin the run again with --start_over"
        )
    return restored


def check_folder(config: ConfigDict, files: RunFolder) -> None:
    """Raise a UserError early if the run in a folder was last started with another config.

    `start` also checks the checkpoint's config: this copy may be damaged or gone.
    """
    try:
        saved = read_config(files.local)
    except UserError:
        return
    if saved is not None:
        check_same_run(config, fields_of(saved), files.name)


def _without_weights(read: Mapping[str, str]) -> dict[str, str]:
    """Return digests known before weights are loaded. Differing weights are reported leaf by leaf."""
    return {name: one for name, one in read.items() if name not in (_REFERENCE, _TEACHER, inputs.SHAPE)}


def _check_inputs(saved: Mapping[str, str], here: Mapping[str, str], workdir: str) -> None:
    """Raise a UserError if inputs differ from the checkpoint's.

    User functions are exempt: a run may resume after a faulty one is fixed.
    """
    if changed := [name for name in changes(saved, here) if not name.startswith(FUNCTION)]:
        raise UserError(
            f"{' and '.join(changed)} changed since the run in {workdir} was saved; put back what was there, or start "
            "another run with another --workdir"
        )


def changed_since(
    run: Mapping[str, Any],
    *,
    inputs: Mapping[str, str],
    measured_on: Mapping[str, Mapping[str, str]],
    versions: Mapping[str, str],
) -> list[str]:
    """Return warnings about permitted changes since `run`, a checkpoint's record."""
    found = []
    if edited := [name for name in changes(run["inputs"], inputs) if name.startswith(FUNCTION)]:
        found.append(
            f"{' and '.join(edited)} changed since the run was saved: do not compare what depends on them from here on "
            "with earlier numbers"
        )
    for name, here in measured_on.items():
        if fields := changes(run["measured_on"].get(name, here), here):
            found.append(
                f"{name} is not what it was ({', '.join(fields)}): do not compare its accuracies from here on with "
                "earlier ones"
            )
    if moved := changes(run["versions"], versions):
        before, now = (
            ", ".join(f"{name} {all_[name]}" if name in all_ else f"no {name}" for name in moved)
            for all_ in (run["versions"], versions)
        )
        found.append(
            f"the run was saved under {before} and goes on under {now}: its numbers may differ in their last bits from "
            "those of a run that was not stopped"
        )
    return found
