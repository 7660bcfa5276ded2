"""The backend of the current trace, and types under manual mesh axes."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from gspo_jax.errors import UserError

MIN_CAPABILITY = 8.0
"""Ampere's, the first with bfloat16 and cuDNN attention."""


def platform() -> str:
    """Return the platform of the mesh in scope, else jax's default.

    It is known at trace time: only one implementation is traced, while `jax.lax.platform_dependent` traces all.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def capability(text: str) -> float | None:
    """Return a compute capability like "8.6" as a number; None for text like "[N/A]"."""
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else None


def check_dtype(dtype: str, device: Any) -> None:
    """Raise a UserError for bfloat16 (`model.dtype`) on a GPU older than Ampere, which lacks cuDNN attention."""
    if dtype != "bfloat16" or device.platform != "gpu":
        return
    number = capability(device.compute_capability)
    if number is not None and number < MIN_CAPABILITY:
        raise UserError(
            f"{device.device_kind} has compute capability {number}, and model.dtype 'bfloat16' needs {MIN_CAPABILITY} "
            "or later; use --config.model.dtype=float32"
        )


def compiler_options() -> dict[str, str] | None:
    """Return the non-default `jax.jit(compiler_options=…)` for the current platform, if any.

    On TPU, a reduce-scatter over a whole slice would by default become an all-reduce with twice the bytes. Sparse cores
    (v5p, v6e) run collectives while the others compute, so matmuls need no windowed einsum, which costs memory traffic.
    """
    if platform() != "tpu":
        return None
    kinds = ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
    offload = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in kinds}
    return offload | {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(2**20)}


def varying_like(x: Array, *others: Array) -> Array:
    """Mark x as varying over the others' manual mesh axes, as a loop carry must be."""
    axes = (
        frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in others))
        - jax.typeof(x).manual_axis_type.varying
    )
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def unchecked(kernel: Callable[..., Any], *args: Array) -> Any:
    """Run a kernel and declare the manual mesh axes that its outputs vary over, as `jax.shard_map` demands."""
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in args))
    if not axes:
        return kernel(*args)
    whole = PartitionSpec()
    out = jax.shard_map(kernel, in_specs=(whole,) * len(args), out_specs=whole, check_vma=False)(*args)
    return jax.lax.pcast(out, tuple(axes), to="varying")
