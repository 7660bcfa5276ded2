"""Detection of a slow process: it waits least at meeting points.

Processes meet between phases and before they exchange host results. A slow host arrives late. A slow device goes
unseen, since devices wait for each other.
"""

import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

from gspo_jax.parallel import processes

_RATIO, _SECONDS = 1.5, 0.2
"""Minimum ratio and excess over the others' working time of a slow process."""


def slowest(iteration_s: float) -> str | None:
    """Return a sentence on the last iteration's slow process, if any, on all processes."""
    worked = np.float32(iteration_s - processes.waited_s())
    return describe(multihost_utils.process_allgather(worked).reshape(-1))


def describe(worked: Float[np.ndarray, " processes"]) -> str | None:
    """Return a sentence on the slowest process, if it stands out."""
    if len(worked) < 2:
        return None
    slow = int(worked.argmax())
    mine, others = float(worked[slow]), float(np.median(np.delete(worked, slow)))
    if mine < _RATIO * others or mine < others + _SECONDS:
        return None
    return (
        f"process {slow} is slow: it works {mine:.1f} s of an iteration, {mine / max(others, 1e-3):.1f} times as long "
        "as the others, which wait for it; look at its host (processor, memory, disk, other programs)"
    )
