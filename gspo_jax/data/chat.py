"""Compile and render chat templates, which come with a checkpoint and are not trusted.

They run in jinja2's sandbox (templates.py), after a trial in a process of its own. Tools and documents are not
supported: templates see them as absent.
"""

import datetime
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from gspo_jax.data import templates
from gspo_jax.types import UserError

Message = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""

_REMEDY = "correct it, or use the model's own"


def compile_template(source: str, clock: datetime.datetime) -> jinja2.Template:
    """Compile a chat template that is told the time `clock`.

    Raises:
      UserError: its syntax is invalid, or it takes too much time or memory.
    """
    _try(source)
    try:
        return templates.compile_source(source, clock)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is invalid at line {error.lineno}: {error.message}") from error
    except Exception as error:  # of Python's compiler, such as a RecursionError for a deep expression
        raise UserError(f"the chat template cannot be compiled ({_shown(error)}); {_REMEDY}") from error


def in_parts(message: Message) -> dict[str, Any]:
    """Return a turn with its content as a list of one part, as templates of models that also see images take it."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def render(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Return the prompt text of a conversation; raises UserError if the template rejects it or fails."""
    try:
        text = template.render(messages=[dict(m) for m in messages], tools=None, documents=None, **variables)
        text.encode()  # a template can write half a surrogate pair, which is no text
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template rejected the conversation: {_shown(error)}") from error
    except Exception as error:  # a template raises as any code does: {{ 1/0 }}
        what = f"{type(error).__name__}: {_shown(error)}"
        raise UserError(f"the chat template failed on the conversation ({what}); {_REMEDY}") from error
    return text


@functools.cache
def _try(source: str) -> None:
    """Raise UserError if a template takes too much time or memory, as seen in a process of its own.

    Once per template, in about a tenth of a second, so that rendering itself needs no guard.
    """
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gspo_jax.data.templates"],
        input=json.dumps(source),
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # a Ctrl-C is no verdict on the template
    )
    if done.returncode == 0:
        return
    found = {
        -signal.SIGXCPU: f"does not end within {templates.LIMIT_S} s",
        templates.TOO_MUCH_MEMORY: f"needs more than {templates.LIMIT_BYTES >> 20} MiB of memory",
        templates.TOO_LONG: f"turns a short conversation into more than {templates.LIMIT_CHARACTERS} characters",
    }
    ended = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise UserError(f"the chat template {found.get(done.returncode, f'ended its trial ({ended:.200})')}; {_REMEDY}")


def _shown(error: Exception) -> str:
    """Return an error's message on one line, cut if it is long."""
    return " ".join(str(error).split())[:200]
