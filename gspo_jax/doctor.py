"""Checks that this machine has what a run needs. Each is ok, a warning, or failed.

    python -m gspo_jax.doctor [--config=configs/NAME.py] [--workdir=DIR or gs://BUCKET/RUN] [--draws] [--json=FILE]

The default config is `gspo_jax.config.base`. `--draws` also tests the sampler's draws (rollout/draws.py). On a pod,
start it on all hosts at once, like a run. The exit code is 1 if a check failed. Whether a model fits the devices is for
`gspo_jax.plan` to check.
"""

import dataclasses
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import psutil
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console

from gspo_jax import cli, installs
from gspo_jax.config import base
from gspo_jax.config_files import last_given
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.kernels import backend
from gspo_jax.parallel import compilation
from gspo_jax.parallel.processes import PARENT, cores, on_tpu_vm
from gspo_jax.progress import make_table
from gspo_jax.rollout.draws import try_draws
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.policy import model_config

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
TRAINER = "gspo_jax.train"
NO_DEVICES = (RuntimeError, AssertionError)
"""jax's errors if a platform does not start."""
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""jax needs one to use a GPU."""
MIN_DRIVER = 525
"""Oldest driver for CUDA 12."""
GIB = 2**30
MIN_FREE_GIB = 20.0
"""Below this, checkpoints in a local run folder may soon fill the disk."""
MIN_OPEN_FILES = 4096
"""Below this, reading a sharded checkpoint may fail."""
DRAWS, CPU_DRAWS = 2**17, 2**12
"""Tokens drawn by `--draws`."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    state: str
    """One of "ok", "warning" and "failed"."""
    found: str
    remedy: str = ""
    """Command or step that mends it. Empty if ok. No stop follows a command, which is copied."""


def examine(config: ConfigDict, workdir: str | None, *, with_draws: bool = False) -> list[Finding]:
    """Run all checks, in order of dependence. A check that raises becomes a failed finding."""
    checks: dict[str, Callable[[], Finding | list[Finding]]] = {
        "versions": versions,
        "devices": devices,
        "gpu": gpus,
        "processes": processes,
        "mesh": lambda: mesh(config),
        "host": host,
        "open files": open_files,
        "bubblewrap": bubblewrap,
        "compilation cache": compilation_cache,
    }
    if workdir is not None:
        checks["run folder"] = lambda: run_folder(workdir)
    checks["strays"] = lambda: strays(workdir)
    if with_draws:
        checks["draws"] = draws
    found: list[Finding] = []
    for name, check in checks.items():
        if name in ("processes", "mesh", "draws") and not _starts():
            continue  # `devices` reports it
        try:
            seen = check()
        except Exception as error:
            seen = Finding(
                name, "failed", f"{type(error).__name__}: {error}", "The check itself failed: see the message."
            )
        found += seen if isinstance(seen, list) else [seen]
    return found


def versions() -> list[Finding]:
    """Check Python and package versions against this project's metadata."""
    bounds = installs.bounds()
    found = [Finding("python", "ok", platform.python_version())]
    for name in PACKAGES:
        bound = bounds.get(name)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None and name == "libtpu":
            found.append(Finding(name, "ok", "not installed"))  # only needed with TPU chips, which `devices` checks
        elif version is None:
            found.append(Finding(name, "failed", "not installed", f"Install it: {installs.of_package(name)}"))
        elif bound is not None and not bound.specifier.contains(version, prereleases=True):
            remedy = f"Install a supported version: {installs.of_package(name)}"
            found.append(Finding(name, "failed", f"{version}, not {bound.specifier}", remedy))
        else:
            found.append(Finding(name, "ok", version))
    return found


def devices() -> Finding:
    """Check jax's devices and report the memory of one."""
    try:
        here = jax.local_devices()
    except NO_DEVICES as error:
        asked = jax.config.jax_platforms or ""
        found = str(error).partition("\n")[0] or f"jax has no platform {asked!r}"
        remedy = "Another process may hold the TPU: stop it, or set JAX_PLATFORMS=cpu to run without it."
        if "cuda" in asked or "gpu" in asked:
            steps = _cuda_remedy() or "make nvidia-smi list a GPU"
            remedy = f"To use a GPU, {steps}; to run without one, set JAX_PLATFORMS=cpu."
        return Finding("devices", "failed", found, remedy)
    memory = (here[0].memory_stats() or {}).get("bytes_limit")
    size = f", {memory / GIB:.1f} GiB each" if memory else ""
    found = f"{jax.device_count()} × {here[0].device_kind}{size}"
    if here[0].platform == "cpu" and on_tpu_vm():
        remedy = f"This machine has TPU chips: {installs.of_extra('tpu')}, and unset JAX_PLATFORMS."
        return Finding("devices", "failed", found, remedy)
    return Finding("devices", "ok", found)


def _starts() -> bool:
    try:
        return bool(jax.local_devices())
    except NO_DEVICES:
        return False


def gpus() -> list[Finding]:
    """Check that jax uses the NVIDIA GPUs that nvidia-smi lists. Empty without nvidia-smi."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return []
    tried = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=False, timeout=20)
    kinds = Counter(tried.stdout.strip().splitlines())
    if tried.returncode and "compute_cap" in tried.stdout + tried.stderr:
        remedy = f"Update NVIDIA's driver to version {MIN_DRIVER} or later, as CUDA 12 needs."
        return [Finding("gpu", "warning", "nvidia-smi does not know a GPU's compute_cap: the driver is old", remedy)]
    if tried.returncode or not kinds:
        said = (tried.stdout.strip() or tried.stderr.strip() or "no GPU").partition("\n")[0]
        remedy = "Install or load NVIDIA's driver, until nvidia-smi lists the GPU; without it a run uses the CPU."
        return [Finding("gpu", "warning", said, remedy)]
    found, least = [], backend.MIN_CAPABILITY
    for kind, count in kinds.items():
        name, memory, driver, capability = (word.strip() for word in kind.rsplit(",", 3))
        remedy = ""
        if not _starts() or jax.local_devices()[0].platform != "gpu":
            steps = _cuda_remedy() or """see what python -c "import jax; jax.devices('cuda')" says"""
            remedy = f"jax does not use it: {steps}."
        elif (number := backend.capability(capability)) is None:
            remedy = f"nvidia-smi gives no compute capability: use --config.model.dtype=float32 below {least}."
        elif number < least:
            remedy = f"Compute capability {capability} is below {least}: use --config.model.dtype=float32."
        text = f"{count} × {name}, {memory} each, driver {driver}"
        found.append(Finding("gpu", "warning" if remedy else "ok", text, remedy))
    return found


def _cuda_remedy() -> str:
    """Return steps to let jax use a GPU, if any are missing."""
    steps = [] if any(map(importlib.util.find_spec, CUDA_PLUGINS)) else [installs.of_extra("cuda")]
    asked = jax.config.jax_platforms or ""
    if asked and "cuda" not in asked and "gpu" not in asked:
        steps.append("unset JAX_PLATFORMS")
    return " and ".join(steps)


def processes() -> Finding:
    """Check that this process has its share of all devices."""
    count, here, all_devices = jax.process_count(), jax.local_device_count(), jax.device_count()
    found = f"process {jax.process_index()} of {count}, owns {here} of {all_devices} devices"
    if here * count != all_devices:
        remedy = "Run this on all hosts at once: bash launch/tpu.sh exec … -- .venv/bin/python -m gspo_jax.doctor"
        return Finding("processes", "warning", found, remedy)
    return Finding("processes", "ok", found)


def mesh(config: ConfigDict) -> Finding:
    """Check that the config's mesh fits devices and batch, if it has a model."""
    if not (config.model.folder or config.model.published or config.coldstart.steps):
        remedy = "Give the run's --config, and its --config.model.folder if that names no model."
        return Finding("mesh", "warning", "not checked: the config has no model", remedy)
    try:
        sizes = make_meshes(config, model_config(config)).trainer.shape
    except UserError as error:
        return Finding("mesh", "failed", str(error), "Change the config as the message says.")
    return Finding("mesh", "ok", ", ".join(f"{axis} {size}" for axis, size in sizes.items()))


def host() -> Finding:
    """Check free memory and report cores."""
    memory = psutil.virtual_memory()
    found = f"{cores()} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free"
    if memory.available < memory.total / 4:
        return Finding("host", "warning", found, "Other processes hold most of the memory; stop those you do not need.")
    return Finding("host", "ok", found)


def open_files() -> Finding:
    """Check this process's limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        remedy = f"Raise it before a run on many devices: ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        return Finding("open files", "warning", f"at most {soft}", remedy)
    return Finding("open files", "ok", f"at most {soft}")


def bubblewrap() -> Finding:
    """Check that bubblewrap, the sandbox of rewards that run code, works."""
    program = shutil.which("bwrap")
    needed = "Only rewards that run code need it: "
    if program is None:
        return Finding("bubblewrap", "warning", "not installed", f"{needed}{installs.of_system('bubblewrap')}")
    command = [program, "--ro-bind", "/", "/", "--unshare-all", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if tried.returncode:
        remedy = needed + "allow unprivileged user namespaces on this machine."
        return Finding("bubblewrap", "warning", tried.stderr.strip() or f"exit code {tried.returncode}", remedy)
    return Finding("bubblewrap", "ok", program)


def compilation_cache() -> Finding:
    """Check the cache of compiled programs."""
    place = compilation.use_cache()
    if place is None:
        remedy = "Every start compiles again; set JAX_COMPILATION_CACHE_DIR to a folder or gs://BUCKET/compiled"
        remedy += ", and unset JAX_ENABLE_COMPILATION_CACHE."
        return Finding("compilation cache", "warning", "none", remedy)
    return _writable("compilation cache", place)


def run_folder(workdir: str) -> list[Finding]:
    """Check that `workdir` is writable, and its free space."""
    found = [_writable("run folder", workdir)]
    if workdir.startswith(storage.BUCKET) or found[0].state == "failed":
        return found
    if jax.process_count() > 1:
        remedy = "Hosts share no disk: use --workdir=gs://BUCKET/RUN, unless all processes are on this machine."
        found.append(Finding("hosts", "warning", f"{jax.process_count()} processes, but a local folder", remedy))
    free = shutil.disk_usage(workdir).free / GIB
    scarce = free < MIN_FREE_GIB
    remedy = "Make room, keep fewer checkpoints with --config.checkpoint.keep, or use another --workdir."
    found.append(Finding("disk", "warning" if scarce else "ok", f"{free:.1f} GiB are free", remedy if scarce else ""))
    return found


def strays(workdir: str | None) -> Finding:
    """Check that no trainer on this machine uses `workdir` or has outlived its launcher."""
    found: list[str] = []
    pids: list[str] = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if TRAINER not in words or not os.path.basename(words[0]).startswith("python"):
                continue
            place = last_given(words, "workdir")
            holds = workdir is not None and place is not None and _same_place(place, workdir, process.cwd())
            launcher = process.environ().get(PARENT, "")
            orphan = launcher != str(process.ppid()) if launcher else process.ppid() == 1
        except psutil.Error:  # it has ended, or belongs to somebody else
            continue
        if holds or orphan:
            why = " and ".join(["uses this run folder"] * holds + ["has outlived its launcher"] * orphan)
            found.append(f"process {process.pid} {why} ({place})")
            pids.append(str(process.pid))
    if not found:
        return Finding("strays", "ok", "none")
    remedy = f"Unless you want them to go on, save and end them: kill {' '.join(pids)} (kill -9 if they are hung)."
    return Finding("strays", "warning", "; ".join(found), remedy)


def draws() -> Finding:
    """Check that sampled tokens follow their distribution, on one device of this process."""
    verdict = try_draws(CPU_DRAWS if backend.platform() == "cpu" else DRAWS)
    if verdict.right:
        return Finding("draws", "ok", str(verdict))
    remedy = "Tokens would not follow the policy: install the versions of jaxlib and libtpu in launch/constraints.txt."
    return Finding("draws", "failed", str(verdict), remedy)


def _same_place(theirs: str, ours: str, cwd: str) -> bool:
    """Return True if `theirs`, as a process in `cwd` names it, is `ours`."""
    if storage.BUCKET in (theirs[: len(storage.BUCKET)], ours[: len(storage.BUCKET)]):
        return theirs.rstrip("/") == ours.rstrip("/")
    return os.path.realpath(os.path.join(cwd, theirs)) == os.path.realpath(ours)


def _writable(check: str, place: str) -> Finding:
    try:
        folder = storage.find(place)
    except UserError as error:
        return Finding(check, "failed", str(error), "Give another folder.")
    try:
        if place.startswith(storage.BUCKET):
            storage.check_client(place)
        storage.check_writable(folder)
    except UserError as error:
        return Finding(check, "failed", str(error), "Do as the message says.")
    except Exception as error:  # storage, transport and credentials each raise their own types
        remedy = "Check that it exists and that this machine's account may read and write it."
        return Finding(check, "failed", f"{place}: {type(error).__name__}: {error}", remedy)
    return Finding(check, "ok", f"{place} can be written and read")


def show(found: Sequence[Finding]) -> None:
    """Print the findings as a table."""
    rows = [dataclasses.asdict(finding) for finding in found]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(make_table(rows, title=f"{platform.node()}, {platform.platform(terse=True)}"))


def main(config: ConfigDict) -> int:
    """Run the checks and return 1 if one failed."""
    found = examine(config, flags.FLAGS.workdir, with_draws=flags.FLAGS.draws)
    show(found)
    failed = [finding.check for finding in found if finding.state == "failed"]
    facts: dict[str, Any] = {"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in found]}
    cli.write_facts(flags.FLAGS.json, facts)
    if failed:
        print(f"error: {', '.join(failed)} failed; see the table", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    cli.run(main, "doctor", default=base())
