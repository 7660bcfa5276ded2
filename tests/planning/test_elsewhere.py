"""A config checked for another machine, and the plan that it is told to run."""

import shlex
import sys

import pytest

from gspo_jax import cli
from gspo_jax.config_files import config_words
from gspo_jax.errors import UserError
from gspo_jax.planning import elsewhere, topology

HOST = ["--config=configs/one_host.py:partial", "--config.seed=3"]
TWELVE = ["--config=tiny", "--config.mesh.data=6", "--config.mesh.fsdp=1", "--config.data.prompts_per_batch=24"]
TWELVE += ["--config.coldstart.batch=24"]
POD = ["--config=configs/qwen3_30b_a3b.py:128", "--config.mesh.data=2"]


@pytest.mark.parametrize(
    ("where", "given", "says", "then"),
    [
        ("v5e-8", HOST, " for v5e-8, 8 chips: ", [*HOST, "--topology=v5e:2x4"]),
        ("ct5lp-hightpu-8t", HOST, " for ct5lp-hightpu-8t, 8 chips: ", [*HOST, "--topology=v5e:2x4"]),
        ("v5p-16", HOST, " for v5p-16, 8 chips: ", [*HOST, "--topology=v5p:2x2x2"]),
        ("8", HOST, " for 8 devices: ", [*HOST, "--topology=v5e:2x4"]),
        ("0", HOST, "valid: ", [*HOST, "--topology=v5e:2x4"]),
        ("2xv5p-128", POD, " for 2xv5p-128, 128 chips: ", [*POD, "--topology=v5p:4x4x4", "--slices=2"]),
        ("12", TWELVE, " for 12 devices: ", None),
    ],
)
def test_what_was_checked_and_the_plan_of_the_rest(where, given, says, then):
    config = cli.read_config(given)
    elsewhere_folders = ["--config.model.folder=../fetched/Mine", "--config.data.folder=../fetched/gsm8k"]
    if then is not None:
        config.model.folder, config.data.folder = (word.partition("=")[2] for word in elsewhere_folders)
    said, _, command = elsewhere.check_for(config, where, config_words([*given, *elsewhere_folders])).partition("\n")
    assert says in said and "fields and mesh only; run plan to see whether it fits" in said
    assert said.endswith(", such as:") == (where in ("8", "0"))
    python, *words = shlex.split(command) if then else [sys.executable]
    assert python.endswith("bin/python") or python == sys.executable
    assert words == ([] if then is None else ["-m", "gspo_jax.plan", *then])


def test_slices_share_the_data_axis_as_on_the_machine():
    """Refuses three slices for two shards."""
    config = cli.read_config(["--config=tiny", "--config.mesh.data=2", "--config.mesh.fsdp=-1"])
    with pytest.raises(UserError, match=r"^mesh.data 2 is not divisible by the number of slices = 3; use 3"):
        elsewhere.check_for(config, "3xv5e-8", [])
    assert "valid for 2xv5e-8" in elsewhere.check_for(config, "2xv5e-8", [])


def test_a_model_that_is_named_by_its_folder_alone():
    config = cli.read_config(
        ["--config=gsm8k", "--config.model.folder=../fetched/Qwen3-0.6B", "--config.data.folder=x"]
    )
    words = ["--config=gsm8k", "--config.model.folder=../fetched/Qwen3-0.6B"]
    said = elsewhere.check_for(config, "v6e-8", words)
    assert said.endswith(" --config=gsm8k --config.model.published=Qwen3-0.6B --topology=v6e:2x4")


@pytest.mark.parametrize("where", ["v5p-7", "abc", "-1", "8x", "v9-8", "2x", ""])
def test_a_place_that_is_none(where):
    with pytest.raises(UserError, match=r"--check_for is .*; use a number of devices, or a slice such as v5e-8"):
        elsewhere.check_for(cli.read_config(HOST), where, HOST)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(("v5e-8", ("v5e", 8)), ("v5litepod-8", ("v5e", 8)), ("V5E-8", ("v5e", 8)), ("tpu-v5p-8", ("v5p", 4))),
        *(
            ("v4-8", ("v4", 4)),
            ("v6e-8", ("v6e", 8)),
            ("ct5lp-hightpu-8t", ("v5e", 8)),
            ("ct5p-hightpu-4t", ("v5p", 4)),
        ),
        *(("ct6e-standard-8t", ("v6e", 8)), ("ct4p-hightpu-4t", ("v4", 4)), ("ct5lp-hightpu-8", None), ("v5e", None)),
        *(("tpu7x-8", ("tpu7x", 4)), ("tpu7x-standard-4t", ("tpu7x", 4)), ("tpu7x-7", None)),
        *(("v5p-0", None), ("v5p-7", None), ("h100-8", None), ("v5e:2x4", None)),
    ],
)
def test_names_of_accelerators(name, found):
    assert topology.of_type(name) == found
