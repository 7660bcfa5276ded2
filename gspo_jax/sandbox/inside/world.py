"""What programs and tests find around them: builtins, modules of their own, and what a record's set-up defines."""

import ast
import builtins
import enum
import os
import site
import sys
import types
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
WHY_CHARACTERS = 200
"""Characters of the reason why a program or test failed."""


def add_builtins() -> None:
    """Add `exit`, `quit`, `help`, `copyright`, `credits` and `license`: no `site` has run in the judge."""
    site.setquit()
    site.setcopyright()
    site.sethelper()


def new_module(name: str) -> dict[str, Any]:
    """Return the names of a new module; `__file__` is one, though there is no such file."""
    module = types.ModuleType(name)
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__file__ = os.path.abspath(sys.argv[0] if name == "__main__" else f"{name}.py")
    sys.modules[name] = module
    return vars(module)


def describe(error: BaseException) -> str:
    """Return what an exception says, in a line."""
    return f"{type(error).__name__}: {error}"[:WHY_CHARACTERS]


def given_source(prompt: str, entry: str) -> str:
    """Return what a prompt gives beside the function or class that it asks for, as a source; in words it gives nothing.

    It does not give what it leaves to the program as well: functions and classes without a body, with nothing but a
    docstring, `pass`, `...` or NotImplementedError in one of their methods.
    """
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return "\n".join(
        ast.unparse(node)
        for node in tree.body
        if not (isinstance(node, DEFINITIONS) and (node.name == entry or is_unfinished(node)))
    )


def is_unfinished(node: ast.stmt) -> bool:
    """Return whether a definition has no body, or one of its methods has none; those of abstract classes need none."""
    if isinstance(node, ast.ClassDef):
        if any("Protocol" in ast.unparse(base) for base in node.bases):
            return False
        methods = [part for part in ast.walk(node) if isinstance(part, _FUNCTIONS)]
        return any(map(is_unfinished, methods)) if methods or node.bases else not any(map(_does, node.body))
    assert isinstance(node, _FUNCTIONS)
    return not any(map(_does, node.body)) and not any("abstract" in ast.unparse(by) for by in node.decorator_list)


def _does(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return statement.exc is None or "NotImplementedError" not in ast.unparse(statement.exc)
    return not isinstance(statement, ast.Pass) and not (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def shared_source(source: str) -> dict[str, str]:
    """Return what a program may see of a set-up or test: its classes by name, and its imports as "".

    These are classes that hold data, whose only methods are those of operators. Nothing else is shown: what a test
    expects, or how it finds out, is not the program's to know.
    """

    def methods(node: ast.ClassDef) -> list[str]:
        return [part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]

    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    imports = "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    found = {"": imports}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and all(name[:2] == name[-2:] == "__" for name in methods(node)):
            found[node.name] = f"{imports}\n{ast.unparse(node)}"
    return found


def fingerprint(kind: type) -> str:
    """Return what two classes from the same source have in common, and others hardly."""
    import hashlib

    if issubclass(kind, enum.Enum):
        return repr([(name, member.value) for name, member in kind.__members__.items()])
    parts = [repr(getattr(kind, "_fields", None)), repr(sorted(getattr(kind, "__dataclass_fields__", ())))]
    for name, value in sorted(vars(kind).items()):
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if code is not None:
            parts.append(f"{name} {code.co_code.hex()} {code.co_names}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
