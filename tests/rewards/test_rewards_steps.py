r"""Step rewards: equations as people write them, each number usable once, and no reward for degenerate completions."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.rewards import steps

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def found(completion, numbers="3 5 7", target="22"):
    """Return the text and reward of each step that countdown_steps finds."""
    ends = steps.countdown_steps("", completion, {"numbers": numbers, "target": target})
    starts = [0, *(end for end, _ in ends)]
    return [(completion[start:end].lstrip(), reward) for start, (end, reward) in zip(starts, ends, strict=False)]


def rewards(completion, numbers="3 5 7"):
    return [reward for _, reward in found(completion, numbers)]


def test_a_step_ends_with_its_result():
    completion = "3*5=15 15+7=22 #### 3*5+7"
    record = {"numbers": "3 5 7", "target": "22"}
    assert steps.countdown_steps("", completion, record) == [(6, 1.0), (14, 1.0)]  # 6 characters, then 8 with the space
    assert steps.countdown_steps("", "3*5=15 15+7=23", record) == [(6, 1.0), (14, 0.0)]
    assert steps.countdown_steps("", "no step", record) == []


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("", []),
        ("3*5=15", [1]),  # for any target, with or without an answer
        ("5*3=15 7+15=22", [1, 1]),  # operands in any order
        ("15+7=22 3*5=15", [0, 1]),  # 15 is not available yet
        ("3*5=15 15+7=22 22+0=22", [1, 1, 0]),
        ("3*5=16 16+7=23", [0, 0]),  # a wrong result does not become available
        ("3*5=16 3*5=15", [0, 1]),  # a wrong step uses up nothing
        ("3*5=15 3*5=15", [1, 0]),
        ("3+3=6", [0]),
        ("3+4=7", [0]),
        ("3*5=15 15+15=30", [1, 0]),
        ("#### 3*5=15", []),  # the answer, not a step
        ("3*5=15 #### x 15+7=22 ####", [1, 1]),  # steps count up to the last mark
        ("3*5=15####3*5", [1]),
        ("3*5=15 ##### 15+7=22", [1]),
        # Spaces and spellings as in the final answer.
        ("3 * 5 = 15", [1]),
        ("  3  *5=   15  ", [1]),
        ("3×5=15", [1]),
        (r"3 \times 5 = 15", [1]),
        ("3*5=\n15", []),
        ("3\t*5=15", []),
        ("3**5=243", []),
        ("3x5=15", []),
        # Any separator.
        ("3*5=15,15+7=22", [1, 1]),
        ("3*5=15.\n15+7=22.", [1, 1]),
        ("(first) 3*5=15; then 15+7=22!", [1, 1]),
        ("1. 3*5=15\n2. 15+7=22", [1, 1]),
        ("1) 3*5=15 2) 15+7=22", [1, 1]),
        ("- 3*5=15\n- 15+7=22", [1, 1]),
        ("**3*5=15** **15+7=22**", [1, 1]),
        ("3*5=15 => 15+7=22 -> done", [1, 1]),
        (r"$3*5=15$ \[15 \times 0=0\]", [1, 0]),
        ("3*5=15日15+7=22", [1, 1]),
        # Part of a longer expression is no step.
        ("3*5+7=22", []),
        ("7+3*5=22", []),
        ("7+3*5=15", []),  # nor if only its end would be one
        ("7-3*5=15", []),
        ("2^3*5=15", []),
        ("2·3*5=15", []),
        (r"2 \times 3*5=15", []),
        (r"2 \div 3*5=15", []),
        ("7 −3*5=15", []),
        ("3*5=15+7=22", []),
        ("3*5=15 + 7=22", []),
        ("3*5=15-7=8", []),
        ("7==3*5=15", []),
        ("3*5=15 * 1", []),
        ("3*5=15=15", []),
        ("3*5=15 = 15+0", []),
        ("3*5==15", []),
        ("(3*5)+7=22", []),
        ("(3*5)=15", []),
        ("(7)*3*5=15", []),
        ("(3*5=15)", []),
        ("(3*5=15", []),
        ("3*5=15)", []),
        ("( 3*5=15 )", []),
        ("3*(5+7)=36", []),
        ("7+(3*5=15", []),
        ("3*5=(15)", []),
        ("15=3*5", []),
        ("=15", []),
        ("3*5=", []),
        ("3*5=x", []),
        ("3*5", []),
        ("15=15", []),
        # Results that are not whole numbers.
        ("7/2=3.5", [0]),
        ("3.5*2=7", [0]),
        ("3*5=15.0", [0]),
        ("3*5=15.5", [0]),
        ("3*5=" + "0" * 500 + "15", [0]),
        ("3" * 5000 + "*5=15", [0]),
    ],
)
def test_countdown_steps(completion, expected):
    assert rewards(completion) == expected


def test_division_is_exact_and_never_by_zero():
    assert rewards("7/2=3", "7 2") == [0]
    assert rewards("8/2=4", "8 2") == rewards("8÷2=4", "8 2") == [1]
    assert rewards("5-5=0 0/3=0", "3 5 5") == [1, 1]
    for wrong in ("3/0=0", "3/0=3", "3/0=1"):
        assert rewards("5-5=0 " + wrong, "3 5 5") == [1, 0]
    assert rewards("5-5=0 2-2=0 0/0=0", "5 5 2 2") == [1, 1, 0]


def test_numbers_count_as_often_as_they_are_given():
    assert rewards("4+4=8 8+4=12", "4 4 4") == [1, 1]
    assert rewards("4+4=8", "4 8") == [0]
    assert rewards("4+4=8 4+4=8 8+8=16", "4 4 4 4") == [1, 1, 1]
    assert rewards("4*2=8 8+8=16", "4 2 8") == [1, 1]  # the result equals a given number


def test_results_below_zero_are_numbers():
    assert rewards("3-5=-2 -2+7=5") == [1, 1]
    assert rewards("3-5= -2, 7+-2=5") == [1, 1]
    assert rewards("3-5=-2 7--2=9") == [1, 1]
    assert rewards("3-5=-2 - 2+7=9") == []  # a minus apart from its number joins the equations
    assert rewards("3-5=2") == [0]
    assert rewards("15 -2=13 13 - 7=6", "15 2 7") == [1, 1]  # before the = it is an operator


def test_a_missing_field_is_an_error():
    with pytest.raises(KeyError):
        steps.countdown_steps("", "3*5=15", {"target": "22"})


SEPARATORS = [" ", "\n", ", ", ",", "; ", ". ", " so ", " => ", " 日 ", "\n- ", " 1. ", "** **"]


@st.composite
def work(draw):
    """Draw numbers, a text of right and wrong steps, and each step's reward by the numbers still available."""
    numbers = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    left, text, expected = list(numbers), draw(st.sampled_from(["", "we try: ", "#### 1+1=2 "])), []
    if text.startswith("####"):
        expected.append((len(text) - 1, 1.0 if left.count(1) > 1 else 0.0))
        if left.count(1) > 1:
            left.remove(1)
            left.remove(1)
            left.append(2)
    for _ in range(draw(st.integers(0, 7))):
        operand = st.sampled_from([*left, 0, 3, -4]) if left else st.just(1)
        a, b, sign = draw(operand), draw(operand), draw(st.sampled_from("+-*/×÷"))
        exact = {"+": a + b, "-": a - b, "*": a * b, "×": a * b}.get(sign)
        if exact is None:
            exact = a / b if b else 0.5
        c = draw(st.sampled_from([int(exact), int(exact) + 1]))
        there = a in left and b in left and (a != b or left.count(a) > 1)
        if valid := there and c == exact:
            left.remove(a)
            left.remove(b)
            left.append(c)
        space = st.sampled_from(["", " ", "  "])
        text += f"{a}{draw(space)}{sign}{draw(space)}{b}{draw(space)}={draw(space)}{c}"
        expected.append((len(text), float(valid)))
        text += draw(st.sampled_from(SEPARATORS))
    text += draw(st.sampled_from(["", "#### 1+1", "#### 3*5=15"] if "####" not in text else ["####", "#### 2*2=4"]))
    return numbers, text, expected


@SETTINGS
@given(work())
def test_any_work_is_rewarded_by_what_is_left_to_use(case):
    numbers, text, expected = case
    record = {"numbers": " ".join(map(str, numbers)), "target": "22"}
    assert steps.countdown_steps("", text, record) == expected


@SETTINGS
@given(st.text(st.sampled_from("0123456789 +-*/×÷=().#\n日\\"), max_size=60))
def test_any_text_gives_steps_in_order_and_no_more_rewards_than_numbers_allow(text):
    ends = [end for end, _ in steps.countdown_steps("", text, {"numbers": "1 2 3 4", "target": "22"})]
    assert ends == sorted(set(ends)) and all(text[end - 1].isdigit() for end in ends)
    assert sum(rewards(text, "1 2 3 4")) <= 3


@pytest.mark.parametrize(
    "hostile",
    [
        "1" * 1_000_000,
        "1" * 500_000 + "+" + "1" * 500_000 + "=2",
        "1" + " " * 1_000_000,
        " " * 1_000_000 + "1",
        "(" * 1_000_000,
        "( " * 500_000,
        "1+" + "(" * 1_000_000,
        "1+( " * 250_000,
        "1" + ")" * 1_000_000,
        "-" * 1_000_000,
        "1" + "+" * 1_000_000,
        "1=" * 500_000,
        "1" + "=" * 1_000_000,
        "1.1" * 333_333,
        "1+1=2 " * 166_666,
        "1+1=2" * 200_000,
        "1 - 1 = 0 -" * 90_909,
        "\\times" * 160_000,
        "1\\times" * 140_000,
        "#" * 1_000_000,
        "\x00 3*5=15 \ud800",
    ],
    ids=range(21),
)
def test_hostile_completions_cost_nothing(hostile):
    start = time.process_time()
    assert sum(rewards(hostile, "3 5 7")) == ("\ud800" in hostile)
    assert time.process_time() - start < 10  # quadratic time would take hours
