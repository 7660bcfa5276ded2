"""A plan in one sentence, and remedies that a run accepts."""

import re

import pytest

from gspo_jax import cli
from gspo_jax.planning import programs, verdict
from tests import ahead
from tests.planning.test_plan import RECIPE, setting

GB = 10**9


def program(gb: float, *, beside: float = 0.0, limit: float = 100.0, **held: float):
    kinds = {kind.replace("_", " "): round(size * GB) for kind, size in held.items()}
    sizes = {"peak_bytes": gb, "resident_bytes": beside, "limit_bytes": limit}
    return {name: round(size * GB) for name, size in sizes.items()} | {"hbm_by_kind": kinds, "warnings": ["is refused"]}


def recipe(size: str = "Qwen3-30B-A3B"):
    """Return the 30B recipe on 8 chips, its sampler on the trainer's mesh."""
    found = setting(size)
    found.config.sampling.mesh.update({"data": 0, "expert": 0})
    return found


def test_programs_that_fit():
    planned = {name: program(10) for name in programs.NAMES} | {"update": program(56.4), "score": program(50, beside=9)}
    assert verdict.fits(planned) == "fits: 59.0 of 100.0 GB in score, the largest program"
    some = {name: planned[name] for name in ("update", "reshard")}
    rest = ", ".join(name for name in programs.NAMES if name not in some)
    assert verdict.fits(some) == f"fits as far as planned: 56.4 of 100.0 GB in update; not planned: {rest}"


@pytest.mark.parametrize(
    ("name", "facts", "says"),
    [
        (  # most of the 40 GB go; twice the chips hold half of the 61 GB of state and gradients, 16 bytes a parameter
            "update",
            program(112.3, saved_activations=40),
            "12.3 GB more than a chip has; try --config.model.remat=full, or --topology=v5p:2x2x4",
        ),
        (  # rows of half the length save half of what is no state
            "update",
            program(125, saved_activations=10),
            "25.0 GB more than a chip has; try --config.training.row_tokens=8192, or --topology=v5p:2x2x4",
        ),
        (
            "update",
            program(140, saved_activations=60),
            "try --config.model.remat=full, or --topology=v5p:2x4x4",
        ),
        (
            "update",
            program(240, saved_activations=60),
            "has; try --config.model.remat=full --config.training.row_tokens=4480",
        ),
        (
            "sample_decode",
            program(80, beside=40, cache=60),
            "20.0 GB more than a chip has; try --config.sampling.cache_dtype=int8, or --topology=v5p:2x2x4",
        ),
        (
            "reshard",
            program(120),
            "has; try --config.adapter.rank=16 --config.adapter.base_dtype=int8, or --topology=v5p:2x2x4",
        ),
        ("deal", program(900), "deal needs 800.0 GB more than a chip has; fewer or shorter responses need less"),
        ("update", program(20), "does not fit: update is refused"),
    ],
)
def test_a_program_that_does_not_fit(name, facts, says):
    found = verdict.misfit(name, facts, recipe(), "v5p:2x2x2")
    assert found.endswith(says) and found.startswith(f"does not fit: {name} ")
    cli.read_config([f"--config={RECIPE}", *re.findall(r"--config\.\S+", found.replace(",", ""))])


def test_a_larger_slice_has_a_mesh_that_shards_the_state_further():
    whole = recipe()
    whole.config.mesh.update({"data": 1, "fsdp": 8, "expert": 1, "tensor": 1})
    says = verdict.misfit("reshard", program(120), whole, "v5p:2x2x2")
    assert says.endswith("or --topology=v5p:2x2x4 --config.mesh.fsdp=16")
    whole.config.data.prompts_per_batch = 8  # too few for 16 shards of a batch
    says = verdict.misfit("reshard", program(120), whole, "v5p:2x2x2")
    assert says.endswith("or --topology=v5p:2x2x4 --config.mesh.tensor=2")


@pytest.mark.slow
@ahead.needs_libtpu
def test_the_flags_of_a_verdict_make_the_program_fit():
    """Activations of a row of 4096 tokens, all of them kept beside all of the state, on one chip of v5e."""
    words = ["--config=gsm8k", "--config.model.published=Qwen3-0.6B", "--topology=v5e:1x1", "--programs=update"]
    words += ["--config.training.row_tokens=4096", "--config.model.remat=none"]
    tight = ahead.run("gspo_jax.plan", *words)
    assert tight.returncode == 1, tight.stderr
    (flags,) = re.findall("^does not fit: .*; try (--config[^,]*), or --topology=v5e:2x2$", tight.stdout, re.MULTILINE)
    light = ahead.run("gspo_jax.plan", *words, *flags.split())
    assert light.returncode == 0 and "\nfits as far as planned: " in light.stdout, light.stdout + light.stderr
