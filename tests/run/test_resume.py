"""Runs that are resumed end bitwise equal to uninterrupted ones, of several turns, and of a mixture of files; runs that
are not what they were are refused, but for fields that may change, whose changes are noted.
"""

import json
import math
import platform
import re
import shutil
import signal
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from gspo_jax import cli
from gspo_jax.config import ADJUSTABLE, MAY_CHANGE, base, benchmark
from gspo_jax.convert import convert
from gspo_jax.data import tasks
from gspo_jax.data.contents import changes
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.notes import read_changes, read_config
from gspo_jax.run import resume
from gspo_jax.run.resume import changed_since
from gspo_jax.setup import inputs
from gspo_jax.setup.fields import at, names
from gspo_jax.setup.same import check_same_run, differences, may_change
from gspo_jax.train import train
from gspo_jax.training.checkpoint import describe
from gspo_jax.training.state import make_optimizer
from gspo_jax.versions import versions
from tests.pods import ROOT, Pod, assert_same_bits, rows_of, run_processes, state_of, train_flags, wait_for

ITERATIONS = 4


def resume_from_a_copy(whole: Path, broken: Path, command: Callable[[Path], list[str]]) -> None:
    """Check that a run goes on to the same bits from a copy of its folder as `kill -9` would leave it.

    The copy is made while the process is suspended.
    """
    with Pod(1, *command(whole)) as pod:
        wait_for((whole / "checkpoints" / "2").exists, pod.processes[0])
        pod.processes[0].send_signal(signal.SIGSTOP)
        shutil.copytree(whole, broken)
        pod.processes[0].send_signal(signal.SIGCONT)
        (said,) = pod.finish()
    assert pod.processes[0].returncode == 0, said
    assert not (broken / "checkpoints" / str(ITERATIONS)).exists(), "the copy was made before the end"
    (said,) = run_processes(1, *command(broken))
    assert "resuming from iteration" in said
    assert_same_bits(whole, broken, step=ITERATIONS)


MIXTURE = """
from gspo_jax.config import source
from tests import pod_config

def get_config():
    config = pod_config.get_config("calculator,partial,single")
    config.data.task, config.data.options = "jsonl", {}
    config.data.sources = {
        "sums": source("DATA/sums.jsonl", weight=3.0, rewards=("exact_answer",)),
        "more": source("DATA/more.jsonl", instruction="="),
        "form": source("DATA/form.jsonl", rewards=("answer_format",), correct="answer_format"),
    }
    config.rewards.answer_format = 0.5
    config.sampling.keep_top = 4
    return config
"""


@pytest.mark.slow
def test_adapters_on_a_mixture_resume_with_unfinished_episodes_to_the_same_bits(tmp_path):
    """A run on three files, in several turns; its checkpoints go with one base alone, and become folders to load.

    On one device; test_branch.py takes sharded adapters from a checkpoint.
    """
    records = list(
        tasks.load("arithmetic", split="train", data_dir=str(tmp_path / "tfds"), difficulty="easy", limit=120)
    )
    for name, part in zip(("sums", "more", "form"), (records[:60], records[60:100], records[100:]), strict=True):
        lines = [json.dumps({"prompt": record["question"], "answer": record["answer"]}) for record in part]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "mixture.py").write_text(MIXTURE.replace("DATA", str(tmp_path)), encoding="utf-8")
    base = shutil.copytree(ROOT / "tests" / "golden" / "adder", tmp_path / "base")
    settings = {"model.folder": base, "iterations": ITERATIONS, "checkpoint.every": 1, "reference.kl_weight": 0.01}
    settings |= {"adapter.rank": 4, "adapter.expert_rank": 2, "optimizer.learning_rate": 1e-2}
    settings |= {"adapter.base_dtype": "int8", "sampling.slots": 4}  # never halved: one loop is compiled

    def mixed(workdir: Path) -> list[str]:
        return ["-m", "gspo_jax.train", *train_flags(str(tmp_path / "mixture.py"), workdir, settings)]

    resume_from_a_copy(tmp_path / "whole", tmp_path / "broken", mixed)
    found = rows_of(tmp_path / "whole")
    assert max(row.get("actor/grad_norm", 0) for row in found) > 0.01, "some update has a gradient"
    for name in ("reward/exact_answer", "reward/answer_format"):
        assert any(row.get(name) is not None for row in found)
    assert all(row["reward/failed"] == 0 for row in found if "reward/failed" in row), "no reward is asked in vain"
    assert max(row.get("reference/kl", 0) for row in found) > 1e-6, "adapters move the policy away from its base"
    older = [row["response/older"] for row in found if row.get("iteration", 0) > 2]
    assert max(older) > 0, "some responses resume from the checkpoint's buffer"
    masses = [row["sampling/kept_mass"] for row in found if "sampling/kept_mass" in row]
    assert 0 < min(masses) < 1 and max(masses) <= 1, "1 where the buffer fills a batch, so that nothing is sampled"
    assert found[-1]["partial/left"] > 0 and max(row.get("partial/calls", 0) for row in found) > 0
    params = {name for name in state_of(tmp_path / "whole" / "checkpoints", ITERATIONS) if ".params." in name}
    assert params and all(name.endswith(("_adapter.a.value", "_adapter.b.value")) for name in params)

    whole, parts, merged = tmp_path / "whole", tmp_path / "adapters", tmp_path / "merged"
    assert convert(whole, parts)["format"] == "peft"
    assert convert(whole, merged, merge=True)["format"] == "huggingface"
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged))
    assert before.keys() == after.keys()
    moved = {name for name in before if np.any(before[name] != after[name])}
    assert moved == {name for name in before if "_proj" in name}
    assert json.loads((parts / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    save_file(after, base / "model.safetensors")
    with pytest.raises(UserError, match="are not those that the checkpoint's adapters were trained beside"):
        convert(whole, tmp_path / "again")


JUDGE = """
import scale

def grader(prompt, completion, record):
    return float(len(completion) % 2 == VALUE)
"""


def write_rows(file: Path, numbers: range, **fields: object) -> None:
    rows = ({"question": f"{i}+{i + 1}=", "answer": str(2 * i + 1), "hint": "odd", **fields} for i in numbers)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.faults
def test_a_run_whose_data_files_or_reference_changed_is_refused_by_name(tmp_path, capsys, monkeypatch):
    """One after the other; with all put back it goes on, and longer; what may change, and did, is said."""
    folder, rows, held_out, judge, shots = (
        tmp_path / name for name in ("model", "rows.jsonl", "held_out.jsonl", "judge.py", "shots.jsonl")
    )
    shutil.copytree(ROOT / "tests" / "golden" / "adder", folder)
    write_rows(rows, range(20))
    write_rows(held_out, range(20, 30))
    write_rows(tmp_path / "own.jsonl", range(30, 34))
    judge.write_text(JUDGE.replace("VALUE", "1"))
    (tmp_path / "scale.py").touch()
    shots.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}))
    config = cli.load_config(f"{ROOT}/configs/tiny.py:runlocal")
    config.update_from_flattened_dict(
        {"model.folder": str(folder), "iterations": 1, "sampling.group_size": 4, "reference.kl_weight": 0.1}
        | {"data.task": "jsonl", "data.train": str(rows), "data.test": str(held_out), "data.few_shot": str(shots)}
        | {"data.data_dir": "", "sampling.max_response_length": 8, "data.max_prompt_length": 16}
    )
    del config.data.options["difficulty"]
    config.functions.grader, config.rewards.grader = f"{judge}:grader", 0.5
    config.benchmarks.own = benchmark(str(tmp_path / "own.jsonl"), every=1, samples=4)
    train(config, tmp_path / "run")

    def weights() -> None:
        params = load_file(folder / "model.safetensors")
        save_file(params | {"model.norm.weight": params["model.norm.weight"] * 2}, folder / "model.safetensors")

    settings = folder / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for file, change, says in (
        (
            rows,
            lambda: write_rows(rows, range(20), answer="7"),
            f"the records of {rows} .* they differ in answer, worked;",
        ),
        (rows, lambda: write_rows(rows, range(20), hint="even"), "they differ in hint; put back what was there"),
        (rows, lambda: write_rows(rows, range(1, 21)), "they differ in answer, prompt as tokens, question"),
        (
            shots,
            lambda: shots.write_text('{"prompt": "1+1=", "completion": "3"}'),
            "^data.few_shot changed since the run",
        ),
        (
            settings,
            lambda: settings.write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template})),
            None,
        ),
        (folder / "model.safetensors", weights, "^the weights of the reference policy changed since the run in"),
    ):
        before = file.read_bytes()
        change()
        with pytest.raises(UserError, match=says or "^tokenizer_config.json of the model changed since the run in"):
            train(config, tmp_path / "run")
        file.write_bytes(before)
    write_rows(held_out, range(20, 30), answer="7")
    write_rows(tmp_path / "own.jsonl", range(30, 34), hint="new")
    judge.write_text(JUDGE.replace("VALUE", "0"))
    (tmp_path / "scale.py").write_text("FACTOR = 2")
    config.iterations = 2
    monkeypatch.setattr(resume, "versions", lambda: versions() | {"jax": "0.10.2"})
    capsys.readouterr()
    train(config, tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "resuming from iteration 1" in said
    assert "warning: the evaluation on held-out records is not what it was (answer, worked): do not compare its" in said
    assert "warning: the benchmark own is not what it was (hint): do not compare its accuracies" in said
    changed = "functions.grader (judge.py) and functions.grader (scale.py)"
    assert f"warning: {changed} changed since the run was saved: do not compare" in said
    assert f"warning: the run was saved under jax {versions()['jax']} and goes on under jax 0.10.2: its numbers" in said
    assert describe(str(tmp_path / "run" / "checkpoints" / "1"))["run"]["versions"] == versions()
    assert read_config(tmp_path / "run")["versions"] == versions()


SAVED = {
    "inputs": {"tokenizer.json of the model": "a1", "functions.grader (judge.py)": "b2"},
    "measured_on": {"the benchmark own": {"answer": "c3"}},
    "versions": {"python": "3.13.0", "jax": "0.12.0"},
}


@pytest.mark.parametrize(
    ("here", "says"),
    [
        ({}, []),
        ({"inputs": {"functions.grader (judge.py)": "b2"}}, []),  # others are refused before
        (
            {"inputs": {"functions.grader (judge.py)": "b3"}},
            ["functions.grader (judge.py) changed since the run"],
        ),
        (
            {"inputs": {"functions.grader (judge.py)": "b2", "functions.grader (new.py)": ""}},
            ["functions.grader (new.py) changed since"],
        ),
        (
            {"measured_on": {"the benchmark own": {"answer": "c4", "hint": "d"}}},
            ["is not what it was (answer, hint): do"],
        ),
        ({"measured_on": {}}, []),
        ({"versions": {"python": "3.13.0", "jax": "0.12.1"}}, ["under jax 0.12.0 and goes on under jax 0.12.1: its"]),
        (
            {"versions": {"python": "3.12.9", "jax": "0.12.0", "libtpu": "0.0.50"}},
            ["under no libtpu, python 3.13.0 and goes on under libtpu 0.0.50, python 3.12.9: its numbers may differ"],
        ),
    ],
)
def test_what_may_change_and_did_is_one_sentence(here, says):
    found = changed_since(SAVED, **SAVED | here)
    assert len(found) == len(says) and all(part in text for part, text in zip(says, found, strict=True))


@pytest.mark.parametrize("name", inputs.MODEL_FILES)
def test_every_file_of_the_model_that_is_read_has_a_digest(tmp_path, name):
    """Whether it is there from the beginning or not; another file of the folder has none."""
    config = base()
    (tmp_path / "notes.txt").touch()
    before = inputs.of_run(config, tmp_path)
    (tmp_path / name).write_text("{}")
    then = inputs.of_run(config, tmp_path)
    (tmp_path / name).write_text("{ }")
    assert changes(before, then) == changes(then, inputs.of_run(config, tmp_path)) == [f"{name} of the model"]


def test_versions_are_those_of_what_is_installed():
    found = versions()
    assert {"python", "gspo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"} <= found.keys()
    assert found["jax"] == jax.__version__ and found["python"] == platform.python_version()
    assert all(re.fullmatch(r"[\w.+]+", version) for version in found.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"optimizer.schedule": "cosine"}, r"falls to 0 \(optimizer.schedule is 'cosine'\); set it back, or"),
        ({"critic.optimizer.schedule": "cosine"}, ""),
        (
            {"critic.optimizer.schedule": "cosine", "objective.name": "ppo"},
            r"\(critic.optimizer.schedule is 'cosine'\)",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_a_run_can_be_longer_only_if_no_learning_rate_falls_over_its_length(changes, says):
    config = base()
    config.update_from_flattened_dict(changes)
    saved = config.to_dict()
    check_same_run(config, saved, "runs/a")
    config.iterations = 2000
    if not says:
        check_same_run(config, saved, "runs/a")
        return
    with pytest.raises(UserError, match=f"^iterations is 2000 here and 1000 in the run in runs/a, .* {says}"):
        check_same_run(config, saved, "runs/a")


ADDED = {"benchmarks.own.every": 3}
"""Fields of a section that a user may fill."""


def another(name: str) -> object:
    """Return a value that a field does not have by default."""
    value = at(base(), name)
    if isinstance(value, bool) or value is None:
        return 3 if value is None else not value
    return {int: 7, float: value * 2 + 0.125 if isinstance(value, float) else 0}.get(type(value), ("x",))


@pytest.mark.parametrize("pattern", [*ADJUSTABLE, *MAY_CHANGE])
def test_what_may_change_on_resuming_is_noted_with_its_update(pattern):
    """Every field that the pattern stands for, one by one."""
    found = [name for name in names(base()) if fnmatchcase(name, pattern) or name.startswith(pattern)]
    found += [name for name in ADDED if fnmatchcase(name, pattern)]
    assert found
    for name in found:
        config, value = base(), ADDED[name] if name in ADDED else another(name)
        saved = config.to_dict()
        with config.unlocked():
            *sections, key = name.split(".")
            tree = config
            for section in sections:
                if section not in tree:
                    tree[section] = ConfigDict()
                tree = tree[section]
            if key in tree:
                del tree[key]  # with its type
            tree[key] = value
        check_same_run(config, saved, "runs/a")
        assert may_change(name) and list(differences(config, saved)) == [name]
        if not name.startswith(MAY_CHANGE):
            with pytest.raises(
                UserError, match=f"^{name} is .*; set it back, or start another run with another --runs$"
            ):
                check_same_run(config, saved, "runs/a", flag="--runs", adjusts=False)


def test_what_may_not_change_on_resuming_may_in_a_run_from_its_weights():
    config = base()
    saved = config.to_dict()
    for name in names(base()):
        if not may_change(name):
            other = base().to_dict()
            tree = other
            *sections, key = name.split(".")
            for section in sections:
                tree = tree[section]
            tree[key] = another(name)
            with pytest.raises(UserError, match=rf"^{name} is .*, such as from this one's weights \(--from=runs/a\)$"):
                check_same_run(ConfigDict(other), saved, "runs/a")
    config.sampling.partial.prompts, config.training.old_logprobs = 256, "sampler"
    saved = config.to_dict()
    config.training.old_logprobs = "recompute"
    with pytest.raises(UserError, match=r"^training.old_logprobs amounts to 'recompute' here and to 'sampler' in"):
        check_same_run(config, saved, "runs/a")  # what it keeps of unfinished rollouts
    config.routing.replay = saved["routing"]["replay"] = "r3w"  # the same either way
    check_same_run(config, saved, "runs/a")
    config.routing.replay = saved["routing"]["replay"] = "none"
    config.training.old_logprobs, config.sampling.keep_top = "sampler", 20
    with pytest.raises(UserError, match=r"^sampling.keep_top is 20 here and 0 in the run in runs/a; set it back"):
        check_same_run(config, saved, "runs/a")


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-3},
        {"b1": 0.5, "b2": 0.5},
        {"weight_decay": 0.1},
        {"no_decay": ()},
        {"max_grad_norm": math.inf},
    ],
    ids=lambda change: "-".join(change),
)
def test_no_change_of_the_optimizer_shapes_its_state(change):
    given = base().optimizer.to_dict()
    assert all(f"optimizer.{name}" in ADJUSTABLE for name in change)
    params = {"norm": jax.ShapeDtypeStruct((4,), np.float32), "embed": jax.ShapeDtypeStruct((8, 4), np.float32)}
    before, after = (
        jax.eval_shape(make_optimizer(total_updates=10, **each)[0].init, params) for each in (given, given | change)
    )
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.leaves(before) == jax.tree.leaves(after)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_hyper_parameters_change_together_and_every_change_is_noted(tmp_path, capsys):
    """A KL is switched on, changed and switched off, and its reference is compared once it is on again."""
    model, own = shutil.copytree(ROOT / "tests" / "golden" / "adder", tmp_path / "model"), tmp_path / "own.jsonl"
    write_rows(own, range(8))
    config = cli.load_config(f"{ROOT}/tests/pod_config.py:single")
    config.update_from_flattened_dict(
        {"model.folder": str(model), "data.data_dir": str(tmp_path / "data"), "iterations": 1, "eval.every": 100}
        | {"sampling.slots": 4}
    )
    train(config, tmp_path / "run")
    changed = {"optimizer.learning_rate": 5e-5, "optimizer.b1": 0.8, "optimizer.weight_decay": 0.1}
    changed |= {"optimizer.no_decay": ("norm",), "optimizer.max_grad_norm": 0.5, "objective.gspo.low": 1e-3}
    changed |= {"reference.kl_weight": 0.05, "reference.estimator": "k2", "overlong.penalty": 0.5}
    changed |= {"routing.balance_weight": 0.01, "sampling.temperature": 0.9, "sampling.top_k": 50, "iterations": 2}
    changed |= {"training.entropy_weight": 0.01, "training.old_logprobs": "recompute", "mismatch.correction": "tis"}
    changed |= {"sampling.rounds": 2}
    config.update_from_flattened_dict(changed)
    config.benchmarks.own = benchmark(str(own), every=1, samples=4)
    capsys.readouterr()
    train(config, tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "optimizer.learning_rate 0.0001 → 5e-05 from update 3 on" in said
    assert "reference.kl_weight 0.0 → 0.05 from update 3 on" in said and "is not what it was" not in said
    noted = read_changes(tmp_path / "run")
    fields = {change["field"] for change in noted}
    assert fields == {*changed, *(f"benchmarks.own.{name}" for name in ("data", "every", "samples"))}
    assert all((change["update"], change["iteration"]) == (3, 2) for change in noted)
    first, last = read_metrics(tmp_path / "run")[1], read_metrics(tmp_path / "run")[-1]
    assert last["actor/lr"] == pytest.approx(first["actor/lr"] / 2 * 4) and "reference/kl" not in first
    assert {"reference/kl", "benchmark/own"} <= last.keys() and first.keys() < read_metrics(tmp_path / "run")[3].keys()

    for kl_weight in (0.0, 0.05):
        config.iterations, config.reference.kl_weight = config.iterations + 1, kl_weight
        if kl_weight:
            weights = model / "model.safetensors"
            params, kept = load_file(weights), weights.read_bytes()
            save_file(params | {"model.norm.weight": params["model.norm.weight"] * 2}, weights)
            with pytest.raises(UserError, match=r"^the weights of the reference policy changed since the run in"):
                train(config, tmp_path / "run")
            weights.write_bytes(kept)
        train(config, tmp_path / "run")
    later = [
        (change["field"], change["after"], change["update"]) for change in read_changes(tmp_path / "run")[len(noted) :]
    ]
    assert later == [
        *(("iterations", 3, 5), ("reference.kl_weight", 0.0, 5)),
        *(("iterations", 4, 7), ("reference.kl_weight", 0.05, 7)),
    ]
    record = describe(str(tmp_path / "run" / "checkpoints" / "4"))["run"]
    assert record["changes"] == read_changes(tmp_path / "run")
