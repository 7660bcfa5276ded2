"""No secret survives in a text, however it is written; ordinary sentences do."""

import base64
import json
import re
import time
import urllib.parse

import pytest

from gspo_jax import secrets

VALUE = "p4ss/w+rd \"q'&=%é\\n-end"
"""A secret with all that headers, JSON, literals and URLs write in ways of their own."""
KEY = "Zr8vQm2LtXw5"
"""A secret in no environment variable."""

FORMS = {
    "plain": str,
    "json": json.dumps,
    "json in json": lambda value: json.dumps(json.dumps(value)),
    "literal": repr,
    "path of a url": lambda value: f"http://host/{urllib.parse.quote(value)}",
    "query of a url": lambda value: f"http://host/?{urllib.parse.urlencode({'x': value})}",
    "percent-encoded": lambda value: urllib.parse.quote(value, safe=""),
    "lower-case percent-encoded": lambda value: re.sub("%..", lambda code: code[0].lower(), urllib.parse.quote(value)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["JUDGE_API_KEY", "DB_PASSWORD", "told"])
def test_the_value_of_a_secret_variable_is_replaced_however_it_is_written(form, name, monkeypatch):
    monkeypatch.setattr(secrets, "_told", {"told"})
    monkeypatch.setenv(name, VALUE)
    text = secrets.redacted(f"it said {FORMS[form](VALUE)}, and went")
    assert f"[{name}]" in text and "w+rd" not in text and "end" not in text, text
    assert text.startswith("it said ") and text.endswith(", and went")


def test_a_secret_that_begins_with_another_leaves_no_rest(monkeypatch):
    monkeypatch.setenv("A_KEY", "abcdefgh")
    monkeypatch.setenv("B_KEY", "abcdefgh-12345678")
    assert secrets.redacted("abcdefgh-12345678 abcdefgh") == "[B_KEY] [A_KEY]"


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {KEY}",
        f"authorization: Token {KEY}",
        f"Authorization: {KEY}",
        f"{{'authorization': 'Bearer {KEY}'}}",
        f"(b'Authorization', b'ApiKey {KEY}')",
        f"(b'x-api-key', b'{KEY}')",
        f'{{"api_key": "{KEY}"}}',
        f'{{\\"api_key\\": \\"{KEY}\\"}}',
        f'"password": "two words {KEY}"',
        f"OPENAI_API_KEY={KEY}",
        f"client_secret='{KEY}'",
        f"authorization%20bearer%20{KEY}",
        f"https://user:{KEY}@host/path",
        f"https://user:at@{KEY}@host/path",
        f"https://{KEY}@host/path",
        f"https://host/v1?key={KEY}&x=1",
        f"https://host/v1?x=1&subscription-key={KEY}",
        f"https://host/v1?X-Amz-Signature={KEY}#part",
        f"Incorrect API key provided: sk-{KEY}",
        f"hf_{KEY} is no token",
        f"Authorization: Basic {base64.b64encode(f'user:{KEY}'.encode()).decode()}",
    ],
)
def test_what_looks_like_a_key_is_replaced(text):
    said = secrets.redacted(text)
    assert KEY not in said and "dXNlcj" not in said and "[secret]" in said, said
    assert secrets.redacted(said).count(KEY) == 0


@pytest.mark.parametrize(
    "text",
    [
        "a basic understanding of basic functionality.",
        "the token budget is 512 tokens: max_tokens=1024, tokenizer=tokenizer.json",
        "the author: somebody@example.com, at https://example.com/a?page=2",
        "https://example.com/@user/page is not valid",
        "HTTP status 401: the key is not valid",
        "score 0.5, password",
        "no reward 'judge'; did you mean 'judges'?",
    ],
)
def test_ordinary_texts_stay(text):
    assert secrets.redacted(text) == text


def test_long_texts_take_no_longer_than_their_length():
    begun = time.monotonic()
    pieces = (
        "a",
        "://",
        "key=",
        "?",
        "bearer ",
        "api_key",
        "password'",
        "basic+",
        "\\",
        "token ",
        "eyJ-",
        "eyJaaaaaaaa.",
    )
    for piece in pieces:
        secrets.redacted(piece * (100_000 // len(piece)))
    assert time.monotonic() - begun < 5
