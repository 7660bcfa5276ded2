"""The process that runs the stages of `first` and holds the devices. `first` starts it, watches it and starts it again.

    python -m gspo_jax.bringup.worker GIVEN STATUS [again]

GIVEN is a `stages.Given`, STATUS a local file that says which stage runs. With `again`, stages that failed before are
tried again.
"""

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax

from gspo_jax import cli, shell
from gspo_jax.bringup import catalogue, stages
from gspo_jax.bringup.stages import FAILED, OK, Given, Record, Stage
from gspo_jax.bringup.watch import DONE
from gspo_jax.config import base
from gspo_jax.doctor import Finding
from gspo_jax.limited import quoted
from gspo_jax.parallel import processes
from gspo_jax.versions import versions


def machine(given: Given) -> dict[str, Any]:
    """Return what the figures of all stages depend on."""
    kinds = sorted({device.device_kind for device in jax.devices()})
    return {
        "devices": f"{jax.device_count()} x {', '.join(kinds)}",
        "processes": jax.process_count(),
        "versions": versions(),
        "asked": {"minutes": given.minutes, "model": given.model},
    }


def tell(status: Path, **facts: Any) -> None:
    """Tell the watching process what this one does."""
    partial = status.with_suffix(".tmp")
    partial.write_text(json.dumps(facts | {"number": processes.number(), "begun": time.time()}))
    os.replace(partial, status)


def run(stage: Stage, given: Given, here: dict[str, Any]) -> Record:
    """Run a stage. An error of it is a finding."""
    begun = time.monotonic()
    try:
        findings, figures = stage.run(given)
    except Exception as error:
        traceback.print_exc()
        text = f"the stage failed: {type(error).__name__}: {quoted(error)}"
        findings, figures = [Finding(stage.name, FAILED, text, "See log.txt beside this page.")], {}
    return Record(stage.name, time.monotonic() - begun, gathered(findings), figures, here)


def gathered(findings: list[Finding]) -> list[Finding]:
    """Return in the first process its own findings, and what others found that is not ok and that it has not."""
    others = processes.tell_first([dataclasses.asdict(one) for one in findings if one.state != OK])[1:]
    found = {(one.check, one.found) for one in findings}
    return findings + [
        dataclasses.replace(one, found=f"process {number}: {one.found}")
        for number, told in enumerate(others, start=1)
        for one in (Finding(**fields) for fields in told)
        if (one.check, one.found) not in found
    ]


def main(given: Given, status: Path, *, again: bool) -> int:
    """Run all stages that have no record of this machine; with `again`, also those that failed."""
    here = machine(given)

    def left() -> list[str]:
        found = {stage.name: stages.read(given.out, stage.name) for stage in catalogue.STAGES}
        kept = {
            name
            for name, record in found.items()
            if record is not None and dict(record.machine) in (here, {}) and not (again and record.state == FAILED)
        }
        for name in found.keys() - kept:
            stages.forget(given.out, name)
        return [name for name in found if name not in kept]

    names, spare = processes.ask_first(left), 0.0
    for stage in catalogue.STAGES:
        if stage.name not in names:
            continue
        limit = stage.limit_s(given) + spare
        tell(status, stage=stage.name, limit=limit)
        record = run(stage, given, here)
        gc.collect()  # what an error has left on the devices
        spare = max(0.0, limit - record.seconds)
        if processes.is_first():
            record.write(given.out)
            print(f"{stage.title}: {record.state}, {record.seconds:.0f} s", flush=True)
    failed = processes.ask_first(lambda: stages.failed(given.out, catalogue.STAGES))
    tell(status, stage=DONE, limit=0.0, failed=failed)
    return 0


def start(words: list[str]) -> int:
    """Prepare this process as a run's, and run the stages."""
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    shell.raise_limits()
    cli.reuse_memory()
    given, config = Given.read(words[0]), base()
    config.cpu_devices = given.devices
    count = processes.start(heartbeat_s=10)
    tell(Path(words[1]))  # before the devices start, which another process may hold: who this is
    cli.prepare(config)
    with processes.guarded(count):
        return main(given, Path(words[1]), again="again" in words)


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
