"""Rows of files: JSON Lines, JSON, CSV, Parquet, prepared TFDS directories, or folders of such files.

Unreadable rows are Defects, unreadable files UserErrors. `null` and empty CSV cells are absent, and byte order marks
are dropped wherever a text begins.
"""

import codecs
import collections
import csv
import decimal
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from absl import logging

from gspo_jax import foreign, limited
from gspo_jax.data import prepared
from gspo_jax.data.records import CorruptRecord
from gspo_jax.data.written import widen, widen_as, widened
from gspo_jax.errors import UserError

FORMATS = ".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz"

NAMES = "JSON Lines, JSON, CSV or Parquet (.jsonl, .json, .csv, .parquet)"
"""For messages."""
_DEPTH = 3
"""Levels of subfolders searched."""
_SPLITS = {
    "train": {"train", "training"},
    "test": {"test", "testing", "eval", "evaluation"},
    "validation": {"validation", "valid", "val", "dev"},
}
"""Words in names that tell the split."""
_SHARD = re.compile(r"(?:(?<=[^0-9])|\A)[-_.]?(\d+)(?:-of-(\d+)(?:-[0-9a-f]+)?)?\Z")
"""A part's number and the number of parts: `-00000-of-00002`."""
_SIDECARS = {
    f"{name}.json" for name in ("dataset_dict", "dataset_info", "dataset_infos", "state", "metadata", "config")
}
"""Metadata, not rows."""
_MARK = "\ufeff"
"""Byte order mark."""


class Defect(Exception):
    """A row that cannot be used, with the name it is counted under."""

    def __init__(self, name: str, remedy: str = "correct them") -> None:
        super().__init__(name)
        self.remedy = remedy
        """Remedy, as the end of a sentence."""


class Row(NamedTuple):
    """A row as read, with its place for messages."""

    where: str
    content: dict[str, Any] | Defect

    def fields(self) -> dict[str, Any]:
        """Return the content, or raise its Defect."""
        if isinstance(self.content, Defect):
            raise self.content
        return self.content


def read(place: str, split: str, *, alone: bool = False) -> Iterator[Row]:
    """Yield every row of a file, of all its parts, or of a folder's split, in order.

    Args:
      place: a file, a folder, or a file's name without part number and suffix: `data/train` for
        `data/train-00000-of-00002.parquet` and the others.
      split: "train" or "test", of a folder.
      alone: True if a folder has no other split's rows, so file names need not tell it.

    Raises:
      UserError: the file is missing, unreadable or of another format, or leads out of its folder.
    """
    path = Path(place)
    if path.is_dir() and (path / prepared.INFO_FILE).is_file() and not _has_arrow(path):
        yield from _read_tfds(place, split)
        return
    inside = None
    if path.is_dir():
        found, inside = find(path, split, alone=alone), path
    elif path.exists():
        found = [path]
        if (count := _part(path)[1]) and int(count) > 1:
            logging.warning("%s is one of %d files; %s stands for all of them", path, int(count), _whole(path))
    else:
        found, inside = _complete(path, parts(path)) or [path], path.parent
    for file in found:
        yield from _read_file(file, inside=inside)


def parts(path: Path) -> list[Path]:
    """Return the parts of a file, named without number and suffix."""
    return sorted(file for file in path.parent.glob("*-of-*") if file.name.endswith(FORMATS) and _whole(file) == path)


def _read_file(path: Path, *, inside: Path | None) -> Iterator[Row]:
    if not foreign.is_file(path, inside=inside):
        raise UserError(f"{path} does not exist; give a file of {NAMES}, or a folder with one")
    if not path.name.endswith(FORMATS):
        raise UserError(f"{path} is not a file of {NAMES}; convert it, or give it its suffix")
    try:
        yield from {".csv": _read_csv, ".parquet": _read_parquet}.get(_suffix(path), _read_json)(path)
    except (OSError, EOFError, zlib.error) as error:
        says = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {says}; restore it") from error


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(_suffix(path))


def _part(path: Path) -> tuple[str, str]:
    """Return a part's number and the number of parts, "" if unknown."""
    found = _SHARD.search(_stem(path))
    return (found[1], found[2] or "") if found else ("", "")


def _whole(path: Path) -> Path:
    """Return a part's name without its number, or the file itself."""
    return path.with_name(_SHARD.sub("", _stem(path))) if _part(path)[1] else path


def find(folder: Path, split: str, *, alone: bool = False) -> list[Path]:
    """Return the files with a split's rows, in numeric order.

    Names follow data sets on hubs: `train.jsonl`, `data/train-00000-of-00002.parquet`, `default/train/0000.parquet`.
    Validation files serve as "test" if there are no others. If no name tells a split, a single file, whole or in parts,
    has rows for training, or for any split if `alone`. Of several data sets, the topmost without further words in its
    name counts: `train.jsonl`, not `train_socratic.jsonl`.

    Raises:
      UserError: there are none, some are missing, or the folder has several data sets.
    """
    files = sorted(_files(folder), key=lambda file: (_numbered(file), file))
    named = collections.defaultdict(dict)  # split -> (folder, name without the split) -> files
    for file in files:
        of, key = _named(file.relative_to(folder))
        named[of].setdefault(key, []).append(file)
    found = named[split] or (named["validation"] if split == "test" else {})
    if (alone or split == "train") and not (any(named[of] for of in _SPLITS) or _has_arrow(folder)):
        found = named[""]
    if not found:
        raise UserError(_none_found(folder, split, files, alone=alone))
    plain = (os.path.commonpath([key[0] for key in found]), "")
    if len(found) > 1 and plain not in found:
        raise UserError(_several(folder, split, list(found.values())))
    return _complete(folder, found.get(plain) or next(iter(found.values())))


def _complete(place: Path, files: list[Path]) -> list[Path]:
    seen: dict[tuple[str, str], Path] = {}
    for file in files:
        number, count = _part(file)
        if int(count or len(files)) > len(files):
            raise UserError(f"{place} has {len(files)} of {int(count)} files, such as {file}; download the others")
        other = seen.setdefault((_SHARD.sub("", _stem(file)), number), file)
        if other is not file:
            raise UserError(f"{place} has rows twice, in {other} and {file}; remove one of them")
    return files


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, followlinks=True):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = [name for name in folders if depth < _DEPTH and not name.startswith(".")]
        rows = (name for name in names if name.endswith(FORMATS) and name not in _SIDECARS)
        yield from (Path(place, name) for name in rows if not name.startswith("."))


def _named(file: Path) -> tuple[str, tuple[str, str]]:
    """Return the split told by a file's path, "" for none, and the rest of the path."""
    parts = [*file.parts[:-1], _SHARD.sub("", _stem(file))]
    for at in range(len(parts) - 1, -1, -1):
        words = re.split(r"[-._ ]+", parts[at])
        of = [split for split, names in _SPLITS.items() if names & {word.lower() for word in words}]
        if len(of) == 1:
            rest = "-".join(word for word in words if word.lower() not in _SPLITS[of[0]])
            folders = [*parts[:at], *parts[at + 1 : -1]]
            return of[0], ("/".join(name for name in folders if name != "data"), rest)
    return "", ("/".join(parts[:-1]), parts[-1])


def _numbered(file: Path) -> list[tuple[int, str]]:
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", file.as_posix())]


def _has_arrow(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in ("*.arrow", "*/*.arrow"))


def _none_found(folder: Path, split: str, files: list[Path], *, alone: bool) -> str:
    there = ", ".join(sorted(file.relative_to(folder).as_posix() for file in files[:5])) or "no file of rows"
    if _has_arrow(folder):
        return f"{folder} has Arrow files, which are not read; write each split with to_parquet, as {split}.parquet"
    name = "give a file itself" if alone else "name files with data.train and data.test"
    return (
        f"{folder} has no {split} rows: they are looked for in {split}.jsonl, {split}-00000-of-00001.parquet or the "
        f"like, in {NAMES}, and there is {there}; put them there, or {name}"
    )


def _several(folder: Path, split: str, sets: list[list[Path]]) -> str:
    give = _whole(sets[0][0])
    for above in sets[0][0].relative_to(folder).parents[-2::-1]:  # from the top, the first folder with this set alone
        if not any(file.is_relative_to(folder / above) for files in sets[1:] for file in files):
            give = folder / above
            break
    names = " and ".join(files[0].relative_to(folder).as_posix() for files in sets[:2])
    return f"{folder} has {len(sets)} data sets with {split} rows, in {names}; give one of them, such as {give}"


def _open(path: Path) -> BinaryIO:
    """Open a file after its byte order marks, refusing UTF-16."""
    file: Any = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115  the caller closes it
    begun, start = 0, file.read(len(codecs.BOM_UTF8))
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        file.close()
        raise UserError(f"{path} is UTF-16 text; save it as UTF-8")
    while start == codecs.BOM_UTF8:
        begun, start = file.tell(), file.read(len(codecs.BOM_UTF8))
    file.seek(begun)
    return file


def _read_json(path: Path) -> Iterator[Row]:
    """Read JSON Lines, an array, or in .json an object with rows in `data`."""
    with _open(path) as file:
        begun = file.tell()
        start = file.read(1 << 12).lstrip()
        file.seek(begun)
        is_array = re.match(rb"\[\s*[{\]]", start) is not None  # a line is an object
        if is_array or (_suffix(path) == ".json" and start.startswith(b"{")):
            rows = _document(path, file.read(), is_array=is_array)
            if rows is not None:
                yield from (_row(f"{path}, item {number}", row) for number, row in enumerate(rows, start=1))
                return
            file.seek(begun)
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(codecs.BOM_UTF8)  # left by joining files
            if line.strip():
                yield _line(f"{path}, line {number}", line)


def _document(path: Path, content: bytes, *, is_array: bool) -> list[Any] | None:
    try:
        value = _parse(content)
    except (ValueError, RecursionError) as error:
        if not is_array or str(error).startswith("Extra data"):
            return None
        reason = limited.quoted(error)
        raise UserError(f"{path} begins as a JSON array and is none ({reason}); restore it") from error
    if isinstance(value, list):
        return value
    inside = value.get("data") if isinstance(value, dict) else None
    return inside if isinstance(inside, list) else [value]


def _line(where: str, line: bytes) -> Row:
    try:
        return _row(where, _parse(line))
    except UnicodeDecodeError:
        return Row(where, Defect("not UTF-8"))
    except RecursionError:
        return Row(where, Defect("nested too deeply"))
    except json.JSONDecodeError:
        return Row(where, Defect("not JSON"))
    except ValueError:  # Python refuses numbers of thousands of digits
        return Row(where, Defect("number with too many digits"))


def _parse(content: bytes) -> Any:
    return json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Defect:
    content = dict(pairs)
    return content if len(content) == len(pairs) else Defect("field given twice")


def _no_constant(name: str) -> Defect:
    return Defect("NaN or Infinity, which is not JSON")


def _row(where: str, value: Any) -> Row:
    try:
        content = plain(value)
    except Defect as defect:
        return Row(where, defect)
    except RecursionError:
        return Row(where, Defect("nested too deeply"))
    return Row(where, content if isinstance(content, dict) else Defect("not an object"))


def _read_csv(path: Path) -> Iterator[Row]:
    """Read a table with a header. Empty cells are absent."""
    csv.field_size_limit(sys.maxsize)  # the module's own limit is 128 KiB
    with io.TextIOWrapper(_open(path), "utf-8", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            names = [name.lstrip(_MARK).strip() for name in next(lines, [])]
        except csv.Error as error:
            raise UserError(f"{path}: the header is not CSV ({error!s:.200}); correct its quotes") from error
        if any(re.search("[\udc80-\udcff]", name) for name in names):
            raise UserError(f"{path} has names of columns that are not UTF-8; save it as UTF-8")
        if len(names) == 1 and (wrong := re.search(r"[;\t|]", names[0])):
            raise UserError(f"{path} separates its columns by {wrong[0]!r}; save it with commas")
        twice = [name for name, count in collections.Counter(names).items() if name and count > 1]
        if twice:
            raise UserError(f"{path} has two columns {twice[0]!r}; rename one")
        while True:
            begun = lines.line_num + 1
            try:
                cells = next(lines, None)
            except csv.Error as error:
                if lines.line_num > begun and "unexpected end" in str(error):
                    raise UserError(f"{path}: a quote of the row at line {begun} is not closed; close it") from error
                for number in range(begun, lines.line_num + 1):  # an unclosed quote takes lines with it
                    yield Row(f"{path}, line {number}", Defect("not CSV"))
                continue
            if cells is None:
                return
            if cells:
                yield Row(f"{path}, line {begun}", _cells(names, cells))


def _cells(names: list[str], cells: list[str]) -> dict[str, Any] | Defect:
    if len(cells) != len(names):
        return Defect("more or fewer cells than columns")
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return Defect("not UTF-8")
    texts = [cell.lstrip(_MARK) for cell in cells]
    return {name: text for name, text in zip(names, texts, strict=True) if name and text}


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # starts a thread with its own memory, so only after `cli.reuse_memory`
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
                raise UserError(f"{path} has two columns {twice[0]!r}; rename one")
            schema = file.schema_arrow
            narrow = {field.name: field.type for field in schema if _mapped(field.type, widened) != field.type}
            for batch in file.iter_batches():
                for content in _without_times(batch).to_pylist():
                    number += 1
                    content |= {name: widen_as(content[name], kind) for name, kind in narrow.items()}
                    yield _row(f"{path}, row {number}", content)
    except UserError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        reason = limited.quoted(error)
        raise UserError(
            f"{path} cannot be read after row {number} ({reason}); restore it, or leave out the column"
        ) from error


def _mapped(kind: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to all leaves of a pyarrow type."""
    import pyarrow as pa
    import pyarrow.types as is_

    if is_.is_struct(kind):
        return pa.struct([field.with_type(_mapped(field.type, change)) for field in kind])
    if is_.is_map(kind):
        return pa.map_(_mapped(kind.key_type, change), _mapped(kind.item_type, change))
    if is_.is_list(kind) or is_.is_large_list(kind):
        return (pa.list_ if is_.is_list(kind) else pa.large_list)(_mapped(kind.value_type, change))
    if is_.is_fixed_size_list(kind):
        return pa.list_(_mapped(kind.value_type, change), kind.list_size)
    return change(kind)


def _without_times(batch: Any) -> Any:
    """Return dates and times as texts: Python's lack their range and resolution."""
    import pyarrow as pa
    import pyarrow.types as is_

    def no_zone(kind: Any) -> Any:  # a zone would need the machine's zone table
        return pa.timestamp(kind.unit) if is_.is_timestamp(kind) else kind

    def text(kind: Any) -> Any:
        return pa.string() if is_.is_temporal(kind) else kind

    columns = []
    for column in batch.columns:
        for change in (no_zone, text):
            kind = _mapped(column.type, change)
            column = column if kind == column.type else column.cast(kind)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _read_tfds(folder: str, split: str) -> Iterator[Row]:
    records = prepared.records(prepared.open_prepared(folder), split, convert=lambda _, raw: plain(raw))
    for index in range(len(records)):
        try:
            yield Row(f"{folder}, {split} record {index}", records[index])
        except CorruptRecord:
            yield Row(records.where(index), Defect("corrupt"))


def plain(value: Any) -> Any:
    """Convert a value of any format to JSON values, without null fields and leading byte order marks.

    Others, such as dates, become texts. Lists keep their nulls, as items have places.

    Raises:
      Defect: the value is one, or has one inside.
    """
    if isinstance(value, Defect):
        raise value
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="surrogateescape")
    if isinstance(value, str):
        return value.lstrip(_MARK)
    if isinstance(value, np.ndarray | np.generic):
        return plain(widen(value).tolist())
    if isinstance(value, Mapping):
        content = {str(key).lstrip(_MARK): plain(inner) for key, inner in value.items()}
        if len(content) < len(value):
            raise Defect("field given twice")
        return {key: inner for key, inner in content.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return value if value is None or isinstance(value, int | float) else str(value)
