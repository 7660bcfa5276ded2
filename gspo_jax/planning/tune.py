"""Search for the settings of a run with the least projected iteration on a slice, among those that fit in its memory.

Training and sampling share only the weights, so that they are searched one after the other, each one field at a time,
from the config's own settings: remat, row budget and mesh by the time of the updates; sampler mesh, then slots
together with partial rollouts by that of sampling. Slots are compiled where a simulation with interpolated steps
promises a gain, and their cache and the prefixes leave enough memory free. Not searched: what changes the algorithm,
such as batch size and updates per batch, and dispatch.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from gspo_jax.errors import UserError
from gspo_jax.lengths import Lengths
from gspo_jax.models.cache import segments
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import iteration, programs, sampling
from gspo_jax.planning.setting import Setting
from gspo_jax.setup.fields import at

Planner = Callable[[ConfigDict, Sequence[str]], tuple[dict[str, Any], Setting]]
"""(config, names of programs) -> their facts by name, and the setting that they are for."""
Changes = dict[str, Any]
"""New values of config fields, by dotted name."""
TRAINING, SAMPLING = "training", "sampling"
OF_SAMPLING = ("sample_prefill", "sample_decode", "reshard")
"""Programs of sampling."""
PARTIAL = ((1.25, 0.9), (1.5, 0.8), (2.0, 0.6))
"""Partial rollouts to try: prompts in flight over those of a batch, and the share that ends a call."""
SHAPED_BY = {
    "update": ("mesh", "model.remat", "training.row_tokens"),
    "score": ("mesh", "model.remat", "training.row_tokens"),
    "sample_prefill": ("mesh", "sampling.mesh"),
    "sample_decode": ("mesh", "sampling.mesh", "sampling.slots", "sampling.partial.prompts"),
    "reshard": ("mesh", "sampling.mesh"),
}
"""Of the fields that are searched, those that a program, or what stays in memory beside it, depends on."""
TRIED = 4
"""Numbers of slots, with or without partial rollouts, that are compiled at most."""
RECORDS = 4
"""Copies of a response's routes and their log-probs at a decode's peak: what 42 GB more for 128 more responses of the
30B recipe on a chip, 26 GB of it prefixes, come to. Only for the choice of what to compile."""
MARGIN = 1.1
"""Memory of a slot, beside its cache: what its log and buffers take, as a multiple of the cache."""


@dataclasses.dataclass(frozen=True)
class Try:
    """One setting that was tried."""

    part: str
    """Which part of the iteration it is for: `TRAINING` or `SAMPLING`."""
    changes: Changes
    """What differs from the config."""
    seconds: float | None
    """Projected seconds of the part; None if it cannot run."""
    headroom: float | None
    """Smallest part of a chip's memory that stays free; None if nothing was compiled for it."""
    note: str = ""
    """Why it was not taken, if it is faster."""


@dataclasses.dataclass
class Search:
    """The state of a search."""

    config: ConfigDict
    planner: Planner
    lengths: Lengths
    headroom: float
    """Part of a chip's memory that has to stay free."""
    report: Callable[[Try], None]
    """Called after every try."""
    tries: list[Try] = dataclasses.field(default_factory=list)
    planned: dict[tuple[str, ...], Any] = dataclasses.field(default_factory=dict)
    """Facts of programs by name and by the fields that shape them."""

    def run(self) -> tuple[Changes, iteration.Iteration]:
        """The best settings found, as changes to the config, and their iteration.

        Raises:
          UserError: the config's own settings do not fit.
        """
        best: Changes = {}
        training = [*self._remats(best), *self._row_budgets(best), *self._meshes(best)]
        self._plan_all([(best, iteration.PROGRAMS), *((changes, ("update",)) for changes in training)])
        own = self._train(best)
        if own is None:
            raise UserError(f"the config's own update leaves less than {self.headroom:.0%} of a chip's memory free")
        for candidates in (self._remats, self._row_budgets, self._meshes):
            for changes in candidates(best):
                seconds = self._train(changes)
                if seconds is not None and seconds < own:
                    best, own = changes, seconds
        facts, setting = self._plan(best, iteration.PROGRAMS)
        own = self._sample(best, facts, setting)
        if own is None:
            raise UserError(f"the config's own decoder leaves less than {self.headroom:.0%} of a chip's memory free")
        for candidates in (self._sampler_meshes, self._calls):
            tried = list(candidates(best, facts, setting))
            self._plan_all([(changes, OF_SAMPLING) for changes in tried])
            for changes in tried:
                try:
                    new, its = self._plan(changes, OF_SAMPLING)
                except UserError as error:
                    self._add(Try(SAMPLING, changes, None, None, str(error)))
                    continue
                seconds = self._sample(changes, facts | new, its)
                if seconds is not None and seconds < own:
                    best, own, facts, setting = changes, seconds, facts | new, its
        return best, iteration.simulate(iteration.make_run(facts, setting), self.lengths)

    def _with(self, changes: Changes) -> ConfigDict:
        """The config with changes."""
        config = self.config.copy_and_resolve_references()
        for name, value in changes.items():
            section, _, key = name.rpartition(".")
            at(config, section)[key] = value
        return config

    def _plan(self, changes: Changes, names: Sequence[str]) -> tuple[dict[str, Any], Setting]:
        """Facts of programs, planned once for all settings that they are the same for, and the setting."""
        config = self._with(changes)
        keys = {name: (name, *(repr(at(config, field)) for field in SHAPED_BY[name])) for name in names}
        new, setting = self.planner(config, [name for name in names if keys[name] not in self.planned])
        self.planned |= {keys[name]: facts for name, facts in new.items()}
        return {name: self.planned[keys[name]] for name in names}, setting

    def _plan_all(self, settings: Sequence[tuple[Changes, Sequence[str]]]) -> None:
        """Plan programs of several settings side by side, before they are asked for one by one."""

        def plan(wanted: tuple[Changes, Sequence[str]]) -> None:
            with contextlib.suppress(UserError):  # told when it is asked for
                self._plan(*wanted)

        with ThreadPoolExecutor(max(1, len(settings))) as pool:
            list(pool.map(plan, settings))

    def _add(self, one: Try) -> None:
        self.tries.append(one)
        self.report(one)

    def _train(self, changes: Changes) -> float | None:
        """Seconds of an iteration's updates with these changes; None if they do not fit, or cannot be laid out."""
        try:
            facts, setting = self._plan(changes, ("update",))
        except UserError as error:
            self._add(Try(TRAINING, changes, None, None, str(error)))
            return None
        seconds = free = None
        note = "does not fit"
        if facts["update"]["fits"]:
            free = facts["update"]["headroom"]
            rate, rows = iteration.rate(facts["update"], setting, "update"), self._rows(setting)
            seconds = sum(rate.seconds(each, setting.mesh.size) for each in rows)
            note = "" if free >= self.headroom else f"leaves less than {self.headroom:.0%} of the memory free"
        self._add(Try(TRAINING, changes, seconds, free, note))
        return None if note else seconds

    def _rows(self, setting: Setting) -> list[iteration.Rows]:
        """Rows of an iteration's updates, for one draw of the lengths."""
        data, group_size = setting.config.data, setting.config.sampling.group_size
        drawn = self.lengths.draw(data.prompts_per_batch * group_size, np.random.default_rng(0))
        lengths = drawn.reshape(data.prompts_per_batch, group_size)
        return iteration.packed_rows(setting.engine.packer, lengths, prompt=data.max_prompt_length)

    def _sample(self, changes: Changes, facts: Mapping[str, Any], setting: Setting) -> float | None:
        """Seconds of an iteration's reshard, prefill and decode; None if they do not fit."""
        programs = [facts[name] for name in OF_SAMPLING]
        free = min(program["headroom"] for program in programs)
        if not all(program["fits"] for program in programs):
            self._add(Try(SAMPLING, changes, None, free, "does not fit"))
            return None
        seconds = sum(iteration.simulate_sampling(iteration.make_run(facts, setting), self.lengths).values())
        note = "" if free >= self.headroom else f"leaves less than {self.headroom:.0%} of the memory free"
        self._add(Try(SAMPLING, changes, seconds, free, note))
        return None if note else seconds

    def _remats(self, best: Changes) -> Iterator[Changes]:
        """What else a layer may keep, unless it is known to take more memory and time: "offload" and "none"."""
        own = self._with(best).model.remat
        yield from (best | {"model.remat": remat} for remat in ("dots", "full") if remat != own)

    def _row_budgets(self, best: Changes) -> Iterator[Changes]:
        """Rows of twice and of half as many tokens, as far as they hold the longest response and its prompt."""
        config = self._with(best)
        if config.training.row_tokens is not None:
            least = config.data.max_prompt_length + config.sampling.max_response_length
            own = config.training.row_tokens
            yield from (best | {"training.row_tokens": n} for n in (2 * own, own // 2) if n >= least)

    def _meshes(self, best: Changes) -> Iterator[Changes]:
        """Half as many chips for each copy of the weights."""
        mesh = self._with(best).mesh
        if mesh.data == -1 or mesh.fsdp > 1:
            size = mesh.fsdp
            yield best | (
                {"mesh.fsdp": size // 2} if mesh.data == -1 else {"mesh.data": 2 * mesh.data, "mesh.fsdp": -1}
            )
        elif mesh.fsdp == -1:
            yield best | {"mesh.data": 2 * mesh.data}

    def _sampler_meshes(self, best: Changes, facts: Mapping[str, Any], setting: Setting) -> Iterator[Changes]:
        """Twice and half as many chips for each copy of the experts."""
        del facts
        shape, experts = setting.engine.meshes.sampler.shape, setting.model.num_experts
        for size in (2 * shape["expert"], shape["expert"] // 2):
            if size and experts % size == 0 and setting.mesh.size % (size * shape["tensor"]) == 0:
                yield best | {
                    "sampling.mesh.data": -1,
                    "sampling.mesh.fsdp": 1,
                    "sampling.mesh.expert": size,
                    "sampling.mesh.tensor": shape["tensor"],
                }

    def _calls(self, best: Changes, facts: Mapping[str, Any], setting: Setting) -> Iterator[Changes]:
        """Other numbers of slots, with and without partial rollouts: the fastest that a simulation finds, in order.

        The simulation interpolates the steps of other numbers of slots. Their memory is estimated from that of the
        compiled number.
        """
        decode, found = facts["sample_decode"], {}
        for partial in (None, *PARTIAL):
            part = best if partial is None else best | self._partial(*partial)
            its = dataclasses.replace(setting, engine=dataclasses.replace(setting.engine, config=self._with(part)))
            run = iteration.make_run(facts, its)
            own, shards = run.decoder.steps[0].slots, run.decoder.shards
            room = (decode["headroom"] - self.headroom) * setting.chip.memory + partial_bytes(setting, own)

            def fits(
                slots: int,
                its: Setting = its,
                own: int = own,
                room: float = room,
                one: float = MARGIN * slot_bytes(its),
            ) -> bool:
                return one * (slots - own) + partial_bytes(its, slots) <= room

            most = next((n for n in range(run.prompts * run.group_size // shards, 0, -1) if fits(n)), 0)
            for slots in {most, most - most % 4, 3 * own // 2, own, 3 * own // 4, own // 2}:
                if 0 < slots <= most:
                    decoder = dataclasses.replace(run.decoder, steps=interpolated(run.decoder.steps, slots))
                    trial = iteration.simulate_sampling(dataclasses.replace(run, decoder=decoder), self.lengths)
                    seconds = trial["prefill"] + trial["decode"]
                    changes = part if slots == own else part | {"sampling.slots": slots * shards}
                    found[seconds, len(found)] = changes
        faster = itertools.takewhile(lambda changes: changes != best, (found[key] for key in sorted(found)))
        yield from itertools.islice(faster, TRIED)

    def _partial(self, times: float, share: float) -> Changes:
        """Partial rollouts with this multiple of a batch's prompts in flight."""
        prompts = round(times * self.config.data.prompts_per_batch)
        return {"sampling.partial.prompts": prompts, "sampling.partial.share": share}


def slot_bytes(setting: Setting) -> int:
    """Bytes of a slot's cache in each of the chips that share it."""
    return math.prod(segments(setting.config.sampling.max_response_length)) * token_bytes(setting)


def partial_bytes(setting: Setting, slots: int) -> int:
    """Bytes of a chip that partial rollouts add to a decode with so many slots a shard, as it is planned.

    They are the keys and values of prefixes, and `RECORDS` copies of the records of the responses beyond a batch.
    """
    config, model = setting.config, setting.model
    if config.sampling.partial.prompts is None:
        return 0
    shards = mesh_lib.batch_shards(dict(setting.engine.meshes.sampler.shape))
    rows, width = programs.prefix_rows(config, slots)
    more = (config.sampling.partial.prompts - config.data.prompts_per_batch) * config.sampling.group_size // shards
    record = math.prod(model.route_shape) * (model.expert_dtype.itemsize + 4)
    return rows * width * token_bytes(setting) + RECORDS * more * config.sampling.max_response_length * record


def token_bytes(setting: Setting) -> int:
    """Bytes of a token's keys and values in each of the chips that share them."""
    model, tensor = setting.model, setting.engine.meshes.sampler.shape["tensor"]
    return 2 * model.num_layers * (model.num_kv_heads // tensor) * setting.head_bytes


def interpolated(steps: Sequence[sampling.Step], slots: int) -> tuple[sampling.Step, ...]:
    """Costs of steps with `slots` slots and its halves: a straight line through those of the compiled numbers."""
    counts, fixed = [step.slots for step in steps], [step.fixed_s for step in steps]
    slope, first = np.polyfit(counts, fixed, 1) if len(steps) > 1 else (0.0, fixed[0])
    return tuple(
        sampling.Step(slots >> i, float(first + slope * (slots >> i)), step.key_s) for i, step in enumerate(steps)
    )
