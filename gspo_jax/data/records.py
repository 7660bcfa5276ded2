"""Random-access records, read by the pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

Record = dict[str, Any]
"""One problem: texts `id`, `question`, `answer`, `worked`, `instruction`, and fields for rewards.

In place of `worked` there may be `turns`, a list of the turns that answer the question, tools' replies included.
With `messages`, a list of turns (`chat.Message`), that conversation is the prompt and `question` its last user turn.
`system` is the record's own system prompt, `tools` its own tools in OpenAI's form.
"""
VERBATIM = "verbatim_prompt"
"""Record field: True if special tokens written in the question are encoded as such, not as text."""


class Part(NamedTuple):
    """Adjacent records with a sampling weight."""

    name: str
    count: int
    weight: float
    """Share in training batches, relative to other parts."""


class CorruptRecord(RuntimeError):
    """A record that cannot be read. The message names it and its file."""


class Records(Sequence[Record]):
    """Records read from `source` on demand, and converted by `convert(index, raw)` if given.

    `where(index)` names a record's file, by default `name`. `parts` are mixed by weight in training. `left_out` counts
    rows dropped before, by reason.
    """

    def __init__(
        self,
        name: str,
        source: Sequence[Any],
        *,
        convert: Callable[[int, Any], Record] = lambda _, record: record,
        where: Callable[[int], str] | None = None,
        limit: int | None = None,
        parts: Sequence[Part] = (),
        left_out: Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.where = where or (lambda _: name)
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
