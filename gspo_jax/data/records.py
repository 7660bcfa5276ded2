"""Records at random access: what `tasks.load` returns and the pipeline reads."""

from collections.abc import Callable, Sequence
from typing import Any, overload

Record = dict[str, str]
"""One problem: `id`, `question`, `answer`, `worked`, `instruction`, and what the task's reward needs besides."""


class CorruptRecord(RuntimeError):
    """A record that cannot be read; the message names the record and the file."""


class Records(Sequence[Record]):
    """A sequence of records read on demand from `source`, each made by `convert(index, raw)`.

    `name` is what messages and Grain call it. `where(index)` names the file of a record: reading one that is damaged
    raises CorruptRecord with it, and the records around it can still be read.
    """

    def __init__(
        self,
        name: str,
        source: Sequence[Any],
        *,
        convert: Callable[[int, Any], Record],
        where: Callable[[int], str],
        limit: int | None = None,
    ) -> None:
        self.name = name
        self._source = source
        self._convert = convert
        self._where = where
        self._length = len(source) if limit is None else min(limit, len(source))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """One record, or the list of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"record {index} of {self._length} in {self.name}")
        index %= self._length
        try:
            return self._convert(index, self._source[index])
        except (RuntimeError, ValueError, KeyError) as error:  # ArrayRecord's checksum; protobuf; UTF-8; a lost feature
            raise CorruptRecord(f"record {index} of {self._where(index)} is corrupt: {error}") from error

    def __repr__(self) -> str:
        return f"Records({self.name}, {self._length})"
