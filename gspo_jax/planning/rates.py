"""Rates and latencies that turn costs into seconds.

`assumed` has published peaks and assumptions. `python -m gspo_jax.bench --calibrate=FILE` measures the attached devices
(calibration.py), and `python -m gspo_jax.plan --rates=FILE` uses the result.
"""

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.planning.topology import CHIPS


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates and latencies of one chip. A collective's latency is `collective_latency`'s."""

    flops: float
    """Bfloat16 matmul flops per second."""
    bandwidth: float
    """Main-memory (HBM) bytes per second."""
    links: float
    """Bytes per second sent over all links together."""
    operation: float = 0.0
    """Minimum seconds of an operation."""
    collective: float = 0.0
    """Minimum seconds of a collective between neighbours."""
    efficiency: float = 1.0
    """Sum of operation times over a program's time."""
    dcn: float = math.inf
    """Bytes per second that a chip sends to other slices."""
    hop: float = 0.0
    """Seconds of each link after the first on a collective's longest way."""
    launch: float = 0.0
    """Seconds of a Pallas kernel beside its work."""
    grid_step: float = 0.0
    """Seconds of a grid step of a Pallas kernel beside its products, hidden by its reads."""
    cycle: float = 0.0
    """Seconds per cycle of the compiler's estimates."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each figure."""

    def collective_latency(self, hops: int) -> float:
        """Return collective + (hops − 1) · hop.

        Small exchanges pass along the longest way in a group, `hops` links, and in an all-reduce twice.
        https://jax-ml.github.io/scaling-book/sharding, "A note on ICI latency"
        """
        return self.collective + max(hops - 1, 0) * self.hop


FIGURES = tuple(field.name for field in dataclasses.fields(Rates) if field.name != "sources")
LATENCIES: tuple[str, ...] = ("operation", "collective", "hop", "launch", "grid_step", "cycle")
"""Figures that may be 0."""

_PEAK = "published peak, docs.cloud.google.com/tpu"
_OPERATION = 1.2e-6
_COLLECTIVE = 5e-6
_HOP = 1e-6
_GRID_STEP = 0.35e-6
_EFFICIENCY = 0.83
_SOURCES = {
    "flops": _PEAK,
    "bandwidth": _PEAK,
    "links": _PEAK,
    "operation": "assumed: the least that the TPU compiler (libtpu 0.0.50.1) estimates for nearly any operation, "
    "2120 cycles on v5p and v6e, 1825 on v5e, 1.2 µs on each, and 2296 on tpu7x, 1.0 µs",
    "collective": "assumed: exchanges of 1 to 16 KiB between neighbours as others measured them, 4.5 to 5.5 µs on v5p "
    "and 5.6 to 5.9 on v6e (github.com/marin-community/marin, issue 6736)",
    "hop": "assumed: about 1 µs a link (jax-ml.github.io/scaling-book/sharding); there, a small all-gather over 4 "
    "chips of v5e in a line, 3 links, took 8 µs, for which these figures give 7",
    "dcn": "assumed: 25 GB/s of a host for its chips (jax-ml.github.io/scaling-book/tpus); v6e and tpu7x, published, "
    "12.5 GB/s a chip",
    "launch": "assumed: as of any operation, and not hidden, as nothing overlaps the first read and the last write",
    "grid_step": "assumed: about 0.35 µs, a figure that authors of kernels use without a published measurement",
    "cycle": "assumed: the clock, from published peak flops and the flops of the matrix units per cycle",
    "efficiency": "summed bounds over step time in published v5p training of dense models of 32B to 128B parameters",
}


def assumed(generation: str) -> Rates:
    """Return the figures of an unmeasured generation."""
    chip = CHIPS[generation]
    latencies = {"operation": _OPERATION, "collective": _COLLECTIVE, "hop": _HOP}
    latencies |= {"launch": _OPERATION, "grid_step": _GRID_STEP, "cycle": 1 / chip.clock}
    peaks = {"flops": chip.flops, "bandwidth": chip.bandwidth, "links": chip.links, "dcn": chip.dcn}
    return Rates(**peaks, **latencies, efficiency=_EFFICIENCY, sources=_SOURCES)


def write(path: Path, rates: Rates, *, generation: str) -> None:
    """Write measured figures of a generation as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"generation": generation} | dataclasses.asdict(rates), indent=2) + "\n", "utf-8")


def read(path: Path, *, generation: str) -> Rates:
    """Return the figures in a file that `write` made.

    Raises:
      UserError: the file is unreadable, a figure invalid, or the generation different.
    """
    again = f"write it on {generation} by python -m gspo_jax.bench --calibrate={shlex.quote(str(path))}"
    try:
        foreign.is_file(path)
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        measured = {name: float(found[name]) for name in FIGURES}
        of, sources = str(found["generation"]), dict(found["sources"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"--rates={path} cannot be used ({what}); {again}") from None
    if of != generation:
        raise UserError(f"--rates={path} has the rates of {of}, not of {generation}; measure them on {generation}")
    wrong = [n for n, value in measured.items() if not 0 <= value < math.inf or (not value and n not in LATENCIES)]
    if wrong:
        raise UserError(f"--rates={path}: {wrong[0]} is {measured[wrong[0]]}, not a positive number; {again}")
    return Rates(**measured, sources=sources)
