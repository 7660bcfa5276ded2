"""The tasks by name: `load("arithmetic", split="train")` gives records, wherever they come from.

Generated tasks are built with TFDS on first use (generated.py). GSM8K is read from a folder with `train.jsonl` and
`test.jsonl`, or from a prepared TFDS directory. TensorFlow is never imported.
"""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from gspo_jax.data import generated
from gspo_jax.data.records import Record, Records
from gspo_jax.types import UserError, choices

INSTRUCTIONS = {
    "arithmetic": "",
    "countdown": "",
    "gsm8k": "Think step by step, then write the final answer as a number after ####.",
}
"""What is said below the question; nothing for the generated tasks, whose form is learned from worked answers."""

TASKS = tuple(INSTRUCTIONS)
"""The names that `load` knows."""

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")  # GSM8K's calculator calls, such as <<48/2=24>>


def load(
    task: str,
    *,
    split: str,
    folder: str | None = None,
    data_dir: str | None = None,
    limit: int | None = None,
    instruction: str | None = None,
    **options: Any,
) -> Records:
    """The records of one split, at random access.

    Args:
      task: one of TASKS.
      split: "train" or "test".
      folder: where gsm8k is: its JSONL files, or a prepared TFDS directory.
      data_dir: where generated tasks are built; None is TFDS's own place.
      limit: at most this many records, the first ones.
      instruction: what is said below each question; None is the task's own (INSTRUCTIONS).
      **options: of a generated task, see `generated.prepare`: difficulty, seed, train_size, test_size.

    Raises:
      UserError: an unknown task, split or option; a file that is missing or malformed; a data set without records.
    """
    if task not in TASKS:
        raise UserError(f"no task {task!r}; {choices(task, TASKS)}")
    if limit is not None and limit < 1:
        field = "eval.prompts" if split == "test" else "data.limit"
        raise UserError(f"limit {limit} is below 1; give 1 or more, or None for all (in a config {field}, 0 for all)")
    instruction = INSTRUCTIONS[task] if instruction is None else instruction
    if task in generated.BUILDERS:
        if folder is not None:
            raise UserError(f"task {task} is generated and reads no folder {folder}; its place is data_dir")
        records = _generated(task, split, data_dir=data_dir, limit=limit, instruction=instruction, options=options)
    else:
        if data_dir is not None or options:
            given = [*options, *(["data_dir"] if data_dir is not None else [])]
            raise UserError(f"task {task} takes no {', '.join(given)}; it is read from folder as it is")
        records = _gsm8k(split, folder=folder, limit=limit, instruction=instruction)
    if not len(records):
        raise UserError(
            f"{records.name} has no records where the {split} split of {task} needs at least one; "
            "download it again, or set data.folder to a folder that has them"
        )
    return records


def _generated(
    task: str, split: str, *, data_dir: str | None, limit: int | None, instruction: str, options: dict[str, Any]
) -> Records:
    known = [name for name in inspect.signature(generated.prepare).parameters if name not in ("task", "data_dir")]
    for name in options:
        if name not in known:
            raise UserError(f"task {task} has no option {name!r}; {choices(name, known)}")
    try:
        builder = generated.prepare(task, data_dir=data_dir, **options)
    except OSError as error:
        where = "TFDS's own folder" if data_dir is None else data_dir
        raise UserError(f"{task} cannot be built in {where}: {error}; set data_dir to a writable folder") from error
    return _from_tfds(builder, split, limit=limit, convert=lambda _, raw: _texts(raw) | {"instruction": instruction})


def _gsm8k(split: str, *, folder: str | None, limit: int | None, instruction: str) -> Records:
    if folder is None:
        raise UserError(
            "task gsm8k has no folder; set data.folder to one with train.jsonl and test.jsonl, or a prepared TFDS one"
        )
    if (Path(folder) / "dataset_info.json").is_file():
        with generated.complete(folder):
            builder = tfds.builder_from_directory(folder)
        features: Any = builder.info.features
        missing = {"question", "answer"} - set(features)
        if missing:
            raise UserError(f"{folder} has no feature {' or '.join(sorted(missing))}; it is no GSM8K")

        def convert(index: int, raw: dict[str, Any]) -> Record:
            return _gsm8k_record(f"gsm8k/{split}/{index}", _texts(raw), instruction)

        return _from_tfds(builder, split, limit=limit, convert=convert)
    path = Path(folder) / f"{split}.jsonl"
    if not path.is_file():
        there = sorted(p.name for p in Path(folder).glob("*.jsonl"))
        raise UserError(f"{path} does not exist; {folder} has {', '.join(there) if there else 'no .jsonl file'}")
    rows = [
        _gsm8k_record(f"gsm8k/{split}/{i}", row, instruction, where=where)
        for i, (where, row) in enumerate(_read_jsonl(path, ("question", "answer"), limit))
    ]
    return Records(str(path), rows, convert=lambda _, row: row, where=lambda _: str(path))


def _gsm8k_record(name: str, row: dict[str, str], instruction: str, where: str | None = None) -> Record:
    """A record of a question and a solution that ends in `#### 1,234`."""
    worked, mark, final = row["answer"].rpartition("####")
    if not mark or not final.strip():
        raise UserError(f"{where or name}: the answer has no number after ####")
    answer = final.strip().replace(",", "")
    worked = _ANNOTATION.sub("", worked).rstrip()
    return {
        "id": name,
        "question": row["question"].strip(),
        "answer": answer,
        "worked": f"{worked}\n#### {answer}",
        "instruction": instruction,
    }


def _read_jsonl(path: Path, fields: tuple[str, ...], limit: int | None) -> list[tuple[str, dict[str, str]]]:
    """The named text fields of each line, with the line's place; raises UserError at the first line that is wrong."""
    rows: list[tuple[str, dict[str, str]]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = json.loads(line.decode("utf-8"))
                row = {field: content[field] for field in fields}
                "".join(row.values()).encode("utf-8")  # "\ud800" is valid JSON, but no text; a number is no text either
            except UnicodeError as error:
                raise UserError(f"{where} is not UTF-8: {error}") from error
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{where} is no object with the texts {' and '.join(fields)}: {error!r}") from error
            rows.append((where, row))
            if len(rows) == limit:
                break
    return rows


def _from_tfds(
    builder: tfds.core.DatasetBuilder, split: str, *, limit: int | None, convert: Callable[[int, Any], Record]
) -> Records:
    """The records of one split of a prepared builder; ArrayRecord only, which is read without TensorFlow."""
    splits = builder.info.splits
    if split not in splits:
        raise UserError(f"{builder.info.full_name} has no split {split!r}; {choices(split, list(splits))}")
    try:
        source: Any = builder.as_data_source(split)  # type: ignore[call-arg]  # its decorator hides the signature
    except (NotImplementedError, FileNotFoundError, ValueError) as error:
        raise UserError(
            f"{builder.data_dir} cannot be read as ArrayRecord: {error}; build it with file_format='array_record'"
        ) from error
    paths, lengths = splits[split].filepaths, splits[split].shard_lengths

    def where(index: int) -> str:
        for path, length in zip(paths, lengths, strict=True):
            if index < length:
                return str(path)
            index -= length
        raise IndexError(index)

    return Records(f"{builder.info.full_name}/{split}", source, convert=convert, where=where, limit=limit)


def _texts(raw: dict[str, Any]) -> dict[str, str]:
    """TFDS gives text as bytes."""
    return {key: value.decode("utf-8") for key, value in raw.items() if isinstance(value, bytes)}
