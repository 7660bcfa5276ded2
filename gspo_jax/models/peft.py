"""Reading and writing of `peft` folders: adapter_config.json and adapter_model.safetensors.

Experts have two layouts. With `target_modules` every expert's matrix has its own pair of tensors. With
`target_parameters` all experts share one pair, for the fused `experts.gate_up_proj` and `experts.down_proj` of
transformers 5. Both are read, and the second is written.
"""

import collections
import itertools
import json
import math
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gspo_jax import foreign, limited
from gspo_jax.errors import UserError
from gspo_jax.models import families, lora, patterns, transformer
from gspo_jax.models.config import ModelConfig, by_path, dotted
from gspo_jax.models.config_json import Path, read_json
from gspo_jax.models.lora import Adapters
from gspo_jax.parallel import mesh as mesh_lib

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MODEL = "base_model.model."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_FUSED = "gate_up_proj", "down_proj"
_ROUTERS = "mlp.gate", "block_sparse_moe.router"
_MOST_ALPHA = float(np.finfo(np.float32).max)
_SUPPORTED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "use_bdlora": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
}
"""Supported values of adapter_config.json fields. A missing field has the first."""
_RESIDUAL = "pissa", "olora", "corda", "lora_ga"
"""Prefixes of `init_lora_weights` that subtract the first product from the model's weights. `peft` can undo it."""
_MERGE = "merge it into the model with peft's merge_and_unload, and give that as model.folder without adapter.folder"
_SWAPPED = (0, 19)
"""First peft version with A next to n, not m, for a fused parameter [E, m, n]."""


class Pair(NamedTuple):
    """The adapter of one matrix [n, m]: y += scale · (x A) B."""

    a: np.ndarray
    """[n, r]."""
    b: np.ndarray
    """[r, m]."""
    scale: float


def load(folder: Path, config: ModelConfig, adapters: Adapters, mesh: Mesh | None = None) -> nnx.State:
    """Return a folder's adapters, float32 and in the trainer's layout (None: on the default device).

    B absorbs a difference in scale to `adapters`.

    Raises:
      UserError: a file is missing or damaged or has an unsupported feature, or targets or ranks are not `adapters`'.
    """
    shapes, _ = lora.split(transformer.abstract(config, adapters=adapters)[1])
    found = _arrays(folder, config, adapters, shapes)

    def place(path: jax.tree_util.KeyPath, _: Any, sharding: Sharding | None = None) -> jax.Array:
        value = found[dotted(path)]
        if sharding is None:
            return jnp.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    places = () if mesh is None else (mesh_lib.param_shardings(shapes, mesh),)
    return jax.tree.map_with_path(place, shapes, *places)


def check(folder: Path, config: ModelConfig, adapters: Adapters) -> None:
    """Raise `load`'s UserErrors without touching a device."""
    _arrays(folder, config, adapters, lora.split(transformer.abstract(config, adapters=adapters)[1])[0])


def _arrays(folder: Path, config: ModelConfig, adapters: Adapters, shapes: nnx.State) -> dict[str, np.ndarray]:
    pairs, found, used = read_pairs(folder, config, adapters), {}, set()
    for path, shape in by_path(shapes).items():
        matrix, which = lora.matrix_of(path)
        own = np.empty(shape.shape, np.float32)
        for at, module in _modules(config, matrix, own.shape):
            pair = pairs.get(module)
            if pair is None:
                some = any(other in pairs for _, other in _modules(config, matrix, own.shape))
                raise UserError(f"{folder} has no adapter beside {module}{_missing(module, pairs, of_others=some)}")
            value = pair.a if which == "a" else pair.b * (pair.scale / adapters.scale(pair.b.shape[0]))
            if value.shape != own[at].shape:
                raise UserError(_misshapen(folder, module, pair, pairs, adapters))
            own[at] = value
            used.add(module)
        found[path] = own
    if left := sorted(pairs.keys() - used):
        raise UserError(f"{folder} has an adapter beside {left[0]}; {_unused(left[0], adapters)}")
    return found


def _missing(module: str, pairs: Mapping[str, Pair], *, of_others: bool) -> str:
    if of_others:
        return f", but beside the same matrix of other layers (layers_to_transform, or names of modules); {_MERGE}"
    for other in pairs:
        if other.endswith(f".{module}") or module.endswith(f".{other}"):
            return f", but beside {other}, a name of another model; give that in model.folder, or rename the tensors"
    return "; leave its matrix out of the targets"


def _misshapen(folder: Path, module: str, pair: Pair, pairs: Mapping[str, Pair], adapters: Adapters) -> str:
    is_expert = _EXPERT.fullmatch(module) is not None
    field, rank = ("adapter.expert_rank", adapters.expert_rank) if is_expert else ("adapter.rank", adapters.rank)
    ranks = sorted({p.b.shape[0] for name, p in pairs.items() if (_EXPERT.fullmatch(name) is not None) == is_expert})
    says = f"{folder} has matrices {list(pair.a.shape)} and {list(pair.b.shape)} beside {module}"
    if len(ranks) > 1:
        return f"{says}, and adapters of ranks {' and '.join(map(str, ranks))}, all of which have one here; {_MERGE}"
    if ranks == [rank]:
        return f"{says}, which are for another model; give theirs in model.folder"
    return f"{says}, of rank {ranks[0]}, and {field} is {rank}; set it to {ranks[0]}"


def _unused(module: str, adapters: Adapters) -> str:
    name = module.rpartition(".")[2]
    name = "router" if name == "gate" else name
    targets = adapters.expert_targets if _EXPERT.fullmatch(module) else adapters.targets
    if name not in lora.TARGETS:
        return _MERGE
    return "add its matrix to the targets" if name not in targets else "give the adapters' own model in model.folder"


def save(params: nnx.State, config: ModelConfig, adapters: Adapters, folder: Path, *, base: str) -> None:
    """Write a folder that `peft` from 0.19 on loads. Every process must call this.

    Args:
      folder: appears when it is complete.
      base: name or folder of the adapted model.

    Raises:
      UserError: `folder` exists and is not empty.
    """
    folder = pathlib.Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; give another one for the adapters")
    leaves, pairs = by_path(params), {}
    for path, leaf in leaves.items():
        matrix, which = lora.matrix_of(path)
        if which == "b":
            continue
        a, b = _on_host(leaf), _on_host(leaves[path.removesuffix(".a") + ".b"])
        scale = adapters.scale(a.shape[-1])
        pairs |= {module: Pair(a[at], b[at], scale) for at, module in _modules(config, matrix, a.shape)}
    if jax.process_index() == 0:
        temporary = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tensors, fields = _written(pairs, adapters)
        save_file(tensors, temporary / TENSORS, metadata={"format": "pt"})
        fields["base_model_name_or_path"] = base
        (temporary / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        shutil.copymode(temporary / CONFIG, temporary / TENSORS)  # safetensors makes its files private
        temporary.rename(folder)
    multihost_utils.sync_global_devices("peft.save")


def _modules(config: ModelConfig, matrix: str, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield every index into a parameter's outer axes, with the module of its matrix."""
    yield from families.of(config).rules(config, ())[matrix].modules(shape)


def read_pairs(folder: Path, config: ModelConfig, adapters: Adapters) -> dict[str, Pair]:
    """Return a folder's adapters by module, like "model.layers.0.mlp.experts.3.gate_proj".

    `adapters` tells whether one for [gate, up] is two.

    Raises:
      UserError: a file is missing or damaged, or has an unsupported feature.
    """
    folder = pathlib.Path(folder)
    file = folder / CONFIG
    fields = read_json(file, f"{file} does not exist; give a folder that peft's save_pretrained wrote")
    for field, allowed in _SUPPORTED.items():
        value = fields.get(field, allowed[0])
        if value not in allowed:
            remedy = "train one without it" if field == "alora_invocation_tokens" else _MERGE  # that cannot be merged
            raise UserError(f"{file}: {field} is {value!r:.100}; supported: {', '.join(map(repr, allowed))}; {remedy}")
    _check_scales(file, fields)
    begun = fields.get("init_lora_weights")
    says = f"{file}: init_lora_weights is {begun!r}, which changed the model's weights"
    if str(begun).lower().startswith(_RESIDUAL):
        raise UserError(f"{says}; save it again with peft's path_initial_model_for_weight_conversion")
    if str(begun).lower() == "loftq":
        raise UserError(f"{says}; {_MERGE}")
    foreign.is_file(folder / TENSORS, inside=folder)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} cannot be read ({error!s:.200}); save the adapters again") from error
    halves: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    for name, tensor in tensors.items():
        parts = re.fullmatch(rf"{re.escape(_MODEL)}(.*)\.lora_([AB])\.weight", name)
        if parts is None:
            raise UserError(f"{folder / TENSORS} has {name}; supported: lora_A and lora_B of linear layers; {_MERGE}")
        tensor = tensor.astype(np.float32)
        if tensor.ndim != 2 or not np.isfinite(tensor).all():
            wrong = f"of shape {list(tensor.shape)}, no matrix" if tensor.ndim != 2 else "not finite everywhere"
            raise UserError(f"{folder / TENSORS}: {name} is {wrong}; save the adapters of a sound training run again")
        halves[parts[1]][parts[2]] = tensor.T
    alphas = _alphas(file, fields, list(halves))
    pairs: dict[str, Pair] = {}
    for module, half in halves.items():
        if half.keys() != {"A", "B"} or half["A"].shape[1] != half["B"].shape[0]:
            raise UserError(f"{folder / TENSORS}: lora_A and lora_B of {module} do not fit; save the adapters again")
        of_all = module.removesuffix(".base_layer")
        if of_all.endswith(".experts"):
            pairs |= _of_experts(of_all, half["A"], half["B"], config, adapters, fields, alphas)
        else:
            pairs[module] = Pair(half["A"], half["B"], _scale(fields, alphas[module], half["A"].shape[1]))
    return pairs


def _check_scales(file: pathlib.Path, fields: Mapping[str, Any]) -> None:
    given = fields.get("alpha_pattern") or {}
    if not isinstance(given, dict):
        raise UserError(f"{file}: alpha_pattern is {given!r:.100}, no object of numbers by pattern; correct it")
    for name, value in {"lora_alpha": fields.get("lora_alpha", 8), **given}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_ALPHA:
            raise UserError(f"{file}: the scale {name:.100} is {value!r:.100}; set it to a finite number")


def _alphas(file: pathlib.Path, fields: Mapping[str, Any], modules: Sequence[str]) -> dict[str, float]:
    usual, given = float(fields.get("lora_alpha", 8)), fields.get("alpha_pattern") or {}
    experts = {of for module in modules if (of := module.removesuffix(".base_layer")).endswith(".experts")}
    names = [*modules, *(f"{of}.{target}" for of in sorted(experts) for target in _FUSED)]
    if not given:
        return dict.fromkeys(names, usual)
    try:
        found = patterns.first_matches(list(given), names)
    except patterns.NoPattern as error:
        raise UserError(f"{file}: alpha_pattern has {error}; correct it") from None
    except limited.TooMuch as error:
        raise UserError(f"{file}: alpha_pattern {given!r:.100} {error}; correct its patterns") from None
    values = list(map(float, given.values()))
    return {name: usual if at is None else values[at] for name, at in zip(names, found, strict=True)}


def _scale(fields: Mapping[str, Any], alpha: float, rank: int) -> float:
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _of_experts(
    module: str,
    a: np.ndarray,
    b: np.ndarray,
    config: ModelConfig,
    adapters: Adapters,
    fields: Mapping[str, Any],
    alphas: Mapping[str, float],
) -> dict[str, Pair]:
    """Split a fused parameter's pair, a [n, E r] and b [r E, m], into each expert's."""
    E, D, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
    if not E or a.shape[1] % E:
        raise UserError(f"an adapter beside {module} has {a.shape[1]} rows for {E} experts; give the adapters' model")
    n, m, r = a.shape[0], b.shape[1], a.shape[1] // E
    each = zip(np.split(a, E, axis=1), b.reshape(r, E, m).swapaxes(0, 1), strict=True)
    version = tuple(map(int, re.findall(r"\d{1,9}", str(fields.get("peft_version", "")))[:2]))
    if (n, m) in ((2 * F, D), (D, F)) and (n != m or version < _SWAPPED):
        each, n, m = [(b.T, a.T) for a, b in each], m, n
    if (n, m) == (F, D):
        scale = _scale(fields, alphas[f"{module}.down_proj"], r)
        return {f"{module}.{e}.down_proj": Pair(*pair, scale) for e, pair in enumerate(each)}
    if (n, m) != (D, 2 * F):
        raise UserError(f"an adapter beside {module} is for matrices [{n}, {m}]; the model has [{D}, {2 * F}]")
    scale, found = _scale(fields, alphas[f"{module}.gate_up_proj"], r), {}
    each, rank, half = list(each), adapters.expert_rank, r // 2
    targets = {"gate_proj", "up_proj"}.intersection(adapters.expert_targets)
    if len(targets) == 2 and r == 2 * rank and not any(b[half:, :F].any() or b[:half, F:].any() for _, b in each):
        parts = {"gate_proj": (slice(half), slice(F)), "up_proj": (slice(half, r), slice(F, None))}  # as `save` writes
    else:
        parts = {"gate_proj": (slice(r), slice(F)), "up_proj": (slice(r), slice(F, None))}
    for target, (inner, columns) in parts.items():
        if target in targets or any(b[:, columns].any() for _, b in each):
            found |= {
                f"{module}.{e}.{target}": Pair(a[:, inner], b[inner, columns], scale) for e, (a, b) in enumerate(each)
            }
    return found


def _written(pairs: Mapping[str, Pair], adapters: Adapters) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    tensors: dict[str, np.ndarray] = {}
    of_experts: dict[str, dict[str, list[Pair]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    targets: dict[str, set[str]] = {"target_modules": set(), "target_parameters": set()}
    ranks, alphas = {}, {}

    def write(module: str, a: np.ndarray, b: np.ndarray) -> None:
        for which, half in (("A", a), ("B", b)):
            tensors[f"{_MODEL}{module}.lora_{which}.weight"] = np.ascontiguousarray(half.T)

    for module, pair in pairs.items():
        if parts := _EXPERT.fullmatch(module):
            of_experts[parts[1]][parts[3]].append(pair)
            continue
        write(module, pair.a, pair.b)
        if module.endswith(_ROUTERS):  # no linear layers in transformers 5
            targets["target_parameters"].add(_last_two(module) + ".weight")
        else:
            targets["target_modules"].add(module.rpartition(".")[2])
    for module, own in of_experts.items():
        both = itertools.zip_longest(own.get("gate_proj", ()), own.get("up_proj", ()))
        fused = {"gate_up_proj": list(itertools.starmap(_joined, both)), "down_proj": own.get("down_proj", [])}
        for target, each in fused.items():
            if not each:
                continue
            inner = module + ".base_layer" * (target == "gate_up_proj" and bool(fused["down_proj"]))
            a, b = np.concatenate([pair.a for pair in each], axis=1), np.stack([pair.b for pair in each], axis=1)
            write(inner, a, b.reshape(-1, b.shape[2]))
            targets["target_parameters"].add(f"{_last_two(module)}.{target}")
            ranks[f".*experts.{target}"] = rank = each[0].b.shape[0]
            alphas[f".*experts.{target}"] = each[0].scale * math.sqrt(rank)
    fields = {name: value for name, (value, *_) in _SUPPORTED.items()} | {
        "r": adapters.rank or adapters.expert_rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "use_rslora": True,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "peft_version": ".".join(map(str, (*_SWAPPED, 0))),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        **{name: sorted(found) for name, found in targets.items()},
    }
    return tensors, fields


def _last_two(module: str) -> str:
    return ".".join(module.split(".")[-2:])


def _joined(gate: Pair | None, up: Pair | None) -> Pair:
    """Join two adapters for [gate, up], block-diagonally; None: that output is zero."""
    if gate is None or up is None:
        some = gate or up
        assert some is not None
        nothing = np.zeros_like(some.b)
        return some._replace(b=np.concatenate([nothing, some.b] if gate is None else [some.b, nothing], axis=1))
    nothing = np.zeros_like(gate.b)
    b = np.block([[gate.b, nothing], [nothing, up.b]])
    return Pair(np.concatenate([gate.a, up.a], axis=1), b, gate.scale)


def _on_host(value: Any) -> np.ndarray:
    return np.asarray(value if value.is_fully_addressable else multihost_utils.process_allgather(value, tiled=True))
