"""Random-access records, the type that `tasks.load` returns and the pipeline reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

Record = dict[str, Any]
"""One problem: the texts `id`, `question`, `answer`, `worked`, `instruction`, and fields that only rewards read.

With `messages`, a list of {role, content}, the prompt is that conversation, and `question` its last user turn; `system`
is a system prompt of its own.
"""
VERBATIM = "verbatim_prompt"
"""Field of a record that is true if special tokens written in its question count as such, and are no mere text."""


class Part(NamedTuple):
    """Adjacent records that are drawn together, and how often."""

    name: str
    count: int
    weight: float
    """Share of this part in training batches, relative to other parts."""


class CorruptRecord(RuntimeError):
    """Raised for a record that cannot be read; the message names the record and its file."""


class Records(Sequence[Record]):
    """A sequence of records, read from `source` on demand and converted by `convert(index, raw)`.

    `name` is its name in messages and for Grain. `where(index)` names the file of a record: reading a damaged record
    raises CorruptRecord with that name, and the other records can still be read. `parts` are mixed by weight in
    training; without them, all records are one. `left_out` counts rows that were left out before, by reason.
    """

    def __init__(
        self,
        name: str,
        source: Sequence[Any],
        *,
        convert: Callable[[int, Any], Record],
        where: Callable[[int], str],
        limit: int | None = None,
        parts: Sequence[Part] = (),
        left_out: Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.where = where
        self._source = source
        self._convert = convert
        self._length = len(source) if limit is None else min(limit, len(source))
        self.parts = list(parts) or [Part(name, self._length, 1.0)]
        self.left_out = dict(left_out or {})

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Return one record, or for a slice a list of records."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"record {index} is out of range of the {self._length} records in {self.name}")
        index %= self._length
        try:
            return self._convert(index, self._source[index])
        except (RuntimeError, ValueError, KeyError) as error:  # ArrayRecord checksum, protobuf, UTF-8, missing feature
            raise CorruptRecord(f"record {index} of {self.where(index)} is corrupt: {error!s:.200}") from error

    def __repr__(self) -> str:
        return f"Records({self.name}, {self._length})"
