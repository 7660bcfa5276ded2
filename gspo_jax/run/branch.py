"""A new run that begins from a checkpoint of another one (`--from=RUN[@STEP]`), which is only read.

Weights, optimizer moments and the data position may be taken, with a critic's. Anything else begins anew: iterations
and updates are counted from 0, learning rates follow the new config's schedule from its first update, random numbers
its seed. Unfinished rollouts and drafts' histories are left behind. The reference policy of a KL is not the taken
weights but, as in the other run, the model that `model.folder` or the cold start gives.

What was taken from where is in `origin.json` and in every checkpoint of the new run, which copies the other's cold
start and saves its first checkpoint at once. From then on it needs nothing of the other run.
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax.data.pipeline import Batches
from gspo_jax.engine import Engine
from gspo_jax.errors import UserError, choices
from gspo_jax.folder import storage
from gspo_jax.folder.notes import CONFIG_FILE, ORIGIN_FILE, existing_folder, note, read_note
from gspo_jax.folder.storage import COLD_START, RunFolder, open_folder
from gspo_jax.parallel import processes
from gspo_jax.setup import inputs, learning, policy, same
from gspo_jax.setup.fields import at
from gspo_jax.training import checkpoint
from gspo_jax.training.checkpoint import named_leaves
from gspo_jax.training.state import Learner, TrainState, with_new_schedule
from gspo_jax.types import Prompts, Weights

PARTS = "weights", "moments", "data"
"""What can be taken: trained weights, the optimizer's moments of them, and the position in the training prompts."""
_SHOWN = 12
"""Maximum changed fields listed at the start."""
_WORDS = {"weights": "weights", "moments": "optimizer moments", "data": "data position"}
_OF_ADAPTERS = tuple(f"adapter.{field}" for field in ("rank", "expert_rank", "alpha", "targets", "expert_targets"))
"""Fields that belong to adapters' weights."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What `--from` and `--from_parts` ask for."""

    folder: str
    """Absolute path, or gs://BUCKET/RUN."""
    step: int | None
    """The checkpoint's, None: the newest."""
    parts: tuple[str, ...] | None
    """Of PARTS; None: all that fit the new run."""

    def __str__(self) -> str:
        return self.folder if self.step is None else f"{self.folder}@{self.step}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """An opened checkpoint of another run."""

    request: Request
    files: RunFolder
    step: int
    content: Mapping[str, Any]
    """Its description: `run`, and the names, shapes and dtypes of `state`."""

    @property
    def run(self) -> Mapping[str, Any]:
        return self.content["run"]

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS if self.request.parts is None else self.request.parts

    @property
    def name(self) -> str:
        return self.files.name

    def initial_folder(self, config: ConfigDict, own: Path) -> Path:
        """Return the Hugging Face folder that the new run starts from; `own` is that of a run of its own."""
        return self.files.local / COLD_START if self.gives_cold_start(config) else own

    def gives_cold_start(self, config: ConfigDict) -> bool:
        """Return True if the other run's cold start gives model and tokenizer."""
        return "weights" in self.parts and not config.model.folder

    def load(self, shapes: Any, shardings: Any) -> Any:
        """Load some leaves of the train state into their shardings."""
        where = self.files.checkpoints
        return checkpoint.load_step(where, self.step, shapes, shardings, field_of=policy.field_of).state

    def has(self, shapes: Any) -> bool:
        """Return True if the checkpoint has leaves of these names and shapes."""
        there = self.content["state"]
        return all(name in there and tuple(there[name][0]) == x.shape for name, x in named_leaves(shapes).items())


def parse(given: str, parts: Sequence[str], workdir: str | os.PathLike[str]) -> Request | None:
    """Return what `--from=RUN[@STEP]` and `--from_parts` ask for, None without `--from`.

    Raises:
      UserError: the folder is the new run's, its name cannot be one, or the parts are unknown.
    """
    if not given:
        if parts:
            raise UserError("--from_parts says what to take from another run; name that run too, --from=RUN[@STEP]")
        return None
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--from_parts has {part!r}; {choices(part, PARTS)}")
    if "moments" in parts and "weights" not in parts:
        raise UserError("--from_parts has moments without weights, and they are of those weights; add weights to it")
    run, step = storage.split_step(given)
    place = storage.find(run, flag="--from")
    if place == storage.find(workdir):
        raise UserError(
            f"--from and --workdir are both {place}; without --from a run goes on from its newest checkpoint, and a "
            "new one needs a folder of its own"
        )
    return Request(str(place), step, tuple(part for part in PARTS if part in parts) or None)


def request_of(given: Request | None, files: RunFolder, *, saved: int | None) -> Request | None:
    """Return what a run that begins takes: `given`, or what its folder noted when it was to begin before.

    Raises:
      UserError: the folder holds a run that began elsewhere.
    """
    noted = read_note(files.local, ORIGIN_FILE)
    if noted is not None:
        check_same_origin(given, noted, files.name)
        return Request(noted["folder"], noted["iteration"], tuple(noted["taken"]))
    if given is not None and saved is None:
        for name in (CONFIG_FILE, COLD_START):
            if (files.local / name).exists():
                raise UserError(
                    f"{files.name} already has {name}, of a run that did not begin from {given}; give --workdir a new "
                    "folder"
                )
    return given


def check_same_origin(given: Request | None, noted: Mapping[str, Any] | None, workdir: str) -> None:
    """Raise a UserError if a run is resumed with another `--from` than it began from. It needs none."""
    if given is None:
        return
    if noted is None:
        raise UserError(
            f"the run in {workdir} did not begin from another one, and --from is {given}; leave it out to resume this "
            "run, or give --workdir a new folder"
        )
    steps, parts = (given.step, noted["iteration"]), (given.parts, tuple(noted["taken"]))
    if given.folder != noted["folder"] or any(ours not in (None, theirs) for ours, theirs in (steps, parts)):
        taken = f" with --from_parts={','.join(given.parts)}" if given.parts is not None else ""
        raise UserError(
            f"the run in {workdir} began from {noted['folder']}@{noted['iteration']} ({', '.join(noted['taken'])}), "
            f"and --from is {given}{taken}; leave it out to resume this run, or give --workdir a new folder"
        )


@contextmanager
def open_source(request: Request, config: ConfigDict) -> Iterator[Source]:
    """Open the checkpoint that a new run begins from, read-only and without a lease: its run may be going on.

    Raises:
      UserError: there is no such checkpoint, or its weights do not fit the config.
    """
    if isinstance(storage.find(request.folder), Path):
        existing_folder(request.folder)
    with open_folder(request.folder, write=False) as files:
        step = processes.ask_first(lambda: _step(files, request.step))
        source = Source(
            request=request, files=files, step=step, content=checkpoint.read_description(files.checkpoints, step)
        )
        same.check_version(source.run["config"], files.name, flag="--from")
        if "weights" in source.parts:
            _check_model(config, source)
        yield source


def _step(files: RunFolder, asked: int | None) -> int:
    there = checkpoint.steps(files.checkpoints)
    if not there:
        raise UserError(f"the run in {files.name} has no checkpoint yet; wait for its first, or give another --from")
    if asked not in (None, *there):
        raise UserError(
            f"the run in {files.name} has no checkpoint {asked}; there are {', '.join(map(str, reversed(there)))}, "
            "numbered by iterations (checkpoint.keep says how many are kept)"
        )
    return there[0] if asked is None else asked


def _check_model(config: ConfigDict, source: Source) -> None:
    """Raise a UserError unless model, tokenizer and adapters are those of the checkpoint's weights."""
    saved, name = same.as_config(source.run["config"]), source.name
    ours, theirs = (policy.make_adapters(each) for each in (config, saved))
    if (ours is None) != (theirs is None):
        own, other, merge = "adapters", "all weights", ""
        if ours is None:
            own, other, merge = other, own, " --merge"
        raise UserError(
            f"the run in {name} trained {other}, and this one trains {own}; write its weights to a folder (gspo-jax "
            f"convert --from={name} --to=FOLDER{merge}) and begin from that, --config.model.folder=FOLDER"
        )
    fields = [*_OF_ADAPTERS] if ours is not None else []
    if not config.model.folder:
        if not (source.files.local / COLD_START).is_dir():
            raise UserError(
                f"the run in {name} began from model.folder {saved.model.folder!r} and has no cold start; set "
                f"--config.model.folder={saved.model.folder}"
            )
        names = {*config.model.architecture, *saved.model.architecture}
        fields += ["coldstart.vocab_size", *(f"model.architecture.{field}" for field in sorted(names))]
    changed = same.differences(config, source.run["config"])
    for field in fields:
        if field in changed:
            there, here = changed[field]
            raise UserError(
                f"{field} is {here!r} here and {there!r} in the run in {name}; set it back to take its weights"
            )


def check_files(source: Source, read: Mapping[str, str]) -> None:
    """Raise a UserError unless taken weights meet the model's and tokenizer's files that they were trained with.

    `read` has the new run's digests, see `inputs.of_run`.
    """
    if "weights" not in source.parts:
        return
    folder = source.run["config"]["model"]["folder"] or f"{source.name}/{COLD_START}"
    for file in inputs.MODEL_FILES:
        name = f"{file} of the model"
        if read.get(name) != source.run["inputs"].get(name):
            raise UserError(
                f"{name} is not what it was in the run in {source.name}; take its weights with the model and tokenizer "
                f"that they were trained with, --config.model.folder={folder}"
            )


def take(
    source: Source, config: ConfigDict, engine: Engine, prompts: Batches[Prompts], folder: Path
) -> tuple[TrainState, nnx.State, dict[str, Any]]:
    """Return a new run's train state, frozen weights and origin, and move `prompts` to the taken position.

    The origin is JSON: the other run's `folder`, `iteration` and `update`, parts `taken`, reasons for what is `left`
    behind, `changed` fields, and the `learning_rate` of its last update and of the first one here.

    Raises:
      UserError: the data position was asked for and does not fit, or weights and config do not.
    """
    left = _take_position(source, prompts)
    counts = _counts(source, engine)
    if "weights" in source.parts:
        shapes, places = ({"policy": {"params": tree.params}} for tree in (engine.state_shapes, engine.shardings))
        params = source.load(shapes, places)["policy"]["params"]
        weights = Weights(params, engine.policy.frozen(folder, engine.meshes.trainer, run=source.run))
        del params
    else:
        weights = engine.load(folder)
    state, frozen = engine.begin(weights), weights.frozen
    del weights
    state, critic = _take_critic(source, engine, state)
    if "moments" in source.parts:
        for name in ("policy", *(["critic"] if critic == "taken" else [])):
            state = dataclasses.replace(state, **{name: Learner(getattr(state, name).params, ())})  # makes room
            moments = _moments(source, engine, name)
            state = dataclasses.replace(state, **{name: Learner(getattr(state, name).params, moments)})
    left |= {"critic": critic} if critic not in ("", "taken") else {}
    if "buffer" in source.run:
        left["rollouts"] = f"{len(source.run['buffer']['texts'])} unfinished rollouts are left behind"
    origin = {
        "folder": source.request.folder,
        "iteration": source.step,
        "update": counts[0],
        "taken": [part for part in source.parts if part not in left],
        "left": left,
        "changed": same.differences(config, source.run["config"]),
        "learning_rate": _learning_rates(source, config, counts),
    }
    return state, frozen, origin


def _take_position(source: Source, prompts: Batches[Prompts]) -> dict[str, str]:
    """Move `prompts` to the other run's position, or return why not, unless it was asked for."""
    if "data" not in source.parts:
        return {}
    if why := prompts.difference(source.run["prompts"]):
        if source.request.parts is not None:
            rest = ",".join(part for part in source.parts if part != "data")
            without = f"leave the data position out, --from_parts={rest}" if rest else "leave out --from"
            raise UserError(f"{why}; put back what was there, or {without}")
        return {"data": f"the prompts begin at the beginning: {why}"}
    prompts.set_state(source.run["prompts"])
    return {}


def _take_critic(source: Source, engine: Engine, state: TrainState) -> tuple[TrainState, str]:
    """Take the critic if both runs have the same. Also return "taken", or what became of it, "" without any."""
    if "weights" not in source.parts:
        return state, ""
    there = any(name.startswith("critic.") for name in source.content["state"])
    if state.critic is None:
        return state, "the critic is left behind" if there else ""
    shapes, places = engine.state_shapes.critic, engine.shardings.critic
    assert shapes is not None and places is not None
    wanted = {"critic": {"params": shapes.params}}
    if not source.has(wanted):
        which = "its critic has another shape" if there else "it has no critic"
        return state, f"the critic is new, with the taken weights: {which}"
    params = source.load(wanted, {"critic": {"params": places.params}})["critic"]["params"]
    return dataclasses.replace(state, critic=dataclasses.replace(state.critic, params=params)), "taken"


def _moments(source: Source, engine: Engine, learner: str) -> optax.OptState:
    trees = engine.state_shapes, engine.shardings
    shapes, places = ({learner: {"opt_state": getattr(tree, learner).opt_state}} for tree in trees)
    return with_new_schedule(source.load(shapes, places)[learner]["opt_state"])


def _counts(source: Source, engine: Engine) -> tuple[int, int]:
    """Return the other run's counts of updates, and of skipped ones."""
    trees = engine.state_shapes, engine.shardings
    shapes, places = ({"updates": tree.updates, "skipped": tree.skipped} for tree in trees)
    found = source.load(shapes, places)
    return int(found["updates"]), int(found["skipped"])


def _learning_rates(source: Source, config: ConfigDict, counts: tuple[int, int]) -> list[float | None]:
    """Return the learning rates of the other run's last update, None without one, and of the first one here."""
    before, after = (learning.make_update_rule(each)[1] for each in (same.as_config(source.run["config"]), config))
    made = counts[0] - counts[1]
    return [float(np.asarray(before(made - 1))) if made else None, float(np.asarray(after(0)))]


def settle(source: Source, config: ConfigDict, files: RunFolder, origin: Mapping[str, Any]) -> None:
    """Write `origin.json`, then copy the cold start that the new run goes on with."""
    own = files.local / COLD_START
    if processes.is_first():
        note(files.local, ORIGIN_FILE, **origin)
        if source.gives_cold_start(config) and not own.exists():
            partial = own.with_name(f"{COLD_START}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source.files.local / COLD_START, partial)
            storage.sync_tree(partial)
            os.replace(partial, own)
    files.share()
    processes.wait_for_all("origin")


def reminder(origin: Mapping[str, Any]) -> str:
    """Return what is printed when such a run is resumed."""
    return f"this run began from {_where(origin)}"


def _where(origin: Mapping[str, Any]) -> str:
    return f"iteration {origin['iteration']} (update {origin['update']}) of {origin['folder']}"


def lines(origin: Mapping[str, Any], config: ConfigDict) -> list[str]:
    """Return what is printed at the start of a run that begins from another one."""
    taken = " and ".join(", ".join(_WORDS[part] for part in origin["taken"]).rsplit(", ", 1))
    found = [f"beginning from {_where(origin)}: {taken}"]
    changed = [f"  {name} {before!r} → {after!r}" for name, (before, after) in origin["changed"].items()]
    found += changed[:_SHOWN]
    if more := len(changed) - _SHOWN:
        found += [f"  … and {more} more fields differ, listed in {ORIGIN_FILE}"] * (more > 0)
    found += [f"  {why}" for why in origin["left"].values()]
    last, first = origin["learning_rate"]
    warmup = at(config, "optimizer.warmup_updates")
    ramp = f", the first of {warmup} of warm-up (optimizer.warmup_updates)" if warmup else ""
    was = "" if last is None else f", {last:.3g} at the last update there"
    return [*found, f"  learning rate {first:.3g} at the first update{ramp}{was}"]
