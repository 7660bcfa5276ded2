"""The process that isolated reward functions run in: `python -m gspo_jax.rewards.worker MODULE TIMEOUT_S`.

Reads one JSON request per line, `{"name", "prompt", "completion", "record"}`, and answers each with one line,
`{"score"}` or `{"error"}`. It must not import jax: it starts in the time of its functions' imports.
"""

import faulthandler
import importlib
import json
import os
import resource
import sys
import traceback
from typing import Any

_MEMORY_BYTES = 4 << 30
"""Address space; an answer that wants more gets a MemoryError instead of the machine."""
_ORPHAN_S = 10.0
"""A hang beyond two timeouts and this has no parent any more that would kill it."""


def main() -> None:
    """Answers requests until its input closes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    module = importlib.import_module(sys.argv[1])
    # The parent kills at its timeout. This ends a hang whose parent is gone; it runs without Python's lock.
    orphan_s, silence = 2 * float(sys.argv[2]) + _ORPHAN_S, open(os.devnull, "w")  # noqa: SIM115 - for life
    _send(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(orphan_s, exit=True, file=silence)
        try:
            score = getattr(module, request.pop("name"))(**request)
            reply = {"score": None if score is None else float(score)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        _send(replies, reply)


def _send(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
