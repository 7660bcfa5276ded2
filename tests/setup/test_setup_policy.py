"""The config fields that a message about a parameter's shape names are those that set it."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from gspo_jax.models import critic, transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.setup.policy import field_of
from gspo_jax.training.checkpoint import named_leaves
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
