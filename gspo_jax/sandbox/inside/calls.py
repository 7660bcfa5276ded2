"""System call filter for programs under test. Linux on x86_64 and aarch64.

It refuses (ENOSYS) calls that only widen the attack surface, or hide memory or processor time from the limits.
"""

import errno
import platform
import struct

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> audit id, column below."""
_LATER = 457
"""First call number equal on all machines. No program needs later calls."""
_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone3": (435, 435),  # a filter can't see its flags, and glibc falls back
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),  # its queue is counted nowhere
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_create_ruleset": (444, 444),
    "memfd_create": (319, 279),  # its memory is no process's, like the next few
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
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
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
"""Calls that no program needs, with their numbers by machine."""
_LOOKED_AT = {
    "clone": (56, 220),
    "fcntl": (72, 25),
    "flock": (73, 32),
    "mmap": (9, 222),
    "rt_sigaction": (13, 134),
    "setsid": (112, 157),
    "setsockopt": (54, 208),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
"""Calls filtered by argument, with their numbers by machine."""

_ANSWERS = {"allow": 0x7FFF0000, "refuse": 0x00050000 | errno.ENOSYS, "pretend": 0x00050000}
"""Make the call, answer "not implemented", or pretend success."""
_INSTRUCTION = struct.Struct("<HBBI")
"""Kernel layout: code, jump if true, jump if false, value."""
_Instruction = tuple[int, int, str | None, str | None]
"""Code, value, label if true, label if false (None: next instruction)."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _MASK, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06


def _argument(number: int) -> _Instruction:
    """Load the lower half of an argument (little-endian)."""
    return (_LOAD, 16 + 8 * number, None, None)


def _of_arguments() -> dict[str, list[_Instruction]]:
    """Return the decision for each call of `_LOOKED_AT`.

    Some calls only pretend to succeed, which harmless programs don't notice:

    - locks: one on a system file could block programs outside.
    - sessions: a scheduler may give each as much time as another program.
    - larger buffers of sockets and pipes.
    - SIGCHLD handlers: children that end while it is ignored hide their processor time.
    """
    family: list[_Instruction] = [_argument(0), (_EQUAL, 1, "allow", "refuse")]  # AF_UNIX
    pretend: _Instruction = (_ANSWER, _ANSWERS["pretend"], None, None)
    return {
        "clone": [_argument(0), (_ANY_BIT, 0x7E020000, "refuse", "allow")],  # new namespaces
        "fcntl": [
            _argument(1),
            *((_EQUAL, command, "pretend", None) for command in (6, 7, 37, 38)),  # F_SETLK to F_OFD_SETLKW
            (_EQUAL, 1031, "pretend", None),  # F_SETPIPE_SZ
            (_EQUAL, 1024, "refuse", None),  # F_SETLEASE
            (_EQUAL, 1026, "refuse", "allow"),  # F_NOTIFY
        ],
        "flock": [pretend],
        "mmap": [
            _argument(3),
            (_ANY_BIT, 0x40000, "refuse", None),  # MAP_HUGETLB
            (_MASK, 0x21, None, None),
            (_EQUAL, 0x21, "refuse", "allow"),  # MAP_SHARED with MAP_ANONYMOUS
        ],
        "rt_sigaction": [
            _argument(0),
            (_EQUAL, 17, None, "allow"),  # SIGCHLD
            _argument(1),
            (_EQUAL, 0, None, "pretend"),
            (_LOAD, 16 + 8 + 4, None, None),  # upper half; without a new handler the call only queries
            (_EQUAL, 0, "allow", "pretend"),
        ],
        "setsid": [pretend],
        "setsockopt": [
            _argument(1),
            (_EQUAL, 1, None, "allow"),  # SOL_SOCKET
            _argument(2),
            *((_EQUAL, option, "pretend", None) for option in (7, 8, 32)),  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE
            (_EQUAL, 33, "pretend", "allow"),  # SO_RCVBUFFORCE
        ],
        "socket": family,
        "socketpair": family,
    }


def _search(starts: list[tuple[int, str]], program: list[_Instruction], places: dict[str, int]) -> str:
    if len(starts) == 1:
        return starts[0][1]
    half, place = len(starts) // 2, len(program)
    label = f"search {place}"
    places[label] = place
    program.append((_AT_LEAST, starts[half][0], None, None))
    below, above = _search(starts[:half], program, places), _search(starts[half:], program, places)
    program[place] = (_AT_LEAST, starts[half][0], above, below)
    return label


def call_filter() -> bytes:
    """Return the filter in the kernel's format, b"" on unknown machines."""
    if platform.machine() not in _MACHINES:
        return b""
    machine, column = _MACHINES[platform.machine()]
    known = dict.fromkeys(_REFUSED, "refuse") | {name: name for name in _LOOKED_AT}
    numbers = {(_REFUSED | _LOOKED_AT)[name][column]: label for name, label in known.items()}
    # The kernel runs the filter for every number when set, and a list would take ten times as long.
    labels = [numbers.get(number, "allow") for number in range(_LATER)] + ["refuse"]  # also other call tables
    starts = [(number, label) for number, label in enumerate(labels) if number == 0 or labels[number - 1] != label]
    program: list[_Instruction] = [(_LOAD, 4, None, None), (_EQUAL, machine, None, "refuse"), (_LOAD, 0, None, None)]
    places: dict[str, int] = {}
    _search(starts, program, places)
    for label, instructions in _of_arguments().items():
        places[label] = len(program)
        program += instructions
    for label, answer in _ANSWERS.items():
        places[label] = len(program)
        program.append((_ANSWER, answer, None, None))
    return b"".join(
        _INSTRUCTION.pack(code, *(0 if to is None else places[to] - place - 1 for to in (yes, no)), value)
        for place, (code, value, yes, no) in enumerate(program)
    )
