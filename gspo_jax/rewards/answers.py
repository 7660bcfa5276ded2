"""Final answers of responses, found as a person would, in linear time.

All math rewards share this module and comparison.py, and so agree on what was announced.
"""

import collections
import re
from typing import NamedTuple

from gspo_jax.rewards.comparison import BOUND
from gspo_jax.rewards.notation import DECORATION, MAX_CHARACTERS
from gspo_jax.rewards.quantities import MONEY, SCALE_WORDS, SHORT_SCALES
from gspo_jax.thoughts import answer_part

_MAX_ANNOUNCEMENTS = 64
"""Announcements read, counted from the end of a response."""

_BOX = r"(?:boxed|fbox|framebox)(?:\[[^][]{0,20}\])?\s{0,9}\{"
BOX = re.compile(rf"\\{_BOX}")
r"""Openings of a box: `\boxed{`, `\boxed {`, `\fbox{`, `\framebox[w]{`."""
_GLM_BOX = "<|begin_of_box|>", "<|end_of_box|>"
_SIGNS = "####", "box", "nswer", "NSWER", "ption", "hoice"
"""Every announcement contains one of these."""
_BEFORE_SIGN = 6
"""Characters from an announcement's start to its sign, usually."""
_OTHER_WORDS = r"(?:[ \t]+(?!(?:is|are|equals|would|should|will|must)\b)[^\s.:=\\#<]{1,20}+){0,8}+"
_ADVERBS = (
    r"as follows|given by|equal to|therefore|thus|then|simply|exactly|indeed|just|only|also|still|clearly|obviously"
    r"|of course|in fact|certainly|definitely|surely|probably|(?:most )?likely"
)
_ANNOUNCEMENT = re.compile(
    r"[#\\<AaOoCc](?:"  # found fast
    # #### | #### Final Answer
    r"(?P<mark>(?<=#)###++(?:[ \t*_]*(?i:the\s+)?(?i:final\s+)?(?:[Aa]nswer|ANSWER)[ \t*_:]*(?=\n))?)"
    rf"|(?P<box>(?<=\\)(?:{_BOX}|boxed\s{{0,9}}(?=[0-9]))|(?<=<){re.escape(_GLM_BOX[0][1:])})|(?P<tag>(?<=<)answer>)"
    # answer | correct option | final choice
    r"|(?:(?<=[Aa])(?<![A-Za-z0-9][Aa])(?:nswers?|NSWERS?)"
    r"|(?:(?<=orrect [OoCc])|(?<=inal [OoCc])|(?<=est [OoCc]))(?:ption|hoice))(?:"
    r"(?P<heading>[ \t*_]*$)"
    # answer: | **Answer**: | "answer": | answers are | the answer to part (a) would be
    rf"|(?:[ \t]+(?:to|of|for|in|choice|option)\b{_OTHER_WORDS})?(?:[ \t]*\([^()\n]{{0,40}}\)|,[ \t]\w{{1,12}},)?"
    r"[*_\"]*[ \t]*(?:[:：=]|(?:is|are|equals|(?:would|should|will|must)[ \t]+be)(?![\w'’])"
    rf"(?:,?[ \t]+(?:{_ADVERBS})\b,?)*)))",
    re.MULTILINE,
)
_BEFORE_HEADING = re.compile(r"(?:\A|\n)[ \t#*_]*(?:[0-9]{1,2}[.)][ \t*_]+)?(?i:the[ \t]+)?(?i:final[ \t]+)?\Z")
_SHORT = re.compile(r"[ \t]*+(-?[0-9]++(?:\.[0-9]++)?+)\.?[ \t]*+(?=\n|\Z)")  # most answers
_GAP = re.compile(rf"(?:[\s*_`:{DECORATION}]|(?<=\n)(?:>|[-•][ ])|<(?:b|i|u|p|em|strong|span|div|code)>)*+")
# up to the end of the line or </answer>, <|im_end|>, <eos>
_LINE = re.compile("(?:[^\n\r\u2028\u2029<]|<(?![/|\uff5c]|[A-Za-z_]{1,20}[|/]?>))*+")
_HEADING = re.compile(r"[0-9]{1,2}[.)][ \t*_]+[^\s*_<][^\n]{0,99}+(?<![.!?])(?=\n|\Z)")  # 1. Multiply
_MATH = re.compile(r"\$\$.*?\$\$|\$.*?\$|\\\[.*?\\\]|\\\(.*?\\\)", re.DOTALL)  # may span lines
_BARE = re.compile(r"[0-9]++(?:[.,/][0-9]++)*+")
_SENTENCE_END = re.compile(r"(?<!Rs)[.!?](?=[\s*\"')]|$)")
_NOTHING_BETWEEN = re.compile(r"\\(?:q?quad|text|mathrm|[()[\],;: ])|[\s${}~]")
_BETWEEN_BOXES = re.compile(r"(?:(?:[,;]|[,;]?[A-Za-z]{0,12}(?:and|or))(?:[A-Za-z](?:_?\w{1,3})?=)?)?")
_MAX_BETWEEN_BOXES = 60
_JUDGED = re.compile(  # the answer is correct. | is not 5
    r"not\b|(?:[0-9]+\s*\\?%\s+|[a-z]+ly\s+)?(?:in|un)?(?:correct|right|wrong|valid|verified|confirmed|consistent"
    r"|reasonable|plausible|sensible|clear|accurate|sure|certain)\b"
    r"(?=\s*(?:[.,;:!)*]|$|(?:because|since|as|and|so|if|for|when|by|with)\b))",
    re.IGNORECASE,
)
_VALUE = re.compile(
    rf"[\s\"'‘“(\[{{]*(?:(?:[-+−–±≈~]|negative\s|minus\s)?\s*(?:US|Rs\.?)?[{MONEY}]?\s*[-+−–]?\.?\d"  # 12 | -$5 | .5
    rf"|(?!\$?\s*(?:{BOUND.pattern}))[\\$∞√π∅]|(?:sqrt|pi|sin|cos|tan|log|ln|exp)\b"  # \frac | $x$ | sqrt(2)
    r"|[a-z](?![\w'’]|\s+[a-z]{2})|[A-HJ-Z](?![\w'’]|-\w))"  # x = 5 | C
)
"""Beginning of a value, as opposed to words about one."""
_REMARK = re.compile(  # 3 less than | 2 digits long
    r"\\?[$\d.,]+\s*\\?%?[\s-]+(?:(?:\w+\s+)?than|of|times|digits?|mod)\b"
)
_WRONG = re.compile(r"\b(?i:wrong|incorrect|false|na[iï]ve|mistaken|tempting)[ \t*_]+\Z")
_SUPPOSED = re.compile(  # one might think the answer is | if it were 5, the answer would be
    r"\b(?i:(?<!we )(?<!i )(?:may|might|could|would)(?:[ \t]+\w+){0,2}?[ \t]+"
    r"(?:think|say|believe|assume|guess|conclude|expect)"
    r"|if\b(?=.*\bwould[ \t]+be\b))\b[^.!?\n]*\Z"
)
_MAX_BEFORE = 80
_SIGN = re.compile(r"(?:\A|[=$(\[:\s])[-−](?:\\?\$)?\Z")
_SCALE_BEHIND = re.compile(  # million | $ million | \text{ million} | \% | K
    rf"(?:[ \t*~$]|\\[,;: )\]])*+(?:\\(?:text|mathrm|mbox)\s*\{{\s*)?"
    rf"({SCALE_WORDS}(?![^\W_])|\\?%|(?i:per\s?cent)\b)|\$?({SHORT_SCALES})(?![^\W_])"
)
_ATOM = re.compile(r"[\w.,\\{} ]+\Z")
_FACTOR_BEHIND = re.compile(  # \pi | \times 10^6
    r"\s*(?:\\(?:times|cdot|pi|sqrt|[dt]?frac)(?![A-Za-z])|\^|(?<=\})[A-Za-z](?![A-Za-z]))"
    r"(?:\\[A-Za-z]+|[^=<>$\n.,;\\]){0,40}+(?!\s*[=<>])"
)
_EMPTY = " \n\t.?…_"


class Announcement(NamedTuple):
    """An announced final answer."""

    text: str
    boxed: bool


def announced(text: str) -> Announcement | None:
    r"""Return the last announcement that is followed by something, or None.

    `####`, a box, `<answer>`, "answer:", "answer is" and "correct option is" announce an answer. Boxes that are
    adjacent or joined by commas, "and" or "or" are one announcement. "The answer is correct.", "A wrong answer is" and
    the `####` of a numbered heading announce nothing. Words, remarks and suppositions count only without an announced
    value: `\boxed{12} The answer is 2 digits long.` is 12.
    """
    sign = max(map(text.rfind, _SIGNS))
    if sign < 0:
        return None
    last = None  # usually in the last line
    for announcement in _ANNOUNCEMENT.finditer(text, max(text.rfind("\n", 0, sign) + 1, sign - _BEFORE_SIGN)):
        last = announcement
    if last is not None and not (last["box"] and text.rfind("box", 0, last.start()) >= 0):
        found = _read(text, last)
        if found is not None and found.is_value:
            return Announcement(found.text, bool(last["box"]))
    return _search(text)


def final_answer(prompt: str, completion: str) -> str | None:
    """Return the text of the answer announced after a completion's last thought, or None."""
    part = answer_part(prompt, completion)
    found = None if part is None else announced(part)
    return None if found is None else found.text


def boxed_content(text: str, start: int) -> str | None:
    """Return the content of the box that opens right before `start`, or None.

    Inner braces are balanced. The content has at most MAX_CHARACTERS characters.
    """
    end = text.find("}", start, start + MAX_CHARACTERS + 1)
    if end < 0 or text.find("{", start, end) < 0:  # most boxes
        return None if end < 0 else text[start:end]
    depth = 1
    for i in range(start, min(len(text), start + MAX_CHARACTERS + 1)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


class _Read(NamedTuple):
    text: str
    end: int
    is_value: bool


def _read(text: str, announcement: re.Match[str]) -> _Read | None:
    start, end = announcement.span()
    if announcement["box"]:
        return _read_box(text, announcement)
    before = max(0, start - _MAX_BEFORE)
    if announcement["heading"] is not None and not _BEFORE_HEADING.search(text, before, start):
        return None
    marked = announcement["mark"] or announcement["tag"]
    if not marked and _WRONG.search(text, before, start):
        return None
    supposed = not marked and _SUPPOSED.search(text, before, end) is not None
    if short := _SHORT.match(text, end):
        return _Read(short[1], end, is_value=not supposed)
    gap = _GAP.match(text, end)
    assert gap is not None  # may be empty
    begin, most = gap.end(), gap.end() + MAX_CHARACTERS + 1
    if announcement["mark"] and _HEADING.match(text, begin):
        return None
    math = _MATH.match(text, begin, most) if text[begin : begin + 1] in ("$", "\\") else None
    line = _LINE.match(text, begin if math is None else math.end(), most)
    assert line is not None
    said = text[begin : line.end()]
    if len(said) > MAX_CHARACTERS:
        said = said[: max(0, said.rfind(" "))]
    if sentence := _SENTENCE_END.search(said):
        said = said[: sentence.start()]
    if said.count("|") % 2:  # table border
        said = said.rstrip().removesuffix("|")
    said = said.strip(' \t*_`"' if "{" in said else ' \t*_`"}')  # {"answer": "12"}
    if not said.strip(_EMPTY) or (not announcement["mark"] and _JUDGED.match(said)):
        return None
    if announcement["tag"]:
        return _Read(said, end, is_value=True)
    is_remark = supposed or (not marked and _REMARK.match(said) is not None)
    return _Read(said, end, is_value=not is_remark and _VALUE.match(said) is not None)


def _read_box(text: str, box: re.Match[str]) -> _Read | None:
    content, end = _content(text, box)
    content = content.strip()
    if not content.strip(_EMPTY):
        return None
    if scale := _SCALE_BEHIND.match(text, end):
        content = f"{content} {scale[1] or scale[2]}"
    elif factor := _FACTOR_BEHIND.match(text, end):
        content = _bracketed(content) + factor[0].rstrip()
    if _SIGN.search(text, max(0, box.start() - _MAX_BEFORE), box.start()):
        content = f"-{_bracketed(content)}"
    return _Read(content, end, is_value=True)


def _content(text: str, box: re.Match[str]) -> tuple[str, int]:
    """Return a box's content, "" if it does not close, and its end."""
    end = box.end()
    if box["box"].endswith("{"):
        content = boxed_content(text, end) or ""
        return content, end + len(content) + 1
    if box["box"].endswith(">"):
        closing = max(end, text.find(_GLM_BOX[1], end, end + MAX_CHARACTERS + len(_GLM_BOX[1])))
        return text[end:closing], closing + len(_GLM_BOX[1])
    bare = _BARE.match(text, end)
    assert bare is not None
    return bare[0], bare.end()


def _bracketed(text: str) -> str:
    return text if _ATOM.match(text) else f"({text})"


def _search(text: str) -> Announcement | None:
    words = None
    following: list[str] = []  # joined boxes after this one
    begin = 0
    for announcement in reversed(collections.deque(_ANNOUNCEMENT.finditer(text), maxlen=_MAX_ANNOUNCEMENTS)):
        found = _read(text, announcement)
        if following:
            gap = "" if found is None else text[found.end : begin]
            if (
                found is None
                or not announcement["box"]
                or found.end > begin
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
