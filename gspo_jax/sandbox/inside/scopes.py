"""Names that a source binds and looks up, found without running it."""

import ast
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import symtable

_BEGINS_WITH_ASSERT = re.compile(r"^[ \t]*(?:assert|raise)\b", re.MULTILINE)
_ASSERTS = re.compile(r"assert|fail|raises|warns|exit|abort", re.IGNORECASE)
"""Name parts of functions that end a test: `assertEqual`, `pytest.raises`, `sys.exit`."""


def asserts(source: str) -> bool:
    """Return True if a source has `assert` or `raise`, or names a function that seems to assert."""
    return _BEGINS_WITH_ASSERT.search(source) is not None or any(
        isinstance(node, ast.Assert | ast.Raise)
        or (isinstance(node, ast.Name) and _ASSERTS.search(node.id))
        or (isinstance(node, ast.Attribute) and _ASSERTS.search(node.attr))
        for node in _nodes(source)
    )


def bound(source: str) -> set[str]:
    """Return the names that a module binds."""
    tables = list(_tables(source))
    found = {symbol for table in tables[:1] for symbol in table.get_symbols()}
    found |= {symbol for table in tables[1:] for symbol in table.get_symbols() if symbol.is_declared_global()}
    return {symbol.get_name() for symbol in found if symbol.is_assigned() or symbol.is_imported()}


def imported(source: str) -> set[str]:
    """Return the names bound by imports, including `*` of loaded modules."""
    found: set[str] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and names == {"*"}:
                names = set(vars(sys.modules[node.module])) if node.module in sys.modules else set()
            found |= names
    return found


def modules(source: str) -> set[str]:
    """Return the names bound to modules."""
    imports = (node for node in _nodes(source) if isinstance(node, ast.Import))
    return {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def owners(source: str) -> set[str]:
    """Return the names whose attributes are used: `m` of `f(m.x)`."""
    return {
        node.value.id for node in _nodes(source) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def looked_up(source: str) -> set[str]:
    """Return the names used but not bound."""
    used: set[str] = set()
    for number, table in enumerate(_tables(source)):
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (number == 0 or symbol.is_global()):
                used.add(symbol.get_name())
    return used - bound(source)


def shared(source: str) -> set[str]:
    """Return the globals that functions use or bind."""
    return {
        symbol.get_name()
        for table in list(_tables(source))[1:]
        if table.get_type() == "function"
        for symbol in table.get_symbols()
        if symbol.is_global()
    }


def values(source: str) -> set[str]:
    """Return the names used other than for attributes: `f` of `f(m.x)`."""
    nodes = _nodes(source)
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in owners}


def _nodes(source: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _tables(source: str) -> "Iterator[symtable.SymbolTable]":
    import symtable  # few tests need it

    try:
        waiting = [symtable.symtable(source, "tests.py", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for table in waiting:
        yield table
        waiting.extend(table.get_children())
