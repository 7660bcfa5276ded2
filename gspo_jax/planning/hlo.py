"""Parser of compiled program text (`compiled.as_text()`)."""

import base64
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from jax.experimental.mosaic.dialects import tpu
from jax.extend.mlir import ir

from gspo_jax.kernels.scopes import AT_MOST, RARELY

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
"""Bits per element."""

_UNKNOWN_CYCLES = 2**62
"""Estimates from here on mean unknown."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

SCALARS = 6
"""Memory space of the scalar unit."""


class GridDimension(NamedTuple):
    """Dimension of a Pallas kernel's grid."""

    size: int | None
    """None if known only at run time."""
    parallel: bool
    """True if a chip's cores share it."""


class Array(NamedTuple):
    """Array type in compiled text."""

    dtype: str
    """Such as bf16."""
    dims: tuple[int, ...]
    space: int
    """Memory space: 0 main memory, 5 host, others on chip (6 for scalars)."""

    @property
    def bytes(self) -> float:
        """Unpadded size."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            number = re.search(r"\d+", self.dtype)  # as in bf16, f8e4m3fn, s4
            bits = int(number[0]) if number else 0
        return math.prod(self.dims) * bits / 8


@dataclasses.dataclass(frozen=True)
class Operation:
    """HLO instruction."""

    name: str
    """Name without the leading %."""
    opcode: str
    type: str
    arguments: str
    """Text in the parentheses."""
    attributes: str
    """Text after them."""
    root: bool
    """True for its computation's result."""

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Result types, with tuples flattened."""
        return tuple(
            Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space or 0))
            for dtype, dims, space in re.findall(r"([a-z]\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?", self.type)
        )

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Operand names."""
        return tuple(re.findall(r"%([\w.\-~]+)", self.arguments))

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a pattern's match in the attributes, or None."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def scope(self) -> str:
        """The op_name, or empty."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def cycles(self) -> float | None:
        """The TPU compiler's estimate. None if missing or unknown."""
        found = self.attribute(r'"estimated_cycles":"(\d+)"')
        return float(found) if found and int(found) < _UNKNOWN_CYCLES else None

    @property
    def windows(self) -> int:
        """Parts that the TPU compiler computes one after the other, 1 if not given."""
        found = self.attribute(r'"iteration_bounds":\[([^\]]*)\]')
        return math.prod(int(bound) for bound in re.findall(r"\d+", found or ""))

    @property
    def is_kernel(self) -> bool:
        """True for a Pallas kernel call."""
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.attributes

    @property
    def grid(self) -> tuple[GridDimension, ...]:
        """A Pallas kernel's grid, () without one."""
        body = self.attribute(r'"body":"([^"]*)"')
        return _grid(body) if body else ()

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices that exchange with one another: the first replica group, or all pairs of a permutation."""
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", self.attributes):
            sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
            strides = dict(zip(sizes, _strides(list(sizes.values())), strict=True))
            group = np.zeros(1, int)
            for axis, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", found[2]):
                # An axis, or a part of one: 'fsdp':(16)4 has a part of 16 before it.
                count = int(part) if part else sizes[axis]
                after = sizes[axis] // (int(before or 1) * count)
                group = (group[:, None] + strides[axis] * after * np.arange(count)).reshape(-1)
            return (tuple(group.tolist()),)
        if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", self.attributes):
            ids = np.arange(math.prod(_ints(found[2]))).reshape(_ints(found[2]))
            ids = ids.transpose(_ints(found[3])) if found[3] else ids
            return (tuple(ids.reshape(-1)[: int(found[1])].tolist()),)
        if found := re.search(r"replica_groups=\{\{([\d,]*)\}", self.attributes):
            return (tuple(_ints(found[1])),)
        pairs = self.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}") or ""
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs))

    @property
    def group_size(self) -> int:
        """Devices per replica group, 0 if not given."""
        return len(self.groups[0]) if self.groups else 0

    @property
    def between_slices(self) -> str | None:
        """Kind of a transfer over the data-center network, such as all-reduce; None for other operations."""
        found = self.attribute(r'_xla_megascale_transfer_type="(\w+)"')
        return found.lower().replace("_", "-") if found else None

    @property
    def rendezvous(self) -> str | None:
        """Name that a `send` and its `recv` share."""
        return self.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')

    @property
    def calls(self) -> list[str]:
        """Called computations, without loop bodies, loop conditions and reduction combiners."""
        names = re.findall(
            r"(?:calls|called_computation|true_computation|false_computation)=%([\w.\-~]+)", self.attributes
        )
        if self.opcode in ("call", "call-start"):
            names += re.findall(r"to_apply=%([\w.\-~]+)", self.attributes)
        listed = self.attribute(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
        return names + (re.findall(r"%([\w.\-~]+)", listed) if listed else [])


Computation = dict[str, Operation]


class Called(NamedTuple):
    """Computation run by an operation."""

    computation: str
    times: float
    """1 if unknown."""
    known: bool
    state: Mapping[int, int]
    """Constants of a loop's state, by tuple index."""


class Module:
    """Parsed program text."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in _lines(text):
            if head := re.match(r"(ENTRY )?%?([\w.\-~]+) .*->.*\{\s*$", line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif found := re.match(r"\s+(ROOT )?%([\w.\-~]+) = (.*)$", line, re.S):
                operation = _operation(found[2], found[3], bool(found[1]))
                current[operation.name] = operation

    def find(self, name: str) -> Operation | None:
        """Return the operation of that name in any computation, or None."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Operation]:
        # The entry goes last to win name clashes: the memory report uses its parameters' names.
        entry = self.computations.pop(self.entry, {})
        self.computations[self.entry] = entry
        return {name: operation for inside in self.computations.values() for name, operation in inside.items()}

    def root(self, computation: str) -> Operation:
        """Return a computation's root operation."""
        return next(o for o in self.computations[computation].values() if o.root)

    def arrays(self, computation: str, name: str) -> tuple[Array, ...]:
        """Return a value's types, empty if it is not defined here."""
        operation = self.computations[computation].get(name)
        return operation.arrays if operation is not None else ()

    def chained(self, operation: Operation) -> tuple[str, Operation] | None:
        """Return (chain id, collective) of a fusion that does one step of a collective, or None."""
        for called in operation.calls if operation.opcode == "fusion" else ():
            for inner in self.computations[called].values():
                if inner.opcode in COLLECTIVES and (chain := inner.attribute(r'chain_id="(\d+)"')):
                    return f"{inner.opcode} {inner.attribute(r'channel_id=([0-9]+)')} {chain}", inner
        return None

    def runs(self, computation: str, operation: Operation, state: Mapping[int, int]) -> list[Called]:
        """Return what a loop, conditional or call runs, given constants of the enclosing loop's state.

        Branches and loops in the scope `RARELY` do not count.
        """
        if operation.opcode == "while":
            trips, inner = self._trips(computation, operation, state)
            body = operation.attribute(r"body=%([\w.\-~]+)")
            assert body
            if self.is_rare(operation):
                return [Called(body, 0, True, inner)]
            return [Called(body, 1 if trips is None else trips, trips is not None, inner)]
        if operation.opcode == "conditional":
            usual = [called for called in operation.calls if not self._rare(called)]
            return [Called(called, 1, True, {}) for called in usual or operation.calls]
        if operation.opcode in ("call", "call-start"):
            return [Called(called, 1, True, {}) for called in operation.calls]
        return []

    def is_rare(self, operation: Operation) -> bool:
        """True in the scope `RARELY`."""
        return RARELY in operation.scope.split("/")

    def _rare(self, computation: str) -> bool:
        return any(map(self.is_rare, self.computations[computation].values()))

    def _trips(
        self, computation: str, loop: Operation, state: Mapping[int, int]
    ) -> tuple[int | None, Mapping[int, int]]:
        """Return a loop's trip count, or None, and the constants of its state.

        The count follows from the condition, or for a data-dependent loop from its scope (`at_most`).
        """
        body, condition = loop.attribute(r"body=%([\w.\-~]+)"), loop.attribute(r"condition=%([\w.\-~]+)")
        assert body and condition
        start, after = self.computations[computation].get(loop.operands[0]), self.root(body)
        constants: dict[int, int] = {}
        if start is not None and start.opcode == "tuple":
            for i, name in enumerate(start.operands):
                value = self._linear(computation, name, state)
                if value is not None and value[0] is None:
                    constants[i] = value[1]
        steps: dict[int, int] = {}
        if after.opcode == "tuple":
            for i, name in enumerate(after.operands):
                value = self._linear(body, name, {})
                if value is not None and value[0] == i:
                    steps[i] = value[1]
        fixed = {i: value for i, value in constants.items() if steps.get(i) == 0}
        bound = self._bound(condition, fixed)
        if bound is not None and bound[0] in constants and steps.get(bound[0], 0) > 0:
            return max(0, -(-(bound[1] - constants[bound[0]]) // steps[bound[0]])), fixed
        trips = re.findall(AT_MOST, loop.scope)
        return (int(trips[-1]) if trips else None), fixed

    def _bound(self, condition: str, fixed: Mapping[int, int]) -> tuple[int, int] | None:
        """Return the counter's state index and exclusive upper bound, or None."""

        def compare(
            computation: str, arguments: Sequence[tuple[int | None, int] | None] | None
        ) -> tuple[int, int] | None:
            root = self.root(computation)
            if root.opcode in ("fusion", "call"):
                given = [self._linear(computation, o, fixed, arguments) for o in root.operands]
                return compare(root.calls[0], given)
            if root.opcode != "compare" or root.attribute(r"direction=(\w+)") != "LT":
                return None
            left, right = (self._linear(computation, o, fixed, arguments) for o in root.operands)
            if left is None or right is None or left[0] is None or right[0] is not None:
                return None
            return left[0], right[1] - left[1]

        return compare(condition, None)

    def _linear(
        self,
        computation: str,
        name: str,
        state: Mapping[int, int],
        arguments: Sequence[tuple[int | None, int] | None] | None = None,
    ) -> tuple[int | None, int] | None:
        """Return (i, c) for state element i plus c, (None, c) for the constant c, or None."""
        operation = self.computations[computation].get(name)
        if operation is None:
            return None

        def of(operand: str) -> tuple[int | None, int] | None:
            return self._linear(computation, operand, state, arguments)

        if operation.opcode == "constant":
            number = re.fullmatch(r"\s*(-?\d+)\s*", operation.arguments)
            return (None, int(number[1])) if number else None
        if operation.opcode == "parameter" and arguments is not None:
            return arguments[int(operation.arguments)]
        if operation.opcode == "get-tuple-element":
            source = self.computations[computation][operation.operands[0]]
            if source.opcode != "parameter":
                return None
            index = int(operation.attribute(r"index=(\d+)") or 0)
            return (None, state[index]) if index in state else (index, 0)
        if operation.opcode in ("copy", "bitcast", "convert"):
            return of(operation.operands[0])
        if operation.opcode == "add":
            a, b = (of(o) for o in operation.operands)
            if a is None or b is None or (a[0] is not None and b[0] is not None):
                return None
            return (a[0] if b[0] is None else b[0]), a[1] + b[1]
        if operation.opcode in ("fusion", "call"):
            called = operation.calls[0]
            return self._linear(called, self.root(called).name, {}, [of(o) for o in operation.operands])
        return None


@lru_cache(maxsize=4096)
def _grid(body: str) -> tuple[GridDimension, ...]:
    """Return the grid of a kernel's serialized code."""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    with context:
        module = ir.Module.parse(base64.b64decode(body))  # kept: its operations do not keep it
        attributes = module.body.operations[0].attributes
        if "iteration_bounds" not in attributes:
            return ()
        sizes = [int(size) for size in ir.DenseI64ArrayAttr(attributes["iteration_bounds"])]
        kinds = [str(kind) for kind in ir.ArrayAttr(attributes["dimension_semantics"])]
        found = zip(sizes, kinds, strict=True)
        return tuple(GridDimension(size if size >= 0 else None, "parallel" in kind) for size, kind in found)


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _lines(text: str) -> Iterator[str]:
    """Yield logical lines. Long constants span several."""
    begun: list[str] = []
    for line in text.splitlines():
        if re.match(r"\s+(ROOT )?%[\w.\-~]+ = |\}|(ENTRY )?%?[\w.\-~]+ .*->.*\{\s*$|HloModule", line):
            yield " ".join(begun)
            begun = [line]
        else:
            begun.append(line)
    yield " ".join(begun)


def _operation(name: str, text: str, root: bool) -> Operation:
    """Parse `TYPE opcode(arguments), attributes`."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    rest = text[end:].lstrip()
    opcode = re.match(r"[\w\-]+", rest)
    assert opcode, text[:200]
    close = _closing(rest, opcode.end())
    return Operation(name, opcode[0], text[:end], rest[opcode.end() + 1 : close - 1], rest[close:], root)


def _closing(text: str, start: int) -> int:
    """Return the index past the matching parenthesis."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"no closing parenthesis in {text[:200]!r}")


def convolution_flops(
    operation: Operation, left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]
) -> float:
    """Return 2 × outputs × contraction size, counting only window positions on the input, not padding.

    Batched matmuls become convolutions with the head dimension as a window. Only one position counts.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.attributes)
    assert labels, operation.attributes[:200]
    image, kernel, result = labels.groups()
    window = operation.attribute(r"window=\{([^}]*)\}") or ""
    settings = dict(re.findall(r"(\w+)=([\w\-x]+)", window))
    total = 2.0 * out[result.index("b")] * out[result.index("f")] * right[kernel.index("i")]
    spatial = sorted(c for c in kernel if c.isdigit())

    def setting(name: str, place: int, default: str) -> str:
        return settings[name].split("x")[place] if name in settings else default

    for place, digit in enumerate(spatial):
        size, outputs = left[image.index(digit)], out[result.index(digit)]
        low = int(setting("pad", place, "0_0").split("_")[0])
        stride, kernel_dilation = int(setting("stride", place, "1")), int(setting("rhs_dilate", place, "1"))
        input_dilation = int(setting("lhs_dilate", place, "1"))
        taps, reach = right[kernel.index(digit)], (size - 1) * input_dilation + 1
        total *= sum(
            1
            for o in range(outputs)
            for w in range(taps)
            if 0 <= (at := o * stride + w * kernel_dilation - low) < reach and at % input_dilation == 0
        )
    return total
