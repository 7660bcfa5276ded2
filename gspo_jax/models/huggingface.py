"""Hugging Face folders: config.json and safetensors.

Each process reads only the slices that its devices hold. Not here: the tokenizer (data/), quantised weights other than
those in fp8's blocks, and what the families' own files leave out. Unimplemented features are refused by name, never
ignored.
"""

import collections
import contextlib
import functools
import itertools
import json
import math
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

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.models import families, int8, random_weights
from gspo_jax.models.config import ModelConfig, by_path, dotted
from gspo_jax.models.config_json import CONFIG, ConfigJson, Path, read_json
from gspo_jax.models.matrices import SCALE
from gspo_jax.models.tensors import INDEX, WEIGHTS, Checkpoint, Rule, write_file
from gspo_jax.models.transformer import Base, abstract
from gspo_jax.parallel import mesh as mesh_lib


def read_config(folder: Path) -> ModelConfig:
    """Return the model that a Hugging Face folder's config.json describes.

    Raises:
      UserError: the folder or file does not exist, a size is missing, or the family or a feature is not implemented.
    """
    foreign.check_name(folder, "the model's folder")
    file = pathlib.Path(folder) / CONFIG
    if not file.parent.is_dir():
        raise UserError(f"{folder} is not a folder; download the Hugging Face checkpoint and give its local folder")
    return of_fields(
        file, read_json(file, f"{file} does not exist; a Hugging Face folder has a {CONFIG} beside its safetensors")
    )


def of_fields(file: pathlib.Path, fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model that the fields of a config.json describe, which come from `file`. Raise as `read_config`."""
    source = ConfigJson(file, {**fields, "model_type": fields.get("model_type")})
    source.check({"model_type": tuple(families.MODEL_TYPES)})
    try:
        return families.MODEL_TYPES[source.fields["model_type"]].read(source)
    except UserError as error:
        raise error if str(file) in str(error) else UserError(f"{file}: {error}") from None


def config_json(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """Return config.json fields for transformers from 4.51 on and 5."""
    return families.of(config).write(config) | {"torch_dtype": dtype.name}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint by name, layer by layer."""
    leaves = by_path(abstract(config)[1])
    return _shapes(_entries(config, leaves), leaves)


def with_dtype(shapes: nnx.State, dtype: np.dtype) -> nnx.State:
    """Return shapes in `dtype`, except for int8 and `float32` ones (norms, router)."""

    def change(v: nnx.Variable) -> nnx.Variable:
        if v.get_metadata("float32") or v.dtype == jnp.int8:
            return v
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), v)

    return jax.tree.map(change, shapes, is_leaf=lambda x: isinstance(x, nnx.Variable))


def load_params(
    folder: Path,
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    dtype: DTypeLike | None = jnp.float32,
    base: Base = "trained",
) -> nnx.State:
    """Return a Hugging Face folder's parameters in the trainer's layout, without a whole copy on the host.

    Args:
      folder: model.safetensors, or shards and their index; experts as separate tensors or fused. Or the seed of random
        weights.
      mesh: None: the default device.
      dtype: None: the embedding's. Norms and router are always float32.
      base: "int8" quantises the matrices.

    Raises:
      UserError: the mesh does not divide the model, or a file or tensor is missing, damaged or misshapen.
    """
    if mesh is not None:
        config.check_mesh(dict(mesh.shape), frozen=base != "trained")
    _, shapes = abstract(config, base=base)
    if (seed := random_weights.seed_of(pathlib.Path(folder))) is not None:
        return random_weights.make(config, seed, with_dtype(shapes, jnp.dtype(dtype or jnp.float32)), mesh)
    with contextlib.ExitStack() as stack:
        checkpoint = Checkpoint(pathlib.Path(folder), stack)
        layout = families.of(config).rules(config, checkpoint.files)
        ours = {path: leaf.shape for path, leaf in by_path(int8.split(shapes)[1]).items()}
        expected = {name: r.shape(ours[path]) for path, r in layout.items() for _, name in r.entries(ours[path])}
        checkpoint.check(expected, tied=config.tie_word_embeddings)
        scales: dict[str, dict[tuple[range, ...], np.ndarray]] = {}

        def part(path: str, leaf: jax.ShapeDtypeStruct, spans: tuple[range, ...]) -> np.ndarray:
            if path not in layout:  # scales, which come after their matrix
                return scales[path.removesuffix(SCALE)][spans]
            if leaf.dtype != jnp.int8:
                return layout[path].read(checkpoint, leaf.shape, spans, leaf.dtype)
            own = spans[:-2] + spans[-1:]
            values, scales.setdefault(path, {})[own] = layout[path].read_int8(checkpoint, leaf.shape, spans)
            return values

        def build(key: Any, leaf: jax.ShapeDtypeStruct, sharding: Sharding | None = None) -> jax.Array:
            # Replicas of a shard share one read.
            read = functools.cache(functools.partial(part, dotted(key), leaf))
            if sharding is None:
                return jnp.asarray(read(tuple(range(n) for n in leaf.shape)))

            def shard(index: Any) -> np.ndarray:
                return read(tuple(range(*s.indices(n)) for s, n in zip(index, leaf.shape, strict=True)))

            return jax.make_array_from_callback(leaf.shape, sharding, shard)

        kind = checkpoint.read(layout["embed"].tensor, (slice(0),)).dtype if dtype is None else jnp.dtype(dtype)
        shardings = () if mesh is None else (mesh_lib.param_shardings(shapes, mesh),)
        return jax.tree_util.tree_map_with_path(build, with_dtype(shapes, kind), *shardings)


def save(
    params: nnx.State,
    config: ModelConfig,
    folder: Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: DTypeLike | None = None,
) -> None:
    """Write config.json and safetensors for transformers from 4.51 on; leave the tokenizer alone.

    A new folder appears when complete. In an existing one, the old config.json is removed first and the new one written
    last: an interrupted write leaves a folder that does not load, not a mix of two models. Every process must call
    this; the first one writes.

    Args:
      max_shard_bytes: maximum file size, unless a tensor is larger. Several files get an index.
      dtype: None: the embedding's. Buffers stay float32.

    Raises:
      UserError: `folder` is a file.
    """
    leaves = by_path(params)
    kind = jnp.dtype(leaves["embed"].dtype if dtype is None else dtype)
    entries = _entries(config, leaves)
    write(folder, config, _shapes(entries, leaves), _tensors(entries, leaves), kind, max_shard_bytes=max_shard_bytes)


def write(
    folder: Path,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: np.dtype,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder as `save`, from tensors in the order of `shapes`, of which one at a time is in memory."""
    folder = pathlib.Path(folder).absolute()
    dtypes = dict.fromkeys(shapes, dtype) | _float32(config)
    sizes = [math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()]
    shards = _shards(sizes, max_shard_bytes)
    is_writer = jax.process_index() == 0
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder to save the model in")

    temporary = folder.with_name(f".{folder.name}.partial")
    if is_writer:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        names, weight_map = iter(shapes), {}
        for i, count in enumerate(shards):
            file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            own = {name: shapes[name] for name in itertools.islice(names, count)}
            weight_map |= dict.fromkeys(own, file)
            part = itertools.islice(tensors, count)
            if is_writer:
                write_file(temporary / file, own, part, dtypes)
            else:
                collections.deque(part, maxlen=0)  # takes part in the gathering
        if is_writer:
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            if len(shards) > 1:
                (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            write_config(temporary, config, dtype)
            _publish(temporary, folder)
    finally:
        if is_writer:
            shutil.rmtree(temporary, ignore_errors=True)
    multihost_utils.sync_global_devices("huggingface.save")


def write_config(folder: pathlib.Path, config: ModelConfig, dtype: np.dtype) -> None:
    """Write a folder's config.json."""
    (folder / CONFIG).write_text(json.dumps(config_json(config, dtype), indent=2) + "\n", encoding="utf-8")


_Entry = tuple[str, tuple[str, ...], Rule, tuple[int, ...]]
"""(their name, our path, or two for its halves, the first one's rule, index into our leading axes)."""


def _entries(config: ModelConfig, params: Mapping[str, Any]) -> list[_Entry]:
    """Sort tensors by layer: reading a few layers then opens few files."""
    rules = families.of(config).rules(config, ())
    second = {(rule.tensor, rule.layers): path for path, rule in rules.items() if rule.half == 1}
    entries = [
        (name, (path,) if rule.half is None else (path, second[rule.tensor, rule.layers]), rule, at)
        for path, rule in rules.items()
        if rule.half != 1
        for at, name in rule.entries(params[path].shape)
    ]
    return sorted(entries, key=lambda entry: [entry[2].layer(layer) for layer in entry[3][:1]])


def _shapes(entries: list[_Entry], params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: rule.shape(params[paths[0]].shape) for name, paths, rule, _ in entries}


def _float32(config: ModelConfig) -> dict[str, np.dtype]:
    """Return the dtype of the tensors that are float32 in every checkpoint."""
    rules = (rule for rule in families.of(config).rules(config, ()).values() if rule.float32)
    return {rule.name({"L": i}): np.dtype(np.float32) for rule in rules for i in range(len(rule.layers or ()))}


def _shards(sizes: list[int], limit: int) -> list[int]:
    counts, filled = [], 0
    for size in sizes:
        if not counts or filled + size > limit:
            counts, filled = [*counts, 0], 0
        counts[-1] += 1
        filled += size
    return counts


def _tensors(entries: list[_Entry], params: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Gather one layer of one parameter, or of two halves, at a time."""

    def whole(path: str, layer: tuple[int, ...]) -> np.ndarray:
        value = jax.lax.dynamic_index_in_dim(params[path], layer[0], keepdims=False) if layer else params[path]
        if not value.is_fully_addressable:
            value = multihost_utils.process_allgather(value, tiled=True)
        return np.asarray(value)

    for (paths, layer), group in itertools.groupby(entries, key=lambda entry: (entry[1], entry[3][:1])):
        values = [whole(path, layer) for path in paths]
        for name, _, rule, at in group:
            parts = [rule.to_theirs(value[at[1:]]) for value in values]
            yield name, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _publish(temporary: pathlib.Path, folder: pathlib.Path) -> None:
    """Move a finished folder into place, replacing only an old checkpoint."""
    if not folder.exists():
        temporary.rename(folder)
        return
    for file in (folder / CONFIG, folder / INDEX, folder / WEIGHTS, *folder.glob("model-*-of-*.safetensors")):
        file.unlink(missing_ok=True)
    for file in sorted(temporary.iterdir(), key=lambda f: f.name == CONFIG):
        file.replace(folder / file.name)
