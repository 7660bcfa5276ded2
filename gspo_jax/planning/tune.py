"""Search for settings that fit in memory and have the least projected iteration time.

Training and sampling share only the weights, so each is searched separately, one field at a time from the config's own:
remat, row budget and mesh by update time, then sampler mesh, and slots with partial rollouts, by sampling time. Slots
are compiled only if a simulation with interpolated steps promises a gain and memory suffices. Dispatch and what changes
the algorithm, such as batch size, are not searched.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from gspo_jax.engine import make_sampler
from gspo_jax.errors import UserError
from gspo_jax.lengths import Lengths
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import decoding, iteration, programs, verdict
from gspo_jax.planning.setting import Setting
from gspo_jax.planning.verdict import Changes
from gspo_jax.setup import memory
from gspo_jax.setup.fields import at

Planner = Callable[[ConfigDict, Sequence[str]], tuple[dict[str, Any], Setting]]
"""(config, program names) -> facts by name, and their setting."""
TRAINING, SAMPLING = "training", "sampling"
OF_SAMPLING = ("sample_prefill", "sample_decode", "reshard")
PARTIAL = ((1.25, 0.9), (1.5, 0.8), (2.0, 0.6), (3.0, 0.4), (4.0, 0.3))
"""(prompts in flight over prompts per batch, share that ends a call) to try."""
SHAPED_BY = {
    "update": ("mesh", "model.remat", "training.row_tokens"),
    "score": ("mesh", "model.remat", "training.row_tokens"),
    "deal": ("mesh", "training.row_tokens"),
    "sample_prefill": ("mesh", "sampling.mesh"),
    "sample_decode": ("mesh", "sampling.mesh", "sampling.slots", "sampling.pool_tokens", "sampling.partial.prompts"),
    "reshard": ("mesh", "sampling.mesh"),
}
"""Searched fields that shape a program or the memory held during it."""
TRIED = 4
"""Maximum slot counts to compile."""


@dataclasses.dataclass(frozen=True)
class Try:
    """One tried setting."""

    part: str
    """`TRAINING` or `SAMPLING`."""
    changes: Changes
    seconds: float | None
    """Seconds of the part. None if it cannot run."""
    headroom: float | None
    """Smallest free share of memory. None if nothing was compiled."""
    note: str = ""
    """Reason for rejection other than speed."""


@dataclasses.dataclass
class Search:
    """Search state."""

    config: ConfigDict
    planner: Planner
    lengths: Lengths
    headroom: float
    """Share of a chip's memory to leave free."""
    report: Callable[[Try], None]
    """Called after every try."""
    tries: list[Try] = dataclasses.field(default_factory=list)
    planned: dict[tuple[str, ...], Any] = dataclasses.field(default_factory=dict)
    """Program facts by name and shaping fields."""

    def run(self) -> tuple[Changes, iteration.Iteration]:
        """Return the best changes to the config, and their iteration.

        Raises:
          UserError: the config's own settings do not fit.
        """
        best: Changes = {}
        training = [*self._remats(best), *self._row_budgets(best), *self._meshes(best)]
        self._plan_all([(best, programs.NAMES), *((changes, ("update",)) for changes in training)])
        own = self._train(best)
        if own is None:
            raise UserError(f"the config's own update leaves less than {self.headroom:.0%} of a chip's memory free")
        for candidates in (self._remats, self._row_budgets, self._meshes):
            for changes in candidates(best):
                seconds = self._train(changes)
                if seconds is not None and seconds < own:
                    best, own = changes, seconds
        facts, setting = self._plan(best, programs.NAMES)
        own = self._sample(best, facts, setting)
        if own is None:
            raise UserError(f"the config's own decoder leaves less than {self.headroom:.0%} of a chip's memory free")
        for candidates in (self._sampler_meshes, self._calls):
            tried = list(candidates(best, facts, setting))
            self._plan_all([(changes, OF_SAMPLING) for changes in tried])
            for changes in tried:
                if (planned := self._planned(SAMPLING, changes, OF_SAMPLING)) is None:
                    continue
                new, its = planned
                seconds = self._sample(changes, facts | new, its)
                if seconds is not None and seconds < own:
                    best, own, facts, setting = changes, seconds, facts | new, its
        return best, iteration.simulate(iteration.make_run(facts, setting), self.lengths)

    def _with(self, changes: Changes) -> ConfigDict:
        return verdict.changed(self.config, changes)

    def _plan(self, changes: Changes, names: Sequence[str]) -> tuple[dict[str, Any], Setting]:
        """Return program facts, shared by settings that do not change them, and the setting."""
        config = self._with(changes)
        keys = {name: (name, *(repr(at(config, field)) for field in SHAPED_BY[name])) for name in names}
        new, setting = self.planner(config, [name for name in names if keys[name] not in self.planned])
        self.planned |= {keys[name]: facts for name, facts in new.items()}
        return {name: self.planned[keys[name]] for name in names}, setting

    def _plan_all(self, settings: Sequence[tuple[Changes, Sequence[str]]]) -> None:
        """Plan settings in parallel, before they are needed."""

        def plan(wanted: tuple[Changes, Sequence[str]]) -> None:
            with contextlib.suppress(UserError):  # raised again later
                self._plan(*wanted)

        with ThreadPoolExecutor(max(1, len(settings))) as pool:
            list(pool.map(plan, settings))

    def _add(self, one: Try) -> None:
        self.tries.append(one)
        self.report(one)

    def _planned(self, part: str, changes: Changes, names: Sequence[str]) -> tuple[dict[str, Any], Setting] | None:
        """Return `_plan`, or None if these settings cannot be, which is reported."""
        try:
            return self._plan(changes, names)
        except UserError as error:
            self._add(Try(part, changes, None, None, str(error)))
            return None

    def _judge(
        self, part: str, changes: Changes, facts: Sequence[Mapping[str, Any]], measure: Callable[[], float]
    ) -> float | None:
        """Report a try and return its seconds, or None if it does not fit."""
        free, seconds, note = min(program["headroom"] for program in facts), None, "does not fit"
        if all(program["fits"] for program in facts):
            seconds = measure()
            note = "" if free >= self.headroom else f"leaves less than {self.headroom:.0%} of the memory free"
        self._add(Try(part, changes, seconds, free, note))
        return None if note else seconds

    def _train(self, changes: Changes) -> float | None:
        """Return update seconds, or None if they do not fit."""
        planned = self._planned(TRAINING, changes, ("update",))
        if planned is None:
            return None
        update, setting = planned[0]["update"], planned[1]

        def seconds() -> float:
            rate = iteration.rate(update, setting, "update")
            return sum(rate.seconds(rows, setting.mesh.size) for rows in self._rows(setting))

        return self._judge(TRAINING, changes, [update], seconds)

    def _rows(self, setting: Setting) -> list[iteration.TokenRows]:
        """Return update rows for one draw of lengths."""
        data, group_size = setting.config.data, setting.config.sampling.group_size
        drawn = self.lengths.draw(data.prompts_per_batch * group_size, np.random.default_rng(0))
        lengths = drawn.reshape(data.prompts_per_batch, group_size)
        return iteration.packed_rows(setting.engine.packer, lengths, prompt=data.max_prompt_length)

    def _sample(self, changes: Changes, facts: Mapping[str, Any], setting: Setting) -> float | None:
        """Return sampling seconds, or None if it does not fit."""

        def seconds() -> float:
            return sum(iteration.simulate_sampling(iteration.make_run(facts, setting), self.lengths).values())

        return self._judge(SAMPLING, changes, [facts[name] for name in OF_SAMPLING], seconds)

    def _remats(self, best: Changes) -> Iterator[Changes]:
        """Yield other remats, without "offload" and "none", which are known to take more memory and time."""
        own = self._with(best).model.remat
        yield from (best | {"model.remat": remat} for remat in ("dots", "full") if remat != own)

    def _row_budgets(self, best: Changes) -> Iterator[Changes]:
        """Yield row budgets of double and half, if the longest response and its prompt fit."""
        config = self._with(best)
        if config.training.row_tokens is not None:
            least = config.data.max_prompt_length + config.sampling.max_response_length
            own = config.training.row_tokens
            yield from (best | {"training.row_tokens": n} for n in (2 * own, own // 2) if n >= least)

    def _meshes(self, best: Changes) -> Iterator[Changes]:
        """Yield half as many chips per copy of the weights."""
        mesh = self._with(best).mesh
        if mesh.data == -1 or mesh.fsdp > 1:
            size = mesh.fsdp
            yield best | (
                {"mesh.fsdp": size // 2} if mesh.data == -1 else {"mesh.data": 2 * mesh.data, "mesh.fsdp": -1}
            )
        elif mesh.fsdp == -1:
            yield best | {"mesh.data": 2 * mesh.data}

    def _sampler_meshes(self, best: Changes, facts: Mapping[str, Any], setting: Setting) -> Iterator[Changes]:
        """Yield twice and half as many chips per copy of the experts."""
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
        """Yield other slots and pools, with and without partial rollouts, fastest in simulation first.

        Step costs are interpolated, memory is estimated.
        """
        free = (facts["sample_decode"]["headroom"] - self.headroom) * setting.chip.memory + sampling_bytes(setting)
        batch, found = self.config.data.prompts_per_batch, {}
        some = ({"sampling.partial.prompts": round(n * batch), "sampling.partial.share": share} for n, share in PARTIAL)
        for part in (best, *(best | partial for partial in some)):
            for size in self._sizes(setting, part, free):
                changes = part if size is None else part | size
                its = self._setting(setting, changes)
                run = iteration.make_run(facts, its)
                steps = interpolated(run.decoder.steps, its.decoder_size[0])
                decoder = dataclasses.replace(run.decoder, steps=steps)
                trial = iteration.simulate_sampling(dataclasses.replace(run, decoder=decoder), self.lengths)
                found[trial["prefill"] + trial["decode"], len(found)] = changes
        faster = itertools.takewhile(lambda changes: changes != best, (found[key] for key in sorted(found)))
        yield from itertools.islice(faster, TRIED)

    def _setting(self, setting: Setting, changes: Changes) -> Setting:
        """Return the setting with other slots."""
        config, engine = self._with(changes), setting.engine
        sampler = make_sampler(config, engine.policy, engine.meshes, engine.sampler.stop)
        return dataclasses.replace(setting, engine=dataclasses.replace(engine, config=config, sampler=sampler))

    def _sizes(self, setting: Setting, changes: Changes, free: float) -> Iterator[Changes | None]:
        """Yield slots and pools whose estimated bytes per chip are at most `free`, first the config's own."""
        shards = mesh_lib.batch_shards(dict(setting.engine.meshes.sampler.shape))

        def fits(more: Changes) -> bool:
            return sampling_bytes(self._setting(setting, changes | more)) <= free

        def most(make: Callable[[int], Changes], limit: int) -> int:
            """Bisect for the most units that fit."""
            low, high = 0, limit
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if fits(make(middle)) else (low, middle - 1)
            return low

        if fits({}):
            yield None
        config = self._with(changes)
        responses = config.data.prompts_per_batch * config.sampling.group_size  # as many slots are allowed
        own = self._setting(setting, changes).decoder_size[0]
        if config.sampling.partial.prompts is None:
            batch = most(lambda n: {"sampling.slots": n * shards}, responses // shards)
            tried = {batch, batch - batch % 4, 3 * own // 2, own, 3 * own // 4, own // 2}
            yield from ({"sampling.slots": n * shards} for n in sorted(tried - {own}) if 0 < n <= batch)
            return
        lengths = self.lengths.draw(responses, np.random.default_rng(0)).astype(float)
        age, unit = (lengths**2).sum() / (2 * lengths.sum()), 1024  # mean tokens of a response in progress
        slots = {"sampling.slots": responses}  # do not limit what fits
        least = -(-config.sampling.max_response_length // unit)
        room = most(
            lambda n: slots | {"sampling.pool_tokens": (n + least) * unit * shards}, responses * least // shards
        )
        for tokens in {(least + part * room // 4) * unit for part in (4, 3, 2)}:
            for crowd in (0.9, 1.1):
                count = min(round(crowd * tokens / age), responses // shards)
                if count > 0 and room:
                    yield {"sampling.slots": count * shards, "sampling.pool_tokens": tokens * shards}


def sampling_bytes(setting: Setting) -> float:
    """Return the bytes per chip that slots add to a decode."""
    sizes = setting.engine.meshes.sampler.shape
    return memory.sampling_bytes(setting.config, setting.model, sizes, *setting.decoder_size)


def interpolated(steps: Sequence[decoding.Step], slots: int) -> tuple[decoding.Step, ...]:
    """Return step costs for `slots` and its halves, by a linear fit."""
    counts, fixed = [step.slots for step in steps], [step.fixed_s for step in steps]
    slope, first = np.polyfit(counts, fixed, 1) if len(steps) > 1 else (0.0, fixed[0])
    return tuple(
        decoding.Step(slots >> i, float(first + slope * (slots >> i)), step.key_s) for i, step in enumerate(steps)
    )
