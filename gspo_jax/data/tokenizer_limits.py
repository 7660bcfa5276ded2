"""What a tokenizer of strangers may do to a text: grow it so far and no farther, and come to an end.

How far it can grow a text, its parts say: a chain of forty replacements of `a` by `aa` makes 2^40 characters of one. Its
patterns backtrack, and are tried on a few texts in a program of its own: `python -m gspo_jax.data.tokenizer_limits`.
"""

import base64
import functools
import json
import math
import string
import unicodedata
from collections.abc import Mapping
from typing import Any

import tokenizers

from gspo_jax import limited

MOST_OF_ONE = 1 << 12
"""Characters that may become of one in a text that is encoded; of known tokenizers, a hundred might."""
MOST_OF_A_TOKEN = 1 << 14
"""Characters that may become of one token that is decoded; those of known tokenizers have up to a thousand."""
_BYTE_LEVEL = 8
"""Size of what a character becomes byte by byte: of each of up to four, a letter that may have an accent."""
_RUNS = "a", "A", "1", " ", "\n", "-", "é", "日", "ab ", "A1_", ". ", "\r\n\t", "</s>", "'s "
_TEXTS = [run * (1200 // len(run)) + string.printable for run in _RUNS]
"""Texts that the parts are tried with: long ones, in which whatever character a pattern looks for comes late."""

_program = limited.Process("gspo_jax.data.tokenizer_limits")


def fault(backend: tokenizers.Tokenizer) -> str:
    """Return what is wrong with a tokenizer in words that go on behind it; "" if nothing is."""
    before = [_described(part) for part in (backend.normalizer, backend.pre_tokenizer)]
    grown = math.prod(map(_growth, [*before, _described(backend.post_processor)]))
    if grown > MOST_OF_ONE:
        return f"can make {grown:.3g} characters of one, and may make {MOST_OF_ONE}"
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
    decoder = _described(backend.decoder)
    if (grown := longest * _growth(decoder)) > MOST_OF_A_TOKEN:
        return f"can make {grown:.3g} characters of a token, and may make {MOST_OF_A_TOKEN}"
    return _tried(json.dumps({"normalizer": before[0], "pre_tokenizer": before[1], "decoder": decoder}))


def _described(part: Any) -> dict[str, Any] | None:
    """A part as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _growth(part: Mapping[str, Any] | None) -> float:
    """Times by which a part can grow a text: a bound, of sizes (`_size`), that no Unicode form changes."""
    if part is None:
        return 1
    match part["type"]:
        case "Sequence":
            (inner,) = (value for value in part.values() if isinstance(value, list))
            return math.prod(map(_growth, inner))
        case "Replace":
            replaced = part["pattern"].get("String")
            if replaced:
                return max(1, _size(part["content"]) / len(replaced))
            return 1 + 2 * _size(part["content"])  # a pattern may match every character, and nothing before each
        case "Prepend":
            return 1 + _size(part["prepend"])
        case "Precompiled":
            return max(1, _longest_of_map(part["precompiled_charsmap"]))
        case "BertNormalizer":
            return 3 if part["handle_chinese_chars"] else 1
        case "ByteLevel":
            return _BYTE_LEVEL * (2 if part.get("add_prefix_space") else 1)
        case "Metaspace":
            return 2 * _size(part["replacement"])
        case "BPEDecoder" | "CTC" | "WordPiece":  # a space behind each character
            return 2
        case "TemplateProcessing":
            once, pair = (sum("Sequence" in piece for piece in part[name]) for name in ("single", "pair"))
            return once * pair if once > 1 else 1
    return 1


def _size(text: str) -> int:
    """Characters of a text in the longest of its Unicode forms."""
    return len(unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).lower()))


def _longest_of_map(packed: str) -> int:
    """Size of the longest text that SentencePiece's map of characters writes: behind a trie, each ends with a NUL."""
    data = base64.b64decode(packed)
    texts = data[4 + int.from_bytes(data[:4], "little") :].decode("utf-8", "replace").split("\0")
    return max(map(_size, texts))


@functools.cache
def _tried(parts: str) -> str:
    """What becomes of the texts with these parts; "" if all is well."""
    try:
        return _program.ask(json.loads(parts))
    except limited.TooMuch as error:
        return f"{error} on a short text"


def answer(parts: dict[str, Any]) -> str:
    """Write the texts with the parts of a tokenizer; return what `fault` does."""
    model = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    backend = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model} | parts))
    for text in _TEXTS:
        try:
            backend.encode(text, add_special_tokens=False)
            if backend.decoder is not None:
                backend.decoder.decode([text])
        except BaseException as error:  # a panic of the library is no Exception
            return f"fails on a short text ({' '.join(str(error).split())[:200]})"
    return ""


if __name__ == "__main__":
    limited.serve(answer)
