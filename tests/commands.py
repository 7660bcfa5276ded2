"""Run many commands of the package in one process, which imports it once and forks for each.

    python -m tests.commands < commands.json > results.jsonl

Reads a JSON list of commands, each a module's name and its arguments, and writes a line for each: its exit code, stdout
and stderr.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
import warnings

from gspo_jax import bench, coldstart, convert, doctor, evaluate, plan, report, sample, score, sweep, train

MODULES = (bench, coldstart, convert, doctor, evaluate, plan, report, sample, score, sweep, train)


def run(module: str, arguments: list[str]) -> tuple[int, str, str]:
    """Run a command in a forked process; return its exit code, stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(_main(module, arguments))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return code, *texts


def _main(module: str, arguments: list[str]) -> int:
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", message=".* found in sys.modules")
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    # The processes fork before jax has started any thread.
    warnings.filterwarnings("ignore", message="os.fork")
    for name, *words in json.load(sys.stdin):
        print(json.dumps(run(name, words)), flush=True)
