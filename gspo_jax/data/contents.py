"""Digests of what a run reads, by content: of records field by field, of files and of folders.

They tell a run that goes on, or answers that are there already, whether what they depend on is still the same. They
guard against mistakes, not against forgery.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gspo_jax import foreign


def canonical(value: Any) -> str:
    """A value as JSON, the same text in every process.

    Keys are sorted. What JSON does not have counts as its `repr`; of an object whose `repr` is its address, only the
    type counts.
    """
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except TypeError:  # keys of several types, or that JSON does not have
        return json.dumps(_plain(value))


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of a value that is the same in every process."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Digest of a file's bytes, or of the names and bytes of all files in a folder; "" if there is neither.

    Hidden files and folders, such as `.git`, do not count.

    Raises:
      UserError: a file in the folder is a link out of it.
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
    """Digests of a sequence of records, a digest for each field that any of them has."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}
        self._count = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the next record in."""
        for name, value in record.items():
            if name not in self._hashes:
                self._hashes[name] = hashlib.blake2b(digest_size=8)
            self._hashes[name].update(f"{self._count} {canonical(value)}\n".encode())  # a record may lack the field
        self._count += 1

    def by_field(self) -> dict[str, str]:
        """The digests of the records so far."""
        return {name: found.hexdigest() for name, found in sorted(self._hashes.items())}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names whose digests differ, or that only one of the two has."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(canonical, value))
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
