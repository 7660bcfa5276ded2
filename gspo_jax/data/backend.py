"""Loading of untrusted tokenizer.json files.

A separate process (growth.py) tries their parts first: a pattern can hang, replacements grow a text without bound, and
a packed table take all memory, which ends a Rust process.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from gspo_jax import limited
from gspo_jax.data.growth import PARTS
from gspo_jax.errors import UserError

MOST_OF_A_TOKEN = 1 << 14
"""Maximum characters of a decoded token. Known tokenizers reach a thousand."""

_program = limited.Process("gspo_jax.data.growth")


def load(path: Path) -> tokenizers.Tokenizer:
    """Load a tokenizer file.

    Raises:
      UserError: it is malformed, can grow a text without bound, or fails or hangs on a short one.
    """
    again = "download or save it again"
    try:
        text = path.read_text(encoding="utf-8-sig")
        described = json.loads(text)
        parts = json.dumps({name: described.get(name) for name in PARTS})
    except (ValueError, RecursionError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as a tokenizer ({error!s:.200}); {again}") from error
    found = _tried(parts)
    if "wrong" in found:
        raise UserError(f"{path} {found['wrong']}")
    try:
        with panics_told():
            backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} cannot be read as a tokenizer ({error!s:.200}); {again}") from error
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
    if (grown := longest * found["decoded"]) > MOST_OF_A_TOKEN:
        says = f"{path} can make {grown:.3g} characters of a token, more than {MOST_OF_A_TOKEN}"
        raise UserError(f"{says}; use the model's own")
    return backend


@functools.cache
def _tried(parts: str) -> dict[str, Any]:
    try:
        return _program.ask(json.loads(parts))
    except limited.TooMuch as error:
        return {"wrong": f"{error} when it is tried; use the model's own"}


@contextlib.contextmanager
def panics_told() -> Iterator[None]:
    """Turn a panic of the library, which is no Exception, into UserError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer fails on a text ({limited.quoted(error)}); use the model's own") from None
