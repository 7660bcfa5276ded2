"""Thoughts in a model's text, and its answer."""

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
"""Opening and closing marks of thoughts, from model families and common prompts.

Words open a thought only at a response's beginning, and close only an open one.
"""
MARKS = frozenset(text for pair in PAIRS for mark in pair for text in (mark, *re.findall("<[^<>]*>", mark)))
"""All marks and their parts. Some may be a tokenizer's special tokens: gpt-oss has `<|channel|>`."""

_CLOSING_OF = dict(PAIRS)
_MARK = re.compile("|".join(re.escape(mark) for pair in PAIRS for mark in pair))
_FORMAT = re.compile(r" ?<\|constrain\|>\w{1,20}(?=<\|message\|>)")  # in gpt-oss's final channel
_BEGINNINGS = "<", "[", "◁", "Here "
"""Every mark contains one. They are a fast test, and most completions have none."""
_QUOTES = "\"'`"
_PROMPT_END = 100
"""Characters at a prompt's end searched for an open thought."""


def answer_part(prompt: str, completion: str) -> str | None:
    """Return the part of a completion after its last thought, or None if a thought is left open.

    A thought begins with an opening mark, in the completion or at the very end of the prompt, and ends with the pair's
    closing mark. Text before a closing mark is a thought in any case. Without marks the whole completion is the answer.
    Quoted marks, as in a program that splits a text at "</think>", do not count.
    """
    if not Scan(prompt, "").open and not any(beginning in completion for beginning in _BEGINNINGS):
        return completion
    completion = _FORMAT.sub("", completion)
    scan = Scan(prompt, completion)
    scan.read(0, len(completion))
    return None if scan.open else completion[scan.begin :]


class Scan:
    """Thoughts in the parts of a completion that have been read.

    `begin`: end of the last mark, where an answer begins. `unopened`: end of the last closing mark without an opening
    one, before which all is a thought.
    """

    def __init__(self, prompt: str, completion: str) -> None:
        asked = prompt[-_PROMPT_END:].rstrip()
        self._completion = completion
        self._left_open = {closing for opening, closing in PAIRS if asked.endswith(opening)}
        self.begin = self.unopened = 0

    @property
    def open(self) -> bool:
        return bool(self._left_open)

    def read(self, start: int, end: int) -> None:
        """Read the next part, from `start` to `end`. Marks between two parts do not count."""
        for found in _MARK.finditer(self._completion, start, end):
            closing = _CLOSING_OF.get(found[0])
            if (_is_quoted if closing is None else _is_mentioned)(self._completion, found):
                continue
            if closing is not None:
                self._left_open.add(closing)
                continue
            if found[0] not in self._left_open:
                if found[0][0].isalpha():
                    continue
                self.unopened = found.end()
            self._left_open.discard(found[0])
            self.begin = found.end()


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    """Return True if a closing mark is in its own quotes, not between two quoted texts."""
    before, behind = text[max(0, mark.start() - 1) : mark.start()], text[mark.end() : mark.end() + 2]
    if before == "" or before not in _QUOTES or behind[:1] != before:
        return False
    return not (behind[1:].isalnum() or behind[1:] in tuple("`\\$"))  # "Yes", a block or a formula may follow


def _is_mentioned(text: str, mark: re.Match[str]) -> bool:
    """Return True if an opening mark follows a quote, or words not at a response's beginning."""
    start = mark.start()
    if mark[0][0].isalpha():
        return start > _PROMPT_END or text[:start].strip() != ""
    return start > 0 and text[start - 1] in _QUOTES
