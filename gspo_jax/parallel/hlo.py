"""The text of a compiled program (`compiled.as_text()`), taken apart: what runs what, and how often.

What a program costs is told by `costs.py` from this.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
"""Of the types whose names do not end in their number of bits."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

AT_MOST = r"at_most_(\d+)"
"""How `at_most` names a scope."""


def at_most(trips: int) -> str:
    """The name of a scope (`jax.named_scope`) for a loop whose trips depend on data: how many there may be."""
    return f"at_most_{trips}"


RARELY = "rarely"
"""The name of a scope for a branch that is not counted: there for a case that hardly ever comes."""


class Array(NamedTuple):
    """The type of an array in compiled text."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    """Where it lies: 0 is the main memory of the device, 5 that of its host; others are on the chip."""

    @property
    def bytes(self) -> float:
        """Without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            number = re.search(r"\d+", self.dtype)  # as in bf16, f8e4m3fn, s4
            bits = int(number[0]) if number else 0
        return math.prod(self.dims) * bits / 8


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction."""

    name: str
    opcode: str
    type: str
    arguments: str
    """What stands between its parentheses."""
    attributes: str
    """What stands after them."""
    root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """What it makes: one, or those of a tuple, flat."""
        return tuple(
            Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space or 0))
            for dtype, dims, space in re.findall(r"([a-z]\w*)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?", self.type)
        )

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names."""
        return tuple(re.findall(r"%([\w.\-~]+)", self.arguments))

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern that is found in its attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def scope(self) -> str:
        """Where in the program it comes from."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def calls(self) -> list[str]:
        """The computations that it is made of: not a loop's, nor those that say how to reduce two numbers."""
        names = re.findall(
            r"(?:calls|called_computation|true_computation|false_computation)=%([\w.\-~]+)", self.attributes
        )
        if self.opcode in ("call", "call-start"):
            names += re.findall(r"to_apply=%([\w.\-~]+)", self.attributes)
        listed = self.attribute(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
        return names + (re.findall(r"%([\w.\-~]+)", listed) if listed else [])


Computation = dict[str, Operation]


class Run(NamedTuple):
    """A computation that an operation runs."""

    computation: str
    times: float
    """1 where that is not known."""
    known: bool
    state: Mapping[int, int]
    """What is constant in a loop's state, by place."""


class Module:
    """A compiled program's text, taken apart."""

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
        """The operation of that name, in whatever computation; None if there is none."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Operation]:
        # The entry comes last: its parameters have the names that memory is reported by.
        entry = self.computations.pop(self.entry, {})
        self.computations[self.entry] = entry
        return {name: operation for inside in self.computations.values() for name, operation in inside.items()}

    def root(self, computation: str) -> Operation:
        """What a computation returns."""
        return next(o for o in self.computations[computation].values() if o.root)

    def arrays(self, computation: str, name: str) -> tuple[Array, ...]:
        """The types of a value."""
        operation = self.computations[computation].get(name)
        return operation.arrays if operation is not None else ()

    def chained(self, operation: Operation) -> tuple[str, Operation] | None:
        """Of a fusion that is a step of a collective done in many, between others' work: which, and the collective."""
        for called in operation.calls if operation.opcode == "fusion" else ():
            for inner in self.computations[called].values():
                if inner.opcode in COLLECTIVES and (chain := inner.attribute(r'chain_id="(\d+)"')):
                    return f"{inner.opcode} {inner.attribute(r'channel_id=([0-9]+)')} {chain}", inner
        return None

    def runs(self, computation: str, operation: Operation, state: Mapping[int, int]) -> list[Run]:
        """What a loop, a branch or a call runs, in a computation with that state; nothing for any other operation.

        Of branches each runs as often as any other, and those of the scope `RARELY` do not.
        """
        if operation.opcode == "while":
            trips, inner = self._trips(computation, operation, state)
            body = operation.attribute(r"body=%([\w.\-~]+)")
            assert body
            return [Run(body, 1 if trips is None else trips, trips is not None, inner)]
        if operation.opcode == "conditional":
            usual = [called for called in operation.calls if not self._rare(called)]
            return [Run(called, 1 / len(usual), True, {}) for called in usual]
        if operation.opcode in ("call", "call-start"):
            return [Run(called, 1, True, {}) for called in operation.calls]
        return []

    def _rare(self, computation: str) -> bool:
        """Whether it is a branch of the scope `RARELY`."""
        return any(RARELY in operation.scope.split("/") for operation in self.computations[computation].values())

    def _trips(
        self, computation: str, loop: Operation, state: Mapping[int, int]
    ) -> tuple[int | None, Mapping[int, int]]:
        """How often a loop turns, and what is constant in its state.

        A loop that counts up to a constant is told by its condition, one whose turns depend on data by its scope.
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
        """The counter that the condition compares, by its place in the state, and the number it stays below."""

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
        """A value as (i, c), element i of the loop's state plus c, or (None, c), c alone; None if it is neither."""
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


def _lines(text: str) -> Iterator[str]:
    """Instructions and heads of computations, each in one line; long constants come in several."""
    begun: list[str] = []
    for line in text.splitlines():
        if re.match(r"\s+(ROOT )?%[\w.\-~]+ = |\}|(ENTRY )?%?[\w.\-~]+ .*->.*\{\s*$|HloModule", line):
            yield " ".join(begun)
            begun = [line]
        else:
            begun.append(line)
    yield " ".join(begun)


def _operation(name: str, text: str, root: bool) -> Operation:
    """Of what stands after the name: TYPE opcode(arguments), attributes."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    rest = text[end:].lstrip()
    opcode = re.match(r"[\w\-]+", rest)
    assert opcode, text[:200]
    close = _closing(rest, opcode.end())
    return Operation(name, opcode[0], text[:end], rest[opcode.end() + 1 : close - 1], rest[close:], root)


def _closing(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"no closing parenthesis in {text[:200]!r}")
