"""Whether every kernel computes the right thing on this process's device.

Each kernel that the platform would use is compiled, run on several loads, and compared with a float64 computation on
the host. So is what XLA alone makes of the same computation, which says where to look. On CPU, whose kernels are XLA's,
the TPU's are interpreted instead, in small sizes.
"""

import contextlib
import dataclasses
import fnmatch
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from gspo_jax.bringup import decode_kernels, device_operations, expert_kernels, token_kernels
from gspo_jax.bringup.exactness import Kernel, deviation
from gspo_jax.bringup.stages import FAILED, OK, WARNING, Given, Result
from gspo_jax.doctor import Finding
from gspo_jax.kernels.backend import platform

KERNEL, XLA, INTERPRETED = "kernel", "XLA's program", "TPU kernel, interpreted"
EVERYWHERE = "router"
"""The kernel that is tried on all of a process's devices: cheap, with products, sums and comparisons."""
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Of interpreted kernels, whose loops take long to compile and little to run."""
WRONG = (
    "Do not train with it: try the versions of jax and libtpu in launch/constraints.txt, and if it stays, report it to "
    "the project with this page."
)
RAISED = "Read the message above; if it is not about memory that others hold, report it to the project with this page."


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """How a kernel's program is made."""

    name: str
    platform: str | None = None
    """The platform whose implementation is traced; None: the device's own."""
    kind: str = "any"
    """A device kind of it."""
    options: dict[str, Any] | None = None
    """Compiler options."""

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Have `backend.platform()` name the way's platform."""
        if self.platform is None:
            yield
            return
        device = AbstractDevice(self.kind, 1, self.platform)
        mesh = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=device)
        interpreted = pltpu.force_tpu_interpret_mode() if self.platform == "tpu" else contextlib.nullcontext()
        with jax.sharding.use_abstract_mesh(mesh), interpreted:
            yield


def ways(kernel: Kernel) -> list[Way]:
    """Return how a kernel is tried on the platform in scope, what a run would use first."""
    interpreted = Way(INTERPRETED, "tpu", "TPU v5e", QUICK)
    if platform() == "cpu":
        return [Way(KERNEL)] * (not kernel.only_tpu) + [interpreted] * (not kernel.long)
    if platform() != "tpu" and kernel.only_tpu:
        return []
    return [Way(KERNEL), Way(XLA, "xla")]


@dataclasses.dataclass
class Outcome:
    """Errors and times of one way of a kernel on one load."""

    kernel: str
    load: str
    way: str
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    """`deviation` by output."""
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    raised: str = ""
    """First line of the exception, if any."""
    compile_seconds: float = 0.0
    """Time to compile the program, which a kernel's loads share."""
    run_seconds: float = 0.0

    @property
    def worst(self) -> str:
        """The output that is furthest from its exact values, by their limits."""
        return max(self.errors, key=lambda name: self.errors[name] / max(self.limits[name], 1e-9))

    @property
    def right(self) -> bool:
        return not self.raised and all(self.errors[name] <= self.limits[name] for name in self.errors)

    def __str__(self) -> str:
        if self.raised:
            return self.raised
        name = self.worst
        error, most = (_percent(x[name]) for x in (self.errors, self.limits))
        return f"wrong by {error} (at most {most}), {name}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share else "0"


class _Programs:
    """A kernel's compiled programs by way, without one that is the same as another."""

    def __init__(self, kernel: Kernel, device: Any, pool: ThreadPoolExecutor, most: int | None):
        """Have those of the first `most` ways compiled, from the shapes of the first load."""
        self.kernel, self.device = kernel, device
        self.compiled: dict[Way, Future[tuple[Any, float]]] = {}
        self.first = next(iter(kernel.loads.values()))()
        shapes = jax.tree.map(self._shape, self.first)
        texts: set[str] = set()
        for way in ways(kernel)[:most]:
            try:
                with way.traced():
                    lowered = jax.jit(kernel.run, donate_argnums=kernel.donated).lower(*shapes)
            except Exception as error:  # as if the compiler had found it
                self.compiled[way] = Future()
                self.compiled[way].set_exception(error)
                continue
            if (text := lowered.as_text()) not in texts:
                texts.add(text)
                self.compiled[way] = pool.submit(_compiled, lowered, way.options)

    def _shape(self, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=jax.sharding.SingleDeviceSharding(self.device))

    def run(self, way: Way, arguments: tuple[Any, ...], outcome: Outcome) -> dict[str, np.ndarray]:
        """Return the outputs, and set the outcome's times."""
        program, outcome.compile_seconds = self.compiled[way].result()
        given = jax.device_put(arguments, self.device, may_alias=False)  # it may be donated
        begun = time.perf_counter()
        found = jax.block_until_ready(program(*given))
        outcome.run_seconds = time.perf_counter() - begun
        return {name: np.asarray(x) for name, x in found.items()}

    def check(self) -> list[Outcome]:
        """Return the outcomes of all loads and ways, of interpreted kernels of the first and last load alone.

        What raises is an outcome too, and ends its way.
        """
        outcomes, ended = [], set()
        for number, (load, draws) in enumerate(self.kernel.loads.items()):
            arguments, self.first, exact = self.first or draws(), None, None
            for way in self.compiled:
                if way in ended or (way.name == INTERPRETED and 0 < number < len(self.kernel.loads) - 1):
                    continue
                outcome = Outcome(self.kernel.name, load, way.name)
                try:
                    found = self.run(way, arguments, outcome)
                    if exact is None or self.kernel.settled:
                        exact = self.kernel.exact(found, *arguments)
                    outcome.errors = {name: deviation(found[name], exact[name]) for name in exact}
                    outcome.limits = {name: exact[name].limit for name in exact}
                except Exception as error:  # whatever the compiler, the device or the kernel raises is a finding
                    outcome.raised = _first_line(error)
                    ended.add(way)
                outcomes.append(outcome)
        return outcomes


def _compiled(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> tuple[Any, float]:
    """Return the program and the seconds that it took."""
    begun = time.perf_counter()
    return lowered.compile(options), time.perf_counter() - begun


def check(kernels: Sequence[Kernel], device: Any, *, most: int | None = None) -> list[list[Outcome]]:
    """Return the outcomes of each kernel on a device, of all or at most so many ways.

    Programs are compiled in threads, while others run.
    """
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        every = [_Programs(kernel, device, pool, most) for kernel in kernels]
        return [every.pop(0).check() for _ in kernels]


def judge(outcomes: Sequence[Outcome]) -> list[Finding]:
    """Return a finding for each load on which a way failed, or one for all."""
    found, loads = [], list(dict.fromkeys(o.load for o in outcomes))
    for load in loads:
        here = [o for o in outcomes if o.load == load]
        if wrong := [o for o in here if not o.right]:
            named = f"{wrong[0].kernel}, {load} load"
            others = [f"{o.way} is right" for o in here if o.right]
            said = [str(o) + ("" if o.way == KERNEL else f" ({o.way})") for o in wrong]
            remedy = RAISED if any(o.raised for o in wrong) else WRONG
            state = WARNING if all(o.way == XLA for o in wrong) else FAILED  # no run uses it
            found.append(Finding(named, state, "; ".join([*said, *others]), remedy))
    if found or not outcomes:
        return found
    name = outcomes[0].kernel
    worst = max(outcomes, key=lambda o: max((o.errors[n] / max(o.limits[n], 1e-9) for n in o.errors), default=0))
    error, most = _percent(worst.errors[worst.worst]), _percent(worst.limits[worst.worst])
    return [Finding(name, OK, f"right on {len(loads)} loads, within {error} (at most {most})")]


def all_kernels() -> list[Kernel]:
    """Return the kernels and operations to try on the platform in scope, in the sizes that suit it."""
    small = platform() == "cpu"
    return [
        *expert_kernels.kernels(small=small),
        *token_kernels.kernels(small=small),
        *decode_kernels.kernels(small=small),
        *device_operations.kernels(small=small),
    ]


def run(given: Given) -> Result:
    """Return what `first` asks for."""
    del given
    return tried()


def tried(*, only: Sequence[str] = ("*",)) -> Result:
    """Return findings, failed ones first, and figures of every kernel and of what XLA itself must compute.

    Every process checks its first device, and on its others one cheap kernel.

    Args:
      only: patterns of names of kernels and checks, as of a shell.
    """

    def chosen(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in only)

    begun = time.perf_counter()
    first, *others = jax.local_devices()
    every = [kernel for kernel in all_kernels() if chosen(kernel.name)]
    outcomes = check(every, first)
    findings = [finding for own in outcomes for finding in judge(own)]
    for kernel in every:
        if kernel.name == EVERYWHERE:
            findings += _elsewhere(kernel, others)
    checks: dict[str, Callable[[], Finding]] = device_operations.CHECKS
    findings += [_caught(name, one) for name, one in checks.items() if chosen(name)]
    figures = {
        "device": first.device_kind,
        "seconds": time.perf_counter() - begun,
        "outcomes": [dataclasses.asdict(outcome) for own in outcomes for outcome in own],
    }
    return sorted(findings, key=lambda f: (FAILED, WARNING, OK).index(f.state)), figures


def _elsewhere(kernel: Kernel, devices: Sequence[Any]) -> list[Finding]:
    """Try a kernel's first load on further devices."""
    found = []
    for device in devices:
        load, draws = next(iter(kernel.loads.items()))
        one = kernel._replace(name=f"{kernel.name} on device {device.id}", loads={load: draws})
        found += [f for own in check([one], device, most=1) for f in judge(own) if f.state != OK]
    if devices and not found:
        found = [Finding(f"{kernel.name} on other devices", OK, f"right on {len(devices)}")]
    return found


def _caught(name: str, one: Callable[[], Finding]) -> Finding:
    try:
        return one()
    except Exception as error:
        return Finding(name, FAILED, _first_line(error), RAISED)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
