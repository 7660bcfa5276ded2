"""The start of a run: at its newest checkpoint, if all that it depends on is as it was, or at its beginning.

A run goes on with the config, the data, the files of the model and the frozen weights that it was saved with; what
differs is named in a UserError. Own functions, what evaluations measure on, and versions may differ, and that is said.
What own functions read by themselves is not compared, nor is the machine.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax.data.contents import changes
from gspo_jax.data.pipeline import Batches, PromptBatch
from gspo_jax.engine import Engine
from gspo_jax.errors import UserError
from gspo_jax.reporting.writers import fields_of, read_config, read_saved
from gspo_jax.rollout.episodes import Episodes
from gspo_jax.setup import inputs, keys, policy
from gspo_jax.setup.inputs import FUNCTION
from gspo_jax.setup.policy import field_of
from gspo_jax.setup.same import check_same_run
from gspo_jax.storage import RunFolder
from gspo_jax.training.checkpoint import AllDamaged, Restored, restore, set_all_aside
from gspo_jax.training.digest import digest_tree
from gspo_jax.training.state import TrainState
from gspo_jax.versions import versions

COMPARED = {
    "inputs": "digests of its files",
    "measured_on": "digests of its evaluations' records",
    "versions": "versions of packages",
}
"""What a checkpoint says of its run to compare with, beside the config and the position in the data, and in words."""

_REFERENCE = "the weights of the reference policy"
"""What messages call them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The state that a new or a resumed run starts from."""

    iteration: int
    """Iterations done by earlier starts."""
    step: int | None
    """Number of the newest update; None for a new run."""
    key: jax.Array
    """PRNG key of the run."""
    state: TrainState
    """Train state, in the trainer's layout."""
    frozen: nnx.State
    """Weights that no update changes; empty in full training."""
    base: str | None
    """Digest of the frozen weights; None in full training."""
    reference: nnx.State | None
    """Parameters of the reference policy; None without a KL to it."""
    inputs: Mapping[str, str]
    """Digests that a checkpoint keeps to compare with, by what messages call their object."""
    changed: list[str]
    """A sentence on each of what may differ from when the checkpoint was saved, and does; empty for a new run."""
    unfinished: Episodes | None
    """Partial rollouts in flight; None if there are none."""
    evaluated: bool
    """False if an evaluation is due before the next iteration."""


def start(
    config: ConfigDict,
    engine: Engine,
    files: RunFolder,
    prompts: Batches[PromptBatch],
    *,
    measured_on: Mapping[str, Mapping[str, str]],
    folder: Path,
    start_over: bool,
) -> Start:
    """Restore the newest checkpoint and move `prompts` to its position, or load initial weights from `folder`.

    With `start_over`, a run whose checkpoints are gone, or all damaged and now set aside, begins again. `measured_on`
    has the digests of each evaluation's records by field, by what messages call the evaluation.

    Raises:
      UserError: what the checkpoint was saved with differs from config, data, files or weights here, all checkpoints
        are damaged, or the run had some and none is there.
    """
    read = inputs.of_run(config, folder)
    restored = _restore(config, engine, files, prompts, read, start_over=start_over)
    reference = policy.reference_params(config, folder, engine.policy, engine.meshes.trainer)
    if reference is not None:
        read[_REFERENCE] = digest_tree(reference)
    if restored is None:
        weights = engine.load(folder)
        first = {"iteration": 0, "step": None, "unfinished": None, "evaluated": False, "key": keys.run_key(config)}
        base = digest_tree(weights.frozen) if jax.tree.leaves(weights.frozen) else None
        return Start(
            **first,
            state=engine.begin(weights),
            frozen=weights.frozen,
            base=base,
            reference=reference,
            inputs=read,
            changed=[],
        )
    run = restored.run
    _check_inputs(run["inputs"], read, files.name)
    prompts.set_state(run["prompts"])
    return Start(
        iteration=run["iteration"],
        step=int(restored.state.updates),
        key=jax.random.wrap_key_data(jnp.asarray(run["key"], jnp.uint32)),
        state=restored.state,
        frozen=engine.policy.frozen(folder, engine.meshes.trainer, run=run),
        base=run.get("base"),
        reference=reference,
        inputs=read,
        changed=changed_since(run, inputs=read, measured_on=measured_on, versions=versions()),
        unfinished=Episodes.from_arrays(restored.arrays, **run["buffer"]) if "buffer" in run else None,
        evaluated=run["evaluated"],
    )


def _restore(
    config: ConfigDict,
    engine: Engine,
    files: RunFolder,
    prompts: Batches[PromptBatch],
    read: Mapping[str, str],
    *,
    start_over: bool,
) -> Restored | None:
    def check(run: Mapping[str, Any]) -> None:
        check_same_run(config, run["config"], files.name)
        if missing := [words for name, words in COMPARED.items() if name not in run]:
            raise UserError(
                f"the run in {files.name} was saved by an earlier version of gspo_jax, which did not keep "
                f"{' and '.join(missing)}; go on with that version, or start another run with another "
                f"--workdir, such as from these weights (python -m gspo_jax.convert --from={files.name} --to=FOLDER)"
            )
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
    """Raise a UserError, before any work, if the run in a folder was last started with another config.

    `start` compares with the config in the checkpoint; this copy of it may be damaged or gone.
    """
    try:
        saved = read_config(files.local)
    except UserError:
        return
    if saved is not None:
        check_same_run(config, fields_of(saved), files.name)


def _without_weights(read: Mapping[str, str]) -> dict[str, str]:
    """The digests of what is there before weights are: another shape of these is told leaf by leaf."""
    return {name: one for name, one in read.items() if name not in (_REFERENCE, inputs.SHAPE)}


def _check_inputs(saved: Mapping[str, str], here: Mapping[str, str], workdir: str) -> None:
    """Raise a UserError if something that a run reads differs from what it was when the checkpoint was saved.

    Not so for functions of the user's own, since a run that one of them has ended goes on once it is mended.
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
    """A sentence on each of what may differ from when a checkpoint was saved, and does; `run` is the checkpoint's.

    The others are what it is here: digests of what the run reads and of what its evaluations measure on, and versions.
    """
    found = []
    if edited := [name for name in changes(run["inputs"], inputs) if name.startswith(FUNCTION)]:
        found.append(
            f"{' and '.join(edited)} changed since the run was saved: do not compare what depends on them from here on "
            "with earlier numbers"
        )
    for name, here in measured_on.items():
        if fields := changes(run["measured_on"].get(name, {}), here):
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
