"""Per-device costs of a compiled program.

XLA's `cost_analysis()` counts a loop body once. This module walks the compiled text through fusions, calls and loops,
and multiplies by trip counts. It counts:

* flops of matmuls, convolutions, and Pallas kernels with a cost estimate
* bytes to and from main memory, of slices only the slice
* bytes a device sends in collectives, assuming ring algorithms
* executed work: kernels compute whole blocks in grid steps, small operations take a latency
* elapsed time, with asynchronous collectives overlapping other work

Traffic between slices is what the compiler hands to the data-center network (`send` with a megascale target), the rest
of a collective stays on the slices' links.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from gspo_jax.planning.cost_records import Cost, Costs, KernelCall, OpWork, Traffic
from gspo_jax.planning.hlo import COLLECTIVES, SCALARS, Array, Called, Module, Operation, convolution_flops
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.topology import Torus

_NO_TRAFFIC = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "iota"),
    *("partition-id", "replica-id", "opt-barrier", "optimization-barrier", "domain"),
    "conditional",
}
"""Opcodes without memory traffic of their own."""

_TRANSFERS = ("send", "recv")
"""Opcodes that start a transfer to or from the host."""

_CHAIN_START, _CHAIN_END = "async-collective-start", "async-collective-done"
"""Name prefixes of fusions that start and finish a multi-step collective."""


Kernels = Mapping[str, Callable[[KernelCall], OpWork]]
"""Executed work by prefix of a kernel's name."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware that runs a program."""

    cores: int = 1
    """Cores of a chip, which share parallel grid dimensions."""
    slices: int = 1
    torus: Torus | None = None
    """None: all chips are neighbours."""


class CostedProgram(Module):
    """Compiled program with a cost model.

    `filled` maps kernel name prefixes to the used fraction of declared rows, for buffers of worst-case size. `kernels`
    maps them to executed work. `passes` returns the trips of a loop of the scope `RARELY`, from the kernels in it.
    """

    def __init__(
        self,
        text: str,
        *,
        filled: Mapping[str, float] | None = None,
        kernels: Kernels | None = None,
        passes: Callable[[Sequence[KernelCall]], float] | None = None,
        machine: Machine | None = None,
    ):
        super().__init__(text)
        self.filled, self.kernels, self.passes = filled or {}, kernels or {}, passes
        self.machine = machine or Machine()

    def costs(self) -> Costs:
        """Return the costs of one run."""
        return self._costs_of(self.entry, {})

    def loops(self) -> list[Costs]:
        """Return the costs of one iteration of each outermost loop of unknown trip count."""
        return [self._costs_of(turn.computation, turn.state) for turn in self._unknown(self.entry, {})]

    def elapsed_loops(self, rates: Rates) -> list[float]:
        """Return the elapsed seconds of one iteration of each of `loops`. See `elapsed`."""
        return [self._elapsed(turn.computation, turn.state, rates) for turn in self._unknown(self.entry, {})]

    def _unknown(self, computation: str, state: Mapping[int, int]) -> Iterator[Called]:
        for operation in self.computations[computation].values():
            for run in self.runs(computation, operation, state):
                if run.known:
                    yield from self._unknown(run.computation, run.state)
                else:
                    yield run

    def _costs_of(self, computation: str, state: Mapping[int, int]) -> Costs:
        found = _CostCollector(self)
        found.walk(computation, 1.0, state)
        return found.costs()

    def elapsed(self, rates: Rates) -> float:
        """Return the seconds of one run with collectives overlapping computation.

        Operations run in text order, the compiler's schedule. Collectives queue on one link, and transfers between
        slices on another. Asynchronous ones delay only operations that wait for their end.
        """
        return self._elapsed(self.entry, {}, rates)

    def _elapsed(self, computation: str, state: Mapping[int, int], rates: Rates, *, rare: bool = False) -> float:
        now = free = free_between = 0.0
        ends: dict[str, float] = {}  # by starting operation, chain, or name of a transfer between slices

        def send(work: _CostCollector) -> float:
            nonlocal free
            free = max(now, free) + sum(times * t.bytes for times, t in work.collectives) / rates.links
            return free

        def collector() -> _CostCollector:
            return _CostCollector(self, rare=rare)

        for operation in self.computations[computation].values():
            opcode, work = operation.opcode, collector()
            if operation.between_slices:
                work.count(computation, operation, 1.0)
                now += work.costs().executed(rates)
                if opcode == "send":
                    free_between = max(now, free_between) + work.costs().dcn / rates.dcn
                    ends[operation.rendezvous or ""] = free_between
            elif opcode == "recv-done":
                begun = self.computations[computation].get(operation.operands[0])
                now = max(now, ends.get((begun.rendezvous if begun else None) or "", now))
            elif opcode in ("call-start", "call-update"):
                given = operation.operands  # a call-start may have none and receive them through a call-update
                begun = self.find(given[0]) if opcode == "call-update" else operation
                for run in self.runs(computation, begun, {}) if given and begun is not None else ():
                    work.walk(run.computation, run.times, run.state)
                now += work.costs().executed(rates)
                ends[operation.name] = send(work)
            elif runs := self.runs(computation, operation, state):
                now += sum(
                    run.times * self._elapsed(run.computation, run.state, rates, rare=rare or self.is_rare(operation))
                    for run in runs
                )
            elif opcode.endswith("-done") and operation.operands:
                now = max(now, ends.get(operation.operands[0], now))
            else:
                work.count(computation, operation, 1.0)
                now += work.costs().executed(rates)
                if chain := self.chained(operation):
                    if work.collectives:
                        ends[chain[0]] = send(work)
                    elif operation.name.startswith(_CHAIN_END):
                        now = max(now, ends.get(chain[0], now))
                elif work.collectives:
                    ends[operation.name] = send(work)
                    now = now if opcode.endswith("-start") else free
        return now

    def runs(self, computation: str, operation: Operation, state: Mapping[int, int]) -> list[Called]:
        """Return what an operation runs. For a conditional: the costliest branch that is not rare."""
        found = super().runs(computation, operation, state)
        if operation.opcode == "while" and self.is_rare(operation) and self.passes is not None:
            return [run._replace(times=self.passes(self._kernel_calls(run.computation))) for run in found]
        return [max(found, key=self._branch_cost)] if operation.opcode == "conditional" else found

    def _kernel_calls(self, computation: str) -> list[KernelCall]:
        found = []
        for operation in self.computations[computation].values():
            if inside := self.kernel_in(computation, operation):
                found.append(self.kernel_call(*inside, self.moved(computation, operation), rare=True))
            for run in super().runs(computation, operation, {}):
                found += self._kernel_calls(run.computation)
        return found

    def kernel_call(self, computation: str, operation: Operation, moved: float, *, rare: bool) -> KernelCall:
        """Return a call with its cost estimate, or without one `moved` bytes."""
        operands = tuple(a for o in operation.operands for a in self.arrays(computation, o))
        declared = self.estimate(operation) or OpWork(0.0, moved)
        return KernelCall(operation.name, operands, operation.arrays, declared, rare)

    def estimate(self, operation: Operation) -> OpWork | None:
        """Return a kernel's own cost estimate, or None."""
        flops, moves = (operation.attribute(rf'"{what}":"?(\d+)') for what in ("flops", "bytes_accessed"))
        return None if flops is None or moves is None else OpWork(float(flops), float(moves))

    def _branch_cost(self, branch: Called) -> tuple[float, float]:
        costs = self._costs_of(branch.computation, branch.state)
        return costs.flops, costs.bytes

    def kernel_in(self, computation: str, operation: Operation) -> tuple[str, Operation] | None:
        """Return a kernel, and its computation: the operation, or fused with what slices its operands or results."""
        if operation.opcode != "fusion":
            return (computation, operation) if operation.is_kernel else None
        called = operation.calls[0]
        return next(((called, one) for one in self.computations[called].values() if one.is_kernel), None)

    def product_flops(self, computation: str, operation: Operation) -> float:
        """Return matmul flops, also inside a fusion or call."""
        if operation.opcode in ("fusion", "call"):
            return sum(
                self.product_flops(called, o) for called in operation.calls for o in self.computations[called].values()
            )
        if operation.opcode not in ("dot", "convolution"):
            return 0.0
        left, right = (self.computations[computation][o].arrays[0].dims for o in operation.operands[:2])
        out = operation.arrays[0].dims
        if operation.opcode == "dot":
            inner = operation.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
            return 2.0 * math.prod(out) * math.prod(left[int(d)] for d in inner.split(",") if d)
        return convolution_flops(operation, left, right, out)

    def traffic(self, computation: str, operation: Operation) -> Traffic | None:
        """Return a collective's traffic. None for other operations and -done halves."""
        kind = operation.opcode.removesuffix("-start")
        if (between := operation.between_slices) and kind == "send":
            slices, size = self.machine.slices, operation.arrays[0].bytes
            sent = _sent(between, slices, size)
            return Traffic(f"{between} between slices", slices, 0.0, operation.scope, sent)
        if kind not in COLLECTIVES:
            return None
        given = [a for o in operation.operands for a in self.arrays(computation, o)]
        if computation.startswith("all-reduce-scatter") and kind == "all-reduce":
            kind = "reduce-scatter"  # the TPU compiler's notation for one
        size = sum(a.bytes for a in given)
        if kind == "ragged-all-to-all":  # upper bound: the smaller buffer
            size = min(a.bytes for a in given[:2])
        group = operation.group_size
        return Traffic(kind, group, _sent(kind, group, size), operation.scope)

    def hops(self, operation: Operation) -> int:
        """Return the links on a collective's longest way: 1 on an unknown slice."""
        if self.machine.torus is None:
            return 1
        rounds = 2 if operation.opcode.removesuffix("-start") == "all-reduce" else 1
        return rounds * self.machine.torus.hops(operation.groups)

    def waits(self, computation: str, operation: Operation) -> str:
        """Return the latency of a non-collective, "" if it only names or starts something, or is scalar."""
        opcode = operation.opcode
        if opcode in (*_NO_TRAFFIC, *_TRANSFERS) or opcode.endswith(("-start", "-done", "-update")):
            return ""
        if self.kernel_in(computation, operation) is not None:
            return "kernel"
        if opcode == "custom-call":
            return ""
        arrays = (*operation.arrays, *(a for o in operation.operands for a in self.arrays(computation, o)))
        return "" if all(a.space == SCALARS for a in arrays) else "operation"

    def moved(self, computation: str, operation: Operation, space: int = 0) -> float:
        """Return the bytes moved to and from a memory space (0: main, 5: host)."""

        def size(arrays: Sequence[Array]) -> float:
            return sum(a.bytes for a in arrays if a.space == space)

        opcode, out = operation.opcode, size(operation.arrays)
        given = [size(self.arrays(computation, o)) for o in operation.operands]
        if opcode in _NO_TRAFFIC or opcode.endswith(("-done", "-update")):
            return 0.0
        if opcode in _TRANSFERS:  # read or written by the host
            return size(operation.arrays[:1])
        if opcode == "copy-start":
            return size(operation.arrays[:2])
        if opcode in (
            "slice-start",
            "dynamic-slice-start",
            "dynamic-update-slice-start",
        ):  # mostly between memory spaces
            whole, part = operation.arrays[0], operation.arrays[1 if "update" in opcode else -2]
            return part.bytes * ((whole.space == space) + (part.space == space))
        if opcode == "custom-call" and not operation.is_kernel:
            return 0.0
        if opcode.removesuffix("-start") == "ragged-all-to-all":  # rows that move: at most the smaller buffer's
            return 2 * min(given[:2])
        if opcode.endswith("-start"):  # its result tuple lists inputs and outputs
            return out
        if opcode in ("slice", "dynamic-slice", "gather"):
            return 2 * out
        if opcode == "dynamic-update-slice":
            return 2 * given[1]
        if opcode == "scatter":
            return 2 * given[-1]
        if opcode == "fusion":
            called = operation.calls[0]
            if chain := self.chained(operation):  # `count` counts the collective's buffers once
                own = {(a.dtype, a.dims) for o in chain[1].operands for a in self.arrays(called, o)}
                own |= {(a.dtype, a.dims) for a in chain[1].arrays}
                out = size([a for a in operation.arrays if (a.dtype, a.dims) not in own])
                arrays = [self.arrays(computation, o) for o in operation.operands]
                given = [size([a for a in some if (a.dtype, a.dims) not in own]) for some in arrays]
            inner = {int(o.arguments): o for o in self.computations[called].values() if o.opcode == "parameter"}
            read = sum(min(full, self._read(called, inner[i])) for i, full in enumerate(given) if full)
            return read + (min(out, self._written(called, self.root(called))) if out else 0)
        return out + sum(given)

    def _read(self, computation: str, source: Operation) -> float:
        """Return a value's bytes read in a fused computation, infinite if possibly all."""
        total = 0.0
        for user in self.computations[computation].values():
            if source.name not in user.operands:
                continue
            if user.opcode in ("slice", "dynamic-slice", "gather") and user.operands[0] == source.name:
                total += sum(a.bytes for a in user.arrays)
            elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == source.name:
                continue
            elif self._is_view(user) and not user.root:
                total += self._read(computation, user)
            elif user.opcode == "fusion":
                called = user.calls[0]
                inner = {int(o.arguments): o for o in self.computations[called].values() if o.opcode == "parameter"}
                total += sum(self._read(called, inner[i]) for i, o in enumerate(user.operands) if o == source.name)
            else:
                return math.inf
        return math.inf if source.root else total

    def _is_view(self, operation: Operation) -> bool:
        """Return True for pure layout changes, which reads pass through."""
        if operation.opcode == "fusion":
            inner = self.computations[operation.calls[0]].values()
            return all(o.opcode == "parameter" or self._is_view(o) for o in inner)
        return operation.opcode in ("bitcast", "reshape", "copy")

    def _written(self, computation: str, value: Operation) -> float:
        """Return the written bytes of a fused result. In-place updates write only the update."""
        inside = self.computations[computation]
        if value.opcode == "tuple":
            return sum(self._written(computation, inside[o]) for o in value.operands)
        if value.opcode == "bitcast" and value.operands[0] in inside:
            return self._written(computation, inside[value.operands[0]])
        if value.opcode == "dynamic-update-slice":
            return sum(a.bytes for a in self.arrays(computation, value.operands[1]))
        if value.opcode == "scatter":
            return sum(a.bytes for a in self.arrays(computation, value.operands[-1]))
        if value.opcode == "fusion":
            return self._written(value.calls[0], self.root(value.calls[0]))
        return sum(a.bytes for a in value.arrays)


def _sent(kind: str, group: int, size: float) -> float:
    """Return the bytes that a member of a group sends, by ring algorithms."""
    others = (group - 1) / max(group, 1)
    return {
        "all-gather": (group - 1) * size,
        "all-reduce": 2 * others * size,
        "collective-permute": size,
        "collective-broadcast": size,
        "one-to-one": size,
    }.get(kind, others * size)


class _CostCollector:
    def __init__(self, program: CostedProgram, *, rare: bool = False):
        self.program, self.rare = program, rare
        self.operations: list[Cost] = []
        self.collectives: list[tuple[float, Traffic]] = []
        self.kernels: Counter[str] = Counter()
        self.unknown: list[str] = []
        self.unsized: list[str] = []

    def costs(self) -> Costs:
        unknown, unsized = (tuple(dict.fromkeys(names)) for names in (self.unknown, self.unsized))
        return Costs(tuple(self.operations), tuple(self.collectives), dict(self.kernels), unknown, unsized)

    def walk(self, computation: str, times: float, state: Mapping[int, int]) -> None:
        for operation in self.program.computations[computation].values():
            runs, was_rare = self.program.runs(computation, operation, state), self.rare
            self.rare = was_rare or self.program.is_rare(operation)
            for run in runs:
                if not run.known:
                    self.unknown.append(operation.name)
                if run.times:
                    self.walk(run.computation, times * run.times, run.state)
            if not runs:
                self.count(computation, operation, times)
            self.rare = was_rare

    def count(self, computation: str, operation: Operation, times: float) -> None:
        program, chain, sent = self.program, self.program.chained(operation), len(self.collectives)
        begins, hops = chain is None or operation.name.startswith(_CHAIN_START), 0
        if traffic := program.traffic(computation, operation):
            self.collectives.append((times, traffic))
            hops = program.hops(operation)
        if operation.opcode in ("fusion", "async-start") and begins:
            for called in operation.calls:
                for inner in program.computations[called].values():
                    if traffic := program.traffic(called, inner):
                        self.collectives.append((times, traffic))
                        hops = max(hops, program.hops(inner))
        flops, moved = program.product_flops(computation, operation), program.moved(computation, operation)
        executed, steps = OpWork(flops, moved), 0.0
        if inside := program.kernel_in(computation, operation):
            (flops, moved, _), executed, steps = self.kernel(*inside, times, moved)
        if chain and begins:
            whole = program.moved(operation.calls[0], chain[1])
            moved, executed = moved + whole, executed._replace(bytes=executed.bytes + whole)
        if self.rare:  # what a full first pass would do, and has been counted in
            flops = moved = 0.0
        host = program.moved(computation, operation, space=5)
        waits = program.waits(computation, operation)
        if len(self.collectives) > sent and not operation.between_slices:
            waits = "collective"
        if flops or moved or host or waits:
            where, estimate = f"{operation.opcode} {operation.name}", (operation.cycles, hops, steps, operation.windows)
            self.operations.append(Cost(times, flops, moved, host, where, operation.scope, executed, waits, *estimate))

    def kernel(
        self, computation: str, operation: Operation, times: float, moved: float
    ) -> tuple[OpWork, OpWork, float]:
        """Return a Pallas kernel's necessary and executed work, and the grid steps of its busiest core."""
        name, program = operation.name, self.program
        call = program.kernel_call(computation, operation, moved, rare=self.rare)
        if program.estimate(operation) is None:
            self.kernels[re.sub(r"[.\d]+$", "", name)] += times  # pyright: ignore[reportArgumentType]
        fill = next((f for begin, f in program.filled.items() if name.startswith(begin)), 1.0)
        needed = executed = call.declared._replace(flops=fill * call.declared.flops)
        works = [work for begin, work in program.kernels.items() if name.startswith(begin)]
        for work in works:
            executed = work(call)
            needed = needed._replace(bytes=min(needed.bytes, executed.bytes))  # a buffer's empty rows are not read
        grid = operation.grid
        if not works and any(dimension.size is None for dimension in grid):
            self.unsized.append(re.sub(r"[.\d]+$", "", name))
        sizes = [executed.steps if dimension.size is None else dimension.size for dimension in grid]
        cores = program.machine.cores
        shared = math.prod(size for size, dimension in zip(sizes, grid, strict=True) if dimension.parallel)
        share = math.ceil(shared / cores) / max(shared, 1) if grid else 1.0
        busiest = executed._replace(flops=executed.flops * share * cores if grid else executed.flops)
        return needed, busiest, math.prod(sizes) * share if grid else 1.0
