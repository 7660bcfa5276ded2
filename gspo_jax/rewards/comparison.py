"""Comparison of answers with references by their notation: numbers, choices and texts.

Mathematical equality, such as 1/2 and 0.5, is left to math-verify (isolated.py).
"""

import re

from gspo_jax.rewards.notation import plain
from gspo_jax.rewards.quantities import HEDGES, REASONS, TAIL, number

_CHOICE = re.compile(r"(?:(?i:option|choice)\s+)?(?:[(\[]\s*([A-Ja-j])(?=\s*[)\]])|([A-Ja-j]))(.*)")
_ITS_TEXT = re.compile(r"\s*(?:$|[)\].:]{1,2}(?=\s*$|\s+(?!or\b)[^\s+*/^=<>]))")
"""After a choice's letter: nothing or its text, as in "C) twelve" and "(C) twelve"."""
_ITS_REMARK = re.compile(
    rf"{_ITS_TEXT.pattern}|\s*[)\]]?(?:\s*[,;—]\s*\S|\s+-+\s*[A-Za-z]{{2}}|\s+\([^()]*\)\s*$"
    rf"|\s+(?:{REASONS}|for\b|with\b|is\s+(?:the\s+)?(?:correct|right)\b))"
)
"""The same, or a remark: "C, which is twelve", "C because …"."""
_ANOTHER_CHOICE = re.compile(  # or D | /D
    rf"\s*[)\]]?(?:\s*(?:[,;/&|+]|\(?{HEDGES}|both\b|option\b|choice\b))++\s*[(\[]?"
    r"(?!i\.e)(?:[A-HJ](?![\w'’])|[A-Ja-j](?=\s*(?:$|[)\].,;/&]|(?:and|or)\b)))"
)
BOUND = re.compile(r"[<>≤≥]|\\(?:[lg](?:e|eq|t|eqslant)|leqslant|geqslant)(?![A-Za-z])")
r"""Beginning of a bound: > 5 | \le 5."""
_SPACES = re.compile(r"\s*([^\w\s])\s*")
_NAME = re.compile(r"[^\W\d_]{2,}(?:[ ,.'’-]+[^\W\d_]+)*")


def same(answer: str, reference: str) -> bool | None:
    """Return True if the two are written alike, False if they surely differ, None if mathematics must decide.

    Numbers compare by value: 1,234.0 is 1234, 5k is 5000, and units do not count. A percent sign on only one may mean
    its hundredth: 50% is 50, and 0.5. Choices compare by letter: C, (C), "C) twelve" and "C, not D". Bounds such as > 5
    are not numbers. Other texts must be equal, names in any case.
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
    if wanted is not None and BOUND.match(answer):
        return False
    chosen, right = _choice(answer, _ITS_REMARK), _choice(reference, _ITS_TEXT)
    if chosen and right:
        return chosen == right
    if _SPACES.sub(r"\1", answer) == _SPACES.sub(r"\1", reference) != "":
        return True
    tail = TAIL.search(answer)
    for said in (answer, answer[: tail.start()] if tail else ""):
        if _NAME.fullmatch(said) and said.casefold() == reference.casefold():
            return True
    return None


def canonical(answer: str) -> str:
    """Return an answer's number, choice or text in canonical form."""
    value = number(answer)
    if value is not None:
        return f"{value.value.normalize():f}"
    answer = plain(answer)
    return _choice(answer, _ITS_REMARK) or answer.casefold()


def _choice(text: str, behind: re.Pattern[str]) -> str:
    found = _CHOICE.fullmatch(text)
    if found is None or not behind.match(found[3]) or _ANOTHER_CHOICE.match(found[3]):
        return ""
    return (found[1] or found[2]).upper()
