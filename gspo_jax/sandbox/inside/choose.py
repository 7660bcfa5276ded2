"""Which of several sources is the program: the first that compiles and does something."""

import ast
from collections.abc import Sequence

_ACTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def choose(sources: Sequence[str]) -> str:
    """Return the first source that compiles and is more than the output of a program; or else the first.

    Output such as `42`, `[1, 2]` or `YES` compiles, too: expressions that call nothing.
    """
    if len(sources) == 1:
        return sources[0]
    return next((source for source in sources if _is_program(source)), sources[0])


def _is_program(source: str) -> bool:
    try:
        tree = ast.parse(source)
        compile(tree, "program.py", "exec")  # a `return` outside a function parses
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(statement, ast.Expr) or any(isinstance(node, _ACTS) for node in ast.walk(statement))
        for statement in tree.body
    )
