"""One training run of two processes under random faults, compared bit by bit with an undisturbed one.

    python -m tests.tools.soak --minutes=30 --seed=0 --json=soak.json

The launcher starts the run again after every fault. Faults are drawn without replacement from a shuffled list of all
kinds, so that each comes as often as the others. Takes twice the minutes: the undisturbed run, and the end of the
other. Exits with code 1 if the run did not survive, its bits differ, or something is left behind. Needs Linux; a disk
is filled only where an unprivileged user may mount one (`unshare -rm`).
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PER_MINUTE = 8
"""Iterations per minute of faults: more than a disturbed run makes."""
PATIENCE_S = 300.0
"""Seconds after which a run that makes no progress has not survived."""
SLOWEST_S = 20.0
"""Seconds that an iteration may take on a slow machine."""
DISK = "192m"


class Soak:
    """A run under faults, in a folder of its own."""

    def __init__(self, folder: Path, iterations: int, rng: random.Random):
        """Start the launcher."""
        self.workdir, self.iterations, self._rng = folder / "run", iterations, rng
        self._hang = folder / "hang"
        self.damaged: set[int] = set()
        """Steps with a flipped byte."""
        self._log = open(folder / "launcher.log", "wb")  # noqa: SIM115  open until exit
        self.launcher = subprocess.Popen(
            ["bash", "launch/cpu_pod.sh", "2", *words(self.workdir, folder, iterations)],
            cwd=ROOT,
            env=os.environ | {"RESTARTS": "100000", "SOAK_HANG": str(self._hang)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def done(self) -> int:
        """Iterations done so far."""
        try:
            rows = (self.workdir / "metrics.jsonl").read_bytes().splitlines()
            return max((json.loads(row).get("iteration", 0) for row in rows[-3:]), default=0)
        except (FileNotFoundError, ValueError):  # not there yet, or just being written
            return 0

    def trainers(self) -> list[psutil.Process]:
        """Return the processes that train, whoever started them."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "gspo_jax.train" in line and any(str(self.workdir) in word for word in line):
                found.append(process)
        return found

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, newest first."""
        names = [path.name for path in (self.workdir / "checkpoints").glob("*")]
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def wait_for_progress(self, beyond: int) -> None:
        """Wait until an iteration after `beyond` is done."""
        begun = time.monotonic()
        while self.done <= beyond:
            assert self.launcher.poll() is None, f"the launcher ended with code {self.launcher.returncode}"
            assert time.monotonic() - begun < PATIENCE_S, f"no progress beyond iteration {beyond}"
            time.sleep(0.2)

    def signal_some(self, number: int, *, every: bool = False) -> bool:
        """Send a signal to one trainer, or to all."""
        found = self.trainers()
        for process in found if every else self._rng.sample(found, min(1, len(found))):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return bool(found)

    def suspend(self) -> bool:
        """Suspend one trainer for longer than its heartbeat may be missing."""
        found = self.trainers()
        if not found:
            return False
        victim = self._rng.choice(found)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
            time.sleep(12)
            victim.resume()
        return True

    def flip(self, *, newest: bool) -> bool:
        """Flip a bit in a checkpoint; a whole one is always left. In the newest, end the run, so that it is read."""
        steps = self.steps()
        whole = [step for step in steps if step not in self.damaged]
        if len(whole) < 3:
            return False
        step = whole[0] if newest else self._rng.choice(whole[1:])
        files = [path for path in (self.workdir / "checkpoints" / str(step)).rglob("*") if path.is_file()]
        files = [path for path in files if path.stat().st_size]
        path = self._rng.choice(files)
        content = bytearray(path.read_bytes())
        content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
        if newest:
            self.signal_some(signal.SIGKILL, every=True)
        with contextlib.suppress(FileNotFoundError):  # a newer checkpoint may just have replaced it
            path.write_bytes(content)
            self.damaged.add(step)
        return True

    def fill_disk(self) -> bool:
        """Leave no room on the run's disk for a while."""
        if not os.path.ismount(self.workdir):
            return False
        ballast = self.workdir / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb") as file:
            while True:
                file.write(bytes(2**16))
                file.flush()
        time.sleep(self._rng.uniform(5, 15))
        ballast.unlink(missing_ok=True)
        return True

    def hang(self) -> bool:
        """Let the next reward never return."""
        self._hang.touch()
        return True

    def kinds(self) -> dict[str, Callable[[], bool]]:
        """Return the faults by name; each returns whether it could be done."""
        return {
            "SIGKILL to one": lambda: self.signal_some(signal.SIGKILL),
            "SIGKILL to all": lambda: self.signal_some(signal.SIGKILL, every=True),
            "SIGTERM to one": lambda: self.signal_some(signal.SIGTERM),
            "SIGTERM to all": lambda: self.signal_some(signal.SIGTERM, every=True),
            "SIGSTOP": self.suspend,
            "byte flipped in the newest checkpoint": lambda: self.flip(newest=True),
            "byte flipped in an older checkpoint": lambda: self.flip(newest=False),
            "disk full": self.fill_disk,
            "reward hangs": self.hang,
        }

    def torment(self, seconds: float) -> Counter[str]:
        """Do one fault after the other, each once the run has recovered from the one before; return their counts."""
        counts, kinds, queue = Counter[str](), self.kinds(), []
        end, seen = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            self.wait_for_progress(seen)
            if self.done > self.iterations - 3:
                break
            time.sleep(self._rng.uniform(0, 3))
            queue = queue or self._rng.sample(list(kinds), len(kinds))
            kind, before = queue.pop(), self.done
            if kinds[kind]():
                counts[kind] += 1
                print(f"fault {counts.total()}: {kind}, after iteration {before}", flush=True)
            seen = self.done
        return counts

    def left_behind(self) -> list[str]:
        """Return what should not be there after the run: processes, temporary files, marks."""
        found = [f"process {process.pid}" for process in self.trainers()]
        for path in self.workdir.rglob("*"):
            if "tmp" in path.name or path.name in ("lease.json", "stopped.json"):
                found.append(str(path))
        return found


def words(workdir: Path, folder: Path, iterations: int) -> list[str]:
    """Return the flags of a run."""
    from tests.pods import train_flags  # imports jax, which reads the environment that `main` sets

    settings = {"data.data_dir": folder / "data", "iterations": iterations}
    return train_flags("tests/tools/soak_config.py", workdir, settings)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Mount a small disk at `place` inside the block, if this process may."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(place)], check=False)
    try:
        yield
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(place)], check=False)


def soak(minutes: float, seed: int, folder: Path) -> dict:
    """Run both runs in `folder`; return the facts."""
    from tests.pods import assert_same_bits, run_processes

    iterations = max(20, round(PER_MINUTE * minutes))
    begun = time.monotonic()
    whole = words(folder / "whole", folder, iterations)
    run_processes(2, "-m", "gspo_jax.train", *whole, seconds=PATIENCE_S + SLOWEST_S * iterations)
    whole_s = time.monotonic() - begun
    print(f"the undisturbed run of {iterations} iterations took {whole_s:.0f} s", flush=True)
    with small_disk(folder / "run"):
        run = Soak(folder, iterations, random.Random(seed))
        try:
            counts = run.torment(60 * minutes)
            code = run.launcher.wait(timeout=PATIENCE_S + 4 * whole_s)
            assert code == 0, f"the launcher ended with code {code}"
            left = run.left_behind()
            assert_same_bits(folder / "whole", run.workdir, step=iterations)
        except BaseException:
            print((folder / "launcher.log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.launcher.pid, signal.SIGKILL)
    return {
        "seed": seed,
        "iterations": iterations,
        "faults": counts.total(),
        "by_kind": dict(counts),
        "same_bits": True,
        "left_behind": left,
        "seconds": round(time.monotonic() - begun),
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    unshare = shutil.which("unshare")
    if "SOAK_DISK" not in os.environ and unshare is not None:
        os.environ["SOAK_DISK"] = "tried"
        if subprocess.run([unshare, "-rm", "true"], check=False).returncode == 0:
            os.execv(unshare, [unshare, "-rm", sys.executable, "-m", "tests.tools.soak", *sys.argv[1:]])
    folder = Path(tempfile.mkdtemp(prefix="gspo_jax-soak-"))
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    try:
        facts = soak(given.minutes, given.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.json is not None:
        given.json.write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))
    return 1 if facts["left_behind"] else 0


if __name__ == "__main__":
    sys.exit(main())
