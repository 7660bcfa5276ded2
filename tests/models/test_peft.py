"""Folders of `peft`: checked against peft's own numbers (tests/golden/adapters), round trips, and refusals."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gspo_jax.errors import UserError
from gspo_jax.models import huggingface, lora, patterns, peft, transformer
from gspo_jax.models.lora import Adapters
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.types import Weights
from tests.tiny import mostly_slow

GOLDEN = Path(__file__).parents[1] / "golden"
MERGE = "merge it into the model with peft's merge_and_unload, and give that as model.folder without adapter.folder"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FOLDERS = {
    "qwen3": ("qwen3", Adapters(rank=4)),
    "qwen3_moe": ("qwen3_moe", Adapters(rank=4, expert_rank=3, targets=ATTENTION)),
    "qwen3_moe_modules": ("qwen3_moe", Adapters(rank=3, expert_rank=3, targets=ATTENTION)),
    "qwen3_moe_before": ("qwen3_moe", Adapters(expert_rank=3)),
}
"""Folder of adapters -> (its model, the adapters it has)."""
WRITTEN = ["qwen3", "qwen3_moe", "llama", "qwen3_next", "qwen3_5_moe"]


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


@pytest.mark.parametrize("of", mostly_slow(WRITTEN, always=WRITTEN[:3]))
def test_what_is_written_is_read_again_and_merges(of, tmp_path):
    config, base, tokens = read(of)
    adapters = Adapters(rank=2, expert_rank=5 * config.is_routed, alpha=3.0, targets=tuple(lora.TARGETS))
    graph, shapes = transformer.abstract(config, adapters=adapters)
    rng = np.random.default_rng(0)
    # Norms of small outputs of the delta rule amplify rounding.
    deviation, close = (0.05, 1e-3) if config.is_recurrent else (0.2, 2e-4)
    trained = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, deviation, x.shape), jnp.float32), lora.split(shapes)[0])
    peft.save(trained, config, adapters, tmp_path / "out", base="some/model")
    mesh = mesh_lib.make_mesh({"expert": 2, "fsdp": 4} if config.is_routed else {"fsdp": 8})
    again = peft.load(tmp_path / "out", config, adapters, mesh)
    jax.tree.map(np.testing.assert_array_equal, again, trained)
    expected = mesh_lib.param_shardings(lora.split(shapes)[0], mesh)
    assert jax.tree.map(lambda x: x.sharding, again) == expected
    assert json.loads((tmp_path / "out" / peft.CONFIG).read_text())["base_model_name_or_path"] == "some/model"
    merged = Weights.full(lora.merge(trained, base, adapters)).model(transformer.abstract(config)[0])(tokens).logits
    np.testing.assert_allclose(merged, Weights(trained, base).model(graph)(tokens).logits, atol=close)
    plain = Weights.full(base).model(transformer.abstract(config)[0])(tokens).logits
    assert np.abs(merged - plain).max() > 0.1


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


@pytest.mark.parametrize("begun", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_beginnings_that_leave_the_weights_alone(begun, tmp_path):
    """As peft 0.21.2 does: 'orthogonal' and 'mica' begin with a product of zero."""
    folder = changed(tmp_path, init_lora_weights=begun)
    peft.check(folder, huggingface.read_config(GOLDEN / "qwen3"), Adapters(rank=4))


def beside(change, tmp_path):
    """Return a copy of the golden folder "qwen3" with other tensors, each changed or left out (None)."""
    folder = changed(tmp_path)
    tensors = {name: change(name, tensor) for name, tensor in load_file(folder / peft.TENSORS).items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / peft.TENSORS)
    return folder


def halved(name, tensor):
    return np.ascontiguousarray(tensor[:2] if "lora_A" in name else tensor[:, :2])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda name, tensor: None if "layers.1." in name else tensor,  # layers_to_transform, exclude_modules
            rf"has no adapter beside model.layers.1.\w+.\w+, but beside the same matrix of other layers .*; {MERGE}",
        ),
        (
            lambda name, tensor: halved(name, tensor) if "q_proj" in name else tensor,  # rank_pattern
            rf"beside model.layers.0.self_attn.q_proj, and adapters of ranks 2 and 4, .* have one here; {MERGE}",
        ),
        (halved, r"of rank 2, and adapter.rank is 4; set it to 2"),
        (
            lambda name, tensor: np.concatenate([tensor] * 2, axis=1) if "lora_A" in name else tensor,
            "which are for another model; give theirs in model.folder",
        ),
        (
            lambda name, tensor: tensor.reshape(-1) if "0.self_attn.q_proj.lora_A" in name else tensor,
            r"q_proj.lora_A.weight is of shape \[\d+\], no matrix; save the adapters of a sound training run again",
        ),
        (
            lambda name, tensor: tensor * np.float32("nan") if "1.self_attn.q_proj.lora_B" in name else tensor,
            "q_proj.lora_B.weight is not finite everywhere; save the adapters of a sound training run again",
        ),
    ],
    ids=["layers", "ranks", "rank", "model", "a vector", "NaN"],
)
def test_tensors_that_the_config_has_no_place_for(change, says, tmp_path):
    with pytest.raises(UserError, match=says):
        peft.check(beside(change, tmp_path), huggingface.read_config(GOLDEN / "qwen3"), Adapters(rank=4))


@pytest.mark.parametrize(("before", "after"), [("model.model.", "model.model.model."), ("model.model.", "model.")])
def test_adapters_under_the_names_of_another_model(before, after, tmp_path):
    folder = changed(tmp_path)
    tensors = load_file(folder / peft.TENSORS)
    save_file({name.replace(before, after): tensor for name, tensor in tensors.items()}, folder / peft.TENSORS)
    says = (
        r"has no adapter beside (model.layers.0.\S+), but beside \S*layers.0.\S+, a name of another model; give that in"
    )
    with pytest.raises(UserError, match=says):
        peft.check(folder, huggingface.read_config(GOLDEN / "qwen3"), Adapters(rank=4))


def changed(tmp_path, **fields):
    """Return a copy of the golden folder "qwen3" whose config has other fields."""
    folder = shutil.copytree(GOLDEN / "adapters" / "qwen3", tmp_path / "copy")
    config = json.loads((folder / peft.CONFIG).read_text()) | fields
    (folder / peft.CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, f"use_dora is True; supported: False; {MERGE}"),
        ({"peft_type": "LOHA"}, f"peft_type is 'LOHA'; supported: 'LORA'; {MERGE}"),
        ({"bias": "all"}, f"bias is 'all'; supported: 'none'; {MERGE}"),
        ({"modules_to_save": ["lm_head"]}, rf"modules_to_save is \['lm_head'\]; supported: None, \[\]; {MERGE}"),
        ({"kasa_config": {"beta": 1e-4}}, f"kasa_config is {{'beta': 0.0001}}; supported: None; {MERGE}"),
        ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens is \[5\]; supported: None; train one without it"),
        ({"lora_alpha": None}, "the scale lora_alpha is None; set it to a finite number"),
        ({"lora_alpha": "8"}, "the scale lora_alpha is '8'; set it to a finite number"),
        ({"lora_alpha": 1e999}, "the scale lora_alpha is inf; set it to a finite number"),
        ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern is \['q_proj'\], no object of numbers by pattern; correct it"),
        ({"alpha_pattern": {"q_proj": "8"}}, "the scale q_proj is '8'; set it to a finite number"),
        ({"alpha_pattern": {"q(_proj": 8}}, r"alpha_pattern has 'q\(_proj', no pattern \(missing .*\); correct it"),
        ({"lora_alpha": 10**400}, "the scale lora_alpha is 1000.*; set it to a finite number"),
        ({"alpha_pattern": {"(" * 5000: 8}}, r"alpha_pattern has '\(\(\(.*, no pattern \(.*\); correct it"),
        ({"init_lora_weights": "loftq"}, f"'loftq', which changed the model's weights; {MERGE}"),
        *(
            (
                {"init_lora_weights": begun},
                f"'{begun}', which changed the model's weights; save it again with peft's path_initial_model_for",
            )
            for begun in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "lora_ga")
        ),
    ],
)
def test_features_that_are_not_supported(fields, says, tmp_path):
    with pytest.raises(UserError, match=says):
        peft.check(changed(tmp_path, **fields), huggingface.read_config(GOLDEN / "qwen3"), Adapters(rank=4))


@pytest.mark.faults
@pytest.mark.parametrize("pattern", [r"(a|.|\w)*!", r"(([a-z_.0-9])+.?)+[A-Z]", r"(.*)*(.*)*(.*)*\d{9}", r"(\w*\.?)*_"])
def test_patterns_that_take_too_long_end_in_one_sentence(pattern, tmp_path):
    folder = changed(tmp_path, alpha_pattern={"k_proj": 3, pattern: 8})
    # Which one depends on how many names a fast machine matches before it meets the budget.
    ends = "(does not end within 2 s|takes more than 20 ms again and again); correct its patterns$"
    with pytest.raises(UserError, match=rf"alpha_pattern \{{'k_proj': 3, .* {ends}"):
        peft.check(folder, huggingface.read_config(GOLDEN / "qwen3"), Adapters(rank=4))


def test_patterns_are_matched_as_peft_does():
    """Of the whole name, or from behind one of its dots, the first pattern that matches."""
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.10.self_attn.k_proj",
        "model.layers.1.mlp.experts.down_proj",
    ]
    given = [r"^model.layers.0.self_attn.q_proj", "k_proj", r".*experts.down_proj", r"layers\.(0|1)\..*", "proj"]
    assert patterns.first_matches(given, names) == [0, 1, 2]
    assert patterns.first_matches(given[3:], names) == [0, None, 0]
    assert patterns.first_matches([], names) == [None] * 3


@pytest.mark.parametrize(
    ("adapters", "says"),
    [
        (Adapters(rank=8), "of rank 4, and adapter.rank is 8; set it to 4"),
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
