"""Which names a source binds and which it looks up, as the interpreter sees it; none of it is run."""

import ast
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import symtable

_BEGINS_WITH_ASSERT = re.compile(r"^[ \t]*(?:assert|raise)\b", re.MULTILINE)
_ASSERTS = re.compile(r"assert|fail|raises|warns|exit|abort", re.IGNORECASE)
"""What is in the names of functions that end a test, such as `assertEqual`, `pytest.raises` and `sys.exit`."""


def asserts(source: str) -> bool:
    """Return whether a source has an `assert` or `raise`, or names a function that by its look does the same."""
    return _BEGINS_WITH_ASSERT.search(source) is not None or any(
        isinstance(node, ast.Assert | ast.Raise)
        or (isinstance(node, ast.Name) and _ASSERTS.search(node.id))
        or (isinstance(node, ast.Attribute) and _ASSERTS.search(node.attr))
        for node in _nodes(source)
    )


def bound(source: str) -> set[str]:
    """Return the names that a module binds: its variables, functions, classes and imports."""
    tables = list(_tables(source))
    found = {symbol for table in tables[:1] for symbol in table.get_symbols()}
    found |= {symbol for table in tables[1:] for symbol in table.get_symbols() if symbol.is_declared_global()}
    return {symbol.get_name() for symbol in found if symbol.is_assigned() or symbol.is_imported()}


def imported(source: str) -> set[str]:
    """Return the names that a source binds by import statements; of `*`, those of a module that is loaded."""
    found: set[str] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and names == {"*"}:
                names = set(vars(sys.modules[node.module])) if node.module in sys.modules else set()
            found |= names
    return found


def modules(source: str) -> set[str]:
    """Return the names that a source binds to modules."""
    imports = (node for node in _nodes(source) if isinstance(node, ast.Import))
    return {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def owners(source: str) -> set[str]:
    """Return the names of which a source takes attributes: `m` of `f(m.x)`."""
    return {
        node.value.id for node in _nodes(source) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def looked_up(source: str) -> set[str]:
    """Return the names that a module uses without binding them."""
    used: set[str] = set()
    for number, table in enumerate(_tables(source)):
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (number == 0 or symbol.is_global()):
                used.add(symbol.get_name())
    return used - bound(source)


def shared(source: str) -> set[str]:
    """Return the global names that the functions of a module use or bind."""
    return {
        symbol.get_name()
        for table in list(_tables(source))[1:]
        if table.get_type() == "function"
        for symbol in table.get_symbols()
        if symbol.is_global()
    }


def values(source: str) -> set[str]:
    """Return the names of which a source takes more than attributes: `f` of `f(m.x)`."""
    nodes = _nodes(source)
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in owners}


def _nodes(source: str) -> list[ast.AST]:
    """Return the nodes of the syntax tree; none if it does not compile."""
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _tables(source: str) -> "Iterator[symtable.SymbolTable]":
    """Yield the table of a module, then those of its functions and classes; nothing if it does not compile."""
    import symtable  # few tests need it

    try:
        waiting = [symtable.symtable(source, "tests.py", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for table in waiting:
        yield table
        waiting.extend(table.get_children())
