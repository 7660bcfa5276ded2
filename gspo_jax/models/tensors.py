"""Tensors of a Hugging Face checkpoint: their mapping to parameters, and slices read from safetensors files."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import struct
from collections.abc import Container, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from gspo_jax import foreign, signals
from gspo_jax.errors import UserError
from gspo_jax.models import fp8, int8
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.config_json import CONFIG, read_if_any, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE = re.compile(r"[\w .+-]+\.safetensors")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The checkpoint tensors of one of our parameters, and the order of their dimensions."""

    tensor: str
    """Name there, with "{L}" and "{E}" for our layer and expert axes, which are separate tensors there."""
    axes: str
    """"ours -> theirs", one letter per dimension; H is all heads side by side."""
    half: int | None = None
    """0 or 1 if their second dimension concatenates two of our parameters."""
    layers: range | None = None
    """Checkpoint numbers of our layers; None: as ours."""
    float32: bool = False
    """Written in float32, whatever the other tensors' dtype."""
    module: str = ""
    """Name in transformers 5 of the module with this matrix, one per "{L}" and "{E}"; empty: as the tensor's."""

    @property
    def ours(self) -> list[str]:
        """One letter per dimension."""
        return self.axes.split(" -> ")[0].split()

    @property
    def theirs(self) -> list[str]:
        """One letter per dimension."""
        return self.axes.split(" -> ")[1].split()

    @property
    def outer(self) -> list[str]:
        """Our leading axes, stored as separate tensors."""
        return [axis for axis in self.ours if f"{{{axis}}}" in self.tensor]

    def name(self, at: Mapping[str, int]) -> str:
        """Return their tensor's name at an outer index."""
        return self.tensor.format(**{axis: self.layer(i) if axis == "L" else i for axis, i in at.items()})

    def layer(self, ours: int) -> int:
        """Return the checkpoint's number of our layer."""
        return ours if self.layers is None else self.layers[ours]

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of each of their tensors."""
        size = dict(zip(self.ours, ours, strict=True))
        shape = [size[axis] for axis in self.theirs]
        if self.half is not None:
            shape[1] *= 2
        return tuple(shape)

    def entries(self, ours: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield every outer index with their tensor's name."""
        return self._named(self.tensor, ours)

    def modules(self, ours: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield every index of a matrix with the name of its module."""
        return self._named(self.module or self.tensor.removesuffix(".weight"), ours)

    def _named(self, template: str, ours: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        outer = [axis for axis in self.ours if f"{{{axis}}}" in template]
        for at in itertools.product(*(range(n) for n in ours[: len(outer)])):
            index = dict(zip(outer, at, strict=True))
            yield at, template.format(**{axis: self.layer(i) if axis == "L" else i for axis, i in index.items()})

    def to_theirs(self, ours: np.ndarray) -> np.ndarray:
        """Return one of their tensors, or its `half`, from our parameter at an outer index."""
        inner = self.ours[len(self.outer) :]
        return ours.transpose([inner.index(axis) for axis in self.theirs])

    def read(
        self, checkpoint: "Checkpoint", ours: tuple[int, ...], spans: tuple[range, ...], dtype: DTypeLike
    ) -> np.ndarray:
        """Read the part of our parameter (of shape `ours`) at `spans`, and little else."""
        out = np.empty([len(s) for s in spans], jnp.dtype(dtype))
        for at, piece in self._pieces(checkpoint, ours, spans):
            out[at] = piece
        return out

    def read_int8(
        self, checkpoint: "Checkpoint", ours: tuple[int, ...], spans: tuple[range, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read a matrix, [..., input, output], in int8, and the float32 scales of its columns at `spans`.

        A column's scale needs all its rows, so all are read.
        """
        *outer, rows, columns = spans
        out = np.empty([len(s) for s in spans], np.int8)
        scales = np.empty([len(s) for s in (*outer, columns)], np.float32)
        for at, piece in self._pieces(checkpoint, ours, (*outer, range(ours[-2]), columns)):
            values, scale = int8.quantize(piece)
            out[at], scales[at] = values[..., rows.start : rows.stop, :], scale[..., 0, :]
        return out, scales

    def _pieces(
        self, checkpoint: "Checkpoint", ours: tuple[int, ...], spans: tuple[range, ...]
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        size = dict(zip(self.ours, ours, strict=True))
        span = dict(zip(self.ours, spans, strict=True))
        window = [slice(span[axis].start, span[axis].stop) for axis in self.theirs]
        if self.half is not None:
            skip = self.half * size[self.theirs[1]]
            window[1] = slice(window[1].start + skip, window[1].stop + skip)
        order = [self.theirs.index(axis) for axis in self.ours[len(self.outer) :]]
        for local in itertools.product(*(range(len(span[axis])) for axis in self.outer)):
            at = {axis: span[axis][i] for axis, i in zip(self.outer, local, strict=True)}
            yield local, checkpoint.read(self.name(at), tuple(window)).transpose(order)


_MODEL = {
    "embed": Rule("model.embed_tokens.weight", "V D -> V D"),
    "norm": Rule("model.norm.weight", "D -> D"),
    "head": Rule("lm_head.weight", "D V -> V D"),
}
_LAYER = "model.layers.{L}."

ATTENTION = {
    "attention_norm": Rule(_LAYER + "input_layernorm.weight", "L D -> D"),
    "attention.q": Rule(_LAYER + "self_attn.q_proj.weight", "L D H -> H D"),
    "attention.k": Rule(_LAYER + "self_attn.k_proj.weight", "L D H -> H D"),
    "attention.v": Rule(_LAYER + "self_attn.v_proj.weight", "L D H -> H D"),
    "attention.o": Rule(_LAYER + "self_attn.o_proj.weight", "L H D -> D H"),
    "mlp_norm": Rule(_LAYER + "post_attention_layernorm.weight", "L D -> D"),
}
"""Grouped-query attention, and the norms of a layer."""

ATTENTION_BIAS = {
    f"attention.{name}_bias": Rule(_LAYER + f"self_attn.{name}_proj.bias", "L H -> H") for name in ("q", "k", "v")
}


_LATENT = {
    "attention_norm": ATTENTION["attention_norm"],
    "attention.kv_a": Rule(_LAYER + "self_attn.kv_a_proj_with_mqa.weight", "L D R -> R D"),
    "attention.kv_norm": Rule(_LAYER + "self_attn.kv_a_layernorm.weight", "L R -> R"),
    "attention.kv_b": Rule(_LAYER + "self_attn.kv_b_proj.weight", "L R H -> H R"),
    "attention.o": ATTENTION["attention.o"],
    "mlp_norm": ATTENTION["mlp_norm"],
}
_LATENT_QUERIES = {
    "attention.q_a": Rule(_LAYER + "self_attn.q_a_proj.weight", "L D R -> R D"),
    "attention.q_norm": Rule(_LAYER + "self_attn.q_a_layernorm.weight", "L R -> R"),
    "attention.q_b": Rule(_LAYER + "self_attn.q_b_proj.weight", "L R H -> H R"),
}


def latent_attention(config: ModelConfig) -> dict[str, Rule]:
    """Return the rules of multi-head latent attention, and of a layer's norms."""
    assert config.latent is not None, "the family sets it"
    direct = {"attention.q": ATTENTION["attention.q"]}
    rules = _LATENT | (direct if config.latent.query_rank is None else _LATENT_QUERIES)
    biased = ("attention.q_a", "attention.kv_a", "attention.o") if config.attention_bias else ()
    names = {path: rules[path].tensor.replace(".weight", ".bias") for path in biased if path in rules}
    return rules | {path + "_bias": Rule(name, "L R -> R") for path, name in names.items()}


HEAD_NORMS = {
    "attention.q_norm.scale": Rule(_LAYER + "self_attn.q_norm.weight", "L h -> h"),
    "attention.k_norm.scale": Rule(_LAYER + "self_attn.k_norm.weight", "L h -> h"),
}

DENSE = {
    "mlp.gate": Rule(_LAYER + "mlp.gate_proj.weight", "L D F -> F D"),
    "mlp.up": Rule(_LAYER + "mlp.up_proj.weight", "L D F -> F D"),
    "mlp.down": Rule(_LAYER + "mlp.down_proj.weight", "L F D -> D F"),
}

_EXPERTS = {
    "mlp.router": Rule(_LAYER + "mlp.gate.weight", "L D E -> E D"),
    "mlp.gate": Rule(_LAYER + "mlp.experts.{E}.gate_proj.weight", "L E D F -> F D"),
    "mlp.up": Rule(_LAYER + "mlp.experts.{E}.up_proj.weight", "L E D F -> F D"),
    "mlp.down": Rule(_LAYER + "mlp.experts.{E}.down_proj.weight", "L E F D -> D F"),
}
_FUSED = _EXPERTS | {  # transformers 5 in memory, and on disk with save_original_format=False
    "mlp.gate": Rule(_LAYER + "mlp.experts.gate_up_proj", "L E D F -> E F D", half=0),
    "mlp.up": Rule(_LAYER + "mlp.experts.gate_up_proj", "L E D F -> E F D", half=1),
    "mlp.down": Rule(_LAYER + "mlp.experts.down_proj", "L E F D -> E D F"),
}
ROUTER_BIAS = {
    "mlp.choice_bias": Rule(_LAYER + "mlp.gate.e_score_correction_bias", "L E -> E", float32=True),
}

SHARED_GATE = {"mlp.shared_gate": Rule(_LAYER + "mlp.shared_expert_gate.weight", "L D G -> G D")}


def shared(name: str) -> dict[str, Rule]:
    """Return the rules of shared experts, called `name` there."""

    def moved(rule: Rule) -> Rule:
        return dataclasses.replace(rule, tensor=rule.tensor.replace("mlp.", f"mlp.{name}."))

    return {path.replace("mlp.", "mlp.shared."): moved(rule) for path, rule in DENSE.items()}


def experts(names: Container[str], *, first: int = 0) -> dict[str, Rule]:
    """Return the rules of a router and SwiGLU experts, fused if `names` has fused tensors of layer `first`."""
    return _FUSED if _FUSED["mlp.gate"].name({"L": first}) in names else _EXPERTS


def of_model(config: ModelConfig, *stacks: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rule of every parameter, by path.

    Args:
      stacks: each stack's rules of a layer, by the path inside the block.
    """
    rules = {path: rule for path, rule in _MODEL.items() if not (path == "head" and config.tie_word_embeddings)}
    for i, (layers, own) in enumerate(zip(config.layer_numbers, stacks, strict=True)):
        rules |= {f"layers.{i}.{path}": dataclasses.replace(rule, layers=layers) for path, rule in own.items()}
    return rules


_LEFT_OUT = {"vision": ("model.visual.",), "multi-token prediction": ("mtp.",)}
"""Tensors that published folders hold beside a language model: what they are for, and how their names begin."""

_MAPPED = 2**28
"""Bytes read before files are reopened: mapped pages count as memory."""


_COMPARED = 4096
"""Rows compared at a time."""

_FLOATS = "F32", "BF16", "F16", "F64"


def _left_out(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return `_LEFT_OUT` of a config.json."""
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    layers = range(first, first + min(count, 64)) if isinstance(first, int) and isinstance(count, int) else ()
    further = "multi-token prediction"
    return _LEFT_OUT | {further: (*_LEFT_OUT[further], *(f"model.layers.{i}." for i in layers))}


@functools.cache
def _say_once(text: str) -> None:
    if jax.process_index() == 0:
        signals.say(text)


class Checkpoint:
    """The tensors of a folder, those in fp8 dequantised. Raises a UserError for a missing or damaged file."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack):
        self.folder = folder
        self.files: dict[str, str] = {}
        """File name of each tensor."""
        self._opened: dict[str, Any] = {}
        self._read = 0
        config = read_if_any(folder / CONFIG)
        self._blocks = fp8.blocks(folder / CONFIG, config.get("quantization_config"))
        self._places: dict[str, dict[str, fp8.Place]] = {}
        stack.callback(self._close)
        for name in self._file_names():
            if not foreign.is_file(folder / name, inside=folder):
                raise UserError(f"{folder / name} does not exist though {INDEX} names it; download it again")
            self.files |= dict.fromkeys(self._open(name).keys(), name)
        for purpose, prefixes in _left_out(config).items():
            if left := [name for name in self.files if name.startswith(prefixes)]:
                _say_once(f"{folder}: left out {len(left)} tensors for {purpose}, such as {left[0]}")
                self.files = {name: file for name, file in self.files.items() if not name.startswith(prefixes)}

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            file = self.folder / name
            try:
                self._opened[name] = safe_open(file, framework="np").__enter__()
            except SafetensorError as error:
                raise UserError(
                    f"{file} is not a complete safetensors file ({error!s:.200}); download it again"
                ) from error
        return self._opened[name]

    def _close(self) -> None:
        for handle in self._opened.values():
            handle.__exit__(None, None, None)
        self._opened, self._read = {}, 0

    def _file_names(self) -> list[str]:
        if foreign.is_file(self.folder / WEIGHTS, inside=self.folder):
            return [WEIGHTS]
        missing = f"{self.folder} has neither {WEIGHTS} nor {INDEX}; save the model as safetensors"
        weight_map = read_json(self.folder / INDEX, missing).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{self.folder / INDEX} has no weight_map; download it again")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not _FILE.fullmatch(name):
                raise UserError(
                    f"{self.folder / INDEX} says that {tensor} is in {name!r:.100}; only .safetensors files in the "
                    "same folder are opened, so download it again"
                )
        return sorted(set(weight_map.values()))

    def check(self, expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """Raise a UserError unless the folder holds exactly the expected tensors, with these shapes, as floats.

        A `tied` model's checkpoint may also hold its head, if equal to the embedding; a matrix in fp8 has its scales.
        """
        head, scales = _MODEL["head"].tensor, set()
        for name, shape in expected.items():
            if name not in self.files:
                if (packed := self._packed(name)) is not None:
                    raise UserError(f"{self.folder} holds {packed}, quantised, in place of {name}; {fp8.REMEDY}")
                remedy = ", or set tie_word_embeddings to true there if it is the embedding" if name == head else ""
                asked = f"{self.folder} has no tensor {name}, which its {CONFIG} asks for"
                raise UserError(f"{asked}; download it again{remedy}")
            file = self.files[name]
            found = self._open(file).get_slice(name)
            if tuple(found.get_shape()) != shape:
                has = list(found.get_shape())
                raise UserError(f"{self.folder / file}: {name} is {has}, {CONFIG} says {list(shape)}; download both")
            if found.get_dtype() == fp8.DTYPE:
                scales.add(self._checked_scale(name, shape))
            elif (kind := found.get_dtype()) not in _FLOATS:
                supported = f"supported: {', '.join(_FLOATS)}; {fp8.REMEDY}"
                raise UserError(f"{self.folder / file}: {name} is {kind}; {supported}")
        if extra := sorted(self.files.keys() - expected.keys() - scales - ({head} if tied else set())):
            found = f"{self.folder} holds {len(extra)} tensors that a model of its {CONFIG} does not have"
            raise UserError(f"{found}, such as {extra[0]}; download both again")
        if tied and head in self.files and not self._are_equal(head, embed := _MODEL["embed"].tensor):
            raise UserError(
                f"{self.folder} holds {head} beside another {embed}, though its {CONFIG} ties them; set "
                "tie_word_embeddings to false there if the model was trained so, or remove the tensor"
            )

    def _packed(self, name: str) -> str | None:
        """Return the tensor that other quantisations store in place of this one, if it is there."""
        stem = name.removesuffix(".weight")
        names = f"{stem}.qweight", f"{stem}.weight_packed", f"{stem}_blocks"  # GPTQ and AWQ; compressed-tensors; mxfp4
        return next((packed for packed in names if packed in self.files), None)

    def _checked_scale(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the name of a matrix's scales. Raise a UserError unless the folder holds them."""
        file, scale = self.folder / self.files[name], name + fp8.SCALE
        if self._blocks is None or len(shape) < 2 or scale not in self.files:
            why = f"without {scale}" if scale not in self.files else f"without blocks in its {CONFIG}"
            raise UserError(f"{file}: {name} is {fp8.DTYPE} {why}; supported: a scale per block; {fp8.REMEDY}")
        found, grid = self._slice(scale), self._blocks.grid(shape)
        if tuple(found.get_shape()) != grid or found.get_dtype() not in _FLOATS:
            raise UserError(
                f"{file}: {scale} is {found.get_dtype()} {list(found.get_shape())}, and {name} in blocks of "
                f"{self._blocks.rows} × {self._blocks.columns} needs {' or '.join(_FLOATS)} {list(grid)}; {fp8.REMEDY}"
            )
        return scale

    def _are_equal(self, one: str, other: str) -> bool:
        shapes = [self._open(self.files[name]).get_slice(name).get_shape() for name in (one, other)]
        if shapes[0] != shapes[1]:
            return False
        for start in range(0, shapes[0][0], _COMPARED):
            rows = (slice(start, min(start + _COMPARED, shapes[0][0])),)
            a, b = (self.read(name, rows).astype(np.float32) for name in (one, other))
            if not np.array_equal(a, b):
                return False
        return True

    def read(self, name: str, window: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of one tensor, in its stored dtype; one in fp8 dequantised, in float32."""
        if self._read > _MAPPED:
            self._close()
        part = self._slice(name)
        if part.get_dtype() == fp8.DTYPE:
            return self._dequantized(name, window)
        found = part[window]
        self._read += len(found) * math.prod(part.get_shape()[1:]) * found.itemsize  # pages hold whole rows
        return found

    def _slice(self, name: str) -> Any:
        return self._open(self.files[name]).get_slice(name)

    def _dequantized(self, name: str, window: tuple[slice, ...]) -> np.ndarray:
        assert self._blocks is not None  # checked
        file = self.files[name]
        if file not in self._places:
            self._places[file] = fp8.places(self.folder / file)
        place = _, shape = self._places[file][name]
        whole = (*window, *[slice(None)] * (len(shape) - len(window)))
        spans = tuple(range(*part.indices(n)) for part, n in zip(whole, shape, strict=True))
        values = fp8.read(self.folder / file, place, spans)
        return self._blocks.dequantize(values, self.read(name + fp8.SCALE, self._blocks.touched(spans)), spans)


_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_file(
    file: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, np.ndarray]],
    dtypes: Mapping[str, np.dtype],
) -> None:
    """Write a safetensors file from tensors in the order of `shapes`. Unlike the library's, it holds one at a time."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtypes[name].itemsize
        entries[name] = {"dtype": _DTYPES[dtypes[name].name], "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for (name, shape), (given, value) in zip(shapes.items(), tensors, strict=True):
            assert (given, value.shape) == (name, shape)
            out.write(np.ascontiguousarray(value, dtypes[name]).view(np.uint8).data)
