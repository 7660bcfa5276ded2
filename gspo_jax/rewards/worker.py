"""Worker process for isolated reward functions: `python -m gspo_jax.rewards.worker MODULE TIMEOUT_S`.

Reads one JSON request per line, `{"name", "prompt", "completion", "record"}`, and answers each with one line,
`{"score"}` or `{"error"}`. It must not import jax, so that starting it takes no longer than importing its functions.
"""

import faulthandler
import importlib
import json
import os
import resource
import sys
import traceback
from typing import Any

_MAX_MEMORY_BYTES = 4 << 30
"""Limit of the address space; an answer that needs more gets a MemoryError instead of exhausting the machine."""
_ORPHAN_MARGIN_S = 10.0
"""Seconds beyond two timeouts after which a hanging call must have lost the parent that would have killed it."""


def main() -> None:
    """Answer requests until stdin closes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the replies
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    module = importlib.import_module(sys.argv[1])
    # The parent kills a slow call. This ends a call that hangs after the parent is gone; it does not need the GIL.
    orphan_s, silence = 2 * float(sys.argv[2]) + _ORPHAN_MARGIN_S, open(os.devnull, "w")  # noqa: SIM115 - open until exit
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
