"""Folders in fp8 with a scale per block: weights are value times scale, bit for bit; other layouts are refused."""

import json
import pathlib
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gspo_jax.errors import UserError
from gspo_jax.models import huggingface
from gspo_jax.models.tensors import Checkpoint
from gspo_jax.parallel import mesh as mesh_lib
from tests.models.test_huggingface import GOLDEN, assert_same, edit

E4M3, BFLOAT16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
PUBLISHED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
KEPT = re.compile(r"norm|embed_tokens|lm_head|mlp\.gate\.weight")
"""As `modules_to_not_convert` of Qwen3-30B-A3B-FP8."""


def quantized(w: np.ndarray, size: tuple[int, int], kind: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, scales, and the float32 product that defines the weights, block by block."""
    values, weights = np.empty(w.shape, E4M3), np.empty(w.shape, np.float32)
    *outer, rows, columns = w.shape
    scales = np.empty((*outer, -(-rows // size[0]), -(-columns // size[1])), kind)
    for at in np.ndindex(scales.shape):
        *before, i, j = at
        block = (*before, slice(i * size[0], (i + 1) * size[0]), slice(j * size[1], (j + 1) * size[1]))
        scales[at] = np.abs(w[block]).max() / 448
        scale = np.float32(scales[at])
        values[block] = (w[block] / scale).astype(E4M3)
        weights[block] = values[block].astype(np.float32) * scale
    return values, scales, weights


def folders(
    place: pathlib.Path, name: str, size: tuple[int, int] = (16, 32), kind: Any = np.float32
) -> tuple[pathlib.Path, pathlib.Path]:
    """Return a golden folder in fp8, and one of the weights that it stands for."""
    packed, plain = (pathlib.Path(shutil.copytree(GOLDEN / name, place / made)) for made in ("fp8", "plain"))
    edit(packed / "config.json", quantization_config=PUBLISHED | {"weight_block_size": list(size)})
    for file in GOLDEN.joinpath(name).glob("*.safetensors"):
        ours, theirs = {}, {}
        for key, w in load_file(file).items():
            if w.ndim < 2 or KEPT.search(key):
                theirs[key] = ours[key] = w.astype(BFLOAT16)
            else:
                theirs[key], theirs[f"{key}_scale_inv"], ours[key] = quantized(w, size, kind)
        save_file(theirs, packed / file.name)
        save_file(ours, plain / file.name)
        if (index := packed / "model.safetensors.index.json").exists():
            content = json.loads(index.read_text())
            content["weight_map"] |= dict.fromkeys(theirs, file.name)
            index.write_text(json.dumps(content))
    return packed, plain


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    return folders(tmp_path_factory.mktemp("pair"), "qwen3_moe")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, None])
@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("qwen3_moe", (128, 128), BFLOAT16),  # one block for each matrix; scales as Qwen3's
        ("qwen3_moe", (16, 32), np.float32),  # 48 is one and a half
        ("qwen3_moe_fused", (16, 20), np.float32),  # blocks of three dimensions, which cross from gate to up
        ("qwen3", (1, 48), np.float32),
    ],
)
def test_weights_are_values_times_scales(
    tmp_path: pathlib.Path, name: str, size: tuple[int, int], kind: Any, dtype: Any
) -> None:
    packed, plain = folders(tmp_path, name, size, kind)
    config = huggingface.read_config(packed)
    assert config == huggingface.read_config(plain)
    assert_same(*(huggingface.load_params(folder, config, dtype=dtype) for folder in (packed, plain)))


@pytest.mark.parametrize("base", ["trained", "int8"])
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_on_a_mesh(pair: tuple[pathlib.Path, pathlib.Path], sizes: dict[str, int], base: Any) -> None:
    """Shards end inside blocks, and int8 is made of the weights."""
    config = huggingface.read_config(pair[0])
    mesh = mesh_lib.make_mesh(dict.fromkeys(mesh_lib.AXES, 1) | sizes)
    assert_same(*(huggingface.load_params(folder, config, mesh, base=base) for folder in pair))


def test_every_window_of_published_blocks(tmp_path: pathlib.Path) -> None:
    """Only what a window touches is read: elsewhere are scales that are no numbers."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(576, 300)).astype(np.float32)  # as DeepSeek-V3's kv_a_proj, whose last blocks are partial
    values, scales, weights = quantized(w, (128, 128), np.float32)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": PUBLISHED}))
    for _ in range(20):
        rows, columns = (slice(*sorted(rng.choice(n + 1, 2, replace=False).tolist())) for n in w.shape)
        wanted = np.full_like(scales, np.nan)
        touched = tuple(slice(span.start // 128, (span.stop - 1) // 128 + 1) for span in (rows, columns))
        wanted[touched] = scales[touched]
        save_file({"w": values, "w_scale_inv": wanted}, tmp_path / "model.safetensors")
        with ExitStack() as stack:
            checkpoint = Checkpoint(tmp_path, stack)
            checkpoint.check({"w": w.shape}, tied=False)
            found = checkpoint.read("w", (rows, columns))
        np.testing.assert_array_equal(found, weights[rows, columns], strict=True)


def test_it_is_written_in_bfloat16(pair: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    for folder, target in zip(pair, ("one", "two"), strict=True):
        shape = huggingface.read_config(folder)
        huggingface.save(huggingface.load_params(folder, shape, dtype=None), shape, tmp_path / target)
    fields, other = (json.loads((tmp_path / target / "config.json").read_text()) for target in ("one", "two"))
    assert fields == other and fields["torch_dtype"] == "bfloat16" and "quantization_config" not in fields
    one, two = (load_file(tmp_path / target / "model.safetensors") for target in ("one", "two"))
    assert one.keys() == two.keys() and {w.dtype for w in one.values()} == {np.dtype(BFLOAT16)}
    assert all(one[key].tobytes() == two[key].tobytes() for key in one)


def config(**changes: Any) -> Callable[[pathlib.Path], None]:
    return lambda folder: edit(folder / "config.json", quantization_config=PUBLISHED | changes)


def retensor(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[pathlib.Path], None]:
    def run(folder: pathlib.Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        kinds = {"F8_E4M3": E4M3, "BF16": BFLOAT16, "F32": np.float32}
        tensors = {
            key: np.frombuffer(content[start:][slice(*e["data_offsets"])], kinds[e["dtype"]]).reshape(e["shape"])
            for key, e in json.loads(content[8:start]).items()
        }
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return run


Q = "model.layers.0.self_attn.q_proj.weight"
BLOCKS = {"weight_block_size": [16, 32]}
REFUSALS: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "int4": (
        config(quant_method="compressed-tensors", format="pack-quantized"),
        'config.json: quantization_config has quant_method "compressed-tensors"; supported: only "fp8", with a scale',
    ),
    "bitsandbytes": (config(quant_method="bitsandbytes", load_in_4bit=True), 'has quant_method "bitsandbytes"'),
    "awq": (config(quant_method="awq"), 'has quant_method "awq"'),
    "mxfp4": (config(quant_method="mxfp4"), 'has quant_method "mxfp4"'),
    "no method": (config(quant_method=None), "has quant_method null"),
    "a list": (config(quant_method=["fp8"]), 'has quant_method ["fp8"]'),
    "other floats": (config(fmt="e5m2"), 'has fmt "e5m2"; supported: only "e4m3"'),
    "static": (config(activation_scheme="static"), 'has activation_scheme "static"; supported: only "dynamic"'),
    "per tensor": (config(weight_block_size=None), "has weight_block_size null; supported: only two sizes, such as"),
    "one size": (config(weight_block_size=[128]), "has weight_block_size [128]; supported"),
    "no size": (config(weight_block_size=[0, 128]), "has weight_block_size [0, 128]; supported"),
    "huge": (config(weight_block_size=[128, 10**30]), "has weight_block_size [128, 1000000"),
    "true": (config(weight_block_size=[True, 128]), "has weight_block_size [true, 128]; supported"),
    "no object": (
        lambda folder: edit(folder / "config.json", quantization_config="fp8"),
        'quantization_config is "fp8"; it must be an object',
    ),
    "not said": (
        lambda folder: edit(folder / "config.json", quantization_config=...),
        "is F8_E4M3 without blocks in its config.json; supported: a scale per block; give a folder with the model's",
    ),
    "other blocks": (
        config(),
        "_scale_inv is F32 [4, 2], and model.layers.0.self_attn.q_proj.weight in blocks of 128 × 128 needs F32 or BF16",
    ),
    "no scale": (retensor(lambda t: t.pop(Q + "_scale_inv")), f"{Q} is F8_E4M3 without {Q}_scale_inv; supported"),
    "a scale of a float": (
        retensor(lambda t: t.update({Q: t[Q].astype(np.float32)})),
        f"holds 1 tensors that a model of its config.json does not have, such as {Q}_scale_inv",
    ),
    "a whole number": (
        retensor(lambda t: t.update({Q + "_scale_inv": t[Q + "_scale_inv"].astype(np.int32)})),
        f"{Q}_scale_inv is I32 [4, 2], and {Q} in blocks of 16 × 32 needs F32 or BF16 or F16 or F64 [4, 2]",
    ),
    "five bits of exponent": (
        retensor(lambda t: t.update({Q: t[Q].astype(np.float32).astype(ml_dtypes.float8_e5m2)})),
        f"{Q} is F8_E5M2; supported: F32, BF16, F16, F64; give a folder with the model's weights in",
    ),
    "a vector": (
        retensor(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(E4M3)})),
        "model.norm.weight is F8_E4M3 without model.norm.weight_scale_inv",
    ),
    "packed": (
        retensor(lambda t: t.update({Q.removesuffix("weight") + "qweight": t.pop(Q), "g": t.pop(Q + "_scale_inv")})),
        "holds model.layers.0.self_attn.q_proj.qweight, quantised, in place of model.layers.0.self_attn.q_proj.weight",
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("case", REFUSALS)
def test_other_layouts_are_refused(case: str, pair: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
    spoil, says = REFUSALS[case]
    folder = pathlib.Path(shutil.copytree(pair[0], tmp_path / "folder"))
    spoil(folder)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        huggingface.load_params(folder, huggingface.read_config(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
