"""An open run in this process: a real SIGTERM, in a phase and in a cold start, and updates skipped in a row."""

import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from gspo_jax import cli, coldstart
from gspo_jax.config import base
from gspo_jax.errors import Diverged, StopRequested
from gspo_jax.folder.storage import RunFolder
from gspo_jax.run import phases as phases_lib
from gspo_jax.run.phases import open_phases
from gspo_jax.run.session import Run, Watch
from gspo_jax.train import train
from tests.pods import ROOT, stopped


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let the watchdog end no test."""
    monkeypatch.setattr(phases_lib, "SETTLED_S", 1000.0)


def poll(look) -> None:
    """Poll for up to ten seconds; a signal is noticed by a thread."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        look()
        time.sleep(0.01)


def test_a_signal_is_noticed_in_its_phase_and_stops_the_run_at_the_next_poll(tmp_path):
    """Afterwards it is handled as before the run."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopRequested), open_phases(base(), RunFolder(name="run", local=tmp_path)) as phases:
        phases.enter("reward")
        phases.poll()
        assert not phases.noticed()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not phases.noticed() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert phases.noticed()
        phases.enter("update")
        poll(phases.poll)
    facts = stopped(tmp_path)
    assert (facts["step"], facts["phase"]) == (None, "reward")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_names_its_phase_if_only_another_process_knew_of_the_signal(tmp_path):
    """Scoring ends in all processes as soon as one of them knows."""
    saved = SimpleNamespace(wait=lambda: None, latest=3)
    run = SimpleNamespace(checkpointer=saved, boundary=SimpleNamespace(done=3), _note_saved=lambda: None)
    run.keep = partial(Run.keep, run)
    with pytest.raises(StopRequested), open_phases(base(), RunFolder(name="run", local=tmp_path)) as run.phases:
        run.phases.enter("reward")
        Run.stop(run)
        raise StopRequested
    assert stopped(tmp_path)["phase"] == "reward"


def test_a_cold_start_is_stopped_at_its_next_step(tmp_path, monkeypatch):
    def begin(*given, on_step):
        on_step()
        os.kill(os.getpid(), signal.SIGTERM)
        poll(on_step)

    monkeypatch.setattr(coldstart, "coldstart", begin)
    config = cli.load_config(f"{ROOT}/configs/tiny.py:runlocal")
    config.data.data_dir, config.data.options.difficulty = str(tmp_path / "data"), "easy"
    with pytest.raises(StopRequested):
        train(config, tmp_path / "run")
    facts = stopped(tmp_path / "run")
    assert (facts["step"], facts["phase"]) == (None, "cold start")


def test_only_updates_skipped_in_a_row_end_the_run_and_the_first_bad_leaf_is_named():
    engine = SimpleNamespace(
        blame=lambda *given: (np.nan, {"policy": {"embed": 0, "head": 2, "norm": 1}, "critic": None})
    )
    config = ConfigDict({"training": {"max_skipped": 3}, "optimizer": {"learning_rate": 1e-6}})
    run = SimpleNamespace(engine=engine, config=config, phases=None, skipped=0, files=SimpleNamespace(name="runs/a"))
    run.traces = None
    watch = Watch(run)
    for skipped in (1, 1, 0, 1, 1):
        watch.updated(None, None, 0, {"update/skipped": skipped})
    with pytest.raises(
        Diverged,
        match=r"^3 updates in a row were skipped \(.* not finite is policy\.head\); .*=5e-07, or .*--from=runs/a",
    ):
        watch.updated(None, None, 0, {"update/skipped": 1})
    watch.compiled.stop()
