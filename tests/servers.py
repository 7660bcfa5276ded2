"""HTTP servers on this machine that answer as they are told, and in every wrong way."""

import copy
import gzip
import json
import os
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = Callable[["Asked"], None]


class Asked(BaseHTTPRequestHandler):
    """A request: `path`, `headers`, and the JSON of its body."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    body: Any

    def do_POST(self) -> None:
        """Answer as the server was told."""
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server: Any = self.server
        with server.lock:
            server.asked.append(copy.copy(self))  # one object serves all requests of a connection
        with suppress(OSError):
            server.answer(self)

    do_GET = do_POST

    def reply(self, body: Any, status: int = 200, **headers: str) -> None:
        """Send a whole reply; bytes as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.head(status, content_length=str(len(content)), **headers)
        self.wfile.write(content)

    def head(self, status: int = 200, **headers: str) -> None:
        """Send the beginning of a reply, with headers by name."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about clients that go away."""


class Server:
    """A server that is up: where it is, and what it was asked."""

    def __init__(self, server: Any, scheme: str) -> None:
        self.url, self.asked = f"{scheme}://127.0.0.1:{server.server_address[1]}", server.asked


@contextmanager
def serving(answer: Answer, *, certificate: tuple[Path, Path] | None = None) -> Iterator[Server]:
    """Serve answers in threads, by TLS with a certificate and key."""
    server: Any = _Threads(("127.0.0.1", 0), Asked)
    server.answer, server.asked, server.lock = answer, [], threading.Lock()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield Server(server, "http" if certificate is None else "https")
    finally:
        server.shutdown()
        server.server_close()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 that no authority has signed, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def closed_port() -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def reset(asked: Asked) -> None:
    """End the connection by a reset, not an orderly end."""
    asked.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(asked.connection.detach())  # the files on it would hold it open
    asked.close_connection = True


def reset_in_body(asked: Asked) -> None:
    """Reset after the first bytes of the reply."""
    asked.head(content_length="1000")
    asked.wfile.write(b'{"score"')
    asked.wfile.flush()
    time.sleep(0.05)
    reset(asked)


def cut(asked: Asked) -> None:
    """End the connection in the middle of the reply."""
    asked.head(content_length="1000")
    asked.wfile.write(b'{"score"')
    asked.close_connection = True


def half_json(asked: Asked) -> None:
    """Send a whole reply that holds half an object."""
    asked.reply(b'{"choices": [{"message"')


def slow_bytes(asked: Asked) -> None:
    """Send a byte now and then, for longer than anyone waits."""
    asked.head(content_length="100000")
    for _ in range(100_000):
        asked.wfile.write(b" ")
        time.sleep(0.02)


def fifty_megabytes(asked: Asked) -> None:
    """Send a reply of 50 MB, announced."""
    asked.reply(b'"' + b"a" * 50_000_000 + b'"')


def endless(asked: Asked) -> None:
    """Send a chunked reply without an end."""
    asked.head(transfer_encoding="chunked")
    while True:
        asked.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def endless_error(asked: Asked) -> None:
    """Send an error whose explanation has no end."""
    asked.head(503, transfer_encoding="chunked")
    while True:
        asked.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def bomb(asked: Asked) -> None:
    """Send 8 MB in as many kilobytes."""
    asked.reply(gzip.compress(b" " * 8_000_000), content_encoding="gzip")


def deep(asked: Asked) -> None:
    """Send JSON that nests deeper than a parser's stack."""
    asked.reply(b"[" * 1_000_000)


def html(asked: Asked) -> None:
    """Send a page, as a proxy's log-in does."""
    asked.reply(b"<html>Sign in</html>", content_type="text/html")


def in_seconds(seconds: float) -> str:
    """Return a date that lies ahead, as Retry-After may have it."""
    return formatdate(time.time() + seconds, usegmt=True)
