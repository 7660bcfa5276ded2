"""Runs with drafts: the same samples, rewards and weights as without, in fewer decode steps; and so resumed."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from gspo_jax.config_files import load_config
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.samples import read_samples
from gspo_jax.train import train
from tests.pods import ROOT, assert_same_bits

ITERATIONS = 4
SAME = ("reward/", "response/", "eval/", "actor/", "routing/", "loss/")
"""Metrics that drafts leave alone."""


def config_of(draft: str, folder: Path):
    """Return eight prompts, over and over, answered by a model that has learned to add."""
    config = load_config(f"{ROOT}/configs/tiny.py:single")
    config.model.folder = str(ROOT / "tests" / "golden" / "adder")
    config.data.update({"limit": 8, "prompts_per_batch": 8, "data_dir": str(folder / "data")})
    config.data.options.difficulty = "easy"
    config.sampling.update({"group_size": 4, "slots": 4, "draft": draft, "max_response_length": 24})
    config.iterations, config.training.minibatches = ITERATIONS, 2
    config.eval.update({"every": 2, "prompts": 8})
    config.log.update({"samples_every": 1, "samples": 32})
    config.checkpoint.every = 2
    return config


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_drafts_change_no_iteration(tmp_path):
    for draft in ("none", "history"):
        train(config_of(draft, tmp_path), tmp_path / draft)
    without, with_drafts = (read_metrics(tmp_path / draft) for draft in ("none", "history"))
    for row, other in zip(without, with_drafts, strict=True):
        own = [name for name in row if name.startswith(SAME)]
        assert own or not row.keys() - {"step"}
        for name in own:
            np.testing.assert_allclose(row[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)
    samples = [read_samples(tmp_path / draft) for draft in ("none", "history")]
    assert samples[0] == samples[1] and len(samples[0]) == ITERATIONS
    gained = [row["decode/tokens_per_step"] for row in with_drafts if "decode/tokens_per_step" in row]
    assert gained[-1] > 1.2, gained
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "history", stopped)
    shutil.rmtree(stopped / "checkpoints" / str(ITERATIONS))
    train(config_of("history", tmp_path), stopped)
    assert_same_bits(tmp_path / "history", stopped, step=ITERATIONS)
