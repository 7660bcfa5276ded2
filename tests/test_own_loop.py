"""The example of a loop of one's own: two iterations without a run folder, and the weights at the end."""

import runpy
from pathlib import Path

import pytest

from gspo_jax.models import huggingface
from tests.tiny import leaf_errors

ADDER = Path(__file__).parent / "golden" / "adder"


@pytest.mark.slow
def test_a_loop_of_one_s_own_needs_no_run_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    runpy.run_path("examples/own_loop.py")["main"](str(ADDER), str(tmp_path / "out"))
    assert capsys.readouterr().out.count("right, ") == 2
    before, after = (
        huggingface.load_params(folder, huggingface.read_config(folder)) for folder in (ADDER, tmp_path / "out")
    )
    assert 0 < leaf_errors(before, after) < 0.1
