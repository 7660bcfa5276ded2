"""Choice of the program among several sources."""

import ast
import builtins
import sys
from collections.abc import Sequence

from .world import DEFINITIONS, is_unfinished

_ACTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def choose(sources: Sequence[str]) -> str:
    """Return the first source that compiles and is neither a program's output nor about another source.

    Output such as `42` or `YES` compiles too, but calls nothing. A source is about another if it has no function body
    and calls nothing, or only what another defines. If none qualifies, return the first that does something, else the
    first.
    """
    if len(sources) == 1:
        return sources[0]
    acting = []
    for source in sources:
        tree = _parsed(source)
        if tree is None or not _does_something(tree):
            continue
        if not _is_about_another(tree, sources):
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


def _is_about_another(tree: ast.Module, sources: Sequence[str]) -> bool:
    if any(isinstance(node, DEFINITIONS) and not is_unfinished(node) for node in tree.body):
        return False
    nodes = list(ast.walk(tree))
    definitions = [node for node in nodes if isinstance(node, DEFINITIONS)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    if not all(map(is_unfinished, definitions)):
        return False
    if definitions and not calls:
        return True
    called = {function.id for function in calls if isinstance(function, ast.Name)} - vars(builtins).keys()
    called -= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    called -= {node.name for node in definitions}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in sys.stdlib_module_names:
            called -= {name.asname or name.name for name in node.names}
    others = filter(None, map(_parsed, sources)) if called else ()
    return any(isinstance(node, DEFINITIONS) and node.name in called for other in others for node in other.body)
