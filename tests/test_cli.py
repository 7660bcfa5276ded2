"""Errors for mistyped flags and configs that cannot run: one sentence with value, limit and remedy."""

import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from gspo_jax import cli
from gspo_jax.config import benchmark
from gspo_jax.config_files import last_given
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import write_config
from gspo_jax.folder.storage import RunFolder, check_place
from gspo_jax.run.resume import check_folder
from gspo_jax.setup import learning
from gspo_jax.setup.checks import check, check_elsewhere
from gspo_jax.setup.same import check_same_run

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs/tiny.py")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--config.iteratons=3", ["'iteratons'", "did you mean 'iterations'"]),
        ("--config.optimizer.learning_rat=1", ["did you mean 'optimizer.learning_rate'"]),
        ("--config.mesh.pipeline=2", ["section 'mesh' has data, expert, fsdp, tensor"]),
        ("--config.learning_rate=1", ["did you mean 'optimizer.learning_rate'"]),
        ("--config.training.learning_rate=1", ["'training.learning_rate'; did you mean 'optimizer.learning_rate'"]),
        ("--config.seed.x=1", ["'seed.x'", "'seed' is a single value"]),
        ("-config.iteratons=3", ["did you mean 'iterations'"]),
        ("--noconfig.overlong.filtr", ["did you mean 'overlong.filter'"]),
        ("--config.a=b=c", ["no field 'a'"]),
    ],
)
def test_a_field_that_does_not_exist(word, says):
    with pytest.raises(UserError) as error:
        cli.check_overrides(["train", word], cli.load_config(TINY))
    assert all(part in str(error.value) for part in says), error.value


def test_a_config_file_that_does_not_exist():
    with pytest.raises(UserError, match=r"config .*tinny.py.*did you mean .*tiny.py"):
        cli.load_config(str(ROOT / "configs/tinny.py"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def get_config():\n    return (1\n", r"config.py:2 raises SyntaxError: '\(' was never closed$"),
        ("\0", r"config.py raises SyntaxError: source code string cannot contain null bytes$"),
        ("import no_such\n", r"config.py:1 raises ModuleNotFoundError: No module named 'no_such'$"),
        ("x = 1\n", r"config.py defines no function get_config; define one that returns a ConfigDict$"),
        ("def get_config():\n    return {}['a']\n", r"config.py:2 raises KeyError: 'a'$"),
        ("def get_config():\n    open('no/such')\n", r"config.py:2 raises FileNotFoundError: .* 'no/such'$"),
        ("def get_config(arg):\n    return arg\n", r"config.py raises TypeError: .* missing 1 required .*'arg'$"),
        ("def get_config():\n    return 5\n", r"get_config of .*config.py returns 5; return a ConfigDict"),
        (
            "from gspo_jax.config import base\ndef get_config():\n    base().iterations = 'a'\n",
            r"config.py:3 raises TypeError: Could not override field 'iterations'",
        ),
    ],
)
def test_a_config_file_that_makes_no_config(tmp_path, text, says):
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(UserError, match=says) as error:
        cli.load_config(str(tmp_path / "config.py"))
    assert "\n" not in str(error.value)


def test_a_config_that_is_no_file(tmp_path):
    with pytest.raises(UserError, match=r"configs' is a folder; give a .py file in it"):
        cli.load_config(str(ROOT / "configs"))
    with pytest.raises(UserError, match=r"config '' not found; give a .py file"):
        cli.load_config("")
    with pytest.raises(UserError, match=r"tiny.pyx' not found; did you mean .*tiny.py\?"):
        cli.load_config(TINY + "x")
    file = tmp_path / ".python" / "config.py"
    file.parent.mkdir()
    file.write_text(
        "def get_config(arg=None):\n    from ml_collections import ConfigDict\n    return ConfigDict({'a': arg})\n"
    )
    assert cli.load_config(str(file)).a is None
    assert cli.load_config(f"{file}:b:c").a == "b:c"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_config_file_that_may_not_be_read(tmp_path):
    file = tmp_path / "config.py"
    file.touch(mode=0)
    with pytest.raises(UserError, match=r"config.py' cannot be read: Permission denied; check its permissions"):
        cli.load_config(str(file))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("iterations=many", "iterations is 'many'; use a whole number"),
        ("iterations=2.5", "iterations is '2.5'; use a whole number"),
        ("optimizer.learning_rate=1e-3=4", "optimizer.learning_rate is '1e-3=4'; use a number"),
        ("sampling.slots=all", "sampling.slots is 'all'; use a whole number"),
        ("overlong.filter=maybe", "overlong.filter is 'maybe'; use True or False"),
        ("benchmarks.aime24.every=often", "benchmarks.aime24.every is 'often'; use a whole number"),
        ("mesh=8", "mesh is a section and not '8'; set one of its fields, data, expert, fsdp, tensor"),
    ],
)
def test_a_value_of_the_wrong_type(word, says):
    with pytest.raises(UserError) as error:
        cli.read_config([f"--config={TINY}", f"--config.{word}"])
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        (["--config.sampling.slots=8"], 8),
        (["--config.sampling.slots=8", "-config.sampling.slots=None"], None),
        (["--config.sampling.slots", "8", "--config.sampling.slots", "None"], None),
        (["--config.sampling.slots=None", "--config.sampling.slots=16"], 16),
    ],
)
def test_a_field_that_may_be_none_can_be_set_to_it(words, slots):
    assert cli.read_config([f"--config={TINY}", *words]).sampling.slots == slots
    with pytest.raises(UserError, match="iterations is 'None'; use a whole number"):
        cli.read_config([f"--config={TINY}", "--config.iterations=None"])


def test_flags_add_a_benchmark():
    words = ("data=aime24", "every=50", "samples=32")
    config = cli.read_config([f"--config={TINY}", *(f"--config.benchmarks.aime24.{word}" for word in words)])
    assert config.benchmarks.to_dict() == {"aime24": {"data": "aime24", "every": 50, "samples": 32}}
    with pytest.raises(UserError, match=r"no field 'benchmarks.aime24.evry'; did you mean 'benchmarks.aime24.every'"):
        cli.read_config([f"--config={TINY}", "--config.benchmarks.aime24.evry=1"])


def test_warnings_are_lines_like_others():
    record = logging.makeLogRecord({"levelname": "WARNING", "levelno": 30, "msg": "%d of %d left out", "args": (1, 2)})
    assert cli._Plain().format(record) == "warning: 1 of 2 left out"


@pytest.mark.parametrize(
    ("words", "last"), [("--workdir=a -workdir b", "b"), ("--workdir b -workdir=a", "a"), ("--workdirs=a", None)]
)
def test_the_last_of_a_repeated_flag_counts(words, last):
    assert last_given(words.split(), "workdir") == last


@pytest.mark.parametrize("name", ["tiny", "gsm8k"])
def test_a_config_argument_that_does_not_exist(name):
    with pytest.raises(UserError, match=r"takes no argument 'runlokal'; .*runlocal"):
        cli.load_config(str(ROOT / f"configs/{name}.py:runlokal"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"data.prompts_per_batch": 60},
        "prompts_per_batch 60 is not divisible by what data×fsdp×expert = 8 and 4 mini-.* = 8; use 56 or 64",
    ),
    (
        {"training.minibatches": 3},
        "prompts_per_batch 32 is not divisible by .*3 mini-batches.* = 24; use 24 or 48",
    ),
    ({"training.row_tokens": 30}, "training.row_tokens is 30, too few for .*; use 40 or more"),
    ({"coldstart.batch": 12}, "coldstart.batch 12 is not divisible by data×fsdp×expert = 8; use 8 or 16"),
    ({"training.old_logprobs": "samplr"}, "'samplr'; use 'auto', 'sampler' or 'recompute'"),
    ({"objective.name": "gsop"}, "no objective 'gsop'; did you mean 'gspo'"),
    ({"objective.name": "GSPO"}, "no objective 'GSPO'; did you mean 'gspo'"),
    ({"optimizer.no_decay": ("bias", "norms")}, "optimizer: no_decay has 'norms'; use some of norm, bias, router"),
    (
        {"sampling.filter": "exact-answer", "sampling.rounds": 4},
        "sampling.filter is 'exact-answer', which is not among .*; did you mean 'exact_answer'.*leave it empty",
    ),
    ({"sampling.filter": "exact_answer"}, "'exact_answer', but sampling.rounds is 1, so that no group is replaced"),
    ({"objective.gspo.low": 2.0}, "low=2.0 lies outside"),
    ({"optimizer.schedule": "linear"}, "optimizer.schedule is 'linear'; use 'constant' or 'cosine'"),
    ({"model.dtype": "float16"}, "'float16'; use 'bfloat16' or 'float32'"),
    ({"optimizer.learning_rate": 0.0}, "^optimizer.learning_rate is 0.0; use a finite number above 0$"),
    ({"critic.optimizer.learning_rate": -1e-5}, "critic.optimizer.learning_rate is -1e-05; use a finite number"),
    ({"iterations": 0}, "iterations is 0; use 1 to 2147483647"),
    ({"sampling.group_size": 0}, "sampling.group_size is 0; use 1 to"),
    ({"sampling.temperature": 0.0}, "sampling.temperature is 0.*use a positive number"),
    ({"eval.prompts": -1}, "eval.prompts is -1; use 0 to"),
    ({"coldstart.log_every": 0}, "coldstart.log_every is 0; use 1 to"),
    ({"sampling.top_p": 0.0}, r"top_p 0.0 is outside \(0, 1\]"),
    ({"coldstart.steps": 0}, "model.folder is empty.*--config.model.folder=DIR"),
    ({"coldstart.terse": (0.5, 1.5)}, r"coldstart.terse has 1.5; use a fraction from 0 to 1 for each stage"),
    (
        {"eval.correct": "answer_format"},
        "'answer_format', which is not among the config's rewards; use one of exact_answer, or leave it empty",
    ),
    (
        {"rewards.code_tests_share": 0.0, "eval.correct": "code_tests_share"},
        "eval.correct is 'code_tests_share', which gives scores between wrong and correct; use a reward that",
    ),
    ({"objective.advantage": "gdop"}, "objective.advantage is 'gdop'; use 'gdpo', .*or '' for the objective's own"),
    (
        {"objective.advantage": "gdpo", "objective.name": "ppo"},
        "'gdpo', and ppo takes its advantages from a critic",
    ),
    ({"objective.advantage": "optimal_token_baseline"}, "each token its advantage, and gspo has one per resp"),
    (
        {
            "objective.turn_discount": 0.9,
            "objective.name": "gspo_token",
            "objective.advantage": "optimal_token_baseline",
        },
        "turn_discount is 0.9, and objective.advantage 'optimal_token_baseline' compares whole responses",
    ),
    ({"objective.advantage": "gdpo", "rewards.exact_answer": 0.0}, "'gdpo', and no reward has a weight"),
    ({"objective.advantage": "max_rl", "rewards.exact_answer": -1.0}, "rewards.exact_answer is -1.0, .*'max_rl'"),
    ({"objective.advantage": "max_rl", "overlong.penalty": 1.0}, "overlong.penalty is 1.0, but .*'max_rl' divides"),
    (
        {"objective.turn_discount": 0.9},
        "turn_discount is 0.9, which gives each turn its .*gspo has one per response",
    ),
    ({"objective.turn_discount": 0.9, "objective.name": "ppo"}, "and ppo discounts per token by its gamma"),
    ({"objective.turn_discount": 1.5}, "objective.turn_discount is 1.5; use a fraction from 0 to 1"),
    (
        {"objective.turn_discount": 0.9, "objective.name": "gspo_token", "objective.advantage": "gdpo"},
        "turn_discount is 0.9, and objective.advantage 'gdpo' compares whole responses",
    ),
    ({"mesh.data": 0}, "mesh.data is 0; use 1 to 2147483647, or -1 for the remaining devices"),
    ({"routing.replay": "r4"}, "routing.replay is 'r4'; use 'none', 'r2', 'r3' or 'r3w'"),
    (
        {"routing.replay": "r2", "training.old_logprobs": "sampler"},
        "'r2', .*set training.old_logprobs to 'recompute', or use 'r3'",
    ),
    ({"routing.balance_weight": -0.1}, "routing.balance_weight is -0.1; use a finite number, 0 or above"),
    ({"routing.z_weight": -1.0}, "routing.z_weight is -1.0; use a finite number, 0 or above"),
    ({"model.dispatch": "capacity"}, "model.dispatch is 'capacity'; use 'gather' or 'ragged_all_to_all'"),
    ({"environment.name": "countdown"}, "no environment 'countdown'; did you mean 'countdown_feedback'"),
    ({"environment.turns": 0}, "environment.turns is 0; use 1 to"),
    ({"sampling.weights_dtype": "int4"}, "weights_dtype is 'int4'; use 'bfloat16', 'int8' or '' for model.dtype"),
    ({"sampling.cache_dtype": "fp8"}, "sampling.cache_dtype is 'fp8'; use 'int8' or '' for model.dtype"),
    (
        {"adapter.rank": 4, "adapter.base_dtype": "int4"},
        "adapter.base_dtype is 'int4'; use 'float32', 'bfloat16', 'int8' or '' for model.dtype",
    ),
    (
        {"adapter.rank": 4, "adapter.base_dtype": "int8", "sampling.weights_dtype": "bfloat16"},
        "sampling.weights_dtype is 'bfloat16', and a base in int8 is not rounded again; leave it empty",
    ),
    ({"adapter.base_dtype": "int8"}, "adapter.base_dtype is 'int8' and there are no adapters, so all weights"),
    ({"adapter.rank": -4}, "adapter.rank is -4; use 0 to"),
    ({"adapter.rank": 4, "adapter.targets": ("q",)}, "adapter.targets has no 'q'; there are q_proj, k_proj"),
    ({"adapter.folder": "some"}, "adapter.folder is 'some' and both ranks are 0; set them to the folder's"),
    ({"adapter.rank": 4, "objective.name": "ppo"}, "ppo has a critic with a trunk of its own, .*; set critic"),
    (
        {"benchmarks.aime24": benchmark(every=5)},
        r"aime24.data is empty; .* or benchmarks.aime24.every to 0",
    ),
    ({"benchmarks.aime24": benchmark(every=-5)}, "benchmarks.aime24.every is -5; use 0 to"),
    (
        {"benchmarks.aime24": benchmark("x", every=5, samples=20)},
        "samples is 20, but the run samples groups of sampling.group_size 8; use 16",
    ),
    (
        {"benchmarks.aime25": benchmark("aime25", every=5)},
        "'aime25', but aime25 is none of aime24, .*; give a file of rows",
    ),
    (
        {"data.clock": "today"},
        "data.clock is 'today'; use a date, or a date and a time, such as '2025-01-01T00:00'",
    ),
    ({"data.prompt": "problem"}, "data.prompt is for the task 'jsonl', and data.task is 'arithmetic'"),
    (
        {"model.architecture.max_position_embeddings": 39},
        "data.max_prompt_length 8 and sampling.max_response_length 32 need 40 positions, and the model has 39, its "
        "max_position_embeddings; take 1 off either, or use a model with more, such as one .* by rope_type yarn",
    ),
    ({"sampling.partial.prompts": 32}, "data.prompts_per_batch 32: every batch would wait for all of them"),
    ({"sampling.partial.prompts": 34}, "sampling.partial.prompts 34 is not divisible by .* = 8; use 40$"),
    ({"sampling.partial.prompts": 40, "sampling.partial.share": 0.0}, "share is 0.0; use a fraction above 0"),
    (
        {"sampling.pool_tokens": 255},
        "leaves 31 tokens to a batch shard, and one response may need 32, in pages of 32",
    ),
    ({"sampling.page": 33}, "page is 33, and the longest response has 32 tokens, .*; use 32 or less"),
]
"""Changes of configs/tiny.py and what is said of them."""


@pytest.mark.parametrize(
    ("changes", "says"),
    REFUSED,
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_config_that_cannot_run_is_refused_before_devices_are_touched(changes, says):
    config = cli.load_config(TINY)
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=says):
        check(config)


def test_a_mesh_is_compared_with_the_devices_before_the_batch_is_divided_by_it():
    config = cli.load_config(TINY)
    config.mesh.data = 3
    with pytest.raises(UserError, match="prompts_per_batch 32 is not divisible"):
        check(config)
    with pytest.raises(UserError, match="data=3, fsdp=2, expert=2, tensor=1 needs 12 devices but there are 8"):
        check(config, count_devices=lambda: 8)


def test_a_config_is_checked_for_a_machine_that_has_the_model_and_the_devices():
    config = cli.load_config("configs/gsm8k.py")
    with pytest.raises(UserError, match=r"model.folder is empty"):
        check_elsewhere(config, devices=8)
    config.model.folder = "../fetched/Qwen3-30B-A3B"
    with pytest.raises(UserError, match=r"task gsm8k needs data.folder"):
        check_elsewhere(config, devices=8)
    config.data.folder = "../fetched/gsm8k"
    assert check_elsewhere(config, devices=8) == []
    assert check_elsewhere(config, devices=0) == ["the mesh, which takes the remaining devices"]
    with pytest.raises(UserError, match=r"prompts_per_batch 32 is not divisible by .* = 64; use 64"):
        check_elsewhere(config, devices=64)
    config.mesh.update({"expert": 3, "fsdp": 1})
    with pytest.raises(UserError, match="needs 3 devices but there are 6"):
        check_elsewhere(config, devices=6)
    config.data.prompts_per_batch = 36
    with pytest.raises(UserError, match=r"expert = 3 .* experts 128"):
        check_elsewhere(config, devices=3)
    config.model.folder = "../fetched/Mine"
    assert check_elsewhere(config, devices=3) == ["the model in ../fetched/Mine"]


def test_the_folder_of_another_run_is_refused_before_any_work(tmp_path):
    config, files = cli.load_config(TINY), RunFolder(name="runs/tiny", local=tmp_path)
    check_folder(config, files)
    write_config(tmp_path, config.to_dict(), command="python")
    check_folder(config, files)
    config.seed = 5
    with pytest.raises(UserError, match="seed is 5 here and 0 in the run in runs/tiny"):
        check_folder(config, files)
    (tmp_path / "config.json").write_text("")
    check_folder(config, files)
    with pytest.raises(UserError, match="the name of the run folder is empty; give one, such as --workdir=runs/first"):
        check_place("")


@pytest.mark.parametrize(
    "recipe", ["gsm8k", "one_host", "one_host:full", "qwen3_30b_a3b:16k", "qwen3_235b_a22b", "qwen3_dense", "mixtures"]
)
def test_recipes_in_bfloat16_recompute_the_old_log_probs(recipe):
    name, colon, argument = recipe.partition(":")
    config = cli.load_config(str(ROOT / f"configs/{name}.py{colon}{argument}"))
    assert config.model.dtype == "bfloat16" and config.training.old_logprobs == "recompute"


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b.py", "qwen3_30b_a3b.py:16k", "qwen3_dense.py:8B"])
def test_a_recipe_s_rows_are_as_long_as_it_says(recipe):
    config = cli.load_config(f"configs/{recipe}")
    assert learning.make_packer(config, check(config), 4).row_lengths[0] == config.training.row_tokens


MIXTURES: list[tuple[dict[str, Any], str]] = [
    ({"routing.replay": "r3"}, "routing.replay 'r3' is for .* and the model is dense; use 'none'"),
    ({"routing.balance_weight": 0.1}, "routing.balance_weight 0.1 is for .*; use 0"),
    ({"routing.z_weight": 0.1}, "routing.z_weight 0.1 is for .*; use 0"),
    ({"objective.name": "rspo"}, "rspo is for .*; use gmpo"),
    ({"model.dispatch": "ragged_all_to_all"}, "model.dispatch 'ragged_all_to_all' is for .*; use 'gather'"),
]
"""Changes for which configs/tiny.py would be refused if its model were dense."""
DENSE = {"mesh.expert": 1, "mesh.data": 4, "model.architecture.num_experts": 0}


@pytest.mark.parametrize(
    ("changes", "says"),
    MIXTURES,
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_only_a_mixture_of_experts_has_is_refused_for_a_dense_model(changes, says):
    config = cli.load_config(TINY)
    config.update_from_flattened_dict(changes | {"mesh.expert": 1, "mesh.data": 4})
    check(config)
    config.model.architecture.num_experts = 0
    with pytest.raises(UserError, match=says):
        check(config)


def test_a_run_may_go_on_with_another_dispatch():
    config = cli.load_config(TINY)
    saved = config.to_dict()
    config.model.dispatch = "ragged_all_to_all"
    check_same_run(config, saved, Path("runs/tiny"))


@pytest.mark.parametrize("section", ["routing", "objective.gspo", "rewards"])
def test_a_run_of_another_version_is_refused(section):
    """A config with other fields is of another version; sections that a user may fill differ by their values."""
    config = cli.load_config(TINY)
    saved = config.to_dict()
    check_same_run(config, saved, Path("runs/tiny"))
    head, *rest = section.split(".")
    own = saved[head][rest[0]] if rest else saved[head]
    own["new"] = 1.0
    says = "was saved by another version of gspo_jax, whose config has routing.new; go on with that version, or start "
    says = says if section == "routing" else f"{section}.new is None here and 1.0 in the run in runs/tiny; set it back"
    with pytest.raises(UserError, match=says):
        check_same_run(config, saved, Path("runs/tiny"))
    del own["new"]
    del saved["training"]["row_tokens"]
    with pytest.raises(UserError, match=r"the run in runs/tiny was saved by another .* config lacks training.row_tok"):
        check_same_run(config, saved, Path("runs/tiny"))


def test_a_program_that_trains_gets_the_simulated_devices_that_the_config_has():
    """As long as jax has not started; then only the number that it has started with."""
    config = cli.load_config(TINY)
    assert len(jax.devices()) == 8
    cli.prepare(config)
    config.cpu_devices = 4
    with pytest.raises(UserError, match=r"cpu_devices is 4, but jax has already started with 8; set it to 8, or start"):
        cli.prepare(config)
    program = f"""
import jax
from gspo_jax import cli
config = cli.load_config({TINY!r})
config.cpu_devices = 3
cli.prepare(config)
print(jax.device_count())
cli.prepare(config)
"""
    fresh = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=fresh, capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_no_import_gives_a_thread_memory_of_its_own():
    """Temporaries that XLA's threads allocated there would be mapped anew in every update (`cli.reuse_memory`)."""
    code = "import ctypes, gspo_jax.train, gspo_jax.coldstart, gspo_jax.noise; ctypes.CDLL(None).malloc_stats()"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stderr
    assert said.count("Arena ") == 1, said


def huge_pages_are_given() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not huge_pages_are_given(), reason="the kernel gives no huge pages")
def test_what_is_allocated_next_gets_huge_pages():
    """Before a compilation and after it."""
    code = r"""
import pathlib, re, jax
from gspo_jax import cli
def huge(): return int(re.search(r"AnonHugePages: *(\d+) kB", pathlib.Path("/proc/self/smaps_rollup").read_text())[1])
cli.reuse_memory()
seen, kept = [huge()], []
for _ in range(2):
    kept.append(b"x" * 2**26)
    seen.append(huge())
    jax.jit(lambda x: x + 1)(1)
    kept.append(b"x" * 2**26)
    seen.append(huge())
print(*seen)
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    seen = [int(size) / 2**16 for size in said.split()]
    assert all(later - sooner > 0.8 for sooner, later in itertools.pairwise(seen)), seen
