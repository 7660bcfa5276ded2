"""Bounds on how far a tokenizer grows a text: a program, `python -m gspo_jax.data.growth`, used by backend.py.

A chain of forty replacements of `a` by `aa` makes 2^40 characters of one. Growth is bounded from the parts of
tokenizer.json. Their patterns, which backtrack, are tried on a few texts. No jax or flax here, to start quickly.
"""

import base64
import json
import math
import string
import unicodedata
from collections.abc import Mapping
from typing import Any

import tokenizers

from gspo_jax import limited

PARTS = "normalizer", "pre_tokenizer", "post_processor", "decoder"
MOST_OF_ONE = 1 << 12
"""Maximum characters from one when encoding. Known tokenizers reach a hundred."""
_BYTE_LEVEL = 8
"""Growth by bytes: up to four, each a letter that may have an accent."""
_RUNS = "a", "A", "1", " ", "\n", "-", "é", "日", "ab ", "A1_", ". ", "\r\n\t", "</s>", "'s "
_TEXTS = [run * (1200 // len(run)) + string.printable for run in _RUNS]
"""Long trial texts: the characters that a pattern looks for come late."""


def answer(parts: dict[str, Any]) -> dict[str, Any]:
    """Try the parts of a tokenizer.

    Returns:
      `decoded`, the factor by which its decoder can grow a token's text, or `wrong`, an error to follow the file's
      name.
    """
    model = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    described = {"version": "1.0", "added_tokens": [], "model": model} | parts
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    except BaseException as error:  # a panic of the library is no Exception
        return {"wrong": f"cannot be read as a tokenizer ({limited.quoted(error)}); download or save it again"}
    encoded = _growth_of(backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    decoder, decoded = backend.decoder, _growth_of(backend.decoder)
    if (grown := max(encoded, decoded)) > MOST_OF_ONE:
        return {"wrong": f"can make {grown:.3g} characters of one, more than {MOST_OF_ONE}; use the model's own"}
    for text in _TEXTS:
        try:
            backend.encode(text, add_special_tokens=False)
            if decoder is not None:
                decoder.decode([text])
        except BaseException as error:
            return {"wrong": f"fails on a short text ({limited.quoted(error)}); use the model's own"}
    return {"decoded": decoded}


def _growth_of(*parts: Any) -> float:
    return math.prod(_growth(json.loads(part.__getstate__())) for part in parts if part is not None)


def _growth(part: Mapping[str, Any]) -> float:
    """Return a bound on a part's growth of a text, in `_size`."""
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
        case "BPEDecoder" | "CTC" | "WordPiece":  # a space after each character
            return 2
        case "TemplateProcessing":
            once, pair = (sum("Sequence" in piece for piece in part[name]) for name in ("single", "pair"))
            return once * pair if once > 1 else 1
    return 1


def _size(text: str) -> int:
    """Return the length of the longest Unicode form."""
    return len(unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).lower()))


def _longest_of_map(packed: str) -> int:
    """Return the longest output of SentencePiece's character map: NUL-terminated texts after a trie."""
    data = base64.b64decode(packed)
    texts = data[4 + int.from_bytes(data[:4], "little") :].decode("utf-8", "replace").split("\0")
    return max(map(_size, texts))


if __name__ == "__main__":
    limited.serve(answer)
