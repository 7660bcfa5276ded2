"""Rendering of chat templates in a separate program, `python -m gspo_jax.data.templates`, used by chat.py.

jinja2's sandbox does not stop loops, and a constant like `'a' * 10**10` is evaluated at compile time. limited.py ends
both. No jax or flax here, to start quickly.
"""

import datetime
import functools
import json
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gspo_jax import limited

CLOCK = "2025-01-01T00:00"
"""Default time, the same on every host and after a resume."""
LIMIT_CHARACTERS, LIMIT_TIMES = 1 << 17, 16
"""Characters that a template may write: a constant plus a multiple of the conversation's."""
REMEDY = "correct it, or use the model's own"


class _Generation(Extension):
    """No-op `{% generation %}` block, used by other trainers."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # jinja2's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@functools.lru_cache
def _compiled(source: str, clock: str) -> jinja2.Template:
    """Compile a template, raising whatever jinja2 and Python's compiler raise."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.datetime.fromisoformat(clock).strftime
    return environment.from_string(source)


_sources: dict[str, str] = {}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Render a template, given by digest, for each of `conversations`, with each one's `tools` or None.

    Returns:
      `found`, a `text` or why it is `rejected` for each conversation, `unknown` if the template's `source` is needed
      too, or what is `wrong`. Messages follow "the chat template".
    """
    if "source" in question:
        _sources[question["template"]] = question["source"]
    elif question["template"] not in _sources:
        return {"unknown": ""}
    try:
        template = _compiled(_sources[question["template"]], question["clock"])
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return {"wrong": f"is invalid at line {error.lineno}: {limited.quoted(error.message)}"}
    except Exception as error:  # such as a RecursionError for a deep expression
        return {"wrong": f"cannot be compiled ({limited.quoted(error)}); {REMEDY}"}
    try:
        given = zip(question["conversations"], question["tools"], strict=True)
        return {"found": [_rendered(template, turns, tools, question["variables"]) for turns, tools in given]}
    except _TooLong as error:
        return {"wrong": str(error)}


class _TooLong(Exception):
    """A template writes too much."""


def _rendered(template: jinja2.Template, messages: list[Any], tools: Any, variables: dict[str, Any]) -> dict[str, str]:
    try:
        text = template.render(messages=messages, tools=tools, documents=None, **variables)
        text.encode()  # a template can write a lone surrogate
    except MemoryError:
        raise
    except jinja2.TemplateError as error:
        return {"rejected": f"rejected the conversation: {limited.quoted(error)}"}
    except Exception as error:  # templates can raise anything: {{ 1/0 }}
        return {"rejected": f"failed on the conversation ({type(error).__name__}: {limited.quoted(error)}); {REMEDY}"}
    given = len(json.dumps([messages, *(tools or ())], ensure_ascii=False)) - len("[]")
    if len(text) > (most := LIMIT_CHARACTERS + LIMIT_TIMES * given):
        raise _TooLong(f"turns a conversation of {given} characters into more than {most}; {REMEDY}")
    return {"text": text}


if __name__ == "__main__":
    limited.serve(answer)
