"""Multi-process runs: how processes find each other, which one prints, and how they exit if one is lost.

JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, all three together, describe the
run. Without them jax detects SLURM and, on TPU machines, Cloud TPU and GKE. A lone process opens no connection.
"""

import ctypes
import itertools
import json
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
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import clusters, distributed  # cluster detection and the process count have no public API
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax import exits, limited, signals
from gspo_jax.errors import UserError

Value = TypeVar("Value")

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
PARENT = "GSPO_JAX_PARENT"
"""Environment variable with a launcher's process id. Its processes end with the launcher."""
_TPU_CLUSTERS, _CLUSTERS = ("gcetpu", "gketpu"), ("slurm",)
"""jax's cluster names. Detecting the TPU ones queries the network, on TPU machines only."""

_LIBTPU_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""libtpu's variables: skip host discovery, allow sharing, log errors only."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
_SOON_S, _LOOK_S = 0.001, 0.5
"""Seconds between two looks for what another process says, the first and the longest."""
_RESTART = "start the run again with the same command: it resumes from its newest checkpoint"
_MEETING_MS = 24 * 3600 * 1000  # the watchdog and heartbeats are faster
_NOTICED_BY = ("Gloo", "CoordinationService")  # in errors that mean a lost process
_checks = itertools.count()  # calls of `ask_first`
_waits: list[float] = []  # seconds per `meet` since `waited_s`
_callbacks: list[Any] = []  # keeps the C library's handlers alive


def on_tpu_vm() -> bool:
    """Return True if this machine has TPU chips, even if another process holds them."""
    return os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")


def use_libtpu_alone() -> None:
    """Keep libtpu, whose compiler alone may be wanted, from looking for chips and hosts."""
    for key, value in _LIBTPU_ALONE.items():
        os.environ.setdefault(key, value)


def start(*, heartbeat_s: int = 30, start_s: int = 300) -> int:
    """Connect the run's processes and return their number. Call it before using any device.

    Afterwards only process 0 prints to stdout. A process exits with `exits.LOST` and a message if the others do not
    join within `start_s` seconds, or if one is later silent for `heartbeat_s` seconds.

    Raises:
      UserError: the environment variables are incomplete or invalid.
    """
    end_with_parent()
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1" and not on_tpu_vm():  # jax, too, has found no chips
        use_libtpu_alone()
    found = find()
    if not found:
        return 1
    deadline = threading.Timer(
        start_s, _exit_lost, [f"the other processes of the run have not joined after {start_s} s"]
    )
    deadline.daemon = True
    deadline.start()
    # jax calls abort() when a process is lost, without a callback.
    _on_abort(f"jax ended this process, as it does {heartbeat_s} s after another one is lost (see its message above)")
    jax.config.update("jax_enable_preemption_service", False)  # preemption.py starts it, for a run that can be saved
    jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_s, initialization_timeout=start_s, **found)
    deadline.cancel()
    if distributed.global_state.process_id > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until exit
    return distributed.global_state.num_processes


def end_with_parent() -> None:
    """Have SIGKILL end this process with its launcher, if `PARENT` names one.

    Child processes do not inherit the variable.
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


def ask_first(ask: Callable[[], Value]) -> Value:
    """Return in all processes what `ask`, called in process 0 only, returns there as JSON, without touching a device.

    A UserError of it is raised in all. All processes must make the same calls.
    """
    client: Any = distributed.global_state.client
    if client is None:
        return ask()
    key = f"gspo_jax/check/{next(_checks)}"
    if number() > 0:
        pause = _SOON_S
        while (said := _try_get(client, key)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)
        found = json.loads(said)
        if "error" in found:
            raise UserError(found["error"])
        return found["value"]
    try:
        value = ask()
    except UserError as error:
        client.key_value_set(key, json.dumps({"error": str(error)}))
        time.sleep(2 * _LOOK_S)  # the others read the key from this process before it exits
        raise
    client.key_value_set(key, json.dumps({"value": value}))
    return value


def tell_first(value: Value) -> list[Value]:
    """Return in process 0 what every process passed, in their order, as JSON. Elsewhere nothing. All must call it."""
    client: Any = distributed.global_state.client
    if client is None:
        return [value]
    folder = f"gspo_jax/told/{next(_checks)}/"
    client.key_value_set(f"{folder}{number():09}", json.dumps(value))
    meet()
    return [] if number() else [json.loads(told) for _, told in sorted(client.key_value_dir_get(folder))]


def _try_get(client: Any, key: str) -> str | None:
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            _exit_lost(f"process 0 of the run is lost ({' '.join(str(error).split())})")
        return None


def number() -> int:
    """Return this process's index, unlike `jax.process_index` without touching a device."""
    return distributed.global_state.process_id


def count() -> int:
    """Return the number of processes, unlike `jax.process_count` without touching a device."""
    return distributed.global_state.num_processes


def is_first() -> bool:
    """Return True in process 0."""
    return jax.process_index() == 0


def connect(mesh: Mesh) -> None:
    """Connect gloo's device groups, by a collective over every group of mesh axes. CPU only.

    Gloo fails if a process is 30 s late to a group's first collective, such as after a compilation. It also logs
    connections to stdout, silenced here.
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
        """Sum over every order of axes, and `psum` over axes of size 1, where a sum emits no collective."""
        return [x.sum() for x in spread] + along_each(spread[-1])

    with _silence_stdout():
        jax.block_until_ready(meet(spread))


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Silence stdout, for C++ libraries too."""
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
    """Return the CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def own_cores() -> int:
    """Return this process's share, at least 1, of its host's cores. All processes must call it."""
    client: Any = distributed.global_state.client
    if client is None:
        return cores()
    folder, here = "gspo_jax/host/", f"{socket.gethostname()} {_boot()}"
    client.key_value_set(f"{folder}{number()}", here, allow_overwrite=True)
    meet()
    return max(1, cores() // sum(host == here for _, host in client.key_value_dir_get(folder)))


def _boot() -> str:
    """Return an id that tells hosts of one name apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def wait_for_all(name: str) -> None:
    """Block until all processes reach the barrier `name`."""
    multihost_utils.sync_global_devices(name)


def meet() -> None:
    """Block until all processes are here, without a device. Alone, do nothing."""
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
    """Return the seconds waited in `meet` since the last call."""
    total = sum(_waits)
    _waits.clear()
    return total


@contextmanager
def guarded(count: int) -> Iterator[None]:
    """Exit at once if the block fails among several processes. A normal exit would wait for the others."""
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
    """Return the error by which a library noticed a lost process, or None.

    Others may follow on the way out, such as from closing an unfinished checkpoint. The coordination service fails
    barriers, such as Orbax's in a save.
    """
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and any(name in str(error) for name in _NOTICED_BY):
            return error
        error = error.__context__
    return None


def find() -> dict[str, Any]:
    """Return arguments for `jax.distributed.initialize`, empty for a lone process.

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
    known = {cluster.name: cluster for cluster in clusters.ClusterEnv._cluster_types}
    for name in _CLUSTERS if jax.config.jax_platforms == "cpu" else _TPU_CLUSTERS + _CLUSTERS:
        if known[name].is_env_present() and known[name].get_process_count() > 1:
            return {"cluster_detection_method": name}
    return {}


def _exit_lost(why: str) -> None:
    """Exit with `exits.LOST` and a message. Safe in threads that Python did not create."""
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"\nerror: {why}; {_RESTART}\n".encode())
    exits.leave(exits.LOST)


def _on_abort(why: str) -> None:
    """Make the C library's abort() exit through `_exit_lost`."""
    handler: Callable[[int], None] = lambda _: _exit_lost(why)  # noqa: E731
    call = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    _callbacks.append(call)
    ctypes.CDLL(None).signal(signal.SIGABRT, call)
