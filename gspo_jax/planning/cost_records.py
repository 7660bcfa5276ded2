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
    """Bytes that one device sends over its slice's links."""
    scope: str
    """HLO's op_name."""
    dcn: float = 0.0
    """Bytes that one device sends to other slices."""


class OpWork(NamedTuple):
    """Work of one execution."""

    flops: float
    bytes: float
    """Main-memory traffic."""
    steps: float = 1.0
    """Size of a kernel's grid dimension that is known only at run time."""


class KernelCall(NamedTuple):
    """Call of a Pallas kernel."""

    name: str
    """Kernel name with the compiler's number appended."""
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    declared: OpWork
    """Its cost estimate. Without one, no flops and the bytes of operands and results."""
    rare: bool = False
    """True in a loop of the scope `RARELY`: a further pass through the experts' buffers."""


STREAMED = 3.0
"""Ratio of the compiler's estimate to the bound by bytes and products beyond which the rest is work on vectors.

Below, it may be the bandwidth that the estimate assumes: on v5p, 1.0 of 2.77 TB/s for plain bfloat16 copies.
"""

WINDOW = 3000
"""Estimated cycles of a window, one of several, up to which they are a latency that the next window's reads hide.

The compiler estimates at least 2120 cycles per window on v5p and v6e, 1825 on v5e and 2296 on tpu7x.
"""
SMALL = 1.5
"""Multiple of an operation's latency below which its estimate is latency too, not work on vectors."""


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
    """Work as executed, including what a kernel computes for nothing. A kernel's flops are the chip's peak times the
    time of its busiest core."""
    waits: str
    """Latency: that of an "operation", a "collective", a "kernel", or "" (none)."""
    cycles: float | None
    """The compiler's estimate of one execution, if any."""
    hops: int = 0
    """Links on a collective's longest way, twice for an all-reduce."""
    steps: float = 0.0
    """Grid steps of a kernel on its busiest core."""
    windows: int = 1
    """Windows that the compiler's estimate is for."""

    def seconds(self, rates: Rates) -> float:
        """Return the executed time.

        The maximum of compute, main memory, latency and work on vectors. Of a kernel: launch + max(main memory, compute
        + steps · grid_step), as reads go on during a step's overhead.
        """
        compute, moved = self.executed.flops / rates.flops, self.executed.bytes / rates.bandwidth
        if self.waits == "kernel":
            return rates.launch + max(moved, compute + self.steps * rates.grid_step)
        return max(compute, moved, self.latency(rates), self.vector(rates))

    def latency(self, rates: Rates) -> float:
        """Return the least time of such an operation."""
        if self.waits == "collective":
            return rates.collective_latency(self.hops)
        return {"operation": rates.operation, "kernel": rates.launch, "": 0.0}[self.waits]

    def vector(self, rates: Rates) -> float:
        """Return the compiler's estimate if bytes and products do not explain it, else 0."""
        if self.cycles is None or not self.waits or (self.windows > 1 and self.cycles <= WINDOW * self.windows):
            return 0.0
        bound = max(self.executed.flops / rates.flops, self.executed.bytes / rates.bandwidth)
        estimate = self.cycles * rates.cycle
        return estimate if estimate > STREAMED * bound else 0.0

    def bound(self, rates: Rates) -> str:
        """Return what bounds the time: "compute", "memory", "latency", or "vector" for work on vectors."""
        latency, vector = self.latency(rates), self.vector(rates)
        bounds = {
            "compute": self.executed.flops / rates.flops,
            "memory": self.executed.bytes / rates.bandwidth,
            "latency": max(latency, vector) if vector <= SMALL * latency else latency,
            "vector": vector,
        }
        return max(bounds, key=lambda bound: bounds[bound])


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
    unsized: tuple[str, ...] = ()
    """Kernels of whose grid a dimension is counted as 1."""

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
        """Bytes that one device sends over its slice's links in collectives."""
        return sum(times * traffic.bytes for times, traffic in self.collectives)

    @property
    def dcn(self) -> float:
        """Bytes that one device sends to other slices."""
        return sum(times * traffic.dcn for times, traffic in self.collectives)

    def by_group(self) -> dict[tuple[str, int], tuple[float, float, str]]:
        """Map (kind, group size) to (count, bytes sent, top sending scope), most bytes first."""
        groups: dict[tuple[str, int], list[tuple[float, Traffic]]] = {}
        for times, traffic in self.collectives:
            groups.setdefault((traffic.kind, traffic.group), []).append((times, traffic))
        found = {}
        for key, members in groups.items():
            by_scope: dict[str, float] = {}
            for times, traffic in members:
                sent = times * (traffic.bytes + traffic.dcn)
                by_scope[traffic.scope] = by_scope.get(traffic.scope, 0.0) + sent
            count = sum(times for times, _ in members)
            found[key] = count, sum(by_scope.values()), max(by_scope, key=lambda scope: by_scope[scope])
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def seconds(self, rates: Rates) -> float:
        """Return the roofline time Σ max(flops / peak, bytes / bandwidth), without collectives."""
        return sum(c.times * max(c.flops / rates.flops, c.bytes / rates.bandwidth) for c in self.operations)

    def executed(self, rates: Rates) -> float:
        """Return the executed time, with latencies and without collective transfers."""
        return sum(c.times * c.seconds(rates) for c in self.operations)
