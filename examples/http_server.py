"""A stand-in for servers of your own: POST /score scores a response, and POST /add is a tool.

python examples/http_server.py 8001
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def answer(path: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the reply to a request."""
    if path == "/score":
        return 200, {"score": 1 / max(1, len(asked["response"].split()))}
    if path == "/add":
        return 200, {"sum": asked["a"] + asked["b"]}
    return 404, {"error": f"no {path}"}


class Server(BaseHTTPRequestHandler):
    """Answers a request that has JSON with JSON."""

    def do_POST(self) -> None:
        status, said = answer(self.path, json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        """Keep requests out of the terminal."""


def start(port: int = 0) -> str:
    """Serve in a thread, at any free port by default, and return the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


if __name__ == "__main__":
    print(start(int(sys.argv[1])), flush=True)
    threading.Event().wait()
