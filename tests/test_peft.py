"""Folders of `peft`: checked against peft's own numbers (tests/golden/adapters), round trips, and refusals."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.models import huggingface, lora, peft, transformer
from gspo_jax.models.lora import Adapters
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import UserError, Weights
from tests.tiny import mostly_slow

GOLDEN = Path(__file__).parent / "golden"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FOLDERS = {
    "qwen3": ("qwen3", Adapters(rank=4)),
    "qwen3_moe": ("qwen3_moe", Adapters(rank=4, expert_rank=3, targets=ATTENTION)),
    "qwen3_moe_modules": ("qwen3_moe", Adapters(rank=3, expert_rank=3, targets=ATTENTION)),
    "qwen3_moe_before": ("qwen3_moe", Adapters(expert_rank=3)),
}
"""Folder of adapters -> (its model, the adapters it has)."""


def read(name):
    """Return a golden model's config, weights and tokens."""
    config = huggingface.read_config(GOLDEN / name)
    tokens = jnp.asarray(np.load(GOLDEN / name / "reference.npz")["tokens"])
    return config, huggingface.load_params(GOLDEN / name, config), tokens


@pytest.mark.parametrize("name", mostly_slow(FOLDERS, always=("qwen3_moe", "qwen3_moe_before")))
def test_logits_are_pefts(name):
    of, adapters = FOLDERS[name]
    config, base, tokens = read(of)
    folder = GOLDEN / "adapters" / name
    graph, _ = transformer.abstract(config, adapters=adapters)
    expected = np.load(folder / "logits.npy")
    found = Weights(peft.load(folder, config, adapters), base).model(graph)(tokens).logits
    np.testing.assert_allclose(found, expected, atol=1e-4)
    before = Weights.full(base).model(transformer.abstract(config)[0])(tokens).logits
    assert np.abs(before - expected).max() > 1, "the adapters change something"


@pytest.mark.parametrize("of", ["qwen3", "qwen3_moe"])
def test_what_is_written_is_read_again_and_merges(of, tmp_path):
    config, base, tokens = read(of)
    adapters = Adapters(rank=2, expert_rank=5 * config.is_routed, alpha=3.0, targets=tuple(lora.TARGETS))
    graph, shapes = transformer.abstract(config, adapters=adapters)
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), lora.split(shapes)[0])
    peft.save(trained, config, adapters, tmp_path / "out", base="some/model")
    mesh = mesh_lib.make_mesh({"expert": 2, "fsdp": 4} if config.is_routed else {"fsdp": 8})
    again = peft.load(tmp_path / "out", config, adapters, mesh)
    jax.tree.map(np.testing.assert_array_equal, again, trained)
    expected = mesh_lib.param_shardings(lora.split(shapes)[0], mesh)
    assert jax.tree.map(lambda x: x.sharding, again) == expected
    assert json.loads((tmp_path / "out" / peft.CONFIG).read_text())["base_model_name_or_path"] == "some/model"
    merged = Weights.full(lora.merge(trained, base, adapters)).model(transformer.abstract(config)[0])(tokens).logits
    np.testing.assert_allclose(merged, Weights(trained, base).model(graph)(tokens).logits, atol=2e-4)


@pytest.mark.parametrize("targets", [("gate_proj",), ("up_proj", "down_proj"), lora.EXPERTS])
@pytest.mark.parametrize("untrained", [1, 8])
def test_some_experts_are_new(untrained, targets, tmp_path):
    """And have adapters beside some of their matrices alone; the first experts' B is still zero."""
    config = huggingface.read_config(GOLDEN / "qwen3_moe")
    adapters = Adapters(expert_rank=2, expert_targets=targets)
    new = transformer.init_params(config, jax.random.key(0), adapters=adapters)
    trained = jax.tree.map(lambda x: x.at[:, untrained:].add(1.0), new)
    peft.save(trained, config, adapters, tmp_path / "out", base="")
    jax.tree.map(np.testing.assert_allclose, peft.load(tmp_path / "out", config, adapters), trained)


def changed(tmp_path, **fields):
    """Return a copy of the golden folder "qwen3" whose config has other fields."""
    folder = shutil.copytree(GOLDEN / "adapters" / "qwen3", tmp_path / "copy")
    config = json.loads((folder / peft.CONFIG).read_text()) | fields
    (folder / peft.CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora is True; supported: False"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; supported: 'LORA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the model's weights; convert it"),
        ({"bias": "all"}, "bias is 'all'; supported: 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; supported: None, \[\]"),
    ],
)
def test_features_that_are_not_supported(fields, says, tmp_path):
    with pytest.raises(UserError, match=says):
        peft.check(changed(tmp_path, **fields), huggingface.read_config(GOLDEN / "qwen3"), Adapters(rank=4))


@pytest.mark.parametrize(
    ("adapters", "says"),
    [
        (Adapters(rank=8), "of rank 4, which are not those of the config; set adapter.rank and adapter.expert_rank"),
        (Adapters(rank=4, targets=("q_proj",)), r"has an adapter beside model.layers.0.\w+.\w+; add its matrix to the"),
    ],
)
def test_other_adapters_than_the_folders(adapters, says):
    config = huggingface.read_config(GOLDEN / "qwen3")
    with pytest.raises(UserError, match=says):
        peft.load(GOLDEN / "adapters" / "qwen3", config, adapters)


def test_files_that_are_missing_or_damaged(tmp_path):
    config = huggingface.read_config(GOLDEN / "qwen3")
    with pytest.raises(UserError, match=r"adapter_config.json does not exist; give a folder that peft"):
        peft.load(tmp_path, config, Adapters(rank=4))
    folder = changed(tmp_path)
    (folder / peft.TENSORS).write_bytes((folder / peft.TENSORS).read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cannot be read .*; save the adapters again"):
        peft.load(folder, config, Adapters(rank=4))
    (folder / peft.TENSORS).unlink()
    with pytest.raises(UserError, match=r"cannot be read .*; save the adapters again"):
        peft.load(folder, config, Adapters(rank=4))


def test_adapters_of_a_model_with_experts_for_one_without():
    config = huggingface.read_config(GOLDEN / "qwen3")
    with pytest.raises(UserError, match=r"mlp.experts has \d+ rows for 0 experts; give the adapters' model"):
        peft.check(GOLDEN / "adapters" / "qwen3_moe_before", config, Adapters(rank=4))


def test_a_target_that_the_folder_lacks():
    config = huggingface.read_config(GOLDEN / "qwen3_moe")
    with pytest.raises(UserError, match=r"has no adapter beside .*k_proj; leave its matrix out of the targets"):
        peft.load(GOLDEN / "adapters" / "qwen3_moe_before", config, Adapters(rank=4, expert_rank=3))


def test_a_folder_that_is_in_use_is_not_overwritten(tmp_path):
    config = huggingface.read_config(GOLDEN / "qwen3")
    adapters = Adapters(rank=4)
    trained = peft.load(GOLDEN / "adapters" / "qwen3", config, adapters)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        peft.save(trained, config, adapters, tmp_path, base="")
