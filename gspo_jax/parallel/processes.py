"""One run made by several processes: how they find each other, who speaks, and how they end when one is lost.

Every process runs the same program. They are told of each other by JAX_COORDINATOR_ADDRESS (host:port of process 0),
JAX_NUM_PROCESSES and JAX_PROCESS_ID, all three of them; without them jax looks for SLURM, and on TPU machines for Cloud
TPU and GKE. Where there is nothing to be found, or one process alone, it is on its own and nothing is opened.
"""

import ctypes
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import clusters, distributed  # what was found, and how many there are, has no public name
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax.types import UserError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""The variables that tell a process of the others."""
_TPU_CLUSTERS, _CLUSTERS = ("gcetpu", "gketpu"), ("slurm",)
"""jax's names of what it may look for by itself. Looking for the TPU ones asks the network, on TPU machines only."""

LOST = 3
"""The exit code of a process that ends because another one is lost."""

_RESTART = "start the run again with the same command: it goes on from its newest checkpoint"
_callbacks: list[Any] = []  # what the C library calls must outlive this module's functions


def start(*, heartbeat_s: int, start_s: int) -> int:
    """Joins the processes of the run, and returns how many there are; call before a device is used.

    Only the first one prints to stdout from here on. A process ends with code LOST and one line that says so within
    `start_s` seconds if others do not come, and later on once another one has been silent for `heartbeat_s` seconds.

    Raises:
      UserError: the environment says half of what is needed.
    """
    found = find()
    if not found:
        return 1
    deadline = threading.Timer(start_s, _exit_lost, [f"the other processes of the run are not there after {start_s} s"])
    deadline.daemon = True
    deadline.start()
    # jax ends a process by abort() when another is lost, and takes no Python function to be called instead.
    _on_abort(f"jax has ended this process, as it does {heartbeat_s} s after another one is lost (it says more above)")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away, and nobody asks it yet
    jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_s, initialization_timeout=start_s, **found)
    deadline.cancel()
    if distributed.global_state.process_id > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the end
    return distributed.global_state.num_processes


def is_first() -> bool:
    """Whether this is the process that writes what a run writes once."""
    return jax.process_index() == 0


def connect(mesh: Mesh) -> None:
    """Has every group of devices that may ever work together meet now, on CPUs, where they are connected by gloo.

    It gives up where one comes 30 s late to the first meeting of its group, which is otherwise behind a compilation. It
    also tells of each, on stdout.
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
        """Sums of sharded arrays, as each order of axes is a group of its own and `psum` takes the mesh's; and `psum`,
        as such a sum over an axis of size 1 is nothing to do.
        """
        return [x.sum() for x in spread] + along_each(spread[-1])

    with _silence_stdout():
        jax.block_until_ready(meet(spread))


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Nobody prints to stdout in the block, the C++ libraries neither."""
    sys.stdout.flush()
    saved = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def wait_for_all(name: str) -> None:
    """Returns once all processes are here; `name` says where."""
    multihost_utils.sync_global_devices(name)


@contextmanager
def guarded(count: int) -> Iterator[None]:
    """Ends one of several processes at once when the block fails: else it would wait at its exit for the others."""
    try:
        yield
    except BaseException as error:
        if count == 1:
            raise
        if isinstance(error, jax.errors.JaxRuntimeError) and "Gloo" in str(error):  # before jax misses the other one
            _exit_lost(f"another process of the run is lost ({' '.join(str(error).split())})")
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
            print(f"error: a process of several has failed; unless it says why above, {_RESTART}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def find() -> dict[str, Any]:
    """What `jax.distributed.initialize` is to be told: nothing for a process that is on its own.

    Raises:
      UserError: the environment says half of what is needed, or what makes no sense.
    """
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if len(missing) == len(VARIABLES):
        return _detect_cluster()
    if missing:
        raise UserError(f"{missing[0]} is not set, and others of {', '.join(VARIABLES)} are; set all of them, or none")
    address, *numbers = (os.environ[name] for name in VARIABLES)
    if ":" not in address or not all(number.isdigit() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise UserError(
            f"{', '.join(VARIABLES)} are {', '.join([address, *numbers])}; give host:port, how many processes there are, "
            "and which of these, from 0, this is"
        )
    count, number = map(int, numbers)
    settings = {"coordinator_address": address, "num_processes": count, "process_id": number}
    return settings | {"cluster_detection_method": "deactivate"} if count > 1 else {}


def _detect_cluster() -> dict[str, Any]:
    """As `find`, by jax's own detection."""
    known = {cluster.name: cluster for cluster in clusters.ClusterEnv._cluster_types}
    for name in _CLUSTERS if jax.config.jax_platforms == "cpu" else _TPU_CLUSTERS + _CLUSTERS:
        if known[name].is_env_present() and known[name].get_process_count() > 1:
            return {"cluster_detection_method": name}
    return {}


def _exit_lost(why: str) -> None:
    """Ends the process; also out of threads that are not Python's."""
    os.write(2, f"\nerror: {why}; {_RESTART}\n".encode())
    os._exit(LOST)


def _on_abort(why: str) -> None:
    """Lets the C library's abort() end the process by `_exit_lost`."""
    handler: Callable[[int], None] = lambda _: _exit_lost(why)  # noqa: E731
    call = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    _callbacks.append(call)
    ctypes.CDLL(None).signal(signal.SIGABRT, call)
