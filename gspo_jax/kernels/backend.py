"""Which backend a kernel is chosen for."""

import jax


def platform() -> str:
    """The platform that what is traced now will run on: that of the mesh in scope, else of jax's default devices.

    Known while tracing, unlike by `jax.lax.platform_dependent`, which would trace every backend's implementation.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
