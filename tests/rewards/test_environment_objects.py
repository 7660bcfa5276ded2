"""Environments as objects, one for each episode: what they are asked, in which order, and what their faults cost."""

import json
import math
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from gspo_jax import references
from gspo_jax.calls.calls import Limits
from gspo_jax.calls.outcomes import Outcome
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import ScoringFailed
from gspo_jax.rewards.replies import Replies, Reply, Setting, TurnOver
from gspo_jax.rollout import episodes as rollout
from gspo_jax.setup.turns import TokenTurns
from tests.pods import ROOT

LONG_S = 20.0

COUNTING = """
import threading
events, lock = [], threading.Lock()

def note(*event):
    with lock:
        events.append(event)

class Mine:
    made = 0
    def __init__(self):
        with lock:
            Mine.made += 1
            self.number = Mine.made
        self.said = []
    def reset(self, record):
        self.record = record
        note(record["n"], "reset")
        if record.get("bad") == "reset":
            raise ValueError("no reset")
    def step(self, message):
        self.said.append(message["content"])
        note(self.record["n"], "step", message["content"])
        if self.record.get("bad") == message["content"]:
            raise ValueError("no step")
        if message["content"] == "end":
            return None, 1.0
        return f"heard {len(self.said)}: {'|'.join(self.said)}", 0.5
    def close(self):
        note(self.record["n"], "close")
        if self.record.get("bad") == "close":
            raise ValueError("no close")
"""


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a module with a class `Mine`, and returns its replies and the module."""
    made: list[Replies] = []

    def write(code: str, **setting: Any) -> tuple[Replies, ModuleType]:
        file = tmp_path / f"mine{len(made)}.py"
        file.write_text(code)
        made.append(Replies("mine", Setting(own={"mine": f"{file}:Mine"}, **setting)))
        return made[-1], references.module(str(file))

    yield write
    for each in made:
        each.close()


def turn(n: int, *turns: str, prompt: str = "?", befores: tuple[str, ...] | None = None, **record: Any) -> TurnOver:
    """Return an episode whose newest turn is over."""
    said = tuple(f"<{i}>" if i else "" for i in range(len(turns))) if befores is None else befores
    text = "".join(a + b for a, b in zip(said, turns, strict=True))
    return TurnOver(str(n).encode(), prompt, {"n": n, **record}, text, turns, said)


def opened(replies: Replies, *turns: TurnOver) -> list[Outcome[Any]]:
    pending = [replies.open(each.id, each.record) for each in turns]
    replies.wait(pending)
    return [each.result(timeout=0) for each in pending]


def asked(replies: Replies, *turns: TurnOver) -> list[Outcome[Reply]]:
    pending = [replies.begin(each) for each in turns]
    replies.wait(pending)
    return [each.result(timeout=0) for each in pending]


def said(outcome: Outcome[Reply]) -> Any:
    assert outcome.value is not None, outcome.error
    return outcome.value.said


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that happens in the background."""
    ends = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_each_episode_is_reset_stepped_and_closed_in_order(written):
    replies, mine = written(COUNTING)
    first = [turn(n) for n in range(3)]
    assert [each.value for each in opened(replies, *first)] == [None] * 3
    found = asked(replies, turn(0, "a"), turn(1, "end"), turn(2, "a"))
    assert [said(each) for each in found] == ["heard 1: a", None, "heard 1: a"]
    assert [each.value.reward for each in found] == [0.5, 1.0, 0.5]
    replies.finish([b"1", b"never seen"])
    (again,) = asked(replies, turn(0, "a", "b"))
    assert said(again) == "heard 2: a|b"
    replies.close()
    replies.close()
    of = {n: [event[1:] for event in mine.events if event[0] == n] for n in range(3)}
    assert of[0] == [("reset",), ("step", "a"), ("step", "b"), ("close",)]
    assert of[1] == [("reset",), ("step", "end"), ("close",)] and of[2] == [("reset",), ("step", "a"), ("close",)]
    assert mine.Mine.made == 3


def test_errors_of_an_environment_cost_its_own_episode(written, caplog):
    replies, mine = written(COUNTING)
    turns = [turn(0, bad="reset"), turn(1, bad="x"), turn(2, bad="close"), turn(3)]
    found = opened(replies, *turns)
    assert [each.error is None for each in found] == [False, True, True, True] and found[0].raised
    replies.told(turns, found)
    turns = [turn(1, "x", bad="x"), turn(2, "x", bad="close"), turn(3, "x")]
    found = asked(replies, *turns)
    assert [each.value is None for each in found] == [True, False, False] and "no step" in (found[0].error or "")
    replies.told(turns, found)
    replies.finish([b"0", b"1", b"2", b"3"])
    until(lambda: "environment 'mine' could not be closed: ValueError: no close" in caplog.text)
    until(lambda: sum(event[1] == "close" for event in mine.events) == 4)


def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(written):
    replies, _ = written(COUNTING)
    turns = [turn(n, prompt=f"{n}", bad="reset") for n in range(3)]
    with pytest.raises(ScoringFailed, match=r"environment 'mine' raised on all 3 completions; .*(\n.*)*no reset"):
        replies.told(turns, opened(replies, *turns))


def test_environments_that_nobody_answers_end_the_run_and_are_asked_again_after(written):
    """Failures in a row keep neither later episodes from being asked about, nor any from being closed."""
    replies, mine = written(COUNTING.replace('note(self.record["n"], "step"', 'answer(self.record["n"], "step"') + """
dead = True
def answer(*event):
    note(*event)
    if dead:
        raise ConnectionRefusedError
""", limits=Limits(concurrency=4), most_failed=0.5)  # fmt: skip
    turns = [turn(n, "a") for n in range(20)]
    found = asked(replies, *turns)
    assert all(each.failed_by == "connection refused" for each in found)
    with pytest.raises(
        ScoringFailed, match=r"environment 'mine' failed in 20 of 20 episodes, most often by: connection"
    ):
        replies.told(turns, found)
    replies.finish([each.id for each in turns])
    opened_ones = sum(event[1] == "reset" for event in mine.events)
    until(lambda: sum(event[1] == "close" for event in mine.events) == opened_ones)
    mine.dead = False
    replies.renew()
    found = asked(replies, *(turn(n, "a") for n in range(20, 40)))
    assert [said(each) for each in found] == ["heard 1: a"] * 20


def test_a_new_object_is_given_all_earlier_turns_again(written):
    """After a resume, or where an object was given a turn already: the reply is the same, and the old one is closed."""
    first, mine = written(COUNTING)
    whole = [said(*asked(first, turn(0, *turns))) for turns in ("a", "ab")]
    assert whole == ["heard 1: a", "heard 2: a|b"]
    later, fresh = written(COUNTING)
    assert said(*asked(later, turn(0, "a", "b"))) == whole[1]
    assert said(*asked(first, turn(0, "a", "b"))) == whole[1], "given twice"
    assert said(*asked(later, turn(0, "a", "b", "c"))) == "heard 3: a|b|c"
    assert [event[1] for event in fresh.events] == ["reset", "step", "step", "step"]
    until(lambda: any(event[1] == "close" for event in mine.events))
    assert [event[1:] for event in mine.events if event[1] != "close"] == [("reset",), ("step", "a"), ("step", "b")] * 2


SLOW = """
import time
class Mine:
    def __init__(self):
        time.sleep(0.05)
    ASYNCdef reset(self, record):
        self.n = record["n"]
    ASYNCdef step(self, message):
        WAIT(SECONDS)
        return str(self.n)
"""
KINDS = {"coroutine": ("async ", "import asyncio; await asyncio.sleep"), "thread": ("", "time.sleep")}


def slow(kind: str, seconds: float) -> str:
    of, wait = KINDS[kind]
    return SLOW.replace("ASYNC", of).replace("WAIT", wait).replace("SECONDS", str(seconds))


@pytest.mark.parametrize("kind", KINDS)
def test_replies_that_take_their_time_come_side_by_side(written, kind):
    replies, _ = written(slow(kind, 0.2))
    assert len(opened(replies, *(turn(n) for n in range(64)))) == 64
    begun = time.monotonic()
    found = asked(replies, *(turn(n, "a") for n in range(64)))
    assert [said(each) for each in found] == [str(n) for n in range(64)]
    assert time.monotonic() - begun < 4, "all at once take 0.2 s, one after the other 13 s"
    begun = time.monotonic()
    asked(replies, *(turn(n, "a") for n in range(64, 128)))
    assert time.monotonic() - begun < 4, "also where objects are made, which takes 0.05 s each, and 3.2 s in all"


@pytest.mark.parametrize("kind", KINDS)
def test_a_hanging_environment_costs_its_deadline_and_all_are_closed_at_the_end(written, kind):
    closing = "    def close(self):\n        closed.append(self.n)\nclosed = []\n"
    replies, mine = written(slow(kind, 30) + closing, limits=Limits(concurrency=8, deadline_s=0.3))
    opened(replies, *(turn(n) for n in range(24)))
    begun = time.monotonic()
    found = asked(replies, *(turn(n, "a") for n in range(16)))
    assert {each.cause for each in found} == {"no answer within 0.3 s"} and time.monotonic() - begun < 5
    pending = [replies.begin(turn(n, "a")) for n in range(16, 24)]
    replies.finish([b"0"])
    until(lambda: mine.closed == [0])
    begun = time.monotonic()
    replies.close()
    assert sorted(mine.closed) == list(range(24)) and time.monotonic() - begun < 4
    assert all(each.result(timeout=LONG_S).value is None for each in pending)


def test_the_replay_of_many_turns_has_the_time_that_they_had(written):
    replies, _ = written(slow("coroutine", 0.2), limits=Limits(deadline_s=0.5))
    (found,) = asked(replies, turn(0, "a", "b", "c", "d", "e"))
    assert said(found) == "0"


TOOLS = """
heard = []
class Mine:
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}]
    def step(self, message):
        heard.append(message)
        return ANSWER
"""


def call(name: str = "add", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def with_tools(written: Any, answer: str) -> tuple[Replies, ModuleType]:
    replies, mine = written(TOOLS.replace("ANSWER", answer))
    replies.tool_format = "hermes"
    return replies, mine


def test_a_turn_of_wrong_calls_alone_is_answered_without_a_step(written):
    replies, mine = with_tools(written, "'never'")
    (found,) = asked(replies, turn(0, "So: " + call("sub") + call(arguments='{"a": "x"}')))
    first, second = said(found)
    assert (first["role"], first["name"]) == ("tool", "sub") and second["name"] == "add"
    assert "the tools are add" in first["content"] and len({first["tool_call_id"], second["tool_call_id"]}) == 2
    assert found.value.reward is None and not mine.heard


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1, 0, 0]])
def test_right_calls_among_wrong_ones_are_made_and_each_gets_its_reply(written, order):
    """The reply of a text alone is that to the first right call."""
    replies, mine = with_tools(written, "('done', 0.25)")
    (found,) = asked(replies, turn(0, "So: " + "".join([call(), call("sub")][wrong] for wrong in order)))
    (message,) = mine.heard
    assert message["content"] == "So:" and len(message["tool_calls"]) == order.count(0)
    assert all(each["function"] == {"name": "add", "arguments": {"a": 1}} for each in message["tool_calls"])
    done, *wrong = said(found)
    assert done["content"] == "done" and done["tool_call_id"] == message["tool_calls"][0]["id"]
    assert [each["name"] for each in wrong] == ["sub"] and found.value.reward == 0.25
    assert wrong[0]["tool_call_id"] not in [each["id"] for each in message["tool_calls"]]


def test_calls_in_thoughts_do_not_count_in_a_replay_either(written):
    """What comes before a turn may open a thought; a replay reads each turn behind what came before it then."""
    replies, mine = with_tools(written, "'go on'")
    first, second = f"{call()} no.</think>Well.", f"{call()} no.</think>{call(arguments=json.dumps({'a': 2}))}"
    befores = ("", f"{first}<user><think>\n")
    asked(replies, turn(0, first, prompt="?<think>\n", befores=("",)))
    asked(replies, turn(0, first, second, prompt="?<think>\n", befores=befores))
    there, mine.heard[:] = list(mine.heard), []
    replies.finish([b"0"])
    asked(replies, turn(0, first, second, prompt="?<think>\n", befores=befores))
    assert mine.heard == there
    assert [len(each.get("tool_calls", ())) for each in there] == [0, 1]


RETURNED = {
    "'text'": ("text", None),
    "('text', 1)": ("text", 1.0),
    "(None, True)": (None, 1.0),
    "None": (None, None),
    "{'role': 'user', 'content': 'a'}": ([{"role": "user", "content": "a"}], None),
    "[{'role': 'user', 'content': 'a'}] * 2": ([{"role": "user", "content": "a"}] * 2, None),
    "({'role': 'user', 'content': 'a'},) * 2": (({"role": "user", "content": "a"},) * 2, None),
    "({'role': 'user', 'content': 'a'}, 0.5)": ([{"role": "user", "content": "a"}], 0.5),
    "7": "step returned 7; return a text, messages",
    "[]": "return a text, messages",
    "['a']": "return a text, messages",
    "{'role': 'assistant', 'content': 'a'}": "return a text, messages",
    "('a', 'b')": "a score is a number, and not the text 'b'",
    "('a', float('nan'))": "the environment returned nan as a reward",
    "('a', 1e30)": "the environment returned 1e[+]30",
    "('a', 1, 2)": "return a text, messages",
    "1 / 0": "ZeroDivisionError",
    "__import__('sys').exit(3)": "SystemExit",
}


@pytest.mark.parametrize("returned", RETURNED)
def test_what_step_returns(written, returned):
    replies, _ = written(f"class Mine:\n    async def step(self, message):\n        return {returned}\n")
    (found,) = asked(replies, turn(0, "a"))
    wants = RETURNED[returned]
    if isinstance(wants, tuple):
        assert (said(found), found.value.reward) == wants
    else:
        assert found.raised and found.value is None
        with pytest.raises(ScoringFailed, match=wants):
            replies.told([turn(0, "a", prompt="1"), turn(1, "a", prompt="2")], [found] * 2)
    assert asked(replies, turn(1, "a"))[0].error is None or not isinstance(wants, tuple)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eos_ids[0]]


def over(n: int, *turns: list[int], **record: Any) -> rollout.TurnOver:
    whole, starts = [], []
    for each in turns:
        starts.append(len(whole))
        whole += each
    return rollout.TurnOver(str(n).encode(), "?", {"n": n, **record}, whole, list(turns), starts)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(ROOT / "tests" / "golden" / "adder")


@pytest.mark.parametrize(
    ("text", "comes"),
    [("'7'", True), ("'\\ud800'", True), ("'\\x00'", True), ("''", True), ("'<|im_end|>' * 3", True)],
)
def test_any_text_becomes_tokens_or_a_failure_and_never_an_error(written, tokenizer, text, comes):
    replies, _ = written(f"class Mine:\n    def step(self, message):\n        return {text}, 0.5\n")
    turns = TokenTurns(replies, tokenizer, tokenizer.encode, 8)
    for said in (tokens_of(tokenizer, "1+1"), tokenizer.encode("1+1=")):
        (pending,) = turns.begin([over(0, said)])
        turns.wait([pending])
        answer = pending.result(timeout=LONG_S)
        assert answer.failed != comes and (not comes or answer.reward == 0.5)


OPENING = """
class Mine:
    def reset(self, record):
        return PROMPT
    def step(self, message):
        return None
"""
OPENED = {
    "None": None,
    "'1+2='": "1+2=",
    "f\"{record['n']}+1=\"": "0+1=",
    "[{'role': 'user', 'content': '2+2='}]": "2+2=",
    "'1' * 500": "reset returned a prompt longer than data.max_prompt_length, 8 tokens",
    "''": "reset returned an empty prompt",
    "7": "reset returned no prompt: ",
    "['a']": "reset returned no prompt: ",
    "[]": "reset returned no prompt: ",
    "{'role': 'user', 'content': '1'}": "reset returned no prompt: ",
    "[{'role': 'user'}]": "reset returned no prompt: ",
    "1 / 0": "ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("prompt", OPENED)
def test_what_reset_returns_is_the_prompt_or_the_episode_has_failed(written, tokenizer, prompt, caplog):
    replies, _ = written(OPENING.replace("PROMPT", prompt))

    def encode(record: Any) -> list[int]:
        if messages := record["messages"]:
            return tokenizer.encode("".join(each["content"] for each in messages))
        return tokenizer.encode(record["question"])

    turns = TokenTurns(replies, tokenizer, encode, 8)
    ((tokens, failed),) = turns.open([over(0)])
    wants = OPENED[prompt]
    if wants is None or "=" in wants[:5]:
        assert not failed and (tokens is None) == (wants is None)
        assert wants is None or tokenizer.decode(tokens) == wants
    else:
        assert failed and tokens is None and wants in caplog.text


def test_rewards_and_ends_of_turns_are_those_of_the_environment(written, tokenizer):
    replies, _ = written(COUNTING)
    turns = TokenTurns(replies, tokenizer, tokenizer.encode, 8)
    assert turns.asks_last
    first = tokens_of(tokenizer, "1")
    (pending,) = turns.begin([over(0, first)])
    turns.wait([pending])
    answer = pending.result(timeout=LONG_S)
    assert answer.reward == 0.5 and tokenizer.decode(answer.reply) == tokenizer.user_turn("heard 1: 1")
    plain, _ = written("class Mine:\n    def step(self, message):\n        return None\n")
    (pending,) = TokenTurns(plain, tokenizer, tokenizer.encode, 8).begin([over(0, first)])
    plain.wait([pending])
    assert pending.result(timeout=LONG_S).reply is None and math.isnan(pending.result().reward)


def test_answers_that_come_while_others_are_told_of_are_not_lost(written, tokenizer):
    """Thousands of answers, told of from one thread as they come in another."""
    replies, _ = written("class Mine:\n    async def step(self, message):\n        raise OSError\n", most_failed=1.0)
    turns, counted, lock = TokenTurns(replies, tokenizer, tokenizer.encode, 8), [0], threading.Lock()

    def told(some: Any, outcomes: Any) -> None:
        assert len(some) == len(outcomes)
        with lock:
            counted[0] += len(some)

    replies.told = told  # type: ignore[method-assign]
    pending = turns.begin([over(n, [5]) for n in range(500)])
    while not all(each.done() for each in pending):
        turns.wait(pending, within_s=0)
    turns.wait(pending)
    assert counted == [500]
