"""Run a module in its own process, to compile ahead of time for TPUs: jax reads the environment when it is imported."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU's compiler, is not installed"
)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` to its end."""
    ours = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")  # of conftest.py
    environment = {k: v for k, v in os.environ.items() if k not in ours} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)


def figures(module: str, *arguments: str) -> dict:
    """Run `python -m module`; print and return the JSON object on its last line of output."""
    done = run(module, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    return result
