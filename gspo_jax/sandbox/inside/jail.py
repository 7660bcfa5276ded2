"""Confines a process that will run code nobody trusts: namespaces, limits, no capabilities, a system call filter.

Linux only. `enter` is called by the parent of that process, `confine` by the process itself. The namespaces are nested
in those that bubblewrap made for the judge, which have no network and no file that could be written.
"""

import ctypes
import errno
import os
import platform
import resource
import stat
import struct
from dataclasses import dataclass

_NOBODY = 65534
_INSIDE = 1000
"""User and group of the program, as it sees them."""

# From linux/sched.h, linux/mount.h, linux/prctl.h and linux/capability.h.
_NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS."""
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _REMOUNT = 1, 2, 4, 32
_SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 4, 38, 22, 2
_CAPABILITIES_VERSION = 0x20080522
_INSTRUCTION = struct.Struct("<HBBI")
"""Of a filter of system calls: code, where to go if true, if false, value."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    wall_s: float
    """Seconds until it is killed, with all that it started."""
    memory_bytes: int = 1 << 30
    """Address space of a process, and resident memory of all processes of a program together."""
    processes: int = 64
    """Processes and threads."""
    files: int = 64
    """Open files of a process."""
    disk_bytes: int = 32 << 20
    """Bytes in its temporary folder, and in a file."""
    output_bytes: int = 8 << 20
    """Bytes that it may print."""


def enter(limits: Limits, stdin: int) -> None:
    """Move the children that this process will fork into new namespaces, where they see only themselves.

    They have an empty temporary folder and shared memory folder of their own, and a /proc with nothing but the content
    of the file that will be their standard input, if it is one: what /dev/stdin and /dev/fd/0 lead to. If this process
    is root's, it first becomes nobody's: what runs in it must never be root outside, and limits of processes do not
    hold for root.

    Raises:
      OSError: the kernel refuses.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NAMESPACES)
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # or the files below belong to root
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
    """Copy a file from its beginning, without moving its position."""
    os.makedirs(os.path.dirname(place))
    with open(place, "wb") as file:
        copied = 0
        while part := os.sendfile(file.fileno(), descriptor, copied, 1 << 24):
            copied += part


def confine(limits: Limits, *, isolated: bool) -> None:
    """Set this process's limits; if it is `isolated` in namespaces, also drop its capabilities and filter its calls.

    Raises:
      OSError: the kernel refuses.
    """
    seconds = int(limits.wall_s) + 1
    for kind, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, limits.processes)] if isolated else []),  # else it counts all of the user's
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if not isolated:
        return
    header = struct.pack("<II", _CAPABILITIES_VERSION, 0)
    _call("capset", header, bytes(24))
    instructions = len(_CALL_FILTER) // _INSTRUCTION.size
    if instructions:
        program = struct.pack("@HP", instructions, ctypes.addressof(_CALL_FILTER))
        _call("prctl", _SET_SECCOMP, _FILTER, program, 0, 0)


_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> its name for the kernel, and the column of `_REFUSED` with its numbers of calls."""
_CLONE = (56, 220)
_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone3": (435, 435),  # a filter cannot see its flags; glibc does without it
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
"""System calls that a program under test has no use for, with their numbers by machine."""


def _call_filter() -> bytes:
    """Return a filter that refuses, as not implemented, calls that only widen what can be attacked; b"" if unknown."""
    if platform.machine() not in _MACHINES:
        return b""
    machine, column = _MACHINES[platform.machine()]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, allow = "refuse", "allow"
    # (code, value, where to go if true, if false); None is the next instruction.
    program = [
        (load, 4, None, None),  # the machine
        (equal, machine, None, refuse),
        (load, 0, None, None),  # the number of the call
        (at_least, 0x40000000, refuse, None),  # x32, another table of calls
        *((equal, numbers[column], refuse, None) for numbers in _REFUSED.values() if numbers[column] is not None),
        (equal, _CLONE[column], None, allow),
        (load, 16, None, None),  # its flags
        (any_bit, 0x7E020000, refuse, allow),  # new namespaces
    ]
    places = {allow: len(program), refuse: len(program) + 1}
    program += [(answer, 0x7FFF0000, None, None), (answer, 0x00050000 | errno.ENOSYS, None, None)]
    return b"".join(
        _INSTRUCTION.pack(code, *(0 if to is None else places[to] - place - 1 for to in (yes, no)), value)
        for place, (code, value, yes, no) in enumerate(program)
    )


_CALL_FILTER = ctypes.create_string_buffer(_call_filter())
"""The filter, made before any process is forked."""


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(_LIBC, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
