r"""Where a response announces its final answer, as a person reads it.

All math rewards read answers here and compare them by comparison.py, so that they agree on what was announced and on
what is a number. Everything is linear in the response's length.
"""

import collections
import re
from typing import NamedTuple

from gspo_jax.thoughts import answer_part

MAX_CHARACTERS = 200
"""Maximum characters of a final answer, or of a number in a step. Longer ones score 0: every function stays linear."""
_MAX_ANNOUNCEMENTS = 64
"""Announcements that are read, counted from the end of a response; in earlier ones there is no answer."""

_BOX = r"(?:boxed|fbox|framebox)(?:\[[^][]{0,20}\])?\s{0,9}\{"
BOX = re.compile(rf"\\{_BOX}")
r"""Openings of a box: `\boxed{`, `\boxed {`, `\fbox{`, `\framebox[w]{`."""
_SIGNS = "####", "box", "nswer", "NSWER"
"""Texts of which every announcement has one."""
_BEFORE_SIGN = 6
"""Characters before a sign in which an announcement begins, as a rule."""
_OTHER_WORDS = r"(?:[ \t]+(?!(?:is|are|equals|would|should|will|must)\b)[^\s.:=\\#<]{1,20}+){0,8}+"
_ADVERBS = (
    r"as follows|given by|equal to|therefore|thus|then|simply|exactly|indeed|just|only|also|still|clearly|obviously"
    r"|of course|in fact|certainly|definitely|surely|probably|(?:most )?likely"
)
_ANNOUNCEMENT = re.compile(
    r"[#\\<Aa](?:"  # one of few characters, which are found fast
    # #### | #### Final Answer, a heading
    r"(?P<mark>(?<=#)###++(?:[ \t*_]*(?i:the\s+)?(?i:final\s+)?(?:[Aa]nswer|ANSWER)[ \t*_:]*(?=\n))?)"
    rf"|(?P<box>(?<=\\){_BOX})|(?P<tag>(?<=<)answer>)"
    r"|(?<=[Aa])(?<![A-Za-z0-9][Aa])(?:nswers?|NSWERS?)(?:"
    r"(?P<heading>[ \t*_]*$)"
    # answer: | **Answer**: | "answer": | the answer is | answers are | the answer to part (a) would be
    rf"|(?:[ \t]+(?:to|of|for|in|choice|option)\b{_OTHER_WORDS})?(?:[ \t]*\([^()\n]{{0,40}}\)|,[ \t]\w{{1,12}},)?"
    r"[*_\"]*[ \t]*(?:[:：=]|(?:is|are|equals|(?:would|should|will|must)[ \t]+be)(?![\w'’])"
    rf"(?:,?[ \t]+(?:{_ADVERBS})\b,?)*)))",
    re.MULTILINE,
)
_BEFORE_HEADING = re.compile(r"(?:\A|\n)[ \t#*_]*(?i:the[ \t]+)?(?i:final[ \t]+)?\Z")
_MAX_BEFORE_HEADING = 30
_SHORT = re.compile(r"[ \t]*+(-?[0-9]++(?:\.[0-9]++)?+)\.?[ \t]*+(?=\n|\Z)")  # most answers, at once
_GAP = re.compile(r"(?:[\s*_`:>]|(?<=\n)[-•][ ])*+")
_LINE = re.compile(r"(?:[^\n<]|<(?![/|]))*+")  # up to the end of the line, </answer> or <|im_end|>
_MATH = re.compile(r"\$\$.*?\$\$|\$.*?\$|\\\[.*?\\\]|\\\(.*?\\\)", re.DOTALL)  # which may span lines
_SENTENCE_END = re.compile(r"(?<!Rs)[.!?](?=[\s*\"')]|$)")
_NOTHING_BETWEEN = re.compile(r"\\(?:q?quad|text|mathrm|[()[\],;: ])|[\s${}~]")
_BETWEEN_BOXES = re.compile(r"(?:[,;]|[,;]?(?:and|or))(?:[A-Za-z](?:_?\w{1,3})?=)?")
_MAX_BETWEEN_BOXES = 60
_JUDGED = re.compile(  # the answer is correct. | the answer is not 5
    r"not\b|(?:in|un)?(?:correct|right|wrong|valid|verified|confirmed|consistent|reasonable|plausible|sensible|clear)\b"
    r"(?=\s*(?:[.,;:!)*]|$|(?:because|since|as|and|so|if|for|when|by|with)\b))",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"[\s\"'‘“(\[{]*(?:[-+−–±≈~]?\s*(?:US|Rs\.?)?[€£¥₹$]?\s*[-+−–]?\.?\d"  # 12 | -$5 | .5
    r"|[\\$∞√π∅]|(?:sqrt|pi|sin|cos|tan|log|ln|exp)\b"  # \frac | $x$ | sqrt(2)
    r"|[a-z](?![\w'’]|\s+[a-z]{2})|[A-HJ-Z](?![\w'’]))"  # x = 5 | n(n+1) | C
)
"""How a value begins, rather than words about one."""
_EMPTY = " \n\t.?…_"
"""What is no answer alone."""


class Announcement(NamedTuple):
    """A final answer as it was announced."""

    text: str
    boxed: bool
    """True if it stood in a box, and so in math mode."""


def announced(text: str) -> Announcement | None:
    r"""Return the last announcement with something behind it, or None.

    An answer is announced by `####`, a box, `<answer>`, "answer:" or "answer is". Boxes joined by commas, "and" or "or"
    are one announcement. Behind "The answer is correct." there is nothing. What does not begin as a value does, behind
    `####` or words, counts only if no value was announced: `\boxed{12} The answer is easily checked.` is 12, and "The
    answer is Friday." is Friday.
    """
    sign = max(map(text.rfind, _SIGNS))
    if sign < 0:
        return None
    last = None  # most texts end with an announcement, and need no search from their beginning
    for announcement in _ANNOUNCEMENT.finditer(text, max(text.rfind("\n", 0, sign) + 1, sign - _BEFORE_SIGN)):
        last = announcement
    if last is not None and not (last["box"] and text.rfind("box", 0, last.start()) >= 0):
        found = _read(text, last)
        if found is not None and found.is_value:
            return Announcement(found.text, bool(last["box"]))
    return _search(text)


def final_answer(prompt: str, completion: str) -> str | None:
    """Return the text of the answer that a completion announces behind its last thought, or None."""
    part = answer_part(prompt, completion)
    found = None if part is None else announced(part)
    return None if found is None else found.text


def boxed_content(text: str, start: int) -> str | None:
    r"""Return the content of the box that opens right before `start`; None if it does not close in time.

    Braces inside are balanced; the content has at most MAX_CHARACTERS characters.
    """
    end = text.find("}", start, start + MAX_CHARACTERS + 1)
    if end < 0 or text.find("{", start, end) < 0:  # as most boxes
        return None if end < 0 else text[start:end]
    depth = 1
    for i in range(start, min(len(text), start + MAX_CHARACTERS + 1)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


class _Read(NamedTuple):
    """Text behind an announcement, and whether it is a value."""

    text: str
    end: int
    """Where the announcement ends; for a box behind its bracket."""
    is_value: bool


def _read(text: str, announcement: re.Match[str]) -> _Read | None:
    """What stands behind an announcement, or None if nothing does."""
    end = announcement.end()
    if announcement["box"]:
        content = boxed_content(text, end)
        if content is None or not content.strip(_EMPTY):
            return None
        return _Read(content.strip(), end + len(content) + 1, is_value=True)
    if announcement["heading"] is not None:
        begin = announcement.start()
        if not _BEFORE_HEADING.search(text, max(0, begin - _MAX_BEFORE_HEADING), begin):
            return None
    if short := _SHORT.match(text, end):
        return _Read(short[1], end, is_value=True)
    gap = _GAP.match(text, end)
    assert gap is not None  # it may be empty
    begin, most = gap.end(), gap.end() + MAX_CHARACTERS + 1
    math = _MATH.match(text, begin, most) if text[begin : begin + 1] in ("$", "\\") else None
    line = _LINE.match(text, begin if math is None else math.end(), most)
    assert line is not None
    said = text[begin : line.end()]
    if len(said) > MAX_CHARACTERS:
        said = said[: max(0, said.rfind(" "))]
    if sentence := _SENTENCE_END.search(said):
        said = said[: sentence.start()]
    said = said.strip(' \t*_`"' if "{" in said else ' \t*_`"}')  # {"answer": "12"}
    if not said.strip(_EMPTY) or (not announcement["mark"] and _JUDGED.match(said)):
        return None
    return _Read(said, end, bool(announcement["tag"]) or _VALUE.match(said) is not None)


def _search(text: str) -> Announcement | None:
    """The last value that was announced, else the last text."""
    words = None
    following: list[str] = []  # contents of the boxes behind the one that is read, which are joined to it
    begin = 0
    for announcement in reversed(collections.deque(_ANNOUNCEMENT.finditer(text), maxlen=_MAX_ANNOUNCEMENTS)):
        found = _read(text, announcement)
        if following:
            gap = text[found.end : begin] if found is not None and announcement["box"] else ""
            if (
                found is None
                or len(gap) > _MAX_BETWEEN_BOXES
                or not _BETWEEN_BOXES.fullmatch(_NOTHING_BETWEEN.sub("", gap))
            ):
                break
        elif found is None:
            continue
        elif not found.is_value:
            words = words or found.text
            continue
        elif not announcement["box"]:
            return Announcement(found.text, boxed=False)
        if found.text not in following[:1]:
            following.insert(0, found.text)
        begin = announcement.start()
    if following:
        return Announcement(", ".join(following), boxed=True)
    return None if words is None else Announcement(words, boxed=False)
