"""The copy of a run's metrics at Weights & Biases: kept offline, refused without the package, off after a failure."""

import importlib.util
from types import SimpleNamespace

import pytest

from gspo_jax import cli
from gspo_jax.errors import UserError
from gspo_jax.folder import weights_and_biases
from gspo_jax.folder.metrics import MetricsWriter, read_metrics
from gspo_jax.folder.weights_and_biases import WeightsAndBiases, connect
from gspo_jax.setup.checks import check


@pytest.mark.slow
def test_metrics_are_kept_offline_and_a_resumed_run_goes_on_under_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    workdir = tmp_path / "run"
    workdir.mkdir()
    ids = []
    for resumed in (False, True, False):
        sink = connect(workdir, "project", {"seed": 3}, resumed=resumed)
        with MetricsWriter(workdir, after_step=1 if resumed else None, mirrors=[sink]) as writer:
            writer.write(1, {"actor/loss": 0.5, "routing/per_layer": [0.25, 0.75]})
        ids.append((workdir / weights_and_biases.ID_FILE).read_text())
    assert ids[0] == ids[1] != ids[2]
    assert not (workdir / "wandb").exists()
    kept = sorted((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))
    content = b"".join(file.read_bytes() for file in kept)
    assert kept and all(name in content for name in (b"actor/loss", b"routing/per_layer/1", b"seed"))


def test_without_the_package_a_config_that_asks_for_it_is_refused(monkeypatch):
    config = cli.load_config("configs/tiny.py")
    config.log.wandb = "first"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"log.wandb is 'first', but the package wandb is not installed; run .*pip install"
    ):
        check(config)
    config.log.wandb = ""
    check(config)


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_the_run_goes_on_when_it_fails(tmp_path, caplog, fails):
    sent = []
    run = SimpleNamespace(log=lambda metrics, step: sent.append((step, metrics)), finish=lambda: None)
    setattr(run, fails, lambda *_, **__: 1 / 0)
    with MetricsWriter(tmp_path, mirrors=[WeightsAndBiases(run)]) as writer:
        writer.write(0, {"a": 1, "b": [2, 3]})
        writer.write(1, {"a": 4})
        writer.close()
    assert [row["a"] for row in read_metrics(tmp_path)] == [1, 4]
    assert sent == ([] if fails == "log" else [(0, {"a": 1, "b/0": 2, "b/1": 3}), (1, {"a": 4})])
    assert caplog.text.count("Weights & Biases") == 1
