"""Change one operand of some functions at a time, and list the changes that their tests do not notice.

    python -m tests.tools.mutate gspo_jax/objectives/catalogue.py:luspo,vespo \
        gspo_jax/objectives/surrogates.py:binary_kl \
        -- tests/objectives/test_objectives_catalogue.py -k "luspo or vespo"

Every mutant is a copy of the package in which one place of a function differs: an operator, a comparison, a bound, a
number, a stop_gradient that is gone, a `where` that always takes one side. Words behind `--` go to pytest, once for
each mutant, until the first failure. Survivors are printed with their line, and their number is the exit code.
"""

import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = "gspo_jax", "tests", "configs", "pyproject.toml"
"""What a mutant's folder has of the project."""
WORKERS = os.process_cpu_count() or 1
SWAPPED: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
"""Operators, and what takes their place."""
OTHER_NAMES = {"minimum": "maximum", "maximum": "minimum", "exp": "expm1", "expm1": "exp", "sum": "max"}
"""Functions, and what takes their place."""


class Mutant(NamedTuple):
    """A changed file."""

    file: Path
    line: int
    what: str
    source: str


def mutants(file: Path, functions: Sequence[str]) -> Iterator[Mutant]:
    """Yield the mutants of the functions of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name not in functions:
            continue
        for node in _body(function):
            for changed, what in _changes(node):
                yield Mutant(file, node.lineno, what, ast.unparse(_Replace(node, changed).visit(copy.deepcopy(tree))))


class _Replace(ast.NodeTransformer):
    """Puts a node in another's place; a deep copy has other objects, so places tell them apart."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new = ast.dump(old, include_attributes=True), new

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and ast.dump(node, include_attributes=True) == self._old:
            return self._new
        return self.generic_visit(node)


def _body(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the expressions of a function, without its docstring, annotations and default values."""
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.expr):
                yield node


def _changes(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Yield what may stand for an expression, and a description."""
    old = ast.unparse(node)

    def made(new: ast.expr) -> tuple[ast.expr, str]:
        return new, f"{old} -> {ast.unparse(new)}"

    if isinstance(node, ast.BinOp):
        for other in SWAPPED.get(type(node.op), ()):
            yield made(ast.BinOp(node.left, other(), node.right))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in SWAPPED.get(type(node.ops[0]), ()):
            yield made(ast.Compare(node.left, [other()], node.comparators))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        if not isinstance(node.operand, ast.Constant):
            yield made(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield made(ast.Constant(node.value + 1))
        if node.value:
            yield made(ast.UnaryOp(ast.USub(), ast.Constant(node.value)))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield made(ast.Constant(not node.value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name == "stop_gradient":
            yield made(node.args[0])
        elif name == "where" and len(node.args) == 3:
            yield made(node.args[1])
            yield made(node.args[2])
            yield made(ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords))
        elif name in ("clip", "abs", "sign"):
            yield made(node.args[0])
        elif name in OTHER_NAMES:
            other = ast.Attribute(node.func.value, OTHER_NAMES[name], ast.Load())
            yield made(ast.Call(other, node.args, node.keywords))


def survives(mutant: Mutant | None, folder: Path, words: Sequence[str]) -> bool:
    """Return whether the tests pass with a mutant, or without one, in a copy of the project."""
    if mutant is not None:
        (folder / mutant.file).write_text(mutant.source, encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=600)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if mutant is not None:
            shutil.copy(ROOT / mutant.file, folder / mutant.file)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the number of survivors."""
    places, words = list(arguments), []
    if "--" in places:
        cut = places.index("--")
        places, words = places[:cut], places[cut + 1 :]
    found = [
        mutant
        for place in places
        for mutant in mutants(Path(place.partition(":")[0]), place.partition(":")[2].split(","))
    ]
    with tempfile.TemporaryDirectory() as above, ThreadPoolExecutor(WORKERS) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(WORKERS):
            folder = Path(above) / str(number)
            folder.mkdir()
            for name in COPIED:
                copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copied(ROOT / name, folder / name)
            folders.put(folder)

        def judge(mutant: Mutant | None) -> bool:
            folder = folders.get()
            try:
                return survives(mutant, folder, words)
            finally:
                folders.put(folder)

        if not judge(None):
            print("the tests fail without any change", file=sys.stderr)
            return 1
        left = 0
        for mutant, lives in zip(found, pool.map(judge, found), strict=True):
            if lives:
                left += 1
                print(f"{mutant.file}:{mutant.line}: {mutant.what}", flush=True)
    print(f"{left} of {len(found)} changes survive")
    return min(left, 255)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
