"""Programs for a GPU, without one: traced as there and lowered to the StableHLO that XLA would compile for CUDA.

What these programs compute, and whether they run, is not tested. That cuDNN's mask is right is, in
test_packed_attention.py.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo  # jax asks it for cuDNN's version while tracing
from jax._src.pallas.triton import lowering, pallas_call_registration
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from gspo_jax import cli, engine
from gspo_jax.errors import UserError
from gspo_jax.kernels import backend, grouped_matmul_gpu
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import programs
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.players import make_stop_rule
from tests.kernels.test_packed_attention import draw, spans_of, with_gradients

FORWARD, BACKWARD = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"


@pytest.fixture(autouse=True)
def cudnn(monkeypatch) -> None:
    """Let jax find cuDNN."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


@pytest.fixture
def on_gpu(monkeypatch) -> Iterator[None]:
    """Trace on the CPU's meshes as on a GPU."""
    card = plgpu.get_gpu_info_from_version(plgpu.GpuVersion.H100)
    monkeypatch.setattr(pallas_call_registration.gpu_info_lib, "get_gpu_info", lambda: card)
    own = backend.platform
    for module in list(sys.modules.values()):
        if getattr(module, "platform", None) is own:
            monkeypatch.setattr(module, "platform", lambda: "gpu")
    jax.clear_caches()  # of programs that were traced for a CPU
    yield
    jax.clear_caches()


def gpus(**sizes: int) -> AbstractContextManager:
    """Trace in a mesh of GPUs that are not there."""
    axes = {name: sizes.get(name, 1) for name in mesh_lib.AXES}
    card = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    types = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=card)
    return jax.sharding.use_abstract_mesh(mesh)


def custom_calls(traced: jax.stages.Traced) -> list[str]:
    """Return the custom calls of a program lowered for CUDA."""
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"stablehlo.custom_call @([\w$.]+)", text)


@pytest.mark.parametrize(
    ("changed", "calls"),
    [
        ({}, [FORWARD, BACKWARD]),
        ({"dtype": jnp.float32}, []),
        ({"width": 12}, []),
        ({"width": 136}, []),
        ({"tokens": 321}, []),
        ({"tokens": 16384}, [FORWARD, BACKWARD]),
        ({"tokens": 16386}, []),
    ],
    ids=str,
)
def test_packed_attention_is_cudnn_s_where_it_can_be(changed, calls):
    given = {"tokens": 320, "dtype": jnp.bfloat16, "width": 16} | changed
    spans = jax.eval_shape(lambda: spans_of(given["tokens"], [[(64, [64, 128])]]))
    arrays = jax.eval_shape(lambda: draw(spans_of(given["tokens"], [[]]), dtype=given["dtype"], width=given["width"]))
    with gpus():
        assert custom_calls(with_gradients.trace(*arrays, spans)) == calls


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_every_shard_of_a_mesh_calls_it(check):
    spans = spans_of(320, [[(64, [64, 128])], [(128, [64])]])
    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    with gpus(data=2, expert=2, tensor=2):
        attend = jax.shard_map(
            with_gradients, in_specs=(heads, heads, heads, heads, rows), out_specs=heads, check_vma=check
        )
        assert custom_calls(jax.jit(attend).trace(*draw(spans, dtype=jnp.bfloat16), spans)) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=lambda dtype: dtype.__name__)
def test_grouped_matmuls_are_valid_triton(dtype, monkeypatch):
    """XLA verifies a Triton module where it compiles it, on a GPU; the same verifier is here."""
    verified = []

    def checked(*given: Any, **options: Any) -> Any:
        found = lower(*given, **options)
        verified.append(found.module.operation.verify())
        return found

    jax.clear_caches()  # of lowered kernels
    lower = lowering.lower_jaxpr_to_triton_module
    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", checked)
    rows, grads = (jnp.zeros((512, width), jnp.bfloat16 if dtype == jnp.int8 else dtype) for width in (2048, 768))
    weights, sizes = [jnp.zeros((128, 2048, 768), dtype)] * 2, jnp.zeros(128, jnp.int32)
    scales = [jnp.ones((128, 768))] * 2 if dtype == jnp.int8 else []
    traced = {
        "products": lambda: jax.jit(grouped_matmul_gpu.matmuls).trace(rows, weights, sizes, scales=scales),
        "transposed": lambda: jax.jit(grouped_matmul_gpu.matmuls_transposed).trace(
            [grads] * 2, weights, sizes, scales=scales
        ),
        "outer": lambda: jax.jit(grouped_matmul_gpu.outer).trace(rows, grads, sizes),
    }
    with gpus():
        assert {name: custom_calls(trace()) for name, trace in traced.items()} == {
            name: [plgpu.CUSTOM_CALL_TARGET_NAME] for name in traced
        }
    assert verified and all(verified)


def mesh_of(device_kind: str, compute_capability: str) -> Any:
    """Return a mesh of one GPU that is not there, as far as `make_meshes` reads it."""
    card = SimpleNamespace(platform="gpu", device_kind=device_kind, compute_capability=compute_capability)
    return SimpleNamespace(devices=np.full((1,) * len(mesh_lib.AXES), card), shape=dict.fromkeys(mesh_lib.AXES, 1))


@pytest.mark.parametrize(
    ("card", "dtype"),
    [
        (("Tesla T4", "7.5"), "float32"),
        (("NVIDIA A100-SXM4-40GB", "8.0"), "bfloat16"),
        (("NVIDIA B200", "10.0"), "bfloat16"),
        (("AMD Instinct MI300X", "gfx942"), "bfloat16"),
    ],
    ids=str,
)
def test_gpus_that_compute_in_a_dtype(card, dtype):
    config = cli.load_config("configs/tiny.py")
    config.model.dtype = dtype
    assert make_meshes(config, check(config), mesh_of(*card)).trainer.shape["data"] == 1


def test_a_gpu_too_old_for_bfloat16():
    config = cli.load_config("configs/tiny.py")
    config.model.dtype = "bfloat16"
    says = "^Tesla T4 has compute capability 7.5, and model.dtype 'bfloat16' needs 8.0 or later; use --config"
    with pytest.raises(UserError, match=says):
        make_meshes(config, check(config), mesh_of("Tesla T4", "7.5"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["configs/tiny.py", "configs/qwen3_dense.py:0.6B", "configs/one_host.py:gpu"])
def test_the_programs_of_an_iteration_lower_for_one_gpu(recipe, on_gpu):
    """All of them have a lowering for CUDA; those of packed rows call cuDNN, and experts Triton's kernels."""
    config = cli.load_config(recipe)
    config.model.dtype = "bfloat16"
    config.mesh.update({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    model = check(config)
    meshes = make_meshes(config, model, mesh_lib.make_mesh({}, jax.devices()[:1]))
    stop = make_stop_rule(config, eos_ids=model.eos_token_ids, pad_id=model.pad_token_id or 0)
    built = engine.build(config, model, meshes, stop)
    found = {}
    for name in programs.NAMES:
        calls = {call for program in programs.make(name, built) for call in custom_calls(program.trace())}
        found[name] = calls - {"LayoutConstraint"}
    experts = {plgpu.CUSTOM_CALL_TARGET_NAME} if model.is_routed else set()
    assert found == {
        "update": {FORWARD, BACKWARD} | experts,
        "score": {FORWARD} | experts,
        "deal": set(),
        "sample_prefill": experts,
        "sample_decode": experts,
        "reshard": set(),
    }
