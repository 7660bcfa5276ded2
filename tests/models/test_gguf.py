"""GGUF files become Hugging Face folders: tensors, config and tokenizer; and what cannot be read is one sentence."""

import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from gspo_jax import convert
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.models import gguf as reader
from gspo_jax.models import huggingface
from gspo_jax.models.config import Llama3Rope, plain_frequencies

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
ARCHITECTURES = {"llama": "llama", "llama_tied": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
Q8 = gguf.GGMLQuantizationType.Q8_0
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def interleaved(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Order rows as llama.cpp does a Llama's queries and keys."""
    return matrix.reshape(-1, 2, head_dim // 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def names_of(layers: int, routed: bool) -> dict[str, str]:
    """Return GGUF names by Hugging Face names, without experts."""
    found = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inside = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    } | ({"mlp.gate": "ffn_gate_inp"} if routed else {})  # fmt: skip
    return found | {f"model.layers.{i}.{a}": f"blk.{i}.{b}" for i in range(layers) for a, b in inside.items()}


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """Return a tokenizer with fewer tokens than the golden models have."""
    return Tokenizer.train(["the cat sat on the mat and the dog sat too"], 280)


def write(
    path: pathlib.Path,
    name: str,
    tokenizer: Tokenizer,
    *,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    facts: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    pre: str = "smollm",
) -> dict[str, np.ndarray]:
    """Write a golden model as GGUF with the package's own writer; return the tensors that a reader should find."""
    config = huggingface.read_config(GOLDEN / name)
    tensors = load_file(GOLDEN / name / "model.safetensors")
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.is_routed:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "llama":
        plain = plain_frequencies(config.rope_theta, config.head_dim)
        scaling = Llama3Rope(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        )
        stretched = scaling.frequencies(config.rope_theta, config.head_dim)
        writer.add_tensor(reader.ROPE, np.asarray(plain / stretched, np.float32))
    backend = json.loads(tokenizer._backend.to_str())
    vocabulary = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in tokenizer.special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_ids[0])
    writer.add_pad_token_id(tokenizer.pad_id)
    writer.add_chat_template(TEMPLATE)
    facts(writer)
    names = names_of(config.num_layers, config.is_routed)
    for theirs, ours in names.items():
        value = tensors.get(f"{theirs}.weight")
        if value is None:
            continue
        kind = (kinds or {}).get(ours.split(".")[-1])
        stored = (
            interleaved(value, config.head_dim) if name.startswith("llama") and ours[-2:] in ("_q", "_k") else value
        )
        if kind is not None:
            stored = gguf.quantize(stored, kind)
            back = gguf.dequantize(stored, kind)
            tensors[f"{theirs}.weight"] = back
        writer.add_tensor(f"{ours}.weight", stored, raw_dtype=kind)
    for i in range(config.num_layers if config.is_routed else 0):
        for theirs, ours in (("gate", "ffn_gate_exps"), ("up", "ffn_up_exps"), ("down", "ffn_down_exps")):
            experts = [
                tensors[f"model.layers.{i}.mlp.experts.{e}.{theirs}_proj.weight"] for e in range(config.num_experts)
            ]
            writer.add_tensor(f"blk.{i}.{ours}.weight", np.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_has_the_tensors_the_config_and_the_tokenizer(tmp_path, trained, name) -> None:
    expected = write(tmp_path / "model.gguf", name, trained)
    facts = convert.convert(tmp_path / "model.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, strict=True, err_msg=key)
    config, golden = (huggingface.read_config(folder) for folder in (tmp_path / "out", GOLDEN / name))
    same = {field for field, value in vars(golden).items() if getattr(config, field) == value}
    assert vars(golden).keys() - same <= {"rope_scaling", "eos_token_ids", "pad_token_id"}
    assert (config.rope_scaling is None) == (name != "llama")
    huggingface.load_params(tmp_path / "out", config)
    assert facts["parameters"] == sum(value.size for value in expected.values())
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert tokenizer.eos_ids == trained.eos_ids and tokenizer.pad_id == trained.pad_id
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_quantised_tensors_are_dequantised_and_bfloat16_is_written(tmp_path, trained) -> None:
    expected = write(tmp_path / "model.gguf", "qwen3", trained, kinds={"ffn_down": Q8})
    convert.convert(tmp_path / "model.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    golden = load_file(GOLDEN / "qwen3" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(found[name], expected[name], strict=True)
    assert 0 < np.abs(found[name] - golden[name]).max() < 0.01
    convert.convert(tmp_path / "model.gguf", tmp_path / "half", dtype="bfloat16")
    assert {str(value.dtype) for value in load_file(tmp_path / "half" / "model.safetensors").values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "it's 123 élan  x", ["it", "'s", "Ġ", "1", "2", "3", "ĠÃ©lan", "Ġ", "Ġx"]),
        ("gpt-2", "it's 123 a", ["it", "'s", "Ġ123", "Ġa"]),
        ("llama-bpe", "IT'S 1234\n\nx", ["IT", "'S", "Ġ", "123", "4", "ĊĊ", "x"]),
        ("qwen2", "it's 12\n\nx", ["it", "'s", "Ġ", "1", "2", "ĊĊ", "x"]),
    ],
)
def test_words_are_those_of_llama_cpp(tmp_path, trained, pre, text, words) -> None:
    write(tmp_path / "model.gguf", "qwen3", trained, pre=pre)
    convert.convert(tmp_path / "model.gguf", tmp_path / "out")
    backend: Any = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words


# Refusals: (changes to the file's bytes or facts, what the sentence says)


def with_fact(key: str, value: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Replace a value of the metadata, or remove it if None."""

    def change(writer: gguf.GGUFWriter) -> None:
        (pairs,) = writer.kv_data
        if value is None:
            del pairs[key]
        else:
            pairs[key] = gguf.GGUFValue(value, gguf.GGUFValueType.get_type(value))

    return change


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("general.architecture", "mamba", "has the architecture 'mamba'; supported: llama, qwen3, qwen3moe"),
        ("qwen3.block_count", None, r"has no qwen3.block_count; download it again"),
        ("qwen3.block_count", 2, r"has a tensor for model.layers.2.* against its metadata"),
        ("qwen3.attention.head_count", 6, r"attn_q.weight is \[64, 48\], by the metadata \[96, 48\]"),
        ("qwen3.attention.head_count", "four", "head_count is 'four'; supported: one number above 0"),
        ("qwen3.embedding_length", "wide", "embedding_length is 'wide'; supported: one number above 0"),
        ("qwen3.attention.head_count", 0, "head_count is 0; supported: one number above 0"),
        ("qwen3.attention.key_length", "long", "key_length is 'long'; supported: one number above 0"),
        ("qwen3.block_count", 2**30, "says that it has 1073741824 layers, and has 36 tensors"),
        ("split.count", 3, "is one of 3 files of a model; supported: a model in one file"),
        ("tokenizer.chat_template", "{% for m in %}", "chat template"),
        ("qwen3.rope.scaling.type", "yarn", "rope.scaling.type 'yarn'; supported: none"),
        ("qwen3.rope.dimension_count", 8, "turns 8 of 16 dimensions of a head"),
        ("qwen3.expert_count", 8, "is a qwen3 with 8 experts; supported: qwen3moe"),
        ("general.alignment", 24, "has the alignment 24, not a power of two"),
        ("tokenizer.ggml.model", "llama", "a tokenizer of the kind 'llama'; supported: gpt2"),
        ("tokenizer.ggml.pre", "chatglm-bpe", "splits text into words as 'chatglm-bpe'; supported: smollm"),
        ("tokenizer.ggml.eos_token_id", 99999, "has 99999 as the id of its eos token, outside its 280 tokens"),
        ("tokenizer.ggml.eos_token_id", None, "names no end-of-sequence token"),
        ("tokenizer.ggml.merges", ["a b c"], "has merges that are no pairs"),
        ("tokenizer.ggml.merges", ["zz zy"], "has merges outside its vocabulary"),
        ("tokenizer.ggml.tokens", ["a", "a", "b"], "outside its 3 tokens|has 3 tokens and types of 280"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, trained, key, value, says) -> None:
    write(tmp_path / "model.gguf", "qwen3", trained, facts=with_fact(key, value))
    with pytest.raises(UserError, match=says):
        convert.convert(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def replaced(at: int, code: str, value: Any) -> Callable[[bytes], bytes]:
    """Overwrite a number of the header."""
    return lambda data: data[:at] + struct.pack(f"<{code}", value) + data[at + struct.calcsize(f"<{code}") :]


def tensor_field(name: str, skip: int, code: str, value: Any) -> Callable[[bytes], bytes]:
    """Overwrite a number `skip` bytes behind a tensor's name."""

    def change(data: bytes) -> bytes:
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + skip
        return replaced(at, code, value)(data)

    return change


NORM = "blk.0.attn_norm.weight"  # one dimension: count, size, type, offset
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is too short for a header"),
    "another format": (lambda data: b"PK" + data[2:], "not with b'GGUF'"),
    "a version to come": (replaced(4, "I", 99), "has version 99; supported: 2 and 3"),
    "big-endian": (replaced(4, "I", 3 << 24), "has version 50331648; supported: 2 and 3, little-endian"),
    "cut in the header": (lambda data: data[:2000], "ends inside its header|do not fit its 2000 bytes"),
    "cut in a tensor": (lambda data: data[:-5000], "bytes, and .* ends at byte"),
    "too many tensors": (replaced(8, "Q", 2**62), f"says that it has {2**62} tensors, which do not fit"),
    "too many pairs": (replaced(16, "Q", 2**63), f"says that it has {2**63} metadata, which do not fit"),
    "a huge text": (replaced(24, "Q", 2**60), "ends inside its header"),
    "no UTF-8": (replaced(32, "B", 255), "has text that is not UTF-8"),
    "a type of metadata": (replaced(32 + len("general.architecture"), "I", 77), "metadata of the unknown type 77"),
    "too many dimensions": (tensor_field(NORM, 0, "I", 2**31), "has 2147483648 dimensions, not 1 to 4"),
    "a huge dimension": (tensor_field(NORM, 4, "Q", 2**50), "bytes, and .* ends at byte"),
    "no elements": (tensor_field(NORM, 4, "Q", 0), "says that .* is .0., in blocks of 1"),
    "an unknown quantisation": (tensor_field(NORM, 12, "I", 4), "as type 4, which the package gguf does not know"),
    "one without a decoder": (tensor_field(NORM, 12, "I", 24), "as I8, which the package gguf cannot dequantise"),
    "overlapping tensors": (tensor_field(NORM, 16, "Q", 32), "inside .* or unaligned"),
    "an offset beyond": (tensor_field(NORM, 16, "Q", 2**60), "bytes, and .* ends at byte"),
    "a name with ../": (
        lambda data: data.replace(b"blk.0.attn_norm", b"../../attn_norm"),
        "has the tensor '../../attn",
    ),
    "a bias": (
        lambda data: data.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_norm.biases"),
        "has the tensor .*biases",
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_before_anything_is_written(tmp_path, trained, case) -> None:
    change, says = BROKEN[case]
    write(tmp_path / "model.gguf", "qwen3", trained)
    (tmp_path / "model.gguf").write_bytes(change((tmp_path / "model.gguf").read_bytes()))
    with pytest.raises(UserError, match=says):
        convert.convert(tmp_path / "model.gguf", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf"}


@pytest.mark.faults
def test_no_changed_byte_of_a_header_does_more_than_refuse(tmp_path, trained) -> None:
    """Whatever stands in the header, reading ends at once, in a sentence or a folder that loads."""
    write(tmp_path / "whole.gguf", "llama_tied", trained)
    data = (tmp_path / "whole.gguf").read_bytes()
    end = reader.File(tmp_path / "whole.gguf")._at
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        at = int(draw.integers(end - 8))
        broken[at : at + 8] = draw.choice([b"\xff" * 8, b"\0" * 8, draw.bytes(8), struct.pack("<Q", 2**40)]).ljust(
            8, b"\0"
        )
        (tmp_path / "broken.gguf").write_bytes(broken)
        try:
            file = reader.File(tmp_path / "broken.gguf")
            config = huggingface.of_fields(tmp_path / "broken.gguf", reader.config_fields(file))
            shapes = huggingface.tensor_shapes(config)
            reader.check(file, shapes)
            list(reader.tensors(file, shapes, head_dim=config.head_dim, interleaved=True))
        except UserError:
            refused += 1
    assert 100 < refused < 300
