"""Ahead-of-time compilation for hardware that is not attached, with a cache of HLO texts and memory use."""

import dataclasses
import gzip
import hashlib
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Buffer that is live at peak memory."""

    name: str
    """Name of the operation that produces it."""
    element: int | None
    """Index into the operation's tuple of results; None if it has a single result."""
    bytes: int
    """Size in bytes."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Result of compiling a program, for one device."""

    text: str
    """Optimized HLO; if the program does not fit, as dumped before buffer assignment."""
    peak_bytes: int
    """Peak memory in bytes; if the program does not fit, the bytes that it needs."""
    host_bytes: int
    """Host memory in bytes."""
    fits: bool
    """True if the program fits the device's memory."""
    live: tuple[Buffer, ...]
    """Buffers live at the peak, largest first; empty if the compiler does not report them."""
    complaint: str
    """Compiler's out-of-memory message; empty if the program fits."""
    seconds: float
    """Seconds that the original compilation took."""


def compile_ahead(lowered: jax.stages.Lowered, *, key: str, cache: Path) -> Compiled:
    """Compile a program, or return the cached result of compiling it before.

    Cache entries are named by a digest of the lowered text and of `key`, which identifies target and compiler; a
    damaged one is compiled again.
    """
    digest = hashlib.sha256(f"{key}\n{lowered.as_text()}".encode()).hexdigest()[:32]
    file = cache / f"{digest}.json.gz"
    known = _read(file, digest)
    if known is not None:
        return known
    compiled = _compile(lowered)
    cache.mkdir(parents=True, exist_ok=True)
    facts = dataclasses.asdict(compiled) | {"digest": digest}
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(gzip.compress(json.dumps(facts).encode()))
    part.rename(file)
    return compiled


def _read(file: Path, digest: str) -> Compiled | None:
    """The cached result of this digest; None if there is none, or if it is damaged, by gzip's checksum."""
    try:
        found = json.loads(gzip.decompress(file.read_bytes()))
        if found.pop("digest") != digest:
            return None
        live = tuple(Buffer(**buffer) for buffer in found.pop("live"))
        return Compiled(live=live, **found)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError):
        return None


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
    """Text of the largest matching file, which is the program's own and not a helper's; empty without a match."""
    files = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else ""


def _live_buffers(report: str) -> tuple[Buffer, ...]:
    """Parse the buffers at the peak from the compiler's live-range report, largest first."""
    _, _, peak = report.partition("(peak):\n")
    found = []
    for line in peak.splitlines():
        match = re.match(r"\s+([\w.\-~]+)\{([\d,]*)\}: (\d+) bytes \(cumulative", line)
        if not match:
            break
        found.append(Buffer(match[1], int(match[2].split(",")[0]) if match[2] else None, int(match[3])))
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes))


def _required_bytes(complaint: str, live: tuple[Buffer, ...]) -> int:
    """Bytes needed by a program that did not fit: the larger of the compiler's figure and the sum of live buffers."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"total memory required[^\d]*([\d.]+)\s*([KMGT])", complaint)
    return max(int(float(match[1]) * units[match[2]]) if match else 0, sum(buffer.bytes for buffer in live))
