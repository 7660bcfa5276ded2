"""Code blocks of a response, by CommonMark (spec.commonmark.org, 4.4 and 4.5), in linear time.

Fences count in lists and quotes too. Exceptions for what models write: tags may precede an opening fence
(`</think>```python`) or follow a closing one (`</answer>`, `<|im_end|>`), lines of a block in a list may begin left of
it, and a tag on its own line begins no HTML block.
"""

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_OPENS = re.compile(r"(?:</?[\w|-]{1,40}>[ \t]*)*(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>.*)")
_CLOSES = re.compile(r"[ \t]*(?P<mark>`{3,}|~{3,})[ \t]*(?:<[^\s<>]{1,40}>[ \t]*)*[\r\n]*\Z")
_MARKER = re.compile(r"(?:[-*+]|\d{1,9}[.)])(?=[ \t])")
_BEGINS = frozenset("`~<>-*+0123456789")
"""First characters of lines that open a container or block."""
_PYTHON = re.compile(r"\{?[ .]*(?:i?python|py)[\d.]*(?![\w-])|[\w./-]+\.py\b", re.IGNORECASE)
_DOCSTRINGS = ('"""', "'''")
_TAB = 4
_DEEPEST = 20
"""Maximum nested containers on one line."""
_MOST_BLOCKS = 16
"""Maximum candidate blocks, counted from the last."""
_MOST_LONGER = (4, 8)
"""Blocks tried with other ends, from the last, and other ends of each."""
_MOST_CHARACTERS = 1 << 20
"""Maximum characters of all other candidates together."""


class _Fence(NamedTuple):
    line: int
    mark: str
    info: str
    quotes: int
    """Depth of quotes around it."""
    within: int
    """Column where its list item's content begins, 0 outside lists."""
    column: int


def programs(text: str) -> list[str]:
    """Return candidate programs, best first: Python or untagged blocks, the last one first.

    A block that does not compile may end at another fence: later if a docstring holds fences, or within a line. So
    blocks tagged as Python or with an unclosed docstring are followed by versions with other ends. An untagged first
    fence may close a block opened before the text. That reading comes last. Without any fence, blocks indented by four
    spaces count.
    """
    lines = _lines(text)
    fenced = list(_blocks(lines))
    if not fenced:
        indented = _indented(lines)
        return [found for block in reversed(indented) for found in (_fenced_in(block) or [block])][:_MOST_BLOCKS]
    found: list[str] = []
    longer = 0
    for fence, end in [block for block in reversed(fenced) if _may_be_python(block[0])][:_MOST_BLOCKS]:
        found.append(_content(lines, fence, end))
        if longer < _MOST_LONGER[0] and (fence.info or any(found[-1].count(quotes) % 2 for quotes in _DOCSTRINGS)):
            found += _with_other_ends(lines, fence, end)
            longer += 1
    first = fenced[0][0]
    if first.line > 0 and _CLOSES.match(lines[first.line].lstrip(" \t>")):
        found += programs(f"{first.mark}python\n{text}")
    return _bounded([block for block in found if block.strip()])


def left_open(text: str) -> str:
    """Return the block that the text leaves open, from its fence on, or ""."""
    lines = _lines(text)
    *_, last = (None, *_blocks(lines))
    if last is None or last[1] < len(lines) or not _may_be_python(last[0]):
        return ""
    only_fence = last[0].line == len(lines) - 1 and not text.endswith("\n")
    return "".join(lines[last[0].line :]) + "\n" * only_fence


def last_of_text(text: str) -> str | None:
    """Return the block that closes in the last line, if it may be a program."""
    lines = _lines(text.rstrip())
    *_, last = (None, *_blocks(lines))
    if last is None or last[1] != len(lines) - 1 or not _may_be_python(last[0]):
        return None
    return _content(lines, *last)


def _lines(text: str) -> list[str]:
    return list(io.StringIO(text, newline=""))  # str.splitlines also splits at form feeds


def _blocks(lines: Sequence[str]) -> Iterator[tuple[_Fence, int]]:
    """Yield each block's fence and closing line number, len(lines) if left open."""
    if not any("```" in line or "~~~" in line for line in lines):
        return
    items: list[int] = []
    """Content columns of open list items."""
    fence: _Fence | None = None
    for number, line in enumerate(lines):
        if fence is None:
            fence = _opened(number, line, items)
        elif fence.quotes and _unquoted(line, fence.quotes) is None:
            yield fence, number
            fence = _opened(number, line, items)
        elif fence.mark in line and _closes(fence, line):
            yield fence, number
            fence = None
    if fence is not None:
        yield fence, len(lines)


def _opened(number: int, line: str, items: list[int]) -> _Fence | None:
    """Return the fence if a line opens a block, and update `items`."""
    first = line.lstrip(" \t")[:1]
    if first not in _BEGINS:
        return None
    rest, quotes, column = line, 0, 0
    for _ in range(0 if line[0] in "`~" else _DEEPEST):
        indent, rest = _indent(rest, column)
        column += indent
        marker = _MARKER.match(rest)
        if rest.startswith(">"):
            quotes, rest, column = quotes + 1, rest[1:].removeprefix(" "), 0
            items.clear()
        elif marker:
            while items and items[-1] > column:
                items.pop()
            column += marker.end()
            indent, rest = _indent(rest[marker.end() :], column)
            column += indent
            items.append(column)
        else:
            break
    opens = _OPENS.match(rest)
    within = next((item for item in reversed(items) if item <= column), 0)
    if opens is None or column - within >= _TAB or (opens["mark"][0] == "`" and "`" in opens["info"]):
        return None
    return _Fence(number, opens["mark"], opens["info"].strip(), quotes, within, column)


def _closes(fence: _Fence, line: str) -> bool:
    rest = _unquoted(line, fence.quotes) if fence.quotes else line
    closes = None if rest is None else _CLOSES.match(rest)
    if rest is None or closes is None or fence.mark not in closes["mark"]:
        return False
    return rest[0] in "`~" or _indent(rest, 0)[0] < fence.within + _TAB


def _may_be_python(fence: _Fence) -> bool:
    return not fence.info or _PYTHON.match(fence.info) is not None


def _with_other_ends(lines: Sequence[str], fence: _Fence, end: int) -> list[str]:
    """Return versions of a block that end at other fences than the line `end`.

    Fences in comments or of Python blocks do not count.
    """

    def ends(line: str) -> bool:
        before, mark, behind = line.partition(fence.mark)
        return mark != "" and "#" not in before and not _PYTHON.match(behind.strip())

    others = (number for number in range(fence.line + 1, len(lines)) if number != end and ends(lines[number]))
    return [
        _content(lines, fence, other) + _content([lines[other].partition(fence.mark)[0]], fence._replace(line=-1), 1)
        for other in itertools.islice(others, _MOST_LONGER[1])
    ]


def _content(lines: Sequence[str], fence: _Fence, end: int) -> str:
    return "".join(
        _dedented(rest, fence.column)
        for line in lines[fence.line + 1 : end]
        if (rest := _unquoted(line, fence.quotes)) is not None
    )


def _unquoted(line: str, quotes: int) -> str | None:
    for _ in range(quotes):
        line = line.lstrip(" ")
        if not line.startswith(">"):
            return None
        line = line[1:].removeprefix(" ")
    return line


def _indent(line: str, column: int) -> tuple[int, str]:
    rest, at = line.lstrip(" \t"), column
    for character in line[: len(line) - len(rest)]:
        at += 1 if character == " " else _TAB - at % _TAB
    return at - column, rest


def _dedented(line: str, columns: int) -> str:
    if not columns:
        return line
    at = 0
    for place, character in enumerate(line):
        if at >= columns or character not in " \t":
            return " " * max(0, at - columns) + line[place:]
        at += 1 if character == " " else _TAB - at % _TAB
    return line.lstrip(" \t")


def _indented(lines: Sequence[str]) -> list[str]:
    """Return blocks indented by four columns after an empty line.

    A text that begins indented continues a function's body and has none.
    """
    first = next((line for line in lines if not line.isspace()), "")
    if _indent(first[: _TAB + 1], 0)[0] >= _TAB:
        return []
    found: list[list[str]] = []
    open_ = behind_empty = False
    for line in lines:
        if line.isspace():
            if open_:
                found[-1].append(line.lstrip(" \t"))
            behind_empty = True
            continue
        if _indent(line[: _TAB + 1], 0)[0] < _TAB:
            open_ = False
        elif open_ or behind_empty:
            if not open_:
                found.append([])
            open_ = True
            found[-1].append(_dedented(line, _TAB))
        behind_empty = False
    return ["".join(block) for block in found]


def _fenced_in(block: str) -> list[str]:
    lines = _lines(block)
    return [_content(lines, *found) for found in _blocks(lines)][::-1]


def _bounded(found: Sequence[str]) -> list[str]:
    kept, characters = list(found[:1]), 0
    for block in found[1:]:
        characters += len(block)
        if characters > _MOST_CHARACTERS:
            break
        kept.append(block)
    return kept
