"""A stand-in for a judge's server: the OpenAI chat completions protocol, and a rule in place of a model.

    python examples/judge_server.py 8000

A response scores 10, less one for every word; of two, the one with fewer words is better.
"""

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def verdict(message: str) -> dict[str, object]:
    """Return the verdict on the responses that stand between marks."""
    words = [len(text.split()) for _, text in re.findall(r"<(completion\w*-\w+)>\n(.*?)\n</\1>", message, re.DOTALL)]
    if len(words) == 1:
        return {"reason": f"{words[0]} words", "score": max(0, 10 - words[0])}
    return {"reason": f"{words} words", "better": "tie" if words[0] == words[1] else "AB"[words[1] < words[0]]}


class Judge(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        said = json.dumps(verdict(json.loads(asked)["messages"][-1]["content"]))
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(asked) // 4, "completion_tokens": len(said) // 4}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice], "usage": usage}).encode())

    def log_message(self, *_: object) -> None:
        """Keep requests out of the terminal."""


def start(port: int = 0) -> str:
    """Serve in a thread, at any free port by default, and return the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


if __name__ == "__main__":
    print(start(int(sys.argv[1])), flush=True)
    threading.Event().wait()
