"""Hugging Face folders of Qwen3 and Qwen3-MoE, read and written: config.json and safetensors.

Weights go from the files straight to the devices: each process reads only the slices that its own devices hold.
Left out: the tokenizer (data/), other architectures, quantised weights, and anything but full attention with plain
RoPE. What is not built is refused by name, never skipped.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gspo_jax.models.config import ModelConfig
from gspo_jax.models.transformer import Transformer, abstract
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

Path = str | os.PathLike[str]

_SIZES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "intermediate_size": ("intermediate_size",),
}
"""Sizes that a config.json must have: our field, and every spelling of theirs; the first one is written."""
_MOE_SIZES = {
    "num_experts": ("num_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3_moe", "qwen3"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "sliding_window": (None,),
    "layer_types": (["full_attention"], []),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
"""Fields of config.json that would change the computation, with the values that are built here."""


def read_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder, from the config.json of transformers 4 or 5.

    Raises:
      UserError: no such folder or file, a size is missing, or the model needs something that is not built here.
    """
    file = pathlib.Path(folder) / CONFIG
    if not file.parent.is_dir():
        raise UserError(f"{folder} is not a folder; download the Hugging Face checkpoint and give its local folder")
    raw = _read_json(file, f"{file} does not exist; a Hugging Face folder has a {CONFIG} beside its safetensors")
    _check_supported(raw, file)
    is_moe = raw["model_type"] == "qwen3_moe"
    sizes = {ours: _size(raw, file, *names) for ours, names in (_SIZES | (_MOE_SIZES if is_moe else {})).items()}
    if is_moe and sizes["experts_per_token"] > sizes["num_experts"]:
        chosen, there = sizes["experts_per_token"], sizes["num_experts"]
        raise UserError(f"{file}: num_experts_per_tok {chosen} is above the {there} experts; set it to {there} or less")
    # transformers: a Qwen3 without head_dim has 128, a Qwen3-MoE without it divides the hidden size among its heads.
    head_dim = sizes["hidden_size"] // sizes["num_heads"] if is_moe else 128
    eos = raw.get("eos_token_id")
    return ModelConfig(
        **sizes,
        **({"norm_topk_prob": bool(raw.get("norm_topk_prob", False))} if is_moe else {}),
        num_kv_heads=_size(raw, file, "num_key_value_heads", default=sizes["num_heads"]),
        head_dim=_size(raw, file, "head_dim", default=head_dim),
        max_position_embeddings=_size(raw, file, "max_position_embeddings", default=32768),
        rope_theta=_rope_theta(raw, file),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        pad_token_id=raw.get("pad_token_id"),
    )


def config_json(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """What transformers from 4.51 on and 5 both read: RoPE in both spellings, the rest in the older one."""
    is_moe = config.num_experts > 0
    eos = list(config.eos_token_ids)
    fields = {names[0]: getattr(config, ours) for ours, names in (_SIZES | (_MOE_SIZES if is_moe else {})).items()}
    fields |= {
        "architectures": ["Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if is_moe else "qwen3",
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype.name,
    }
    if is_moe:
        fields |= {"norm_topk_prob": config.norm_topk_prob, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return fields


def _check_supported(raw: Mapping[str, Any], file: pathlib.Path) -> None:
    """Refuses every value that `_ONLY` does not list; of the fields, only model_type must be there."""
    facts = {**raw, "model_type": raw.get("model_type")}
    facts["sliding_window"] = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    facts["layer_types"] = sorted(set(raw.get("layer_types") or ()))
    for field, values in _ONLY.items():
        if facts.get(field, values[0]) not in values:
            supported = " and ".join(json.dumps(value) for value in values)
            raise UserError(f"{file}: {field} is {json.dumps(facts[field])}; supported: only {supported}")


def _rope_theta(raw: Mapping[str, Any], file: pathlib.Path) -> float:
    """The base of the rotary frequencies: inside `rope_parameters` (transformers 5) before the top level (4)."""
    theta = raw.get("rope_theta", 10000.0)
    for field in ("rope_parameters", "rope_scaling"):
        rope = raw.get(field) or {}
        plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        per_layer = any(isinstance(value, dict) for value in rope.values())
        if not plain or per_layer or rope.get("partial_rotary_factor", 1) != 1:
            supported = 'only rope_type "default", one for all layers, on the whole head'
            raise UserError(f"{file}: {field} is {json.dumps(rope)}; supported: {supported}")
        theta = rope.get("rope_theta", theta)
    return float(theta)


def _size(raw: Mapping[str, Any], file: pathlib.Path, *names: str, default: int | None = None) -> int:
    """The positive integer under the first of `names` that is there."""
    value = next((raw[name] for name in names if raw.get(name) is not None), default)
    if value is None:
        raise UserError(f"{file}: {' or '.join(names)} is missing; a Qwen3 config needs it")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{file}: {names[0]} is {json.dumps(value)}; it must be a positive integer")
    return value


def _read_json(file: pathlib.Path, missing: str) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(missing)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object; download it again")
    return value


@dataclasses.dataclass(frozen=True)
class Rule:
    """Where one of our parameters lies in a checkpoint, and how its dimensions are arranged there."""

    tensor: str
    """Their name; "{L}" and "{E}" stand for our leading layer and expert axes, which they keep as separate tensors."""
    axes: str
    """"ours -> theirs", a letter for each dimension; H are all heads side by side."""
    half: int | None = None
    """0 or 1 where their second dimension holds two parameters of ours, one after the other, and this is that one."""

    @property
    def ours(self) -> list[str]:
        """One letter per dimension of ours."""
        return self.axes.split(" -> ")[0].split()

    @property
    def theirs(self) -> list[str]:
        """One letter per dimension of theirs."""
        return self.axes.split(" -> ")[1].split()

    @property
    def outer(self) -> list[str]:
        """Our leading axes that are not in their tensor."""
        return [axis for axis in self.ours if f"{{{axis}}}" in self.tensor]

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each of their tensors, from the shape of our parameter."""
        size = dict(zip(self.ours, ours, strict=True))
        shape = [size[axis] for axis in self.theirs]
        if self.half is not None:
            shape[1] *= 2
        return tuple(shape)

    def entries(self, ours: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Every index into our leading axes with the name of their tensor for it."""
        for at in itertools.product(*(range(n) for n in ours[: len(self.outer)])):
            yield at, self.tensor.format(**dict(zip(self.outer, at, strict=True)))

    def to_theirs(self, ours: np.ndarray) -> np.ndarray:
        """One tensor of theirs, whole, from our parameter at one index of the leading axes; only without `half`."""
        inner = self.ours[len(self.outer) :]
        return ours.transpose([inner.index(axis) for axis in self.theirs])

    def read(
        self, checkpoint: "Checkpoint", ours: tuple[int, ...], spans: tuple[range, ...], dtype: DTypeLike
    ) -> np.ndarray:
        """The part of our parameter (of shape `ours`) at `spans`, a range per dimension; reads hardly more."""
        size = dict(zip(self.ours, ours, strict=True))
        span = dict(zip(self.ours, spans, strict=True))
        window = [slice(span[axis].start, span[axis].stop) for axis in self.theirs]
        if self.half is not None:
            skip = self.half * size[self.theirs[1]]
            window[1] = slice(window[1].start + skip, window[1].stop + skip)
        order = [self.theirs.index(axis) for axis in self.ours[len(self.outer) :]]
        out = np.empty([len(s) for s in spans], jnp.dtype(dtype))
        for local in itertools.product(*(range(len(span[axis])) for axis in self.outer)):
            at = {axis: span[axis][i] for axis, i in zip(self.outer, local, strict=True)}
            piece = checkpoint.read(self.tensor.format(**at), tuple(window))
            out[local] = piece.transpose(order)
        return out


_LAYER = "model.layers.{L}."
_RULES = {
    "embed": Rule("model.embed_tokens.weight", "V D -> V D"),
    "layers.attention_norm": Rule(_LAYER + "input_layernorm.weight", "L D -> D"),
    "layers.attention.q": Rule(_LAYER + "self_attn.q_proj.weight", "L D H -> H D"),
    "layers.attention.k": Rule(_LAYER + "self_attn.k_proj.weight", "L D H -> H D"),
    "layers.attention.v": Rule(_LAYER + "self_attn.v_proj.weight", "L D H -> H D"),
    "layers.attention.o": Rule(_LAYER + "self_attn.o_proj.weight", "L H D -> D H"),
    "layers.attention.q_norm": Rule(_LAYER + "self_attn.q_norm.weight", "L h -> h"),
    "layers.attention.k_norm": Rule(_LAYER + "self_attn.k_norm.weight", "L h -> h"),
    "layers.mlp_norm": Rule(_LAYER + "post_attention_layernorm.weight", "L D -> D"),
    "norm": Rule("model.norm.weight", "D -> D"),
    "head": Rule("lm_head.weight", "D V -> V D"),
}
_DENSE = {
    "layers.mlp.gate": Rule(_LAYER + "mlp.gate_proj.weight", "L D F -> F D"),
    "layers.mlp.up": Rule(_LAYER + "mlp.up_proj.weight", "L D F -> F D"),
    "layers.mlp.down": Rule(_LAYER + "mlp.down_proj.weight", "L F D -> D F"),
}
_EXPERTS = {
    "layers.mlp.router": Rule(_LAYER + "mlp.gate.weight", "L D E -> E D"),
    "layers.mlp.gate": Rule(_LAYER + "mlp.experts.{E}.gate_proj.weight", "L E D F -> F D"),
    "layers.mlp.up": Rule(_LAYER + "mlp.experts.{E}.up_proj.weight", "L E D F -> F D"),
    "layers.mlp.down": Rule(_LAYER + "mlp.experts.{E}.down_proj.weight", "L E F D -> D F"),
}
_FUSED = _EXPERTS | {  # transformers 5 in memory, and on disk with save_original_format=False
    "layers.mlp.gate": Rule(_LAYER + "mlp.experts.gate_up_proj", "L E D F -> E F D", half=0),
    "layers.mlp.up": Rule(_LAYER + "mlp.experts.gate_up_proj", "L E D F -> E F D", half=1),
    "layers.mlp.down": Rule(_LAYER + "mlp.experts.down_proj", "L E F D -> E D F"),
}


def _rules(config: ModelConfig, *, fused: bool = False) -> dict[str, Rule]:
    """The rule of every parameter of this model, by its path."""
    rules = _RULES | ((_FUSED if fused else _EXPERTS) if config.num_experts else _DENSE)
    return {path: rule for path, rule in rules.items() if not (path == "head" and config.tie_word_embeddings)}


def _path(key: jax.tree_util.KeyPath) -> str:
    """The dotted path of a leaf of the parameters' state; the last key is the value inside its nnx.Param."""
    return jax.tree_util.keystr(key[:-1], simple=True, separator=".")


class Checkpoint:
    """The tensors of a folder, in one safetensors file or many; raises a UserError where one is missing or damaged."""

    def __init__(self, folder: pathlib.Path, files: contextlib.ExitStack):
        self.folder = folder
        self.handles: dict[str, tuple[str, Any]] = {}
        for name in self._file_names():
            file = folder / name
            if not file.is_file():
                raise UserError(f"{file} does not exist though {INDEX} names it; download it again")
            try:
                handle = files.enter_context(safe_open(file, framework="np"))
            except SafetensorError as error:
                raise UserError(f"{file} is no complete safetensors file ({error}); download it again") from error
            self.handles |= dict.fromkeys(handle.keys(), (name, handle))

    def _file_names(self) -> list[str]:
        if (self.folder / WEIGHTS).is_file():
            return [WEIGHTS]
        missing = f"{self.folder} has neither {WEIGHTS} nor {INDEX}; save the model as safetensors"
        weight_map = _read_json(self.folder / INDEX, missing).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{self.folder / INDEX} has no weight_map; download it again")
        return sorted(set(weight_map.values()))

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: set[str]) -> None:
        """Raises a UserError unless the folder holds exactly the expected tensors, with these shapes, as floats."""
        for name, shape in expected.items():
            if name not in self.handles:
                raise UserError(f"{self.folder} has no tensor {name}, which its {CONFIG} asks for; download it again")
            file, handle = self.handles[name]
            found = handle.get_slice(name)
            if tuple(found.get_shape()) != shape:
                has = list(found.get_shape())
                raise UserError(f"{self.folder / file}: {name} is {has}, {CONFIG} says {list(shape)}; download both")
            if found.get_dtype() not in ("F32", "BF16", "F16", "F64"):
                raise UserError(f"{self.folder / file}: {name} is {found.get_dtype()}; supported: F32, BF16, F16, F64")
        if extra := sorted(self.handles.keys() - expected.keys() - ignored):
            found = f"{self.folder} holds {len(extra)} tensors that a model of its {CONFIG} does not have"
            raise UserError(f"{found}, such as {extra[0]}; download both again")

    def read(self, name: str, window: tuple[slice, ...]) -> np.ndarray:
        """A slice of one tensor, in the dtype it is stored in."""
        return self.handles[name][1].get_slice(name)[window]


def with_dtype(shapes: nnx.State, dtype: np.dtype) -> nnx.State:
    """The shapes of a model's parameters held in `dtype`, but for those declared `float32` (norms, router)."""

    def change(v: nnx.Variable) -> nnx.Variable:
        return v if v.get_metadata("float32") else jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), v)

    return jax.tree.map(change, shapes, is_leaf=lambda x: isinstance(x, nnx.Variable))


def load_params(
    folder: Path,
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    dtype: DTypeLike | None = jnp.float32,
) -> nnx.State:
    """The parameters of a Hugging Face folder, laid out as the trainer's, without a whole copy on the host.

    Args:
      folder: holds model.safetensors, or shards and their index; experts as separate tensors or fused.
      mesh: where to; None is the default device.
      dtype: of the parameters, None for the embedding's in the file; those declared `float32` (norms, router) are that.

    Raises:
      UserError: a mesh that does not divide the model, or a file or tensor that is missing, damaged or misshapen.
    """
    if mesh is not None:
        config.check_mesh(dict(mesh.shape))
    _, shapes = abstract(config)
    with contextlib.ExitStack() as files:
        checkpoint = Checkpoint(pathlib.Path(folder), files)
        layout = _rules(config, fused=_FUSED["layers.mlp.gate"].tensor.format(L=0) in checkpoint.handles)
        ours = {_path(key): leaf.shape for key, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
        expected = {name: r.shape(ours[path]) for path, r in layout.items() for _, name in r.entries(ours[path])}
        # A tied model's checkpoint may still carry its head, which is the embedding again.
        checkpoint.check(expected, {_RULES["head"].tensor} if config.tie_word_embeddings else set())

        def build(key: Any, leaf: jax.ShapeDtypeStruct, sharding: Sharding | None = None) -> jax.Array:
            # One read per distinct slice: replicas of a shard share it.
            read = functools.cache(functools.partial(layout[_path(key)].read, checkpoint, leaf.shape, dtype=leaf.dtype))
            if sharding is None:
                return jnp.asarray(read(tuple(range(n) for n in leaf.shape)))

            def shard(index: Any) -> np.ndarray:
                return read(tuple(range(*s.indices(n)) for s, n in zip(index, leaf.shape, strict=True)))

            return jax.make_array_from_callback(leaf.shape, sharding, shard)

        kind = checkpoint.read(_RULES["embed"].tensor, (slice(0),)).dtype if dtype is None else jnp.dtype(dtype)
        shardings = () if mesh is None else (mesh_lib.param_shardings(shapes, mesh),)
        return jax.tree_util.tree_map_with_path(build, with_dtype(shapes, kind), *shardings)


def load(
    folder: Path, mesh: Mesh | None = None, *, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> tuple[Transformer, ModelConfig]:
    """A model that computes in `dtype`, and its config, from a Hugging Face folder: see `load_params`.

    Raises UserErrors as `read_config` and `load_params` do.
    """
    config = read_config(folder)
    graph, _ = abstract(config, dtype=dtype)
    return nnx.merge(graph, load_params(folder, config, mesh, dtype=param_dtype)), config


def save(
    model: Transformer | nnx.State,
    config: ModelConfig,
    folder: Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes config.json and safetensors that transformers (4.51 and later) reads; the tokenizer is not touched.

    A new folder appears only when it is complete. In one that exists, the old config.json goes first and the new one
    comes last, so that an interrupted write leaves a folder that does not load, not one that mixes two models. With
    several processes all call this and the first writes.

    Args:
      model: the model, or only its parameters; `config` is its own.
      max_shard_bytes: a file grows no larger, unless a single tensor is; more than one file gets an index.
      dtype: to write in; by default the embedding's own.
    """
    folder = pathlib.Path(folder).absolute()
    state = nnx.state(model) if isinstance(model, nnx.Module) else model
    params = {_path(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(state)}
    kind = jnp.dtype(params["embed"].dtype if dtype is None else dtype)
    entries = _entries(config, params)
    sizes = [math.prod(rule.shape(params[path].shape)) * kind.itemsize for _, path, rule, _ in entries]
    shards = _shards(sizes, max_shard_bytes)
    tensors = _tensors(entries, params, kind)
    is_writer = jax.process_index() == 0
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder to save the model in")

    temporary = folder.with_name(f".{folder.name}.partial")
    if is_writer:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        weight_map: dict[str, str] = {}
        for i, count in enumerate(shards):
            file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            shard = dict(itertools.islice(tensors, count))
            weight_map |= dict.fromkeys(shard, file)
            if is_writer:
                save_file(shard, temporary / file, metadata={"format": "pt"})
        if is_writer:
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            texts = {CONFIG: config_json(config, kind)} | ({INDEX: index} if len(shards) > 1 else {})
            for name, value in texts.items():
                (temporary / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
            _publish(temporary, folder)
    finally:
        if is_writer:
            shutil.rmtree(temporary, ignore_errors=True)
    multihost_utils.sync_global_devices("huggingface.save")


_Entry = tuple[str, str, Rule, tuple[int, ...]]  # their name, our path, its rule, the index into our leading axes


def _entries(config: ModelConfig, params: Mapping[str, jax.Array]) -> list[_Entry]:
    """Every tensor to write, layer after layer, so that a reader of a few layers opens few files."""
    entries = [
        (name, path, rule, at) for path, rule in _rules(config).items() for at, name in rule.entries(params[path].shape)
    ]
    return sorted(entries, key=lambda entry: entry[3][:1])


def _shards(sizes: list[int], limit: int) -> list[int]:
    """How many of the tensors of these sizes go into each file."""
    counts, filled = [], 0
    for size in sizes:
        if not counts or filled + size > limit:
            counts, filled = [*counts, 0], 0
        counts[-1] += 1
        filled += size
    return counts


def _tensors(entries: list[_Entry], params: Mapping[str, Any], dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Their tensors by name; one layer of one parameter at a time is gathered to the host."""
    for (path, layer), group in itertools.groupby(entries, key=lambda entry: (entry[1], entry[3][:1])):
        value = jax.lax.dynamic_index_in_dim(params[path], layer[0], keepdims=False) if layer else params[path]
        if not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        whole = np.asarray(value).astype(dtype)
        for name, _, rule, at in group:
            yield name, np.ascontiguousarray(rule.to_theirs(whole[at[1:]]))


def _publish(temporary: pathlib.Path, folder: pathlib.Path) -> None:
    """Moves a finished folder to its place; in an existing one replaces the old checkpoint and nothing else."""
    for file in temporary.iterdir():
        shutil.copymode(temporary / CONFIG, file)  # safetensors makes its files private
    if not folder.exists():
        temporary.rename(folder)
        return
    for file in (folder / CONFIG, folder / INDEX, folder / WEIGHTS, *folder.glob("model-*-of-*.safetensors")):
        file.unlink(missing_ok=True)
    for file in sorted(temporary.iterdir(), key=lambda f: f.name == CONFIG):
        file.replace(folder / file.name)
