"""Tasks by name.

Generated tasks are built with TFDS on first use (generated.py). GSM8K is read as published or from a prepared TFDS
directory, and "jsonl" reads any file of rows (rows.py). TensorFlow is never imported.
"""

import inspect
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from gspo_jax import foreign
from gspo_jax.data import benchmarks, files, generated, prepared, rows
from gspo_jax.data.records import Record, Records
from gspo_jax.errors import UserError, choices

TASKS = *generated.BUILDERS, "gsm8k", "jsonl"

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")  # GSM8K's calculator calls, such as <<48/2=24>>


def load(
    task: str,
    *,
    split: str,
    own: Mapping[str, Callable[..., Any]] | None = None,
    folder: str | None = None,
    data_dir: str | None = None,
    limit: int | None = None,
    instruction: str | None = None,
    sources: Mapping[str, rows.Source] | None = None,
    answer: str = "answer",
    held_out: float = 0.05,
    **options: Any,
) -> Records:
    """Return the records of one split.

    Args:
      task: one of TASKS, or of `own`.
      split: "train" or "test".
      own: further tasks, name -> function(split, **options) that returns rows with texts `question` and `answer`, and
        fields for rewards.
      folder: folder of gsm8k or jsonl, as in `files.read`.
      data_dir: folder of generated tasks. None: TFDS's default.
      limit: maximum records per source.
      instruction: text appended to each question. None: the task's own.
      sources, answer, held_out: for jsonl, see `rows.load`. Without sources, the folder is the only one.
      **options: of a generated task (`generated.prepare`) or a function in `own`.

    Raises:
      UserError: the task, split or an option is unknown, a file is missing or malformed, or the split has no records.
    """
    own = own or {}
    check(task, folder, own)
    if limit is not None and limit < 1:
        field = "eval.prompts" if split == "test" else "data.limit"
        raise UserError(f"limit is {limit}; use 1 or more, or None for all records (in a config: {field}, 0 for all)")
    if instruction is None:
        instruction = own_instruction(task)
    if task == "jsonl":
        if options:
            raise UserError(f"task jsonl has no option {', '.join(options)}; leave that out")
        sources = sources or {"": rows.Source(folder or "", folder or "", instruction=instruction)}
        return rows.load(sources, split=split, answer=answer, held_out=held_out, limit=limit)
    if task in own:
        if folder is not None or data_dir is not None:
            raise UserError(
                f"task {task} is a function, which takes data.options alone; leave data.folder and data.data_dir empty"
            )
        records = _own(task, own[task], split, limit=limit, instruction=instruction, options=options)
    elif task in generated.BUILDERS:
        if folder is not None:
            raise UserError(f"task {task} is generated and reads no folder {folder}; leave it out, or set data_dir")
        records = _generated(task, split, data_dir=data_dir, limit=limit, instruction=instruction, options=options)
    else:
        if data_dir is not None or options:
            given = [*options, *(["data_dir"] if data_dir is not None else [])]
            raise UserError(f"task {task} is read from folder and takes no {', '.join(given)}; leave that out")
        assert folder is not None  # by `check`
        records = _gsm8k(split, folder=folder, limit=limit, instruction=instruction)
    if not len(records):
        remedy = "download it again, or set data.folder to a folder that has them"
        if task in own:
            remedy = "have the function return at least one row"
        raise UserError(f"{records.name}, the {split} split of {task}, has no records; {remedy}")
    return records


def own_instruction(task: str) -> str:
    """Return the text that a task appends to its questions. Worked answers teach the form of generated tasks."""
    return benchmarks.NUMBER if task == "gsm8k" else ""


def check(task: str, folder: str | None, own: Collection[str] = ()) -> None:
    """Raise UserError for an unknown task, or one without a folder that it needs."""
    if task not in (*TASKS, *own):
        raise UserError(f"unknown task {task!r}; {choices(task, [*TASKS, *own])}")
    if folder is None and task == "gsm8k":
        raise UserError(
            f"task {task} needs data.folder; set it to one with train.jsonl and test.jsonl, the hub's folder of "
            "Parquet files, or a prepared TFDS directory"
        )


def _own(
    task: str, function: Callable[..., Any], split: str, *, limit: int | None, instruction: str, options: dict[str, Any]
) -> Records:
    try:
        inspect.signature(function).bind(split, **options)
    except TypeError as error:
        raise UserError(
            f"task {task} cannot be called with split {split!r} and the options {options}: {error!s:.200}"
        ) from None
    made = [_present(row) for row in function(split, **options)]

    def convert(index: int, row: Any) -> Record:
        added = {"id": f"{task}/{split}/{index}", "worked": row["answer"], "instruction": instruction}
        return added | row

    for index, row in enumerate(made):
        needed = [row.get(name) for name in ("question", "answer")] if isinstance(row, dict) else [None]
        if not all(isinstance(text, str) for text in needed):
            raise UserError(
                f"task {task}, {split} row {index} is {str(row)[:200]!r}; return dicts with a question and an answer, "
                "both texts"
            )
        try:
            made[index] = row | _turns_of(row)
        except files.Defect as defect:
            raise UserError(
                f"task {task}, {split} row {index}: {defect}; write messages with role and content, calls before "
                "tools' replies, the last message the user's or a tool's, and the last of turns the assistant's"
            ) from None
    return Records(f"{task}/{split}", made, convert=convert, where=lambda _: task, limit=limit)


def _turns_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return `messages`, a row's prompt, and `turns`, which answer it, as a chat template takes them, where given."""
    asked = [{"role": "user", "content": row["question"]}]
    if "messages" in row and (asked := rows.parse_messages(row["messages"]))[-1]["role"] == "assistant":
        raise files.Defect("messages end with the assistant's turn")
    found = {"messages": asked} if "messages" in row else {}
    if "turns" in row:
        if not isinstance(row["turns"], list):
            raise files.Defect("turns are not a list")
        found["turns"] = rows.parse_messages([*asked, *row["turns"]])[len(asked) :]
        if not found["turns"] or found["turns"][-1]["role"] != "assistant":
            raise files.Defect("turns do not end with the assistant's")
    return found


def _present(row: Any) -> Any:
    return {name: value for name, value in row.items() if value is not None} if isinstance(row, dict) else row


def _generated(
    task: str, split: str, *, data_dir: str | None, limit: int | None, instruction: str, options: dict[str, Any]
) -> Records:
    known = [name for name in inspect.signature(generated.prepare).parameters if name not in ("task", "data_dir")]
    for name in options:
        if name not in known:
            raise UserError(f"task {task} has no option {name!r}; {choices(name, known)}")
    if data_dir is None and os.path.expanduser("~") == "~":
        raise UserError(f"{task} is built in the home folder, and this account has none (HOME); set data.data_dir")
    if data_dir is not None:
        data_dir = os.path.expanduser(data_dir)
        foreign.check_name(data_dir, "--config.data.data_dir")
    try:
        builder = generated.prepare(task, data_dir=data_dir, **options)
    except OSError as error:
        where = "TFDS's default folder" if data_dir is None else data_dir
        raise UserError(
            f"{task} cannot be built in {where}: {error!s:.200}; set data_dir to a writable folder"
        ) from error

    def convert(_: int, raw: dict[str, Any]) -> Record:
        record = _decode_texts(raw) | {"instruction": instruction}
        return record | {"turns": json.loads(record["turns"])} if "turns" in record else record

    return prepared.records(builder, split, limit=limit, convert=convert)


def _gsm8k(split: str, *, folder: str, limit: int | None, instruction: str) -> Records:
    if (Path(folder) / prepared.INFO_FILE).is_file():
        builder = prepared.open_prepared(folder)
        features: Any = builder.info.features
        missing = {"question", "answer"} - set(features)
        if missing:
            raise UserError(
                f"the data set in {folder} has no feature {' or '.join(sorted(missing))}, so it is not GSM8K; set "
                "data.folder to one that is"
            )

        def convert(index: int, raw: dict[str, Any]) -> Record:
            return _gsm8k_record(f"gsm8k/{split}/{index}", _decode_texts(raw), instruction)

        return prepared.records(builder, split, limit=limit, convert=convert)
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is no folder; set data.folder to the one with GSM8K's train and test rows")
    records = []
    for index, row in enumerate(itertools.islice(files.read(folder, split), limit)):
        try:
            texts = {name: rows.text_field(row.fields(), name) for name in ("question", "answer")}
        except files.Defect as defect:
            raise UserError(f"{row.where}: {defect}; correct or remove it") from defect
        records.append(_gsm8k_record(f"gsm8k/{split}/{index}", texts, instruction, where=row.where))
    return Records(folder, records)


def _gsm8k_record(name: str, row: dict[str, str], instruction: str, where: str | None = None) -> Record:
    """Convert a GSM8K row, with an answer that ends in `#### 1,234`."""
    worked, mark, final = row["answer"].rpartition("####")
    if not mark or not final.strip():
        raise UserError(f"{where or name}: the answer has no number after ####; correct or remove it")
    answer = final.strip().replace(",", "")
    worked = _ANNOTATION.sub("", worked).rstrip()
    return {
        "id": name,
        "question": row["question"].strip(),
        "answer": answer,
        "worked": f"{worked}\n#### {answer}",
        "instruction": instruction,
    }


def _decode_texts(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a TFDS record's texts and lists of texts, decoded."""
    found: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, bytes):
            found[key] = value.decode("utf-8")
        elif isinstance(value, list) and all(isinstance(each, bytes) for each in value):
            found[key] = [each.decode("utf-8") for each in value]
    return found
