"""Confinement of a process for untrusted code. Linux only.

The parent calls `enter`, the process itself `confine`. The namespaces are nested in the judge's, which have no network
and no writable file.
"""

import ctypes
import math
import os
import resource
import stat
import struct
from dataclasses import dataclass

from .calls import call_filter

_NOBODY = 65534
_INSIDE = 1000
"""User and group that the program sees."""

# From linux/sched.h, linux/mount.h, linux/prctl.h and linux/capability.h.
_NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS."""
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _REMOUNT = 1, 2, 4, 32
_GET_DUMPABLE, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 3, 4, 38, 22, 2
_CAPABILITIES_VERSION = 0x20080522


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    wall_s: float
    """Seconds until the program is killed with everything it started."""
    patience_s: float = 0.0
    """Extra seconds for waiting for a processor."""
    final: bool = True
    """True if exceeding these is a failure. Otherwise there is no verdict."""
    memory_bytes: int = 1 << 30
    """Address space per process, and memory of all processes together."""
    processes: int = 64
    files: int = 64
    """Open files per process."""
    disk_bytes: int = 32 << 20
    """Bytes in its temporary folder, and per file."""
    output_bytes: int = 8 << 20

    @property
    def processor_s(self) -> float:
        """Processor seconds of all processes together."""
        return self.wall_s + 1


def enter(limits: Limits, stdin: int) -> None:
    """Move the future children of this process into new namespaces, where they see only themselves.

    Their temporary folders are empty, and their /proc holds at most standard input's file (for /dev/stdin). A root
    process first becomes nobody: programs must never be root outside, and process limits do not bind root.

    Raises:
      OSError: the kernel refuses.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NAMESPACES)
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # else root owns the files below
    for name, content in (
        ("setgroups", b"deny"),
        ("uid_map", b"%d %d 1" % (_INSIDE, user)),
        ("gid_map", b"%d %d 1" % (_INSIDE, group)),
    ):
        with open(f"/proc/self/{name}", "wb", buffering=0) as file:
            file.write(content)
    options = f"size={limits.disk_bytes},nr_inodes=4096,mode=1777".encode()
    for folder in (b"/tmp", b"/dev/shm"):
        _call("mount", b"tmpfs", folder, b"tmpfs", _NO_SETUID | _NO_DEVICES, options)
    settings = _NO_SETUID | _NO_DEVICES
    if stat.S_ISREG(os.fstat(stdin).st_mode):
        _call("mount", b"tmpfs", b"/proc", b"tmpfs", settings, b"mode=755")
        _copy(stdin, "/proc/self/fd/0")
        _call("mount", None, b"/proc", None, settings | _READ_ONLY | _REMOUNT, None)
    else:
        _call("mount", b"tmpfs", b"/proc", b"tmpfs", settings | _READ_ONLY, b"size=0,mode=555")


def _copy(descriptor: int, place: str) -> None:
    os.makedirs(os.path.dirname(place))
    with open(place, "wb") as file:
        copied = 0
        while part := os.sendfile(file.fileno(), descriptor, copied, 1 << 24):
            copied += part


def confine(limits: Limits, *, isolated: bool) -> None:
    """Set this process's limits. If `isolated`, also drop its capabilities and filter its calls.

    Raises:
      OSError: the kernel refuses.
    """
    for kind, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(limits.processor_s)),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, limits.processes)] if isolated else []),  # else it counts all the user's
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if not isolated:
        return
    header = struct.pack("<II", _CAPABILITIES_VERSION, 0)
    _call("capset", header, bytes(24))
    instructions = len(_CALL_FILTER) // 8
    if instructions:
        program = struct.pack("@HP", instructions, ctypes.addressof(_CALL_FILTER))
        _call("prctl", _SET_SECCOMP, _FILTER, program, 0, 0)


_CALL_FILTER = ctypes.create_string_buffer(call_filter())
"""Built before forking."""


_LIBC = ctypes.CDLL(None, use_errno=True)
_CALLS = {name: getattr(_LIBC, name) for name in ("capset", "mount", "prctl", "unshare")}
"""Looked up before forking."""
_CALLS["prctl"](_GET_DUMPABLE, 0, 0, 0, 0)  # the first call sets up what later ones use


def _call(name: str, *arguments: int | bytes | None) -> None:
    if _CALLS[name](*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
