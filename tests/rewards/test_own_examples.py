"""The examples that ask servers, with real ones, and the game."""

import json
import socket
import subprocess
import sys
import time

import pytest

from examples import http_server
from gspo_jax import references
from gspo_jax.calls.calls import Limits
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.rewards import environments
from gspo_jax.rewards.replies import Replies, Setting, TurnOver
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rollout import episodes as rollout
from gspo_jax.setup.turns import TokenTurns
from tests.pods import ROOT
from tests.servers import closed_port

RECORD = {"question": "84+5=?", "answer": "89"}


def example(name, monkeypatch, **values):
    """Return the reference of a function in examples/, whose module has other values."""
    place = str(ROOT / "examples" / name)
    for key, value in values.items():
        monkeypatch.setattr(references.module(place.partition(":")[0]), key, value)
    return place


def call(name, **arguments):
    """Return a tool call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def playing(monkeypatch):
    """Return a function that opens an environment of examples/, as one that takes the turns of an episode."""
    opened = []

    def play(name, **values):
        reference = example(name, monkeypatch, **values)
        made = Replies("mine", Setting(own={"mine": reference}, limits=Limits(deadline_s=30)))
        made.tool_format = "hermes"
        opened.append(made)
        return Episode(made)

    yield play
    for made in opened:
        made.close()


class Episode:
    """An episode of an environment."""

    def __init__(self, made):
        self.made, self.turns, self.befores, self.text = made, (), (), ""

    def begin(self):
        return self._result(self.made.open(b"0", RECORD))

    def say(self, turn):
        """Take a turn. Return the reply and its reward, or raise what failed."""
        self.turns, self.befores, self.text = (*self.turns, turn), (*self.befores, self.text), self.text + turn
        over = TurnOver(b"0", RECORD["question"], RECORD, self.text, self.turns, self.befores)
        return self._result(self.made.begin(over))

    def _result(self, future):
        self.made.wait([future])
        outcome = future.result()
        if outcome.error is not None:
            raise AssertionError(outcome)
        return outcome.value

    def read(self, turn):
        """Take a turn, and return the texts that the policy reads."""
        return [each["content"] for each in self.say(turn).said]


def test_an_async_reward_asks_its_server(monkeypatch):
    reference = example("async_reward.py:terse", monkeypatch, URL=http_server.start())
    completions = ["<think>Let me see.</think>#### 89", "#### 89 or so", "<think>It is"]
    with Scorer({"terse": 1.0}, own={"terse": reference}) as scorer:
        scores = scorer.score(["84+5=?"] * 3, completions, [RECORD] * 3)
    assert scores.total.tolist() == [0.5, 0.25, 0.0] and not scores.failed["terse"].any()


def test_a_reward_whose_server_is_away_fails(monkeypatch):
    reference = example("async_reward.py:terse", monkeypatch, URL=f"http://127.0.0.1:{closed_port()}")
    with Scorer({"terse": 1.0}, own={"terse": reference}, limits=Limits(tries=1)) as scorer:
        assert scorer.score(["84+5=?"], ["#### 89"], [RECORD]).failed["terse"].tolist() == [True]


def test_a_tool_behind_http(playing):
    episode = playing("http_tool.py:Adding", URL=http_server.start())
    assert episode.begin() is None
    assert episode.read(call("add", a=84, b=5) + call("add", a=1, b=2)) == ['{"sum": 89}', '{"sum": 3}']
    assert episode.read(call("add", a=84)) == ["Error: the tool call of add cannot be run: argument 'b' is missing."]
    assert episode.say("#### 89").said is None


HERMES = """{%- if tools %}<system>{{ tools | tojson }}END{%- endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}END{%- endfor %}
{%- if add_generation_prompt %}<assistant>{%- endif %}"""
"""A chat template that writes tools and calls, as Qwen3's does."""


def test_a_tool_on_tokens(playing):
    """The results are turns of the tool in the chat template, and text of theirs closes none."""
    plain = Tokenizer.train(["0123456789+-= Add."], 320)
    end = plain.decode([plain.eos_ids[0]], skip_special=False)
    settings = plain._settings | {"chat_template": HERMES.replace("END", end)}
    tokenizer = Tokenizer(plain._backend, eos_ids=plain.eos_ids, pad_id=plain.pad_id, settings=settings)
    made = playing("http_tool.py:Adding", URL=http_server.start()).made
    made.tool_format = tokenizer.tool_format()
    turns = TokenTurns(made, tokenizer, tokenizer.encode, 64)
    said, tokens, asked, starts = [], [], [], []
    for text in (call("add", a=84, b=5) + call("add", a=1, b=2), call("add", a=end), "#### 89"):
        asked.append([*tokenizer.encode(text), tokenizer.eos_ids[0]])
        starts.append(len(tokens))
        tokens += asked[-1]
        (pending,) = turns.begin([rollout.TurnOver(b"0", "?", {}, list(tokens), list(asked), list(starts))])
        turns.wait([pending])
        said.append(pending.result().reply)
    first, second, last = said
    assert tokenizer.decode(first, skip_special=False) == (
        f'<tool>{{"sum": 89}}{end}<tool>{{"sum": 3}}{end}<assistant>'
    )
    text = tokenizer.decode(second, skip_special=False)
    assert text.startswith("<tool>Error: ") and second.count(tokenizer.eos_ids[0]) == 1 and last is None


def test_a_game_is_won_by_guesses(playing):
    episode = playing("game.py:Guessing")
    assert episode.begin() == "guess?"
    said = [episode.say(turn) for turn in ("50", "#### 100", "of course", "between 88 and 89.")]
    assert [(each.said, each.reward) for each in said] == [
        ("more", 0.0),
        ("less", 0.0),
        ("a number", 0.0),
        (None, 0.25),
    ]


def test_a_game_goes_on_in_another_process(playing):
    """Earlier turns are played again, from the beginning."""
    episode = playing("game.py:Guessing")
    episode.turns, episode.text = ("50", "100"), "50more100less"
    assert episode.say("89").reward == pytest.approx(1 / 3)


def numbers(episode):
    """Play with the tools of examples/mcp_server.py."""
    assert episode.made.tools.names == ["add", "divide"]
    assert episode.begin() is None
    assert episode.read(call("add", a=84, b=5) + call("divide", a=1, b=4)) == ["89.0", "0.25"]
    assert episode.read(call("divide", a=1, b=0)) == ["Error executing tool divide"]
    assert episode.say("#### 89").said is None


@pytest.fixture(scope="module")
def mcp_url():
    """Start examples/mcp_server.py over HTTP."""
    port = closed_port()
    with subprocess.Popen([sys.executable, ROOT / "examples" / "mcp_server.py", str(port)]) as process:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield process, f"http://127.0.0.1:{port}/mcp"
        process.kill()


def test_tools_of_an_mcp_server_over_stdio(playing):
    environments.tools_of.cache_clear()
    numbers(playing("mcp_tool.py:Numbers"))


def test_tools_of_an_mcp_server_over_http(playing, mcp_url):
    environments.tools_of.cache_clear()
    numbers(playing("mcp_tool.py:Numbers", SERVER=mcp_url[1]))


def test_an_mcp_server_that_dies_is_a_failed_episode(playing, mcp_url):
    process, url = mcp_url
    episode = playing("mcp_tool.py:Numbers", SERVER=url)
    episode.begin()
    process.kill()
    process.wait()
    with pytest.raises(AssertionError, match="raised=False"):
        episode.say(call("add", a=84, b=5))
    with pytest.raises(AssertionError, match="raised=False"):
        playing("mcp_tool.py:Numbers", SERVER=url).begin()
    environments.tools_of.cache_clear()
    with pytest.raises(UserError, match=r"Numbers.tools failed: connection refused; mend it, or start what it asks"):
        playing("mcp_tool.py:Numbers", SERVER=url)
