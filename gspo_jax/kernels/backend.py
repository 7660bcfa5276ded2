"""Which backend a kernel is chosen for."""

import jax


def platform() -> str:
    """The platform that what is traced now will run on: that of the mesh in scope, else of jax's default devices.

    Known while tracing, unlike by `jax.lax.platform_dependent`, which would trace every backend's implementation.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compiler_options() -> dict[str, str] | None:
    """What the compiler is asked for beyond its defaults, by `jax.jit(compiler_options=…)`, for that platform.

    On TPU a reduce-scatter over a whole slice stays one: by default it becomes an all-reduce, twice the bytes. And the
    sparse cores, where a chip has them (v5p, v6e), do gathers and reduce-scatters while the others compute. So no
    product has to be taken apart to be computed as its matrices arrive, which costs memory traffic.
    """
    if platform() != "tpu":
        return None
    kinds = ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter")
    offload = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true" for kind in kinds}
    return offload | {"xla_jf_spmd_threshold_for_windowed_einsum_mib": str(2**20)}
