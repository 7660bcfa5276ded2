"""Compiles a program for a machine that is not there, and keeps what came of it: its text, and the memory it takes."""

import dataclasses
import gzip
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that is in use when most of it is."""

    name: str
    """Of the operation that makes it."""
    element: int | None
    """Which of its results; None where there is one."""
    bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program on one device."""

    text: str
    """The optimized module; where it does not fit, as far as the compiler came with it."""
    peak_bytes: int
    """The most memory at any time, or, where that does not fit, all that is needed."""
    host_bytes: int
    """Of the host's memory."""
    fits: bool
    live: tuple[Buffer, ...]
    """What is in memory at the peak, the largest first; empty where the compiler does not tell."""
    complaint: str
    """Of a compiler that the program did not fit; else empty."""
    seconds: float
    """That compiling took, when it was done."""


def compile_ahead(lowered: jax.stages.Lowered, *, key: str, cache: Path) -> Compiled:
    """Compiles, or finds in the cache what was compiled before.

    Kept under a digest of the program's text and of `key`, which says for what and by whom it is compiled.
    """
    digest = hashlib.sha256(f"{key}\n{lowered.as_text()}".encode()).hexdigest()[:32]
    facts, text = cache / f"{digest}.json", cache / f"{digest}.hlo.gz"
    if facts.exists():
        found = json.loads(facts.read_text())
        live = tuple(Buffer(*buffer) for buffer in found.pop("live"))
        return Compiled(text=gzip.decompress(text.read_bytes()).decode(), live=live, **found)
    compiled = _compile(lowered)
    cache.mkdir(parents=True, exist_ok=True)
    text.write_bytes(gzip.compress(compiled.text.encode()))
    known = dataclasses.asdict(compiled) | {"live": [dataclasses.astuple(buffer) for buffer in compiled.live]}
    del known["text"]
    part = facts.with_suffix(".part")
    part.write_text(json.dumps(known))
    part.rename(facts)
    return compiled


def _compile(lowered: jax.stages.Lowered) -> Compiled:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options: Mapping[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        complaint, compiled = "", None
        try:
            compiled = lowered.compile(compiler_options=dict(options))
        except jax.errors.JaxRuntimeError as error:
            complaint = str(error)
            if "RESOURCE_EXHAUSTED" not in complaint:
                raise
        seconds = time.perf_counter() - started
        live = _live_buffers(_largest_dump(folder, "*live-range.txt"))
        left = _largest_dump(folder, "*after_optimizations_before_buffer_assignment.txt")
    if compiled is None:
        return Compiled(left, _required_bytes(complaint, live), 0, False, live, complaint, seconds)
    memory = compiled.memory_analysis()
    assert memory is not None
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    return Compiled(compiled.as_text() or "", memory.peak_memory_in_bytes, host, True, live, "", seconds)


def _largest_dump(folder: str, pattern: str) -> str:
    """The text of the largest such file: that of the program itself, and not of some small part; empty without any."""
    files = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else ""


def _live_buffers(report: str) -> tuple[Buffer, ...]:
    """The buffers of a report's peak."""
    _, _, peak = report.partition("(peak):\n")
    found = []
    for line in peak.splitlines():
        match = re.match(r"\s+([\w.\-~]+)\{([\d,]*)\}: (\d+) bytes \(cumulative", line)
        if not match:
            break
        found.append(Buffer(match[1], int(match[2].split(",")[0]) if match[2] else None, int(match[3])))
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes))


def _required_bytes(complaint: str, live: tuple[Buffer, ...]) -> int:
    """Bytes that a program asked for which did not fit, by the compiler's message or the buffers it tells of."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"total memory required[^\d]*([\d.]+)\s*([KMGT])", complaint)
    return max(int(float(match[1]) * units[match[2]]) if match else 0, sum(buffer.bytes for buffer in live))
