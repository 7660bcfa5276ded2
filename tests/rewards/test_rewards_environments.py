"""The replies of environments to a turn."""

import pytest

from gspo_jax.errors import UserError
from gspo_jax.rewards import environments

RECORD = {"question": "22 from 3 5 7:", "numbers": "3 5 7", "target": "22"}


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("3*5=15 15+7=22 #### 3*5+7", None),
        ("#### 3*5-7\n8 is wrong. 22 from 3 5 7:#### 3*5+7", None),
        ("#### 3*5-7", "\n8 is wrong. 22 from 3 5 7:"),
        ("#### 3*5/7 ", "\n15/7 is wrong. 22 from 3 5 7:"),
        ("#### 22", "\nwrong. 22 from 3 5 7:"),
        ("#### 3*5", "\nwrong. 22 from 3 5 7:"),
        ("#### 3*5+", "\nwrong. 22 from 3 5 7:"),
        ("", "\nwrong. 22 from 3 5 7:"),
        ("#### 3*5+7\nwrong. #### 7", "\nwrong. 22 from 3 5 7:"),
    ],
)
def test_countdown_feedback(completion, says):
    assert environments.countdown_feedback(RECORD["question"], completion, RECORD) == says


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("7+8=", "15"),
        ("2+9=11 12-8-1=", "3"),
        ("(1+2)*3=", "9"),
        ("3-5=", "-2"),
        ("7/2=", "3.5"),
        ("1/3=", "0.333333"),
        ("=", ""),
        ("7+=", ""),
        ("1/0=", ""),
        ("2**99=", ""),
        ("1=1=", "1"),
        (" " + "9" * 200 + "=", "9" * 200),
        ("9" * 201 + "=", ""),
        ("7+8", None),
        ("#### 15", None),
        ("", None),
    ],
)
def test_calculator(completion, says):
    assert environments.calculator("", completion, {}) == says


@pytest.mark.parametrize(
    ("completion", "runs"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("Let me see.\n```\nx = 1\nprint(x)\n```\n", "x = 1\nprint(x)\n"),
        ("```python\nprint(1)\n```\n1\nOnce more:\n  ```py\nprint(2)\n  ```  \n\n", "print(2)\n"),
        ("```python\nprint(1)\n```\n1\n#### 1", None),
        ("```python\nprint(1)\n```\n1\n```python\nprint(2)", None),
        ("```python\nprint(1)\n```\n1\n```", None),
        ("```", None),
        ("", None),
    ],
)
def test_python_runs_the_block_that_a_turn_ends_in(completion, runs):
    assert environments.python("", completion, {}) == runs


def test_an_environment_by_name():
    assert environments.find("countdown_feedback") is environments.countdown_feedback
    with pytest.raises(UserError, match=r"no environment 'countdown_feedbac'; did you mean 'countdown_feedback'\?"):
        environments.find("countdown_feedbac")


def calls(*doors):
    """Return a policy's turn that opens doors."""
    found = [{"id": f"{i}", "function": {"name": "open", "arguments": {"door": d}}} for i, d in enumerate(doors)]
    return {"role": "assistant", "content": "", "tool_calls": found}


def test_rooms_lead_from_door_to_door():
    """The same call has another reply once one has gone on; a wrong one changes nothing."""
    house = environments.rooms()
    house.reset({"question": "House 1, door 4.", "doors": "4 7 4", "answer": "83"})
    said = []
    for doors in ([7], [4], [4], [7, 1, 4], [4]):
        reply, reward = house.step(calls(*doors))
        assert reward == 0.0 and [each["tool_call_id"] for each in reply] == [str(i) for i in range(len(doors))]
        said.append([each["content"] for each in reply])
    more = calls(4)
    more["tool_calls"][0]["function"]["arguments"]["lamp"] = "on"
    assert house.step(more)[0][0]["content"] == "closed", "the schema allows further arguments"
    assert said == [["closed"], ["door 7"], ["closed"], ["door 4", "closed", "key 83"], ["closed"]]
    answers = ("#### 83", 1.0), ("#### 38", 0.0), ("", 0.0)
    assert [house.step({"role": "assistant", "content": text}) for text, _ in answers] == [
        (None, reward) for _, reward in answers
    ]
