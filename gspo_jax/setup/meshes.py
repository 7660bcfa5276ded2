"""Meshes of trainer and sampler, checked against batch and model."""

import dataclasses
import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from gspo_jax.errors import UserError
from gspo_jax.kernels.backend import check_dtype
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.dispatch import check_dispatch
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import processes
from gspo_jax.rollout.pages import default_columns, fitting


@dataclasses.dataclass(frozen=True)
class Meshes:
    """Meshes over the same devices in the same order."""

    trainer: Mesh
    sampler: Mesh


def make_meshes(config: ConfigDict, model: ModelConfig, trainer: Mesh | None = None) -> Meshes:
    """Return the meshes over all devices, or over `trainer`'s.

    Raises:
      UserError: as `check_sizes`, or the devices lack `model.dtype` or the dispatch's collective.
    """
    if trainer is None:
        if jax.default_backend() == "cpu":
            mesh_lib.check_divides("cpu_devices", config.cpu_devices, "the number of processes", jax.process_count())
        trainer = mesh_lib.make_mesh(dict(config.mesh))
        if trainer.shape["expert"] > 1:
            check_dispatch(config.model.dispatch, jax.default_backend())
        processes.connect(trainer)
    check_dtype(config.model.dtype, trainer.devices.flat[0])
    check_sizes(config, model, trainer.shape)
    own = _sampler_sizes(config)
    return Meshes(trainer, mesh_lib.reshaped(trainer, own) if own else trainer)


def check_axes(config: ConfigDict) -> None:
    """Raise a UserError if more than one size of a mesh is -1."""
    for name, sizes in (("mesh", dict(config.mesh)), ("sampling.mesh", dict(config.sampling.mesh))):
        rest = [axis for axis, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise UserError(f"{name} has -1, the remaining devices, for {' and '.join(rest)}; set all but one of them")


def check_sizes(config: ConfigDict, model: ModelConfig | None, sizes: Mapping[str, int]) -> None:
    """Check batch and model (if given) against both meshes. `sizes` are the trainer's.

    Prefill shards prompts over the batch shards. A mini-batch has whole groups.

    Raises:
      UserError: the first size that does not divide, with the nearest that do.
    """
    devices = math.prod(sizes.values())
    mesh_lib.mesh_sizes(sizes, devices)
    _check_batch(config, mesh_lib.batch_shards(sizes))
    if model is not None:
        model.check_mesh(dict(sizes))
    if own := _sampler_sizes(config):
        resolved: dict[str, int] = dict(zip(mesh_lib.AXES, mesh_lib.mesh_sizes(own, devices), strict=True))
        shards, by = mesh_lib.batch_shards(resolved), "the sampler's data×fsdp×expert"
        mesh_lib.check_divides("data.prompts_per_batch", config.data.prompts_per_batch, by, shards)
        if config.sampling.slots is not None:
            mesh_lib.check_divides("sampling.slots", config.sampling.slots, by, shards)
        if model is not None:
            model.check_mesh(resolved)
    _check_pool(config, mesh_lib.batch_shards(resolved if own else sizes))


def _sampler_sizes(config: ConfigDict) -> dict[str, int] | None:
    """Return sizes of the sampler's own mesh, if any."""
    sizes = dict(config.sampling.mesh)
    return {axis: size or 1 for axis, size in sizes.items()} if any(sizes.values()) else None


def _check_pool(config: ConfigDict, shards: int) -> None:
    """Raise a UserError if a shard's pool cannot hold a response."""
    sampling, tokens = config.sampling, config.sampling.pool_tokens
    longest = sampling.max_response_length
    if sampling.page is not None and sampling.page > longest:
        raise UserError(
            f"sampling.page is {sampling.page}, and the longest response has {longest} tokens, "
            f"sampling.max_response_length; use {longest} or less"
        )
    if tokens is not None:
        fitting(1, longest, tokens // shards, sampling.page or default_columns(longest), shards=shards, grows=False)


def _check_batch(config: ConfigDict, shards: int) -> None:
    by = "data×fsdp×expert"
    training, group = config.training, config.sampling.group_size
    groups = training.minibatches * (shards // math.gcd(shards, group))
    parts = f"what {by} = {shards} and {training.minibatches} mini-batches need"
    mesh_lib.check_divides("data.prompts_per_batch", config.data.prompts_per_batch, parts, math.lcm(shards, groups))
    under_way = config.sampling.partial.prompts
    if under_way is not None:
        mesh_lib.check_divides("sampling.partial.prompts", under_way, by, shards, above=config.data.prompts_per_batch)
    slots, responses = config.sampling.slots, config.data.prompts_per_batch * group
    if slots is not None:
        if not 0 < slots <= responses:
            raise UserError(
                f"sampling.slots is {slots} and data.prompts_per_batch × sampling.group_size make {responses} "
                f"responses; use 1 to {responses}, or None for all of them"
            )
        mesh_lib.check_divides("sampling.slots", slots, by, shards)
    if config.coldstart.steps and not config.model.folder:
        mesh_lib.check_divides("coldstart.batch", config.coldstart.batch, by, shards)
