"""Messages about shapes: a parameter's names the fields that set it; a cold start's model is one of its family."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from gspo_jax import cli
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.models import critic, transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.setup import policy
from gspo_jax.setup.policy import field_of
from gspo_jax.training.checkpoint import named_leaves
from tests.pods import ROOT
from tests.tiny import CONFIG

OLMOE = dataclasses.replace(CONFIG, family="olmoe")
DENSE = dataclasses.replace(CONFIG, num_experts=0, experts_per_token=0, moe_intermediate_size=0)
CHANGES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": True,
}


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every leaf of policy and critic, optimizer state included, by its name in a checkpoint."""
    learners = {
        "policy": transformer.abstract(config)[1],
        "critic": critic.abstract(config, own_trunk=True, dtype=jnp.float32)[1],
    }
    state = {
        name: {"params": params, "opt_state": jax.eval_shape(optax.adamw(1e-3).init, params)}
        for name, params in learners.items()
    }
    return {name: leaf.shape for name, leaf in named_leaves(state).items()}


@pytest.mark.parametrize("config", [CONFIG, OLMOE, DENSE], ids=["qwen3_moe", "olmoe", "dense"])
def test_the_fields_named_for_a_leaf_are_those_that_change_it(config):
    before, named = shapes(config), {}
    for field, value in CHANGES.items():
        if field in ("num_experts", "moe_intermediate_size") and not config.num_experts:
            continue
        after = shapes(dataclasses.replace(config, **{field: value}))
        for leaf in before | after:
            if before.get(leaf) != after.get(leaf):
                named.setdefault(leaf, set()).add(field)
    assert named
    for leaf, fields in named.items():
        says = field_of(leaf).split(", ")
        for field in fields:
            known = "coldstart.vocab_size" if field == "vocab_size" else f"model.architecture.{field}"
            assert known in says, f"{leaf} depends on {known}; field_of names {says}"
        assert "model.folder" in says


def test_a_leaf_of_the_critic_depends_on_the_objective_and_a_counter_on_nothing():
    assert field_of("critic.params.head.value") == (
        "objective.name, critic.trunk, model.architecture.hidden_size, model.folder"
    )
    assert field_of("policy.opt_state.1.0.count") == field_of("updates") == ""
    says = field_of("policy.params.layers.0.attention.q_adapter.a.value").split(", ")
    assert says[:4] == [f"adapter.{name}" for name in ("rank", "targets", "expert_rank", "expert_targets")]
    assert "model.architecture.num_heads" in says
    assert field_of("policy.opt_state.1.0.mu.embed.value") == (
        "coldstart.vocab_size, model.architecture.hidden_size, model.folder"
    )


LATENT = {"rank": 16, "query_rank": None, "plain_dim": 8, "value_dim": 12, "interleaved": True}
DELTA = {"family": "qwen3_next", "zero_centred_norms": True, "shared_intermediate_size": 32}
DELTA |= {"layer_types": ("linear_attention", "full_attention") * 2}
DELTA |= {f"linear_{of}_{size}": 8 for of in ("key", "value") for size in ("heads", "dim")}


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (DELTA, None),
        ({"family": "deepseek_v3", "num_kv_heads": 4, "latent": LATENT, "dense_layers": 1}, None),
        ({"family": "granitemoe", "attention_multiplier": 0.1, "residual_multiplier": 0.2}, None),
        (DELTA | {"layer_types": ("sliding",) * 4}, r'layer_types is \["sliding"\]'),
        (DELTA | {"linear_value_heads": 12}, "linear_num_value_heads 12 is not a multiple of linear_num_key_heads 8"),
        (DELTA | {"shared_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"family": "deepseek_v3"}, "have latent attention; give rank, query_rank, plain_dim, value_dim, interleaved$"),
        (
            {"num_kv_heads": 4, "latent": LATENT},
            r"\.latent is .* it is None",
        ),
        (
            {"residual_multiplier": 0.2},
            r"\.residual_multiplier is 0\.2, .* it is 1\.0; leave it out",
        ),
        ({"family": "glm4_moe", "shared_intermediate_size": 31}, "31 is not a multiple of moe_intermediate_size 32"),
        ({"rope_scaling": {"factor": 4.0}}, "a cold start stretches no positions; leave it out"),
        ({"family": "qwen2"}, "attention_bias is false"),
    ],
)
def test_a_cold_start_has_a_model_of_its_family(shape, says):
    """Fields that the family does not have are refused: the folder that a cold start writes would lose them."""
    config = cli.load_config(f"{ROOT}/configs/tiny.py").copy_and_resolve_references()
    config.model.architecture.update(shape)
    if says is None:
        assert policy.cold_start_model(config).is_routed
    else:
        with pytest.raises(UserError, match=says) as error:
            policy.cold_start_model(config)
        assert len(str(error.value)) < 320 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({}, "names no shape; give that of a published model, such as --config.model.published=Qwen3-30B-A3B"),
        ({"folder": "m", "published": "Qwen3-0.6B"}, "and model.folder is set, too; use --config.model.folder=''"),
    ],
)
def test_random_weights_have_a_shape_and_no_other_source(changes, says):
    config = base()
    config.model.update({"random": True, **changes})
    with pytest.raises(UserError, match=re.escape(says)):
        policy.check_weights(config)


def test_random_weights_or_a_cold_start():
    config = base()
    config.model.update({"random": True, "published": "Qwen3-0.6B"})
    policy.check_weights(config)
    assert policy.model_config(config).vocab_size == 151936
    config.coldstart.steps = 5
    with pytest.raises(UserError, match=re.escape("use --config.coldstart.steps=0")):
        policy.check_weights(config)


def test_a_random_policy_has_room_for_bytes(tmp_path):
    config = base()
    config.model.random, config.coldstart.vocab_size = True, 280
    config.model.architecture.update({"num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1})
    config.model.architecture.update({"head_dim": 8, "intermediate_size": 8})
    policy.write_random(config, tmp_path / "made")
    model, tokenizer = policy.read_folder(config, tmp_path / "made")
    assert (model.vocab_size, model.eos_token_ids) == (280, tokenizer.eos_ids)
    assert tokenizer.decode(tokenizer.encode("1+1=?")) == "1+1=?"
    config.coldstart.vocab_size = 100
    with pytest.raises(UserError, match="a vocabulary of 100, and a tokenizer of bytes needs 259"):
        policy.write_random(config, tmp_path / "other")
