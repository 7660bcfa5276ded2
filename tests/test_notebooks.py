"""The notebooks of examples/ run from the first cell to the last, in a fresh process each, and hold no output."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_jax.reporting.writers import read_config
from tests.test_report import _fake

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
RUN = """
import json, sys
space = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
"""


def run(name: str, top: Path) -> str:
    """Run the code cells of a notebook in order, below `top` instead of the repository; return what they print."""
    (top / "examples").mkdir(exist_ok=True)
    for folder in ("configs", "tests"):
        if not (top / folder).exists():
            (top / folder).symlink_to(ROOT / folder)
    done = subprocess.run(
        [sys.executable, "-c", RUN, ROOT / "examples" / f"{name}.ipynb"],
        cwd=top / "examples",
        env=os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_objectives_train_the_toy_policy(tmp_path):
    """A response is right by chance in one place of 8, and in nearly all after training."""
    found = re.findall(r"(\w+): reward ([\d.]+) → ([\d.]+), clipped (\d+)%", run("objectives", tmp_path))
    assert [name for name, *_ in found] == ["gspo", "grpo"]
    for _, first, last, clipped in found:
        assert float(first) < 0.2 and float(last) > 0.9 and int(clipped) > 0


def test_a_run_is_read(tmp_path):
    _fake(tmp_path / "runs" / "notebook")
    said = run("reading_a_run", tmp_path)
    assert "8 updates" in said and "update 8, reward 0.25: '1 < 2?' → '<b>1</b>" in said
    assert "mini-batch 0: 0.00%\nmini-batch 1: 1.00%\n" in said  # flips are 0.01 times the mini-batch


@pytest.mark.slow
def test_a_first_run_trains_and_is_read(tmp_path):
    said = run("first_run", tmp_path)
    assert "eval/accuracy: " in said and "update 6: reward " in said
    assert read_config(tmp_path / "runs" / "notebook")["command"] == ""
    assert "6 updates" in run("reading_a_run", tmp_path)
