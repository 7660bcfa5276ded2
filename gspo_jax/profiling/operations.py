"""Operations of a trace of jax's profiler, joined by name with the programs that ran.

Such traces differ by platform. On a TPU a device's plane has a line of programs and a line of operations, nested as in
the program. Elsewhere each event of an operation names its program, and events of a device are on the lines of several
threads or queues. On a GPU one operation may be several kernels.
"""

import bisect
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

CONTAINERS = re.compile(r"(while|call|conditional)(\.\d+)*$")
"""Names of operations that only contain others."""
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-~]+) = ", re.MULTILINE)
_SCOPE = re.compile(r'op_name="([^"]*)"')
_END = "end: "
"""Marks on a CPU's threads."""
_TPU = "/device:TPU:"
_GPU = "/device:GPU:"

Programs = Mapping[str, Mapping[str, str]]
"""Scope (`op_name`) of each operation, by program and operation."""


class Event(NamedTuple):
    """An operation that ran on a device."""

    device: str
    program: str
    operation: str
    begun: float
    """Nanoseconds since the start of the trace."""
    ended: float
    run: object
    """Differs between executions of a program. None if unknown."""


class Operation(NamedTuple):
    """An operation's time on a device, without that of operations inside it."""

    program: str
    name: str
    scope: str
    """Where the program's source made it; empty if unknown."""
    seconds: float
    """Mean over devices."""
    share: float
    """Of the time in which programs ran."""
    times: float
    """How often it ran, mean over devices."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a trace shows of the devices of a process."""

    devices: int
    running_s: float
    """Seconds in which a program ran, mean over devices."""
    joined: float
    """Share of them in which an operation ran whose name is in the text of its program."""
    operations: Sequence[Operation]
    """The most expensive first."""

    def facts(self, most: int) -> dict[str, Any]:
        """Return the figures by name, with at most `most` operations."""
        return dataclasses.asdict(self) | {"operations": [one._asdict() for one in self.operations[:most]]}


def compiled_programs() -> dict[str, dict[str, str]]:
    """Return the operations' scopes of `compiled_texts` by program. Programs of one name are merged."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, text in compiled_texts():
        found[name].update(operations_of(text))
    return dict(found)


def compiled_texts() -> Iterator[tuple[str, str]]:
    """Yield name and compiled text of each program that this process has compiled and still holds."""
    for executable in jax.local_devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            yield module.name, module.to_string()


def operations_of(text: str) -> dict[str, str]:
    """Return the scopes of a program's operations by name."""
    found = {}
    for line in text.splitlines():
        if (name := _NAME.match(line)) is not None:
            scope = _SCOPE.search(line)
            found[name[1]] = scope[1].replace("\\'", "'") if scope else ""
    return found


def read(data: Any, programs: Programs) -> Seen:
    """Return where the devices' time went in a `jax.profiler.ProfileData`."""
    own: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    leaves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    runs: dict[str, dict[object, tuple[float, float]]] = defaultdict(dict)
    for events in _lines(data):
        for event, alone in zip(events, _without_inner(events), strict=True):
            seen = own[event.program, event.operation]
            seen[0] += alone
            seen[1] += 1
            own_runs, run = runs[event.device], (event.program, event.run)
            begun, ended = own_runs.get(run, (event.begun, event.ended))
            own_runs[run] = min(begun, event.begun), max(ended, event.ended)
            if event.operation in programs.get(event.program, ()) and not CONTAINERS.match(event.operation):
                leaves[event.device].append((event.begun, event.ended))
    devices = max(len(runs), 1)
    running = {device: _covered(spans.values()) for device, spans in runs.items()}
    total = sum(running.values())
    found = [
        Operation(
            program,
            name,
            programs.get(program, {}).get(name, ""),
            spent / 1e9 / devices,
            spent / total if total else 0.0,
            count / devices,
        )
        for (program, name), (spent, count) in own.items()
    ]
    found.sort(key=lambda one: -one.seconds)
    joined = sum(_covered(spans) for spans in leaves.values())
    return Seen(len(runs), total / 1e9 / devices, joined / total if total else 0.0, found)


def _lines(data: Any) -> Iterator[list[Event]]:
    """Yield the events of each line that has operations, in order, outer ones first."""
    for plane in data.planes:
        lines = list(plane.lines)
        events = [_tpu_events(plane.name, lines)] if plane.name.startswith(_TPU) else map(_stated, lines)
        for found in events:
            if plane.name.startswith(_GPU):
                found = [event._replace(device=plane.name) for event in found]
            if found:
                yield sorted(found, key=lambda event: (event.begun, -event.ended))


def _tpu_events(device: str, lines: Sequence[Any]) -> list[Event]:
    by_name = {line.name: list(line.events) for line in lines}
    programs = sorted(by_name.get("XLA Modules", []), key=lambda event: event.start_ns)
    begun = [event.start_ns for event in programs]
    found = []
    for event in by_name.get("XLA Ops", []):
        at = bisect.bisect_right(begun, event.start_ns) - 1
        program = programs[at].name.partition("(")[0] if at >= 0 else ""
        name = event.name.removeprefix("%").partition(" ")[0]
        found.append(Event(device, program, name, event.start_ns, event.start_ns + event.duration_ns, at))
    return found


def _stated(line: Any) -> list[Event]:
    found = []
    for event in line.events:
        if event.name.startswith(_END):
            continue
        stats: dict[str, Any] = dict(event.stats)
        if "hlo_op" in stats and "hlo_module" in stats:
            device, run = str(stats.get("device_ordinal", "")), stats.get("run_id")
            program, name = stats["hlo_module"], stats["hlo_op"]
            found.append(Event(device, program, name, event.start_ns, event.start_ns + event.duration_ns, run))
    return found


def _without_inner(events: Sequence[Event]) -> list[float]:
    """Return each event's nanoseconds without those of events inside it, of events in order."""
    own = [event.ended - event.begun for event in events]
    outer: list[int] = []
    for i, event in enumerate(events):
        while outer and events[outer[-1]].ended <= event.begun:
            outer.pop()
        if outer:
            own[outer[-1]] -= own[i]
        outer.append(i)
    return own


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    covered, end = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        if ended > end:
            covered += ended - max(begun, end)
            end = ended
    return covered
