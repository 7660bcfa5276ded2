"""The file of a benchmark's answers, written call by call."""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo_jax.data import contents
from gspo_jax.folder import storage
from gspo_jax.parallel import hosts, processes


class Call(NamedTuple):
    """Problems and samples of one sampling call."""

    problems: range
    """Numbers among the problems in use."""
    samples: range


class Answers:
    """The answer file of one protocol. Only whole calls are kept."""

    def __init__(self, folder: Path, name: str, protocol: dict[str, Any], calls: Sequence[Call]) -> None:
        self.file = folder / f"{name}-{contents.digest(protocol)[:8]}.jsonl"
        done = ""
        if processes.is_first():
            folder.mkdir(parents=True, exist_ok=True)
            rows = self._read() if self.file.exists() else {}
            wanted = [list(itertools.product(*call)) for call in calls]
            whole = list(itertools.takewhile(lambda call: all(answer in rows for answer in call), wanted))
            self._write("w", [rows[answer] for call in whole for answer in call])
            if whole:
                print(f"{self.file} has the answers of {len(whole)} of {len(calls)} batches")
            done = str(len(whole))
        self.done = int(hosts.first_nonempty(done))
        """Number of whole calls, from the first on."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows, synced to disk."""
        if processes.is_first():
            self._write("a", rows)

    def rows(self) -> list[dict[str, Any]]:
        found = self._read()
        return [found[answer] for answer in sorted(found)]

    def _read(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return rows by problem and sample. Of duplicates, which two commands may write, the first counts."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        with open(self.file, "rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                    found.setdefault((row["problem"], row["sample"]), row)
                except (ValueError, KeyError, TypeError, RecursionError):  # cut or damaged: its call is sampled again
                    break
        return found

    def _write(self, mode: str, rows: Sequence[dict[str, Any]]) -> None:
        with open(self.file, mode, encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        storage.sync(self.file.parent)
