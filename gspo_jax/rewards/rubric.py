"""Templates of what a served model is asked about a response.

`{prompt}`, `{completion}`, `{answer}` (the record's) and `{record[FIELD]}` are placeholders. `{{prompt}}` stands for
the text {prompt}, all other braces for themselves. Values are filled in at once and never read for placeholders.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_jax.errors import UserError, choices

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*(?:\[[^\[\]{}\n]+\])?)\}\}|\{([A-Za-z_]\w*)(?:\[([^\[\]{}\n]+)\])?\}")
_MOST_BYTES = 1 << 20


class Rubric:
    """A template with its placeholders checked."""

    def __init__(self, text: str, *, field: str, names: Sequence[str], needs: Sequence[str]) -> None:
        """Read a template.

        Args:
          text: the template.
          field: the config field that names it, for messages.
          names: placeholders that there are, besides `answer` and `record[FIELD]`.
          needs: those without which the template makes no sense.

        Raises:
          UserError: it has another placeholder, or lacks one that it needs.
        """
        self._text = text
        known, found, fields = [*names, "answer"], set[str](), set[str]()
        for literal, name, key in _PLACEHOLDER.findall(text):
            if literal:
                continue
            if name == "record" and key:
                fields.add(key)
            elif name not in known or key:
                wrong = f"{name}[{key}]" if key else name
                raise UserError(
                    f"{field}: the template has {{{wrong}}}, which is no placeholder; "
                    f"{choices(name, [*known, 'record[FIELD]'])}; for the text itself write {{{{{wrong}}}}}"
                )
            found.add(name)
        for name in needs:
            if name not in found:
                raise UserError(f"{field}: the template has no {{{name}}}, so no response would be seen; add it")
        self.fields = frozenset(fields | ({"answer"} & found))
        """Fields of records that the template reads."""
        self._field = field

    def fill(self, values: Mapping[str, str], record: Mapping[str, Any]) -> str:
        """Return the text about a response.

        Raises:
          UserError: the record lacks a field.
        """
        if missing := sorted(self.fields - record.keys()):
            raise UserError(
                f"{self._field}: the template asks for {{record[{missing[0]}]}}, and the record has "
                f"{', '.join(map(str, record))}; name one of these"
            )

        def value(match: re.Match[str]) -> str:
            literal, name, key = match.groups()
            if literal:
                return f"{{{literal}}}"
            return values[name] if name in values else _text(record[key or name])

        return _PLACEHOLDER.sub(value, self._text)


def read(path: str, *, field: str, names: Sequence[str], needs: Sequence[str]) -> Rubric:
    """Read a template from a file in UTF-8. Raise UserError for a file that is none, and as `Rubric`."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{field} is {path!r}, and there is no such file; give the path of a template")
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UserError(f"{field}: {path} is longer than 1 MiB; give the path of a template")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"{field}: {path} cannot be read, {why}; give the path of a template") from None
    return Rubric(text.strip(), field=field, names=names, needs=needs)


def fenced(name: str, text: str) -> str:
    """Return a text between marks that it cannot close: they hold a digest of itself."""
    mark = f"{name}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"
    return f"<{mark}>\n{text}\n</{mark}>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
