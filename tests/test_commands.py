"""Mistyped commands of every entry point end with one sentence on stderr and exit code 2, before any work."""

import importlib.util
import shlex
from pathlib import Path

import pytest

from tests.pods import run_commands

TINY = "--config=configs/tiny.py"
TRAIN = f"train {TINY} --workdir=TMP/run"
GSM8K = "train --config=configs/gsm8k.py --workdir=TMP/run"
PLAN = "plan --config=configs/qwen3_30b_a3b.py"
CUBE = f"{PLAN} --topology=v5p:4x4x4"
ADDER = "tests/golden/adder"
SWEEP = f"sweep {TINY} --runs=TMP/sweep"
SAMPLE = f"sample --model={ADDER}"

MISTAKES = {
    # A flag, or a field of the config, that does not exist.
    f"train {TINY} --workdr=x": "unknown flag --workdr; did you mean --workdir?",
    f"evaluate {TINY} --workdir=TMP --jsn=x": "unknown flag --jsn; did you mean --json?",
    f"{TRAIN} --iterations=3": "unknown flag --iterations; did you mean --config.iterations?",
    f"{TRAIN} --learning_rate=1": "unknown flag --learning_rate; did you mean --config.optimizer.learning_rate?",
    f"{TRAIN} --training.learning_rate=1": "did you mean --config.optimizer.learning_rate?",
    f"{TRAIN} --gspo.low=1": "did you mean --config.objective.gspo.low?",
    f"{TRAIN} --critic.optimizer.learning_rate=1": "did you mean --config.critic.optimizer.learning_rate?",
    f"{TRAIN} --xyz": "unknown flag --xyz; --help lists the flags",
    f"{TRAIN} extra": "unexpected argument 'extra'; flags are written --name=value",
    f"{TRAIN} --config.iteratons=3": "no field 'iteratons'; did you mean 'iterations'?",
    f"{TRAIN} --config.training.learning_rate=1": "did you mean 'optimizer.learning_rate'?",
    f"{TRAIN} --config.rewards.exact=1.0": "no reward 'exact'; did you mean 'exact_answer'? there are",
    "doctor --confg=x": "unknown flag --confg; did you mean --config?",
    f"convert --from={ADDER} --to=TMP/o --dtyp=x": "unrecognized arguments: --dtyp=x; did you mean --dtype?",
    f"bench --modle={ADDER}": "did you mean --model?",
    "report docs --tabel=x": "did you mean --table?",
    "score --reward=x --in=x --out=x --workes=2": "unrecognized arguments: --workes=2; did you mean --workers?",
    f"evaluate {TINY} --workdir=TMP --benchmark=gsm9k": "unknown benchmark 'gsm9k'; did you mean 'gsm8k'?",
    f"evaluate {TINY} --workdir=TMP --benchmark=gsm8k": "--data is missing: the folder or file of gsm8k",
    f"{SAMPLE} --promt=x": "unknown flag --promt; did you mean --prompt?",
    f"{SWEEP} --seed=3": "unknown flag --seed; did you mean --seeds?",
    f"{SWEEP} --sweep objective.nme=gspo,grpo": "no field 'objective.nme'; did you mean 'objective.name'?",
    # A flag that is missing.
    "train --workdir=TMP/run": "--config is missing; for example --config=tiny",
    f"train {TINY}": "--workdir is missing: run folder, or gs://BUCKET/RUN",
    f"evaluate {TINY}": "--workdir is missing",
    f"coldstart {TINY}": "--workdir is missing: new folder to write the model to",
    f"{TRAIN} -config.seed": "Missing value for flag -config.seed",
    PLAN: "--topology is missing: slice to compile for, such as v5p:4x4x4",
    "convert": "the following arguments are required: --from, --to\n",
    "bench": "--model is missing; give the model's Hugging Face folder",
    "report": "the following arguments are required: RUN",
    "score": "the following arguments are required: --reward, --in, --out\n",
    "sample --prompt=x": "--workdir is missing: a run to sample from; or give a Hugging Face folder, --model=DIR\n",
    f"{SAMPLE} --in=x": "--in needs a file for the responses; give one with --out=FILE\n",
    f"{SAMPLE} --prompt=x --logprobs": "--logprobs goes into the file of responses; give one with --out=FILE\n",
    f"{SAMPLE} --prompt=x --score": "--score needs rows with reference answers; give a file of them with --in=FILE\n",
    SAMPLE: "a chat needs a terminal, and there is none; give --prompt=TEXT, or --in=FILE and --out=FILE\n",
    f"{SAMPLE} --samples=2": "--samples is for --prompt or --in, and without either this is a chat; give one of them\n",
    SWEEP: "configs/tiny.py has no get_sweep(), so nothing to compare; give --sweep FIELD=VALUE,VALUE, or --seeds=N\n",
    "sweep --seeds=2": "--config is missing; for example --config=tiny",
    # A config that is no config.
    "train --config=configs/tinny.py --workdir=TMP/run": "not found; did you mean configs/tiny.py?",
    "train --config=configs/tinny.py:runlocal --workdir=TMP/run": "not found; did you mean configs/tiny.py:runlocal?",
    "train --config=configs --workdir=TMP/run": "config 'configs' is a folder; give a .py file in it",
    "train --config= --workdir=TMP/run": "config '' not found; give a .py file",
    "train --config=README.md --workdir=TMP/run": "config 'README.md' is not a .py file; give one, or a name such as",
    "train --config=configs/tiny.py:runlokal --workdir=TMP/run": "takes no argument 'runlokal'; use countdown",
    "doctor --config=no.py": "config 'no.py' not found",
    # A value of the wrong type, or out of range.
    f"{TRAIN} --start_over=maybe": "--start_over is 'maybe'; use true or false",
    "doctor --draws=4096": "--draws is '4096'; use true or false",
    f"{TRAIN} --config.iterations=many": "iterations is 'many'; use a whole number",
    f"{TRAIN} --config.mesh=8": "mesh is a section and not '8'; set one of its fields",
    f"{TRAIN} --config.optimizer.learning_rate=nan": "learning_rate is nan; use a finite number above 0",
    f"{TRAIN} --config.optimizer.learning_rate=-1": "learning_rate is -1.0; use a finite number above 0",
    f"{TRAIN} --config.cpu_devices=0": "cpu_devices is 0; use 1 to 65536",
    f"{TRAIN} --config.objective.name=gsop": "no objective 'gsop'; did you mean 'gspo'?",
    f"{TRAIN} --config.data.task=arithmetics": "unknown task 'arithmetics'; did you mean 'arithmetic'?",
    f"{TRAIN} --config.data.options.difficulty=hardest": "unknown difficulty 'hardest'; use one of easy",
    f"{TRAIN} --config.mesh.data=4": "needs 16 devices but there are 8; choose sizes whose product is 8",
    f"{TRAIN} --config.mesh.data=3": "needs 12 devices but there are 8",
    f"{TRAIN} --config.cpu_devices=4": "needs 8 devices but there are 4",
    f"{TRAIN} --config.model.dispatch=ragged_all_to_all": "does not compile on cpu, only on tpu; use 'gather'",
    f"coldstart {TINY} --workdir=TMP/run --config.coldstart.steps=0": "is 0, so there is nothing to train",
    f"{PLAN} --topology=v5p-8": "v5p-8 is 4 chips (its number counts TensorCores, 2 to a chip); write",
    f"{PLAN} --topology=v9:2x2": "unknown TPU generation 'v9'; there are v4, v5e, v5p, v6e, tpu7x",
    f"plan {TINY} --topology=v5p:2x2x1": "needs 8 devices but there are 4",
    f"{CUBE} --slices=0": "--slices is '0'; use a positive integer",
    f"{CUBE} --programs=updates": "unknown program 'updates'; did you mean 'update'?",
    f"{CUBE} --headroom=2": "--headroom is '2'; use a number in the range [0.0, 0.9]",
    f"{CUBE} --tune": "--tune needs the lengths of responses",
    f"{CUBE} --lengths=log": "--lengths is 'log'; write it as uniform:",
    f"bench --model={ADDER} --prompts=0": "--prompts is 0; it must be at least 1",
    f"bench --model={ADDER} --prompts=x": "argument --prompts: invalid int value: 'x'\n",
    f"bench --model={ADDER} --mesh=fsd:2": "unknown mesh axis 'fsd'; the axes are data, fsdp",
    f"bench --model={ADDER} --compile=there": "--compile is 'there'; use ahead or here",
    f"convert --from={ADDER} --to=TMP/o --dtype=int8": "dtype is 'int8'; use float32 or bfloat16",
    "report docs --panels=rout": "invalid choice: 'rout'",
    f"{GSM8K} --config.model.folder=../there/Mine --check_for=8": "task gsm8k needs data.folder",
    # A folder that is missing, is a file, or holds something else.
    f"train {TINY} --workdir=pyproject.toml": "pyproject.toml is not a folder; give another --workdir",
    f"train {TINY} --workdir=pyproject.toml/run": "pyproject.toml is not a folder; give another --workdir",
    f"train {TINY} --workdir=": "the name of the run folder is empty; give one, such as --workdir=runs/first",
    f"train {TINY} --workdir=s3://b/run": "neither a local folder nor a bucket; write a bucket as gs://NAME/RUN",
    f"{TRAIN} --json=.": "--json=. is a folder; give a file in it",
    GSM8K: "model.folder is empty and the config has no cold start",
    f"{GSM8K} --config.model.folder=no/such": "no/such is not a folder",
    f"{GSM8K} --config.model.folder=docs": "docs/config.json does not exist",
    f"{GSM8K} --config.model.folder={ADDER}": "task gsm8k needs data.folder",
    f"{GSM8K} --config.model.folder={ADDER} --config.data.folder=no": "no is no folder; set data.folder to the one",
    f"evaluate {TINY} --workdir=no": "no does not exist; give the --workdir of a run",
    f"evaluate {TINY} --workdir=docs": "docs holds no run: it has no coldstart",
    f"evaluate {TINY} --workdir=pyproject.toml": "pyproject.toml is not a folder; give the --workdir of a run",
    f"evaluate {TINY} --workdir=TMP --keep=README.md": "--keep=README.md exists; give another file, or remove it\n",
    f"{SAMPLE} --prompt=x --out=README.md": "--out=README.md exists; give another file, or remove it\n",
    "sample --workdir=no --prompt=x": "folder no does not exist; give the --workdir of a run\n",
    f"sample --workdir={ADDER} --prompt=x": f"{ADDER} holds no run; give the --workdir of one, or a Hugging",
    "sample --model=docs --prompt=x": "docs/config.json does not exist",
    f"coldstart {TINY} --workdir=gs://bucket/cold": "--workdir is gs://bucket/cold, where a path on this",
    f"{GSM8K} --config.model.folder=gs://b/Q": "--config.model.folder is gs://b/Q, where a path",
    "convert --from=gs://b/run --to=TMP/o": "give one (gcloud storage cp --recursive gs://b/run . ",
    "report gs://b/run": "the run folder is gs://b/run, where a path on this machine is needed",
    f"coldstart {TINY} --workdir=docs": "docs is not empty; give --workdir a new folder",
    f"{CUBE} --rates=no.json": "--rates=no.json cannot be used ([Errno 2] No such file",
    f"{CUBE} --cache=pyproject.toml": "--cache=pyproject.toml is a file; give a folder",
    f"{CUBE} --dump=pyproject.toml": "--dump=pyproject.toml is a file; give a folder",
    f"{CUBE} --figure=docs": "--figure=docs is a folder; give a file in it",
    "convert --from=no --to=TMP/o": "no is not a folder; give a Hugging Face folder",
    f"convert --from={ADDER} --to=docs": "docs exists and is not an empty folder",
    f"convert --from={ADDER} --to=pyproject.toml/x": "pyproject.toml is not a folder; give another",
    "bench --model=docs": "docs/config.json does not exist",
    "report docs": "docs is not a run folder",
    "report no": "folder no does not exist",
    f"{SWEEP} --sweep objective.name=gspo": "has a single value; give several, or set it by --config.objective.",
    f"{SWEEP} --sweep objective.name=gspo,gsop": "no objective 'gsop'; did you mean 'gspo'?",
    f"{SAMPLE} --prompt=x --temperature=-1": "--temperature is '-1'; use a non-negative number",
    f"{SAMPLE} --prompt=x --samples=0": "--samples is '0'; use a positive integer",
    f"{SAMPLE} --prompt=x --step=3": f"step is 3, and {ADDER} is a model without iterations; leave it out\n",
    f"{SAMPLE} --prompt=x --workdir=docs": "--workdir and --model are both given; give the run, or the Hugging Face",
    f"{SAMPLE} --prompt=x --in=x --out=TMP/o": "--prompt and --in are both given; give one of them\n",
    f"{SWEEP} --sweep iterations=3,many": "iterations is 'many'; use a whole number\n",
    f"{SWEEP} --seeds=two": "--seeds is 'two'; use how many, such as 3, or which, such as 0,2,5\n",
    f"{SWEEP} --seeds=2 --jobs=0": "--jobs is '0'; use a positive integer\n",
    f"sweep {TINY} --seeds=2 --runs=gs://bucket/sweep": "--runs is 'gs://bucket/sweep', but the runs of a sweep are on",
    f"sweep {TINY} --seeds=2 --runs=pyproject.toml": "--runs=pyproject.toml is a file; give a folder\n",
}
"""What each command says; a sentence that ends with a line feed is the whole of what it says."""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[dict[str, tuple[int, str, str]], Path]:
    """Return exit code, stdout and stderr of every command, all of which run in one process, and their folder TMP."""
    folder = tmp_path_factory.mktemp("mistakes")
    words = [shlex.split(f"gspo_jax.{command}".replace("TMP", str(folder))) for command in MISTAKES]
    return dict(zip(MISTAKES, run_commands(words), strict=True)), folder


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_ends_the_command_with_one_sentence(command, said):
    code, out, err = said[0][command]
    if "libtpu" in err and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu, the TPU's compiler")
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ") and MISTAKES[command] in err
    assert err.count("\n") == 1, err


def test_mistakes_leave_no_file_behind(said):
    assert not [path for path in said[1].rglob("*") if path.is_file()]
