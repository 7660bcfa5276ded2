"""Multi-process runs: how the processes find each other, which of them prints, and how they exit when one is lost.

Every process runs the same program. JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
JAX_PROCESS_ID, all three together, tell them of each other; without them jax detects SLURM, and on TPU machines Cloud
TPU and GKE. If nothing is detected, or a single process, the process runs on its own and opens no connection.
"""

import ctypes
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import clusters, distributed  # cluster detection and the process count have no public API
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax import exits, limited, signals
from gspo_jax.errors import UserError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Environment variables that tell a process of the others."""
PARENT = "GSPO_JAX_PARENT"
"""Environment variable in which a launcher tells the processes that it starts its own process id: they end with it."""
_TPU_CLUSTERS, _CLUSTERS = ("gcetpu", "gketpu"), ("slurm",)
"""jax's names of the clusters to detect. Detecting the TPU ones queries the network, on TPU machines only."""

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl: the signal that the kernel sends to a process when its parent dies."""
_LOOK_S = 0.5
_RESTART = "start the run again with the same command: it resumes from its newest checkpoint"
_MEETING_MS = 24 * 3600 * 1000  # the watchdog and the heartbeats are faster
_NOTICED_BY = ("Gloo", "CoordinationService")  # stand in an error where another process is lost
_checks = itertools.count()  # calls of `check_first`
_waits: list[float] = []  # seconds of the calls of `meet` since `waited_s`
_callbacks: list[Any] = []  # keeps handlers alive that the C library may call at any time


def start(*, heartbeat_s: int = 30, start_s: int = 300) -> int:
    """Connect the processes of the run and return their number; call it before any device is used.

    From then on only process 0 prints to stdout. A process exits with code `exits.LOST` and a one-line message if the
    others do not join within `start_s` seconds, and later once another one has been silent for `heartbeat_s` seconds.

    Raises:
      UserError: the environment variables are incomplete or invalid.
    """
    end_with_parent()
    found = find()
    if not found:
        return 1
    deadline = threading.Timer(
        start_s, _exit_lost, [f"the other processes of the run have not joined after {start_s} s"]
    )
    deadline.daemon = True
    deadline.start()
    # jax calls abort() when another process is lost, and offers no Python callback instead.
    _on_abort(f"jax ended this process, as it does {heartbeat_s} s after another one is lost (see its message above)")
    jax.config.update("jax_enable_preemption_service", False)  # preemption.py starts it, for a run that can be saved
    jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_s, initialization_timeout=start_s, **found)
    deadline.cancel()
    if distributed.global_state.process_id > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until exit
    return distributed.global_state.num_processes


def end_with_parent() -> None:
    """Have this process killed as soon as its launcher ends, if the environment variable `PARENT` names one.

    The signal is SIGKILL, which ends a hung process too. Processes that this one starts do not inherit the variable.
    """
    told = os.environ.pop(PARENT, "")
    if not told:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(told,), name="parent", daemon=True).start()
    if str(os.getppid()) != told:  # it may have ended before the lines above
        _exit_lost(f"the launcher of this process ({PARENT}={told}) has ended")


def _watch_parent(told: str) -> None:
    while str(os.getppid()) == told:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def check_first(check: Callable[[], None]) -> None:
    """Call `check` in process 0 only, and raise the UserError that it raises in all processes; no device is touched.

    All processes of a run have to make the same calls, and wait for each for as long as it takes.
    """
    client: Any = distributed.global_state.client
    if client is None:
        check()
        return
    key = f"gspo_jax/check/{next(_checks)}"
    if number() > 0:
        while (said := _try_get(client, key)) is None:
            time.sleep(_LOOK_S)
        if said:
            raise UserError(said)
        return
    try:
        check()
    except UserError as error:
        client.key_value_set(key, str(error))
        time.sleep(2 * _LOOK_S)  # this process serves the key, so the others read it before it exits
        raise
    client.key_value_set(key, "")


def _try_get(client: Any, key: str) -> str | None:
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            _exit_lost(f"process 0 of the run is lost ({' '.join(str(error).split())})")
        return None


def number() -> int:
    """Return the index of this process; unlike `jax.process_index`, without touching a device."""
    return distributed.global_state.process_id


def count() -> int:
    """Return the number of processes; unlike `jax.process_count`, without touching a device."""
    return distributed.global_state.num_processes


def is_first() -> bool:
    """Return whether this is process 0, which writes what a run writes only once."""
    return jax.process_index() == 0


def connect(mesh: Mesh) -> None:
    """Run a collective over every group of mesh axes now, so that gloo connects all device groups; CPU only.

    Gloo fails if a process is 30 s late to the first collective of a group, which would otherwise come after a
    compilation. It also logs each connection to stdout, which is silenced here.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    names = mesh.axis_names
    groups = [group for size in range(1, len(names) + 1) for group in itertools.permutations(names, size)]
    ones = np.ones(mesh.size, np.float32)
    spread = [
        jax.make_array_from_callback(ones.shape, NamedSharding(mesh, PartitionSpec(group)), lambda here: ones[here])
        for group in groups
    ]

    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(names), out_specs=PartitionSpec(names))
    def along_each(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(x, axis) + 0 * x for axis in names]

    @jax.jit
    def meet(spread: list[jax.Array]) -> list[jax.Array]:
        """Sum sharded arrays, since each order of axes forms its own group while `psum` uses the mesh's order, and
        add `psum`s, since summing an array sharded over an axis of size 1 emits no collective.
        """
        return [x.sum() for x in spread] + along_each(spread[-1])

    with _silence_stdout():
        jax.block_until_ready(meet(spread))


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Silence stdout inside the block, for C++ libraries too."""
    sys.stdout.flush()
    saved = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def own_cores() -> int:
    """Return this process's share, at least 1, of the cores of its host; all processes have to call it."""
    client: Any = distributed.global_state.client
    if client is None:
        return cores()
    folder, here = "gspo_jax/host/", f"{socket.gethostname()} {_boot()}"
    client.key_value_set(f"{folder}{number()}", here, allow_overwrite=True)
    meet()
    return max(1, cores() // sum(host == here for _, host in client.key_value_dir_get(folder)))


def _boot() -> str:
    """Return an id that tells this host from others with its name; "" where the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def wait_for_all(name: str) -> None:
    """Block until all processes have reached the barrier `name`."""
    multihost_utils.sync_global_devices(name)


def meet() -> None:
    """Block until all processes are here, without a device, and add the time to `waited_s`; alone, do nothing."""
    client: Any = distributed.global_state.client
    if client is None:
        return
    begun = time.monotonic()
    try:
        client.wait_at_barrier("meeting", _MEETING_MS)
    except jax.errors.JaxRuntimeError as error:
        _exit_lost(f"another process of the run is lost ({limited.quoted(error)})")
    _waits.append(time.monotonic() - begun)


def waited_s() -> float:
    """Return the seconds that this process has waited for others to `meet` since the last call."""
    total = sum(_waits)
    _waits.clear()
    return total


@contextmanager
def guarded(count: int) -> Iterator[None]:
    """Exit immediately if the block fails and there are several processes: a normal exit would wait for the others."""
    try:
        yield
    except BaseException as error:
        if count == 1:
            raise
        if lost := _lost(error):
            _exit_lost(f"another process of the run is lost ({' '.join(str(lost).split())})")
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
            print(f"error: one of several processes failed; unless the cause is above, {_RESTART}", file=sys.stderr)
        signals.flush()
        exits.leave(code)


def _lost(error: BaseException | None) -> BaseException | None:
    """Return the error, of those that led to this one, by which a library noticed that another process is lost.

    Gloo's may have caused others on the way out, as when an unfinished checkpoint is closed. The coordination service
    fails the barriers of libraries, such as Orbax's while it saves, where a heartbeat stays out.
    """
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and any(name in str(error) for name in _NOTICED_BY):
            return error
        error = error.__context__
    return None


def find() -> dict[str, Any]:
    """Return the arguments for `jax.distributed.initialize`; empty for a process on its own.

    Raises:
      UserError: the environment variables are incomplete or invalid.
    """
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if len(missing) == len(VARIABLES):
        return _detect_cluster()
    if missing:
        raise UserError(f"{missing[0]} is not set, but others of {', '.join(VARIABLES)} are; set all of them or none")
    address, *numbers = (os.environ[name] for name in VARIABLES)
    if ":" not in address or not all(number.isdigit() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise UserError(
            f"{', '.join(VARIABLES)} are {', '.join([address, *numbers])}; give host:port, the number "
            "of processes and the index of this one, from 0"
        )
    count, number = map(int, numbers)
    settings = {"coordinator_address": address, "num_processes": count, "process_id": number}
    return settings | {"cluster_detection_method": "deactivate"} if count > 1 else {}


def _detect_cluster() -> dict[str, Any]:
    """Like `find`, using jax's own cluster detection."""
    known = {cluster.name: cluster for cluster in clusters.ClusterEnv._cluster_types}
    for name in _CLUSTERS if jax.config.jax_platforms == "cpu" else _TPU_CLUSTERS + _CLUSTERS:
        if known[name].is_env_present() and known[name].get_process_count() > 1:
            return {"cluster_detection_method": name}
    return {}


def _exit_lost(why: str) -> None:
    """Exit the process with code `exits.LOST` and a one-line message; safe in threads that Python did not create."""
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"\nerror: {why}; {_RESTART}\n".encode())
    exits.leave(exits.LOST)


def _on_abort(why: str) -> None:
    """Make the C library's abort() exit the process through `_exit_lost`."""
    handler: Callable[[int], None] = lambda _: _exit_lost(why)  # noqa: E731
    call = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    _callbacks.append(call)
    ctypes.CDLL(None).signal(signal.SIGABRT, call)
