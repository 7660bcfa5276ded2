"""Versions that a run's numbers depend on."""

import contextlib
import functools
import platform
from importlib import metadata

import gspo_jax

PACKAGES = (
    *("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "flax", "optax", "orbax-checkpoint"),
    *("numpy", "grain", "tokenizers", "math-verify"),
)


@functools.cache  # an install during a run changes only the disk
def versions() -> dict[str, str]:
    """Return installed versions of Python, this package and `PACKAGES`."""
    found = {"python": platform.python_version(), "gspo_jax": gspo_jax.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
