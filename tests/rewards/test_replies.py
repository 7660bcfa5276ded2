"""Replies of the environments, with real sandboxes."""

import sys
import time

import numpy as np
import pytest

from gspo_jax import sandbox
from gspo_jax.calls.calls import Limits
from gspo_jax.data import pipeline
from gspo_jax.data.tokenizer import CHATML, Tokenizer
from gspo_jax.errors import StopRequested, UserError
from gspo_jax.rewards import replies
from gspo_jax.rewards.replies import BROKEN, NO_OUTPUT, Replies, Setting, TurnOver
from gspo_jax.rewards.tools import MAX_CHARACTERS
from gspo_jax.rollout import episodes as rollout
from gspo_jax.sandbox import Verdict
from gspo_jax.setup.turns import TokenTurns
from tests.pods import ROOT

ADDER = ROOT / "tests" / "golden" / "adder"


@pytest.fixture(scope="module")
def python():
    try:
        sandbox.check_bubblewrap()
    except UserError as error:
        pytest.skip(str(error))
    with Replies("python", Setting(timeout_s=2.0, workers=2)) as made:
        yield made


def say(made, *turns):
    """Return what an environment says to each turn, the first of an episode."""
    asked = [TurnOver(str(i).encode(), "?", {}, text, (text,), ("",)) for i, text in enumerate(turns)]
    pending = [made.begin(turn) for turn in asked]
    made.wait(pending)
    made.told(asked, [each.result() for each in pending])
    return [each.result().value.said for each in pending]


def ask(made, *programs):
    return say(made, *(f"```python\n{program}\n```" for program in programs))


def test_what_programs_print_is_the_reply(python):
    said = ask(python, "print(6 * 7)", "pass", "print('a')\nprint(1 / 0)", "print('no newline', end='')")
    assert said == ["42\n", NO_OUTPUT, "a\nexit code 1: ZeroDivisionError: division by zero\n", "no newline\n"]


def test_a_program_without_an_end_is_told_so(python):
    assert ask(python, "while True: pass") == ["no end within 2 s\n"]


def test_turns_without_a_block_end_the_episode(python):
    assert say(python, "#### 3", "```python\nprint(3)\n```\n") == [None, "3\n"]
    assert say(python) == []


def test_long_and_broken_output_is_shortened_and_mended(python):
    long, odd = ask(python, "print('a' * 5000 + 'b' * 5000)", r"import sys; sys.stdout.buffer.write(b'\xff\n')")
    assert len(long) < MAX_CHARACTERS + 10 and long.startswith("aaa") and long.endswith("bbb\n") and "\n...\n" in long
    assert odd == "\ufffd\n"


def test_programs_of_a_batch_run_side_by_side(python):
    begun = time.monotonic()
    assert ask(python, *["import time; time.sleep(0.5); print(1)"] * 4) == ["1\n"] * 4
    assert time.monotonic() - begun < 1.8, "two at a time"


def test_waiting_for_programs_can_be_interrupted(python, monkeypatch):
    monkeypatch.setattr(python, "interrupted", lambda: True)
    with pytest.raises(StopRequested):
        ask(python, "while True: pass")
    monkeypatch.undo()
    assert ask(python, "print(2)") == ["2\n"], "the next batch is answered"


def test_a_broken_sandbox_is_no_error_of_the_program():
    assert replies.shown(Verdict(broken="it fell over")) == BROKEN


def token_turns(made, tokenizer):
    return TokenTurns(made, tokenizer, tokenizer.encode, 64)


def replies_to(turns, *responses):
    asked = [rollout.TurnOver(str(i).encode(), "?", {}, tokens, [tokens], [0]) for i, tokens in enumerate(responses)]
    pending = turns.begin(asked)
    turns.wait(pending)
    return [each.result().reply for each in pending]


def test_a_reply_is_inserted_after_a_stop_token_and_is_a_turn_after_the_end():
    tokenizer = Tokenizer.load(ADDER)
    with Replies("calculator", Setting()) as made:
        asked = [tokenizer.encode("7+8="), [*tokenizer.encode("7+8="), tokenizer.eos_ids[0]], tokenizer.encode("7")]
        inserted, turn, over = replies_to(token_turns(made, tokenizer), *asked)
    assert tokenizer.decode(inserted) == "15" and over is None
    assert tokenizer.decode(turn) == tokenizer.user_turn("15")


def test_what_an_environment_says_closes_no_turn(written):
    """Its text may be a program's output, and so the policy's own."""
    tokenizer = Tokenizer.load(ADDER)
    end = tokenizer.eos_ids[0]
    said = f"5{tokenizer.decode([end], skip_special=False)}"
    with written(f"def mine(prompt, completion, record): return {said!r}") as made:
        inserted, turn = replies_to(token_turns(made, tokenizer), tokenizer.encode("="), [end])
    assert inserted and turn and end not in inserted + turn
    assert tokenizer.decode(inserted, skip_special=False) == said


@pytest.mark.parametrize(
    "code",
    [
        "def mine(prompt, completion, record): return 'a\\ud83d\\ude00b\\ud800'",
        "class mine:\n    def step(self, message): return {'role': 'user', 'content': 'a\\ud83d\\ude00b\\ud800'}",
    ],
)
def test_half_a_character_is_none(written, code):
    """JSON that a server cut in the middle may have one."""
    tokenizer = Tokenizer.load(ADDER)
    with written(code) as made:
        (turn,) = replies_to(token_turns(made, tokenizer), [tokenizer.eos_ids[0]])
    assert turn == tokenizer.encode(tokenizer.user_turn("a\U0001f600b\ufffd"))


def test_an_episode_with_a_tool_reads_as_the_template_writes_it():
    """Token by token, from the prompt to the answer; a wrong door is told, and an unreadable call is an error."""
    record = {"question": "House 1, door 4.", "instruction": "", "doors": "4 7", "answer": "83"}
    call = '<tool_call>\n{"name": "open", "arguments": {"door": %d}}\n</tool_call>'
    said = [call % 4, call % 5, "<tool_call>\n{}\n</tool_call>", call % 7, "#### 83"]
    tokenizer = Tokenizer.train(["door key House closed", call], 384, template=CHATML)
    with Replies("rooms", Setting()) as made:
        made.tool_format = tokenizer.tool_format()
        assert made.tools is not None and made.is_object
        prompt = pipeline.prompt_text(record, tokenizer, pipeline.PromptStyle(tools=tuple(made.tools.schemas)))
        turns, tokens, own, starts, rewards = token_turns(made, tokenizer), [], [], [], []
        for text in said:
            starts.append(len(tokens))
            own.append([*tokenizer.encode(text), tokenizer.eos_ids[0]])
            tokens += own[-1]
            turn = rollout.TurnOver(b"0", prompt, record, list(tokens), list(own), list(starts))
            (pending,) = turns.begin([turn])
            turns.wait([pending])
            answer = pending.result()
            rewards.append(answer.reward)
            tokens += answer.reply or []
        turns.finish([b"0"])
    assert answer.reply is None and np.array_equal(rewards, [0, 0, np.nan, 0, 1], equal_nan=True)
    heard = ["door 7", "closed", 'Error: the tool call cannot be run: it has no "name".', "key 83"]
    messages = [{"role": "user", "content": record["question"]}]
    for text, reply in zip(said, [*heard, None], strict=True):
        messages.append({"role": "assistant", "content": text})
        messages += [] if reply is None else [{"role": "tool", "content": reply}]
    whole = tokenizer.chat(messages, False, tools=made.tools.schemas)
    assert prompt + tokenizer.decode(tokens, skip_special=False) + "\n" == whole
    assert tokenizer.encode(prompt) + tokens == tokenizer.encode(whole)[:-1]


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a file with an environment `mine`, and returns its replies."""

    def write(code, **setting):
        (tmp_path / "mine.py").write_text(code)
        return Replies("mine", Setting(own={"mine": f"{tmp_path / 'mine.py'}:mine"}, **setting))

    return write


OBJECTS = """
from gspo_jax.calls.failures import CallFailed

log, failing = [], []

class mine:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

    def reset(self, record):
        log.append("reset")

    def step(self, message):
        if failing:
            raise CallFailed("away")
        log.append("calls" if "tool_calls" in message else "says")
        return "."

    def close(self):
        log.append("close")
        raise CallFailed("cannot close")
"""
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture
def objects(written):
    """Return replies of objects, with what they logged and a list that is not empty while they fail."""
    with written(OBJECTS, limits=Limits(concurrency=2)) as made:
        made.tool_format = "hermes"
        module = sys.modules[made._answer.__module__]
        yield made, module.log, module.failing


def outcome(made, id, completion, *turns):
    befores, at = [], 0
    for turn in turns:
        at = completion.index(turn, at)
        befores.append(completion[:at])
        at += len(turn)
    pending = made.begin(TurnOver(id, "?", {}, completion, turns, tuple(befores)))
    made.wait([pending])
    return pending.result()


def test_an_environment_that_was_away_is_asked_again_by_the_next_turns(objects):
    made, _, failing = objects
    turns = token_turns(made, Tokenizer.load(ADDER))
    failing.append(True)
    assert replies_to(turns, *[[1]] * 6) == [None] * 6
    failing.clear()
    assert None not in replies_to(turns, [2])


def test_every_environment_is_closed_whatever_fails(objects):
    made, log, failing = objects
    failing.append(True)
    for i in range(6):
        made.renew()
        outcome(made, bytes([i]), "", "")
    made.finish([bytes([i]) for i in range(5)])
    made.close()
    assert log.count("close") == 6


def test_an_episode_that_begins_anew_closes_its_first_environment(objects):
    made, log, _ = objects
    for _ in range(2):
        assert made.open(b"0", {}).result(timeout=30).error is None
    made.close()
    assert sorted(log) == ["close", "close", "reset", "reset"]


def test_an_earlier_turn_is_read_as_it_was(objects):
    """A thought that a later turn leaves open does not hide its calls."""
    made, log, _ = objects
    outcome(made, b"0", f"{LOOK}.<think>", LOOK, "<think>")
    assert log == ["reset", "calls", "says"]
    del log[:]
    outcome(made, b"1", f"<think>{LOOK}.{LOOK}</think>{LOOK}.{LOOK}", f"<think>{LOOK}", f"{LOOK}</think>{LOOK}", LOOK)
    assert log == ["reset", "says", "calls", "calls"]
