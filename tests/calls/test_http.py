"""JSON over HTTP, against servers that really answer wrongly."""

import json
import os
import time
from typing import Any

import pytest

from gspo_jax.calls import calls, failures
from gspo_jax.calls.calls import Calls, Limits
from gspo_jax.calls.failures import CallFailed
from gspo_jax.calls.http import post_json
from gspo_jax.calls.outcomes import Outcome
from tests import servers
from tests.servers import Asked, serving

KEY = "sk-0123456789abcdef"


def _echo(asked: Asked) -> None:
    asked.reply({"path": asked.path, "body": asked.body, "key": asked.headers["authorization"]})


def _post(url: str, **settings: Any) -> Any:
    return calls.run(post_json(url, {"text": "é\ud800"}, **settings))


def _failed(url: str, **settings: Any) -> CallFailed:
    with pytest.raises(CallFailed) as raised:
        _post(url, **settings)
    return raised.value


def _called(url: str, *, deadline_s: float = 5.0, tries: int = 1) -> Outcome[Any]:
    async def post() -> Any:
        return await post_json(url, {}, key=KEY)

    with Calls(Limits(deadline_s=deadline_s, tries=tries)) as started:
        return started.submit(post).result(timeout=deadline_s + 10)


def test_a_reply_and_what_was_sent():
    with serving(_echo) as server:
        assert _post(f"{server.url}/v1/x", key=KEY) == {
            "path": "/v1/x", "body": {"text": "é\ud800"}, "key": f"Bearer {KEY}"
        }  # fmt: skip
        assert _post(server.url)["key"] is None
        (first, _) = server.asked
        assert first.headers["accept-encoding"] == "identity"


def test_connections_are_kept_and_as_many_as_calls():
    def slowly(asked: Asked) -> None:
        time.sleep(0.2)
        asked.reply({})

    async def post(url: str) -> Any:
        return await post_json(url, {})

    with serving(slowly) as server, Calls(Limits(concurrency=32)) as started:
        begun = time.monotonic()
        assert all(f.result().cause is None for f in [started.submit(post, server.url) for _ in range(64)])
        assert time.monotonic() - begun < 8  # two rounds of 0.2 s; one after the other they would take 13 s
        assert len({asked.client_address for asked in server.asked}) <= 40, "connections are made anew"


@pytest.mark.parametrize(
    ("status", "retry"), [(400, False), (401, False), (404, False), (422, False), (429, True), (500, True), (503, True)]
)
def test_a_status_is_the_cause_and_the_servers_words_the_detail(status, retry):
    def refuse(asked: Asked) -> None:
        asked.reply({"error": {"message": f"bad key {KEY}\n\x1b[31m", "code": 7}}, status)

    with serving(refuse) as server:
        error = _failed(server.url)
    assert (str(error), error.retry, error.after_s) == (f"HTTP status {status}", retry, None)
    assert failures.sentence_of(error) == f"HTTP status {status}: bad key [secret] [31m"


def test_retry_after_in_seconds_and_as_a_date():
    waits = iter(["3", servers.in_seconds(100), "soon", servers.in_seconds(-100)])
    with serving(lambda asked: asked.reply(b"", 429, retry_after=next(waits))) as server:
        assert _failed(server.url).after_s == 3
        assert 90 < (_failed(server.url).after_s or 0) <= 100
        assert _failed(server.url).after_s is None
        assert _failed(server.url).after_s == 0


def test_redirects_stay_with_the_origin():
    with serving(_echo) as other:
        places = {"/a": (308, "/b"), "/b": (307, "c"), "/away": (307, f"{other.url}/?key={KEY}"), "/get": (302, "/c")}
        places |= {"/loop": (307, "/loop"), "/odd": (307, "http://[::1"), "/tls": (308, "https://127.0.0.1/")}

        def redirect(asked: Asked) -> None:
            if asked.path in places:
                status, location = places[asked.path]
                asked.reply(b"", status, location=location)
            else:
                _echo(asked)

        with serving(redirect) as server:
            assert _post(f"{server.url}/a", key=KEY) == {
                "path": "/c", "body": {"text": "é\ud800"}, "key": f"Bearer {KEY}"
            }  # fmt: skip
            assert str(_failed(f"{server.url}/away", key=KEY)) == f"redirected to {other.url}"
            assert str(_failed(f"{server.url}/tls", key=KEY)) == "redirected to https://127.0.0.1:443"
            assert str(_failed(f"{server.url}/get")).startswith("redirected by HTTP status 302")
            assert str(_failed(f"{server.url}/loop")) == "redirected more than 3 times"
            assert (_called(f"{server.url}/odd").cause or "").startswith("RemoteProtocolError: Invalid URL")
        assert not other.asked, "the key went to another server"


WRONG = {
    servers.half_json: ("the reply is no JSON", True),
    servers.html: ("the reply is no JSON", True),
    servers.deep: ("the reply is no JSON", True),
    servers.cut: ("the server ended the connection", True),
    servers.reset: ("connection reset", True),
    servers.reset_in_body: ("connection reset", True),
    servers.fifty_megabytes: ("the reply is longer than 4 MiB", False),
    servers.endless: ("the reply is longer than 4 MiB", False),
    servers.endless_error: ("HTTP status 503", True),
    servers.bomb: ("the reply is compressed, which the request rules out", False),
    servers.slow_bytes: ("no answer within 1 s", False),
}


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: answer.__name__)
def test_a_wrong_answer_is_a_failure_with_a_cause(answer):
    cause, _ = WRONG[answer]
    with serving(answer) as server:
        begun = time.monotonic()
        result = _called(f"{server.url}/v1?key={KEY}", deadline_s=1.0 if answer is servers.slow_bytes else 20.0)
    assert (result.value, result.raised) == (None, False)
    assert result.cause == cause
    assert KEY not in str(result) and time.monotonic() - begun < 15


def test_little_is_read_of_an_error_without_an_end():
    sent = [0]

    def counted(asked: Asked) -> None:
        asked.head(503, transfer_encoding="chunked")
        while True:
            sent[0] += asked.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")

    with serving(counted) as server:
        assert _called(server.url).cause == "HTTP status 503"
    assert sent[0] < 32 << 20, "more than the buffers between"


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: answer.__name__)
@pytest.mark.faults
def test_what_passes_is_tried_again(answer):
    _, passes = WRONG[answer]
    left = [answer]

    def first_wrong(asked: Asked) -> None:
        left.pop()(asked) if left else asked.reply({"ok": 1})

    with serving(first_wrong) as server:
        result = _called(server.url, deadline_s=3.0, tries=3)
    assert (result.value == {"ok": 1}) == passes
    assert result.retries == (1 if passes else 0)


def test_nobody_there_and_no_such_host():
    refused = _called(f"http://127.0.0.1:{servers.closed_port()}")
    assert refused.cause == "connection refused" and not refused.raised
    unknown = _called("http://no-such-host.invalid/", tries=1)
    assert unknown.value is None and not unknown.raised and "\n" not in (unknown.cause or "\n")


def test_a_certificate_that_nobody_signed_is_refused_and_one_of_the_environment_is_not(tmp_path, monkeypatch):
    certificate = servers.self_signed(tmp_path)
    with serving(_echo, certificate=certificate) as server:
        result = _called(server.url, tries=3)
        assert result.cause == "the server's certificate is not valid" and result.retries == 0
        assert not server.asked
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        _forget_clients()
        assert _called(server.url).value["body"] == {}
    _forget_clients()


def test_proxies_of_the_environment_are_asked_except_for_this_machine(monkeypatch):
    with serving(lambda asked: asked.reply({"proxied": asked.path})) as proxy, serving(_echo) as server:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        _forget_clients()
        assert _post("http://judge.invalid/v1/x") == {"proxied": "http://judge.invalid/v1/x"}
        assert _post(f"{server.url}/here")["path"] == "/here" and len(proxy.asked) == 1
    _forget_clients()


def _forget_clients() -> None:
    """Have the next call read the environment again."""
    from gspo_jax.calls import http

    http._clients.clear()


def test_no_message_has_a_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    port = servers.closed_port()
    for url in (f"http://user:{KEY}@127.0.0.1:{port}/", f"http://127.0.0.1:{port}/?key={KEY}", f"ftp://{KEY}@host/"):
        assert KEY not in json.dumps(_called(url).__dict__), url
    assert os.environ["JUDGE_KEY"] == KEY
