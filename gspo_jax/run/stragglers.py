"""Which process keeps the others waiting: the one that waits least where all of them meet.

Processes meet between the phases of an iteration, and before they exchange what each has computed on its host. A
process whose host is slow (its rewards, its data, a busy or throttled machine) arrives late. A slow device is not seen,
since all devices of a program wait for each other.
"""

import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

from gspo_jax.parallel import processes

_RATIO, _SECONDS = 1.5, 0.2
"""A process is slow if it works this many times as long as the others, and this much longer, in an iteration."""


def slowest(iteration_s: float) -> str | None:
    """A sentence on the process that the others waited for in the last `iteration_s` seconds, the same on all of them.

    None if there is no such process.
    """
    worked = np.float32(iteration_s - processes.waited_s())
    return describe(multihost_utils.process_allgather(worked).reshape(-1))


def describe(worked: Float[np.ndarray, " processes"]) -> str | None:
    """A sentence on the slowest process, given the seconds each has worked; None if they are alike."""
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
