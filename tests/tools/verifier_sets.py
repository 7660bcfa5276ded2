r"""Labelled answers by rule, and how many each math reward judges as labelled: GSM8K's solutions, and pairs in LaTeX.

    python -m tests.tools.verifier_sets gsm8k

The folder has train.jsonl. A solution is judged against its own answer and against another one, announced by `####`, a
box or "The answer is"; a pair is an answer in a box and a reference, of fractions, radicals, sets, intervals, points,
matrices, percentages, units, money, polynomials, equations, powers, complex numbers and words.
"""

import contextlib
import itertools
import random
import re
import sys
from collections.abc import Iterator
from fractions import Fraction

from gspo_jax.data import tasks
from gspo_jax.rewards import functions, isolated

SOLUTIONS = 998
FORMS = ("{worked}\n#### {answer}", "{worked}\nSo it is $\\boxed{{{answer}}}$.", "{worked}\nThe answer is {answer}.")
REWARDS = functions.exact_answer, isolated.math_verify, isolated.math_verify_flexible

Labelled = tuple[str, str, bool]
"""(completion, reference, whether a person calls it right)."""


def solutions(folder: str) -> Iterator[Labelled]:
    """Yield worked solutions, each with its own answer and with a wrong one."""
    records = list(tasks.load("gsm8k", split="train", folder=folder))
    for number, record in enumerate(random.Random(1).sample(records, SOLUTIONS)):
        worked = re.sub(r"<<.*?>>", "", record["worked"].rpartition("####")[0]).strip()
        completion = FORMS[number % len(FORMS)].format(worked=worked, answer=record["answer"])
        yield completion, record["answer"], True
        yield completion, str(int(float(record["answer"])) + 1 + number % 7), False


def pairs() -> Iterator[Labelled]:
    """Yield answers in a box, with references of which some are equal and some are not."""
    for answer, reference, right in itertools.chain(
        _fractions(), _radicals(), _lists(), _matrices(), _numbers(), _algebra(), _words()
    ):
        yield f"It follows that $\\boxed{{{answer}}}$.", reference, right


def _fractions() -> Iterator[Labelled]:
    for p, q in [(1, 2), (3, 4), (5, 8), (7, 3), (11, 6), (2, 9), (13, 20), (9, 16), (22, 7), (1, 12)]:
        reference = rf"\frac{{{p}}}{{{q}}}"
        yield rf"\dfrac{{{p}}}{{{q}}}", reference, True
        yield rf"\tfrac{{{p}}}{{{q}}}", reference, True
        yield f"{p}/{q}", reference, True
        yield reference, f"{p}/{q}", True
        yield rf"\frac{{{3 * p}}}{{{3 * q}}}", reference, True
        yield rf"-\frac{{{p}}}{{{q}}}", rf"\frac{{-{p}}}{{{q}}}", True
        yield rf"-\frac{{{p}}}{{{q}}}", reference, False
        yield rf"\frac{{{q}}}{{{p}}}", reference, False
        yield rf"\frac{{{p + 1}}}{{{q}}}", reference, False
        if 10**4 % q == 0:
            yield f"{float(Fraction(p, q))}", reference, True
            yield reference, f"{float(Fraction(p, q))}", True
        yield f"{p}", reference, False
        if p > q:
            whole, rest = divmod(p, q)
            yield rf"{whole}\frac{{{rest}}}{{{q}}}", reference, True


def _radicals() -> Iterator[Labelled]:
    for a, b in itertools.product((2, 3, 5), (2, 3, 7)):
        reference = rf"{a}\sqrt{{{b}}}"
        yield rf"\sqrt{{{a * a * b}}}", reference, True
        yield rf"{a} \cdot \sqrt{{{b}}}", reference, True
        yield rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}", reference, True
        yield rf"{a}\sqrt{{{b + 3}}}", reference, False
        yield rf"{a + 1}\sqrt{{{b}}}", reference, False
        yield rf"1+{reference}", rf"{reference} + 1", True
        yield rf"{a}\pi", rf"\pi \cdot {a}", True
        yield rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", True
        yield rf"{a}\pi", str(a), False


def _lists() -> Iterator[Labelled]:
    for a, b, c in [(1, 2, 3), (-2, 0, 5), (4, 7, 11), (-9, -3, 10), (2, 12, 20), (6, 8, 15)]:
        yield rf"\{{{c}, {a}, {b}\}}", rf"\{{{a}, {b}, {c}\}}", True
        yield f"{b}, {c}, {a}", f"{a},{b},{c}", True
        yield rf"{a} \text{{ and }} {b}", f"{a}, {b}", True
        yield rf"\{{{a}, {b}\}}", rf"\{{{a}, {b}, {c}\}}", False
        yield rf"\{{{a}, {b}, {c + 1}\}}", rf"\{{{a}, {b}, {c}\}}", False
        yield str(a), f"{a}, {b}", False
        yield f"({a},{c})", f"({a}, {c})", True
        yield rf"\left({a}, {c}\right)", f"({a}, {c})", True
        yield f"({c}, {a})", f"({a}, {c})", False
        yield f"({a}, {b}, {c})", rf"\left({a}, {b}, {c}\right)", True
        yield f"({a}, {c}, {b})", f"({a}, {b}, {c})", False
        yield f"[{a}, {b})", rf"\left[{a}, {b}\right)", True
        yield f"[{a}, {b}]", f"[{a}, {b})", False
        yield rf"(-\infty, {a}]", rf"(-\infty,{a}]", True
        yield rf"(-\infty, {a}]", rf"(-\infty,{a})", False
        yield rf"(-\infty, {a}) \cup ({b}, \infty)", rf"({b},\infty)\cup(-\infty,{a})", True
        yield rf"x \in [{a}, {b}]", f"[{a},{b}]", True


def _matrices() -> Iterator[Labelled]:
    for a, b, c, d in [(1, 2, 3, 4), (0, -1, 1, 0), (5, 7, 9, 11), (-2, 6, 3, 8)]:
        entries = rf"{a} & {b} \\ {c} & {d}"
        reference = rf"\begin{{pmatrix}} {entries} \end{{pmatrix}}"
        yield rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}", reference, True
        yield rf"\begin{{bmatrix}} {entries} \end{{bmatrix}}", reference, True
        yield rf"\begin{{pmatrix}} {a} & {c} \\ {b} & {d} \end{{pmatrix}}", reference, False
        yield rf"\begin{{pmatrix}} {a} \\ {c} \end{{pmatrix}}", rf"\begin{{bmatrix}} {a} \\ {c} \end{{bmatrix}}", True
        yield (
            rf"\begin{{pmatrix}} {a} \\ {c + 1} \end{{pmatrix}}",
            rf"\begin{{pmatrix}} {a} \\ {c} \end{{pmatrix}}",
            False,
        )


def _numbers() -> Iterator[Labelled]:
    for n in (5, 36, 75, 120, 18, 250):
        reference, wrong = str(n), str(n + 1)
        for form in (
            *(r"{}\%", r"{} \text{{ cm}}", r"{}\text{{ cm}}^2", r"{}^\circ", r"\${}", r"{}.0", r"{} \text{{ apples}}"),
            *(r"\text{{{}}}", r"{}\,\mathrm{{kg}}", r"x = {}", r"+{}", r"{}.", r"{} \text{{ hours}}"),
        ):
            yield form.format(n), reference, True
            yield form.format(n), wrong, False
        yield rf"-{n}", reference, False
        yield rf"{n}\%", rf"{n}\%", True
        yield rf"{n}\%", f"{n / 100}", True
        yield rf"\${n}.50", rf"\${n}.50", True
        yield f"{n}.5", rf"\${n}.50", True
        yield f"{n}.5", rf"\${n}.60", False
    for n in (1234, 12000, 32348, 1250000, 70000):
        for form in (f"{n:,}", f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", r",\!"), rf"\${n:,}", f"{n}.00"):
            yield form, str(n), True
            yield str(n), form, True
            yield form, str(n + 1), False
    for base, power in [(2, 10), (3, 5), (10, 4), (5, 3)]:
        yield f"{base}^{{{power}}}", str(base**power), True
        yield str(base**power), f"{base}^{{{power}}}", True
        yield f"{base}^{{{power + 1}}}", str(base**power), False
        yield f"{base}^{{-{power}}}", rf"\frac{{1}}{{{base**power}}}", True


def _algebra() -> Iterator[Labelled]:
    for a, b in [(1, 2), (3, 4), (2, 7), (5, 6), (-1, 3)]:
        expanded = f"x^2 + {a + b}x + {a * b}"
        yield f"{a * b} + {a + b}x + x^2", expanded, True
        yield f"(x+{a})(x+{b})".replace("+-", "-"), expanded, True
        yield f"(x+{b})(x+{a})".replace("+-", "-"), f"(x+{a})(x+{b})".replace("+-", "-"), True
        yield f"x^2 + {a + b}x + {a * b + 1}", expanded, False
        yield f"x^2 - {a + b}x + {a * b}", expanded, False
        yield f"y = {b}x + {abs(a)}", f"y = {abs(a)} + {b}x", True
        yield f"y = {b}x - {abs(a)}", f"y = {abs(a)} + {b}x", False
        yield f"{b}i + {abs(a)}", f"{abs(a)}+{b}i", True
        yield f"{b}i - {abs(a)}", f"{abs(a)}+{b}i", False
        yield f"x = {b}", f"{b}", True
        yield f"{b}", f"x={b}", True
        yield f"x = {b}", f"x = {b + 1}", False
        yield f"x > {b}", f"x>{b}", True
        yield f"x < {b}", f"x > {b}", False
        yield f"{b}n", f"n \\cdot {b}", True
        yield f"{b}n", f"{b}", False
        yield rf"\frac{{x+{b}}}{{x}}", rf"1 + \frac{{{b}}}{{x}}", True
        yield rf"e^{{{b}x}}", rf"e^{{{b} x}}", True
        yield rf"\log {b}", rf"\log({b})", True


def _words() -> Iterator[Labelled]:
    for word, other in [("Friday", "Monday"), ("even", "odd"), ("Alice", "Bob"), ("yes", "no"), ("ellipse", "circle")]:
        yield rf"\text{{{word}}}", rf"\text{{{word}}}", True
        yield word, rf"\text{{{word}}}", True
        yield rf"\text{{{word}}}", word, True
        yield rf"\text{{{other}}}", rf"\text{{{word}}}", False
        yield rf"\textbf{{{word}}}", rf"\text{{{word}}}", True
    for letter, other in zip("ABCDE", "BCDEA", strict=True):
        yield rf"\text{{{letter}}}", letter, True
        yield rf"\textbf{{({letter})}}", letter, True
        yield rf"\text{{({letter})}}", rf"\text{{({letter})}}", True
        yield other, letter, False


def main(folder: str) -> None:
    """Print how many verdicts are as labelled, by set and reward, and the pairs that are not with `-v`."""
    for name, found in (("solutions", list(solutions(folder))), ("pairs", list(pairs()))):
        for reward in REWARDS:
            wrong = []
            for completion, reference, right in found:
                score = None
                with contextlib.suppress(ValueError):  # a reference that cannot be parsed has no score
                    score = reward("", completion, {"answer": reference})
                if score != right:
                    wrong.append((completion, reference, right, score))
            print(f"{name}: {reward.__name__} {len(found) - len(wrong)} of {len(found)}")
            if "-v" in sys.argv:
                print(*wrong, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
