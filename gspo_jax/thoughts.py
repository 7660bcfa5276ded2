"""Thoughts in a model's text: which part of a response is its answer."""

import re

PAIRS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek-R1, QwQ, GLM
    ("<thinking>", "</thinking>"),
    ("<longcat_think>", "</longcat_think>"),  # LongCat
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<Thought>", "</Thought>"),  # Marco-o1
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1, OpenThinker
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
    ("Here is my thought process:", "Here is my response:"),  # Granite 3
)
"""What opens and what closes a thought, by the families that are trained to write it, and by usual prompts.

Words open one only where a response begins, and close only one that is open.
"""
MARKS = frozenset(text for pair in PAIRS for mark in pair for text in (mark, *re.findall("<[^<>]*>", mark)))
"""All of them and their parts, of which a tokenizer may have some as special tokens: gpt-oss has `<|channel|>`."""

_CLOSING_OF = dict(PAIRS)
_OPENINGS = tuple(_CLOSING_OF)
_MARK = re.compile("|".join(re.escape(mark) for pair in PAIRS for mark in pair))
_FORMAT = re.compile(r" ?<\|constrain\|>\w{1,20}(?=<\|message\|>)")  # in which gpt-oss's final channel is
_BEGINNINGS = "<", "[", "◁", "Here "
"""Texts of which every mark has one. They are found much faster than patterns, and most completions have none."""
_QUOTES = "\"'`"
_PROMPT_END = 100
"""Characters at the end of a prompt that are searched for an open thought."""


def answer_part(prompt: str, completion: str) -> str | None:
    """Return what a completion says behind its last thought, or None if a thought is left open.

    A thought begins with an opening mark, in the completion or at the very end of the prompt, and ends with the closing
    mark of the same pair. What stands before a closing mark is a thought whether or not its beginning is seen. Without
    a mark the whole completion is the answer. A mark in quotes, as in a program that splits a text at "</think>", is
    none.
    """
    asked = prompt[-_PROMPT_END:].rstrip()
    opened = asked.endswith(_OPENINGS)
    if not opened and not any(beginning in completion for beginning in _BEGINNINGS):
        return completion
    completion = _FORMAT.sub("", completion)
    left_open, begin = {closing for opening, closing in PAIRS if asked.endswith(opening)}, 0
    for found in _MARK.finditer(completion):
        closing = _CLOSING_OF.get(found[0])
        if _is_quoted(completion, found) if closing is None else _is_mentioned(completion, found):
            continue
        if closing is None and found[0][0].isalpha() and found[0] not in left_open:
            continue
        if closing is None:
            left_open.discard(found[0])
            begin = found.end()
        else:
            left_open.add(closing)
    return None if left_open else completion[begin:]


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    """Return whether a closing mark is spoken of: in quotes of its own, and not between two that are quoted."""
    before, behind = text[max(0, mark.start() - 1) : mark.start()], text[mark.end() : mark.end() + 2]
    if before == "" or before not in _QUOTES or behind[:1] != before:
        return False
    return not (behind[1:].isalnum() or behind[1:] in tuple("`\\$"))  # "Yes", a block or a formula may follow


def _is_mentioned(text: str, mark: re.Match[str]) -> bool:
    """Return whether an opening mark is spoken of: right behind a quote, or words that do not begin a response."""
    start = mark.start()
    if mark[0][0].isalpha():
        return start > _PROMPT_END or text[:start].strip() != ""
    return start > 0 and text[start - 1] in _QUOTES
