"""JSON over HTTP: one request and its reply, within limits on what a server may send.

Deadline, retries and concurrency are those of calls.py, so nothing here waits by itself, and the pool of connections
grows with the calls in flight. Proxies and certificates are the environment's, as httpx reads them (HTTPS_PROXY,
NO_PROXY, SSL_CERT_FILE); this machine's own addresses are never asked for through a proxy.
"""

import asyncio
import json
import weakref
from typing import TYPE_CHECKING, Any

from gspo_jax.calls.failures import CallFailed, retry_after

if TYPE_CHECKING:
    import httpx  # takes half a second

MOST_BYTES = 4 << 20
"""Bytes of the longest reply."""
_MOST_OF_ERROR = 64 << 10
_ERROR_S = 2.0
"""Seconds to read what a server says about an error; the status is known by then."""
_MOST_HOPS = 3
_CONNECT_S = 10.0
"""Seconds to connect. A host that does not answer is tried again within the call's deadline."""
_HERE = ("all://localhost", "all://127.0.0.1", "all://[::1]")
_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]" = weakref.WeakKeyDictionary()


async def post_json(url: str, body: dict[str, Any], *, key: str = "", most_bytes: int = MOST_BYTES) -> Any:
    """Post a JSON object and return the JSON value of the reply.

    Redirects are followed within an origin, as far as they keep the method. Replies are not compressed, so that none is
    longer than it seems.

    Args:
      url: http or https.
      body: the object.
      key: sent as a bearer token; empty: none.
      most_bytes: of the reply.

    Raises:
      CallFailed: a status other than 200 to 299, a redirect elsewhere, or a reply that is too long, compressed, or no
        JSON. No message has the URL or the key.
      httpx.TransportError: there is no connection, or it ended early.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    content, target = json.dumps(body).encode(), httpx.URL(url)
    for _ in range(_MOST_HOPS + 1):
        async with _client().stream("POST", target, content=content, headers=headers) as reply:
            if not reply.has_redirect_location:
                return await _read(reply, most_bytes)
            target = _redirected(reply, target)
    raise CallFailed(f"redirected more than {_MOST_HOPS} times")


def _client() -> "httpx.AsyncClient":
    """Return the running loop's client."""
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(),
            headers={"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "gspo_jax"},
            mounts=dict.fromkeys(_HERE),
        )
    return _clients[loop]


def _redirected(reply: "httpx.Response", target: "httpx.URL") -> "httpx.URL":
    """Return the URL of the next request, of the same origin. The key goes to no other."""
    assert reply.next_request is not None
    goal = reply.next_request.url
    if _origin(goal) != _origin(target):
        raise CallFailed(f"redirected to {_origin(goal)}")
    if reply.status_code not in (307, 308):
        raise CallFailed(f"redirected by HTTP status {reply.status_code}, which does not keep the method")
    return goal


def _origin(url: "httpx.URL") -> str:
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    return f"{url.scheme}://{url.host}:{port}"


async def _read(reply: "httpx.Response", most_bytes: int) -> Any:
    if not reply.is_success:
        raise CallFailed.of_status(
            reply.status_code, after_s=retry_after(reply.headers.get("retry-after")), detail=await _complaint(reply)
        )
    if _is_compressed(reply):
        raise CallFailed("the reply is compressed, which the request rules out")
    body = bytearray()
    async for part in reply.aiter_raw():
        body += part
        if len(body) > most_bytes:
            raise CallFailed(f"the reply is longer than {most_bytes >> 20} MiB")
    value = _parsed(bytes(body))
    if value is None:
        raise CallFailed("the reply is no JSON", retry=True)
    return value


async def _complaint(reply: "httpx.Response") -> str:
    """Return what a server says about an error: the message of its JSON, else a short text."""
    body = bytearray()
    if _is_compressed(reply):
        return ""
    try:
        async with asyncio.timeout(_ERROR_S):
            async for part in reply.aiter_raw():
                body += part
                if len(body) > _MOST_OF_ERROR:
                    break
    except Exception:
        pass  # the status says enough
    said = _parsed(bytes(body))
    for name in ("error", "message", "detail"):
        said = said.get(name, said) if isinstance(said, dict) else said
    return body[:1000].decode(errors="replace") if said is None else str(said)[:1000]


def _is_compressed(reply: "httpx.Response") -> bool:
    return reply.headers.get("content-encoding", "identity") != "identity"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
