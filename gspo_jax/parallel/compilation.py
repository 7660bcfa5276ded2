"""Disk cache of compiled programs, and counts of compilations."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax._src import compilation_cache, compiler, distributed, lru_cache  # no public API decides what is kept, and how

MAX_CACHE_BYTES = 2 * 2**30
"""Cache size above which the least recently used programs are removed."""

_COMPILED_ANEW = "jit_reshard-"
"""Keys of programs that simulated devices compile anew.

Read back by jaxlib 0.12.0.1 one hangs: devices wait at different collectives, in and beside its loop.
"""
_SEAL_BYTES = hashlib.sha256().digest_size
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"


def user_cache() -> Path:
    """Return this user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gspo_jax"


class SealedCache(lru_cache.LRUCache):
    """Disk or bucket cache that reads only programs with an intact seal.

    The seal, a SHA-256 of key and bytes, follows each program: jax's compression notices no damage, and XLA may then
    crash or compute something else. Programs without it are removed and compiled again, with one warning for all. Other
    jax processes can read sealed programs.
    """

    _warned = False

    def get(self, key: str) -> bytes | None:
        """Return a key's program, or None without its seal, or if it may not be read."""
        if _compiled_anew(key):
            return None
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
        """Store a key's program, unless there is one or it may not be read."""
        if not _compiled_anew(key):
            super().put(key, value + _seal(key, value))


_write_of_process_0 = compiler._cache_write


def _write(key: str, seconds: float, name: str, backend: Any, program: Any) -> None:
    """Store a compiled program from any process.

    jax's own function stores those of process 0 only, but hosts have their own disks, and keys of simulated devices
    differ by process. In a bucket, one writer is enough.
    """
    if distributed.global_state.process_id == 0:
        _write_of_process_0(key, seconds, name, backend, program)
    elif lru_cache._is_local_filesystem(str(jax.config.jax_compilation_cache_dir)) and (
        seconds >= jax.config.jax_persistent_cache_min_compile_time_secs
    ):
        try:
            compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
        except Exception as error:  # as jax: a full disk or a busy lock costs a compilation, not the run
            logging.warning("the compiled program %s is not kept: %s", name, error)


def _compiled_anew(key: str) -> bool:
    return key.startswith(_COMPILED_ANEW) and jax.default_backend() == "cpu" and jax.device_count() > 1


def _seal(key: str, program: bytes) -> bytes:
    found = hashlib.sha256(key.encode() + b"\n")
    found.update(program)  # may be a gigabyte
    return found.digest()


def use_cache() -> str | None:
    """Cache compiled programs for later processes of this user. Return the folder, or None.

    Call it before anything is compiled. `JAX_COMPILATION_CACHE_DIR` names another folder or bucket, configured by jax's
    own variables. `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off. Keys contain the CPU's instruction set, so
    machines with different CPUs may share a home.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    opened_with: Any = compilation_cache  # the module does not export the class
    if opened_with.LRUCache is not SealedCache:
        opened_with.LRUCache = SealedCache
        compiler._cache_write = _write
        compilation_cache.reset_cache()  # a cache that jax already opened has no seals
    if jax.config.jax_compilation_cache_dir:
        return jax.config.jax_compilation_cache_dir
    try:
        folder = user_cache() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home folder
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)  # under a lock shared by processes
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # XLA's own files have no seal or size limit
    return str(folder)


class CompileCounter:
    """Counter of compiled and cached programs, and their seconds."""

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
        if event == _COMPILED:  # includes cache reads
            self._finished += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: Any) -> None:
        self.cached += event == _READ


def watch_compilation(show: Callable[[bool], None]) -> Callable[[], None]:
    """Call `show(True)` when a compilation begins and `show(False)` at its end. Return the undo."""

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event in (_LOWERED, _COMPILED):
            show(event == _LOWERED)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: jax.monitoring.unregister_event_duration_listener(listen)
