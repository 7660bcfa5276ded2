"""The installed package in an empty folder, away from the checkout: commands run, or say what is missing."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Return the interpreter of an environment with a wheel of the project, and this one's other packages."""
    place = tmp_path_factory.mktemp("wheel")
    for part in ("gspo_jax", "configs"):
        shutil.copytree(ROOT / part, place / "source" / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, place / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir=.", "./source"]
    if subprocess.run(command, cwd=place, check=False, timeout=300).returncode:
        pytest.skip("no wheel can be built: setuptools cannot be installed")
    venv.create(place / "venv", symlinks=True)
    site = next((place / "venv" / "lib").glob("python3*/site-packages"))
    (wheel,) = place.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    shutil.copytree(next(site.glob("*.data")) / "data", place / "venv", dirs_exist_ok=True)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return place / "venv" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("plan --config=configs/one_host.py --topology=v5e:2x4", 2, "not found; did you mean one_host?"),
        ("plan --config=one_host --topology=v5e-8", 2, "v5e-8 is 8 chips (its number counts chips); write"),
        ("train --config=gsm8k --workdir=run --check_for=v5e-8", 2, "model.folder is empty and the config has no"),
        (
            "train --config=one_host:partial --workdir=gs://my-bucket/run --check_for=v5e-8 "
            "--config.model.folder=../fetched/Qwen3-30B-A3B --config.data.folder=../fetched/gsm8k",
            0,
            "python -m gspo_jax.plan --config=one_host:partial --topology=v5e:2x4\n",
        ),
        ("report runs/first", 2, "folder runs/first does not exist; give the --workdir of a run"),
        ("doctor --config=tiny", 0, "mesh"),
    ],
)
def test_an_installed_package_in_an_empty_folder(python, tmp_path, command, code, says):
    environment = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [python, "-m", "gspo_jax", *command.split()],
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code and says in done.stdout + done.stderr, done.stdout + done.stderr
    assert code != 2 or (done.stderr.startswith("error: ") and done.stderr.count("\n") == 1)
