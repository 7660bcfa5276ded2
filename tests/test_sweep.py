"""Sweeps: which runs they have, what is refused, and that kills, signals and failures lose nothing."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from ml_collections import ConfigDict

from gspo_jax import cli, coldstart, config_files, exits, sweep
from gspo_jax.config import MAY_CHANGE
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import MetricsWriter
from gspo_jax.folder.notes import SAVED_FILE, note, write_config
from gspo_jax.studies import records
from gspo_jax.sweeping.grid import Page, SweepRun, comparisons, find_folder, make_plan
from gspo_jax.sweeping.processes import Children, describe, exit_code
from tests.pods import ROOT, assert_same_bits, rows_of, run_processes, wait_for

TINY = f"--config={ROOT / 'configs/tiny.py'}:runlocal"


def _plan(folder: Path, words: Sequence[str], settings: Sequence[str] = (), seeds: str | None = None) -> list[Page]:
    return make_plan(words, comparisons(words, settings, seeds), folder)


def _names(pages: Sequence[Page]) -> list[str]:
    return [run.name for page in pages for run in page.runs]


def test_every_combination_and_seed_is_a_run_and_a_seed_has_one_cold_start(tmp_path):
    settings = ["objective.name=gspo,grpo", "optimizer.learning_rate=1e-4,1e-5"]
    (page,) = _plan(tmp_path, [TINY, "--config.seed=3", "--config.iterations=5"], settings, "2")
    assert _names([page]) == [
        f"{name},learning_rate={rate}-{seed}"
        for seed in (3, 4)
        for name in ("gspo", "grpo")
        for rate in ("1e-4", "1e-5")
    ]
    made = [(run.config.objective.name, run.config.optimizer.learning_rate, run.config.seed) for run in page.runs]
    assert made[:3] == [("gspo", 1e-4, 3), ("gspo", 1e-5, 3), ("grpo", 1e-4, 3)] and made[-1] == ("grpo", 1e-5, 4)
    cold = [run.cold.folder.name for run in page.runs if run.cold]
    assert len(cold) == 8 and len(set(cold[:4])) == len(set(cold[4:])) == 1 and cold[0] != cold[4]
    flags = ["--config.iterations=5", "--config.seed=3", "--config.objective.name=gspo"]
    flags.append("--config.optimizer.learning_rate=1e-4")
    assert page.runs[0].command[1:] == ["-m", "gspo_jax.train", TINY, *flags, f"--workdir={page.runs[0].folder}"]


@pytest.mark.parametrize(
    ("settings", "seeds", "found"),
    [
        ([], "2", ["seed-0", "seed-1"]),
        ([], "7,2", ["seed-7", "seed-2"]),
        (["routing.replay=none,r3"], None, ["replay=none-0", "replay=r3-0"]),
        (["objective.gspo.low=1e-3,2e-3"], None, ["low=1e-3-0", "low=2e-3-0"]),
        (
            ["objective.gspo.low=1e-3,2e-3", "objective.gspo_token.low=3e-3,4e-3"],
            None,
            [f"objective.gspo.low={x}e-3,objective.gspo_token.low={y}e-3-0" for x in (1, 2) for y in (3, 4)],
        ),
        (["rewards.answer_format=0.1,0.2"], None, ["answer_format=0.1-0", "answer_format=0.2-0"]),
    ],
)
def test_runs_are_named_after_what_varies(settings, seeds, found, tmp_path):
    assert _names(_plan(tmp_path, [TINY], settings, seeds)) == found


def test_runs_share_a_cold_start_only_if_theirs_would_be_the_same():
    def digest(*words: str) -> str:
        return coldstart.digest(cli.read_config([TINY, *words]))

    for field in ("objective.name=grpo", "iterations=9", "optimizer.learning_rate=1.0", "eval.every=3"):
        assert digest(f"--config.{field}") == digest()
    changed = {
        digest(f"--config.{field}")
        for field in (
            *("seed=1", "coldstart.steps=3", "model.dtype=bfloat16", "data.options.difficulty=easy", "mesh.expert=1"),
            *("sampling.max_response_length=16", "training.row_tokens=4096", "coldstart.optimizer.b1=0.5"),
        )
    }
    assert len(changed) == 8 and digest() not in changed


def test_a_cold_start_of_another_config_or_of_other_files_is_not_taken(tmp_path):
    """Of the run's own folder; layout may change. `made_by` is what `coldstart` writes."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("1")
    config = cli.read_config([TINY, f"--config.coldstart.conversations={rows}"])
    folder = tmp_path / "coldstart"
    folder.mkdir()
    coldstart.check_reuse(config, folder, may_change=MAY_CHANGE)
    (folder / coldstart.MADE_BY).write_text(json.dumps(coldstart.made_by(config)))
    config.mesh.data, config.iterations = 1, 7
    coldstart.check_reuse(config, folder, may_change=MAY_CHANGE)
    for name, value in (("coldstart.steps", 3), ("data.test", "x.jsonl"), ("data.answer", "x"), ("seed", 5)):
        other = config.copy_and_resolve_references()
        other.update_from_flattened_dict({name: value})
        says = rf"^{name} is {value!r} here and .* in the cold start in .*; .* another --workdir"
        with pytest.raises(UserError, match=says):
            coldstart.check_reuse(other, folder, may_change=MAY_CHANGE)
    rows.write_text("2")
    with pytest.raises(
        UserError, match=r"^coldstart.conversations \(content\) is '\w+' here and '\w+' in the cold start"
    ):
        coldstart.check_reuse(config, folder, may_change=MAY_CHANGE)


def test_finished_runs_are_known_and_grow_and_others_are_refused(tmp_path):
    settings = ["objective.name=gspo,grpo"]
    (page,) = _plan(tmp_path, [TINY], settings)
    first, second = page.runs
    write_config(first.folder, first.config.to_dict(), command="x")
    note(first.folder, SAVED_FILE, step=2)
    assert (first.is_done(), first.needs_cold_start()) == (True, False)
    assert (second.is_done(), second.needs_cold_start()) == (False, True)
    (longer,) = _plan(tmp_path, [TINY, "--config.iterations=3"], settings)
    assert not longer.runs[0].is_done() and not longer.runs[0].needs_cold_start()
    with pytest.raises(UserError, match=r"top_k is 5 here and 0 in the run in .*gspo-0; .* with another --runs$"):
        _plan(tmp_path, [TINY, "--config.sampling.top_k=5"], settings)


@pytest.mark.parametrize(
    ("words", "settings", "seeds", "says"),
    [
        ([], ["gspo,grpo"], None, "--sweep is 'gspo,grpo'; use FIELD=VALUE,VALUE, such as objective.name=gspo,grpo"),
        ([], ["objective.name=gspo,gspo"], None, "has a value twice"),
        ([], ["optimizer.b1=0.9,0.90"], None, "the runs b1=0.9-0 and b1=0.90-0 have the same settings"),
        (
            [],
            ["eval.every=1,2", "eval.every=3,4"],
            None,
            "--sweep eval.every is given twice; give all its values",
        ),
        ([], ["seed=0,1"], None, "--sweep seed=0,1 sweeps the seed; use --seeds=0,1"),
        ([], ["mesh=1,2"], None, "mesh is a section and not '1'; set one of its fields"),
        ([], ["optimizer.learning_rate=1e-4,-1"], None, "optimizer.learning_rate is -1.0; use a finite number above 0"),
        (
            ["--config.training.old_logprobs=sampler"],
            ["routing.replay=none,r2"],
            None,
            "set training.old_logprobs to 'recompute'",
        ),
        ([], ["mesh.data=2,3"], None, "data×fsdp×expert = 12"),
        (["--config.objective.name=ppo"], ["objective.name=gspo,grpo"], None, "sets a field that the sweep varies"),
        (["--config.model.folder=no"], [], "2", "no is not a folder"),
        ([], [], "0", "--seeds is '0'; use how many, such as 3, or which, such as 0,2,5"),
        ([], [], "-1", "--seeds is '-1'"),
        ([], [], "1,1", "--seeds=1,1 has a seed twice"),
        ([], [], "4294967296,1", "seed is 4294967296; use 0 to 4294967295"),
        (["--config.seed=1"], [], "1,2", "--seeds=1,2 lists the seeds; leave out --config.seed"),
    ],
)
def test_what_is_no_sweep_is_one_sentence(words, settings, seeds, says, tmp_path):
    with pytest.raises(UserError) as error:
        _plan(tmp_path, [TINY, *words], settings, seeds)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_the_folder_of_a_run_is_not_that_of_a_sweep(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="is the folder of a run; give the sweep a folder of its own"):
        find_folder(str(tmp_path))
    with pytest.raises(UserError, match="--runs is ''"):
        find_folder("")


def test_a_folder_has_one_sweep_at_a_time(tmp_path):
    says = r"another sweep uses .*; wait for its end, or give another --runs"
    with sweep.locked(tmp_path / "runs"), pytest.raises(UserError, match=says), sweep.locked(tmp_path / "runs"):
        pass
    with sweep.locked(tmp_path / "runs"):
        pass


def _file(folder: Path, returns: str) -> str:
    text = "from gspo_jax import cli\nfrom gspo_jax.types import Comparison\n\n\ndef get_config(arg=''):\n"
    text += f"    return cli.load_config('{ROOT}/configs/tiny.py:runlocal')\n\n\n"
    (folder / "own.py").write_text(f"{text}def get_sweep(arg=''):\n    return {returns}\n")
    return f"--config={folder / 'own.py'}"


@pytest.mark.parametrize(
    ("returns", "found"),
    [
        ("[{'seed': 4}, {'objective.name': 'ppo', 'critic.trunk': 'policy'}]", ["seed-4", "ppo,trunk=policy-0"]),
        ("Comparison(runs=[{'sampling.stop_ids': ('=',)}, {'eval.every': 3}], seeds=2)", None),
        ("[Comparison(name=n, runs=[{'eval.every': e}]) for n, e in (('a', 1), ('b', 2))]", ["a/seed-0", "b/seed-0"]),
    ],
)
def test_a_sweep_in_a_file(returns, found, tmp_path):
    words = [_file(tmp_path, returns)]
    made = _names(_plan(tmp_path / "runs", words))
    assert made == (found or ["stop_ids=_=_,_-0", "every=3-0", "stop_ids=_=_,_-1", "every=3-1"])
    assert _names(_plan(tmp_path / "runs", words, ["objective.name=gspo,grpo"])) == ["gspo-0", "grpo-0"]


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("None", "returns None; return a list of overrides"),
        ("[]", "returns []; return a list of overrides"),
        ("1 / 0", "own.py:10 raises ZeroDivisionError: division by zero"),
        ("[{'objective.nam': 'gspo'}]", "no field 'objective.nam'; did you mean 'objective.name'?"),
        (
            "[{'sampling.group_size': None}, {'sampling.group_size': 8}]",
            "sampling.group_size is 'None'; use a whole number",
        ),
        ("Comparison(runs=[])", "has runs []; use a list of overrides"),
        ("Comparison(runs=[{}], panels='loss')", "has panels 'loss'; use 'training' or 'routing'"),
        ("Comparison(runs=[{}], seeds='2')", "seeds is '2'; use a whole number"),
        ("Comparison(runs=[{'seed': 1}], seeds=2)", "has 2 seeds; use 1 or more, and 1 if its runs set the seed"),
        ("[Comparison(runs=[{}]), Comparison(runs=[{'eval.every': 2}])]", "needs a name of its own"),
        ("[Comparison(runs=[{}], name='../a'), Comparison(runs=[{}], name='b')]", "needs a name of its own"),
    ],
)
def test_a_file_with_a_wrong_sweep_is_one_sentence(returns, says, tmp_path):
    with pytest.raises(UserError) as error:
        _plan(tmp_path / "runs", [_file(tmp_path, returns)])
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_flags_of_a_config_are_found_however_they_are_written():
    argv = ["--sweep", "a=1,2", "--config", "x.py", "-config.a=1", "--jobs=2", "--config.b", "-3", "--noconfig.c"]
    argv += ["--config.d", "--config.e=f g", "--seeds=config"]
    assert config_files.config_words(argv) == [
        *("--config=x.py", "-config.a=1", "--config.b=-3", "--noconfig.c", "--config.d", "--config.e=f g")
    ]


def test_the_commands_of_the_page_are_sweeps(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = [line for line in (ROOT / "docs/sweeps.md").read_text().splitlines() if "-m gspo_jax.sweep" in line]
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line)[3:]
        settings = [words[i + 1] for i, word in enumerate(words) if word == "--sweep"]
        seeds = [word.partition("=")[2] for word in words if word.startswith("--seeds=")]
        assert len(_names(_plan(tmp_path, config_files.config_words(words), settings, *seeds))) in (3, 6, 36, 60)


def test_the_exit_code_says_whether_to_start_again():
    assert exit_code([exits.DIVERGED, exits.MISTAKE]) == exits.DIVERGED
    assert exit_code([exits.DIVERGED, exits.LATE]) == exit_code([-signal.SIGKILL]) == 1


class _Played(SweepRun):
    """A run whose trainer is a shell command."""

    @property
    def command(self) -> list[str]:
        return ["sh", "-c", self.name]


@pytest.mark.parametrize(
    ("script", "failed"),
    [
        ("exit 0", 0),  # code of the user's has ended it
        ("echo {} >stopped.json", 0),  # as an earlier start may have left it
        ("exit 5", 5),
        ("echo '{\"step\": 9}' >saved.json", None),
    ],
)
def test_a_run_is_finished_if_its_folder_says_so_too(script, failed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ConfigDict({"iterations": 9, "processes": {"grace_s": 1}})
    run = _Played(name=script, folder=tmp_path, words=(), config=config, cold=None)
    kept = []
    children = Children([run], jobs=1, logs=tmp_path, keep=kept.append)
    children.train()
    assert children.failed == ({} if failed is None else {script: failed})
    assert kept == ([run] if failed is None else [])
    assert exit_code([0]) == 1 and describe(0) == "exit code 0, although it is not finished"


def test_a_dry_run_prints_the_commands_and_touches_neither_disk_nor_devices(tmp_path):
    script = """
import runpy, sys
try:
    runpy.run_module("gspo_jax.sweep", run_name="__main__", alter_sys=True)
finally:
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
"""
    words = [TINY, "--sweep", "objective.name=gspo,grpo", "--seeds=2", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not any(tmp_path.iterdir())
    plan, *lines = done.stdout.splitlines()
    assert plan == "# runs/tiny-sweep: 0 of 4 runs are finished, 4 to train; cold starts to train: 2"
    modules = [shlex.split(line)[2] for line in lines if line.startswith(sys.executable)]
    each = ["gspo_jax.coldstart", "gspo_jax.train", "gspo_jax.train"]
    assert modules == [*each, *each, "gspo_jax.report"] and len(lines) == 7 + 4  # and the cold start is copied
    flags = ["--baseline=runs/tiny-sweep/gspo-0", "--out=runs/tiny-sweep/report"]
    assert " ".join([*flags, "--table=runs/tiny-sweep/report/results.md"]) in lines[-1]


def test_a_run_that_is_only_in_the_record_is_done_and_finished_ones_are_added(tmp_path, monkeypatch):
    settings, record = ["objective.name=gspo,grpo"], tmp_path / "data" / "tiny.csv"
    (page,) = pages = _plan(tmp_path / "runs", [TINY], settings)
    for run in page.runs:
        write_config(run.folder, run.config.to_dict(), command="x")
        with MetricsWriter(run.folder) as writer:
            for step in range(1, 3):
                writer.write(step, {"iteration": step, "minibatch": 0, "reward/mean": step / 4})
        note(run.folder, SAVED_FILE, step=2)
    monkeypatch.setattr(sweep, "write_report", lambda pages, folder: 0)
    assert sweep.sweep(pages, tmp_path / "runs", jobs=1, record=record) == 0
    assert list(records.read(record)) == ["grpo-0", "gspo-0"] and len(record.read_text().splitlines()) == 5
    elsewhere = _plan(tmp_path / "other", [TINY], settings)
    assert sweep.without_recorded(elsewhere, record)[0].runs == []
    assert len(sweep.without_recorded(pages, record)[0].runs) == 2, "their folders are here, for the report"
    assert (
        len(sweep.without_recorded(_plan(tmp_path / "other", [TINY], ["objective.name=gspo,rspo"]), record)[0].runs)
        == 1
    )
    longer = _plan(tmp_path / "other", [TINY, "--config.iterations=3"], settings)
    assert len(sweep.without_recorded(longer, record)[0].runs) == 2
    record.write_text(record.read_text().replace(",gspo,", ",luspo,"))
    with pytest.raises(
        UserError, match=r"has the run gspo-0 with objective\.name='luspo', and here it is 'gspo'; give another"
    ):
        sweep.without_recorded(elsewhere, record)


def test_the_baseline_of_a_report_is_listed_first_and_finished(tmp_path):
    words = [TINY, "--config.model.folder=tests/golden/adder"]
    (page,) = make_plan(words, comparisons(words, ["objective.name=grpo,gspo"], "2"), tmp_path)
    names = [run.name for run in page.runs]
    assert names == ["grpo-0", "gspo-0", "grpo-1", "gspo-1"]
    assert f"--baseline={tmp_path / 'grpo-1'}" in sweep.report_flags(page, page.runs[1:])  # grpo-0 failed
    assert not [word for word in sweep.report_flags(page, page.runs[1:2]) if "--baseline" in word]


ITERATIONS = 6
"""Iterations of the runs below."""


ONE_DEVICE = {"cpu_devices": 1, "mesh.data": 1, "mesh.fsdp": 1, "mesh.expert": 1, "sampling.slots": 4}
"""Fields for runs whose programs are soon compiled."""


def _fields(data: Path, **more: object) -> list[str]:
    """Return flags for short runs, which learn something: their entropy has a weight."""
    fields = {"data.data_dir": data, "iterations": ITERATIONS, "coldstart.steps": 10, "training.entropy_weight": 0.01}
    fields |= {"data.options.difficulty": "easy", "eval.every": 3} | more
    return [f"--config.{name}={value}" for name, value in fields.items()]


@contextmanager
def _sweep(folder: Path, *words: str) -> Iterator[subprocess.Popen]:
    """Run a sweep of configs/tiny.py:runlocal, which ends with the block."""
    running = subprocess.Popen(
        [sys.executable, "-m", "gspo_jax.sweep", TINY, *words, f"--runs={folder}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def _finish(folder: Path, *words: str) -> tuple[int, str]:
    """Run a sweep to its end; return its exit code and output."""
    with _sweep(folder, *words) as running:
        said, _ = running.communicate(timeout=900)
    return running.returncode, said


def _trainers(folder: Path) -> list[psutil.Process]:
    """Return the live processes whose run folder is in a folder."""
    alive = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(word.startswith(f"--workdir={folder}/") for word in process.cmdline()):
                alive.append(process)
    return alive


@pytest.mark.faults
def test_a_sweep_that_is_stopped_and_killed_ends_with_the_runs_of_an_undisturbed_one(data, tmp_path):
    folder, words = tmp_path / "sweep", ["--sweep", "objective.name=gspo,grpo", *_fields(data, **ONE_DEVICE)]

    with _sweep(folder, *words, "--jobs=2") as running:  # SIGTERM in both runs
        begun = [folder / name / "metrics.jsonl" for name in ("gspo-0", "grpo-0")]
        wait_for(lambda: all(file.exists() for file in begun), running, 900)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=300)
    assert running.returncode == 0 and "stopped: 0 of 2 runs are finished; the same command goes on\n" in said, said
    assert (folder / "logs" / "grpo-0.log").exists() and not _trainers(folder) and not (folder / "report").exists()

    saved = folder / "gspo-0" / "saved.json"
    before = saved.read_bytes() if saved.exists() else b""  # the stop may have saved iteration 0
    with _sweep(folder, *words) as running:  # Ctrl-C in the first
        wait_for(lambda: saved.exists() and saved.read_bytes() != before, running, 900)
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=300)
    assert running.returncode == 130 and "the same command goes on\n" in said and not _trainers(folder), said

    with _sweep(folder, *words) as running:  # kill -9 in the second
        wait_for(
            lambda: any("objective.name=grpo" in word for p in _trainers(folder) for word in p.cmdline()), running, 900
        )
        running.kill()
    psutil.wait_procs(_trainers(folder), timeout=60)  # one that was still importing ends once it has
    assert not _trainers(folder)
    done = (folder / "gspo-0" / "metrics.jsonl").stat().st_mtime_ns

    code, said = _finish(folder, *words)
    assert code == 0 and "gspo-0: starts" not in said, said
    code, said = _finish(folder, *words)
    assert code == 0 and f"{folder}: 2 of 2 runs are finished, 0 to train; cold starts to train: 0\n" in said, said
    assert (folder / "gspo-0" / "metrics.jsonl").stat().st_mtime_ns == done and ": starts" not in said
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("report*"))
    assert files == ["report", *(f"report/report{x}" for x in ("-narrow.png", ".html", ".png"))]
    table = [line for line in (folder / "report" / "results.md").read_text().splitlines() if line.startswith("| g")]
    assert [line.split(" | ")[0] for line in table] == ["| grpo", "| gspo", "| grpo"], "two runs, and their difference"

    flags = ["--config.objective.name=grpo", f"--workdir={tmp_path / 'alone'}"]  # with a cold start of its own
    run_processes(1, "-m", "gspo_jax.train", TINY, *_fields(data, **ONE_DEVICE), *flags, seconds=900)
    assert_same_bits(tmp_path / "alone", folder / "grpo-0", step=ITERATIONS)
    assert max(row.get("actor/grad_norm", 0) for row in rows_of(tmp_path / "alone")) > 0


@pytest.mark.slow
def test_what_fails_is_named_and_the_others_go_on(data, tmp_path):
    """A run diverges, and a cold start asks for more devices than there are."""
    fields = {
        "model.folder": ROOT / "tests" / "golden" / "adder",
        "training.max_skipped": 1,
        "iterations": 1,
        "data.prompts_per_batch": 4,
        "sampling.group_size": 4,
        "eval.prompts": 4,
    } | ONE_DEVICE
    code, said = _finish(tmp_path, "--sweep", "optimizer.learning_rate=1e38,1e-4", *_fields(data, **fields))
    assert code == exits.DIVERGED, said
    assert "error: failed: learning_rate=1e38-0 (exit code 5); 1 of 2 runs are finished; see the output above" in said
    assert "learning_rate=1e-4-0" in (tmp_path / "report" / "results.md").read_text()

    code, said = _finish(tmp_path / "other", "--sweep", "cpu_devices=4,16", "--jobs=2", *_fields(data))
    assert code == exits.MISTAKE and "0 of 2 runs are finished" in said and "cpu_devices=4-0" not in said, said
    logs = [path.read_text() for path in (tmp_path / "other" / "logs").glob("coldstart-0-*.log")]
    assert sorted("needs 8 devices but there are 4" in log for log in logs) == [False, True]
