"""What programs and tests find around them."""

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


def add_builtins() -> None:
    """Add builtins of `site` such as `exit`: the judge runs without it."""
    site.setquit()
    site.setcopyright()
    site.sethelper()


def new_module(name: str) -> dict[str, Any]:
    """Return the names of a new module. Its `__file__` does not exist."""
    module = types.ModuleType(name)
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__file__ = os.path.abspath(sys.argv[0] if name == "__main__" else f"{name}.py")
    sys.modules[name] = module
    return vars(module)


def describe(error: BaseException) -> str:
    """Return an exception's type and message."""
    return f"{type(error).__name__}: {error}"[:WHY_CHARACTERS]


def _statements(source: str) -> list[ast.stmt]:
    """Return a source's statements, [] if it is not Python."""
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def given_source(prompt: str, entry: str) -> str:
    """Return a prompt's definitions other than `entry` as a source, "" if the prompt is not Python.

    Skip what the program must complete: functions with only a docstring, `pass`, `...` or NotImplementedError, and
    classes with such methods.
    """
    return "\n".join(
        ast.unparse(node)
        for node in _statements(prompt)
        if not (isinstance(node, DEFINITIONS) and (node.name == entry or is_unfinished(node)))
    )


def is_unfinished(node: ast.stmt) -> bool:
    """Return True if a definition that is not abstract, or one of its methods, has no body."""
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
    """Return the parts of a set-up or test that a program may see: its data classes by name, its imports as "".

    Data classes have only dunder methods. The rest may show what a test expects.
    """

    def methods(node: ast.ClassDef) -> list[str]:
        return [part.name for part in ast.walk(node) if isinstance(part, _FUNCTIONS)]

    body = _statements(source)
    imports = "\n".join(ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    found = {"": imports}
    for node in body:
        if isinstance(node, ast.ClassDef) and all(name[:2] == name[-2:] == "__" for name in methods(node)):
            found[node.name] = f"{imports}\n{ast.unparse(node)}"
    return found


def fingerprint(kind: type) -> str:
    """Return a value that classes of equal source share, and others hardly."""
    import hashlib

    if issubclass(kind, enum.Enum):
        return repr([(name, member.value) for name, member in kind.__members__.items()])
    parts = [repr(getattr(kind, "_fields", None)), repr(sorted(getattr(kind, "__dataclass_fields__", ())))]
    for name, value in sorted(vars(kind).items()):
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if code is not None:
            parts.append(f"{name} {code.co_code.hex()} {code.co_names}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
