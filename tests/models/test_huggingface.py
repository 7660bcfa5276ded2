"""Hugging Face folders: checked against transformers' own numbers (tests/golden), round trips, meshes, and refusals."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gspo_jax.errors import UserError
from gspo_jax.models import huggingface, tensors
from gspo_jax.models.config import Latent, Llama3Rope, ModelConfig, YarnRope
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import MIXED, load_model, mixed_family, params, save_model  # noqa: F401

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
NAMES = ("qwen3_moe", "qwen3_moe_fused", "qwen3", "qwen3_tied", "olmoe", "llama", "llama_tied", "granitemoe")
NAMES += ("glm4_moe", "qwen2", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe")
_SLOW = ("qwen2", "mixtral", "qwen3_next")
MOSTLY_SLOW = [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in NAMES]
NUMBERS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = NUMBERS | {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 32}


@functools.cache
def loaded(name: str) -> tuple[Transformer, ModelConfig]:
    return load_model(GOLDEN / name)


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / name / "reference.npz"))


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> jax.Array:
    return nnx.merge(graph, params)(tokens).logits


def logits(model: Transformer, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_forward(*nnx.split(model), jnp.asarray(tokens)))


@functools.cache
def of_reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of the reference's tokens, and of its prompts followed by their greedy continuations.

    What follows a row's own tokens changes nothing in it.
    """
    ref = reference(name)
    tokens = np.pad(ref["tokens"], ((0, 0), (0, ref["greedy"].shape[1])))
    paths = tokens.copy()
    for path, length, greedy in zip(paths, ref["lengths"], ref["greedy"], strict=True):
        path[length : length + len(greedy)] = greedy
    found, along = np.split(logits(loaded(name)[0], np.concatenate([tokens, paths])), 2)
    return found[:, : ref["tokens"].shape[1]], along


def leaves(model: Transformer | nnx.State) -> dict[str, np.ndarray]:
    state = nnx.state(model) if isinstance(model, nnx.Module) else model
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(state)}


def assert_same(a: Transformer | nnx.State, b: Transformer | nnx.State) -> None:
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key, strict=True)


def edit(file: pathlib.Path, **changes: Any) -> None:
    """Rewrite fields of a JSON file; a value of ... deletes the field."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


def retensor(folder: pathlib.Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Rewrite the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    return lambda name: pathlib.Path(shutil.copytree(GOLDEN / name, tmp_path / name))


# Against transformers


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_logits(name: str) -> None:
    np.testing.assert_allclose(of_reference(name)[0], reference(name)["logits"], rtol=0, atol=1e-4)


def test_logits_with_heads_split_over_a_mesh() -> None:
    """Olmoe's norm over a whole projection sums over the shards that hold its heads."""
    ref, (model, config) = reference("olmoe"), loaded("olmoe")
    mesh = mesh_lib.make_mesh({"expert": 2, "tensor": 2}, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = nnx.merge(nnx.split(model)[0], huggingface.load_params(GOLDEN / "olmoe", config, mesh))
        found = logits(split, np.concatenate([ref["tokens"], ref["tokens"][:1]]))
    np.testing.assert_allclose(found[:3], ref["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_greedy(name: str) -> None:
    """The argmax agrees after every prefix of the reference's path, so greedy decoding takes that path."""
    ref, best = reference(name), of_reference(name)[1].argmax(axis=-1)
    for row, length, greedy in zip(best, ref["lengths"], ref["greedy"], strict=True):
        np.testing.assert_array_equal(row[length - 1 :][: len(greedy)], greedy)


def test_config() -> None:
    common = {
        "vocab_size": 288, "hidden_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "max_position_embeddings": 512, "pad_token_id": 0,
    }  # fmt: skip
    moe = {"num_experts": 8, "moe_intermediate_size": 32}
    small = common | {
        "vocab_size": 128, "hidden_size": 32, "num_layers": 2, "head_dim": 8, "intermediate_size": 24,
        "rope_theta": 1e4, "eos_token_ids": (1,),
    }  # fmt: skip
    expected = {
        "qwen3_moe": ModelConfig(**common, **moe, experts_per_token=2, eos_token_ids=(1,)),
        "qwen3_moe_fused": ModelConfig(
            **common, **moe, experts_per_token=3, norm_topk_prob=False, rope_theta=1e4, eos_token_ids=(1, 2)
        ),
        "qwen3": ModelConfig(**common, eos_token_ids=(1,)),
        "qwen3_tied": ModelConfig(**common | {"num_layers": 2}, tie_word_embeddings=True, eos_token_ids=(1,)),
        "olmoe": ModelConfig(
            **common | moe | {"head_dim": 12, "intermediate_size": 32},
            family="olmoe",
            experts_per_token=3,
            norm_topk_prob=False,
            rope_theta=1e4,
            rms_norm_eps=1e-5,
            eos_token_ids=(1,),
        ),
        "llama": ModelConfig(
            **common, family="llama", rope_theta=1e4, eos_token_ids=(1, 2),
            rope_scaling=Llama3Rope(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
        ),
        "llama_tied": ModelConfig(
            **common | {"num_layers": 2, "head_dim": 12}, family="llama", rope_theta=1e5, tie_word_embeddings=True,
            eos_token_ids=(1,),
        ),
        "granitemoe": ModelConfig(
            **small, family="granitemoe", num_experts=8, experts_per_token=3, moe_intermediate_size=24,
            attention_multiplier=0.2, embedding_multiplier=0.4, residual_multiplier=0.7, logits_scaling=0.5,
            tie_word_embeddings=True,
        ),
        "glm4_moe": ModelConfig(
            **small | {"num_layers": 3}, family="glm4_moe", dense_layers=1, num_experts=8, experts_per_token=3,
            moe_intermediate_size=12, shared_intermediate_size=24, expert_groups=4, groups_per_token=2,
            routed_scaling_factor=2.5, qk_norm=True, attention_bias=True, partial_rotary_factor=0.5,
        ),
        "qwen2": ModelConfig(**small, family="qwen2", attention_bias=True, tie_word_embeddings=True),
        "qwen2_moe": ModelConfig(
            **small, family="qwen2_moe", num_experts=8, experts_per_token=3, moe_intermediate_size=16,
            shared_intermediate_size=40, norm_topk_prob=False, attention_bias=True,
        ),
        "mixtral": ModelConfig(
            **small, family="mixtral", num_experts=6, experts_per_token=2, moe_intermediate_size=24,
        ),
        "deepseek_v3": ModelConfig(
            **small | {"num_layers": 3, "num_kv_heads": 4, "rope_theta": 100.0}, family="deepseek_v3",
            latent=Latent(rank=16, query_rank=24, plain_dim=12, value_dim=24, interleaved=True), attention_bias=True,
            rope_scaling=YarnRope(factor=4.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=1.3),
            dense_layers=1, num_experts=8, experts_per_token=3, moe_intermediate_size=8, shared_intermediate_size=8,
            expert_groups=4, groups_per_token=2, routed_scaling_factor=2.5,
        ),
        "glm4_moe_lite": ModelConfig(
            **small | {"num_kv_heads": 4}, family="glm4_moe_lite",
            latent=Latent(rank=16, query_rank=None, plain_dim=12, value_dim=16, interleaved=True),
            dense_layers=1, num_experts=8, experts_per_token=2, moe_intermediate_size=16, shared_intermediate_size=16,
            routed_scaling_factor=1.8,
        ),
    }  # fmt: skip
    hybrid = ModelConfig(
        **common | {"vocab_size": 128, "hidden_size": 32, "num_layers": 4},
        family="qwen3_next", num_experts=4, experts_per_token=2, moe_intermediate_size=8, shared_intermediate_size=12,
        rope_theta=1e4, partial_rotary_factor=0.25, zero_centred_norms=True, eos_token_ids=(1,),
        layer_types=("linear_attention", "full_attention") * 2,
        linear_key_heads=2, linear_value_heads=4, linear_key_dim=8, linear_value_dim=12,
    )  # fmt: skip
    types = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
    other = {"family": "qwen3_5_moe", "layer_types": types, "linear_key_heads": 4}
    expected |= {"qwen3_next": hybrid, "qwen3_5_moe": dataclasses.replace(hybrid, **other)}
    assert {name: huggingface.read_config(GOLDEN / name) for name in NAMES} == expected


LONG = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "rope_theta": 1e4}
# Of heads of 16: fields, their amplitude by transformers, and its frequencies.
YARN: dict[str, tuple[dict[str, Any], float, list[float]]] = {
    "as DeepSeek-V3": (
        LONG | {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0,
        [1.0, 0.3162278, 0.1, 0.02391472, 0.005125, 0.0008498622, 2.5e-05, 7.905694e-06],
    ),
    "as Kimi-K2": (
        LONG | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "rope_theta": 5e4}, 1.0,
        [1.0, 0.2586001, 0.06687403, 0.01729363, 0.004472136, 3.614047e-05, 9.34593e-06, 2.416859e-06],
    ),
    "as Qwen3": (
        LONG | {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}, 1.138629436,
        [1.0, 0.1778279, 0.03162278, 0.00421756, 0.0005, 4.445699e-05, 7.905694e-06, 1.405853e-06],
    ),
    "not truncated": (
        LONG | {"factor": 8.0, "original_max_position_embeddings": 2048, "beta_fast": 16, "beta_slow": 2,
                "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}, 0.901783987,
        [1.0, 0.3162278, 0.1, 0.02577162, 0.003305222, 0.0003952847, 0.000125, 3.952847e-05],
    ),
    "a ratio": (
        LONG | {"factor": None, "original_max_position_embeddings": 2048, "attention_factor": 1.5}, 1.5,
        [1.0, 0.3162278, 0.1, 0.02470529, 0.005625, 0.001087033, 0.000125, 3.952847e-05],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", YARN)
def test_yarn(name: str, copy: Callable[[str], pathlib.Path]) -> None:
    fields, amplitude, frequencies = YARN[name]
    folder = copy("qwen3")
    edit(folder / "config.json", rope_parameters=fields, max_position_embeddings=16384)
    config = huggingface.read_config(folder)
    np.testing.assert_allclose(config.rope_frequencies(), frequencies, rtol=1e-6)
    np.testing.assert_allclose(config.rope_amplitude, amplitude, rtol=1e-8)
    edit(folder / "config.json", **huggingface.config_json(config, np.dtype("float32")))
    assert huggingface.read_config(folder) == config


def test_the_amplitude_multiplies_queries_and_keys(copy: Callable[[str], pathlib.Path]) -> None:
    """Twice the amplitude is four times the scores: as with norms of queries four times as large."""
    folder, tokens = copy("qwen3"), reference("qwen3")["tokens"]
    still = {"rope_type": "yarn", "factor": 1.0, "rope_theta": 1e6}
    edit(folder / "config.json", rope_parameters=still | {"attention_factor": 2.0})
    found = logits(load_model(folder)[0], tokens)
    edit(folder / "config.json", rope_parameters=still)

    def wider(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name: 4 * x for name, x in tensors.items() if "q_norm" in name}

    retensor(folder, wider)
    np.testing.assert_allclose(found, logits(load_model(folder)[0], tokens), rtol=0, atol=1e-4)


# Spellings and layouts


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # transformers 4 spelling: RoPE at the top level, num_experts, torch_dtype
        ("qwen3_moe", {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": None}, {}),
        ("qwen3_moe", {"num_local_experts": ..., "num_experts": 8, "dtype": ..., "torch_dtype": "bfloat16"}, {}),
        ("qwen3_moe", {"rope_theta": 3.0}, {}),  # rope_parameters takes precedence
        ("qwen3_moe", {"rope_parameters": ..., "rope_theta": 500000}, {"rope_theta": 5e5}),
        ("qwen3_moe", {"rope_parameters": ...}, {"rope_theta": 1e4}),  # transformers' default
        ("qwen3_moe", {"rope_scaling": {"type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ("qwen3_moe", {"norm_topk_prob": ..., "mlp_only_layers": None}, {"norm_topk_prob": False}),
        ("qwen3_moe", {"head_dim": ...}, {"head_dim": 12}),  # 48 / 4
        ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
        ("qwen3", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("qwen3", {"tie_word_embeddings": ..., "rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}),
        ("qwen3", {"eos_token_id": [1, 7], "pad_token_id": None}, {"eos_token_ids": (1, 7), "pad_token_id": None}),
        ("qwen3", {"eos_token_id": None}, {"eos_token_ids": ()}),
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": False}, {}),
        ("olmoe", {"head_dim": ..., "rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": None}, {}),
        ("llama_tied", {"head_dim": ..., "rope_parameters": ..., "rope_theta": 1e5, "mlp_bias": ...}, {}),
        ("llama", {"rope_parameters": ..., "rope_scaling": {k: v for k, v in LLAMA3.items() if "theta" not in k}}, {}),
        ("llama", {"rope_parameters": ..., "eos_token_id": ...}, {"rope_scaling": None, "eos_token_ids": (2,)}),
        ("qwen3_next", {"layer_types": ..., "full_attention_interval": 2}, {}),
        ("qwen3_next", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}),  # 0.25 at the top level
        ("qwen3_5_moe", {"intermediate_size": ..., "norm_topk_prob": False}, {"intermediate_size": 8}),
        ("granitemoe", {"attention_multiplier": ..., "num_experts_per_tok": 2},
         {"attention_multiplier": 1.0, "experts_per_token": 2}),
        ("glm4_moe", {"rope_parameters": ..., "rope_theta": 1e4}, {}),  # half of a head is the default
        ("glm4_moe", {"rope_parameters": ..., "rope_theta": 1e4, "partial_rotary_factor": 0.25},
         {"partial_rotary_factor": 0.25}),
        ("glm4_moe", {"first_k_dense_replace": 0, "n_group": ..., "topk_group": ...},
         {"dense_layers": 0, "expert_groups": 1, "groups_per_token": 1}),
        ("qwen2_moe", {"qkv_bias": False}, {"attention_bias": False}),
        ("mixtral", {"rope_parameters": ..., "sliding_window": 4096}, {"rope_theta": 1e6}),
        ("olmoe", {"norm_topk_prob": True, "eos_token_id": ..., "pad_token_id": ...},
         {"norm_topk_prob": True, "eos_token_ids": (50279,), "pad_token_id": 1}),
    ],
)  # fmt: skip
def test_config_spellings(
    copy: Callable[[str], pathlib.Path], name: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    folder = copy(name)
    edit(folder / "config.json", **changes)
    found = huggingface.read_config(folder)
    assert {key: getattr(found, key) for key in expected} == expected
    same = {field: value for field, value in vars(loaded(name)[1]).items() if field not in expected}
    assert {key: getattr(found, key) for key in same} == same


def test_text_of_a_vision_language_model(copy: Callable[[str], pathlib.Path], capfd) -> None:
    """Its text tensors are read, from under another prefix, and it is said which others are left out."""
    folder = copy("qwen3_5_moe")
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_5_moe_text"}
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors |= dict.fromkeys(("mtp.fc.weight", "mtp.norm.weight", "model.visual.pos_embed.weight"), np.zeros(2))

    retensor(folder, rename)
    for _ in range(2):
        model, config = load_model(folder)
        assert config == loaded("qwen3_5_moe")[1]
        assert_same(model, loaded("qwen3_5_moe")[0])
    said = capfd.readouterr()
    for what in ("2 tensors for multi-token prediction", "1 tensors for vision"):
        assert (said.out + said.err).count(what) == 1, "once"


def test_tied_checkpoint_with_a_head_is_read(copy: Callable[[str], pathlib.Path], monkeypatch) -> None:
    monkeypatch.setattr(tensors, "_COMPARED", 100)  # of 288 rows
    folder = copy("qwen3_tied")
    retensor(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_same(load_model(folder)[0], loaded("qwen3_tied")[0])


def test_a_head_beside_the_embedding_is_used_once_the_config_says_so(copy: Callable[[str], pathlib.Path]) -> None:
    """The remedies of the messages: a folder is untied, or tied, by its config.json alone."""
    folder = copy("qwen3_tied")
    retensor(folder, lambda t: t.update({"lm_head.weight": 2 * t["model.embed_tokens.weight"]}))
    edit(folder / "config.json", tie_word_embeddings=False)
    tokens, tied = np.arange(3, 9)[None], loaded("qwen3_tied")[0]
    np.testing.assert_allclose(logits(load_model(folder)[0], tokens), 2 * logits(tied, tokens), rtol=1e-5)
    drop("lm_head.weight")(folder)
    edit(folder / "config.json", tie_word_embeddings=True)
    assert_same(load_model(folder)[0], tied)


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_round_trip(tmp_path: pathlib.Path, name: str) -> None:
    model, config = loaded(name)
    save_model(model, config, tmp_path / "many", max_shard_bytes=60_000)
    huggingface.save(nnx.state(model), config, tmp_path / "deep" / "one")
    for folder in (tmp_path / "many", tmp_path / "deep" / "one"):
        again, config_again = load_model(folder)
        assert config_again == config
        assert_same(again, model)
    assert {f.name for f in (tmp_path / "deep" / "one").iterdir()} == {"config.json", "model.safetensors"}
    assert {f.name for f in tmp_path.iterdir()} == {"many", "deep"}  # no temporary file is left

    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for file in sorted((tmp_path / "many").glob("*.safetensors")):
        tensors = load_file(file)
        size = sum(t.nbytes for t in tensors.values())
        assert size <= 60_000
        found |= dict.fromkeys(tensors, file.name)
        total += size
    assert len(set(found.values())) > 1
    assert index == {"metadata": {"total_size": total}, "weight_map": index["weight_map"]}
    assert index["weight_map"] == found


def test_saves_what_transformers_saved(tmp_path: pathlib.Path) -> None:
    """Names, shapes, values and the metadata that transformers 4 requires equal those in its own file."""
    save_model(*loaded("qwen3_moe"), tmp_path / "out")
    theirs, ours = (load_file(f / "model.safetensors") for f in (GOLDEN / "qwen3_moe", tmp_path / "out"))
    assert theirs.keys() == ours.keys()
    for key in theirs:
        np.testing.assert_array_equal(theirs[key], ours[key], strict=True)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text())
    renamed = {"num_experts": theirs.pop("num_local_experts"), "torch_dtype": theirs.pop("dtype")}
    assert {key: config[key] for key in config.keys() & theirs.keys()} == {
        key: theirs[key] for key in config.keys() & theirs.keys()
    }
    assert renamed.items() <= config.items()
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_scaling"] is None


def test_bfloat16(tmp_path: pathlib.Path) -> None:
    model, config = loaded("qwen3_moe")
    save_model(model, config, tmp_path / "out", dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
    rounded = {key: value.astype(ml_dtypes.bfloat16) for key, value in leaves(model).items()}

    wide, _ = load_model(tmp_path / "out")
    narrow, _ = load_model(tmp_path / "out", param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    for key, value in rounded.items():
        np.testing.assert_array_equal(leaves(wide)[key], value.astype(np.float32), strict=True)
        kept = np.float32 if "norm" in key or "router" in key else value.dtype  # the model reads these in float32
        np.testing.assert_array_equal(leaves(narrow)[key], value.astype(kept), strict=True)
    assert narrow.dtype == jnp.bfloat16
    assert np.isfinite(logits(narrow, reference("qwen3_moe")["tokens"])).all()


def test_a_second_stack_has_its_own_layers(tmp_path: pathlib.Path, mixed_family: None) -> None:  # noqa: F811
    """In the checkpoint as in the model, layer 0 is dense and layers 1 and 2 are routed."""
    weights = params(MIXED)
    huggingface.save(weights, MIXED, tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert {f"model.layers.{i}.mlp.gate.weight" in names for i in (1, 2)} == {True}
    assert "model.layers.0.mlp.gate_proj.weight" in names and "model.layers.0.mlp.gate.weight" not in names
    assert_same(huggingface.load_params(tmp_path / "out", MIXED), weights)


# Meshes

MESHES = [
    ("qwen3_moe", {"fsdp": 2, "expert": 2, "tensor": 2}, {}),
    ("qwen3_moe_fused", {"fsdp": 2, "expert": 4}, {}),
    ("qwen3_moe_fused", {"fsdp": 4, "tensor": 2}, {}),
    ("qwen3_moe_fused", {"fsdp": 4, "tensor": 2}, {"embed": ()}),
    ("qwen3", {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    ("llama", {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    ("olmoe", {"fsdp": 2, "expert": 2, "tensor": 2}, {}),
    ("glm4_moe", {"fsdp": 2, "expert": 2, "tensor": 2}, {}),
    ("granitemoe", {"fsdp": 2, "expert": 2, "tensor": 2}, {}),
    ("qwen2_moe", {"fsdp": 2, "expert": 2, "tensor": 2}, {}),
    # head_dim, the minor half of a joined dimension, is sharded by no rule of ours, but the reader must allow for it
    ("qwen3_tied", {"data": 2, "fsdp": 2, "tensor": 2}, {"head_dim": ("data",), "layers": ("fsdp",), "embed": ()}),
]


@pytest.mark.parametrize(("name", "sizes", "changed"), MESHES)
def test_loads_onto_a_mesh(
    monkeypatch: pytest.MonkeyPatch, name: str, sizes: dict[str, int], changed: mesh_lib.Rules
) -> None:
    model, config = loaded(name)  # load the model before counting reads
    read: list[int] = []
    original = huggingface.Checkpoint.read

    def counted(self: huggingface.Checkpoint, *args: Any) -> np.ndarray:
        piece = original(self, *args)
        read.append(piece.size)
        return piece

    monkeypatch.setattr(huggingface.Checkpoint, "read", counted)
    for axis, split in changed.items():
        monkeypatch.setitem(mesh_lib.TRAINER, axis, split)
    mesh = mesh_lib.make_mesh(sizes)
    params = huggingface.load_params(GOLDEN / name, config, mesh)
    assert_same(params, model)
    wanted = mesh_lib.param_shardings(nnx.state(model), mesh, mesh_lib.TRAINER)
    found = jax.tree.map(lambda a: a.sharding, params)
    assert jax.tree.leaves(jax.tree.map(lambda a, b: a == b, found, wanted)).count(False) == 0
    if "head_dim" not in changed:
        # Every element is read exactly once: replicas share reads, and no shard reads its neighbour's part.
        assert sum(read) == sum(value.size for value in leaves(model).values())


def test_saves_from_a_mesh(tmp_path: pathlib.Path) -> None:
    sharded, config = load_model(GOLDEN / "qwen3_moe", mesh_lib.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2}))
    save_model(sharded, config, tmp_path / "out", max_shard_bytes=300_000)
    assert_same(load_model(tmp_path / "out")[0], loaded("qwen3_moe")[0])


def test_mesh_that_does_not_divide() -> None:
    with pytest.raises(UserError, match="mesh axis tensor = 8 does not divide the number of heads 4"):
        load_model(GOLDEN / "qwen3", mesh_lib.make_mesh({"tensor": 8}))


# Writing over something


def test_save_replaces_a_checkpoint_and_nothing_else(
    copy: Callable[[str], pathlib.Path],
) -> None:
    folder = copy("qwen3_moe_fused")  # three shards and an index
    (folder / "tokenizer.json").write_text("mine")
    save_model(*loaded("qwen3"), folder)
    assert {f.name for f in folder.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "reference.npz"
    }  # fmt: skip
    assert_same(load_model(folder)[0], loaded("qwen3")[0])
    save_model(*loaded("qwen3"), folder, max_shard_bytes=60_000)
    assert not (folder / "model.safetensors").exists()
    assert_same(load_model(folder)[0], loaded("qwen3")[0])


def test_interrupted_save_leaves_things_as_they_were(
    copy: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy("qwen3_moe")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(huggingface, "write_file", full)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(OSError, match="no space"):
            save_model(*loaded("qwen3"), target)
    assert {f.name for f in tmp_path.iterdir()} == {"qwen3_moe"}
    assert_same(load_model(folder)[0], loaded("qwen3_moe")[0])


# Refusals: (golden folder, what is done to a copy of it, what the error must say)


def config_edit(**changes: Any) -> Callable[[pathlib.Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def cut(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def index(content: Any) -> Callable[[pathlib.Path], Any]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def drop(name: str) -> Callable[[pathlib.Path], None]:
    return lambda folder: retensor(folder, lambda t: t.pop(name))


def head(make: Callable[[np.ndarray], np.ndarray]) -> Callable[[pathlib.Path], None]:
    """Give a tied model a head that is made of its embedding."""
    return lambda folder: retensor(
        folder, lambda t: t.update({"lm_head.weight": np.ascontiguousarray(make(t["model.embed_tokens.weight"]))})
    )


def put(name: str, value: np.ndarray) -> Callable[[pathlib.Path], None]:
    return lambda folder: retensor(folder, lambda t: t.update({name: value}))


DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
REFUSALS: dict[str, tuple[str, Callable[[pathlib.Path], Any], str]] = {
    "model_type": ("qwen3", config_edit(model_type="gpt_oss"), 'model_type is "gpt_oss"; supported: only "'),
    "no model_type": ("qwen3", config_edit(model_type=...), "model_type is null; supported"),
    "rope scaling": ("qwen3", config_edit(rope_parameters=..., rope_scaling={"rope_type": "linear", "factor": 4.0}),
                     'rope_scaling is {"rope_type": "linear", "factor": 4.0}; supported: only rope_type "default"'),
    "yarn, upside down": ("qwen3", config_edit(rope_parameters=LONG | {"factor": 4.0, "beta_slow": 40.0}),
                          "config.json: beta_slow 40 is above beta_fast 32; correct them"),
    "yarn, negative": ("qwen3", config_edit(rope_parameters=LONG | {"factor": -4.0}), "factor is -4.0; it must be a"),
    "rope scaling 5": ("qwen3", config_edit(rope_parameters=DEFAULT | {"rope_type": "linear"}), "rope_parameters is"),
    "rope, old key": ("qwen3", config_edit(rope_scaling={"type": "dynamic", "factor": 2.0}), "on the whole head; set "
                      "rope_type to default there, the same up to max_position_embeddings"),
    "longrope": ("qwen3", config_edit(rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
                 "on the whole head; use another model"),
    "rope, upside down": ("llama", config_edit(rope_parameters=LLAMA3 | {"low_freq_factor": 8.0}),
                          "config.json: low_freq_factor 8 is not below high_freq_factor 4; correct them"),
    "rope without a factor": ("llama", config_edit(rope_parameters=LLAMA3 | {"factor": None}), "factor is null; it"),
    "rope without positions": ("llama", config_edit(rope_parameters={"rope_type": "llama3"} | NUMBERS),
                               "original_max_position_embeddings is missing"),
    "a Llama's bias": ("llama", config_edit(attention_bias=True), "attention_bias is true; supported: only false"),
    "a Llama's other bias": ("llama", config_edit(mlp_bias=True), "mlp_bias is true; supported: only false"),
    "pairs side by side": ("llama", config_edit(rope_interleaved=True), "rope_interleaved is true; supported: only"),
    "rope per layer": ("qwen3", config_edit(rope_parameters={"full_attention": DEFAULT}), "rope_parameters is"),
    "partial rope": ("qwen3", config_edit(rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5}), "rope_parameters"),
    "partial rope 4": ("qwen3", config_edit(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; supported"),
    "bias": ("qwen3", config_edit(attention_bias=True), "attention_bias is true; supported: only false"),
    "dropout": ("qwen3", config_edit(attention_dropout=0.1), "attention_dropout is 0.1; supported: only 0"),
    "activation": ("qwen3", config_edit(hidden_act="gelu"), 'hidden_act is "gelu"; supported: only "silu"'),
    "sliding window": ("qwen3", config_edit(use_sliding_window=True, sliding_window=64),
                       "sliding_window is 64; supported: only null; set it to null, and max_position_embeddings to"),
    "window of mistral": ("llama", config_edit(model_type="mistral", sliding_window=256),
                          "sliding_window is 256; supported: only null"),
    "window, by default": ("llama", config_edit(model_type="mistral", max_position_embeddings=8192),
                           "sliding_window is 4096; supported: only null"),
    "window of mixtral": ("mixtral", config_edit(sliding_window=64), "sliding_window is 64; supported: only null"),
    "bias of granite": ("granitemoe", config_edit(attention_bias=True), "attention_bias is true; supported: only"),
    "multiplier": ("granitemoe", config_edit(residual_multiplier=-1), "residual_multiplier is -1; it must be a"),
    "share of a head": ("glm4_moe", config_edit(rope_parameters=DEFAULT | {"partial_rotary_factor": 1.5}),
                        "partial_rotary_factor is 1.5; it must be a share of a head, 1 or less"),
    "scores": ("glm4_moe", config_edit(scoring_func="softmax"), 'scoring_func is "softmax"; supported: only "sigmoid"'),
    "groups": ("deepseek_v3", config_edit(n_group=3), "config.json: expert_groups 3 does not divide the 8 experts"),
    "a rank": ("glm4_moe_lite", config_edit(kv_lora_rank=-1), "kv_lora_rank is -1; it must be a positive integer"),
    "fewer keys": ("deepseek_v3", config_edit(num_key_value_heads=1), "num_key_value_heads is 1; supported: only 4"),
    "windows beside states": ("qwen3_next", config_edit(layer_types=["linear_attention", "sliding_attention"] * 2),
                              'layer_types is ["linear_attention", "sliding_attention"]; supported: only ["full_'),
    "no attention": ("qwen3_next", config_edit(layer_types=..., full_attention_interval=99),
                     "layer_types has 4 layers, 0 of them full_attention; it must have num_hidden_layers = 4"),
    "values for each key": ("qwen3_next", config_edit(linear_num_value_heads=3),
                            "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2; download the file"),
    "a longer filter": ("qwen3_5_moe", config_edit(linear_conv_kernel_dim=5), "conv1d.weight is [112, 1, 4]"),
    "sparse step of Qwen2": ("qwen2_moe", config_edit(decoder_sparse_step=2), "decoder_sparse_step is 2; supported"),
    "layer types": ("qwen3", config_edit(layer_types=["full_attention", "sliding_attention"]), "layer_types is"),
    "quantised": ("qwen3", config_edit(quantization_config={"quant_method": "gptq", "bits": 4}),
                  'config.json: quantization_config has quant_method "gptq"; supported: only "fp8", with a scale per'),
    "sparse step": ("qwen3_moe", config_edit(decoder_sparse_step=2), "decoder_sparse_step is 2; supported: only 1"),
    "dense layers": ("qwen3_moe", config_edit(mlp_only_layers=[0]), "mlp_only_layers is [0]; supported: only []"),
    "clipped": ("olmoe", config_edit(clip_qkv=8.0), "config.json: clip_qkv is 8.0; supported: only null"),
    "wider heads": ("olmoe", config_edit(head_dim=16), "config.json: head_dim is 16; supported: only 12 and null"),
    "missing size": ("qwen3", config_edit(hidden_size=...), "config.json: hidden_size is missing"),
    "missing experts": ("qwen3_moe", config_edit(num_local_experts=...), "num_experts or num_local_experts is missing"),
    "bad size": ("qwen3", config_edit(vocab_size="many"), 'vocab_size is "many"; it must be a positive integer'),
    "too many experts": ("qwen3_moe", config_edit(num_experts_per_tok=9),
                         "num_experts_per_tok 9 is above the 8 experts; set it to 8 or less"),
    "no folder": ("qwen3", shutil.rmtree, "is not a folder; download the Hugging Face checkpoint"),
    "no config": ("qwen3", lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "bad JSON": ("qwen3", lambda f: (f / "config.json").write_text('{"a": '), "config.json is not valid JSON"),
    "no object": ("qwen3", lambda f: (f / "config.json").write_text("[]"), "config.json holds a JSON list, not an"),
    "null": ("qwen3", lambda f: (f / "config.json").write_text("null"), "config.json holds a JSON NoneType"),
    "too deep": ("qwen3", lambda f: (f / "config.json").write_text('{"a": ' + "[" * 100_000), "config.json is not"),
    "no UTF-8": ("qwen3", lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json is not valid JSON"),
    "layer types, a number": ("qwen3", config_edit(layer_types=5), "config.json: layer_types is 5; supported: only"),
    "layer types, lists": ("qwen3", config_edit(layer_types=[[]]), "config.json: layer_types is [[]]; supported: only"),
    "rope, a list": ("qwen3", config_edit(rope_parameters=[1]), "config.json: rope_parameters is [1]; supported: only"),
    "theta, null": ("qwen3", config_edit(rope_parameters=DEFAULT | {"rope_theta": None}),
                    "rope_theta is null; it must be a positive number"),
    "theta, text": ("qwen3", config_edit(rope_parameters=..., rope_theta="1e6"), 'config.json: rope_theta is "1e6";'),
    "eps, null": ("qwen3", config_edit(rms_norm_eps=None), "rms_norm_eps is null; it must be a positive number"),
    "eps, NaN": ("qwen3", config_edit(rms_norm_eps=float("nan")), "rms_norm_eps is NaN; it must be a positive number"),
    "tied, text": ("qwen3", config_edit(tie_word_embeddings="no"), "is \"no\"; it must be true or false"),
    "normed, list": ("qwen3_moe", config_edit(norm_topk_prob=[]), "norm_topk_prob is []; it must be true or false"),
    "end, text": ("qwen3", config_edit(eos_token_id=["<eos>"]), 'eos_token_id is "<eos>"; it must be a token id'),
    "end, object": ("qwen3", config_edit(eos_token_id={}), "eos_token_id is {}; it must be a token id, an integer"),
    "padding, list": ("qwen3", config_edit(pad_token_id=[0]), "pad_token_id is [0]; it must be a token id"),
    "model_type, list": ("qwen3", config_edit(model_type=["qwen3"]), 'model_type is ["qwen3"]; supported: only'),
    "huge size": ("qwen3", config_edit(hidden_size=10**30), "it must be a positive integer below 2^31"),
    "long value": ("qwen3", config_edit(vocab_size="x" * 200), '"' + "x" * 96 + "...; it must be"),
    "no weights": ("qwen3", lambda f: (f / "model.safetensors").unlink(),
                   "has neither model.safetensors nor model.safetensors.index.json; save the model as safetensors"),
    "no shard": ("qwen3_moe_fused", lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
                 "model-00002-of-00003.safetensors does not exist though model.safetensors.index.json names it"),
    "empty index": ("qwen3_moe_fused", lambda f: edit(f / "model.safetensors.index.json", weight_map=...),
                    "model.safetensors.index.json has no weight_map"),
    **{
        f"index {value!r:.20}": ("qwen3_moe_fused", index(value), message)
        for value, message in (
            (None, "index.json holds a JSON NoneType, not an object"),
            (5, "index.json holds a JSON int, not an object"),
            ([], "index.json holds a JSON list, not an object"),
            ({"weight_map": None}, "index.json has no weight_map"),
            ({"weight_map": [5]}, "index.json has no weight_map"),
        )
    },
    **{
        f"shard {name!r}": (
            "qwen3_moe_fused",
            index({"weight_map": {"lm_head.weight": name}}),
            f"says that lm_head.weight is in {name!r}; only .safetensors files in the same folder are opened, so",
        )
        for name in ("../x.safetensors", "a/../../x.safetensors", "/etc/x.safetensors", "..", "", "a\0.safetensors",
                     "config.json", None, 5, [], {})
    },
    "truncated": ("qwen3", cut, "model.safetensors is not a complete safetensors file"),
    "not safetensors": ("qwen3", lambda f: (f / "model.safetensors").write_text("version https://git-lfs"),
                        "model.safetensors is not a complete safetensors file"),
    "no tensor": ("qwen3", drop("model.layers.1.mlp.up_proj.weight"),
                  "has no tensor model.layers.1.mlp.up_proj.weight, which its config.json asks for; download it again"),
    "no expert": ("qwen3_moe", drop("model.layers.2.mlp.experts.7.down_proj.weight"),
                  "has no tensor model.layers.2.mlp.experts.7.down_proj.weight"),
    "untied, no head": ("qwen3", drop("lm_head.weight"),
                        "has no tensor lm_head.weight, which its config.json asks for; download it again, or set "
                        "tie_word_embeddings to true there if it is the embedding"),
    "tied, another head": ("qwen3_tied", head(lambda t: t + np.float32(1e-6)),
                           "holds lm_head.weight beside another model.embed_tokens.weight, though its config.json ties "
                           "them; set tie_word_embeddings to false there if the model was trained so, or remove"),
    "tied, the last row of the head": ("qwen3_tied", head(lambda t: np.concatenate([t[:-1], 2 * t[-1:]])),
                                       "holds lm_head.weight beside another model.embed_tokens.weight"),
    "tied, a head of another shape": ("qwen3_tied", head(lambda t: t[:9]), "holds lm_head.weight beside another"),
    "shape": ("qwen3", put("model.layers.0.self_attn.q_proj.weight", np.zeros((48, 64), np.float32)),
              "model.layers.0.self_attn.q_proj.weight is [48, 64], config.json says [64, 48]; download both"),
    "dtype": ("qwen3", put("model.norm.weight", np.zeros(48, np.int32)), "norm.weight is I32; supported: F32, BF16"),
    "bias tensor": ("qwen3", put("model.layers.0.self_attn.q_proj.bias", np.zeros(64, np.float32)),
                    "holds 1 tensors that a model of its config.json does not have, such as model.layers.0.self_attn"),
    "fewer layers": ("qwen3", config_edit(num_hidden_layers=2), "such as model.layers.2."),
}  # fmt: skip


REMEDIES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dropout": ({"attention_dropout": 0.1}, "set it to 0 there", {"attention_dropout": 0}),
    "windows": (
        {"use_sliding_window": True, "sliding_window": 128},
        "set it to null, and max_position_embeddings to the window, within which attention is full",
        {"sliding_window": None, "max_position_embeddings": 128},
    ),
    "windows in some layers": (
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": None},
        "make them all full_attention, sliding_window null and max_position_embeddings the window",
        {"layer_types": ["full_attention"] * 4, "max_position_embeddings": 128},
    ),
    "dynamic": (
        {"rope_parameters": DEFAULT | {"rope_type": "dynamic", "factor": 4.0}},
        "set rope_type to default there, the same up to max_position_embeddings",
        {"rope_parameters": DEFAULT},
    ),
    "window of Mistral": (
        {"model_type": "mistral", "sliding_window": 128},
        "set it to null, and max_position_embeddings to the window",
        {"sliding_window": None, "max_position_embeddings": 128},
    ),
    "another head": ({"tie_word_embeddings": True}, "set tie_word_embeddings to false", {"tie_word_embeddings": False}),
}
"""What is refused, the remedy, and what it changes."""


@pytest.mark.parametrize("case", REMEDIES)
def test_what_a_refusal_says_helps(copy: Callable[[str], pathlib.Path], case: str) -> None:
    change, says, remedy = REMEDIES[case]
    folder = copy("qwen3_tied" if "head" in case else "llama" if "Mistral" in case else "qwen3")
    if "head" in case:
        head(lambda t: t + np.float32(1e-6))(folder)
        edit(folder / "config.json", tie_word_embeddings=True)
    edit(folder / "config.json", **{"rope_scaling": ..., "rope_parameters": ...} | change)
    with pytest.raises(UserError, match=re.escape(says)):
        load_model(folder)
    edit(folder / "config.json", **remedy)
    load_model(folder)


@pytest.mark.parametrize("base", ["trained", "frozen", "int8"])
def test_another_head_in_a_shard_of_its_own_is_refused(copy: Callable[[str], pathlib.Path], base: Any) -> None:
    """Of a tied model, also as the base of adapters; the same head is read."""
    folder = copy("qwen3_tied")
    whole = load_file(folder / "model.safetensors")
    embedding = whole["model.embed_tokens.weight"]
    (folder / "model.safetensors").unlink()
    for last, differs in ((embedding, False), (embedding + np.float32(1e-6), True)):
        shards = {"model-00001-of-00002": whole, "model-00002-of-00002": {"lm_head.weight": last}}
        for name, part in shards.items():
            save_file(part, folder / f"{name}.safetensors", metadata={"format": "pt"})
        weight_map = {key: f"{name}.safetensors" for name, part in shards.items() for key in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        config = huggingface.read_config(folder)
        if differs:
            with pytest.raises(UserError, match=r"lm_head.weight beside another model.embed_tokens.weight, though"):
                huggingface.load_params(folder, config, base=base)
        else:
            huggingface.load_params(folder, config, base=base)


def test_windows_that_hide_nothing_are_no_windows(copy: Callable[[str], pathlib.Path]) -> None:
    """As in Qwen2.5's config.json, with windows that are not in use, and in one of Mistral's as long as its texts."""
    folder = copy("qwen3")
    edit(folder / "config.json", use_sliding_window=False, sliding_window=64, max_window_layers=1)
    load_model(folder)
    folder = copy("llama")
    edit(folder / "config.json", model_type="mistral", sliding_window=512, rope_parameters=..., rope_scaling=...)
    load_model(folder)


def test_shards_may_be_links_as_in_the_cache_of_hugging_face(copy: Callable[[str], pathlib.Path]) -> None:
    made = copy("qwen3_moe_fused")
    snapshot = made.parent / "models--of--ours" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    made.rename(snapshot)
    (snapshot.parent.parent / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.glob("*.safetensors"))):
        file.rename(snapshot.parent.parent / "blobs" / str(i))
        file.symlink_to(pathlib.Path("..", "..", "blobs", str(i)))
    assert_same(load_model(snapshot)[0], loaded("qwen3_moe_fused")[0])


@pytest.mark.faults
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(copy: Callable[[str], pathlib.Path], case: str) -> None:
    name, spoil, message = REFUSALS[case]
    folder = copy(name)
    spoil(folder)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_save_refuses_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; give a folder"):
        save_model(*loaded("qwen3"), tmp_path / "file")
