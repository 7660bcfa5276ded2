"""Whether every kernel computes the right thing on this process's device.

Each kernel that the platform would use is compiled, run on several loads, and compared with a float64 computation on the
host. So is what XLA alone makes of the same computation, which says where to look. On CPU, whose kernels are XLA's, the
TPU's are interpreted instead, in small sizes.
"""

import contextlib
import dataclasses
import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from gspo_jax.bringup import decode_kernels, device_operations, expert_kernels, token_kernels
from gspo_jax.bringup.exactness import Kernel, deviation
from gspo_jax.bringup.findings import Finding
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


@dataclasses.dataclass(frozen=True)
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
        return [interpreted] if kernel.only_tpu else [Way(KERNEL), interpreted]
    if platform() != "tpu" and kernel.only_tpu:
        return []
    return [Way(KERNEL), Way(XLA, "xla")]


@dataclasses.dataclass
class Outcome:
    """What one way of a kernel did with one load."""

    kernel: str
    load: str
    way: str
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    """`deviation` by output."""
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    raised: str = ""
    """First line of the exception, if any."""
    compile_seconds: float = 0.0
    """Of the first load. Others share its program."""
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
    """A kernel's compiled programs by way; one that is another's is left out."""

    def __init__(self, kernel: Kernel, device: Any):
        self.kernel, self.device, self.texts, self.compiled = kernel, device, set(), {}

    def run(self, way: Way, arguments: tuple[Any, ...], outcome: Outcome) -> dict[str, np.ndarray] | None:
        """Return the outputs, and set the outcome's times; None if the way has no program of its own."""
        given = jax.device_put(arguments, self.device, may_alias=False)  # it may be donated
        if way.name not in self.compiled:
            begun = time.perf_counter()
            with way.traced():
                lowered = jax.jit(self.kernel.run, donate_argnums=self.kernel.donated).lower(*given)
                text = lowered.as_text()
                known, self.compiled[way.name] = text in self.texts, None
                self.texts.add(text)
                if not known:
                    self.compiled[way.name] = lowered.compile(way.options)
            outcome.compile_seconds = time.perf_counter() - begun
        if (program := self.compiled[way.name]) is None:
            return None
        begun = time.perf_counter()
        found = jax.block_until_ready(program(*given))
        outcome.run_seconds = time.perf_counter() - begun
        return {name: np.asarray(x) for name, x in found.items()}


def check(kernel: Kernel, *, device: Any = None) -> list[Outcome]:
    """Return the outcomes of all loads and ways of a kernel, interpreted of the first and last load alone.

    What raises is an outcome too, and ends its way.
    """
    device, outcomes, ended = device or jax.local_devices()[0], [], set()
    programs = _Programs(kernel, device)
    for number, (load, draws) in enumerate(kernel.loads.items()):
        arguments = draws()
        for way in ways(kernel):
            if way.name in ended or way.name == INTERPRETED and 0 < number < len(kernel.loads) - 1:
                continue
            outcome = Outcome(kernel.name, load, way.name)
            try:
                found = programs.run(way, arguments, outcome)
                if found is None:
                    continue
                exact = kernel.exact(found, *arguments)
                outcome.errors = {name: deviation(found[name], exact[name]) for name in exact}
                outcome.limits = {name: exact[name].limit for name in exact}
            except Exception as error:  # whatever the compiler, the device or the kernel itself raises is a finding
                outcome.raised = _first_line(error)
                ended.add(way.name)
            outcomes.append(outcome)
    return outcomes


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
            found.append(Finding(named, "failed", f"{named}: {'; '.join([*said, *others])}", remedy))
    if found or not outcomes:
        return found
    name = outcomes[0].kernel
    worst = max(outcomes, key=lambda o: max((o.errors[n] / max(o.limits[n], 1e-9) for n in o.errors), default=0))
    error, most = _percent(worst.errors[worst.worst]), _percent(worst.limits[worst.worst])
    return [Finding(name, "ok", f"{name}: right on {len(loads)} loads, within {error} (at most {most})")]


def all_kernels() -> list[Kernel]:
    """Return the kernels and operations to try on the platform in scope, in the sizes that suit it."""
    small = platform() == "cpu"
    return [
        *expert_kernels.kernels(small=small),
        *token_kernels.kernels(small=small),
        *decode_kernels.kernels(small=small),
        *device_operations.kernels(small=small),
    ]


def kernels(*, only: Sequence[str] = ("*",)) -> tuple[list[Finding], dict[str, Any]]:
    """Return findings, failed ones first, and figures of every kernel and of what XLA itself must compute.

    Every process checks its first device, and on its others one cheap kernel. About a minute on a TPU.

    Args:
      only: patterns of names of kernels and checks, as of a shell.
    """

    def chosen(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in only)

    begun, findings, outcomes = time.perf_counter(), [], []
    first, *others = jax.local_devices()
    for kernel in filter(lambda kernel: chosen(kernel.name), all_kernels()):
        own = check(kernel, device=first)
        outcomes += own
        findings += judge(own)
        if kernel.name == EVERYWHERE:
            findings += _elsewhere(kernel, others)
    checks: dict[str, Callable[[], Finding]] = device_operations.CHECKS
    findings += [_caught(name, one) for name, one in checks.items() if chosen(name)]
    figures = {
        "device": first.device_kind,
        "seconds": time.perf_counter() - begun,
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    return sorted(findings, key=lambda f: ("failed", "warning", "ok").index(f.state)), figures


def _elsewhere(kernel: Kernel, devices: Sequence[Any]) -> list[Finding]:
    """Try a kernel's first load on further devices."""
    found = []
    for device in devices:
        one = kernel._replace(name=f"{kernel.name} on device {device.id}", loads=dict([next(iter(kernel.loads.items()))]))
        found += [f for f in judge(check(one, device=device)) if f.state != "ok"]
    if devices and not found:
        name = f"{kernel.name} on other devices"
        found = [Finding(name, "ok", f"{name}: right on {len(devices)}")]
    return found


def _caught(name: str, one: Callable[[], Finding]) -> Finding:
    try:
        return one()
    except Exception as error:
        return Finding(name, "failed", f"{name}: {_first_line(error)}", RAISED)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
