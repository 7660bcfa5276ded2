"""Costs of operations and programs."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from gspo_jax.planning.hlo import Array
from gspo_jax.planning.rates import Rates


class Traffic(NamedTuple):
    """Traffic of one collective."""

    kind: str
    group: int
    """Devices per replica group."""
    bytes: float
    """Bytes that one device sends."""
    scope: str
    """HLO's op_name."""


class OpWork(NamedTuple):
    """Work of one execution."""

    flops: float
    bytes: float
    """Main-memory traffic."""


class KernelCall(NamedTuple):
    """Call of a Pallas kernel."""

    name: str
    """Kernel name with the compiler's number appended."""
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    declared: OpWork
    """Its cost estimate. Without one, no flops and the bytes of operands and results."""


class Cost(NamedTuple):
    """Per-device cost of one operation. Flops and bytes are per execution."""

    times: float
    flops: float
    bytes: float
    """Main-memory traffic."""
    host_bytes: float
    """Host-memory traffic."""
    operation: str
    """Opcode and name."""
    scope: str
    """HLO's op_name."""
    executed: OpWork
    """Work as executed, including what a kernel computes for nothing."""
    waits: str
    """Minimum time: the "operation" or "collective" latency of `Rates`, or "" (none)."""
    cycles: float | None
    """The compiler's estimate of one execution, if any."""

    def seconds(self, rates: Rates) -> float:
        """Return the maximum of compute, main-memory and latency time."""
        least = {"operation": rates.operation, "collective": rates.collective, "": 0.0}[self.waits]
        return max(self.executed.flops / rates.flops, self.executed.bytes / rates.bandwidth, least)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of a program or of one loop iteration."""

    operations: tuple[Cost, ...]
    collectives: tuple[tuple[float, Traffic], ...]
    """(executions, collective) pairs."""
    kernels: Mapping[str, float]
    """Executions of Pallas kernels without a cost estimate, by name."""
    unknown: tuple[str, ...]
    """Loops of unknown trip count, counted once."""

    @property
    def flops(self) -> float:
        """Flops of matmuls and Pallas kernels."""
        return sum(c.times * c.flops for c in self.operations)

    @property
    def bytes(self) -> float:
        """Main-memory traffic."""
        return sum(c.times * c.bytes for c in self.operations)

    @property
    def sent(self) -> float:
        """Bytes that one device sends in collectives."""
        return sum(times * traffic.bytes for times, traffic in self.collectives)

    def by_group(self) -> dict[tuple[str, int], tuple[float, float, str]]:
        """Map (kind, group size) to (count, bytes sent, top sending scope), most bytes first."""
        groups: dict[tuple[str, int], list[tuple[float, Traffic]]] = {}
        for times, traffic in self.collectives:
            groups.setdefault((traffic.kind, traffic.group), []).append((times, traffic))
        found = {}
        for key, members in groups.items():
            by_scope: dict[str, float] = {}
            for times, traffic in members:
                by_scope[traffic.scope] = by_scope.get(traffic.scope, 0.0) + times * traffic.bytes
            count = sum(times for times, _ in members)
            found[key] = count, sum(by_scope.values()), max(by_scope, key=lambda scope: by_scope[scope])
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def seconds(self, rates: Rates) -> float:
        """Return the roofline time Σ max(flops / peak, bytes / bandwidth), without collectives."""
        return sum(c.times * max(c.flops / rates.flops, c.bytes / rates.bandwidth) for c in self.operations)

    def executed(self, rates: Rates) -> float:
        """Return the executed time, with latencies and without collective transfers."""
        return sum(c.times * c.seconds(rates) for c in self.operations)
