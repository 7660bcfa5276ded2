"""Rewards that a server gives: what they share, and their names."""

import dataclasses
import os
import re
import threading
import urllib.parse
from collections import Counter
from typing import Any, Protocol

from gspo_jax import secrets
from gspo_jax.calls.http import post_json
from gspo_jax.errors import UserError

NAMES = ("judge", "reward_model")
"""Of the rewards, and of their sections in the config."""

_MOST_TOKENS = 1 << 30
"""Of one call; what a server says beyond that is no count."""


class Served(Protocol):
    """A reward that a server gives: called with (prompt, completion, record), or an Asker (asking.py)."""

    fields: frozenset[str]
    """Fields that every record must have."""

    def take_metrics(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a served model is, and by which name."""

    url: str
    """What comes before the protocol's paths, such as "http://host:8000/v1"."""
    model: str
    key: str
    """Name of the environment variable with the API key. Empty: none."""


class Server:
    """A served model, and what was asked of it."""

    def __init__(self, section: str, endpoint: Endpoint) -> None:
        """Check everything that needs no network. `section` is the config's, for messages and metrics.

        Raises:
          UserError: the URL, the model's name or the key cannot be used.
        """
        self._url, self._model = _checked_url(section, endpoint.url), endpoint.model
        if not endpoint.model:
            raise UserError(f"{section}.model is empty; set it to the name under which the server has the model")
        self._key, self._section = _checked_key(section, endpoint.key), section
        self._counts, self._lock = Counter[str](), threading.Lock()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the server's JSON, and count the request and its tokens. Raises as `post_json`."""
        self.count(calls=1)
        reply = await post_json(self._url + path, {"model": self._model, **body}, key=self._key)
        used = reply.get("usage") if isinstance(reply, dict) else None
        if isinstance(used, dict):
            for kind in ("prompt_tokens", "completion_tokens"):
                if type(used.get(kind)) is int and 0 <= used[kind] < _MOST_TOKENS:
                    self.count(**{kind: used[kind]})
        return reply

    def count(self, **numbers: int) -> None:
        """Add to what was counted."""
        with self._lock:
            self._counts.update(numbers)

    def take(self) -> Counter[str]:
        """Return what was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter[str]()
        return counts

    def take_metrics(self) -> dict[str, float]:
        """Return requests, retries included, and tokens since the last call."""
        return self.metrics_of(self.take())

    def metrics_of(self, counts: Counter[str]) -> dict[str, float]:
        """Return the metrics of what was counted."""
        names = ("calls", "prompt_tokens", "completion_tokens")
        return {f"{self._section}/{name}": float(counts[name]) for name in names}


def _checked_url(section: str, url: str) -> str:
    """Return the URL without a slash at its end."""
    example = 'such as "http://host:8000/v1"'
    if not url:
        raise UserError(
            f"rewards has {section}, and {section}.url is empty; set it to where the model is served, {example}"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        port_or_none = parts.port
    except ValueError:
        parts = port_or_none = None
    shown = secrets.redacted(repr(url))
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or port_or_none == 0:
        raise UserError(f"{section}.url is {shown}, which is no address of a server; use one {example}")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            f"{section}.url has a user name or password, and would be stored with the run; put the key into an "
            f"environment variable, and its name into {section}.key"
        )
    if parts.query or parts.fragment or re.search(r"\s", url):
        raise UserError(f"{section}.url is {shown}; leave out blanks, and what follows a ? or #, {example}")
    return url.rstrip("/")


def _checked_key(section: str, name: str) -> str:
    """Return the key that an environment variable holds. No message has a value that may be a key itself."""
    if not name:
        return ""
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or secrets.redacted(name) != name:
        raise UserError(
            f"{section}.key is not the name of an environment variable; the config is stored with the run, so export "
            "the key, such as by JUDGE_KEY=…, and give that name"
        )
    value = os.environ.get(name, "").strip()
    if not value and (len(name) >= 20 and re.search(r"\d", name) and re.search(r"[a-z]", name)):
        raise UserError(
            f"{section}.key may be a key itself, since no environment variable has that name; export the key, such as "
            "by JUDGE_KEY=…, and give that name"
        )
    if not value:
        raise UserError(
            f"{section}.key is {name!r}, an environment variable that is not set; export it, or leave it empty"
        )
    if not re.fullmatch(r"[!-~]+", value):
        raise UserError(f"the environment variable {name} ({section}.key) has more than a key: blanks, or no ASCII")
    secrets.keep(name)
    return value
