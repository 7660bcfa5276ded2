"""Completions of training prompts, in `samples/`, and of held-out ones, in `held_out/`."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.folder.lines import dumps, to_python, write_atomically


class Sample(TypedDict):
    """One completion."""

    prompt: str
    completion: str
    reward: float | None
    """Weighted sum of the scores; None if one with a weight is missing."""
    answer: str
    special: list[str]
    """Special tokens in the texts."""
    scores: dict[str, float | None]
    """By reward function, unweighted."""


def make_samples(
    *,
    prompts: Iterable[str],
    completions: Iterable[str],
    rewards: Iterable[Any],
    answers: Iterable[str],
    scores: Mapping[str, Any],
    special: Sequence[str],
) -> list[Sample]:
    """Return a sample per completion. `scores` has arrays; missing rewards and scores are NaN."""
    rows = zip(prompts, completions, rewards, answers, strict=True)
    return [
        {
            "prompt": prompt,
            "completion": completion,
            "reward": _number(reward),
            "answer": answer,
            "special": [token for token in special if token in prompt or token in completion],
            "scores": {name: _number(of[row]) for name, of in scores.items()},
        }
        for row, (prompt, completion, reward, answer) in enumerate(rows)
    ]


def _number(value: Any) -> float | None:
    number = to_python("reward", value)
    assert isinstance(number, (int, float))
    return number if math.isfinite(number) else None


class SamplesWriter:
    """Writes completions as `samples/step_000010.jsonl`, one JSON object each.

    Files are written atomically. Steps after `after_step` (see MetricsWriter) are removed.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], *, after_step: int | None = None, folder: str = storage.SAMPLES
    ):
        self._folder = Path(workdir) / folder
        self._folder.mkdir(parents=True, exist_ok=True)
        for step, path in _sample_files(self._folder):
            if step > (-1 if after_step is None else after_step):
                path.unlink()

    def write(self, step: int, samples: Sequence[Sample]) -> Path:
        """Replace the file of a step."""
        path = self._folder / f"step_{step:06d}.jsonl"
        write_atomically(path, "".join(dumps(sample) + "\n" for sample in samples))
        return path


def read_samples(workdir: str | os.PathLike[str], folder: str = storage.SAMPLES) -> dict[int, list[Sample]]:
    """Return the completions by step. Raises UserError for a malformed file."""
    files, samples = Path(workdir) / folder, {}
    for step, path in _sample_files(files) if files.is_dir() else ():
        foreign.is_file(path, inside=workdir)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # texts may contain other line separators
            samples[step] = [json.loads(line) for line in lines if line]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not valid JSON line by line ({error!s:.200}); delete it") from error
        if not all(_is_sample(row) for row in samples[step]):
            raise UserError(f"{path} has a line that is not a sample; delete it")
        samples[step] = [{"special": [], "scores": {}} | row for row in samples[step]]  # missing in older files
    return samples


def _is_sample(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("prompt", "completion", "answer")):
        return False
    special, scores = row.get("special", []), row.get("scores", {})
    listed = isinstance(special, list) and all(isinstance(token, str) and token for token in special)
    scored = isinstance(scores, dict) and all(isinstance(score, (int, float, type(None))) for score in scores.values())
    return listed and scored and "reward" in row and isinstance(row["reward"], (int, float, type(None)))


def _sample_files(folder: Path) -> list[tuple[int, Path]]:
    files = [(path.stem.removeprefix("step_"), path) for path in folder.glob("step_*.jsonl")]
    return sorted((int(step), path) for step, path in files if step.isdigit())
