"""Ahead-of-time compilation for absent hardware, with a cache of its results."""

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
class LiveBuffer:
    """Buffer live at peak memory."""

    name: str
    """Producing operation."""
    element: int | None
    """Index into its result tuple, if it has several results."""
    bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Compilation result, for one device."""

    text: str
    """Optimized HLO. If the program does not fit, the dump before buffer assignment."""
    peak_bytes: int
    """Peak memory. If the program does not fit, the memory it needs."""
    host_bytes: int
    fits: bool
    live: tuple[LiveBuffer, ...]
    """Live at the peak, largest first. Empty if the compiler reports none."""
    complaint: str
    """Out-of-memory message. Empty if the program fits."""
    seconds: float
    """Duration of the original compilation."""


def compile_ahead(lowered: jax.stages.Lowered, *, key: str, cache: Path) -> Compiled:
    """Compile a program, or return its cached result.

    `key` identifies target and compiler. A damaged cache entry is recompiled.
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
    """Return the cached result, or None if it is missing or damaged."""
    try:
        found = json.loads(gzip.decompress(file.read_bytes()))
        if found.pop("digest") != digest:
            return None
        live = tuple(LiveBuffer(**buffer) for buffer in found.pop("live"))
        return Compiled(live=live, **found)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError):
        return None


def _compile(lowered: jax.stages.Lowered) -> Compiled:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options: Mapping[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        complaint, compiled = "", None
        kept_from, never = jax.config.jax_persistent_cache_min_compile_time_secs, float(2**31)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", never)  # out of jax's cache comes no dump
        try:
            compiled = lowered.compile(compiler_options=dict(options))
        except jax.errors.JaxRuntimeError as error:
            complaint = str(error)
            if "RESOURCE_EXHAUSTED" not in complaint:
                raise
        finally:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", kept_from)
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
    """Return the largest matching file: the program's own, not a helper's."""
    files = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else ""


def _live_buffers(report: str) -> tuple[LiveBuffer, ...]:
    _, _, peak = report.partition("(peak):\n")
    found = []
    for line in peak.splitlines():
        match = re.match(r"\s+([\w.\-~]+)\{([\d,]*)\}: (\d+) bytes \(cumulative", line)
        if not match:
            break
        found.append(LiveBuffer(match[1], int(match[2].split(",")[0]) if match[2] else None, int(match[3])))
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes))


def _required_bytes(complaint: str, live: tuple[LiveBuffer, ...]) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"total memory required[^\d]*([\d.]+)\s*([KMGT])", complaint)
    return max(int(float(match[1]) * units[match[2]]) if match else 0, sum(buffer.bytes for buffer in live))
