"""The versions that a run's numbers depend on, to the last bit."""

import contextlib
import functools
import platform
from importlib import metadata

import gspo_jax

PACKAGES = (
    *("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "flax", "optax", "orbax-checkpoint"),
    *("numpy", "grain", "tokenizers", "math-verify"),
)
"""What computes, keeps its state, reads the data and judges answers."""


@functools.cache  # an install beside a run changes what is on the disk, and not what the run has loaded
def versions() -> dict[str, str]:
    """Versions of Python, this package and those of `PACKAGES` that are installed, by name."""
    found = {"python": platform.python_version(), "gspo_jax": gspo_jax.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
