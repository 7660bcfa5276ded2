"""Texts without secrets, for logs, run folders and error messages."""

import json
import os
import re
import urllib.parse

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
"""Of environment variables whose values are secret."""
_SHORTEST = 6
"""Characters of the shortest value that is taken for a secret."""
_WORDS = (  # before a value that is secret
    r"(?:api[-_]?key|(?:access|auth|refresh|session|id)[-_]?token|private[-_]?key|client[-_]?secret|authorization"
    r"|password|passwd|credentials?)"
)
_SHAPES = (
    (re.compile(r"(?i)(?<![A-Za-z])(bearer)((?:\s|%20|\+)+)[\w.~+/=%-]{6,}"), r"\1\2[secret]"),
    (
        re.compile(r"(?i)(?<![A-Za-z])(basic)((?:\s|%20|\+)+)(?=[A-Za-z+/]{0,200}[\d=]|[\w+/]{24})[\w+/=%-]{6,}"),
        r"\1\2[secret]",
    ),
    (
        re.compile(  # in a header, JSON, an argument or a pair of texts
            rf"(?i)({_WORDS}[\w-]{{0,20}}(?:\\*['\"]?\s*[:=]\s*b?\\*['\"]?|\\*['\"],\s*b?\\*['\"]))"
            r"(?:(?<=['\"])[^'\"\n]{3,500}|(?:(?:bearer|basic|token|apikey)\s+)?[^\s'\",&]{6,})"
        ),
        r"\1[secret]",
    ),
    (re.compile(r"(?i)([?&][\w-]{0,20}(?:key|token|secret|password|sig|signature|auth)=)[^\s&'\"#]+"), r"\1[secret]"),
    (re.compile(r"\b(?:sk|pk|hf|gh[opsu]|github_pat|glpat|gsk|xai|nvapi|xox[abp])[-_][A-Za-z0-9_-]{8,}"), "[secret]"),
    (re.compile(r"\b(?:AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,500}\.[\w-]{8,}\.[\w-]*)"), "[secret]"),
    (re.compile(r"(://)[^/\s@?#]{1,500}@(?:[^/\s@?#]{1,500}@)*"), r"\1[secret]@"),
)
"""What a secret looks like in a header, JSON, a URL or alone."""
_told = set[str]()


def keep(name: str) -> None:
    """Treat the value of an environment variable as a secret, whatever its name."""
    _told.add(name)


def redacted(text: str) -> str:
    """Return a text with secrets replaced: values of secret environment variables, as they are, quoted or
    percent-encoded, by [NAME], and what looks like a key in a header, JSON or a URL."""
    found = {
        form: name
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and (name in _told or _NAMES.search(name))
        for form in _forms(value)
    }
    for form in sorted(found, key=len, reverse=True):  # one secret may begin with another
        if form in text:
            text = text.replace(form, f"[{found[form]}]")
    for shape, by in _SHAPES:
        text = shape.sub(by, text)
    return text


def _forms(value: str) -> set[str]:
    """Return a secret as it is written in headers, in JSON (also in JSON), in Python's literals, and in URLs."""
    forms = {value, value.strip()}
    forms |= {json.dumps(form, ensure_ascii=ascii_)[1:-1] for form in forms for ascii_ in (True, False)}
    forms |= {quote(form)[1:-1] for form in forms for quote in (json.dumps, repr)}
    for each in (value, value.strip()):
        in_urls = {quote(each) for quote in (urllib.parse.quote, urllib.parse.quote_plus)}
        in_urls.add(urllib.parse.quote(each, safe=""))
        forms |= in_urls | {re.sub("%..", lambda code: code[0].lower(), form) for form in in_urls}
    return {form for form in forms if len(form) >= _SHORTEST}
