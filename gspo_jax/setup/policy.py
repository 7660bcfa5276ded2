"""The policy's shape, tokenizer and initial weights."""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from gspo_jax.data.tokenizer import THINKING, Tokenizer, check_vocabulary
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.folder.notes import existing_folder
from gspo_jax.folder.storage import RunFolder
from gspo_jax.models import families, huggingface, lora, peft, random_weights, transformer
from gspo_jax.models.config import Latent, ModelConfig
from gspo_jax.models.dispatch import Dispatch
from gspo_jax.models.matrices import ADAPTER
from gspo_jax.models.published import check as check_published
from gspo_jax.models.published import find as find_published
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import processes
from gspo_jax.setup import keys, players
from gspo_jax.training.checkpoint import load_newest, load_step, steps
from gspo_jax.training.digest import digest_tree
from gspo_jax.types import Weights

_BYTES = 300
"""Tokens that bytes and special tokens certainly fit into."""
_LAYER = ("num_layers", "hidden_size")
_LINEAR = ("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim")
_SHAPED_BY = {
    "embed": ("vocab_size", "hidden_size"),
    "norm": ("hidden_size",),
    "head": ("vocab_size", "hidden_size", "tie_word_embeddings"),
    "attention_norm": _LAYER,
    "mlp_norm": _LAYER,
    "q": (*_LAYER, "num_heads", "head_dim"),
    "o": (*_LAYER, "num_heads", "head_dim"),
    "k": (*_LAYER, "num_kv_heads", "head_dim"),
    "v": (*_LAYER, "num_kv_heads", "head_dim"),
    "q_bias": ("num_layers", "num_heads", "head_dim", "attention_bias"),
    **dict.fromkeys(("k_bias", "v_bias"), ("num_layers", "num_kv_heads", "head_dim", "attention_bias")),
    **dict.fromkeys(("q_a", "q_b", "kv_a", "kv_b", "kv_norm"), (*_LAYER, "num_heads", "head_dim", "latent")),
    "q_norm": ("num_layers", "num_heads", "head_dim"),
    "k_norm": ("num_layers", "num_kv_heads", "head_dim"),
    "router": (*_LAYER, "num_experts"),
    "choice_bias": ("num_layers", "num_experts"),
    "shared": (*_LAYER, "shared_intermediate_size"),
    "shared_gate": _LAYER,
    **dict.fromkeys(("qkvz", "ba", "qkv", "z", "b", "a"), (*_LAYER, *_LINEAR)),
    **dict.fromkeys(("conv", "a_log", "dt_bias"), ("num_layers", *_LINEAR)),
    "out": (*_LAYER, *_LINEAR),
    **dict.fromkeys(("gate", "up", "down"), (*_LAYER, "num_experts", "moe_intermediate_size", "intermediate_size")),
}
"""Fields of ModelConfig that may affect a parameter's shape or presence."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Static part of a policy."""

    config: ModelConfig
    graph: nnx.GraphDef[transformer.Transformer]
    """Computes in the config's dtype."""
    base: nnx.GraphDef[transformer.Transformer]
    """Without adapters."""
    shapes: Weights
    adapters: lora.Adapters | None = None
    """None in full training."""
    adapter_folder: str = ""
    """Initial adapters. Empty: new ones."""

    def first(self, folder: Path, mesh: Mesh, key: jax.Array) -> Weights:
        """Return initial weights in the trainer's layout, with adapters, if any."""
        if self.adapters is None:
            return Weights.full(huggingface.load_params(folder, self.config, mesh))
        if self.adapter_folder:
            adapters = peft.load(self.adapter_folder, self.config, self.adapters, mesh)
        else:
            adapters = transformer.init_params(self.config, key, mesh=mesh, adapters=self.adapters)
        return Weights(adapters, self.frozen(folder, mesh))

    def frozen(self, folder: Path, mesh: Mesh, *, run: Mapping[str, Any] | None = None) -> nnx.State:
        """Return the weights in `folder` that no update changes. Empty in full training.

        `run` is a checkpoint's record.

        Raises:
          UserError: the checkpoint has other frozen weights or another alpha.
        """
        if self.adapters is None:
            return self.shapes.frozen
        alpha = None if run is None else run["config"]["adapter"]["alpha"]
        if alpha not in (None, self.adapters.alpha):
            raise UserError(f"adapter.alpha is {self.adapters.alpha} here and {alpha} in the checkpoint; set it back")
        base = load_frozen(folder, self.config, self.shapes.frozen, mesh)
        if run is not None and digest_tree(base) != run.get("base"):
            raise UserError(
                f"the weights in {folder} are not those that the checkpoint's adapters were trained beside; put the "
                "folder back that the run began from, with its model.dtype and adapter.base_dtype"
            )
        return base

    @property
    def reference(self) -> nnx.GraphDef[transformer.Transformer]:
        """Reference model. It has adapters only from a folder."""
        return self.graph if self.adapter_folder else self.base

    @property
    def base_dtype(self) -> jnp.dtype:
        """Dtype of frozen weights, except int8 matrices and float32 exceptions."""
        return _stored_dtype(self.shapes.frozen)

    @property
    def is_quantized(self) -> bool:
        """True if the frozen matrices are int8."""
        return _is_quantized(self.shapes.frozen)


def abstract_frozen(
    model: ModelConfig, kind: str, *, dtype: jnp.dtype, dispatch: Dispatch
) -> tuple[nnx.GraphDef[transformer.Transformer], nnx.State]:
    """Return the graph of a model that no update changes, which computes in `dtype`, and its weights' shapes.

    `kind` is how they are stored: "float32", "bfloat16", "int8", or "" for `dtype`. In the trainer's layout they are
    also spread over `expert`.
    """
    quantized = kind == "int8"
    graph, shapes = transformer.abstract(model, dtype=dtype, dispatch=dispatch, base="int8" if quantized else "frozen")
    return graph, huggingface.with_dtype(shapes, dtype if quantized or not kind else jnp.dtype(kind))


def load_frozen(folder: Path, model: ModelConfig, shapes: nnx.State, mesh: Mesh) -> nnx.State:
    """Read a folder's weights into the trainer's layout, stored as `abstract_frozen` says."""
    base = "int8" if _is_quantized(shapes) else "frozen"
    return huggingface.load_params(folder, model, mesh, dtype=_stored_dtype(shapes), base=base)


def _stored_dtype(frozen: Any) -> jnp.dtype:
    return frozen["embed"].dtype


def _is_quantized(frozen: nnx.State) -> bool:
    return any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(frozen))


def make_policy(config: ConfigDict, model: ModelConfig) -> Policy:
    """Return the policy for a model's shape, without allocating."""
    options: dict[str, Any] = {"dtype": jnp.dtype(config.model.dtype), "dispatch": config.model.dispatch}
    adapters = make_adapters(config)
    if adapters is None:
        graph, shapes = transformer.abstract(model, **options)
        return Policy(model, graph, graph, Weights.full(shapes))
    kind = config.adapter.base_dtype
    base, frozen = abstract_frozen(model, kind, **options)
    options["base"] = "int8" if kind == "int8" else "frozen"
    graph, whole = transformer.abstract(model, **options, adapters=adapters)
    return Policy(model, graph, base, Weights(lora.split(whole)[0], frozen), adapters, config.adapter.folder)


def make_adapters(config: ConfigDict) -> lora.Adapters | None:
    """Return the configured adapters, if any."""
    section = config.adapter
    if not (section.rank or section.expert_rank):
        if section.folder:
            raise UserError(f"adapter.folder is {section.folder!r} and both ranks are 0; set them to the folder's")
        return None
    return lora.Adapters(
        rank=section.rank,
        expert_rank=section.expert_rank,
        alpha=section.alpha,
        targets=tuple(section.targets),
        expert_targets=tuple(section.expert_targets),
    )


def model_config(config: ConfigDict) -> ModelConfig:
    """Return the policy's shape.

    Raises:
      UserError: the config has no model, or the folder not the published one.
    """
    published, folder = config.model.published, config.model.folder
    if folder:
        return _folder_model(config, Path(folder))
    if published:
        return find_published(published)
    check_weights(config)
    return cold_start_model(config)


def _folder_model(config: ConfigDict, folder: Path) -> ModelConfig:
    model = huggingface.read_config(folder)
    if config.model.published:
        check_published(model, config.model.published, str(folder))
    return model


def field_of(leaf: str) -> str:
    """Return the config fields, comma-separated, that affect a train-state leaf's shape or presence.

    `leaf` is a dotted path such as "policy.opt_state.1.0.mu.layers.0.mlp.up.value".
    """
    path = leaf.split(".")
    adapted = next((i for i, key in enumerate(path) if key.endswith(ADAPTER)), None)
    own = path if adapted is None else [*path[:adapted], path[adapted].removesuffix(ADAPTER)]
    name = "shared" if "shared" in own else next((key for key in reversed(own) if key in _SHAPED_BY), None)
    fields = [] if name is None else list(_SHAPED_BY[name])
    adapters = [f"adapter.{of}{field}" for of in ("", "expert_") for field in ("rank", "targets")]
    where = [] if adapted is None else adapters
    if path[0] == "critic":
        where = ["objective.name", "critic.trunk"]
        fields = ["hidden_size"] if name == "head" else fields
    sizes = ["coldstart.vocab_size" if field == "vocab_size" else f"model.architecture.{field}" for field in fields]
    return ", ".join([*where, *sizes, *(["model.folder"] if sizes else [])])


def refuse_no_model() -> NoReturn:
    """Raise the UserError for missing initial weights."""
    raise UserError(
        "model.folder is empty and the config has no cold start; give a folder in Hugging Face format, "
        "--config.model.folder=DIR"
    )


def check_weights(config: ConfigDict) -> None:
    """Raise a UserError without exactly one source of initial weights: a folder, a cold start or chance."""
    model = config.model
    if not (model.folder or model.random or config.coldstart.steps):
        refuse_no_model()
    if model.random and (model.folder or config.coldstart.steps):
        other, off = ("model.folder", "''") if model.folder else ("coldstart.steps", "0")
        raise UserError(f"model.random is True and {other} is set, too; use --config.{other}={off}, or no model.random")
    if model.random and not (model.published or model.architecture):
        raise UserError(
            "model.random is True and the config names no shape; give that of a published model, such as "
            "--config.model.published=Qwen3-30B-A3B"
        )


_UNUSED = {
    True: ("intermediate_size",),  # Granite's config.json has an expert's there
    False: ("experts_per_token", "moe_intermediate_size", "norm_topk_prob"),
}
"""Fields without a meaning in a mixture of experts, and in a dense model."""


def cold_start_model(config: ConfigDict, **of_tokenizer: Any) -> ModelConfig:
    """Return the shape of a cold start's model. Keyword arguments are special token ids.

    Raises:
      UserError: model.architecture lacks a field, has an unknown one, or one that the family's models do not have.
    """
    architecture = dict(config.model.architecture)
    if architecture.get("rope_scaling") is not None:
        raise UserError("model.architecture.rope_scaling is set, and a cold start stretches no positions; leave it out")
    try:
        if architecture.get("latent") is not None:
            architecture["latent"] = Latent(**architecture["latent"])
        model = ModelConfig(vocab_size=config.coldstart.vocab_size, **architecture, **of_tokenizer)
    except TypeError as error:
        what = str(error).partition(" ")[2]
        raise UserError(f"model.architecture is not a model's: {what}; see the fields of ModelConfig") from None
    if model.num_experts and not model.moe_intermediate_size:
        raise UserError("model.architecture.moe_intermediate_size is 0 and there are experts; give the width of one")
    _check_family(model)
    return model


def _check_family(model: ModelConfig) -> None:
    """Raise a UserError unless config.json can say all of a model."""
    fields = huggingface.config_json(model, np.dtype(np.float32))
    try:
        again = huggingface.of_fields(Path("model.architecture"), fields)
    except UserError as error:
        raise UserError(f"{str(error).partition(';')[0]}, in the terms of config.json; correct it") from None
    families.of(model).stacks(model)  # its sentences on sizes are better
    for field in dataclasses.fields(ModelConfig):
        given, kept = (getattr(config, field.name) for config in (model, again))
        if given != kept and field.name not in _UNUSED[model.is_routed]:
            raise UserError(
                f"model.architecture.{field.name} is {given!r}, and in a model of family {model.family!r} with these "
                f"sizes it is {kept!r}; leave it out, or choose another model.architecture.family"
            )


def write_random(config: ConfigDict, folder: Path) -> None:
    """Write the folder of a policy with random weights and a tokenizer of bytes. Every process takes part."""
    if processes.is_first():
        tokenizer = Tokenizer.train((), _BYTES)
        model = model_config(config)
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"the model has a vocabulary of {model.vocab_size}, and a tokenizer of bytes needs "
                f"{tokenizer.vocab_size}; use a larger one, or no model.random"
            )
        model = dataclasses.replace(model, eos_token_ids=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id)
        partial = folder.with_name(f"{folder.name}.partial")
        for place in (partial, folder):
            shutil.rmtree(place, ignore_errors=True)
        partial.mkdir(parents=True)
        huggingface.write_config(partial, model, np.dtype(np.float32))
        random_weights.write(partial, config.seed)
        tokenizer.save(partial)
        storage.sync_tree(partial)
        os.replace(partial, folder)
    processes.wait_for_all("random policy")


def initial_folder(config: ConfigDict, workdir: Path) -> Path:
    """Return `model.folder`, or the cold start's folder."""
    return Path(config.model.folder) if config.model.folder else workdir / storage.COLD_START


def check_positions(config: ConfigDict, model: ModelConfig, what: str = "the model") -> None:
    """Raise a UserError if a prompt and a response of full length have more positions than the model, called `what`."""
    prompt, response = config.data.max_prompt_length, config.sampling.max_response_length
    longest, limit = prompt + response, model.max_position_embeddings
    if longest > limit:
        raise UserError(
            f"data.max_prompt_length {prompt} and sampling.max_response_length {response} need {longest} positions, "
            f"and {what} has {limit}, its max_position_embeddings; take {longest - limit} off either, or use a model "
            "with more, such as one whose config.json stretches them by rope_type yarn"
        )


def read_folder(config: ConfigDict, folder: Path) -> tuple[ModelConfig, Tokenizer]:
    """Read a Hugging Face folder's model shape and tokenizer.

    Raises:
      UserError: not the published model, or its tokenizer does not fit the model or config.
    """
    thinking = config.data.enable_thinking
    variables = {} if thinking is None else dict.fromkeys(THINKING, thinking)
    model = _folder_model(config, folder)
    tokenizer = Tokenizer.load(folder, clock=config.data.clock, **variables)
    if thinking is not None and tokenizer.ignores_thinking:
        raise UserError(
            f"data.enable_thinking is {thinking}, and the chat template in {folder} writes the same prompt if it is "
            f"{not thinking}; leave it unset"
        )
    check_vocabulary(tokenizer, model.vocab_size)
    players.stop_ids(config, tokenizer)
    players.opening(config, tokenizer)
    return model, tokenizer


def read_run(config: ConfigDict, files: RunFolder) -> tuple[ModelConfig, Tokenizer]:
    """Return a run folder's model shape and tokenizer.

    Raises:
      UserError: there is neither a run nor `model.folder`, or as `read_folder`.
    """
    initial = initial_folder(config, files.local)
    if not config.model.folder:
        existing_folder(files.local)
        if not initial.exists():
            raise UserError(f"{files.name} holds no run: it has no {initial.name}; give the --workdir of a run")
    return read_folder(config, initial)


def reference_params(config: ConfigDict, folder: Path, policy: Policy, mesh: Mesh) -> nnx.State | None:
    """Return the reference policy's parameters in the trainer's layout. None without a KL.

    In full training they are in the compute dtype. With adapters, they are `adapter.folder`'s, if any: frozen weights
    are shared.
    """
    if not config.reference.kl_weight:
        return None
    if policy.adapters is None:
        return huggingface.load_params(folder, policy.config, mesh, dtype=jnp.dtype(config.model.dtype))
    if not policy.adapter_folder:
        return nnx.State({})
    return peft.load(policy.adapter_folder, policy.config, policy.adapters, mesh)


def weights_of_run(
    config: ConfigDict, files: RunFolder, policy: Policy, mesh: Mesh, *, step: int | None = None
) -> tuple[Weights, str]:
    """Return a run's weights after iteration `step`, and a name for messages.

    None: the newest, or the initial ones without a checkpoint. 0: the initial ones.

    Raises:
      UserError: there is no checkpoint of that iteration.
    """
    trainable = policy.shapes.trainable
    wanted = {"policy": {"params": trainable}}
    places = {"policy": {"params": mesh_lib.param_shardings(trainable, mesh)}}
    if step is None:
        restored = load_newest(files.checkpoints, wanted, places, field_of=field_of)
    elif step == 0 and step not in steps(files.checkpoints):
        restored = None
    else:
        restored = load_step(files.checkpoints, step, wanted, places, field_of=field_of)
    folder = initial_folder(config, files.local)
    if restored is None:
        return policy.first(folder, mesh, keys.adapter_key(config)), "the first policy"
    frozen = policy.frozen(folder, mesh, run=restored.run)
    return Weights(restored.state["policy"]["params"], frozen), f"iteration {restored.step}"
