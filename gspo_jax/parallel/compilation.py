"""The cache of compiled programs on the disk, and counts of what was compiled or read from it."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax._src import compilation_cache, lru_cache  # what is kept, and how, is set by no public function

MAX_CACHE_BYTES = 2 * 2**30
"""Size of the cache above which the programs that were used longest ago are removed."""

_SEAL_BYTES = hashlib.sha256().digest_size
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"


def user_cache() -> Path:
    """Return the folder for gspo_jax in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gspo_jax"


class SealedCache(lru_cache.LRUCache):
    """Compiled programs on the disk or in a bucket, of which only those are read that are as they were written.

    Behind each stands a seal, the SHA-256 of its key and its bytes. jax compresses programs, with zstandard where that
    is installed, which notices no damage; XLA may then crash or compute something else. A program without its seal is
    removed, with one warning for all, and so compiled again. Other processes of jax can read the sealed ones: they take
    no notice of what stands behind compressed data.
    """

    _warned = False

    def get(self, key: str) -> bytes | None:
        """The program of a key; None if there is none that has its seal."""
        found = super().get(key)
        if found is None or found[-_SEAL_BYTES:] == _seal(key, found[:-_SEAL_BYTES]):
            return None if found is None else found[:-_SEAL_BYTES]
        if not self._warned:
            self._warned = True
            logging.warning(
                "%s: programs that are damaged, or that gspo_jax did not keep there, are compiled again", self.path
            )
        (self.path / f"{key}{lru_cache._CACHE_SUFFIX}").unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep the program of a key, unless there is one."""
        super().put(key, value + _seal(key, value))


def _seal(key: str, program: bytes) -> bytes:
    found = hashlib.sha256(key.encode() + b"\n")
    found.update(program)  # of which some have a gigabyte
    return found.digest()


def use_cache() -> str | None:
    """Keep compiled programs for later processes of this user; return the folder, None if there is none.

    Call it before anything is compiled. `JAX_COMPILATION_CACHE_DIR` names another folder, or one in a bucket, which
    jax's own variables then describe; `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off. A program's key
    contains the CPU's instruction set, so that machines with different CPUs may share a home.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    opened_with: Any = compilation_cache  # which does not declare the class as its own
    if opened_with.LRUCache is not SealedCache:
        opened_with.LRUCache = SealedCache
        compilation_cache.reset_cache()  # one that jax has opened already has no seals
    if jax.config.jax_compilation_cache_dir:
        return jax.config.jax_compilation_cache_dir
    try:
        folder = user_cache() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # an account without a home folder has no cache
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)  # under a lock that processes share
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # XLA's own files have no seals, and no bound
    return str(folder)


class CompileCounter:
    """Counts programs that were compiled, and those read from the cache instead, and the seconds of both."""

    def __init__(self):
        self._finished = self.cached = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def programs(self) -> int:
        """Programs compiled since construction."""
        return self._finished - self.cached

    def stop(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:  # which counts reading, too
            self._finished += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: Any) -> None:
        self.cached += event == _READ


def watch_compilation(show: Callable[[bool], None]) -> Callable[[], None]:
    """Call `show(True)` when a program begins to be compiled, `show(False)` when it is; return what ends the watch."""

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event in (_LOWERED, _COMPILED):
            show(event == _LOWERED)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: jax.monitoring.unregister_event_duration_listener(listen)
