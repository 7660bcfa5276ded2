"""Rates and latencies that turn costs into seconds.

`assumed` has published peaks and assumptions. `python -m gspo_jax.bench --calibrate=FILE` measures the attached devices
(calibration.py), and `python -m gspo_jax.plan --rates=FILE` uses the result.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.planning.topology import CHIPS


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates and latencies of one chip."""

    flops: float
    """Bfloat16 matmul flops per second."""
    bandwidth: float
    """Main-memory (HBM) bytes per second."""
    links: float
    """Bytes per second sent over all links together."""
    operation: float = 0.0
    """Minimum seconds of an operation."""
    collective: float = 0.0
    """Minimum seconds of a collective."""
    efficiency: float = 1.0
    """Sum of operation times over a program's time."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each figure."""


FIGURES = tuple(field.name for field in dataclasses.fields(Rates) if field.name != "sources")

_PEAK = "published peak, docs.cloud.google.com/tpu"
_OPERATION = 1.2e-6
_COLLECTIVE = 5e-6
_EFFICIENCY = 0.83
_SOURCES = {
    "flops": _PEAK,
    "bandwidth": _PEAK,
    "links": _PEAK,
    "operation": "assumed: the least that the TPU compiler (libtpu 0.0.50.1) estimates for nearly any operation, "
    "2120 cycles on v5p and v6e, 1825 on v5e, 1.2 µs on each",
    "collective": "assumed: exchanges of 1 to 16 KiB between neighbours as others measured them, 4.5 to 5.5 µs on v5p "
    "and 5.6 to 5.9 on v6e (github.com/marin-community/marin, issue 6736); more chips may take longer",
    "efficiency": "summed bounds over step time in published v5p training of dense models of 32B to 128B parameters",
}


def assumed(generation: str) -> Rates:
    """Return the figures of an unmeasured generation."""
    chip = CHIPS[generation]
    return Rates(chip.flops, chip.bandwidth, chip.links, _OPERATION, _COLLECTIVE, _EFFICIENCY, _SOURCES)


def write(path: Path, rates: Rates, *, generation: str) -> None:
    """Write measured figures of a generation as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"generation": generation} | dataclasses.asdict(rates), indent=2) + "\n", "utf-8")


def read(path: Path, *, generation: str) -> Rates:
    """Return the figures in a file that `write` made.

    Raises:
      UserError: the file is unreadable, a figure invalid, or the generation different.
    """
    again = "write it with python -m gspo_jax.bench --calibrate"
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
    wrong = [name for name, value in measured.items() if not 0 < value < float("inf")]
    if wrong:
        raise UserError(f"--rates={path}: {wrong[0]} is {measured[wrong[0]]}, not a positive number; {again}")
    return Rates(**measured, sources=sources)
