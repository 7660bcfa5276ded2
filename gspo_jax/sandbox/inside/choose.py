"""Which of several sources is the program: the first that compiles, does something and stands by itself."""

import ast
import builtins
import sys
from collections.abc import Sequence

_ACTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def choose(sources: Sequence[str]) -> str:
    """Return the first source that compiles, and is neither the output of a program nor an example of its use.

    Output such as `42`, `[1, 2]` or `YES` compiles, too: expressions that call nothing. An example defines nothing, and
    calls what only another source does. If there is no such source, return the first that does something, or the first.
    """
    if len(sources) == 1:
        return sources[0]
    acting = []
    for source in sources:
        tree = _parsed(source)
        if tree is None or not _does_something(tree):
            continue
        if not _is_example(tree, sources):
            return source
        acting.append(source)
    return (*acting, *sources)[0]


def _parsed(source: str) -> ast.Module | None:
    try:
        tree = ast.parse(source)
        compile(tree, "program.py", "exec")  # a `return` outside a function parses
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree


def _does_something(tree: ast.Module) -> bool:
    return any(
        not isinstance(statement, ast.Expr) or any(isinstance(node, _ACTS) for node in ast.walk(statement))
        for statement in tree.body
    )


def _is_example(tree: ast.Module, sources: Sequence[str]) -> bool:
    nodes = list(ast.walk(tree))
    if any(isinstance(node, _DEFINITIONS) for node in nodes):
        return False
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    called -= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in sys.stdlib_module_names:
            called -= {name.asname or name.name for name in node.names}
    called -= vars(builtins).keys()
    others = filter(None, map(_parsed, sources)) if called else ()
    return any(isinstance(node, _DEFINITIONS) and node.name in called for other in others for node in other.body)
