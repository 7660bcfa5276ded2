"""Content digests of what a run reads.

They show resumed runs and existing answers whether inputs have changed. They guard against mistakes, not forgery.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gspo_jax import foreign


def canonical(value: Any) -> str:
    """Return a value as JSON text that is the same in every process.

    Values unknown to JSON count as their `repr`, or as their type if that contains an address.
    """
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except TypeError:  # mixed keys, or keys unknown to JSON
        return json.dumps(_plain(value))


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits, the same in every process."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Digest a file's bytes, or a folder's file names and bytes, "" if there is neither.

    Hidden files and folders do not count.

    Raises:
      UserError: a file is a link out of the folder.
    """
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    if not path.is_dir():
        return ""
    inside = {inner.relative_to(path): inner for inner in path.rglob("*") if inner.is_file()}
    visible = {place: inner for place, inner in inside.items() if not any(p.startswith(".") for p in place.parts)}
    return digest({str(at): file_digest(inner) for at, inner in visible.items() if foreign.is_file(inner, inside=path)})


class FieldDigests:
    """Digests of a sequence of records, one per field."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}
        self._count = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record."""
        for name, value in record.items():
            if name not in self._hashes:
                self._hashes[name] = hashlib.blake2b(digest_size=8)
            self._hashes[name].update(f"{self._count} {canonical(value)}\n".encode())  # a record may lack the field
        self._count += 1

    def by_field(self) -> dict[str, str]:
        """Return the digests so far."""
        return {name: found.hexdigest() for name, found in sorted(self._hashes.items())}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return names with different or missing digests."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(canonical, value))
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
