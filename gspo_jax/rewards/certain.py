r"""Certain verdicts of isolated reward functions, without calling them: (prompt, completion, record) -> score or None.

Most answers are a plain number after `####` or in `\boxed{}`, and so is the reference. What math-verify reads in such a
completion follows from its rules of extraction, and comparing two numbers takes microseconds where its parsers take
milliseconds. Where a function here is not certain, it returns None, and a worker calls the reward function itself. It
runs in the trainer's process, so it must be linear in the completion's length.
"""

import re
from collections.abc import Callable
from decimal import Decimal

from gspo_jax.rewards.functions import BOX_START, Record, boxed_content

_NUMBER = r"-?(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,2}|0|[1-9][0-9]{0,8})(?:\.[0-9]{1,4})?"  # 12 | -7 | 1,234 | 12.50
_PLAIN_NUMBER = re.compile(_NUMBER)
_AFTER_MARK = re.compile(  # #### $12 per day.
    rf"\s++\$?({_NUMBER})\.?(?:\s++(?!percent|pct|Percent|Pct)[A-Za-z][A-Za-z.\s]*+|\s*+)"
)
_PLAIN_TEXT = re.compile(
    r"(?:[A-Za-z0-9 +\-*/=.,()]|\\(?:[dt]?frac|text|sqrt|pi)(?![A-Za-z])|\{(?=[A-Za-z0-9])|\}){1,60}"
)
"""References that math-verify reads between dollar signs as it does in a box, and soon: they have no powers."""
_NOT_PLAIN = re.compile(r"[0-9]{10}|(?i:answer)")
_ANSWER = re.compile(r"(?i:answer)")  # of math-verify's patterns; `re` and `str.lower` differ in what they call equal
_ANNOUNCED = re.compile(r"(?i:answer)(?: is|:)")
_FINAL_ANSWER_IS = re.compile(r"(?is:final answer.{0,100}?\s+is)")
_PERCENT = re.compile(r"%|[Pp]ercent|[Pp]ct")
_NUMBER_OR_MATH = re.compile(r"[\d$\[(]|\\boxed")


def announced(completion: str) -> str | None:
    r"""Return a completion from the last `####`, `\boxed{`, "answer is" or "answer:" on; None if it has none."""
    start = max(completion.rfind("####"), completion.rfind(BOX_START))
    for found in _ANNOUNCED.finditer(completion, max(start, 0)):
        start = found.start()
    return None if start < 0 else completion[start:]


def math_verify(prompt: str, completion: str, record: Record) -> float | None:
    """Score as `math_verify_flexible` does if an answer is announced, and 0 if none is."""
    answer = announced(completion)
    return 0.0 if answer is None else math_verify_flexible(prompt, answer, record)


def math_verify_flexible(prompt: str, completion: str, record: Record) -> float | None:
    r"""Score 1 if the final answer surely equals record["answer"] to math-verify, 0 if it surely does not, else None.

    Certain are a number or a text in the only `\boxed{}`; a number after the last `####` with nothing but its unit
    behind it; and the lack of anything that could be an answer. Numbers are compared as such, with up to 9 digits and
    4 decimals, texts only for being the same.
    """
    del prompt
    wanted = record.get("answer", "").strip()
    if not _PLAIN_NUMBER.fullmatch(wanted):
        same = _PLAIN_TEXT.fullmatch(wanted) and not _NOT_PLAIN.search(wanted) and wanted == _only_box(completion)
        return 1.0 if same else None
    if _NUMBER_OR_MATH.search(completion) is None:
        return 0.0
    got = _only_box(completion) if "\\boxed" in completion else _number_after_mark(completion)
    if got is None or not _PLAIN_NUMBER.fullmatch(got):
        return None
    return float(_value(got) == _value(wanted))


DECIDERS: dict[str, Callable[[str, str, Record], float | None]] = {
    f"gspo_jax.rewards.isolated:{decide.__name__}": decide for decide in (math_verify, math_verify_flexible)
}
"""By the reference of a reward function: what decides before it is called."""


def _only_box(completion: str) -> str | None:
    r"""Return the text that math-verify reads in the completion's only box; None if that is not certain.

    A box comes before all but an answer announced by "final answer … is". Whatever dollar signs or brackets are around
    the box, its content alone is read; a percent sign after them would count.
    """
    start = completion.find("\\boxed")
    if start < 0 or completion.find("\\boxed", start + 1) >= 0 or not completion.startswith(BOX_START, start):
        return None
    content = boxed_content(completion, start + len(BOX_START))
    if content is None or "\\fbox" in completion or _FINAL_ANSWER_IS.search(completion):
        return None
    return None if _PERCENT.search(completion, start) else content.strip()


def _number_after_mark(completion: str) -> str | None:
    """The number after the last `####`, if only words follow it and no box or "answer" comes before it in rank.

    Of the numbers and formulas in the text, math-verify takes the one that ends last, and none reaches across `#`.
    """
    mark = completion.rfind("####")
    found = _AFTER_MARK.fullmatch(completion, mark + 4) if mark >= 0 else None
    return None if found is None or _ANSWER.search(completion) else found[1]


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
