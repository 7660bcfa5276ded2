"""Thoughts in a model's text: which part of a response is its answer."""

import re

PAIRS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek-R1, QwQ, GLM
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1, OpenThinker
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
)
"""What opens and what closes a thought, by the families that are trained to write it, and by usual prompts."""
MARKS = frozenset(mark for pair in PAIRS for mark in pair)
"""All of them, of which a tokenizer may have some as special tokens."""

_CLOSING_OF = dict(PAIRS)
_OPENINGS = tuple(_CLOSING_OF)
_MARK = re.compile("|".join(map(re.escape, sorted(MARKS))))
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
    # Looking for characters is much faster than for patterns, and most completions have none with which marks begin.
    if not opened and "<" not in completion and "[" not in completion and "◁" not in completion:
        return completion
    left_open, begin = {closing for opening, closing in PAIRS if asked.endswith(opening)}, 0
    for found in _MARK.finditer(completion):
        closing = _CLOSING_OF.get(found[0])
        if _is_quoted(completion, found, closes=closing is None):
            continue
        if closing is None:
            left_open.discard(found[0])
            begin = found.end()
        else:
            left_open.add(closing)
    return None if left_open else completion[begin:]


def _is_quoted(text: str, mark: re.Match[str], *, closes: bool) -> bool:
    """Return whether a mark is spoken of: right behind a quote that opens, or right before one that closes."""
    if not closes:
        return mark.start() > 0 and text[mark.start() - 1] in _QUOTES
    quote, behind = text[mark.end() : mark.end() + 1], text[mark.end() + 1 : mark.end() + 2]
    return quote != "" and quote in _QUOTES and not (behind.isalnum() or behind == "`")  # Yes" or a block may follow
