"""Demonstrations from conversations: each assistant turn, after the prompt that sampling would give it.

A chat template may rewrite turns once they are history (Qwen3's drops reasoning). So each assistant turn becomes a
demonstration with its own prompt, as the sampler will see it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from gspo_jax.data.chat import Message, Rejected
from gspo_jax.data.files import Defect
from gspo_jax.data.pipeline import PromptStyle, conversation, prompt_text, tools_of
from gspo_jax.data.records import Record, Records
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError


def conversations(source: Sequence[Record]) -> Records:
    """Return records whose `messages` are whole conversations; of a task's records, the question and its answer."""

    def convert(index: int, record: Record) -> Record:
        del index
        asked = record.get("messages") or [{"role": "user", "content": record["question"]}]
        worked = [{"role": "assistant", "content": record["worked"]}] if "worked" in record else []
        return record | {"messages": [*asked, *record.get("turns", worked)]}

    return Records(repr(source), source, convert=convert, where=lambda _: repr(source))


def assistant_turns(source: Sequence[Record], tokenizer: Tokenizer, style: PromptStyle) -> Records:
    """Return a record per assistant turn: the `messages` before it, and in `worked` what the assistant writes.

    `worked` is the chat template's text from the prompt to the end-of-turn token, including tool calls, and marks such
    as an empty thought. `final` is that of the next turn without calls. Special tokens in contents are guarded
    (`Tokenizer.guard`).

    Raises:
      UserError: no turn can be learned.
    """
    turns: list[Record] = []
    left_out: Counter[str] = Counter()
    for record in source:
        calling: list[Record] = []
        for at, message in enumerate(record["messages"]):
            if message["role"] != "assistant":
                continue
            before = record | {"messages": record["messages"][:at]}
            try:
                turns.append(before | {"worked": _written(before, message, tokenizer, style)})
            except Defect as defect:
                left_out[str(defect)] += 1
                continue
            calling.append(turns[-1])
            if not message.get("tool_calls"):
                for turn in calling:
                    turn["final"] = calling[-1]["worked"]
                calling = []
    if left_out:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common())
        logging.warning("%d turns of %r are left out: %s", left_out.total(), source, reasons)
    if not turns:
        raise UserError(f"no assistant's turn of {source!r} can be learned ({', '.join(left_out)}); correct them")
    return Records(repr(source), turns, where=lambda index: turns[index]["id"])


def worked_answers(source: Sequence[Record], tokenizer: Tokenizer) -> Records:
    """Guard the special tokens in `worked` of a task's records."""

    def convert(index: int, record: Record) -> Record:
        return record | {"worked": tokenizer.guard(record["worked"], "assistant")}

    return Records(repr(source), source, convert=convert)


def _written(before: Record, message: Message, tokenizer: Tokenizer, style: PromptStyle) -> str:
    if not before["messages"] or before["messages"][-1]["role"] == "assistant":
        raise Defect("assistant's turn without a user's before it")
    ends = tokenizer.ends()
    if any(end in text for end in ends for text in _texts(message)):
        raise Defect("token that ends a turn inside one")
    try:
        prompt = prompt_text(before, tokenizer, style)
        turns = [tokenizer.guarded(turn) for turn in (*conversation(before, style), message)]
        whole = tokenizer.chat(turns, add_generation_prompt=False, tools=tools_of(before, tokenizer, style))
    except Rejected as error:
        raise Defect("rejected by the chat template") from error
    if not whole.startswith(prompt):
        raise Defect("chat template writes the prompt in another way once it is answered")
    written = whole[len(prompt) :]
    cuts = [written.find(end) for end in ends if end in written]
    written = written[: min(cuts)] if cuts else written.removesuffix(tokenizer.behind)
    if not written.strip():
        raise Defect("left out by the chat template")
    return written


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(inner)
