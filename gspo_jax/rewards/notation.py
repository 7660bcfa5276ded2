"""Plain text of answers written in LaTeX, Markdown or Unicode."""

import re
import unicodedata

MAX_CHARACTERS = 200
"""Maximum characters of a final answer or number. Longer ones score 0, which keeps every function linear."""
DECORATION = "\u220e\u25a0\u25a1\u25fb\u25fc\u2600-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff"
"""Decorative characters such as ticks and emoji, for a regex character class."""

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-")  # minus signs, and the dash used as one
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u3000\n\u2028\u2029\t~", " ")
    | dict.fromkeys("\u2018\u2019", "'")
    | dict.fromkeys("\u201c\u201d", '"')
    | {"\uff05": "%", "\uff1a": ":", "\uff0c": ",", "\u200b": "", "\ufeff": ""}
)
_ADORNED = re.compile(rf"[{DECORATION}]|\s[:;]-?\)")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b\u207f]+")
_VULGAR = re.compile("\\s?([\u00bc-\u00be\u2150-\u215e])")
_LATEX: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\s*\\(?:times|cdot)(?![A-Za-z])\s*", " × "),
        (
            r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|[mh]box|boldsymbol|bm|emph|underline"
            r"|(?:text)?color\s*\{[^{}]*\})\s*\{([^{}]*)\}",
            r"\1",
        ),
        (r"\\\\\s*$", ""),
        (r"\{\s*\\?\$\s*\}", r"\\$"),
        (r"\\[()[\]]", ""),
        (r"(?<![\\$])\$\$?((?:[^$\\]|\\.)+)\$\$?(?![0-9$])", r"\1"),  # not "$5 or $6"
        (r"\\!\s*|\\(?:left|right|displaystyle|bf|rm|it|sf|tt|large)(?![A-Za-z])", ""),
        (r"\\[,;: ]|\\q?quad(?![A-Za-z])", " "),
        (r"\{\s*,\s*\}", ","),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"(?<=[0-9])\s*\^\s*\{\s*(th|st|nd|rd)\s*\}", r"\1"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\\([$%#&_])", r"\1"),
    )
)
_STARS = re.compile(r"\*\*(?=[\s.,:;)]|$)")


def plain(text: str) -> str:
    r"""Return a text without markup: `\(\text{12{,}000 cm}\)` is 12,000 cm."""
    text = _ADORNED.sub("", spelled(text).translate(_CHARACTERS))
    if "\\" in text or "$" in text or "{" in text:
        for pattern, to in _LATEX[:2] * 2 + _LATEX:  # styles may nest
            text = pattern.sub(to, text)
    text = _STARS.sub("", text).strip(" *_`\"'")
    return " ".join(text.rstrip(".,;").split())


def spelled(text: str) -> str:
    """Return a text with superscripts and fraction characters spelled out: 12² is 12^{2}, 4¼ is 4 1/4."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda raised: f"^{{{_compatible(raised[0])}}}", text)
    return _VULGAR.sub(lambda fraction: f" {_compatible(fraction[1])}", text)


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\u2044", "/")
