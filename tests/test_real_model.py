"""A real model, SmolLM2-135M-Instruct, against the numbers of transformers (tests/golden/make_smollm2.py) and itself.

`bash launch/test.sh -m slow` fetches the model; without it, these tests are skipped.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gspo_jax.data.tokenizer import Tokenizer
from tests.real_model import GOLDEN, PROBLEMS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "SmolLM2-135M-Instruct"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the model that bash launch/smollm2.sh downloads"),
]


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> Path:
    """Return the folder in which a process without the session's settings writes what the model says."""
    folder = tmp_path_factory.mktemp("said")
    settings = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    command = [sys.executable, "-m", "tests.real_model", str(FOLDER), str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_tokens_and_logits_are_those_of_transformers(said) -> None:
    """Prose, code, arithmetic, other scripts, emoji and chats, padded to one length."""
    found = np.load(said / "logits.npz")
    for row, text in enumerate(golden()["texts"].tolist()):
        np.testing.assert_array_equal(found[f"tokens_{row}"], golden()[f"tokens_{row}"], err_msg=text)
        for name in ("logits", "norm"):
            np.testing.assert_allclose(found[f"{name}_{row}"], golden()[f"{name}_{row}"], rtol=0, atol=1e-3)


def test_greedy_responses_are_those_of_transformers(said) -> None:
    found = np.load(said / "float32.npz")
    for question, ids, mask in zip(found["questions"], found["tokens"], found["mask"], strict=True):
        (number,) = np.flatnonzero(golden()["prompts"] == question)
        path, tokens = golden()[f"greedy_{number}"], ids[mask]
        np.testing.assert_array_equal(tokens, path[: len(tokens)])
        last = tokenizer().decode([int(tokens[-1])], skip_special=False)
        assert len(tokens) == len(path) or last == "<|im_end|>"


@pytest.mark.parametrize(("dtype", "token", "response"), [("float32", 1e-4, 1e-5), ("bfloat16", 0.5, 0.05)])
def test_sampler_and_trainer_agree_along_a_response(said, dtype, token, response) -> None:
    """Log-probs of tokens sampled from the cache equal those of packed rows; they drift nowhere along a response."""
    found = np.load(said / f"{dtype}.npz")
    differences = np.where(found["mask"], found["trainer"] - found["sampler"], np.nan)
    quarters = [np.nanmean(np.abs(part)) for part in np.split(differences, 4, axis=1)]
    assert np.nanmax(np.abs(differences)) < token
    assert max(quarters) < 4 * min(quarters)
    assert np.abs(np.nanmean(differences, axis=1)).max() < response


def test_a_benchmark_is_answered_and_judged(said) -> None:
    """The chat template, the sampler and math-verify."""
    facts = json.loads((said / "benchmark.json").read_text())
    rows = [json.loads(line) for line in Path(facts["answers"]).read_text().splitlines()]
    assert "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n" in facts["protocol"]["first_prompt"]
    assert [row["scores"]["math_verify_flexible"] for row in rows] == [1.0, 1.0, 0.0], rows
    assert facts["mean"] == pytest.approx(2 / len(PROBLEMS)) and facts["truncated"] == 0
