r"""Final answers as a person reads them: where a response announces one, the number in it, and whether it is the same.

All math rewards read answers here, so that they agree on what was announced and on what is a number. Everything is
linear in the response's length.
"""

import collections
import re
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from gspo_jax.thoughts import answer_part

MAX_CHARACTERS = 200
"""Maximum characters of a final answer, or of a number in a step. Longer ones score 0: every function stays linear."""
_MAX_ANNOUNCEMENTS = 64
"""Announcements that are read, counted from the end of a response; in earlier ones there is no answer."""

BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?:\[[^][]{0,20}\])?\s{0,9}\{")
r"""What opens a box: `\boxed{`, `\boxed {`, `\fbox{`, `\framebox[w]{`."""
_SIGNS = "####", "box", "nswer", "NSWER"
"""Texts of which every announcement has one."""
_BEFORE_SIGN = 6
"""Characters before a sign in which an announcement begins, as a rule."""
_ANSWER = r"(?:[Aa]nswer|ANSWER)(?:s|S)?"
_OTHER_WORDS = r"(?:[ \t]+(?!(?:is|are|equals|would|should|will|must)\b)[^\s.:=\\#<]{1,20}+){0,8}+"
_ADVERBS = (
    r"as follows|given by|equal to|therefore|thus|then|simply|exactly|indeed|just|only|also|still|clearly|obviously"
    r"|of course|in fact|certainly|definitely|surely|probably|(?:most )?likely"
)
_ANNOUNCEMENT = re.compile(
    # #### | #### Final Answer, a heading
    rf"(?P<mark>(?<!#)#{{4,}}+(?:[ \t*_]*(?i:the\s+)?(?i:final\s+)?{_ANSWER}[ \t*_:]*(?=\n))?)"
    rf"|(?P<box>{BOX.pattern})|(?P<tag><answer>)"
    # answer: | **Answer**: | "answer": | the answer is | answers are | the answer to part (a) would be
    rf"|(?<![A-Za-z0-9]){_ANSWER}(?:[ \t]+(?:to|of|for|in|choice|option)\b{_OTHER_WORDS})?(?:[ \t]*\([^()\n]{{0,40}}\)|,[ \t]\w{{1,12}},)?[*_\"]*"
    r"[ \t]*(?:[:：=]|(?:is|are|equals|(?:would|should|will|must)[ \t]+be)(?![\w'’])"
    rf"(?:,?[ \t]+(?:{_ADVERBS})\b,?)*)"
    rf"|^[ \t#*_]*(?i:the[ \t]+)?(?i:final[ \t]+)?{_ANSWER}[ \t*_]*$",  # a heading
    re.MULTILINE,
)
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
    for last in _ANNOUNCEMENT.finditer(text, max(text.rfind("\n", 0, sign) + 1, sign - _BEFORE_SIGN)):
        pass
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
    """What stands behind an announcement."""

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
    said = said.strip(" \t*_`\"" if "{" in said else " \t*_`\"}")  # {"answer": "12"}
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
            if found is None or len(gap) > _MAX_BETWEEN_BOXES or not _BETWEEN_BOXES.fullmatch(
                _NOTHING_BETWEEN.sub("", gap)
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


class Number(NamedTuple):
    """A number as it was written."""

    value: Decimal
    """What stands before a percent sign, if there is one."""
    percent: bool
    name: str = ""
    """The variable that it is the value of, as in x = 5."""


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
        (r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|[mh]box|boldsymbol|bm|emph)\s*\{([^{}]*)\}", r"\1"),
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
_CURRENCY = r"(?:US|CA|AU|NZ|HK|[ACRS])?\$|[€£¥₹₩₽]|Rs\b\.?|(?:USD|EUR|GBP|INR)\b"
_POWERS = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12}
_POWERS |= {"k": 3, "m": 6, "mn": 6, "mil": 6, "b": 9, "bn": 9, "t": 12, "tn": 12}
_POWERS |= {"tenth": -1, "hundredth": -2, "thousandth": -3, "millionth": -6}
_SCALE_WORDS = r"(?i:hundred|thousand|lakh|million|crore|billion|trillion|tenth|(?:hundred|thousand|million)th|dozen)s?"
_NUMBER = re.compile(
    # x = | about
    r"(?:(?P<name>[A-Za-z](?:_\{?\w{1,9}\}?)?)\s*=\s*)?(?:[A-Za-z]?\s*(?:≈|\\approx)\s*|(?i:about|approximately|roughly)\s+)?"
    # -$1,234.50 | +5 | 12 000 | 1'000 | 1.000.000 | 1,00,000 | .5
    rf"(?P<cost>{_CURRENCY})?\s*(?P<sign>[-+]?)\s*(?P<price>{_CURRENCY})?\s*"
    r"(?P<whole>[1-9][0-9]{0,2}(?:(?P<gap>[, '’])[0-9]{3})(?:(?P=gap)[0-9]{3})*(?![0-9])"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?![0-9.])|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9])|[0-9]*)(?P<part>\.[0-9]*)?"
    # × 10^3 | e3
    r"(?:\s*[×*·]\s*10\s*\^\s*\{?\s*(?P<power>[-+]?[0-9]{1,2})\s*\}?|[eE](?P<exponent>[-+]?[0-9]{1,2})(?![\w.]))?"
    r"(?P<half>\s+and\s+(?:a|one)[\s-]half\b|\s*½)?"
    rf"(?P<scales>(?:(?:[\s-]*{_SCALE_WORDS}|\s?(?:[kKMBT]|mn|mil|bn|tn))(?![^\W_]))*)"
    r"(?:\s*(?P<percent>%|(?i:per\s?cent(?:age)?(?:\spoints?)?|pct)\b))?(?P<rest>.*)"
)
_SCALE = re.compile(r"[A-Za-z]+")
_SCALE_APART = re.compile(rf"\s*[(,]\s*({_SCALE_WORDS})(?![^\W_])\)?")  # 5 (million)
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
    r"\s*(?:\.(?![0-9])|[,;]\s*(?:$|(?!(?:or|and)\b)(?=[A-Za-z]{2}))|\((?=[^()0-9]*\)[\s.]*$|since|because|as\b|rounded)"
    r"|\b(?:because|since|as|which|where|so|when|if|but|not|that)\b)"
)
_CHOICE = re.compile(  # C | (C) | C. | c) 12 apples | Option C: 12 apples
    r"(?:(?i:option|choice)\s+)?(?:[(\[]\s*([A-Ja-j])\s*[)\]]|([A-Ja-j])(?=[).:]|\s*$|\s+[-–(]|,?\s+(?:because|since)\b)).*"
)
_SPACES = re.compile(r"\s*([^\w\s])\s*")
_NAME = re.compile(r"[^\W\d_]{2,}(?:[ ,.'’-]+[^\W\d_]+)*")


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
    tail, reference = _TAIL.search(answer), _SPACES.sub(r"\1", reference)
    for said in (answer, answer[: tail.start()] if tail else answer):
        said = _SPACES.sub(r"\1", said)
        if said and (said == reference or (_NAME.fullmatch(said) and said.casefold() == reference.casefold())):
            return True
    return None


def canonical(answer: str) -> str:
    """Return a text that is the same for answers that `same` finds to be so."""
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


_DIGITS = r"(?<![0-9.,\\])[0-9]++(?:,[0-9]{3})*+(?:\.[0-9]++)?+"
_IN_TEXT = re.compile(  # 5 million | $5k | sold 5k, but not the variable of 2 + 5k
    rf"(?:{_CURRENCY})?{_DIGITS}(?:[\s~-]|\\[,;: ])*+(?:\\text\{{\s*)?{_SCALE_WORDS}(?![^\W_])\}}?"
    rf"|(?:{_CURRENCY}|(?<=[A-Za-z]{{2}}\s)){_DIGITS}(?:[kKMB]|bn|mn)(?![\w-])(?!\s*[+*/=^<>\\$)}}])"
)
_GROUPS = re.compile(r"(?<=[0-9])(?:\\[,!;: ]|~|[\u00a0\u2009\u202f]|\{,\}|,\\!)++(?=[0-9]{3}(?![0-9]))")
_ESCAPED_DOLLAR = re.compile(r"\\\$\s*")
_DECIMAL_COMMA = re.compile(r"-?[0-9]+,[0-9]+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_PROSE = re.compile(r"(?<![A-Za-z])(?!(?:and|or|sqrt|pi|sin|cos|tan|log|ln|exp|infinity|inf)\b)[A-Za-z]{2,}|\\[([]|(?<!\\)\$")


_NO_PRICE = re.compile(r"\$(?![0-9])")
_UNICODE = (
    str.maketrans({"²": "^2", "³": "^3", "∞": "\\infty ", "π": "\\pi ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne "})
    | str.maketrans({"×": "\\times ", "·": "\\cdot ", "÷": "\\div "})
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))")
_MIXED = re.compile(r"(?<![0-9.,/^])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9])")


def for_parser(text: str) -> str:
    """Return a text whose numbers math-verify reads as a person does: without currency, in plain digits."""
    text = _GROUPS.sub("", _ESCAPED_DOLLAR.sub("", text).replace("\u2212", "-"))
    return _IN_TEXT.sub(_written_out, text)


def formula_for_parser(text: str) -> str:
    """Return `for_parser` of an answer or a reference, in which prices are no formulas and signs of Unicode are LaTeX."""
    text = for_parser(text)
    if not _NO_PRICE.search(text):
        text = text.replace("$", "")
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text.translate(_UNICODE))
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)


def is_formula(text: str) -> bool:
    """Return whether a text is a formula without delimiters, as `2\\sqrt{3}` or "x + 1", and has no other words."""
    return _PROSE.search(_COMMAND.sub(" ", text)) is None and not _DECIMAL_COMMA.fullmatch(text)


def written(number: Number) -> str:
    """Return a number in plain digits, in LaTeX."""
    name = f"{number.name} = " if number.name else ""
    return f"{name}{number.value:f}" + ("\\%" if number.percent else "")


def _written_out(found: re.Match[str]) -> str:
    value = number(found[0])
    return found[0] if value is None else written(value)
