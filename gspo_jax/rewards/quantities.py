"""Numbers as people write them, with signs, currencies, scales, units and explanations."""

import re
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from gspo_jax.rewards.notation import MAX_CHARACTERS, plain

_PLAIN = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
MONEY = "$£¥฿\u20a0-\u20c0"
"""Currency signs, for a regex character class."""
CURRENCY = rf"(?:US|CA|AU|NZ|HK|[ACRS])?\$|[{MONEY}]|Rs\b\.?|(?:USD|EUR|GBP|INR)\b"
_POWERS = {"thousandth": -3, "hundredth": -2, "tenth": -1, "tens": 1, "hundred": 2, "thousand": 3, "lakh": 5}
_POWERS |= {"millionth": -6, "million": 6, "crore": 7, "milliard": 9, "billion": 9, "trillion": 12}
_POWERS |= {"quadrillion": 15, "quintillion": 18}
_POWERS |= {"k": 3, "grand": 3, "m": 6, "mn": 6, "mil": 6, "mio": 6, "mln": 6, "b": 9, "bn": 9, "bil": 9, "mrd": 9}
_POWERS |= {"t": 12, "tn": 12, "百": 2, "백": 2, "千": 3, "천": 3, "万": 4, "萬": 4, "만": 4, "亿": 8, "億": 8, "억": 8}
SCALE_WORDS = (
    r"(?i:(?:hundred|thousand|lakh|crore|(?:m|b|tr|quadr|quint)illion|milliard|mln|mio|bil|mrd"
    r"|tenth|(?:hundred|thousand|million)th|dozen)s?|tens)"
)
SHORT_SCALES = r"(?:[kKMBT]|mn|mil|bn|tn)"
_NUMBER = re.compile(
    # x = | about
    r"(?:(?P<name>[A-Za-z](?:_\{?\w{1,9}\}?)?)\s*=\s*)?"
    r"(?:[A-Za-z]?\s*(?:≈|\\approx)\s*|(?i:about|approximately|roughly)\s+)?"
    # -$1,234.50 | +5 | 12 000 | 1'000 | 1,00,000 | .5
    rf"(?P<cost>{CURRENCY})?\s*(?P<sign>[-+]|(?i:negative|minus)\s)?\s*(?P<price>{CURRENCY})?\s*"
    r"(?P<whole>[1-9][0-9]{0,2}(?:(?P<gap>[, '’_])[0-9]{3})(?:(?P=gap)[0-9]{3})*(?![0-9])"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?![0-9.])|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9])|[0-9]*)"
    r"(?P<part>\.[0-9]*)?"
    # × 10^3 | e3
    r"(?:\s*[×*·]\s*10\s*\^\s*\{?\s*(?P<power>[-+]?[0-9]{1,2})\s*\}?|[eE](?P<exponent>[-+]?[0-9]{1,2})(?![\w.]))?"
    r"(?P<half>\s+and\s+(?:a|one)[\s-]half\b|(?<=[0-9])\s+(?:and\s+)?1/2(?![0-9/]))?"
    # million | $ million | 万
    rf"(?:\s*[{MONEY}](?=\s*{SCALE_WORDS}))?"
    rf"(?P<scales>(?:(?:[\s-]*{SCALE_WORDS}|\s?{SHORT_SCALES}|\s+grand(?=\s*$))(?![^\W_])"
    r"|\s*(?:[万萬만亿億억]|[百백千천](?![米克瓦])))*)"
    r"(?:\s*(?P<percent>%|(?i:per\s?cent(?:age)?(?:\spoints?)?|pct)\b))?(?P<rest>.*)"
)
_SCALE = re.compile(r"[A-Za-z]+|[^\W\d_]")
_SCALE_APART = re.compile(rf"\s*[(,]\s*({SCALE_WORDS})(?![^\W_])\)?")  # 5 (million)
_CENTS = re.compile(  # $5 and 20 cents
    rf"(?=\D{{0,4}}[{MONEY}]|.*\b(?:dollar|euro|pound))(\S*[0-9])(?:\s+(?:dollars?|euros?|pounds?))?,?\s+(?:and\s+)?"
    r"([0-9]{1,2})(?:\s*(?:cents?|pence)|\s*¢)"
)
_UNIT = re.compile(  # apples per day | km/h | m^2
    rf"(?:[ /·×.'’\"-]++|[^\W\d_]++(?:\^\{{?-?[1-3]\}}?)?+|[°¢{MONEY}]++)*+"
)
_NO_UNIT = re.compile(
    # 5x | 5/n | 5 pi | 5 times 3
    rf"[\s/·×{MONEY}-]*(?:(?:[b-fijknopqrt-zBDEGHIKMO-UX-Zπ]|pi|or|and|to|plus|minus|times\s+\S|over|squared|cubed|half"
    r"|halves|sin|cos|tan|log|ln|exp|sqrt|mod|remainder)(?![^\W\d_])|a\s*$"
    # billions, thirds, 5 Millionen
    rf"|{SCALE_WORDS}(?![^\W\d_])|grand\s*$|(?i:ten-|[a-z]*illion|mill[oó]n|тыс|млн|млрд)"
    r"|(?:third|four?th|fifth|sixth|seventh|eighth|ninth|eleventh|twelfth|[a-z]+(?:teen|tie)th)s\b"
    r"|quarters?\s+of\s+(?:an?|the)\b)"
    # 5ab
    r"|(?!cm|[kmn]m|[km]g|[mcdk][lL]|ft|in|lb|oz|[hy]r|mi|yd|[ap]m|Hz|[kMm]W|k[JNV]|m[AVs]|[kKMGT][bB]|ns|Pa|ha|cc|sq"
    r"|th|st|[nr]d)[^\W\d_]{2}(?![^\W\d_])"
)
"""Text that is no unit, usually variables."""
HEDGES = r"(?:or|and|also|plus|then|maybe|perhaps|possibly|alternatively|otherwise|else|as\s+well)\b"
"""Words before a second answer."""
REASONS = (
    r"(?:because|since|(?<!well )as(?!\s+well)|which|where|so|but|(?:and\s+)?not|that|i\.e|namely|due\s+to"
    r"|rather\s+than|instead\s+of)\b"
)
"""Words before an explanation, or before what the answer is not."""
_CALCULATION = r"[0-9.]+\s*(?:times|plus|minus|[*×+])\s*[0-9]"
TAIL = re.compile(  # since 3*4 = 12 | , not 13 | (apples)
    rf"\s*(?:\.(?![0-9])|[,;]\s*(?:$|(?!{HEDGES})(?=[A-Za-z]{{2}}|i\.e\b))|(?:[:;(]|—|--)\s*(?={_CALCULATION})"
    rf"|[(\[](?={REASONS}|rounded|(?!{HEDGES})[^][()0-9]*[])][\s.]*$)|\b(?:{REASONS}|out\s+of\b))"
)
"""Beginning of text after a number that does not count."""
_LEAD = re.compile(
    r"(?:(?!(?:sqrt|pi|sin|cos|tan|log|ln|exp)\b)[A-Za-z'’]{2,}|[\s,:;\"*=]|\.(?![0-9])|\b[aAI](?=\s+[A-Za-z]))*+"
)
_CHANGED = re.compile(  # more than | half of
    r"(?i:\b(?:than|over|under|above|below|least|most|twice|double|triple|negative|minus|plus|between|from|up\s+to|exceeds?"
    r"|except|(?:half|thirds?|quarters?|fourths?|fifths?|tenths?|percent|square|cube|root|multiple|power)(?:\s+of)?)"
    r"|(?:\b(?:not|never|cannot)|n['’]t)(?:\s+\w+){0,3})\W*\Z"
)
_FORMULA = re.compile(
    r"(?:\\[A-Za-z]+|(?:sqrt|pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[^A-Za-z\\]|\\.)++"
)
_VARIABLE = re.compile(r"[A-Za-z](?:\s*[-+*/^×]\s|[-+*/^×])")  # xy + 1
_UNSURE = re.compile(r".*(?:→|->|[0-9]\s*[|&]\s*[0-9]|\([^()]*\Z)")
_REASONED = re.compile(rf"\W*{REASONS}")
_TWO_EQUATIONS = re.compile(r"=[^=]*(?:[,;]|\band\b|\bor\b)[^=]*=")


class Number(NamedTuple):
    """A number as it was written."""

    value: Decimal
    """Value without its percent sign: 50 of 50%."""
    percent: bool
    name: str = ""


def number(text: str) -> Number | None:
    """Return the number that a text is, or None. Currency, scale (million, k, bn), unit and explanation may surround
    it.
    """
    return _number(text) if len(text) <= MAX_CHARACTERS else None


def stated(text: str) -> str | None:
    """Return the one number, with its unit, or the one formula that a sentence states, else None.

    "Tom has 12 apples" states 12 apples, and "so 3 pens cost 3 * 4 = 12" states 12. "1 hour 30 minutes" and "12, Ann
    13" state two, and "more than 12" changes the number.
    """
    text = plain(text)
    said = _stated(text)
    if said is None and "=" in text and not _TWO_EQUATIONS.search(text):
        said = _stated(text.rpartition("=")[2])
    return said


def _stated(text: str) -> str | None:
    lead = _LEAD.match(text)
    assert lead is not None  # may be empty
    said = text[lead.end() :]
    if _CHANGED.search(lead[0]) or _VARIABLE.match(text, max(0, len(lead[0].rstrip()) - 1)):
        return None
    if tail := TAIL.search(said):
        if re.search(r"\d", said[tail.start() :]) and not _REASONED.match(said, tail.start()):
            return None
        said = said[: tail.start()]
    if number(said) is not None:
        return said
    formula = _FORMULA.match(said)
    if formula is None or _UNSURE.match(formula[0]):
        return None
    unit = said[len(formula[0].rstrip()) :]
    return formula[0].strip() if _is_unit(unit) else None


def _is_unit(text: str) -> bool:
    return not _NO_UNIT.match(text) and _UNIT.fullmatch(text) is not None


@lru_cache(maxsize=1 << 12)  # a group's answers are often alike
def _number(text: str) -> Number | None:
    if _PLAIN.fullmatch(text):
        return Number(Decimal(text), percent=False)
    text = _SCALE_APART.sub(r" \1", plain(text))
    if cents := _CENTS.fullmatch(text):
        text = f"{cents[1]}.{cents[2]:0>2}"
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
    tail = TAIL.search(rest)
    unit = rest if tail is None else rest[: tail.start()]
    if not _is_unit(unit):
        return None
    sign = "-" if (found["sign"] or "+") != "+" else ""
    value = Decimal(f"{sign}{digits}e{power}")  # exact, unlike arithmetic
    return Number(value * dozens if dozens > 1 else value, found["percent"] is not None, found["name"] or "")
