"""The command sample: rows in, rows out; a chat on a pseudo-terminal."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkpointed import ADDER, settings, write_run
from tests.pods import ROOT

pytestmark = pytest.mark.slow
ROWS = [
    {"question": "1+2=?", "answer": 3},
    {"prompt": "5+4=?", "answer": "9", "kind": "easy"},
    {"question": "1" * 60, "answer": "0"},
    {"messages": [{"role": "user", "content": "31+24=?"}], "answer": "55"},
]
SAMPLE = sys.executable, "-m", "gspo_jax", "sample"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a run whose model has 64 positions, on one device."""
    folder = tmp_path_factory.mktemp("sample")
    shutil.copytree(ADDER, folder / "model")
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 64}))
    changes = {"cpu_devices": 1, "mesh__data": 1, "data__max_prompt_length": 16}
    return write_run(folder / "run", settings(folder / "model", **changes))


def sample(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([*SAMPLE, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_in_rows_out(run, tmp_path):
    source, target = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [f"--workdir={run}", f"--in={source}", "--samples=2", "--seed=3", "--temperature=0.7", "--max_tokens=10"]
    done = sample(*words, f"--out={target}", "--score", "--logprobs", "--routes", "--step=5")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^6 responses, \d cut, in [\d.]+ s: .*out.jsonl$", done.stdout, re.MULTILINE)
    says = "the prompt has 60 tokens, and a response of up to 10 leaves it 54 of the model's 64 positions; shorten it"
    assert f"warning: 1 of 4 rows are left out; the first is rows.jsonl/2: {says}, or lower --max_tokens" in done.stderr
    found = read(target)
    two = [(row, number) for row in (0, 1, 3) for number in (0, 1)]
    assert [(row["id"], row["sample"]) for row in found] == [(f"rows.jsonl/{row}", number) for row, number in two]
    for row in found:
        assert row["answer"] == {"1+2=?": "3", "5+4=?": "9", "31+24=?": "55"}[row["prompt"]]
        assert (row["finish"] == "length") == (row["token_ids"][-1] != 1) and row["tokens"] <= 10
        assert row["tokens"] == len(row["token_ids"]) == len(row["logprobs"]) == len(row["routes"])
        assert len(row["routes"][0]) == 2 and len(row["routes"][0][0]) == 2  # layers, experts per token
        right = float(bool(re.search(rf"(####|^) ?{row['answer']}$", row["completion"])))
        assert row["scores"] == {"exact_answer": right} and row["reward"] == right
    assert found[2]["kind"] == "easy"

    again = tmp_path / "again.jsonl"
    assert sample(*words, f"--out={again}").returncode == 0
    assert [row["completion"] for row in read(again)] == [row["completion"] for row in found]
    assert "scores" not in read(again)[0] and "logprobs" not in read(again)[0]
    kept = target.read_bytes()
    refused = sample(*words, f"--out={target}")
    assert (refused.returncode, refused.stderr) == (
        2,
        f"error: --out={target} exists; give another file, or remove it\n",
    )
    assert target.read_bytes() == kept

    two = sample(words[0], "--prompt=1+2=?", *words[2:])
    assert two.stdout.startswith("1 of 2, ") and two.stdout.count("\n") == 4
    assert [two.stdout.splitlines()[i] for i in (1, 3)] == [row["completion"] for row in found[:2]]


def test_what_a_killed_command_finished_is_kept(run, tmp_path):
    source, target = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"question": f"{i}+1=?"}) + "\n" for i in range(8000)))
    process = subprocess.Popen(
        [*SAMPLE, f"--workdir={run}", f"--in={source}", f"--out={target}"], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 300
    while not (target.exists() and target.stat().st_size):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    found = read(target)
    assert 0 < len(found) < 8000
    assert [row["question"] for row in found] == [f"{i}+1=?" for i in range(len(found))]
    assert all(isinstance(row["completion"], str) for row in found)


_ON_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, words: Sequence[str]) -> None:
        self._file, own = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_ITS_TERMINAL, *words],
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
            stdin=own,
            stdout=own,
            stderr=own,
            start_new_session=True,
        )
        os.close(own)
        self.said = ""

    def expect(self, text: str, timeout_s: float = 240) -> str:
        """Return what is shown until a text, without escapes."""
        until, found = time.monotonic() + timeout_s, ""
        while text not in found:
            assert time.monotonic() < until, f"no {text!r} in {self.said!r}"
            if select.select([self._file], [], [], 1)[0]:
                read = os.read(self._file, 65536).decode(errors="replace")
                self.said += read
                found += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read)
        return found

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def code(self) -> int:
        """Return the exit code at the end."""
        return self._process.wait(60)


def test_a_chat_on_a_terminal(run):
    terminal = Terminal([*SAMPLE, f"--workdir={run}", "--temperature=0"])
    assert f"{run}, iteration 5" in terminal.expect("> ")
    terminal.type("1+2=?\r")
    terminal.expect("compiling")
    terminal.type("\x03")  # Ctrl-C during a reply
    assert "interrupted; the turn is forgotten" in terminal.expect("> ")
    terminal.type("1+2=?\r")
    first = terminal.expect("\r\n> ")
    assert re.search(r"\d+ tokens(, cut there)?, [\d.]+ s", first)
    terminal.type("1+2=?\r")
    assert "compiling" not in terminal.expect(" s\r\n> "), "a longer prompt of the same bucket"
    terminal.type("1+2=?" * 12 + "\r")
    says = "tokens, and a response of up to 12 leaves it 52 of the model's 64 positions; /reset begins a new"
    assert says in terminal.expect("\n> ")
    for typed, says in (
        ("/rest", "there is no /rest: /reset begins anew, /system TEXT sets a system prompt, /quit leaves"),
        ("/system Add.", "a new conversation, with your system prompt"),
        ("/system", "a new conversation, with its own system prompt"),
        ("", ""),
        ("\x03", ""),
        ("/reset", "a new conversation, with its own system prompt"),
    ):
        if typed == "\x03":
            time.sleep(0.5)  # a signal between the prompt and the wait for input is heard at the next key
        terminal.type(f"{typed}\r" if typed != "\x03" else typed)
        assert says in terminal.expect("\n> ")
    terminal.type("1+2=?\r")
    again = terminal.expect(" s\r\n> ")
    assert reply(again) == reply(first), "after /reset it is the first turn again"
    terminal.type("\x04")
    assert terminal.code() == 0

    terminal = Terminal([*SAMPLE, f"--workdir={run}"])
    terminal.expect("> ")
    terminal.type("/quit\r")
    assert terminal.code() == 0


def reply(shown: str) -> str:
    """Return the last line before the line of facts."""
    lines = shown.split("\r\n")
    (facts,) = [place for place, line in enumerate(lines) if re.search(r"tokens?(, cut there)?, [\d.]+ s", line)]
    return lines[facts - 1].rpartition("\r")[2]
