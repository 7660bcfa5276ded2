"""The parts of a Hugging Face config.json that families share."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.models.config import Llama3Rope, ModelConfig, Rope, YarnRope

CONFIG = "config.json"

Path = str | os.PathLike[str]

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
"""Required sizes: our field, and theirs."""

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "sliding_window": (None,),
    "layer_types": (["full_attention"], []),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
"""Fields that would change the computation, with the values that every family implements."""


@dataclasses.dataclass(frozen=True)
class ConfigJson:
    """One config.json."""

    file: pathlib.Path
    fields: Mapping[str, Any]

    def check(self, supported: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise a UserError for the first unlisted value. An absent field has the first listed."""
        facts = dict(self.fields)
        facts["sliding_window"] = facts.get("sliding_window") if facts.get("use_sliding_window") else None
        types = facts.get("layer_types") or []
        named = isinstance(types, list) and all(isinstance(name, str) for name in types)
        facts["layer_types"] = sorted(set(types)) if named else types
        for field, values in supported.items():
            if facts.get(field, values[0]) not in values:
                listed = " and ".join(json.dumps(value) for value in values)
                raise UserError(f"{self.file}: {field} is {_shown(facts[field])}; supported: only {listed}")

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the positive integer under the first of `names` present, or `default`.

        Raises:
          UserError: there is neither, or it is no positive integer.
        """
        value = next((self.fields[name] for name in names if self.fields.get(name) is not None), default)
        if value is None:
            needed = f"every {self.fields['model_type']} model has it"
            raise UserError(f"{self.file}: {' or '.join(names)} is missing; {needed}, so download the file again")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise UserError(f"{self.file}: {names[0]} is {_shown(value)}; it must be a positive integer below 2^31")
        return value

    def count(self, name: str, *, default: int) -> int:
        """Return as `size`, or 0."""
        return 0 if self.fields.get(name) == 0 else self.size(name, default=default)

    def number(self, name: str, value: Any) -> float:
        """Return `value` as a float. Raise a UserError unless it is a positive number."""
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise UserError(f"{self.file}: {name} is {_shown(value)}; it must be a positive number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean, `default` if absent or null. Raise a UserError for anything else."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{self.file}: {name} is {_shown(value)}; it must be true or false")
        return default if value is None else value

    def check_window(self, positions: int, *, default: int | None) -> None:
        """Raise a UserError if `sliding_window`, in use wherever it is no null, hides any of `positions`."""
        window = self.fields.get("sliding_window", default)
        if window is not None and (not isinstance(window, int) or window < positions):
            raise UserError(f"{self.file}: sliding_window is {_shown(window)}; supported: only null")

    def experts_per_token(self, experts: int, *, default: int | None = None) -> int:
        """Return `num_experts_per_tok`. Raise a UserError if it exceeds `experts`."""
        chosen = self.size("num_experts_per_tok", default=default)
        if chosen > experts:
            raise UserError(
                f"{self.file}: num_experts_per_tok {chosen} is above the {experts} experts; set it to {experts} or less"
            )
        return chosen

    def common(
        self,
        *,
        positions: int,
        eps: float,
        pad: int | None,
        eos: int | None,
        theta: float = 1e4,
        rotary: float | None = None,
    ) -> dict[str, Any]:
        """Return the `ModelConfig` fields that families read alike.

        Args:
          positions, eps, pad, eos, theta: transformers' defaults for absent fields.
          rotary: its default share of a head that is turned; None: the family turns whole heads.

        Raises:
          UserError: a size is missing, or the kind of rotary positions is not implemented.
        """
        ends = self.fields.get("eos_token_id", eos)
        base, scaling = self._rope(theta, partial=rotary is not None)
        return {
            **{ours: self.size(theirs) for ours, theirs in _SIZES.items()},
            "num_kv_heads": self.size("num_key_value_heads", default=self.size("num_attention_heads")),
            "max_position_embeddings": self.size("max_position_embeddings", default=positions),
            "rope_theta": base,
            "rope_scaling": scaling,
            "partial_rotary_factor": 1.0 if rotary is None else self._rotary(rotary),
            "rms_norm_eps": self.number("rms_norm_eps", self.fields.get("rms_norm_eps", eps)),
            "tie_word_embeddings": self.flag("tie_word_embeddings"),
            "eos_token_ids": token_ids(self.file, "eos_token_id", ends),
            "pad_token_id": token_id(self.file, "pad_token_id", self.fields.get("pad_token_id", pad)),
        }

    def _rotary(self, default: float) -> float:
        """Return the share of a head that is turned, where transformers looks for it."""
        name = "partial_rotary_factor"
        given = (self.fields.get("rope_parameters"), self.fields.get("rope_scaling"), self.fields)
        value = self.number(name, next((f[name] for f in given if f and f.get(name) is not None), default))
        if value > 1:
            raise UserError(f"{self.file}: {name} is {value:g}; it must be a share of a head, 1 or less")
        return value

    def _rope(self, theta: float, *, partial: bool) -> tuple[float, Rope | None]:
        """Return base and scaling from `rope_parameters` (transformers 5) before the top level (4)."""
        theta, scaling = self.fields.get("rope_theta", theta), None
        for field in ("rope_parameters", "rope_scaling"):
            rope = self.fields.get(field) or {}
            kind = rope.get("rope_type", rope.get("type", "default")) if _is_one(rope, partial=partial) else None
            if kind not in ("default", "llama3", "yarn"):
                supported = 'only rope_type "default", "llama3" and "yarn", one for all layers, on the whole head'
                raise UserError(f"{self.file}: {field} is {_shown(rope)}; supported: {supported}")
            theta = rope.get("rope_theta", theta)
            if kind != "default":
                inside = ConfigJson(self.file, {**rope, "model_type": kind})
                scaling = inside._llama3() if kind == "llama3" else inside._yarn(self.fields)
        return self.number("rope_theta", theta), scaling

    def _llama3(self) -> Llama3Rope:
        names = ("factor", "low_freq_factor", "high_freq_factor")
        numbers = {name: self.number(name, self.fields.get(name)) for name in names}
        self._check_order(numbers, "low_freq_factor", "high_freq_factor", may_equal=False)
        positions = self.size("original_max_position_embeddings")
        return Llama3Rope(**numbers, original_max_position_embeddings=positions)

    def _yarn(self, model: Mapping[str, Any]) -> YarnRope:
        """Return what transformers reads: zeros are as absent fields, and a `factor` of null is the lengths' ratio.

        Args:
          model: the fields around these.
        """
        longest, field = model.get("max_position_embeddings"), "original_max_position_embeddings"
        positions = ConfigJson(self.file, {field: model.get(field, longest), **self.fields}).size(field)
        given = {"factor": self.fields.get("factor") or self.number("max_position_embeddings", longest) / positions}
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            given |= {name: self.fields[name]} if self.fields.get(name) else {}
        numbers = {name: self.number(name, value) for name, value in given.items()}
        truncate = self.flag("truncate", default=True)
        rope = YarnRope(**numbers, original_max_position_embeddings=positions, truncate=truncate)
        self._check_order(dataclasses.asdict(rope), "beta_slow", "beta_fast", may_equal=True)
        return rope

    def _check_order(self, numbers: Mapping[str, float], low: str, high: str, *, may_equal: bool) -> None:
        if numbers[low] > numbers[high] or (numbers[low] == numbers[high] and not may_equal):
            says = f"{low} {numbers[low]:g} is {'above' if may_equal else 'not below'} {high} {numbers[high]:g}"
            raise UserError(f"{self.file}: {says}; correct them")


def _is_one(rope: Any, *, partial: bool) -> bool:
    """Return True for one kind of rotation for all layers, and unless `partial` for whole heads."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return False
    return partial or rope.get("partial_rotary_factor", 1) in (1, None)


def token_id(file: pathlib.Path, field: str, value: Any) -> int | None:
    """Return a token id, or None for null. Raise a UserError for anything else."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31):
        raise UserError(f"{file}: {field} is {_shown(value)}; it must be a token id, an integer from 0 on")
    return value


def token_ids(file: pathlib.Path, field: str, value: Any) -> tuple[int, ...]:
    """Return the token ids of one id, a list or null. Raise as `token_id`."""
    ids = [token_id(file, field, item) for item in (value if isinstance(value, list) else [value])]
    return tuple(i for i in ids if i is not None)


def common_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields that families write alike, for transformers from 4.51 on."""
    eos, scaling, rope = list(config.eos_token_ids), config.rope_scaling, {"rope_type": "default"}
    if scaling is not None:
        given = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
        rope = {"rope_type": "yarn" if isinstance(scaling, YarnRope) else "llama3"} | given
    rotary = {} if config.partial_rotary_factor == 1 else {"partial_rotary_factor": config.partial_rotary_factor}
    return {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()} | {
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and rope,
        "rope_parameters": rope | {"rope_theta": config.rope_theta} | rotary,
        **rotary,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": config.pad_token_id,
    }


def read_if_any(file: pathlib.Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is no file. Raise as `read_json`."""
    return foreign.read_json(file, inside=file.parent, remedy="download it again or correct it") or {}


def read_json(file: pathlib.Path, missing: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
      UserError: the file does not exist (message `missing`), links out of its folder, or holds anything else.
    """
    if not foreign.is_file(file, inside=file.parent):
        raise UserError(missing)
    return read_if_any(file)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
