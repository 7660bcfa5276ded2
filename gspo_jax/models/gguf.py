"""GGUF files, the format of llama.cpp: metadata, and tensors as float32.

The header is read here, with every count and offset checked against the file before it is used. The package `gguf`
dequantises (extra `gguf`).
"""

import dataclasses
import importlib
import itertools
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gspo_jax import foreign, installs
from gspo_jax.errors import UserError
from gspo_jax.models.config import Llama3Rope, plain_frequencies

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of `struct` by the number of a metadata type."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Entry of a tensor in the header."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in numpy and Hugging Face."""
    kind: int
    """Number of ggml's type."""
    begin: int
    """Byte in the file."""


class File:
    """A GGUF file: `metadata` and `tensors` by name."""

    def __init__(self, path: Path):
        """Read the header.

        Raises:
          UserError: no such file, or it is truncated, damaged, or of another format; or `gguf` is not installed.
        """
        self.path = path
        self._gguf = _package()
        if not foreign.is_file(path):
            raise UserError(f"{path} does not exist; give a .gguf file")
        if path.stat().st_size < 24:
            self._refuse("is too short for a header")
        self._bytes = np.memmap(path, np.uint8, "r")
        self._at = 0
        magic, version, tensors, pairs = struct.unpack("<4sIQQ", self._take(24))
        if magic != _MAGIC:
            self._refuse(f"begins with {magic!r}, not with {_MAGIC!r}")
        if version not in _VERSIONS:
            self._refuse(f"has version {version}; supported: 2 and 3, little-endian")
        self.metadata: dict[str, Any] = {}
        for _ in self._counted(pairs, 12, "metadata"):
            key = self._string()
            if key in self.metadata:
                self._refuse(f"has {key:.100} twice")
            self.metadata[key] = self._value(self._number("I"))
        entries = [self._entry() for _ in self._counted(tensors, 24, "tensors")]
        self.tensors = self._placed(entries)

    def read(self, tensor: Tensor, part: int | None = None) -> np.ndarray:
        """Return a tensor as float32, or its `part` along the first dimension."""
        kind = self._gguf.GGMLQuantizationType(tensor.kind)
        end = tensor.begin + self._size(tensor)
        shape, raw = tensor.shape, self._bytes[tensor.begin : end]
        if part is not None:
            shape, raw = shape[1:], raw.reshape(shape[0], -1)[part]
        rows = raw.reshape(*shape[:-1], -1)
        try:
            return np.asarray(self._gguf.dequantize(np.ascontiguousarray(rows), kind), np.float32).reshape(shape)
        except NotImplementedError:
            self._refuse(f"holds {tensor.name} as {kind.name}, which the package gguf cannot dequantise", "convert it")

    def check_kinds(self) -> None:
        """Raise a UserError for a tensor that cannot be dequantised, before any is."""
        tried = {tensor.kind: tensor for tensor in self.tensors.values()}
        for tensor in tried.values():
            shape = (1, self._blocks(tensor)[0])
            self.read(dataclasses.replace(tensor, shape=shape))

    def _refuse(self, what: str, remedy: str = "download it again") -> NoReturn:
        raise UserError(f"{self.path} {what}; {remedy}")

    def _take(self, size: int) -> bytes:
        if size > len(self._bytes) - self._at:
            self._refuse(f"ends inside its header, at byte {len(self._bytes)}")
        self._at += size
        return self._bytes[self._at - size : self._at].tobytes()

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _counted(self, count: int, least: int, what: str) -> range:
        """Return range(count), if so many items of at least `least` bytes fit the rest of the file."""
        if count > (len(self._bytes) - self._at) // least:
            self._refuse(f"says that it has {count} {what}, which do not fit its {len(self._bytes)} bytes")
        return range(count)

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            self._refuse("has text that is not UTF-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            self._refuse(f"has metadata of the unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner == _STRING:
            return [self._string() for _ in self._counted(count, 8, "texts")]
        if inner not in _SCALARS:
            self._refuse(f"has an array of the unsupported type {inner}")
        size = struct.calcsize(f"<{_SCALARS[inner]}")
        self._counted(count, size, "numbers")
        return np.frombuffer(self._take(count * size), f"<{_SCALARS[inner]}").tolist()

    def _entry(self) -> Tensor:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            self._refuse(f"says that {name:.100} has {dimensions} dimensions, not 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in list(self._gguf.GGMLQuantizationType):
            self._refuse(f"holds {name:.100} as type {kind}, which the package gguf does not know", "update gguf")
        tensor = Tensor(name, shape, kind, offset)
        block, _ = self._blocks(tensor)
        if min(shape) < 1 or shape[-1] % block:
            self._refuse(f"says that {name:.100} is {list(shape)}, in blocks of {block}")
        return tensor

    def _placed(self, entries: list[Tensor]) -> dict[str, Tensor]:
        """Move offsets behind the header; check that no two tensors share bytes."""
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 2**20 or align & (align - 1):
            self._refuse(f"has the alignment {align!r:.100}, not a power of two")
        first = -(-self._at // align) * align
        placed = [dataclasses.replace(entry, begin=entry.begin + first) for entry in entries]
        end, before = first, "the header"
        for tensor in sorted(placed, key=lambda tensor: tensor.begin):
            if tensor.begin < end or tensor.begin % align:
                self._refuse(f"places {tensor.name:.100} at byte {tensor.begin}, inside {before:.100} or unaligned")
            end, before = tensor.begin + self._size(tensor), tensor.name
            if end > len(self._bytes):
                self._refuse(f"has {len(self._bytes)} bytes, and {tensor.name:.100} ends at byte {end}")
        found = {tensor.name: tensor for tensor in placed}
        if len(found) < len(placed):
            self._refuse("has two tensors of one name")
        return found

    def _blocks(self, tensor: Tensor) -> tuple[int, int]:
        """Return elements and bytes of a block."""
        return self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(tensor.kind)]

    def _size(self, tensor: Tensor) -> int:
        block, size = self._blocks(tensor)
        return math.prod(tensor.shape) // block * size


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise UserError(f"reading GGUF needs the package gguf; run {installs.of_extra('gguf')}") from None


ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""`model_type` of config.json by `general.architecture`."""

_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_ONLY_ROUTED = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_NUMBERS = ("attention.key_length", "rope.dimension_count", "rope.freq_base", "attention.layer_norm_rms_epsilon")
_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all published models with the tensor `rope_freqs.weight`, which holds only what comes of them."""


def config_fields(file: File) -> dict[str, Any]:
    """Return the fields of config.json.

    Raises:
      UserError: an architecture, or a feature of it, that is not implemented here, or a missing field.
    """
    facts = file.metadata
    name = facts.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(f"{file.path} has the architecture {name!r:.100}; supported: {', '.join(ARCHITECTURES)}")
    if (parts := facts.get("split.count", 1)) not in (0, 1):
        raise UserError(f"{file.path} is one of {parts!r:.100} files of a model; supported: a model in one file")
    own = {key.removeprefix(f"{name}."): value for key, value in facts.items() if key.startswith(f"{name}.")}
    if own.get("expert_count", 0) != 0 and name != "qwen3moe":
        raise UserError(f"{file.path} is a {name} with {own['expert_count']} experts; supported: qwen3moe with experts")
    sizes = _SIZES | (_ONLY_ROUTED if name == "qwen3moe" else {})
    for key in (*sizes.values(), "attention.layer_norm_rms_epsilon"):
        if key not in own:
            raise UserError(f"{file.path} has no {name}.{key}; download it again")
    for key in {*sizes.values(), *_NUMBERS} & own.keys():
        if not isinstance(own[key], (int, float)) or not 0 < own[key] < 2**31:
            raise UserError(f"{file.path}: {name}.{key} is {own[key]!r:.100}; supported: one number above 0")
    if own["block_count"] > len(file.tensors):
        raise UserError(
            f"{file.path} says that it has {own['block_count']} layers, and has {len(file.tensors)} tensors; download "
            "it again"
        )
    stacked = file.tensors.get("blk.0.ffn_gate_exps.weight")
    if name == "qwen3moe" and (stacked is None or stacked.shape[0] != own["expert_count"]):
        raise UserError(f"{file.path} has no tensor of {own['expert_count']} experts in layer 0; download it again")
    fields = {theirs: own[key] for theirs, key in sizes.items()}
    heads = fields["num_attention_heads"]
    head_dim = own.get("attention.key_length", fields["hidden_size"] // heads)
    if own.get("rope.dimension_count", head_dim) != head_dim:
        raise UserError(
            f"{file.path} turns {own['rope.dimension_count']} of {head_dim} dimensions of a head; supported: all"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path} has no matrix token_embd.weight; download it again")
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "llama3"):
        raise UserError(f"{file.path} has rope.scaling.type {kind!r:.100}; supported: none, and Llama 3's")
    return fields | {
        "model_type": ARCHITECTURES[name],
        "vocab_size": embedding.shape[0],
        "intermediate_size": own.get("feed_forward_length", own.get("expert_feed_forward_length")),
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(own.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, head_dim, own.get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "norm_topk_prob": True,
        "eos_token_id": facts.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: Any) -> Any:
    """Return the shortest decimal of a float32: 1e-5, not 9.99999747e-6."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(file: File, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return Llama 3's scaling if the file has its divisors of frequencies."""
    tensor = file.tensors.get(ROPE)
    if tensor is None:
        return None
    divisors = file.read(tensor)
    scaling = Llama3Rope(factor=float(divisors.max()), **_LLAMA3)
    expected = plain_frequencies(theta, head_dim) / scaling.frequencies(theta, head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UserError(f"{file.path} has a {ROPE} that is not Llama 3's; supported: only that")
    return {"rope_type": "llama3"} | dataclasses.asdict(scaling)


ROPE = "rope_freqs.weight"

_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.weight")


def sources(file: File) -> dict[str, tuple[Tensor, int | None]]:
    """Return the tensor, and the expert inside it, of every Hugging Face name.

    Raises:
      UserError: a tensor that no implemented model has, such as a bias.
    """
    found: dict[str, tuple[Tensor, int | None]] = {}
    for name, tensor in file.tensors.items():
        layer = _IN_LAYER.fullmatch(name)
        if name in _MODEL:
            found[_MODEL[name]] = tensor, None
        elif layer and layer[2] in _LAYER:
            found[f"model.layers.{int(layer[1])}.{_LAYER[layer[2]]}.weight"] = tensor, None
        elif layer and layer[2] in _EXPERTS:
            inside = f"model.layers.{int(layer[1])}.mlp.experts"
            for e in range(tensor.shape[0]):
                found[f"{inside}.{e}.{_EXPERTS[layer[2]]}.weight"] = tensor, e
        elif name != ROPE:
            raise UserError(f"{file.path} has the tensor {name!r:.100}, which no supported model has")
    return found


def _half_split(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo llama.cpp's order of a Llama's query and key rows: pairs side by side in a head, not half a head apart."""
    return matrix.reshape(-1, head_dim // 2, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def check(file: File, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a UserError unless the file has exactly the expected tensors, of a kind that can be dequantised."""
    found = sources(file)
    for name in itertools.chain(expected, found):
        if (name in expected) != (name in found):
            says = "lacks" if name in expected else "has"
            raise UserError(f"{file.path} {says} a tensor for {name}, against its metadata; download it again")
    for name, shape in expected.items():
        tensor, part = found[name]
        has = tensor.shape if part is None else tensor.shape[1:]
        if has != shape:
            raise UserError(
                f"{file.path}: {tensor.name} is {list(has)}, by the metadata {list(shape)}; download it again"
            )
    file.check_kinds()


def tensors(
    file: File, expected: Mapping[str, tuple[int, ...]], *, head_dim: int, interleaved: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield Hugging Face tensors in the order of `expected`, one at a time, in float32.

    `interleaved`: query and key rows are in the order of a Llama's.
    """
    found = sources(file)
    for name in expected:
        value = file.read(*found[name])
        turned = interleaved and name.endswith(("q_proj.weight", "k_proj.weight"))
        yield name, _half_split(value, head_dim) if turned else value
