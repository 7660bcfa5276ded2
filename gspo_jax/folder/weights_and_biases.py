"""Copy of a run's metrics at Weights & Biases, if `log.wandb` names a project.

Metrics that cannot be sent are lost only there. With WANDB_MODE=offline the copy is in `wandb/` of the current folder
(WANDB_DIR), for `wandb sync`. It contains links, which run folders must not.
"""

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_jax import installs
from gspo_jax.errors import UserError

ID_FILE = "wandb-id"
"""Run id at Weights & Biases, reused on resuming."""


def check(project: str) -> None:
    """Raise a UserError if a project is named but the package is missing."""
    if project and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb is {project!r}, but the package wandb is not installed; run {installs.of_extra('wandb')}, or "
            "set log.wandb to ''"
        )


class WeightsAndBiases:
    """An open run at Weights & Biases."""

    name = "Weights & Biases"

    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, now: float, metrics: Mapping[str, float]) -> None:
        """Send a step's numbers. Repeated steps are ignored there."""
        del now  # wandb adds its own time
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def connect(workdir: Path, project: str, config: Mapping[str, Any], *, resumed: bool) -> WeightsAndBiases:
    """Begin a run named like its folder, or resume it.

    Raises:
      UserError: package, account or connection is missing.
    """
    check(project)
    import wandb  # pyright: ignore[reportMissingImports]  # takes a second, and is optional

    file = workdir / ID_FILE
    if not (resumed and file.exists()):
        file.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
    try:
        run = wandb.init(
            project=project,
            name=workdir.name,
            id=file.read_text(encoding="utf-8"),
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off", quiet=True),  # the progress bar has the terminal
        )
    except Exception as error:  # each failure has its own type
        says = " ".join(str(error).split())
        raise UserError(
            f"log.wandb is {project!r}, but Weights & Biases cannot be used ({says}); run wandb login, set "
            "WANDB_MODE=offline, or set log.wandb to ''"
        ) from error
    return WeightsAndBiases(run)
