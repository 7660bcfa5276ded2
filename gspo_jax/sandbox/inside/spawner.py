"""Process that forks the processes for untrusted code, and holds nothing that they could read.

A process gets its code through descriptors after the fork: the spawner has never seen a test, an expected output or
another program.
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


class SpawnError(RuntimeError):
    """A process could not be started."""


class Spawner:
    """The judge's end."""

    def __init__(self, roles: Mapping[str, Callable[[], None]], *, isolated: bool) -> None:
        """Fork the spawner. `roles` maps names to functions."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._socket.close()
                _serve(theirs, roles, isolated=isolated)
            finally:
                os._exit(1)
        theirs.close()

    def spawn(self, role: str, limits: Limits, descriptors: Sequence[int]) -> int:
        """Start a process in a role with these descriptors as 0, 1, 2, 3 … and return its pid.

        The caller must be a subreaper, and becomes its parent.

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
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 8)
        if not message:
            return
        request = json.loads(message)
        play, limits = roles[request["role"]], Limits(**request["limits"])
        # An intermediate process enters the namespaces, forks the final process there, and ends.
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
        os.waitpid(between, 0)  # makes the final process the judge's child
        requests.send(os.read(told, _MOST_BYTES))
        os.close(told)


def _start(play: Callable[[], None], limits: Limits, descriptors: Sequence[int], *, isolated: bool) -> bytes:
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
    """Confine this process and play the role. Report failures through `ready`."""
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
    """Make the descriptors 0, 1, 2 …, close all others, and return the last."""
    above = 100
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + number)
    for number in range(len(descriptors)):
        os.dup2(above + number, number)
    os.closerange(len(descriptors), 1 << 16)
    return len(descriptors) - 1
