"""Records from rows of a user's own files (files.py).

A row has a prompt, a reference answer, and further fields that reward functions get unchanged. Unusable rows are left
out and counted by defect. Rows are held in memory.
"""

import collections
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from absl import logging

from gspo_jax import tool_calls
from gspo_jax.data.files import Defect, Row, read
from gspo_jax.data.records import VERBATIM, Part, Record, Records
from gspo_jax.data.written import number_text
from gspo_jax.errors import UserError

PROMPTS = "question", "prompt", "messages"
"""Prompt fields. A row has one of them unless `Source.prompt` names its field."""
ROLES = "system", "user", "assistant", "tool"
_OWN = "id", "worked", "instruction", "system"
_TOOLS = "tools"
"""Optional field with a list of tools, or its JSON text."""
"""Optional fields, unless `data.prompt` or `data.answer` names them."""
SOURCE = "data_source"
"""Record field with the source's name, if it has one. Replaces a row's own."""

_HELD_OUT_SEED = b"held out"
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content)['"]\s*:""")
"""Messages written as text, as in CSV cells."""


@dataclass(frozen=True)
class Source:
    """A file or folder of rows, with prompt options."""

    train: str
    """File or folder, as in `files.read`."""
    test: str = ""
    """Held-out rows. "": the share `held_out` of `train`."""
    prompt: str = ""
    """Prompt field, with dots into objects. "": the one of PROMPTS present."""
    weight: float = 1.0
    """Share of training prompts, relative to other sources."""
    system: str | None = None
    """System prompt for rows without their own. None: the shared one."""
    instruction: str = ""
    """Text appended to the last user turn."""


def load(
    sources: Mapping[str, Source], *, split: str, answer: str = "answer", held_out: float = 0.05, limit: int | None
) -> Records:
    """Return the records of a split, source after source.

    Args:
      sources: by name, "" for a single one.
      split: "train" or "test".
      answer: field of the reference answer, with dots into objects. "": rows need none.
      held_out: share of training rows held out if a source has no test file, by a digest of the prompt: added rows move
        no others, and equal prompts stay together.
      limit: maximum records per source.

    Raises:
      UserError: a file is missing or of another format, or a source has no usable row.
    """
    rows: list[Record] = []
    places: list[str] = []
    parts: list[Part] = []
    wrong: collections.Counter[str] = collections.Counter()
    for name, source in sources.items():
        start, seen = len(rows), _Wrong()
        convert = partial(_record, prompt=source.prompt, answer=answer)
        place = source.test if split == "test" and source.test else source.train
        divided = not source.test and held_out > 0
        if split == "test" and not source.test and not divided:
            raise UserError(f"{place} has no held-out rows; set data.test to a file of such, or data.held_out above 0")
        alone = source.test != source.train
        for number, row in enumerate(read(place, "train" if divided else split, alone=alone)):
            record = seen.keep(row, convert)
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
            raise UserError(_nothing(place, split, seen, divided=divided, held_out=held_out))
        parts.append(Part(name, len(rows) - start, source.weight))
        wrong += seen.counts
    title = ", ".join(dict.fromkeys(s.test if split == "test" and s.test else s.train for s in sources.values()))
    return Records(title, rows, where=places.__getitem__, parts=parts, left_out=wrong)


def conversations(place: str, *, prompt: str = "", answer: str = "answer", limit: int | None = None) -> Records:
    """Return records with `messages` that end with an assistant turn.

    A row has `messages`, or a prompt and the response in `completion`, `worked` or `answer`, in this order.

    Args:
      place: a file, or a folder with training rows.
      prompt: prompt field of rows without messages. "": the one of PROMPTS present.
      answer: response field, after `completion` and `worked`.
      limit: maximum records.

    Raises:
      UserError: the file is missing or of another format, or has no usable row.
    """
    seen, rows, places = _Wrong(), [], []
    for number, row in enumerate(read(place, "train")):
        record = seen.keep(row, partial(_conversation, prompt=prompt, answer=answer))
        if record is None:
            continue
        rows.append({"id": f"{Path(place).name}/{number}"} | record)
        places.append(row.where)
        if len(rows) == limit:
            break
    seen.report(place)
    if not rows:
        raise UserError(_nothing(place, "train", seen))
    return Records(place, rows, where=places.__getitem__, left_out=seen.counts)


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return a row's messages, with objects as arguments of tool calls, or raise Defect."""
    if not isinstance(value, list):
        raise Defect("messages are not a list")
    if not value:
        raise Defect("no messages")
    turns = [_message(turn) for turn in value if turn is not None and not _is_empty_system(turn)]
    roles = [turn["role"] for turn in turns]
    if roles.count("system") > 1:
        raise Defect("several system messages")
    if "system" in roles[1:]:
        raise Defect("system message is not the first")
    if "user" not in roles:
        raise Defect("no user's turn")
    for before, turn in zip([None, *turns], turns, strict=False):
        if turn["role"] == "tool" and not (before and (before["role"] == "tool" or "tool_calls" in before)):
            raise Defect("tool's reply without a call before it")
    return turns


class _Wrong:
    """Unusable rows, counted by defect, with the first place of each."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.remedies: dict[str, str] = {}
        self._first: dict[str, str] = {}

    def keep(self, row: Row, convert: Callable[[dict[str, Any]], Record]) -> Record | None:
        try:
            return convert(row.fields())
        except Defect as defect:
            reason = str(defect)
            self.counts[reason] += 1
            self._first.setdefault(reason, row.where)
            self.remedies.setdefault(reason, defect.remedy)
            return None

    def report(self, place: str) -> None:
        if self.counts:
            found = [f"{n} {reason} (first: {self._first[reason]})" for reason, n in self.counts.most_common()]
            logging.warning("%d rows of %s are left out: %s", self.counts.total(), place, "; ".join(found))


def _nothing(place: str, split: str, wrong: _Wrong, *, divided: bool = False, held_out: float = 0) -> str:
    if wrong.counts:
        (reason, count), total = wrong.counts.most_common(1)[0], wrong.counts.total()
        return f"{place} has no usable row: {count} of {total} left out are {reason}; {wrong.remedies[reason]}"
    if divided:
        return f"data.held_out of {held_out} leaves no {split} row of {place}; change it, or set data.test to a file"
    return f"{place} has no rows; give at least one"


def _record(row: dict[str, Any], *, prompt: str, answer: str) -> Record:
    prompt = prompt or _given(row)
    named = {part for name in (prompt, answer) for part in (name, name.partition(".")[0])}
    record = {key: value for key, value in row.items() if key not in (*PROMPTS, VERBATIM)}
    for name in _OWN:
        if name in named or _is_empty(record.get(name, "")):
            record.pop(name, None)
    record |= _prompt(row, prompt)
    if "messages" in record and record["messages"][-1]["role"] == "assistant":
        raise Defect("messages end with the assistant's turn")
    record = {key: value for key, value in record.items() if key != _TOOLS} | _tools(row, named)
    if answer:
        record["answer"] = answer_text(row, answer)
    else:
        record.setdefault("answer", "")
    if isinstance(record.get("id"), int):
        record["id"] = str(record["id"])
    for name in _OWN:
        if name in record:
            record[name] = _text(record[name], name)
    record.setdefault("worked", record["answer"])
    return record


def _conversation(row: dict[str, Any], *, prompt: str, answer: str) -> Record:
    names = ("messages", *([prompt] if prompt else []))
    asked = _prompt(row, next((name for name in names if _has(row, name)), "") or _given(row))
    turns = asked.get("messages", [{"role": "user", "content": asked["question"]}])
    if turns[-1]["role"] != "assistant":
        said = next((name for name in ("completion", "worked", answer, "answer") if _has(row, name)), None)
        if said is None:
            raise Defect(
                "no assistant's turn" if "messages" in row else "no completion",
                "name the field of what is said, --config.data.answer=FIELD",
            )
        value = _find(row, said)
        more = value if isinstance(value, list) else [{"role": "assistant", "content": _text(value, said)}]
        turns = parse_messages([*turns, *more])
        if turns[-1]["role"] != "assistant":
            raise Defect(f"{said} does not end with the assistant's turn")
    return {"question": asked["question"], "messages": turns, "instruction": ""} | _tools(row, {prompt, answer})


def _given(row: Mapping[str, Any]) -> str:
    there = [name for name in PROMPTS if name in row]
    given = [name for name in there if not _is_empty(row[name])] or there
    if not given:
        raise Defect("no question, prompt or messages", "name the prompt's field, --config.data.prompt=FIELD")
    if len(given) > 1:
        usable = [name for name in given if _is_usable(row, name)] or given
        raise Defect(
            "several of question, prompt and messages", f"choose one, such as --config.data.prompt={usable[-1]}"
        )
    return given[0]


def _is_usable(row: Mapping[str, Any], name: str) -> bool:
    try:
        turns = _prompt(row, name).get("messages")
    except Defect:
        return False
    return turns is None or turns[-1]["role"] != "assistant"


def _prompt(row: Mapping[str, Any], name: str) -> Record:
    value = _field(row, name, "set data.prompt to a field that they have")
    if name != "question" and isinstance(value, str) and _MESSAGES.match(value):
        try:
            value = json.loads(value)
        except ValueError:
            raise Defect(f"{name} has messages as a text that is not JSON", "write them as JSON") from None
    if name == "question" or not (name == "messages" or isinstance(value, list)):
        return {"question": _text(value, name)} | ({VERBATIM: True} if name == "prompt" else {})
    turns = parse_messages(value)
    return {"question": [turn["content"] for turn in turns if turn["role"] == "user"][-1], "messages": turns}


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Defect("message is not an object")
    if "role" not in turn:
        raise Defect("message without role")
    role, content = turn["role"], turn.get("content")
    if not isinstance(role, str):
        raise Defect("role is not a text")
    if role not in ROLES:
        raise Defect("role is not system, user, assistant or tool")
    calls = turn.get("tool_calls") or []
    if calls and role != "assistant":
        raise Defect(f"tool calls of the {role}")
    if content is None and not calls:
        raise Defect("message without content")
    is_empty = (bool(calls) or role == "tool") and (content is None or _is_empty(content))
    kept: dict[str, Any] = {"role": role, "content": (content or "") if is_empty else _text(content, "content")}
    if not _is_empty(turn.get("reasoning_content", "")):
        kept["reasoning_content"] = _text(turn["reasoning_content"], "reasoning_content")
    if calls:
        if not isinstance(calls, list):
            raise Defect("tool calls are not a list")
        kept["tool_calls"] = [_call(call) for call in calls]
    if role == "tool":
        kept |= {name: _text(turn[name], name) for name in ("tool_call_id", "name") if turn.get(name)}
    return kept


def _call(call: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form, but with an object as arguments, from that or without `function` around it."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Defect("tool call is not an object")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise Defect("arguments of a tool call are a text that is not JSON") from None
    if not isinstance(arguments, dict):
        raise Defect("arguments of a tool call are not an object")
    named = {"id": _text(call["id"], "id of a tool call")} if call.get("id") else {}
    function = {"name": text_field(function, "name"), "arguments": arguments}
    return named | {"type": "function", "function": function}


def _tools(row: Mapping[str, Any], named: Collection[str]) -> Record:
    """Return a row's tools, if any, unless the field has another role."""
    tools = row.get(_TOOLS)
    if tools is None or _TOOLS in named:
        return {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except (ValueError, RecursionError):
            raise Defect("tools are a text that is not JSON") from None
    try:
        return {_TOOLS: tool_calls.check(tools)} if tools else {}
    except UserError as error:
        raise Defect("malformed tools", str(error)) from error


def _is_empty(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _is_empty_system(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "system" and _is_empty(turn.get("content", ""))


def text_field(row: Mapping[str, Any], name: str) -> str:
    """Return a non-blank text field, or raise Defect."""
    if name not in row:
        raise Defect(f"no {name}")
    return _text(row[name], name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Defect(f"{name} is not a text")
    if not value.strip():
        raise Defect(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        raise Defect(f"{name} is not Unicode text") from None
    if "\0" in value:
        raise Defect(f"{name} has a NUL character")
    return value


def answer_text(row: Mapping[str, Any], name: str = "answer") -> str:
    """Return a row's reference answer as text, or raise Defect."""
    value = _field(row, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value, name).strip()
    if isinstance(value, float) and not math.isfinite(value):  # an int may have more digits than a float
        raise Defect(f"{name} is not a finite number")
    return number_text(value)


def _field(row: Mapping[str, Any], name: str, *remedy: str) -> Any:
    value = _find(row, name)
    if value is None:
        raise Defect(f"no {name}", *remedy)
    return value


def _find(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _has(row: Mapping[str, Any], name: str) -> bool:
    value = _find(row, name)
    return value is not None and not _is_empty(value)


def _draw(record: Record) -> float:
    prompt = json.dumps(record.get("messages", record["question"]), sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(prompt, digest_size=8, key=_HELD_OUT_SEED).digest()) / 2**64
