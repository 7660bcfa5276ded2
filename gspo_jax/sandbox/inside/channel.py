"""Messages over a stream socket: four bytes of length, then JSON."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
MOST_BYTES = 16 << 20


class Channel:
    """One end of a stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def of(cls, descriptor: int) -> "Channel":
        """Return the channel of an inherited descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
          ValueError: it is too long, or not JSON.
          OSError: the other end is closed.
        """
        body = json.dumps(message).encode()
        if len(body) > MOST_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is too long; the limit is {MOST_BYTES}")
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
          EOFError: the other end is closed.
          ValueError: it is malformed or too long.
          RecursionError: it is nested too deeply.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MOST_BYTES:
            raise ValueError(f"a message of {length} bytes is too long; the limit is {MOST_BYTES}")
        return json.loads(self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)
