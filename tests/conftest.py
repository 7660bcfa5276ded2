"""Test session set-up: eight CPU devices, no implicit rank promotion, run-time checks of shape annotations.

Compiling takes most of the time, so most of XLA's optimisations are off, for tests and for the runs that they start;
semantics and partitioning stay the same. Compiled programs are kept from one session to the next, in
.pytest_cache/compiled unless JAX_COMPILATION_CACHE_DIR names another folder: their keys hold the program, the compiler
and its options, so that nothing stale is used.
"""

import gc
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# Inherited by xdist workers and by the runs that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache/compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.01")

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jaxtyping
import pytest

from gspo_jax.parallel import compilation

MOST_KEPT = 2 * 2**30
"""Bytes of kept programs above which a session begins without any."""

jax.config.update("jax_numpy_rank_promotion", "raise")

compilation.use_cache()

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FIRST = (
    "test_tpu_kernels",
    "test_family",
    "test_pod",
    "test_plan",
    "test_faults",
    "test_sweep",
    "test_cpu_pod",
    "test_servers",
    "test_branch",
    "test_storage",
    "test_resume",
    "test_update",
    "test_train",
    "test_docs_own",
    "test_delta",
    "test_tpu_compile",
    "test_decoder",
    "test_objectives_catalogue",
    "test_tpu_decode",
    "test_replay",
    "test_episodes",
    "test_dispatch",
    "test_transformer",
    "test_notebooks",
    "test_real_model",
)
"""Test files that take long in one of the tiers; they start first so that none runs alone at the end."""


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """Have what a test starts hear SIGHUP, though these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


MOST_MAPPINGS = 40000
"""Memory mappings above which a process drops its compiled programs. Linux allows 65530; one more crashes XLA."""
_counted = 0.0


@pytest.fixture(autouse=True)
def release_programs() -> Iterator[None]:
    """Drop compiled programs before the process runs out of memory mappings."""
    yield
    global _counted
    if time.process_time() - _counted > 2:  # counting takes milliseconds, and most tests compile little
        _counted, mappings = time.process_time(), Path("/proc/self/maps")
        if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
            jax.clear_caches()


@pytest.fixture
def one_device() -> Iterator[None]:
    """As `tests.tiny.on_one_device`."""
    from tests.tiny import on_one_device

    with on_one_device():
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """Return a temporary folder that all workers of the session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Return the folder of the data sets that runs generate."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def whole(shared, data) -> Path:
    """Return the folder of an undisturbed `tests.pods.field_run`."""
    from tests.pods import undisturbed

    return undisturbed(shared / "whole", data)


def pytest_sessionstart() -> None:
    """Throw away what is kept, where it has become too much."""
    kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    alone = "PYTEST_XDIST_WORKER" not in os.environ and kept.is_dir()
    if alone and sum(file.stat().st_size for file in kept.iterdir()) > MOST_KEPT:
        shutil.rmtree(kept, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Check shape annotations at run time; not in the slow tests, which are more cases and an eighth faster without.

    Without objectives/, whose tests pass wrong shapes on purpose to check the messages, and routing/, where `scan`
    rebuilds the sums with a leading axis.
    """
    if config.option.markexpr not in ("slow", "faults"):
        rooms = [f"gspo_jax.{room}" for room in ("kernels", "models", "rollout")]
        jaxtyping.install_import_hook(rooms, "beartype.beartype")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of the chosen tier: importing all takes each worker twenty seconds."""
    tier, is_tests = config.option.markexpr, collection_path.match("test_*.py")
    return True if is_tests and tier in ("slow", "faults") and tier not in collection_path.read_text() else None


def pytest_collection_finish() -> None:
    """Collect garbage less often, and never among the imports: tracing creates many objects that live long."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the slow files first, keeping the order within each file; take coverage in the objectives' own tests only.

    Tracing for coverage takes an eighth of the time of the others.
    """
    place = {name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if "objectives" not in item.path.stem:
            item.add_marker(pytest.mark.no_cover)
