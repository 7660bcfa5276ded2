"""Runs in random awkward folders: trained, stopped by SIGTERM, resumed, evaluated and converted, there and back.

    JAX_PLATFORMS=cpu python -m tests.tools.folders --count=60 --seed=0 --json=folders.json

The names of a run's folder, of its model's and of its data's are made of what shells, patterns, URLs and libraries take
for something else; some are links, relative, or very long. Prints a line per run. Exits with code 1 unless each run
ends as one in a plain folder does, with the same bits, or is refused by one sentence and exit code 2 before any work.
All are forks of one process, which has imported everything.
"""

import argparse
import contextlib
import json
import os
import random
import runpy
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from gspo_jax import exits
from tests import faulty
from tests.pods import ROOT, assert_same_bits, field_run

ITERATIONS = 2
MODEL = ROOT / "tests" / "golden" / "adder"
ODD = (
    *"[]{}()*?!^$~#%&:;=|<>\"'`,+@ \t\n",
    *("[0]", "[a-z]", "**", "{a,b}", "%2F", "%s", "{}", "${HOME}", "$(x)", "..", "://", "gs:", ".orbax-checkpoint-tmp"),
    *("\\", "\x01", "é", "e\u0301", "日本語", "😀", "\u2028", "\u202e", "\udcff", "--", "@2", "[1:2]", "~"),
)
"""What names are made of, beside letters."""
FORMS = ("absolute", "relative", "dots", "slash", "link", "link above", "long", "home", "dash")


def make_name(rng: random.Random) -> str:
    """A name of one to four odd parts among letters."""
    parts = [rng.choice(ODD) if rng.random() < 0.6 else rng.choice("abc.-_0 ") for _ in range(rng.randint(1, 6))]
    name = "".join(parts).replace("/", ":")
    return name if name.strip(".") and len(name) < 80 else f"x{name}"


def make_place(rng: random.Random, root: Path, form: str) -> tuple[str, Path]:
    """A folder below `root` as a command line names it from there, and its path."""
    path = root.joinpath(*(make_name(rng) for _ in range(rng.randint(1, 3))))
    if form == "long":
        path = root.joinpath(*(make_name(rng) + "x" * 150 for _ in range(12)))
    if form == "dash":
        path = root / f"-{make_name(rng)}"
    if form == "home":
        return f"~/{path.relative_to(root)}", path
    if form.startswith("link"):
        real = root / f"real {make_name(rng)}"
        real.mkdir()
        link = path if form == "link" else path.parent
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(real)
    spelled = {
        "relative": str(path.relative_to(root)),
        "dash": str(path.relative_to(root)),
        "dots": f"./nowhere/../{path.relative_to(root)}",
        "slash": f"{path}//",
    }
    if form == "dots":
        (root / "nowhere").mkdir(exist_ok=True)
    return spelled.get(form, str(path)), path


def in_fork(work: Callable[[], object], output: Path) -> int:
    """Work in a fork, which writes what it says to a file; return its exit code, or minus its signal.

    This process itself starts no device, whose threads a fork would lack.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            with open(output, "wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            exits.leave(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(module: str, words: list[str], output: Path, *, fault: str = "") -> int:
    """Run a command in a fork; see `in_fork`."""

    def work() -> None:
        if fault:
            faulty.inject(fault)
        warnings.simplefilter("ignore", RuntimeWarning)  # that the module was imported
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return in_fork(work, output)


def refused(said: str) -> bool:
    """Whether a command ended with one sentence."""
    return said.startswith("error: ") and "Traceback" not in said and said.count("error: ") == 1


def attempt(number: int, seed: int, root: Path, plain: Path) -> dict:
    """Return what becomes of one run: "right", "refused" by a sentence, or what is wrong."""
    rng = random.Random(f"{seed}-{number}")
    form = FORMS[number % len(FORMS)]
    where, path = make_place(rng, root, form)
    model = root / "models" / make_name(rng)
    data = root / "data" / make_name(rng)
    shutil.copytree(MODEL, model)
    facts = {"number": number, "form": form, "folder": where}
    words = field_run(Path("x"), data, iterations=ITERATIONS, **{"model.folder": model, "eval.every": ITERATIONS})
    words = [f"--workdir={where}" if word.startswith("--workdir=") else word for word in words]
    output = root / "output"

    def ended(module: str, words: list[str], fault: str = "") -> tuple[int, str]:
        return run(module, words, output, fault=fault), output.read_text(errors="replace")

    code, said = ended("gspo_jax.train", words, "TERM:reward:3")
    if code == 2 and refused(said) and not any((path / name).exists() for name in ("checkpoints", "metrics.jsonl")):
        return facts | {"end": "refused", "said": said.strip()}
    if code or not (path / "stopped.json").is_file():
        return facts | {"end": f"the stop: code {code}", "said": said[-3000:]}
    steps = (
        ("resume", "gspo_jax.train", words),
        ("evaluate", "gspo_jax.evaluate", words),
        ("convert", "gspo_jax.convert", [f"--from={where}", f"--to={root / 'out' / path.name}"]),
        ("back", "gspo_jax.convert", [f"--from={root / 'out' / path.name}", f"--to={root / 'back' / path.name}"]),
    )
    for name, module, given in steps:
        code, said = ended(module, given)
        if code:
            return facts | {"end": f"{name}: code {code}", "said": said[-3000:]}
    if in_fork(lambda: assert_same_bits(plain, path, step=ITERATIONS), output):
        return facts | {"end": "other bits", "said": output.read_text(errors="replace")[-3000:]}
    return facts | {"end": "right"}


@contextlib.contextmanager
def below(folder: Path) -> Iterator[Path]:
    """A folder of its own to work in, which is the home folder too."""
    folder.mkdir()
    before, home = os.getcwd(), os.environ.get("HOME", "")
    os.chdir(folder)
    os.environ["HOME"] = str(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        os.environ["HOME"] = home
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given, facts = parser.parse_args(), []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gspo_jax-folders-") as name:
        folder = Path(name)
        if not jax.config.jax_compilation_cache_dir:
            jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        plain = folder / "plain"
        words = field_run(plain, folder / "data", iterations=ITERATIONS, **{"eval.every": ITERATIONS})
        if code := run("gspo_jax.train", words, folder / "output"):
            print(f"the run in a plain folder ended with code {code}\n{(folder / 'output').read_text()}")
            return 1
        for number in range(given.count):
            with below(folder / f"work-{number}") as root:
                facts.append(attempt(number, given.seed, root, plain))
            print(ascii(facts[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(facts, indent=2) + "\n")
    ends = [fact["end"] for fact in facts]
    right, sentences = ends.count("right"), ends.count("refused")
    print(
        f"{given.count} folders (seed {given.seed}): {right} right, {sentences} refused by a sentence, "
        f"{given.count - right - sentences} wrong, in {time.monotonic() - begun:.0f} s"
    )
    return int(right + sentences < given.count)


if __name__ == "__main__":
    # Imported before the forks, which need not do it again.
    import gspo_jax.convert
    import gspo_jax.evaluate
    import gspo_jax.train  # noqa: F401

    sys.exit(main())
