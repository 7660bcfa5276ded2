r"""The reward functions: final answers as people write them, and no reward for degenerate completions."""

import time

import pytest

from gspo_jax.rewards import functions, quantities


def score(name, completion, **record):
    return getattr(functions, name)("", completion, record)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("7+8=15 4+2+1=7 #### 75", "75", 1),
        ("#### 75", "57", 0),
        ("the answer is 75", "75", 1),
        ("75", "75", 0),  # not announced
        ("", "75", 0),
        ("####", "75", 0),
        ("#### 1,234", "1234", 1),
        ("#### 1234", "1,234.0", 1),
        ("#### 1{,}234", "1234", 1),
        ("#### 12,34", "1234", 0),
        ("#### $70,000.", "70000", 1),
        ("#### -$5", "-5", 1),
        ("#### $-5", "-5", 1),
        ("#### −5", "-5", 1),
        ("#### 5", "-5", 0),
        ("#### .5", "0.50", 1),
        ("#### 007", "7", 1),
        ("#### 18%", "18", 1),
        ("#### 18 apples.", "18", 1),
        ("#### **18**", "18", 1),
        ("#### $18$", "18", 1),
        ("#### 18\nbecause", "18", 1),
        ("#### 18 or 19", "18", 0),
        ("#### 1e3", "1000", 1),
        ("#### 6 5", "65", 0),
        ("#### 60+5", "60", 0),
        ("#### 18 #### 19", "19", 1),  # the last mark counts
        ("#### 19 #### 18", "19", 0),
        (r"so \boxed{18}.", "18", 1),
        (r"#### 18 and \boxed{19}", "19", 1),
        (r"\boxed{19} then #### 18", "18", 1),
        (r"\boxed{\$18}", "18", 1),
        (r"\boxed{18\%}", "18", 1),
        (r"\boxed{18", "18", 0),  # never closed
        (r"#### 18 \boxed{19", "18", 0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),  # not a number: compared as text
        (r"\boxed{\frac{1}{2}}", "0.5", 0),
        ("#### yes", "yes", 1),
        ("#### yes", "5", 0),
        ("#### 99999999999999999999999999999999", "99999999999999999999999999999998", 0),  # exact, not as floats
        ("#### 0.1000000000000000000000000000000000001", "0.1", 0),
    ],
)
def test_exact_answer(completion, answer, expected):
    assert score("exact_answer", completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("7+8=15 #### 75", 1),
        ("#### 75\n", 1),
        ("#### (3+5)*7", 1),
        ("#### $1,234.50", 1),
        (r"so \boxed{75}.", 1),
        ("75", 0),
        ("", 0),
        ("####", 0),
        ("#### ", 0),
        ("#### ()", 0),
        ("#### seven", 0),
        ("#### 75 and more", 0),
        ("#### 75\n76", 0),
        ("#### 75 #### 75", 0),
        ("##### 75", 0),
        (r"#### 75 \boxed{75}", 0),
        (r"\boxed{7} \boxed{5}", 0),
        (r"\boxed{}", 0),
        (r"\boxed{75", 0),
        ("#### " + "7" * 300, 0),
    ],
)
def test_answer_format(completion, expected):
    assert score("answer_format", completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("3*5=15 15+7=22 #### 3*5+7", 1),
        ("#### 7 + 5 * 3", 1),
        ("#### 7+5*3=22", 1),
        (r"\boxed{3 \times 5 + 7}", 1),
        ("#### 3×5+7", 1),
        ("#### 22", 0),  # does not use the given numbers
        ("#### 3*5+7+0", 0),
        ("#### 3*5+5+2", 0),
        ("#### 3*5", 0),
        ("#### (3+7)*5", 0),  # the given numbers, but another result
        ("#### 35-7-6", 0),
        ("#### 3*5+7.0", 0),
        ("#### 3**5+7", 0),
        ("#### 3*5--7", 0),  # a sign is not an operator
        ("#### 5*3+7 5", 0),
        ("#### 3*5+", 0),
        ("#### 5(3)+7", 0),
        ("#### 3/(5-5)+7", 0),
        ("#### __import__('os')", 0),
        ("#### " + "(" * 150 + "3*5+7" + ")" * 40, 0),
        ("#### " + "9*" * 90 + "9", 0),
        ("#### " + "9**" * 60 + "9", 0),
        ("3*5+7", 0),
    ],
)
def test_countdown(completion, expected):
    assert score("countdown", completion, numbers="3 5 7", target="22") == expected


def test_countdown_is_exact_and_counts_repeats():
    assert score("countdown", "#### 8/(3-8/3)", numbers="8 3 8 3", target="24") == 1  # floats give 23.999999999999989
    assert score("countdown", "#### 4+4+4", numbers="4 4 4", target="12") == 1
    assert score("countdown", "#### 4+8", numbers="4 4 4", target="12") == 0


@pytest.mark.parametrize("name", functions.__all__)
@pytest.mark.parametrize(
    "hostile",
    [
        "#### " + "1" * 1_000_000,
        "#" * 1_000_000,
        "#### -" + " " * 1_000_000 + "1",
        "#### " + "1," * 500_000,
        "#### " + "(" * 1_000_000,
        "\\boxed{" * 150_000,
        "\\boxed{" + "{" * 1_000_000,
        "\x00 #### \ud800",
    ],
    ids=range(8),
)
def test_hostile_completions_cost_nothing(name, hostile):
    start = time.process_time()
    assert score(name, hostile, answer="7", numbers="3 5 7", target="22") == 0
    assert time.process_time() - start < 0.5


def test_a_number_may_be_anything_and_costs_nothing():
    start = time.process_time()
    assert quantities.number("-" + " " * 100_000 + "!") is None
    assert quantities.number("") is quantities.number("$") is quantities.number("-.") is None
    assert time.process_time() - start < 0.5


def test_a_record_without_its_fields_is_an_error():
    with pytest.raises(KeyError):
        score("exact_answer", "#### 7")
    with pytest.raises(KeyError):
        score("countdown", "#### 7", answer="7")
