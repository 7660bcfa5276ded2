"""Failures of calls: what is worth a retry, and short causes to count them by."""

import email.utils
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gspo_jax.secrets import redacted

_PASSING = frozenset([408, 409, 425, 429, 500, 502, 503, 504, 529])
"""HTTP statuses of failures that pass."""
_PASSING_NAMES = frozenset(
    [
        *("APIConnectionError", "APITimeoutError", "RemoteProtocolError", "ServerDisconnectedError"),
        *("ClosedResourceError", "BrokenResourceError", "EndOfStream"),
    ]
)
"""Clients' exceptions that pass and derive from none of Python's own for such failures."""
_ENDED = ("disconnected", "closed connection", "IncompleteRead")
"""Words of clients' exceptions for a reply that ends early."""
_NETWORK = frozenset(
    [
        *("httpx", "httpcore", "httpx2", "httpcore2", "aiohttp", "requests", "urllib3"),
        *("openai", "anthropic", "mcp", "websockets", "anyio"),
    ]
)
"""Packages whose exceptions are failures of calls, never mistakes of the function that calls."""
_MCP_CLOSED = -32000
"""Code of an MCP session that has ended."""
_LONGEST = 200


class CallFailed(Exception):
    """A call without a result."""

    def __init__(self, cause: str, *, retry: bool = False, after_s: float | None = None, detail: str = ""):
        """Say why.

        Args:
          cause: a few words, the same for all failures of a kind, e.g. "HTTP status 503".
          retry: whether another attempt may succeed.
          after_s: seconds that the server asks to wait before it.
          detail: what the server says, which may differ from call to call.
        """
        super().__init__(cause)
        self.retry, self.after_s, self.detail = retry, after_s, detail
        self.status: int | None = None

    @classmethod
    def of_status(cls, status: int, *, after_s: float | None = None, detail: str = "") -> "CallFailed":
        """Return the failure of a call that was answered with an HTTP status; some pass."""
        failure = cls(f"HTTP status {status}", retry=status in _PASSING, after_s=after_s, detail=detail)
        failure.status = status
        return failure


def is_failure(error: BaseException) -> bool:
    """Return True for a failure of a call; False for a mistake of the function that made it, as a KeyError."""
    error = _only(error)
    if isinstance(error, CallFailed | OSError | TimeoutError) or _status(error) is not None:
        return True
    return type(error).__module__.partition(".")[0] in _NETWORK


def passes(error: BaseException) -> bool:
    """Return True if another attempt may succeed."""
    error = _only(error)
    if isinstance(error, CallFailed):
        return error.retry
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in _causes(error)):
        return False
    status = _status(error)
    if status is not None:
        return status in _PASSING
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _PASSING_NAMES:
        return True
    if type(error).__name__ == "MCPError":
        return getattr(error, "code", None) == _MCP_CLOSED
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"TransportError", "ClientConnectionError"}) and "UnsupportedProtocol" not in names


def after_s(error: BaseException) -> float | None:
    """Return the seconds that a server asks to wait before another attempt, as by the header Retry-After."""
    error = _only(error)
    if isinstance(error, CallFailed):
        return error.after_s
    response = _attribute(error, "response")
    headers = _attribute(error if response is None else response, "headers")
    return retry_after(headers.get("retry-after")) if isinstance(headers, Mapping) else None


def retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which may hold a date; None if there is none."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def cause_of(error: BaseException) -> str:
    """Return a few words to count failures by, without secrets."""
    error = _only(error)
    if isinstance(error, CallFailed):
        return _short(str(error))
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in _causes(error)):
        return "the server's certificate is not valid"
    status = _status(error)
    if status is not None:
        return f"HTTP status {status}"
    for each in _causes(error):
        if isinstance(each, ConnectionRefusedError):
            return "connection refused"
        if isinstance(each, ConnectionResetError):
            return "connection reset"
    if isinstance(error, TimeoutError) or type(error).__name__.endswith("Timeout"):
        return "timed out"
    text = _text(error)
    if passes(error) and any(words in text for words in _ENDED):
        return "the server ended the connection"
    return _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def sentence_of(error: BaseException) -> str:
    """Return the cause, and what the server says about it, without secrets."""
    detail = error.detail if isinstance(error, CallFailed) else ""
    said = "".join(each if each.isprintable() else " " for each in redacted(detail))
    return cause_of(error) + (f": {_short(' '.join(said.split()))}" if said.strip() else "")


def _only(error: BaseException) -> BaseException:
    """Return the error; of a group, as task groups raise them, the first that is no failure, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    each = [_only(inner) for inner in error.exceptions]
    return next((inner for inner in each if not is_failure(inner)), each[0])


def _short(text: str) -> str:
    text = redacted(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error: httpx and requests give it with the response, others themselves."""
    response = _attribute(error, "response")
    for each in (_attribute(error, "status_code"), _attribute(response, "status_code"), _of_aiohttp(error)):
        if isinstance(each, int) and each >= 400:
            return each
    return None


def _of_aiohttp(error: BaseException) -> Any:
    return _attribute(error, "status") if type(error).__module__.startswith("aiohttp") else None


def _attribute(error: Any, name: str) -> Any:
    """Return an attribute, None without. One that raises, as httpx's do before there is a request, is none."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
