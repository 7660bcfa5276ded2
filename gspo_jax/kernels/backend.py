"""Detection of the backend that the current trace targets, what it requires, and types under manual mesh axes."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from gspo_jax.errors import UserError

MIN_CAPABILITY = 8.0
"""Compute capability of the oldest GPUs, Ampere, with bfloat16 arithmetic and cuDNN's attention."""


def platform() -> str:
    """Return the platform that the traced code will run on: that of the mesh in scope, else jax's default backend.

    It is known at trace time, so only one implementation is traced; `jax.lax.platform_dependent` would trace them all.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def capability(text: str) -> float | None:
    """Return a compute capability, such as "8.6", as a number; None if the text has none, such as "[N/A]"."""
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else None


def check_dtype(dtype: str, device: Any) -> None:
    """Check that a device computes in `dtype`, a value of `model.dtype`.

    Raises:
      UserError: the dtype is bfloat16 and the device a GPU older than Ampere: cuDNN has no attention for it.
    """
    if dtype != "bfloat16" or device.platform != "gpu":
        return
    number = capability(device.compute_capability)
    if number is not None and number < MIN_CAPABILITY:
        raise UserError(
            f"{device.device_kind} has compute capability {number}, and model.dtype 'bfloat16' needs {MIN_CAPABILITY} "
            "or later; use --config.model.dtype=float32"
        )


def compiler_options() -> dict[str, str] | None:
    """Return the non-default `jax.jit(compiler_options=…)` for the current platform; None for the defaults.

    On TPU, a reduce-scatter over a whole slice stays a reduce-scatter; by default it becomes an all-reduce, with twice
    the bytes. Chips with sparse cores (v5p, v6e) run all-gathers and reduce-scatters on them while the other cores
    compute. Matmuls therefore need not be decomposed to overlap with the arrival of their operands (windowed einsum),
    which would cost memory traffic.
    """
    if platform() != "tpu":
        return None
    kinds = ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
    offload = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in kinds}
    return offload | {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(2**20)}


def varying_like(x: Array, *others: Array) -> Array:
    """Mark x as varying over the manual mesh axes that the others vary over, as required of a loop carry."""
    axes = (
        frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in others))
        - jax.typeof(x).manual_axis_type.varying
    )
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def unchecked(kernel: Callable[..., Any], *args: Array) -> Any:
    """Run a kernel whose output types do not declare the manual mesh axes they vary over, and add the declaration.

    `jax.shard_map` checks these types and would reject the kernel otherwise.
    """
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in args))
    if not axes:
        return kernel(*args)
    whole = PartitionSpec()
    out = jax.shard_map(kernel, in_specs=(whole,) * len(args), out_specs=whole, check_vma=False)(*args)
    return jax.lax.pcast(out, tuple(axes), to="varying")
