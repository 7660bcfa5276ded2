"""Every field of the config has a type and a range; what lies outside is refused in a sentence that names the field."""

import dataclasses
import functools
import math
import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.config import RANGES, base
from gspo_jax.errors import UserError
from gspo_jax.models.cache import CacheDtype
from gspo_jax.models.config import Latent, ModelConfig
from gspo_jax.models.dispatch import Dispatch
from gspo_jax.models.transformer import Remat
from gspo_jax.rollout.precision import Precision
from gspo_jax.routing.replay import Replay
from gspo_jax.setup.checks import check
from gspo_jax.setup.fields import at, names
from gspo_jax.training.terms import KlEstimator, TeacherForm

TINY = str(Path(__file__).parents[2] / "configs/tiny.py")
PLAIN, STEPS = (cli.load_config(TINY + arg).to_dict() for arg in ("", ":steps"))
DEFAULTS = base()
FIELDS = tuple(names(DEFAULTS))
NAN, INF = math.nan, math.inf
ODD = {int: (NAN, INF, -1, 0, 2**31, 1.5, True, "8", None), float: (NAN, INF, -1.0, True, "0.5", None)}
"""Values that a field must refuse unless they are LEGITIMATE, by the field's type."""

LEGITIMATE = {
    "seed": (0, 2**31),
    "mesh.*": (-1,),  # the remaining devices
    "sampling.mesh.*": (-1, 0),
    "coldstart.steps": (0,),
    "data.limit": (0,),
    "data.shots": (0,),
    "data.options.train_size": (None,),  # the difficulty's own
    "data.options.test_size": (None,),
    "data.options.seed": (-1, 0, 2**31),  # Python's random takes any
    "eval.prompts": (0,),
    "sampling.top_k": (0, 2**31),  # as many as the vocabulary has or more: excludes nothing
    "sampling.keep_top": (0,),
    "overlong.cache": (0,),
    "adapter.rank": (0,),  # no adapters
    "adapter.expert_rank": (0,),
    "*.warmup_updates": (0,),
    "*.max_grad_norm": (INF,),  # no clipping
    "training.entropy_weight": (-1.0,),  # rewards certainty
    "rewards.exact_answer": (-1.0,),  # a punishment
    "step_rewards.countdown_steps": (-1.0,),
    "judge.low": (-1.0,),
    "judge.high": (-1.0,),
    "benchmarks.*.every": (0,),
    "routing.noise_every": (0,),
    "mismatch.bias_every": (0,),
    "objective.dppo_tv.high": (),  # a probability
    "objective.dppo_kl.high": (),
    "objective.*.high": (INF,),  # no upper bound
    "objective.*.dual_clip": (INF,),
    "mismatch.*.high": (INF,),
    "model.architecture.num_experts": (0,),  # dense
    "model.architecture.dense_layers": (0,),
    "model.architecture.shared_intermediate_size": (0,),  # no shared experts
    "model.architecture.attention_multiplier": (None,),
    "model.architecture.latent.query_rank": (None,),
    "model.architecture.linear_key_heads": (0,),  # no linear attention, as the next
    "model.architecture.linear_value_heads": (0,),
    "model.architecture.linear_key_dim": (0,),
    "model.architecture.linear_value_dim": (0,),
}


def legitimate(name: str) -> tuple:
    """Return the odd values that this field may have."""
    section, _, key = name.rpartition(".")
    patterns = (name, f"{section}.*", f"*.{key}", f"{name.split('.')[0]}.*.{key}")
    return next((LEGITIMATE[pattern] for pattern in patterns if pattern in LEGITIMATE), ())


@functools.cache
def numeric_fields() -> dict[str, type]:
    """Return every numeric field, those of a cold start's model and of a generated task included, with its type."""
    found: dict[str, type] = {}
    for name in FIELDS:
        section, _, key = name.rpartition(".")
        found[name] = (at(DEFAULTS, section) if section else DEFAULTS).get_type(key)
    for section, shape in (("model.architecture", ModelConfig), ("model.architecture.latent", Latent)):
        found |= {
            f"{section}.{field.name}": get_args(kind)[0] if isinstance(kind := field.type, UnionType) else kind
            for field in dataclasses.fields(shape)
        }
    del found["model.architecture.vocab_size"], found["model.architecture.pad_token_id"]  # coldstart's, the tokenizer's
    found |= {f"data.options.{name}": int for name in ("seed", "train_size", "test_size")}
    found |= {"rewards.exact_answer": float, "step_rewards.countdown_steps": float}
    return {name: kind for name, kind in found.items() if kind in ODD}


def tiny_with(name: str, value: Any) -> ConfigDict:
    """Return configs/tiny.py with one field changed, whatever its type, and what makes the run use that field."""
    config = ConfigDict(STEPS if name.startswith("step_rewards") else PLAIN)
    head, *rest = name.split(".")
    if head == "objective" and len(rest) == 2:
        config.objective.name = rest[0]
    if name == "objective.turn_discount":
        config.objective.name = "gspo_token"
    if head == "mismatch" and len(rest) == 2:
        config.mismatch.correction, config.training.old_logprobs = rest[0], "recompute"
    if name == "model.architecture.num_experts":
        config.mesh.expert, config.mesh.data = 1, 4
    if name.startswith("model.architecture.latent"):
        latent = {"rank": 16, "query_rank": 16, "plain_dim": 8, "value_dim": 12, "interleaved": True}
        config.model.architecture.update({"family": "deepseek_v3", "num_kv_heads": 4, "latent": latent})
    if name == "coldstart.steps":
        config.model.published = "Qwen3-30B-A3B"
    if name == "sampling.mesh.tensor":
        config.sampling.mesh.data = 8
    return changed(config, {name: value})


def changed(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """Return the config with some fields changed, whatever their type; a file may replace whole sections."""
    tree = config.to_dict()
    for name, value in changes.items():
        *sections, key = name.split(".")
        section = tree
        for each in sections:
            section = section[each]
        section[key] = value
    return ConfigDict(tree)


@pytest.mark.faults
@pytest.mark.parametrize("name", numeric_fields())
def test_a_number_out_of_range_is_refused(name):
    kind, allowed = numeric_fields()[name], legitimate(name)
    optional = name in FIELDS and at(DEFAULTS, name) is None
    for value in ODD[kind]:
        config = tiny_with(name, value)
        if any(value is each or (value == each and type(value) is type(each)) for each in allowed) or (
            value is None and optional
        ):
            check(config)
            continue
        with pytest.raises(UserError) as error:
            check(config)
        says = str(error.value)
        whole = name in RANGES and not name.startswith("model.architecture")  # ModelConfig knows of no sections
        assert (name if whole else name.split(".")[-1]) in says, f"{value!r}: {says}"
        assert "\n" not in says and len(says) < 240, f"{value!r}: {says}"


@pytest.mark.parametrize("name", ["iterations", "model.architecture.num_layers", "model.architecture.latent.rank"])
def test_a_section_in_place_of_a_number_is_refused(name):
    with pytest.raises(UserError, match=rf"^{re.escape(name)} is {{'a': 1}}; use a whole number$"):
        check(changed(tiny_with("model.architecture.latent.rank", 16), {name: {"a": 1}}))


def test_every_range_is_that_of_a_field():
    assert set(RANGES) <= {*FIELDS, *numeric_fields()}
    assert len(numeric_fields()) > 100


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "model.remat": Remat,
        "model.dispatch": Dispatch,
        "sampling.weights_dtype": Precision,
        "sampling.cache_dtype": CacheDtype,
        "routing.replay": Replay,
        "reference.estimator": KlEstimator,
        "teacher.form": TeacherForm,
    }.items(),
)
def test_a_text_has_the_choices_of_its_type(name, kind):
    assert re.findall(r"'(\w+)'", RANGES[name].words) == [*get_args(kind)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iteratons": 3}, "the config has no field 'iteratons'; did you mean 'iterations'"),
        ({"sampling.temprature": 0.5}, "no field 'sampling.temprature'; did you mean 'sampling.temperature'"),
        ({"objective.gsop": {"low": 0.1}}, "no field 'objective.gsop'; did you mean 'objective.gspo'"),
        ({"optimizer": 3}, "optimizer is 3; it is a section, so use a ConfigDict of its fields"),
        ({"overlong": {"penalty": 1.0}}, "the config has no 'overlong.cache'; start from gspo_jax.config.base()"),
        ({"overlong.filter": 1}, "overlong.filter is 1; use True or False"),
        ({"model.folder": 1}, "model.folder is 1; use a text"),
        ({"sampling.stop_ids": "="}, "sampling.stop_ids is '='; use a tuple"),
        ({"model.architecture.norm_topk_prob": 1}, "model.architecture.norm_topk_prob is 1; use True or False"),
        ({"model.architecture.moe_intermediate_size": 0}, "moe_intermediate_size is 0 and there are experts"),
        ({"mesh.data": -1, "mesh.fsdp": -1}, "mesh has -1, the remaining devices, for data and fsdp; set all but one"),
        ({"sampling.mesh.data": -1, "sampling.mesh.tensor": -1}, "sampling.mesh has -1, .* for data and tensor"),
        ({"mesh.data": -2}, r"mesh.data is -2; use 1 to 2147483647, or -1 for the remaining devices"),
        ({"mesh.data": 2**40}, "mesh.data is 1099511627776; use 1 to"),
        ({"critic.optimizer.schedule": "cosin"}, "critic.optimizer.schedule is 'cosin'; use 'constant' or"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_field_that_is_mistyped_is_refused(changes, says):
    with pytest.raises(UserError, match=says):
        check(changed(ConfigDict(PLAIN), changes))
