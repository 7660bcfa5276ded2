r"""Whether an answer and its reference are the same, by how they are written: numbers, choices and texts.

What takes mathematics, such as 1/2 and 0.5, is left to math-verify (isolated.py).
"""

import re
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from gspo_jax.rewards.answers import MAX_CHARACTERS

_PLAIN = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-")  # minus signs and the dash that stands for one
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u3000\n\t~", " ")
    | dict.fromkeys("\u2018\u2019", "'")
    | dict.fromkeys("\u201c\u201d", '"')
    | {"\uff05": "%", "\uff1a": ":", "\uff0c": ",", "\u200b": "", "\ufeff": ""}
)
_LATEX: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|[mh]box|boldsymbol|bm|emph)\s*\{([^{}]*)\}",
            r"\1",
        ),
        (r"\\[()[\]]", ""),
        (r"(?<![\\$])\$\$?([^$]*[^$\\])\$\$?(?![0-9$])", r"\1"),  # $65$, but not the dollars of "$5 or $6"
        (r"\\!|\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"\\[,;: ]|\\q?quad(?![A-Za-z])", " "),
        (r"\{\s*,\s*\}", ","),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\s*\\(?:times|cdot)(?![A-Za-z])\s*", " × "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\\([$%#&_])", r"\1"),
    )
)
_STARS = re.compile(r"\*\*(?=[\s.,:;)]|$)")
CURRENCY = r"(?:US|CA|AU|NZ|HK|[ACRS])?\$|[€£¥₹₩₽]|Rs\b\.?|(?:USD|EUR|GBP|INR)\b"
_POWERS = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12}
_POWERS |= {"k": 3, "m": 6, "mn": 6, "mil": 6, "b": 9, "bn": 9, "t": 12, "tn": 12}
_POWERS |= {"tenth": -1, "hundredth": -2, "thousandth": -3, "millionth": -6}
SCALE_WORDS = r"(?i:hundred|thousand|lakh|million|crore|billion|trillion|tenth|(?:hundred|thousand|million)th|dozen)s?"
_NUMBER = re.compile(
    # x = | about
    r"(?:(?P<name>[A-Za-z](?:_\{?\w{1,9}\}?)?)\s*=\s*)?"
    r"(?:[A-Za-z]?\s*(?:≈|\\approx)\s*|(?i:about|approximately|roughly)\s+)?"
    # -$1,234.50 | +5 | 12 000 | 1'000 | 1.000.000 | 1,00,000 | .5
    rf"(?P<cost>{CURRENCY})?\s*(?P<sign>[-+]?)\s*(?P<price>{CURRENCY})?\s*"
    r"(?P<whole>[1-9][0-9]{0,2}(?:(?P<gap>[, '’])[0-9]{3})(?:(?P=gap)[0-9]{3})*(?![0-9])"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?![0-9.])|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9])|[0-9]*)"
    r"(?P<part>\.[0-9]*)?"
    # × 10^3 | e3
    r"(?:\s*[×*·]\s*10\s*\^\s*\{?\s*(?P<power>[-+]?[0-9]{1,2})\s*\}?|[eE](?P<exponent>[-+]?[0-9]{1,2})(?![\w.]))?"
    r"(?P<half>\s+and\s+(?:a|one)[\s-]half\b|\s*½)?"
    rf"(?P<scales>(?:(?:[\s-]*{SCALE_WORDS}|\s?(?:[kKMBT]|mn|mil|bn|tn))(?![^\W_]))*)"
    r"(?:\s*(?P<percent>%|(?i:per\s?cent(?:age)?(?:\spoints?)?|pct)\b))?(?P<rest>.*)"
)
_SCALE = re.compile(r"[A-Za-z]+")
_SCALE_APART = re.compile(rf"\s*[(,]\s*({SCALE_WORDS})(?![^\W_])\)?")  # 5 (million)
_UNIT = re.compile(  # apples per day | km/h | m^2 | °C | $
    r"(?:[ /·.'’\"-]++|[^\W\d_]++(?:\^\{?-?[1-3]\}?|[²³])?+|[°€£¥₹¢$]++)*+"
)
_NO_UNIT = re.compile(  # 5x | 5/n | 5 pi | 5 and | 5ab
    r"[\s/·-]*(?:(?:[b-fijknopqrt-zBDEGHIKMO-UX-Zπ]|pi|or|and|to|plus|minus|times|over|squared|cubed|half|halves|sin|cos"
    r"|tan|log|ln|exp|sqrt|mod)(?![^\W\d_])|a\s*$)"
    r"|(?!cm|[kmn]m|[km]g|[mcdk][lL]|ft|in|lb|oz|[hy]r|mi|yd|[ap]m|Hz|[kMm]W|k[JNV]|m[AVs]|[kKMGT]B|ns|Pa|ha|cc|sq"
    r"|th|st|[nr]d)[^\W\d_]{2}(?![^\W\d_])"
)
"""What is no unit behind a number: letters that are variables more often, and two letters right behind its digits."""
_TAIL = re.compile(  # since 3*4 = 12 | , not 13 | (apples)
    r"\s*(?:\.(?![0-9])|[,;]\s*(?:$|(?!(?:or|and)\b)(?=[A-Za-z]{2}))"
    r"|\((?=[^()0-9]*\)[\s.]*$|since|because|as\b|rounded)|\b(?:because|since|as|which|where|so|but|not|that)\b)"
)
_CHOICE = re.compile(  # C | (C) | C. | c) 12 apples | Option C: 12 apples | C because
    r"(?:(?i:option|choice)\s+)?(?:[(\[]\s*([A-Ja-j])\s*[)\]](?=\s*$|[.:]|\s+[A-Za-z]{2}|\s+[0-9$\\])"
    r"|([A-Ja-j])(?=\s*$|[).:](?:\s|$)|\s+[-(]\s*[A-Za-z]{2}|,?\s+(?:because|since)\b)).*"
)
_SPACES = re.compile(r"\s*([^\w\s])\s*")
_NAME = re.compile(r"[^\W\d_]{2,}(?:[ ,.'’-]+[^\W\d_]+)*")


class Number(NamedTuple):
    """A number as it was written."""

    value: Decimal
    """What stands before a percent sign, if there is one."""
    percent: bool
    name: str = ""
    """The variable that it is the value of, as in x = 5."""


def same(answer: str, reference: str) -> bool | None:
    """Return whether an answer is the same as the reference, by how both are written; None if mathematics has to say.

    Numbers are the same if their values are: 1,234.0 is 1234, 5k is 5000, and units do not count. If one of them alone
    has a percent sign, it may stand for its hundredth: 50% is 50, and 0.5. Choices are the same by their letters: C,
    (C) and "C) twelve". Otherwise only equal texts are the same, names in any case.
    """
    if answer == reference:
        return True
    got, wanted = number(answer), number(reference)
    if got is not None and wanted is not None and (got.name == wanted.name or not (got.name and wanted.name)):
        if got.value == wanted.value:
            return True
        share, whole = (got.value, wanted.value) if got.percent else (wanted.value, got.value)
        return got.percent != wanted.percent and share == 100 * whole
    answer, reference = plain(answer), plain(reference)
    chosen, right = _choice(answer), _choice(reference)
    if chosen and right:
        return chosen == right
    if _SPACES.sub(r"\1", answer) == _SPACES.sub(r"\1", reference) != "":
        return True
    tail = _TAIL.search(answer)
    for said in (answer, answer[: tail.start()] if tail else ""):
        if _NAME.fullmatch(said) and said.casefold() == reference.casefold():
            return True
    return None


def canonical(answer: str) -> str:
    """Return the one form of an answer's number, choice or text, in which answers are counted."""
    value = number(answer)
    if value is not None:
        return f"{value.value.normalize():f}"
    answer = plain(answer)
    return _choice(answer) or answer.casefold()


def number(text: str) -> Number | None:
    """Return the number that a text is, with a currency sign, a unit or an explanation; None if it is no number.

    Words such as "million" belong to the number, and so do k, M and bn.
    """
    return _number(text) if len(text) <= MAX_CHARACTERS else None


def plain(text: str) -> str:
    r"""Return a text without the signs that only set it: `\(\text{12{,}000 cm}\)` is 12,000 cm."""
    text = text.translate(_CHARACTERS)
    if "\\" in text or "$" in text or "{" in text:
        for pattern, to in _LATEX[:1] * 2 + _LATEX:  # a style may stand in another
            text = pattern.sub(to, text)
    text = _STARS.sub("", text).strip(" *_`\"'")
    return " ".join(text.rstrip(".,;").split())


def _choice(text: str) -> str:
    """The letter of a choice, "" if a text is none."""
    found = _CHOICE.fullmatch(text)
    return "" if found is None else (found[1] or found[2]).upper()


@lru_cache(maxsize=1 << 12)  # the answers of a group, and its reference, are often alike
def _number(text: str) -> Number | None:
    if _PLAIN.fullmatch(text):
        return Number(Decimal(text), percent=False)
    text = _SCALE_APART.sub(r" \1", plain(text))
    if text[:1] in ("(", "{") and text[-1:] in (")", "}"):
        text = text[1:-1].strip()
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    digits = re.sub(r"[^0-9]", "", found["whole"]) + (found["part"] or "")
    if not digits.strip("."):
        return None
    if found["half"]:
        digits += "5" if "." in digits else ".5"
    rest, costs = found["rest"], found["cost"] or found["price"]
    scales = [word.casefold() for word in _SCALE.findall(found["scales"])]
    if costs and re.match(r"\s?[mbt](?![^\W_])", rest):  # $5m
        scales, rest = [rest.lstrip()[0]], rest.lstrip()[1:]
    power, dozens = int(found["power"] or found["exponent"] or 0), 1
    for word in scales:
        word = word if word in _POWERS else word.removesuffix("s")
        dozens *= 12 if word == "dozen" else 1
        power += _POWERS.get(word, 0)
    tail = _TAIL.search(rest)
    unit = rest if tail is None else rest[: tail.start()]
    if _NO_UNIT.match(unit) or not _UNIT.fullmatch(unit):
        return None
    value = Decimal(f"{found['sign']}{digits}e{power}")  # exact, unlike arithmetic
    return Number(value * dozens if dozens > 1 else value, found["percent"] is not None, found["name"] or "")
