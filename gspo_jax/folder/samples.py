"""Sampled completions, in `samples/`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.folder.lines import dumps, to_python, write_atomically


class SamplesWriter:
    """Writes completions as `samples/step_000010.jsonl`, one JSON object each.

    Files are written atomically. Steps after `after_step` (see MetricsWriter) are removed.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, after_step: int | None = None):
        self._folder = Path(workdir) / storage.SAMPLES
        self._folder.mkdir(parents=True, exist_ok=True)
        for step, path in _sample_files(self._folder):
            if step > (-1 if after_step is None else after_step):
                path.unlink()

    def write(
        self,
        step: int,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        rewards: Sequence[Any],
        answers: Sequence[str],
        special: Sequence[str],
    ) -> Path:
        """Replace the file of a step. Each line lists the `special` tokens in its texts."""
        lines = [
            dumps(
                {
                    "prompt": prompt,
                    "completion": completion,
                    "reward": to_python("reward", reward),
                    "answer": answer,
                    "special": [token for token in special if token in prompt or token in completion],
                }
            )
            for prompt, completion, reward, answer in zip(prompts, completions, rewards, answers, strict=True)
        ]
        path = self._folder / f"step_{step:06d}.jsonl"
        write_atomically(path, "".join(line + "\n" for line in lines))
        return path


def read_samples(workdir: str | os.PathLike[str]) -> dict[int, list[dict[str, Any]]]:
    """Return the completions by step. Raises UserError for a malformed file."""
    folder = Path(workdir) / storage.SAMPLES
    samples = {}
    for step, path in _sample_files(folder) if folder.is_dir() else ():
        foreign.is_file(path, inside=workdir)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # texts may contain other line separators
            samples[step] = [json.loads(line) for line in lines if line]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not valid JSON line by line ({error!s:.200}); delete it") from error
        if not all(_is_sample(row) for row in samples[step]):
            raise UserError(f"{path} has a line without prompt, completion, answer and reward; delete it")
    return samples


def _is_sample(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("prompt", "completion", "answer")):
        return False
    special = row.get("special", [])  # missing in files of version 0.1
    listed = isinstance(special, list) and all(isinstance(token, str) and token for token in special)
    return listed and "reward" in row and isinstance(row["reward"], (int, float, type(None)))


def _sample_files(folder: Path) -> list[tuple[int, Path]]:
    files = [(path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.jsonl")]
    return sorted((int(step), path) for step, path in files if step.isdigit())
