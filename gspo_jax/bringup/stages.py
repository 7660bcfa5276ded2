"""Records of the stages of `first`: what each found, and whether it has to be run again."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gspo_jax.doctor import Finding

FOLDER = "stages"
"""Records, in the folder of `--out`."""
FAILED, WARNING, OK = "failed", "warning", "ok"

Result = tuple[list[Finding], dict[str, Any]]
"""Findings of a stage, and its figures by name."""


@dataclasses.dataclass(frozen=True)
class Given:
    """The flags of `first`."""

    out: Path
    minutes: float
    model: str
    """Name of a published shape. Empty: one that fits."""
    devices: int
    """Simulated ones, where jax runs on CPU."""

    @property
    def wire(self) -> str:
        """As the worker reads it."""
        return json.dumps(dataclasses.asdict(self) | {"out": str(self.out)})

    @staticmethod
    def read(wire: str) -> "Given":
        """Return what `wire` had."""
        fields = json.loads(wire)
        return Given(**fields | {"out": Path(fields["out"])})


class Stage(NamedTuple):
    """A part of the bring-up."""

    name: str
    title: str
    share: float
    """Part of the minutes that it may take."""
    run: Callable[[Given], Result]
    """Called in all processes. The first one's figures are kept, and all that is not ok in any."""

    def limit_s(self, given: Given) -> float:
        """Return the seconds that it may take."""
        return 60 * given.minutes * self.share


@dataclasses.dataclass(frozen=True)
class Record:
    """Findings and figures of a stage that has ended."""

    stage: str
    seconds: float
    findings: list[Finding]
    figures: Mapping[str, Any]
    machine: Mapping[str, Any]
    """What the figures are of. On another one the stage is run again."""

    @property
    def state(self) -> str:
        """The worst finding's."""
        states = {finding.state for finding in self.findings}
        return next((state for state in (FAILED, WARNING) if state in states), OK)

    def write(self, out: Path) -> None:
        """Keep it in the folder of `--out`, whole or not at all."""
        file = out / FOLDER / f"{self.stage}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".tmp")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, file)


def read(out: Path, stage: str) -> Record | None:
    """Return a stage's record, if it has ended."""
    try:
        fields = json.loads((out / FOLDER / f"{stage}.json").read_text("utf-8"))
        return Record(**fields | {"findings": [Finding(**one) for one in fields["findings"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def failed(out: Path, asked: Iterable[Stage]) -> list[str]:
    """Return the stages of `asked` that failed or have no record."""
    found = {stage.name: read(out, stage.name) for stage in asked}
    return [name for name, record in found.items() if record is None or record.state == FAILED]


def forget(out: Path, stage: str) -> None:
    """Remove a stage's record."""
    (out / FOLDER / f"{stage}.json").unlink(missing_ok=True)
