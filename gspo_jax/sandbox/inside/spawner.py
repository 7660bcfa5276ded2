"""Forks the processes that run code nobody trusts, and holds nothing that they could read.

The judge asks it for one process at a time and hands over its descriptors. A process gets its code through them, after
it was forked: this process, of which it is a copy, has never seen a test, an expected output or another program.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from .jail import Limits, confine, enter

_PID = struct.Struct("<i")
_MOST_BYTES = 1 << 16
"""Bytes of a request."""


class SpawnError(RuntimeError):
    """A process could not be started; the message says why."""


class Spawner:
    """The judge's end."""

    def __init__(self, roles: Mapping[str, Callable[[], None]], *, isolated: bool) -> None:
        """Fork the spawner. `roles` are what its processes can be told to do, by name."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        """Of the process that starts the others."""
        if self.pid == 0:
            try:
                self._socket.close()
                _serve(theirs, roles, isolated=isolated)
            finally:
                os._exit(1)
        theirs.close()

    def spawn(self, role: str, limits: Limits, descriptors: Sequence[int]) -> int:
        """Start a process that plays a role with these descriptors as 0, 1, 2, 3 …; return its pid.

        It becomes a child of the caller, who must be a subreaper.

        Raises:
          SpawnError: it could not be started.
        """
        message = json.dumps({"role": role, "limits": limits.__dict__}).encode()
        socket.send_fds(self._socket, [message], list(descriptors))
        answer = self._socket.recv(_MOST_BYTES)
        if len(answer) != _PID.size:
            raise SpawnError(answer.decode() or "the process that starts others has ended")
        return int(_PID.unpack(answer)[0])


def _serve(requests: socket.socket, roles: Mapping[str, Callable[[], None]], *, isolated: bool) -> None:
    """Start a process for each request, until the judge ends."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 8)
        if not message:
            return
        request = json.loads(message)
        play, limits = roles[request["role"]], Limits(**request["limits"])
        # A process in between enters the namespaces, and ends when the one that is to stay has been forked in them.
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            try:
                requests.close()
                os.write(tell, _start(play, limits, descriptors, isolated=isolated))
            finally:
                os._exit(1)
        for descriptor in (tell, *descriptors):
            os.close(descriptor)
        os.waitpid(between, 0)  # only then is the other process the judge's child
        requests.send(os.read(told, _MOST_BYTES))
        os.close(told)


def _start(play: Callable[[], None], limits: Limits, descriptors: Sequence[int], *, isolated: bool) -> bytes:
    """Fork the process that plays the role; return its pid, or the reason why there is none."""
    why, ready = os.pipe()
    try:
        if isolated:
            enter(limits, descriptors[0])
        pid = os.fork()
        if pid == 0:
            _play(play, limits, descriptors, ready, isolated=isolated)
        os.close(ready)
        return os.read(why, _MOST_BYTES) or _PID.pack(pid)
    except Exception as error:
        return f"no process for a program could be started: {error}".encode()


def _play(
    play: Callable[[], None], limits: Limits, descriptors: Sequence[int], ready: int, *, isolated: bool
) -> NoReturn:
    """Confine this process and play; say through `ready`, before closing it, why that is not possible."""
    try:
        try:
            os.setsid()
            os.umask(0o077)
            os.chdir("/tmp")
            ready = _place([*descriptors, ready])
            confine(limits, isolated=isolated)
        except Exception as error:
            os.write(ready, f"a process for a program could not be confined: {error}".encode())
            os._exit(1)
        os.close(ready)
        play()
    finally:
        os._exit(1)


def _place(descriptors: Sequence[int]) -> int:
    """Make the descriptors 0, 1, 2 …, close all others, and return the last one."""
    above = 100
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + number)
    for number in range(len(descriptors)):
        os.dup2(above + number, number)
    os.closerange(len(descriptors), 1 << 16)
    return len(descriptors) - 1
