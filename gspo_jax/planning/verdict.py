"""A plan in one sentence: it fits, or which program does not and what would need less memory.

Remedies are valid configs, chosen by an estimate of what they save. Plan again to see what they do.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.errors import UserError
from gspo_jax.models.transformer import LEAN
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import memory, programs, topology
from gspo_jax.planning.setting import Setting
from gspo_jax.setup.checks import check
from gspo_jax.setup.fields import at
from gspo_jax.setup.meshes import check_sizes

Changes = dict[str, Any]
"""New values of config fields, by dotted name."""
Facts = Mapping[str, Any]
"""Of a planned program."""
GB = 1e9
RANK = 16
"""Of suggested adapters."""
LARGER = (2, 4, 8, 16)
"""Times as many chips as the planned slice has, tried in this order."""


def used(facts: Facts) -> int:
    """Return bytes per chip at a program's peak, with what the trainer keeps beside it."""
    return facts["peak_bytes"] + facts["resident_bytes"]


def fits(planned: Mapping[str, Facts]) -> str:
    """Return the verdict on programs that all fit."""
    largest = max(planned, key=lambda name: used(planned[name]))
    room = f"{used(planned[largest]) / GB:.1f} of {planned[largest]['limit_bytes'] / GB:.1f} GB in {largest}"
    if missing := [name for name in programs.NAMES if name not in planned]:
        return f"fits as far as planned: {room}; not planned: {', '.join(missing)}"
    return f"fits: {room}, the largest program"


def misfit(name: str, facts: Facts, setting: Setting, slice_name: str) -> str:
    """Return the verdict on a program that does not fit on chips of the slice."""
    over = used(facts) - facts["limit_bytes"]
    if over <= 0:  # the compiler has refused it for another reason, which is its first warning
        return f"does not fit: {name} {facts['warnings'][0]}"
    flags = [flag for flag in (_lighter(name, facts, setting, over), _larger(name, facts, setting, slice_name)) if flag]
    remedy = f"try {', or '.join(flags)}" if flags else "fewer or shorter responses need less"
    return f"does not fit: {name} needs {over / GB:.1f} GB more than a chip has; {remedy}"


def _lighter(name: str, facts: Facts, setting: Setting, over: int) -> str:
    """Return flags for settings that save `over` bytes by estimate: one, or several, or adapters too; empty without."""
    lighter = [offer for offer in _offers(name, facts, setting, over) if _valid(setting, offer[0])]
    adapted = [offer for offer in _adapters(name, setting) if _valid(setting, offer[0])]
    for offers in (*([offer] for offer in lighter), lighter, adapted, [*lighter, *adapted]):
        changes: Changes = {}
        for one, _ in offers:
            changes |= one
        if changes and sum(saved for _, saved in offers) >= over and _valid(setting, changes):
            return _flags(changes)
    return ""


def _offers(name: str, facts: Facts, setting: Setting, over: int) -> Iterator[tuple[Changes, float]]:
    """Yield changes that leave the algorithm alone, and the bytes per chip that they save at the program's peak."""
    config, held = setting.config, facts["hbm_by_kind"]
    if name in ("update", "score"):
        if name == "update" and config.model.remat not in LEAN:
            yield {"model.remat": "full"}, 0.8 * held.get("saved activations", 0)
        rows = used(facts) - _state(name, setting) - held.get("collectives", 0)
        budget, row = setting.engine.packer.row_lengths[0], setting.engine.packer.row_lengths[0]
        least = config.data.max_prompt_length + config.sampling.max_response_length
        while row > least and (1 - row / budget) * rows < over:
            row = max(least, row // 2)
        yield {"training.row_tokens": row}, (1 - row / budget) * rows
    if name.startswith("sample"):
        cache = held.get("cache", 0)
        if not config.sampling.cache_dtype and setting.engine.dtype.itemsize > 1:
            yield {"sampling.cache_dtype": "int8"}, cache / 2
        if config.sampling.pool_tokens is not None:
            yield {"sampling.pool_tokens": config.sampling.pool_tokens // 2}, cache / 2
        else:
            shards = mesh_lib.batch_shards(dict(setting.engine.meshes.sampler.shape))
            yield {"sampling.slots": shards * (setting.decoder_size[0] // 2)}, cache / 2


def _adapters(name: str, setting: Setting) -> Iterator[tuple[Changes, float]]:
    """Yield adapters beside a base in int8, or such a base for adapters, and the bytes per chip that they save."""
    adapter, state = setting.config.adapter, memory.held(setting)
    if not (adapter.rank or adapter.expert_rank):
        int8 = state[memory.PARAMETERS] / 4
        yield {"adapter.rank": RANK, "adapter.base_dtype": "int8"}, _state(name, setting) - int8
    elif adapter.base_dtype != "int8":
        yield {"adapter.base_dtype": "int8"}, state[memory.FROZEN] / 2


def _state(name: str, setting: Setting) -> int:
    """Return bytes per chip of the trainer's state and, in an update, of gradients."""
    held = memory.held(setting)
    return sum(held.values()) + (held[memory.PARAMETERS] if name == "update" else 0)


def _larger(name: str, facts: Facts, setting: Setting, slice_name: str) -> str:
    """Return flags for a larger slice whose chips hold less state, or keys of fewer slots; empty if none is enough."""
    over, cache = used(facts) - facts["limit_bytes"], facts["hbm_by_kind"].get("cache", 0)
    shared = _state(name, setting) + (cache if name.startswith("sample") else 0)
    kind, mesh = topology.generation(slice_name), setting.config.mesh
    chips = setting.mesh.size // setting.slices // topology.CHIPS[kind].chiplets
    sampler = dict(setting.config.sampling.mesh)
    for times in LARGER:
        larger = topology.of_chips(kind, times * chips)
        if larger is None or (1 - 1 / times) * shared < over:
            continue
        for axis in ("fsdp", "expert", "tensor"):
            changes: Changes = {} if mesh[axis] == -1 else {f"mesh.{axis}": times * mesh[axis]}
            if any(sampler.values()) and -1 not in sampler.values():
                changes["sampling.mesh.data"] = times * max(1, sampler["data"])
            if _valid(setting, changes, times=times):
                return f"--topology={larger} {_flags(changes)}".rstrip()
    return ""


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """Return a copy of the config with the changes."""
    config = config.copy_and_resolve_references()
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        at(config, section)[key] = value
    return config


def _valid(setting: Setting, changes: Changes, *, times: int = 1) -> bool:
    """Return True if a run accepts the changes, on `times` as many chips."""
    config = changed(setting.config, changes)
    try:
        model = check(config)
        sizes = mesh_lib.mesh_sizes(dict(config.mesh), times * setting.mesh.size)
        check_sizes(config, model, dict(zip(mesh_lib.AXES, sizes, strict=True)))
    except UserError:
        return False
    return True


def _flags(changes: Changes) -> str:
    return " ".join(f"--config.{field}={value}" for field, value in changes.items())
