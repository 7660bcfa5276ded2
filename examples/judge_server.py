"""A stand-in for a judge's server: the OpenAI chat completions protocol, and a rule in place of a model.

    python examples/judge_server.py 8000
    python examples/judge_server.py 8000 steps

The rule is `words` or `steps`. Of two responses, the one that it scores higher is better.
"""

import json
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Rule = Callable[[str], float]
"""Response -> score."""


def words(response: str) -> float:
    """Return 10, less one for every word."""
    return 10 - len(response.split())


def steps(response: str) -> float:
    """Return 10 times the share of the steps before `#### NUMBER` that are right, such as `7+8=15`; 0 without any."""
    shown, mark, answer = response.partition("####")
    if not mark or not re.fullmatch(r"\s*-?\d+\s*", answer):
        return 0.0
    found = [_is_right(step) for step in shown.split()]
    return 10 * sum(found) / len(found) if found else 0.0


def _is_right(step: str) -> bool:
    if not re.fullmatch(r"\d{1,9}([+-]\d{1,9}){1,9}=-?\d{1,9}", step):
        return False
    terms, _, value = step.partition("=")
    return sum(map(int, re.findall(r"[+-]?\d+", terms))) == int(value)


RULES = {"words": words, "steps": steps}


def verdict(message: str, rule: Rule = words) -> dict[str, object]:
    """Return the verdict on the responses that stand between marks."""
    scores = [rule(text) for _, text in re.findall(r"<(completion\w*-\w+)>\n(.*?)\n</\1>", message, re.DOTALL)]
    reason = f"the rule gives {scores}"
    if len(scores) == 1:
        return {"reason": reason, "score": min(10, max(0, scores[0]))}
    return {"reason": reason, "better": "tie" if scores[0] == scores[1] else "AB"[scores[1] > scores[0]]}


class Judge(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    def __init__(self, *request: Any, rule: Rule) -> None:
        self._rule = rule
        super().__init__(*request)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        said = json.dumps(verdict(json.loads(asked)["messages"][-1]["content"], self._rule))
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(asked) // 4, "completion_tokens": len(said) // 4}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice], "usage": usage}).encode())

    def log_message(self, *_: object) -> None:
        """Keep requests out of the terminal."""


def start(port: int = 0, rule: Rule = words) -> str:
    """Serve in a thread, at any free port by default, and return the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Judge, rule=rule))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


if __name__ == "__main__":
    port, *rule = sys.argv[1:]
    print(start(int(port), *(RULES[name] for name in rule)), flush=True)
    threading.Event().wait()
