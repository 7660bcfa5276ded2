"""Render chat templates in the jinja2 environment that Hugging Face templates are written for.

Templates come with a checkpoint and are not trusted, so they run in a sandbox. Tools and documents are not supported:
templates see them as absent.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gspo_jax.types import UserError

Message = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""


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


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template; raises UserError if its syntax is invalid."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is invalid at line {error.lineno}: {error.message}") from error


def render(template: jinja2.Template, messages: Sequence[Message], **variables: Any) -> str:
    """Return the prompt text of a conversation; raises UserError if the template rejects it."""
    try:
        return template.render(messages=[dict(m) for m in messages], tools=None, documents=None, **variables)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template rejected the conversation: {error.message}") from error
