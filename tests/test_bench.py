"""The benchmark: the numbers it reports, the floating-point operations it counts, and the flags it refuses."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import bench, workload
from gspo_jax.errors import UserError
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import calibration, rates
from tests.pods import run_processes
from tests.tiny import CONFIG

GOLDEN = pathlib.Path(__file__).parent / "golden"
MOE = GOLDEN / "qwen3_moe"
SMALL = ["--prompts=4", "--group=2", "--prompt_length=5", "--new_tokens=7", "--minibatches=2", "--repeats=2"]
NAMES = ("sample", "score", "update", "iteration")


@pytest.fixture
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small matrices for the floor speed."""
    monkeypatch.setattr(calibration, "SIDES", {"cpu": (64,)})
    monkeypatch.setattr(calibration, "LOOP_S", 0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("small_floor")
def test_hidden_lengths_and_slots(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    flags = [*SMALL, "--compile=here", "--lengths=uniform:2:7", "--slots=3"]
    assert bench.main([f"--model={MOE}", *flags, f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    lengths = workload.Workload(model=MOE, prompts=4, group=2, new_tokens=7, lengths="uniform:2:7").limits
    assert set(lengths) <= set(range(2, 8)) and len(lengths) == 8
    sample = found["sample"]
    assert sample["tokens_per_s"] * sample["median_s"] == pytest.approx(lengths.sum())
    assert found["occupancy"] == pytest.approx((lengths - 1).sum() / (3 * found["decode_steps"]))
    assert found["prefill_s"] + found["decode_s"] < found["sample"]["median_s"]
    assert "(uniform:2:7), 3 slots" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("small_floor")
def test_what_it_writes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "made" / "found.json"
    traced = tmp_path / "traced"
    assert bench.main([f"--model={MOE}", *SMALL, "--compile=here", f"--json={file}", f"--profile={traced}"]) == 0
    assert "## iteration-4-update" in (traced / "operations.md").read_text(), "one more than it measures"
    found = json.loads(file.read_text())
    assert all(found[name].keys() == {"median_s", "min_s", "tokens_per_s"} for name in NAMES)
    for name, tokens in zip(NAMES, (8 * 7, 8 * 12, 8 * 12, 8 * 7), strict=True):
        assert 0 < found[name]["min_s"] <= found[name]["median_s"]
        assert found[name]["tokens_per_s"] * found[name]["median_s"] == pytest.approx(tokens)
        seconds, floor = found[name]["median_s"], found["floor"]
        assert floor["seconds"][name] == pytest.approx(floor[f"{name}_flops"] / floor["matmul_flops_per_s"])
        assert floor["ratio"][name] == pytest.approx(seconds / floor["seconds"][name])
    # With two repeats the median is the mean, so the phases add up to the iteration.
    assert sum(found[name]["median_s"] for name in NAMES[:3]) == pytest.approx(found["iteration"]["median_s"])
    assert found["compile_s"] > found["iteration"]["median_s"], "compile time includes the first iteration"
    assert found["peak_rss_mb"] == found["compile_peak_rss_mb"] > 100
    assert found["cores"] >= 1
    assert found["workload"] | {"prompts": 4, "group": 2, "repeats": 2, "dtype": "float32"} == found["workload"]
    said = capsys.readouterr()
    assert "4 × 2 responses, 5 + 7 tokens, 2 updates, float32" in said.out
    assert [line.split()[0] for line in said.out.splitlines() if line.strip().startswith(NAMES)] == list(NAMES)
    assert "iteration 1:" in said.err and "compilation included" in said.err


def counted(shapes: list[tuple[int, int, int]]) -> float:
    """Return the flops that XLA counts for a program of nothing but the products [m, k] @ [k, n]."""
    pairs = [[jax.ShapeDtypeStruct(side, jnp.float32) for side in ((m, k), (k, n))] for m, k, n in shapes]
    return jax.jit(lambda pairs: [a @ b for a, b in pairs]).lower(pairs).cost_analysis()["flops"]


@pytest.mark.parametrize("share", [3, 1])
@pytest.mark.parametrize("config", [CONFIG, dataclasses.replace(CONFIG, num_experts=0)], ids=["sparse", "dense"])
def test_flops_are_those_of_the_matrix_products(config: ModelConfig, share: int) -> None:
    """Forward flops equal the sum over every matrix product of a group of three responses, listed one by one.

    Attention is listed per position and head. `share` rows have one prompt in common.
    """
    D, H, Kv, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    G, S, lengths = 3, 4, [5, 1, 7]
    prompts = [*range(1, S + 1)] * (G // share)
    contexts = [*prompts, *(S + t for T in lengths for t in range(1, T))]  # of fed tokens, each itself included
    N = len(contexts)
    layer = [(N, D, H * h), (N, D, Kv * h), (N, D, Kv * h), (N, H * h, D)]
    layer += [product for c in contexts for product in [(1, h, c), (1, c, h)] * H]
    if config.num_experts:
        layer += [(N, D, config.num_experts)]
        feed, width = N * config.experts_per_token, config.moe_intermediate_size
    else:
        feed, width = N, config.intermediate_size
    layer += [(feed, D, width), (feed, D, width), (feed, width, D)]
    expected = config.num_layers * counted(layer) + counted([(sum(lengths), D, config.vocab_size)])
    found = workload.forward_flops(config, lengths=np.array(lengths), rows_per_prompt=share, prompt_length=S)
    assert found == expected


def test_flops_by_hand() -> None:
    """4 layers, D 256, 8 heads and 4 KV heads of 32, 4 of 16 experts of 128, V 512; 8 × 8 × (32 + 128) tokens."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        intermediate_size=1024,
        num_experts=16,
        experts_per_token=4,
        moe_intermediate_size=128,
    )
    active = 4 * (65_536 + 2 * 32_768 + 65_536 + 4_096 + 3 * 4 * 32_768)  # q, k + v, o, router, experts: 2,375,680
    read = 8 * 32 + 64 * 127  # 8,384 tokens
    pairs = 8 * (32 * 33 // 2) + 64 * (127 * 32 + 127 * 128 // 2)  # query-key pairs: 784,512
    forward = 2 * active * read + 4 * 4 * 256 * pairs + 2 * 256 * 512 * 64 * 128  # 39.84 + 3.21 + 2.15 GFLOP
    work = workload.Workload(model=MOE)
    assert workload.flops(config, work) == {
        "sample": forward,
        "score": forward,
        "update": 3 * forward,
        "iteration": 5 * forward,
    }
    assert forward == 45_196_247_040


def test_floor_speed_is_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIDES", {"cpu": (64, 128)})
    monkeypatch.setattr(calibration, "per_turn", lambda *_, together: 1.0 if together else 0.0)
    speeds = [
        calibration.matmul_flops_per_s(mesh_lib.make_mesh({"data": n}, devices=jax.devices()[:n]), "bfloat16")
        for n in (1, 4)
    ]
    assert speeds == [64**3 + 128**3, 4 * (64**3 + 128**3)], "2 n³ operations, averaged over the two sizes"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model=no/such"], "no/such is not a folder"),
        (["--group=0"], "--group is 0; it must be at least 1"),
        (["--calibrate=rates.json"], "--calibrate measures the devices alone; leave out --model"),
        (["--slots=65"], "--slots is 65 and --prompts × --group make 64 responses; use 1 to 64"),
        (["--lengths=normal:1:2"], "--lengths is 'normal:1:2'; write it as uniform:16:128"),
        (["--lengths=uniform:16:129"], "--lengths uniform:16:129 does not lie in 1 to 128, which is --new_tokens"),
        (["--json=."], "--json=. is a folder; give a file in it"),
        (["--warmup=0"], "--warmup is 0; it must be at least 1"),
        (["--dtype=float16"], "--dtype is 'float16'; use 'bfloat16' or 'float32'"),
        (
            ["--new_tokens=500"],
            "--prompt_length 32 and --new_tokens 500 need 532 positions, and the model has 512, its max_position_embed",
        ),
        (["--prompts=6"], "--prompts 6 is not divisible by what"),
        (["--row_tokens=159"], "too few for --prompt_length 32 and --new_tokens 128, since no response is cut"),
        (["--mesh=expert:3", "--devices=3", "--prompts=12"], "mesh axis expert = 3 does not divide"),
        (["--mesh=rows:2"], "unknown mesh axis 'rows'"),
        (["--mesh=two"], "--mesh is 'two'; write axes and sizes such as fsdp:-1,expert:2"),
        (["--repeat=3"], "did you mean --repeats?"),
        (["--group=many"], "invalid int value: 'many'"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_refusals(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([f"--model={MOE}", *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1


def test_command() -> None:
    command = [sys.executable, "-m", "gspo_jax.bench", f"--model={MOE}", "--prompts=0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=GOLDEN.parent.parent)
    assert (done.returncode, done.stderr) == (2, "error: --prompts is 0; it must be at least 1\n")


def test_calibration_writes_rates_that_plan_reads(tmp_path, monkeypatch, capsys) -> None:
    """The attached devices are these simulated ones: all rates come out positive, and what a CPU lacks as 0."""
    for name, value in (("SIDES", (64,)), ("LARGE", 2**14), ("SENT", 2**10)):
        monkeypatch.setattr(calibration, name, {"cpu": value})
    monkeypatch.setattr(calibration, "LOOP_S", 0.01)
    file = tmp_path / "made" / "rates.json"
    assert bench.main([f"--calibrate={file}"]) == 0
    found = rates.read(file, generation="cpu")
    lacking = {"launch", "grid_step", "cycle"}
    assert all(0 < getattr(found, name) < float("inf") for name in set(rates.FIGURES) - lacking - {"hop"})
    assert [getattr(found, name) for name in lacking] == [0, 0, 0] and found.hop >= 0
    assert found.dcn == found.links
    assert set(found.sources) == set(rates.FIGURES)
    assert f"measured on {len(jax.devices())} x cpu" in found.sources["links"]
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == list(rates.FIGURES)
    assert found.sources["cycle"] == "a cpu has none that is measured"
    with pytest.raises(UserError, match="has the rates of cpu, not of v5p; measure them on v5p"):
        rates.read(file, generation="v5p")


def test_a_turn_of_a_loop_is_timed_without_its_start(monkeypatch) -> None:
    """A loop of n turns takes 5 + n seconds by a clock that only the loop advances: a turn takes one."""
    now = [0.0]

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

    def jit(loop):
        def timed(turns, x):
            now[0] += 5 + turns
            return x

        return timed

    monkeypatch.setattr(calibration, "time", Clock)
    monkeypatch.setattr(calibration.jax, "jit", jit)
    assert calibration.per_turn(lambda i, x: x, 0.0) == pytest.approx(1)


def test_links_of_collectives_are_told_apart_by_group_size(monkeypatch) -> None:
    """All-gathers over 2, 4 and 8 devices of a ring go 1, 2 and 4 links; here the first takes 5 s and each other 2."""
    monkeypatch.setattr(calibration, "_on_each", lambda mesh, *_: 5.0 + 2.0 * (mesh.shape["fsdp"] // 2 - 1))
    first, hop = calibration.collective_latencies(mesh_lib.make_mesh({"data": -1}))
    assert (first, hop) == (pytest.approx(5), pytest.approx(2))
    alone = mesh_lib.make_mesh({"data": -1}, devices=jax.devices()[:2])
    assert calibration.collective_latencies(alone) == (5, 0)


def test_overheads_of_kernels(monkeypatch) -> None:
    """A turn has 16 kernels, of 7 s and 3 s per grid step; the kernels run, here interpreted."""
    grids = []

    def per_turn(turn, x):
        jaxpr = str(jax.make_jaxpr(turn)(0, x))
        grids.append(int(re.search(r"grid=\((\d+),\)", jaxpr)[1]))
        if grids[-1] == 1:
            np.testing.assert_array_equal(turn(0, x), np.ones((8, 128)))
        return 16 * (7.0 + 3.0 * grids[-1])

    monkeypatch.setattr(calibration, "per_turn", per_turn)
    launch, step = calibration.kernel_overheads(jax.devices()[0], interpret=True)
    assert grids == [1, calibration.GRID]
    assert (launch, step) == (pytest.approx(7), pytest.approx(3))


def test_cycles_without_an_estimate() -> None:
    assert calibration.cycle(jax.devices()[0]) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"links": 0}, "links is 0.0, not a positive number"),
        ({"hop": -1}, "hop is -1.0, not a positive number"),
        ({"grid_step": None}, "cannot be used"),
        ({"operation": "fast"}, "cannot be used"),
        ({"generation": "v4"}, "has the rates of v4, not of v5p"),
        (None, "cannot be used"),
    ],
)
def test_rates_that_cannot_be_used(change, says, tmp_path) -> None:
    file = tmp_path / "rates.json"
    rates.write(file, rates.assumed("v5p"), generation="v5p")
    assert rates.read(file, generation="v5p") == rates.assumed("v5p")
    old = json.loads(file.read_text())
    del old["grid_step"]  # of a version without
    file.write_text(json.dumps(old))
    with pytest.raises(UserError, match=r"cannot be used \(it has no 'grid_step'\); write it on v5p by python"):
        rates.read(file, generation="v5p")
    rates.write(file, dataclasses.replace(rates.assumed("v5p"), grid_step=0.0), generation="v5p")
    assert rates.read(file, generation="v5p").grid_step == 0
    file.write_text("[]" if change is None else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=says):
        rates.read(file, generation="v5p")


def test_groups_stay_within_a_slice(monkeypatch) -> None:
    """Eight devices in two slices, which the mesh has in turns, are gathered in groups of two and of four."""
    mesh = mesh_lib.make_mesh({"data": -1})
    monkeypatch.setattr(mesh_lib, "count_slices", lambda _: 2)
    monkeypatch.setattr(calibration, "slice_of", lambda device: device.id % 2)
    splits = calibration.groups(mesh)
    assert [split.shape["fsdp"] for split in splits] == [2, 4]
    for split in splits:
        assert all(len({device.id % 2 for device in group.flat}) == 1 for group in split.devices)
        assert split.devices.size == 8


def test_what_a_large_gather_sends(monkeypatch) -> None:
    (*_, whole) = calibration.groups(mesh_lib.make_mesh({"data": -1}))
    assert calibration.sent(whole) == calibration.SENT["cpu"]
    monkeypatch.setattr(calibration, "GATHERED", 2**18)
    assert calibration.sent(whole) == 2**15, "each of eight gets 2^18 together"


def test_a_device_alone_is_measured(monkeypatch) -> None:
    for name, value in (("SIDES", (64,)), ("LARGE", 2**14)):
        monkeypatch.setattr(calibration, name, {"cpu": value})
    monkeypatch.setattr(calibration, "LOOP_S", 0.01)
    found = calibration.measure(mesh_lib.make_mesh({"data": -1}, devices=jax.devices()[:1]))
    assert found.links == found.dcn == found.bandwidth and found.hop == found.collective == 0
    assert found.sources["links"] == "as memory: a device alone sends nothing"


CLOCKS = """
import os
from gspo_jax.config import base
from gspo_jax import cli
from gspo_jax.parallel import mesh, processes
from gspo_jax.planning import calibration

config = base()
config.cpu_devices = 2
count = processes.start()
cli.prepare(config)
with processes.guarded(count):
    calibration.LOOP_S = (0.02, 0.5)[processes.number()]
    split = calibration.groups(mesh.make_mesh({"data": -1}))[-1]
    assert calibration.gathering(split, (8,)) > 0
"""


@pytest.mark.slow
def test_processes_gather_equally_often_whatever_their_clocks_say() -> None:
    run_processes(2, "-c", CLOCKS, seconds=120)
