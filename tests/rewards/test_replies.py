"""Replies of the environments, with real sandboxes."""

import time

import pytest

from gspo_jax import sandbox
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import StopRequested, UserError
from gspo_jax.rewards import replies
from gspo_jax.rewards.replies import BROKEN, MAX_CHARACTERS, NO_OUTPUT, Replies, Setting, TurnOver
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


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a file with an environment `mine`, and returns its replies."""

    def write(code, **setting):
        (tmp_path / "mine.py").write_text(code)
        return Replies("mine", Setting(own={"mine": f"{tmp_path / 'mine.py'}:mine"}, **setting))

    return write
