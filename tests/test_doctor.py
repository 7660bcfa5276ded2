"""The doctor's findings, on this machine and on simulated ones with problems."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import psutil
import pytest

from gspo_jax import doctor, installs
from gspo_jax.config import base
from gspo_jax.doctor import Finding
from gspo_jax.rollout.draws import Verdict

ROOT = Path(__file__).parent.parent


def command(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run the command, without these variables of the environment."""
    return subprocess.run(
        [sys.executable, "-m", "gspo_jax.doctor", *arguments],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name not in without} | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_command_on_a_machine_that_can_train(tmp_path):
    file = tmp_path / "facts.json"
    done = command("--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}", f"--json={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(file.read_text())
    found = {finding["check"]: finding for finding in facts["findings"]}
    assert facts["ok"] and set(found) >= {"jax", "devices", "processes", "mesh", "host", "run folder", "disk"}
    assert found["devices"]["found"].startswith("8 × cpu") and found["mesh"]["found"].startswith("data ")
    assert all(finding["check"] in done.stdout for finding in facts["findings"])
    assert all(finding["remedy"] for finding in facts["findings"] if finding["state"] != "ok")
    assert not list((tmp_path / "run").iterdir()), "the probe file is removed again"


def test_command_on_one_that_cannot(tmp_path):
    (tmp_path / "file").write_text("")
    done = command("--config=configs/tiny.py", "--config.mesh.data=3", f"--workdir={tmp_path / 'file'}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: mesh, run folder failed; see the table"
    assert "needs 12 devices but" in done.stdout


def test_command_without_a_config_takes_none_of_its_fields():
    done = command("--config.mesh.data=3")
    assert done.returncode == 2 and "--config is missing" in done.stderr and done.stderr.count("\n") == 1


def test_versions_out_of_bounds_and_missing(monkeypatch):
    monkeypatch.setattr(
        metadata, "requires", lambda _: ["flax<0.13,>=0.12.4", "jax<0.13,>=0.10.2", "jax[tpu]; extra == 'tpu'"]
    )
    installed = {"flax": "0.13.1", "jax": "0.12.9", "orbax-checkpoint": "0.12.8", "jaxlib": "0.12.9"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    found = {finding.check: finding for finding in doctor.versions()}
    assert found["jax"].state == found["orbax-checkpoint"].state == found["libtpu"].state == "ok"
    assert found["flax"].state == "failed" and found["flax"].found == "0.13.1, not <0.13,>=0.12.4"
    assert found["flax"].remedy == f"Install a supported version: {installs.of_package('flax')}"
    assert (found["grain"].state, found["grain"].found) == ("failed", "not installed")


def test_the_project_s_own_bounds_are_read():
    """The version bounds come from pyproject.toml, and the installed jax and flax satisfy them."""
    assert {finding.check: finding.state for finding in doctor.versions()}.items() >= {
        "jax": "ok",
        "flax": "ok",
    }.items()


@pytest.mark.slow
@pytest.mark.skipif(doctor.on_tpu_vm(), reason="this machine has TPU chips")
def test_without_chips_libtpu_is_silent():
    """It is installed for its compiler, and jax asks it for chips."""
    bare = {name: text for name, text in os.environ.items() if not name.startswith(("TPU_", "JAX_", "XLA_"))}
    command = [sys.executable, "-m", "gspo_jax.doctor", "--config=configs/tiny.py"]
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False, timeout=200)
    assert done.stderr == "" and done.returncode == 0, done.stderr


def test_devices_say_their_memory_and_who_holds_them(monkeypatch):
    chip = SimpleNamespace(device_kind="TPU v5p", platform="tpu", memory_stats=lambda: {"bytes_limit": 95 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [chip] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 64)
    assert doctor.devices() == Finding("devices", "ok", "64 × TPU v5p, 95.0 GiB each")
    monkeypatch.setattr(doctor, "on_tpu_vm", lambda: True)
    chip.platform, chip.memory_stats = "cpu", lambda: None
    assert doctor.devices().state == "failed" and installs.of_extra("tpu") in doctor.devices().remedy

    def taken():
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED\nlong\nstory")

    monkeypatch.setattr(jax, "local_devices", taken)
    assert doctor.devices().found == "Unable to initialize backend 'tpu': ABORTED"
    assert doctor.devices().state == "failed" and "Another process may hold the TPU" in doctor.devices().remedy


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that puts an `nvidia-smi` with this script on a PATH of its own."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


H100, T4 = "NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15, 9.0", "Tesla T4, 15360 MiB, 550.54.15, 7.5"


def test_gpus_that_jax_does_not_use(nvidia_smi, monkeypatch):
    assert doctor.gpus() == [], "there is no nvidia-smi"
    nvidia_smi(f"echo '{H100}'; echo '{H100}'; echo '{T4}'; test $# = 2")
    first, second = doctor.gpus()
    assert first.found == "2 × NVIDIA H100 80GB HBM3, 81559 MiB each, driver 550.54.15"
    assert second.found == "1 × Tesla T4, 15360 MiB each, driver 550.54.15"
    install = installs.of_extra("cuda")
    assert first.state == "warning" and first.remedy == f"jax does not use it: {install} and unset JAX_PLATFORMS."
    monkeypatch.setattr(doctor, "CUDA_PLUGINS", ("jax",))  # as if the plugin were installed
    assert doctor.gpus()[0].remedy == "jax does not use it: unset JAX_PLATFORMS."
    with jax_platforms(None):
        says = """see what python -c "import jax; jax.devices('cuda')" says"""
        assert doctor.gpus()[0].remedy == f"jax does not use it: {says}."
    nvidia_smi("echo 'NVIDIA-SMI has failed because it could not communicate with the driver.\nMore.'; exit 9")
    (lost,) = doctor.gpus()
    assert lost.state == "warning" and lost.found.endswith("communicate with the driver.")
    assert lost.remedy.startswith("Install or load NVIDIA's driver")


def test_gpus_that_jax_uses(nvidia_smi, monkeypatch):
    nvidia_smi(f"echo '{H100}'; echo '{T4}'")
    card = SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", memory_stats=lambda: {"bytes_limit": 60 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    new, old = doctor.gpus()
    assert (new.state, new.remedy) == ("ok", "")
    assert old.state == "warning"
    assert old.remedy == "Compute capability 7.5 is below 8.0: use --config.model.dtype=float32."
    nvidia_smi("echo 'NVIDIA GB10, [N/A], 580.95.05, [N/A]'")
    (unknown,) = doctor.gpus()
    assert unknown.state == "warning" and unknown.found == "1 × NVIDIA GB10, [N/A] each, driver 580.95.05"
    assert unknown.remedy == "nvidia-smi gives no compute capability: use --config.model.dtype=float32 below 8.0."


def test_a_driver_older_than_the_question(nvidia_smi):
    """Doctor says to update it. The text and the exit code are nvidia-smi's for a field that it does not know."""
    nvidia_smi("""echo 'Field "compute_cap" is not a valid field to query.'; echo; exit 2""")
    (old,) = doctor.gpus()
    assert old.state == "warning"
    assert old.found == "nvidia-smi does not know a GPU's compute_cap: the driver is old"
    assert old.remedy == "Update NVIDIA's driver to version 525 or later, as CUDA 12 needs."


def test_without_the_platform_that_is_asked_for(monkeypatch):
    """jax has no message for a platform without a plugin; checks that need devices are left out."""

    def missing():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", missing)
    with jax_platforms("cuda"):
        found = {finding.check: finding for finding in doctor.examine(base(), None)}
    assert found["devices"].state == "failed" and found["devices"].found == "jax has no platform 'cuda'"
    assert found["devices"].remedy == (
        f"To use a GPU, {installs.of_extra('cuda')}; to run without one, set JAX_PLATFORMS=cpu."
    )
    assert not {"processes", "mesh"} & set(found) and "host" in found


@contextmanager
def jax_platforms(value: str | None) -> Iterator[None]:
    """Run the block with this value of JAX_PLATFORMS; jax has started already."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", value)
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


def test_a_process_that_sees_only_its_own_host_s_part(monkeypatch):
    assert doctor.processes().state == "ok"
    monkeypatch.setattr(jax, "device_count", lambda: 64)
    assert doctor.processes().state == "warning" and "all hosts at once" in doctor.processes().remedy


def test_the_host(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30, total=8 * 2**30))
    assert doctor.host().state == "warning" and "1.0 of 8.0 GiB are free" in doctor.host().found
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, 524288))
    assert doctor.open_files() == Finding(
        "open files", "warning", "at most 1024", "Raise it before a run on many devices: ulimit -n 65536"
    )


def test_bubblewrap_is_tried_not_only_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.bubblewrap().found == "not installed"
    program = tmp_path / "bwrap"
    for script, state, found in (
        ("echo 'bwrap: No permissions to create a new namespace' >&2; exit 1", "warning", "No permissions"),
        ("exit 0", "ok", str(program)),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert doctor.bubblewrap().state == state and found in doctor.bubblewrap().found


def test_places(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**30))
    writable, disk = doctor.run_folder(str(tmp_path / "run"))
    assert writable.state == "ok" and (disk.state, disk.found) == ("warning", "3.0 GiB are free")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert [finding.check for finding in doctor.run_folder(str(tmp_path / "run"))] == ["run folder", "hosts", "disk"]
    (wrong,) = doctor.run_folder("s3://bucket/run")
    assert wrong.state == "failed" and "write a bucket as gs://NAME/RUN" in wrong.found


@pytest.fixture
def trainer(tmp_path):
    """Return a function that starts a process with the command line of a trainer."""
    started = []
    (tmp_path / "package" / "gspo_jax").mkdir(parents=True)
    (tmp_path / "package" / "gspo_jax" / "train.py").write_text("import time; print(flush=True); time.sleep(60)")

    def start(*flags: str, **environment: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "gspo_jax.train", *flags]
        told = os.environ | {"PYTHONPATH": str(tmp_path / "package")} | environment
        process = subprocess.Popen(words, cwd=tmp_path / "package", env=told, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_trainers_that_hold_the_run_folder_or_have_no_launcher_are_found(trainer, tmp_path):
    here, elsewhere = str(tmp_path / "run"), str(tmp_path / "other")
    held = trainer("--workdir", "../run", GSPO_JAX_PARENT=str(os.getpid()))
    other = trainer(f"--workdir={here}", f"--workdir={elsewhere}")  # the last flag wins
    finding = doctor.strays(here)
    assert (finding.check, finding.state) == ("strays", "warning")
    assert f"process {held.pid} uses this run folder (../run)" in finding.found.split("; ")
    assert f" {held.pid} " in finding.remedy and f" {other.pid} " not in finding.remedy

    lost = trainer("--workdir=gs://bucket/run", GSPO_JAX_PARENT="1")
    assert f"process {lost.pid} has outlived its launcher (gs://bucket/run)" in doctor.strays(None).found
    both = doctor.strays("gs://bucket/run/").found
    assert f"process {lost.pid} uses this run folder and has outlived its launcher" in both


def test_a_config_without_a_model_is_no_failure():
    assert (doctor.mesh(base()).state, doctor.mesh(base()).found) == ("warning", "not checked: the config has no model")


def test_the_compilation_cache():
    assert doctor.compilation_cache().found == f"{jax.config.jax_compilation_cache_dir} can be written and read"
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert doctor.compilation_cache().state == "warning"
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "host", lambda: 1 / 0)
    found = {finding.check: finding for finding in doctor.examine(base(), None)}
    assert found["host"].state == "failed" and found["host"].found == "ZeroDivisionError: division by zero"
    assert "open files" in found and "run folder" not in found


@pytest.mark.slow
def test_the_command_tries_draws(tmp_path):
    done = command("--draws", f"--json={tmp_path / 'facts.json'}", without=("JAX_DISABLE_MOST_OPTIMIZATIONS",))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "facts.json").read_text())["findings"][-1]
    assert found["check"] == "draws" and found["found"].startswith("4,096 draws of 151,936 equally likely tokens: p 0.")
    assert "4,096 draws" in done.stdout


def test_wrong_draws_are_a_failure(monkeypatch):
    tried = []
    monkeypatch.setattr(doctor, "try_draws", lambda count: tried.append(count) or Verdict(count, 1e-5, 0.5))
    assert doctor.examine(base(), None)[-1].check == "strays", "nothing is drawn unless asked for"
    last = doctor.examine(base(), None, with_draws=True)[-1]
    assert (last.check, last.state, tried) == ("draws", "failed", [2**12])
    monkeypatch.setattr(doctor.backend, "platform", lambda: "tpu")
    assert doctor.draws().state == "failed" and tried[-1] == 2**17
