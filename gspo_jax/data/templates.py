"""The jinja2 environment that Hugging Face chat templates are written for, and a trial of a template in a process.

`python -m gspo_jax.data.templates` reads a template as a JSON string and renders it under limits of time and memory;
chat.py calls it. A sandbox keeps a template from the interpreter but not from looping, and a constant like
`'a' * 10**10` is already evaluated when the template is compiled. No jax or flax here, so that a trial starts quickly.
"""

import datetime
import json
import math
import resource
import sys
import time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LIMIT_S = 2
"""CPU seconds that compiling and rendering may take in a trial; templates of models take milliseconds."""
LIMIT_BYTES = 512 << 20
"""Address space of the trial's process."""
LIMIT_CHARACTERS = 1 << 20
"""Length of the text that a trial may render."""
CLOCK = "2025-01-01T00:00"
"""Time that templates are told if no other is chosen: prompts must be the same on every host and after a resume."""
TOO_MUCH_MEMORY, TOO_LONG = 3, 4
"""Exit codes of a trial, which is 0 also for a template that raises: that is reported where it is rendered."""

_QUESTION = "What is 47+28? " * 64
_TURNS = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": "75"})
_PARTS = {"role": "user", "content": [{"type": "text", "text": _QUESTION}]}
_CONVERSATIONS = ([_TURNS[0]], [*_TURNS, _TURNS[0]], [_PARTS])
_TOKENS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}


class _Generation(Extension):
    """Ignores `{% generation %}` and `{% endgeneration %}`, by which other trainers find the assistant's tokens."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which would alter the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def compile_source(source: str, clock: datetime.datetime) -> jinja2.Template:
    """Compile a template that is told the time `clock`; raises whatever jinja2 and Python's compiler raise."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = clock.strftime
    return environment.from_string(source)


def main() -> int:
    """Compile the template on stdin and render short conversations with it; return the exit code."""
    source = json.load(sys.stdin)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, LIMIT_BYTES)
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + LIMIT_S)  # beyond it the kernel sends SIGXCPU
    try:
        template = compile_source(source, datetime.datetime.fromisoformat(CLOCK))
    except MemoryError:
        return TOO_MUCH_MEMORY
    except Exception:
        return 0
    for messages in _CONVERSATIONS:
        try:
            text = template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **_TOKENS)
        except MemoryError:
            return TOO_MUCH_MEMORY
        except Exception:
            continue
        if len(text) > LIMIT_CHARACTERS:
            return TOO_LONG
    return 0


def _limit(what: int, value: int) -> None:
    """Lower the soft limit of a resource to `value`, or to the hard limit if that is lower."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
