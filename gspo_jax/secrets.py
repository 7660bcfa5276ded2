"""Texts without secrets, for logs, run folders and error messages."""

import os
import re

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
"""Of environment variables whose values are secret."""
_SHORTEST = 6
"""Characters of the shortest value that is taken for a secret."""
_SHAPES = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), r"\1 [secret]"),
    (
        re.compile(r"(?i)\b((?:x-)?api[-_]?key|authorization|access[-_]token)\b(['\"]?\s*[:=]\s*['\"]?)[^\s'\",&]{6,}"),
        r"\1\2[secret]",
    ),
    (re.compile(r"\b(?:sk|pk|hf|ghp|gho|xox[bp])[-_][A-Za-z0-9_-]{8,}"), "[secret]"),
    (re.compile(r"(://)[^/\s@:]*:[^/\s@]+@"), r"\1[secret]@"),
)
"""What a secret looks like in a header, a URL or alone."""
_told = set[str]()


def keep(name: str) -> None:
    """Treat the value of an environment variable as a secret, whatever its name."""
    _told.add(name)


def redacted(text: str) -> str:
    """Return a text with secrets replaced: values of secret environment variables, by [NAME], and keys in URLs and
    headers."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and (name in _told or _NAMES.search(name)) and value in text:
            text = text.replace(value, f"[{name}]")
    for shape, by in _SHAPES:
        text = shape.sub(by, text)
    return text
