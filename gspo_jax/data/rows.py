"""Rows of a user's own files as records: JSON Lines, Parquet, or a prepared TFDS directory.

A row has a prompt as `question`, `prompt` (a text, or a list of messages) or `messages`; a reference answer; and any
further fields, which reward functions receive as they are. A row that cannot be used is left out and counted under the
name of its defect. Rows are held in memory.
"""

import collections
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from gspo_jax.data import prepared
from gspo_jax.data.records import CorruptRecord, Part, Record, Records
from gspo_jax.data.written import has_narrow, number_text, widen, widen_as
from gspo_jax.types import UserError

PROMPTS = "question", "prompt", "messages"
"""Fields that may hold the prompt; a row has one of them."""
ROLES = "system", "user", "assistant"
"""Whose turn a message may be."""
SOURCE = "data_source"
"""Field of a record that names its source, if sources have names; a row's own field of that name is replaced."""
FORMATS = ".jsonl", ".parquet"
"""Suffixes of files that are read."""

_HELD_OUT_SEED = b"held out"


class Defect(Exception):
    """Raised for a row that cannot be used, with the name that it is counted under."""


@dataclass(frozen=True)
class Source:
    """A file or folder of rows, and how its prompts are made."""

    train: str
    """A .jsonl or .parquet file, a folder with train.jsonl or train.parquet, or a prepared TFDS directory."""
    test: str = ""
    """The held-out rows, likewise; "": the share `held_out` of the training rows."""
    weight: float = 1.0
    """Share of this source's prompts in training, relative to other sources."""
    system: str | None = None
    """System prompt of rows without their own; None: that of all sources."""
    instruction: str = ""
    """Text appended to the last user turn."""


class Row(NamedTuple):
    """A row as it was read: its place for messages, and its fields, or what is wrong with it."""

    where: str
    content: dict[str, Any] | Defect


def load(
    sources: Mapping[str, Source], *, split: str, answer: str = "answer", held_out: float = 0.05, limit: int | None
) -> Records:
    """Return the records of a split of all sources, one source after the other.

    Args:
      sources: name -> source; a single one may be called "".
      split: "train" or "test".
      answer: field of the reference answer, with dots into objects; "": rows need none.
      held_out: share of the training rows that are held out if a source has no test file, chosen by a digest of the
        prompt: a row stays where it is when others are added, and equal prompts are on one side.
      limit: maximum number of records of each source, from the beginning; None: all.

    Raises:
      UserError: a file is missing or of another format, or a source has no usable row.
    """
    rows: list[Record] = []
    places: list[str] = []
    parts: list[Part] = []
    wrong: collections.Counter[str] = collections.Counter()
    for name, source in sources.items():
        start, seen = len(rows), _Wrong()
        place = source.test if split == "test" and source.test else source.train
        divided = not source.test and held_out > 0
        if split == "test" and not source.test and not divided:
            raise UserError(f"{place} has no held-out rows; set data.test to a file of such, or data.held_out above 0")
        for number, row in enumerate(read(place, "train" if divided else split)):
            record = seen.keep(row, lambda content: _record(content, answer))
            if record is None or (divided and (_draw(record) < held_out) != (split == "test")):
                continue
            added = {"id": f"{Path(place).name}/{number}", "instruction": source.instruction}
            if source.system is not None:
                added["system"] = source.system
            rows.append(added | record | ({SOURCE: name} if name else {}))
            places.append(row.where)
            if len(rows) - start == limit:
                break
        seen.report(place)
        if len(rows) == start:
            raise UserError(_nothing(place, split, seen.counts, divided=divided, held_out=held_out))
        parts.append(Part(name, len(rows) - start, source.weight))
        wrong += seen.counts
    title = ", ".join(dict.fromkeys(s.test if split == "test" and s.test else s.train for s in sources.values()))
    return Records(
        title, rows, convert=lambda _, row: row, where=lambda index: places[index], parts=parts, left_out=dict(wrong)
    )


def conversations(place: str, *, limit: int | None = None) -> Records:
    """Return records with `messages` that end with the assistant's turn, for supervised training.

    A row has `messages`; or a prompt, and what is to be said as `completion`, `worked` or `answer`, whichever is first.

    Raises:
      UserError: the file is missing or of another format, or has no usable row.
    """
    seen, rows, places = _Wrong(), [], []
    for number, row in enumerate(read(place, "train")):
        record = seen.keep(row, _conversation)
        if record is None:
            continue
        rows.append({"id": f"{Path(place).name}/{number}"} | record)
        places.append(row.where)
        if len(rows) == limit:
            break
    seen.report(place)
    if not rows:
        raise UserError(_nothing(place, "train", seen.counts))
    return Records(
        place, rows, convert=lambda _, row: row, where=lambda index: places[index], left_out=dict(seen.counts)
    )


def read(place: str, split: str) -> Iterator[Row]:
    """Yield every row of a file, or of a split of a folder, in order.

    Raises:
      UserError: there is no such file, it cannot be read, or it has another format.
    """
    path = Path(place)
    if path.is_dir() and (path / prepared.INFO_FILE).is_file():
        yield from _read_tfds(place, split)
        return
    if path.is_dir():
        found = [path / f"{split}{suffix}" for suffix in FORMATS if (path / f"{split}{suffix}").is_file()]
        if len(found) != 1:
            there = ", ".join(sorted(p.name for p in path.iterdir() if p.suffix in FORMATS)) or "neither"
            wanted = " or ".join(f"{split}{suffix}" for suffix in FORMATS)
            raise UserError(f"{place} must have either {wanted}, and has {there}; name the file itself")
        path = found[0]
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a file of {' or '.join(FORMATS)}, or a folder with one")
    if path.suffix not in FORMATS:
        raise UserError(f"{path} is not a file of {' or '.join(FORMATS)}; convert it, or give it its suffix")
    try:
        yield from (_read_parquet if path.suffix == ".parquet" else _read_jsonl)(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; restore it") from error


def parse_messages(value: Any) -> list[dict[str, str]]:
    """Return a row's messages; raises Defect if they are no conversation of texts."""
    if not isinstance(value, list):
        raise Defect("messages are not a list")
    if not value:
        raise Defect("no messages")
    turns = [_message(turn) for turn in value]
    roles = [turn["role"] for turn in turns]
    if roles.count("system") > 1:
        raise Defect("several system messages")
    if "system" in roles[1:]:
        raise Defect("system message is not the first")
    if "user" not in roles:
        raise Defect("no user's turn")
    return turns


class _Wrong:
    """Counts the rows of a file that cannot be used, by defect, with the place of the first of each."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._first: dict[str, str] = {}

    def keep(self, row: Row, convert: Callable[[dict[str, Any]], Record]) -> Record | None:
        """The row's record; None if it has a defect, which is counted."""
        try:
            if isinstance(row.content, Defect):
                raise row.content
            return convert(row.content)
        except Defect as defect:
            reason = str(defect)
            self.counts[reason] += 1
            self._first.setdefault(reason, row.where)
            return None

    def report(self, place: str) -> None:
        """Log what was left out."""
        if self.counts:
            found = [f"{n} {reason} (first: {self._first[reason]})" for reason, n in self.counts.most_common()]
            logging.warning("%d rows of %s are left out: %s", self.counts.total(), place, "; ".join(found))


def _nothing(place: str, split: str, wrong: Mapping[str, int], *, divided: bool = False, held_out: float = 0) -> str:
    """The sentence about a source without a usable row."""
    if wrong:
        reason, count = max(wrong.items(), key=lambda item: item[1])
        return f"{place} has no usable row: {count} of {sum(wrong.values())} left out are {reason}; correct them"
    if divided:
        return f"data.held_out of {held_out} leaves no {split} row of {place}; change it, or set data.test to a file"
    return f"{place} has no rows; give at least one"


def _record(row: dict[str, Any], answer: str) -> Record:
    """The record of a row: its prompt as `question` or `messages`, its answer as a text, and every further field."""
    record = {key: value for key, value in row.items() if key not in PROMPTS} | _prompt(row)
    if "messages" in record and record["messages"][-1]["role"] == "assistant":
        raise Defect("messages end with the assistant's turn")
    if answer:
        record["answer"] = _answer(row, answer)
    else:
        record.setdefault("answer", "")
    if isinstance(record.get("id"), int):
        record["id"] = str(record["id"])
    for name in ("id", "worked", "instruction", "system"):
        if name in record:
            record[name] = _text(record[name], name)
    record.setdefault("worked", record["answer"])
    return record


def _conversation(row: dict[str, Any]) -> Record:
    prompt = _prompt(row)
    turns = prompt.get("messages", [{"role": "user", "content": prompt["question"]}])
    if turns[-1]["role"] != "assistant":
        said = next((name for name in ("completion", "worked", "answer") if name in row), None)
        if said is None:
            raise Defect("no assistant's turn" if "messages" in row else "no completion")
        value = row[said]
        more = value if isinstance(value, list) else [{"role": "assistant", "content": _text(value, said)}]
        turns = parse_messages([*turns, *more])
        if turns[-1]["role"] != "assistant":
            raise Defect(f"{said} does not end with the assistant's turn")
    return {"question": prompt["question"], "messages": turns, "instruction": ""}


def _prompt(row: dict[str, Any]) -> Record:
    """The prompt's fields: `question`, the last user turn, and `messages` if the row has a conversation."""
    given = [name for name in PROMPTS if name in row]
    if not given:
        raise Defect("no question, prompt or messages")
    if len(given) > 1:
        raise Defect("several of question, prompt and messages")
    (name,), value = given, row[given[0]]
    if name == "question" or not (name == "messages" or isinstance(value, list)):
        return {"question": _text(value, name)}
    turns = parse_messages(value)
    return {"question": [turn["content"] for turn in turns if turn["role"] == "user"][-1], "messages": turns}


def _message(turn: Any) -> dict[str, str]:
    """One message: its role, its content, and an assistant's reasoning if it has one."""
    if not isinstance(turn, dict):
        raise Defect("message is not an object")
    for name in ("role", "content"):
        if name not in turn:
            raise Defect(f"message without {name}")
    if not isinstance(turn["role"], str):
        raise Defect("role is not a text")
    if turn["role"] not in ROLES:
        raise Defect("role is not system, user or assistant")
    if turn.get("tool_calls"):
        raise Defect("message with tool calls")
    kept = {"role": turn["role"], "content": _text(turn["content"], "content")}
    if turn.get("reasoning_content") is not None:
        kept["reasoning_content"] = _text(turn["reasoning_content"], "reasoning_content")
    return kept


def text_field(row: Mapping[str, Any], name: str) -> str:
    """Return a field of a row that must be a text and not blank; raises Defect if it is not."""
    if name not in row:
        raise Defect(f"no {name}")
    return _text(row[name], name)


def _text(value: Any, name: str) -> str:
    if value is None:
        raise Defect(f"{name} is null")
    if not isinstance(value, str):
        raise Defect(f"{name} is not a text")
    if not value.strip():
        raise Defect(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        raise Defect(f"{name} is not Unicode text") from None
    if "\0" in value:
        raise Defect(f"{name} has a NUL character")
    return value


def _answer(row: dict[str, Any], name: str) -> str:
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            raise Defect(f"no {name}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value, name).strip()
    if not math.isfinite(value):
        raise Defect(f"{name} is not a finite number")
    return number_text(value)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Row(f"{path}, line {number}", _parse_line(line))


def _parse_line(line: bytes) -> dict[str, Any] | Defect:
    try:
        content = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except Defect as defect:
        return defect
    except UnicodeDecodeError:
        return Defect("not UTF-8")
    except RecursionError:
        return Defect("nested too deeply")
    except json.JSONDecodeError:
        return Defect("not JSON")
    except ValueError:  # Python refuses to parse numbers of thousands of digits
        return Defect("number with too many digits")
    return content if isinstance(content, dict) else Defect("not an object")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise Defect("field given twice")
    return content


def _no_constant(name: str) -> None:
    raise Defect("NaN or Infinity, which is not JSON")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # starts a thread with memory of its own, which must not come before `cli.reuse_memory`
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            narrow = {field.name: field.type for field in file.schema_arrow if has_narrow(field.type)}
            for batch in file.iter_batches():
                for content in batch.to_pylist():
                    number += 1
                    content |= {name: widen_as(content[name], kind) for name, kind in narrow.items()}
                    yield Row(f"{path}, row {number}", {k: _plain(v) for k, v in content.items() if v is not None})
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read after row {number} ({reason}); restore it") from error


def _read_tfds(folder: str, split: str) -> Iterator[Row]:
    records = prepared.records(prepared.open_prepared(folder), split, convert=lambda _, raw: _plain(raw))
    for index in range(len(records)):
        try:
            yield Row(f"{folder}, {split} record {index}", records[index])
        except CorruptRecord:
            yield Row(records.where(index), Defect("corrupt"))


def _plain(value: Any) -> Any:
    """A value of a Parquet file or a TFDS record as JSON has it; what JSON has not, such as a date, as its text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="surrogateescape")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(widen(value).tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _draw(record: Record) -> float:
    """A number from 0 to 1 that depends on the prompt alone."""
    prompt = json.dumps(record.get("messages", record["question"]), sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(prompt, digest_size=8, key=_HELD_OUT_SEED).digest()) / 2**64
