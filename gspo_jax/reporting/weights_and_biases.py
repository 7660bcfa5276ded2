"""A copy of a run's metrics at Weights & Biases, if `log.wandb` names a project there; the package is optional.

metrics.jsonl stays the record: what cannot be sent is lost there alone. With WANDB_MODE=offline the copy is kept in
`wandb/` of the current folder (WANDB_DIR), to be sent later by `wandb sync`. It has links, so it is not in the run
folder, which none may lead out of.
"""

import importlib.util
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from absl import logging

from gspo_jax.errors import UserError

ID_FILE = "wandb-id"
"""File with the id under which Weights & Biases knows the run, so that a resumed run goes on there."""


def check(project: str) -> None:
    """Raise a UserError if a project is named and the package is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb is {project!r}, but the package wandb is not installed; pip install 'gspo_jax[wandb]', or set "
            "log.wandb to ''"
        )


class WeightsAndBiases:
    """An open run at Weights & Biases; once it fails, it is off."""

    def __init__(self, run: Any):
        """`run` is what `wandb.init` returns."""
        self._run = run

    def write(self, step: int, now: float, metrics: Mapping[str, float]) -> None:
        """Send the numbers of a step; those of an earlier step, after a resume, are ignored there."""
        del now  # it takes its own time
        if self._run is None:
            return
        try:
            self._run.log(dict(metrics), step=step)
        except Exception as error:  # whatever it raises, training continues
            logging.warning("Weights & Biases is off from here on (%s); metrics.jsonl stays complete", error)
            self._run = None

    def close(self) -> None:
        """Send what is left."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            logging.warning("Weights & Biases may lack the run's end (%s); metrics.jsonl is complete", error)
        self._run = None


@contextmanager
def connect(workdir: Path, project: str, config: Mapping[str, Any], *, resumed: bool) -> Iterator[WeightsAndBiases]:
    """Begin a run named like its folder in a project, or go on with it.

    Raises:
      UserError: the package is missing, or it has no account or no connection.
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
    except Exception as error:  # of account, connection or version, each of its own type
        says = " ".join(str(error).split())
        raise UserError(
            f"log.wandb is {project!r}, but Weights & Biases cannot be used ({says}); run wandb login, set "
            "WANDB_MODE=offline, or set log.wandb to ''"
        ) from error
    sink = WeightsAndBiases(run)
    try:
        yield sink
    finally:
        sink.close()
