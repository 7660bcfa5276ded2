"""The notebooks of examples/ run from the first cell to the last, in a fresh process each, and hold their outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_jax import cli
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.notes import read_config
from gspo_jax.setup import policy
from gspo_jax.setup.checks import check_elsewhere
from tests.studies.test_report import _evaluated, _fake

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
RUN = """
import json, subprocess, sys
space = {"__name__": "__main__"}
for number, cell in enumerate(json.loads(sys.argv[1])):
    if cell.startswith("!"):
        for line in cell.splitlines():
            subprocess.run(line[1:].format(**space), shell=True, check=True)
    elif not cell.startswith("%pip "):
        exec(compile(cell, f"code cell {number}", "exec"), space)
"""


def cells(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(name: str, top: Path, *changes: tuple[str, str]) -> str:
    """Run the code cells of a notebook in order, below `top` instead of the repository; return what they print.

    Lines that begin with ! go to a shell, as in a notebook, and nothing is installed. `changes` has texts of the cells
    and what replaces them.
    """
    (top / "examples").mkdir(exist_ok=True)
    for folder in ("configs", "tests"):
        if not (top / folder).exists():
            (top / folder).symlink_to(ROOT / folder)
    sources = cells(ROOT / "examples" / f"{name}.ipynb")
    for old, new in changes:
        assert any(old in source for source in sources), old
        sources = [source.replace(old, new) for source in sources]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where `python` is this one
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(sources)],
        cwd=top / "examples",
        env=os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT), "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_the_output_of_one_execution(path):
    """CONTRIBUTING.md has the command. one_host needs a TPU and a model, and is stored as nobody ran it."""
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    counts = [cell["execution_count"] for cell in code]
    if path.stem == "one_host":
        assert counts == [None] * len(code) and not outputs
    else:
        assert counts == list(range(1, len(code) + 1)) and outputs
    assert all(output["output_type"] in ("stream", "execute_result", "display_data") for output in outputs)
    assert all(output.get("name", "stdout") == "stdout" for output in outputs), "warnings and logs"
    assert len(text) < 200_000 and not re.search(r'"[^"]*(?<![\w.])/(home|root|tmp|work|Users)/', text)
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


def test_the_run_of_a_real_model_is_read(tmp_path):
    """Without the model: two runs of which nothing is trained, with the rewards of configs/smollm2.py."""
    for name, last in (("smollm2", 0.9), ("smollm2-share", 0.95)):
        folder = _fake(tmp_path / "runs" / name, iterations=1, rewards=("exact_count", "known"))
        _evaluated(folder, 0, ["one", "two"], reward=0.1)
        _evaluated(folder, 2, ["1. One", "2. Two"], reward=last)
        (folder / "finished.json").write_text("{}")
    said = run("smollm2", tmp_path)
    assert "<0>?\n  before (0.10): 'one'\n  after  (0.90): '1. One'\n" in said and "after  (0.95)" in said
    assert "<count>                  0.10 →   0.90\n" in said and "the reward may be gamed: on held-out" in said


@pytest.mark.slow
def test_a_first_run_trains_and_is_read(tmp_path):
    said = run("first_run", tmp_path)
    assert "eval/accuracy: " in said and "update 6: reward " in said
    assert read_config(tmp_path / "runs" / "notebook")["command"] == ""
    assert "6 updates" in run("reading_a_run", tmp_path)


def test_where_there_is_no_run_the_first_one_is_made():
    """By the lines that make it in first_run, which the test above executes."""

    def lines(text: str) -> list[str]:
        return [line.split("  #")[0].strip() for line in text.splitlines()]

    first, reading = (
        next(cell for cell in cells(ROOT / "examples" / f"{name}.ipynb") if "load_config" in cell)
        for name in ("first_run", "reading_a_run")
    )
    condition, _, made = reading.partition('if not Path(RUN, "metrics.jsonl").exists():\n')
    assert 'RUN = "../runs/notebook"' in lines(condition)
    configured = [line for line in lines(first) if line.startswith(("config", "cli."))]
    assert lines(made) == [*configured, "train(config, RUN)"]


def test_one_host_has_flags_for_its_model_and_chips():
    """The flags as they stand in the notebook are those of a valid run of Qwen3-4B on eight chips."""
    space = {}
    for cell in cells(ROOT / "examples" / "one_host.ipynb"):
        if cell.startswith(("CODE = ", "FLAGS = ")):
            exec(cell.replace('"checkout"', repr(str(ROOT))).replace("qwen3-4b", "Qwen3-4B"), space)
    config = cli.read_config([word for word in space["FLAGS"].split() if "--config" in word])
    assert check_elsewhere(config, devices=8) == [], "a folder of that name holds the published model"
    assert config.model.published == "Qwen3-4B" and policy.make_adapters(config) is not None
    assert config.data.enable_thinking is False


@pytest.mark.slow
def test_one_host_trains_and_goes_on_in_another_session(tmp_path):
    """A tiny model and batch, on eight CPU devices with the adapters of the notebook's run.

    The trainer's mesh is that run's; the sampler's shards two heads, as many as the model has.
    The second session has another working folder, and the output of the first.
    """
    data = tmp_path / "input" / "gsm8k"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        lines = [{"question": f"{a}+{b}=?", "answer": f"#### {a + b}"} for a in range(10, 14) for b in range(10, 14)]
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = {"data.prompts_per_batch": 8, "data.max_prompt_length": 256, "sampling.group_size": 4, "eval.prompts": 8}
    sizes |= {"sampling.max_response_length": 64, "sampling.slots": 16, "training.row_tokens": 512}
    sizes |= {"sampling.mesh.tensor": 2, "sampling.mesh.data": 4}
    fields = {"model.published": "", "iterations": 2} | sizes
    thinks = '"--config.data.enable_thinking=False"'
    tiny = (
        ('"checkout"', '".."'),
        ("../input/qwen3-4b", "../tests/golden/adder"),
        ("{DATA}", "../../input/gsm8k"),
        (thinks, ", ".join([thinks, *(f'"--config.{name}={value}"' for name, value in fields.items())])),
    )
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    run("one_host", first, *tiny, ("--config.iterations=2", "--config.iterations=1"))
    assert (first / "examples" / "run" / "report" / "report.html").exists()
    said = run("one_host", second, *tiny, ('PREVIOUS = ""', f'PREVIOUS = "{first}/examples/run"'))
    assert "resuming from iteration 1" in said
    assert [row["step"] for row in read_metrics(second / "examples" / "run")] == list(range(9))
    assert (second / "examples" / "adapters" / "adapter_model.safetensors").exists()
