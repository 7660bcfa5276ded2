"""The Google Cloud scripts: the exact commands they print, and a preempted run that is brought to its end.

A stub stands in for gcloud; nothing here reaches a network.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from gspo_jax import cli, exits
from gspo_jax.planning import topology
from gspo_jax.planning.elsewhere import check_for
from tests.test_launch import ROOT, _bash, _script, copy  # noqa: F401  copy is a fixture

TOOLS = ("chmod", "date", "git", "grep", "head", "kill", "nohup", "sed", "setsid", "sleep", "sort", "touch", "uname")
PLACE = ["--project=my-project", "--zone=us-east5-a", "--name=gspo"]
RUN = ["--config=configs/tiny.py", "--workdir=gs://bucket/run"]
WHERE = "--project=my-project --zone=us-east5-a"
ALL = "--node=all --worker=all"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def root(copy):  # noqa: F811
    for tool in TOOLS:
        if (found := shutil.which(tool)) and not (copy / "bin" / tool).exists():
            (copy / "bin" / tool).symlink_to(found)
    return copy


def launch(root: Path, script: str, *flags: str):
    return _bash(root, f'bash launch/{script} "$@"', *flags)


def dry(root: Path, script: str, *flags: str) -> list[str]:
    """Return the commands of a dry run, unquoted and without their comments."""
    words = list(flags)
    words.insert(1, "--dry-run")  # before the command that exec runs
    done = launch(root, script, *words)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in root.iterdir()) == ["bin", "launch", "pyproject.toml"]
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    long = [line.removesuffix("\\") for line in done.stdout.splitlines() if len(line) > 120 and line[0] != "#"]
    assert all(len(shlex.split(line)) == 1 for line in long)
    return [" ".join(shlex.split(line)) for line in lines(done.stdout) if not line.startswith("#")]


def lines(printed: str) -> list[str]:
    """Return the commands that a script prints, each in one line."""
    return printed.replace(" \\\n   ", "").splitlines()


def resources(command: str) -> str:
    return f"gcloud compute tpus queued-resources {command} {WHERE}"


def on_all(command: str) -> str:
    return resources(f"ssh gspo {ALL} --command={command}")


STATE = resources("describe gspo --format=value(state.state)")
DELETE = resources("delete gspo --force --quiet")
STATUS = on_all('bash gspo_jax/launch/worker.sh status 2>/dev/null || echo "$HOSTNAME: none"')
STOP, END = (on_all(f"bash gspo_jax/launch/worker.sh {word}") for word in ("stop", "end"))
START = on_all("bash gspo_jax/launch/worker.sh start -m gspo_jax.train " + " ".join(RUN))
SETUP = on_all("bash gspo_jax/launch/worker.sh setup")
UNPACK = (
    "rm -rf gspo_jax.new && mkdir gspo_jax.new && tar -xzf gspo_jax.tar.gz -C gspo_jax.new && "
    "if [ -d gspo_jax/.venv ]; then mv gspo_jax/.venv gspo_jax.new/; fi && rm -rf gspo_jax && mv gspo_jax.new gspo_jax"
)
PUSH = [
    "mkdir -p build",
    "git archive --format=tar.gz --output=build/gspo_jax.tar.gz HEAD",
    resources(f"scp build/gspo_jax.tar.gz gspo:gspo_jax.tar.gz {ALL}"),
    on_all(UNPACK),
]
CREATE = "create gspo --accelerator-type={} --runtime-version={} {}"
ONE_SLICE = resources(CREATE.format("v5p-128", "v2-alpha-tpuv5", "--node-id=gspo"))

SLICES = resources(CREATE.format("v5p-128", "v2-alpha-tpuv5", "--node-count={} --node-prefix=gspo"))


@pytest.mark.parametrize(
    "flags, created",
    [
        (["--type=v5p-128"], ONE_SLICE),
        (["--type=v6e-16", "--spot"], resources(CREATE.format("v6e-16", "v2-alpha-tpuv6e", "--node-id=gspo --spot"))),
        (
            ["--type=v5litepod-256", "--slices=4", "--reserved"],
            resources(
                CREATE.format("v5litepod-256", "v2-alpha-tpuv5-lite", "--node-count=4 --node-prefix=gspo --reserved")
            ),
        ),
        (
            ["--type=v4-8", "--gcloud=--network=pod", "--gcloud=--internal-ips"],
            resources(CREATE.format("v4-8", "tpu-ubuntu2204-base", "--node-id=gspo --network=pod --internal-ips")),
        ),
        (
            ["--type=v5e-8", "--flex-start=10h"],
            resources(
                CREATE.format("v5litepod-8", "v2-alpha-tpuv5-lite", "--node-id=gspo")
                + " --provisioning-model=flex-start --max-run-duration=10h"
            ).replace("gcloud", "gcloud alpha"),
        ),
        (
            ["--type=v4-8", "--runtime=tpu-ubuntu2404-base"],
            resources(CREATE.format("v4-8", "tpu-ubuntu2404-base", "--node-id=gspo")),
        ),
    ],
)
def test_create(root, flags, created):
    assert dry(root, "tpu.sh", "create", *PLACE, *flags) == [created]


@pytest.mark.parametrize(
    "command, flags, printed",
    [
        ("wait", [], [STATE]),
        ("push", [], PUSH),
        ("setup", [], [SETUP]),
        ("setup", ["--fetch=gs://bucket/Qwen3"], [on_all("bash gspo_jax/launch/worker.sh setup gs://bucket/Qwen3")]),
        ("run", RUN, [START]),
        ("run", [*RUN, "--env=A_B=gs://c"], [START.replace("--command=", "--command=env A_B=gs://c ")]),
        ("status", [], [STATE, STATUS]),
        (
            "logs",
            ["--node=1", "--worker=3"],
            [resources("ssh gspo --node=1 --worker=3 --command=tail -n 200 -F run/log")],
        ),
        ("exec", ["--", "uptime", "-p"], [on_all("cd gspo_jax && uptime -p")]),
        ("stop", [], [STOP]),
        ("delete", [], [DELETE]),
        (
            "babysit",
            [*RUN, "--type=v5p-128"],
            [STATE, ONE_SLICE, STATUS, END, *PUSH, SETUP, START, DELETE],
        ),
        (
            "babysit",
            [*RUN, "--type=v5p-128", "--slices=3", "--elastic=30"],
            [STATE, SLICES.format(3), STATUS, END, *PUSH, SETUP, START, DELETE, SLICES.format(2), DELETE],
        ),
    ],
)
def test_the_other_commands(root, command, flags, printed):
    assert dry(root, "tpu.sh", command, *PLACE, *flags) == printed


@pytest.mark.parametrize(
    ("script", "flags", "where"),
    [
        ("tpu.sh", ["babysit", *PLACE, "--type=v5p-128", "--slices=2"], "2xv5p-128"),
        ("tpu.sh", ["babysit", *PLACE, "--type=v5e-16"], "v5litepod-16"),
        ("tpu.sh", ["run", *PLACE], "0"),
        ("gke.sh", [*PLACE, "--cluster=pods", "--type=v4-8"], "v4-8"),
        ("gke.sh", [*PLACE, "--cluster=pods", "--type=tpu7x-8"], "tpu7x-8"),
        ("sky.sh", ["--name=a", "--type=v6e-8"], "v6e-8"),
    ],
)
def test_a_dry_run_checks_the_config_for_the_chips_if_the_project_is_installed(root, script, flags, where):
    """By --check_for, which knows these names (tests/planning/test_elsewhere.py)."""
    without = launch(root, script, *flags, *RUN, "--dry-run")
    assert without.returncode == 0 and "the config is not checked, as .venv is missing" in without.stderr
    _script(root / ".venv" / "bin" / "python", 'if [ "$1" != -c ]; then echo "$*" >>calls && exit "${CODE:-0}"; fi')
    assert launch(root, script, *flags, *RUN, "--dry-run").stdout == without.stdout
    assert (root / "calls").read_text() == f"-m gspo_jax.train {' '.join(RUN)} --check_for={where}\n"
    refused = _bash(root, f'bash launch/{script} "$@"', *flags, *RUN, "--dry-run", CODE="2")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_commands_of_the_page_run_dry_and_their_configs_are_valid(root):
    """What `$P` stands for is taken from the page, in order."""
    place, count = [], 0
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "tpu.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        if line.startswith("P="):
            place = shlex.split(line)[0].removeprefix("P=").split()
        if not (found := re.match(r"bash launch/((?:tpu|gke|sky)\.sh)", line)):
            continue
        words = [each for word in shlex.split(line, comments=True)[2:] for each in (place if word == "$P" else [word])]
        count += bool(
            dry(root, found[1], words[0], *words[1:]) if found[1] == "tpu.sh" else dry(root, found[1], *words)
        )
        if given := [word for word in words if word.startswith("--config")]:
            slices = next((word.partition("=")[2] for word in words if word.startswith("--slices=")), "1")
            where = [f"{slices}x{word.partition('=')[2]}" for word in words if word.startswith("--type=")]
            assert "config is valid" in check_for(cli.read_config(given), *(where or ["0"]), given)
    assert count >= 15


NAMES = {
    "v5e-8": "v5litepod-8",
    "v5litepod-8": "v5litepod-8",
    "ct5lp-hightpu-8t": "v5litepod-8",
    "v6e-8": "v6e-8",
    "ct6e-standard-8t": "v6e-8",
    "v5p-8": "v5p-8",
    "ct5p-hightpu-4t": "v5p-8",
    "v4-8": "v4-8",
    "ct4p-hightpu-4t": "v4-8",
}
"""What people and GKE call a slice, and what Cloud TPU's API does."""


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_by_any_of_its_names(root, name):
    """As `plan` and --check_for count its chips, too."""
    assert topology.of_type(name) == topology.of_type(NAMES[name])
    (created,) = dry(root, "tpu.sh", "create", *PLACE, f"--type={name}")
    assert f" --accelerator-type={NAMES[name]} " in created
    assert ("v5-lite" in created) == NAMES[name].startswith("v5litepod")
    *_, workload = dry(root, "gke.sh", *PLACE, "--cluster=pods", f"--type={name}", *RUN)
    assert f" --tpu-type={NAMES[name]} " in workload
    (job,) = dry(root, "sky.sh", "--name=gspo", f"--type={name}", *RUN)
    assert f" --gpus=tpu-{NAMES[name]} " in job


@pytest.mark.parametrize(
    "word",
    ["plain", "", "two words", "it's", 'say "so"', "a'b\"c$d`e\\f!", "--flag=<think>\n", "--flag=a  b", "é", "~", "*"],
)
def test_a_printed_word_is_read_as_it_was_given(root, word):
    again = _bash(
        root, 'source launch/command.sh; dry=yes; run printf %s. "$@" >told; bash told', word, word, "x" * 120
    )
    assert again.stdout == f"{word}.{word}.{'x' * 120}.", again.stderr


def test_flags_reach_the_trainer_as_they_were_given(root):
    given = [*RUN, "--config.sampling.prefix=<think>\n'a b'", "--config.iterations=9"]
    (line,) = lines(launch(root, "tpu.sh", "run", *PLACE, *given, "--dry-run").stdout)
    remote = next(word for word in shlex.split(line) if word.startswith("--command="))
    _script(root / "gspo_jax" / "launch" / "worker.sh", 'printf "%s\\0" "$@" >given')
    assert _bash(root, remote.removeprefix("--command=")).returncode == 0  # as the shell of a worker parses it
    assert (root / "given").read_text().split("\0") == ["start", "-m", "gspo_jax.train", *given, ""]


def test_gke(root):
    flags = ["--cluster=pods", "--type=v5p-128", "--slices=2", *RUN]
    *tree, workload = dry(root, "gke.sh", *PLACE, *flags)
    assert tree == [
        "mkdir -p build",
        "git archive --format=tar --output=build/gspo_jax.tar HEAD",
        "rm -rf build/gspo_jax",
        "mkdir build/gspo_jax",
        "tar -xf build/gspo_jax.tar -C build/gspo_jax",
    ]
    assert workload == (
        f"xpk workload create --workload=gspo --cluster=pods {WHERE} --tpu-type=v5p-128 --num-slices=2 "
        "--max-restarts=50 --restart-on-exit-codes=1,3,4,75 --termination-grace-period-seconds=60 "
        "--base-docker-image=python:3.12 --script-dir=build/gspo_jax "
        "--command=python -m pip install --quiet -c launch/constraints.txt -e '.[tpu]' && exec bash launch/pod_job.sh "
        "python -m gspo_jax.train --config=configs/tiny.py --workdir=gs://bucket/run"
    )
    *_, workload = dry(root, "gke.sh", *PLACE, *flags, "--fetch=gs://b/models/Qwen3", "--fetch=gs://b/my data/")
    assert "-e '.[tpu]' && bash launch/worker.sh fetch gs://b/models/Qwen3 'gs://b/my data' && exec bash" in workload
    *_, workload = dry(root, "gke.sh", *PLACE, *flags, "--config.processes.grace_s=90.5")
    assert "--termination-grace-period-seconds=120 " in workload


def test_sky(root):
    flags = ["--name=gspo", "--type=v5p-128", "--zone=us-east5-a", "--spot", *RUN]
    assert dry(root, "sky.sh", *flags) == [
        "sky jobs launch --name=gspo --infra=gcp/us-east5/us-east5-a --gpus=tpu-v5p-128 "
        "--env=TRAIN=--config=configs/tiny.py --workdir=gs://bucket/run --use-spot --yes --detach-run launch/sky.yaml"
    ]
    (fetched,) = dry(root, "sky.sh", *flags, "--fetch=gs://b/models/Qwen3", "--fetch=gs://b/my data")
    assert " --env=FETCH=gs://b/models/Qwen3 'gs://b/my data' --use-spot " in fetched
    job = (ROOT / "launch" / "sky.yaml").read_text()
    assert (
        """  FETCH: '' #""" in job
        and 'setup: eval "bash launch/worker.sh setup $FETCH"\n' in job
        and "TRAIN:" in job
        and "recover_on_exit_codes: [75]" in job
    )
    assert 'run: eval "exec bash launch/pod_job.sh .venv/bin/python -m gspo_jax.train $TRAIN"\n' in job


def test_a_pod_s_job_fails_if_the_run_is_only_saved(root):
    """The command is started by `eval "exec …"`, as in sky.yaml, and the signal sent to the shell that does that."""
    ends = f'case $1 in save) {SAVES};; finish) {FINISHES};; *) exit "$1";; esac'
    _script(root / "bin" / "trainer", f"{WAITS}\n{ends}")
    job = """set -m; (eval 'exec bash launch/pod_job.sh trainer "$0"') & until [ -e ready ]; do sleep 0.1; done
    kill -TERM $!; wait $!; echo "exit code $?" """
    for word, code in (("save", 75), ("finish", 0), ("0", 1), ("1", 1), ("2", 2), ("5", 5)):
        done = _bash(root, job.replace("$0", word))
        assert f"exit code {code}\n" in done.stdout, done.stdout + done.stderr
        (root / "ready").unlink()


@pytest.mark.parametrize("script", ["tpu.sh", "gke.sh", "sky.sh"])
def test_help_is_the_head_of_the_script(root, script):
    done = launch(root, script, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert f"bash launch/{script}" in done.stdout and "--dry-run" in done.stdout and "set -euo" not in done.stdout


GKE = [*PLACE, "--cluster=pods", "--type=v5p-128", *RUN]


@pytest.mark.parametrize(
    "script, flags, says",
    [
        ("tpu.sh", [], "unexpected command ''; use one of create, wait, "),
        ("tpu.sh", ["creat", *PLACE], "unexpected command 'creat'; use one of create, wait, "),
        ("tpu.sh", ["push", *PLACE, "--spto"], "unexpected --spto"),
        ("tpu.sh", ["push", *PLACE[:2]], "--name= is missing"),
        ("tpu.sh", ["push", *PLACE[:2], "--name=Gspo"], "--name=Gspo is not valid"),
        ("tpu.sh", ["push", *PLACE[1:]], "--project= is missing"),
        ("tpu.sh", ["push", *PLACE, "--project=My Project"], "--project=My Project is not valid"),
        ("tpu.sh", ["push", *PLACE, "--zone=us-east5"], "--zone=us-east5 is not valid; give the zone"),
        ("tpu.sh", ["create", *PLACE], "--type= is missing"),
        ("tpu.sh", ["create", *PLACE, "--type=v5p"], "such as --type=v5e-8, or --type=v5p-128, whose 64"),
        ("tpu.sh", ["create", *PLACE, "--type=v5p:4x4x4"], "--type=v5p-128, whose 64 chips have two TensorCores each"),
        (
            "tpu.sh",
            ["create", *PLACE, "--type=v5e:2x4"],
            "give its accelerator type, --type=v5litepod-8",
        ),
        ("tpu.sh", ["create", *PLACE, "--type=v6e:4x4"], "is a topology; give its accelerator type, --type=v6e-16"),
        ("gke.sh", [*PLACE, "--type=tpu7x:2x2x1"], "--type=tpu7x-8, whose 4 chips have two TensorCores each"),
        ("tpu.sh", ["create", *PLACE, "--type=tpu7x-8"], "--tpu-type=tpu7x-8 and use launch/gke.sh"),
        ("sky.sh", ["--name=a", "--type=tpu7x-8", *RUN], "cannot be requested by sky.sh; make a GKE cluster with xpk"),
        ("tpu.sh", ["create", *PLACE, "--type=v5p-8", "--slices=0"], "--slices=0 is not valid"),
        (
            "tpu.sh",
            ["create", *PLACE, "--type=v5p-8", "--spot", "--reserved"],
            "--spot, --reserved and --flex-start exclude each other",
        ),
        ("tpu.sh", ["create", *PLACE, "--type=v5e-8", "--flex-start=10"], "--flex-start=10 is not valid; give the"),
        ("tpu.sh", ["create", *PLACE, "--type=v5p-7"], "--type=v5p-7 is not valid"),
        ("tpu.sh", ["push", *PLACE], "has no commit to send; make one with git init && git add --all && git commit"),
        ("tpu.sh", ["create", *PLACE, "--type=v5p-8", *RUN], "create takes no --config=configs/tiny.py"),
        ("tpu.sh", ["run", *PLACE, RUN[0]], "--workdir= is missing; give a folder in a bucket"),
        (
            "tpu.sh",
            ["run", *PLACE, RUN[0], "--workdir=runs/a"],
            "--workdir=runs/a is not valid; give a folder in a bucket",
        ),
        ("tpu.sh", ["run", *PLACE, RUN[1]], "--config= is missing"),
        ("tpu.sh", ["setup", *PLACE, "--fetch=Qwen3"], "unexpected --fetch=Qwen3"),
        ("tpu.sh", ["babysit", *PLACE, *RUN, "--type=v5p-8", "--tries=0"], "--tries=0 is not valid"),
        (
            "tpu.sh",
            ["create", *PLACE, "--type=v5p-8", "--elastic=30"],
            "create takes no --elastic=30; only babysit does",
        ),
        *(
            ("tpu.sh", ["babysit", *PLACE, *RUN, "--type=v5p-8", *flags], says)
            for flags, says in (
                (["--slices=2", "--elastic"], "unexpected --elastic; bash launch/tpu.sh --help lists"),
                (["--slices=2", "--elastic=30m"], "--elastic=30m is not valid; give minutes, such as --elastic=30"),
                (["--slices=2", "--elastic=0"], "--elastic=0 is not valid"),
                (["--elastic=30"], "has no slice to go on without; request several, such as --slices=2"),
            )
        ),
        ("tpu.sh", ["exec", *PLACE], "exec has no command"),
        ("tpu.sh", ["stop", *PLACE, "--", "uptime"], "stop takes no command after --"),
        ("tpu.sh", ["stop", *PLACE], "gcloud is not installed; see https://cloud.google.com/sdk"),
        ("gke.sh", [flag for flag in GKE if "cluster" not in flag], "--cluster= is missing"),
        ("gke.sh", [*GKE, "--restarts=x"], "--restarts=x is not valid"),
        ("gke.sh", [*GKE, "--spot"], "--spot is a property of the cluster"),
        ("gke.sh", [*GKE, "--reserved"], "unexpected --reserved"),
        ("gke.sh", GKE, "xpk is not installed"),
        ("sky.sh", [*PLACE, "--type=v5p-8", *RUN], "sky.sh takes no --project=my-project"),
        ("sky.sh", ["--name=a", "--type=v5p-8", "--slices=2", *RUN], "sky.sh takes no --slices=2"),
        ("sky.sh", ["--name=a", "--type=v5p-8", *RUN], "sky is not installed"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_anything_is_done(root, script, flags, says):
    done = launch(root, script, *flags)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and says in done.stderr


PLAYER = r"""
cd "$PLAY"
echo "$*" >>calls
next() { # the first line of a file, which goes, but for the last one
  head -n 1 "$1"
  if [ "$(grep -c '' "$1")" -gt 1 ]; then sed -i 1d "$1"; fi
}
case "$*" in
  *describe*) said=$(next states)
    if [ "$said" = NONE ]; then echo "ERROR: NOT_FOUND: no such resource" >&2; exit 1; fi
    echo "WARNING: a note" >&2; echo "$said" ;;
  *'worker.sh status'*) said=$(next statuses)
    case $said in GONE) exit 255 ;; *) printf '%b\n' "$said" ;; esac ;;
  'storage ls'*) next checkpoints ;;
  *" create "*) next created >/dev/null; [ "$(next created)" = yes ] ;;
esac
"""
"""A stub gcloud that answers from files and logs how it was called."""


def babysit(
    root: Path,
    *more: str,
    states: str,
    statuses: str,
    checkpoints: str = "",
    created: str = "yes",
    tries: int = 5,
    poll: int = 0,
):
    """Run babysit against the stub to its end; return the actions taken, abbreviated, and the finished process."""
    play = root / "play"
    play.mkdir()
    for name, lines in {"states": states, "statuses": statuses, "created": created}.items():
        (play / name).write_text("".join(f"{word.replace('~', ' ')}\n" for word in lines.split()))
    newest = [f"gs://bucket/run/checkpoints/{step}/" for step in checkpoints.split()] or [""]
    (play / "calls").touch()
    (play / "checkpoints").write_text("".join(f"{line}\n" for line in newest))
    _script(root / "bin" / "gcloud", PLAYER)
    (root / "bin" / "git").unlink()
    _script(root / "bin" / "git", "")
    flags = [*PLACE, *RUN, "--type=v5p-128", "--spot", f"--poll={poll}", f"--tries={tries}", *more]
    done = _bash(root, 'bash launch/tpu.sh babysit "$@"', *flags, PLAY=str(play))
    calls = (play / "calls").read_text()
    short = {"create gspo": "create", "delete gspo": "delete", "worker.sh start": "start", "worker.sh setup": "setup"}
    did = [word for call in calls.splitlines() for sign, word in short.items() if sign in call]
    return did, done


def test_a_preempted_run_gets_new_machines_and_resumes(root):
    did, done = babysit(
        root,
        states="NONE NONE WAITING_FOR_RESOURCES PROVISIONING ACTIVE ACTIVE ACTIVE ACTIVE SUSPENDING SUSPENDED "
        "NONE CREATING ACTIVE",  # the first query only checks that gcloud answers
        statuses=r"a:~none a:~running GONE GONE a:~none a:~running\nb:~running a:~finished\nb:~running "
        r"a:~finished\nb:~finished",
        checkpoints="20",
    )
    assert done.returncode == 0, done.stderr
    assert did == ["create", "setup", "start", "delete", "create", "setup", "start", "delete"]
    told = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    states = [line.removeprefix("gspo is ") for line in told if line.startswith("gspo is ")]
    assert states == [
        *(
            "NONE",
            "WAITING_FOR_RESOURCES",
            "PROVISIONING",
            "ACTIVE",
            "SUSPENDING",
            "SUSPENDED",
            "NONE",
            "CREATING",
            "ACTIVE",
        )
    ]
    assert told[-1] == "the run is finished"


def elastic(root: Path, states: str, *, fits: str = "*", **given: Any):
    """Babysit four slices that have to be ACTIVE in two minutes, one minute a round.

    `fits` is a shell pattern of the places, such as "3xv5p-128", that the config is valid for. Returns the process, its
    actions, with the numbers of slices in place of "create", and how many places were checked.
    """
    refuses = 'echo "error: not on $place; use another" >&2; exit 2'
    checks = f'echo "$place" >>places; case $place in {fits}) ;; *) {refuses} ;; esac'
    _script(
        root / ".venv" / "bin" / "python",
        f"case $* in *--check_for=*) place=${{!#}}; place=${{place##*=}}; {checks} ;; esac",
    )
    for tool in ("date", "sleep"):
        (root / "bin" / tool).unlink()
    (root / "clock").write_text("1000")
    clock = shlex.quote(str(root / "clock"))
    _script(root / "bin" / "date", f'case $1 in +%s) read -r now <{clock}; echo "$now" ;; *) echo 12:00:00 ;; esac')
    _script(root / "bin" / "sleep", f"read -r now <{clock}; echo $((now + $1)) >{clock}")
    given = {"statuses": "a:~finished", "checkpoints": "20", **given}
    did, done = babysit(root, "--slices=4", "--elastic=2", states=f"NONE {states}", poll=60, **given)
    calls = [call for call in (root / "play" / "calls").read_text().splitlines() if "queued-resources create" in call]
    counts = iter(int(found[1]) if (found := re.search(r"--node-count=(\d)", call)) else 1 for call in calls)
    return done, [next(counts) if word == "create" else word for word in did]


LATE = "NONE CREATING WAITING_FOR_RESOURCES DELETING"
"""A request that is deleted after two minutes."""
SLOW = "NONE CREATING CREATING ACTIVE"
"""One that takes longer and is waited for."""


@pytest.mark.parametrize(
    ("states", "given", "actions"),
    [
        (  # three slices are too many as well, two have no mesh, and all are requested again after the next preemption
            f"SUSPENDED {LATE} {LATE} {SLOW} SUSPENDED NONE ACTIVE",
            {"fits": "4x*|3x*|v5p*", "statuses": "a:~running a:~finished"},
            ["delete", 4, "delete", 3, "delete", 1, "delete", 4, "delete"],
        ),
        (f"SUSPENDED {SLOW}", {"checkpoints": ""}, ["delete", 4, "delete"]),  # nothing to go on from
        (  # requests that fail are repeated until then, beyond --tries
            "SUSPENDED NONE NONE FAILED NONE ACTIVE",
            {"created": "no no no no yes", "tries": 1},
            ["delete", 4, 4, "delete", 3, "delete"],
        ),
    ],
)
def test_a_run_goes_on_with_fewer_slices(root, states, given, actions):
    done, did = elastic(root, states, **given)
    assert done.returncode == 0, done.stderr
    assert did == actions
    assert (root / "places").read_text().split() == ["4xv5p-128", "3xv5p-128", "2xv5p-128", "v5p-128"]


def test_a_config_without_fewer_slices_is_refused_before_anything_is_requested(root):
    done, did = elastic(root, "NONE", fits="4x*")
    sentence = (
        "--elastic=2 finds no smaller number of slices that the config fits; for 1: not on v5p-128; use another\n"
    )
    assert done.returncode == 2 and did == [] and done.stderr.endswith(f"error: {sentence}")
    shutil.rmtree(root / ".venv")
    done = launch(root, "tpu.sh", "babysit", *PLACE, *RUN, "--type=v5p-128", "--slices=4", "--elastic=2")
    assert "needs .venv on this machine to check the config for fewer slices; make it with bash" in done.stderr


def test_a_run_under_way_is_only_watched(root):
    did, done = babysit(root, states="ACTIVE", statuses="a:~running a:~running a:~finished")
    assert done.returncode == 0 and did == ["delete"]


def test_a_run_that_was_saved_because_its_machines_are_taken_away_is_started_again(root):
    """Without a pause, as they may stay: on the first round one worker has yet to exit."""
    did, done = babysit(
        root,
        states="ACTIVE ACTIVE ACTIVE ACTIVE SUSPENDED NONE ACTIVE",
        statuses=r"a:~running a:~running\nb:~saved a:~saved\nb:~saved a:~running a:~saved a:~running a:~finished",
    )
    assert done.returncode == 0, done.stderr
    assert did == ["setup", "start", "delete", "create", "setup", "start", "delete"]


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        (
            r"a:~running a:~stopped,~saved\nb:~running a:~stopped,~saved\nb:~stopped,~saved",
            "was stopped by tpu.sh stop",
        ),
        (r"a:~failed~for~good~with~exit~code~2\nb:~failed~with~exit~code~3", "would fail again in the same way"),
    ],
)
def test_a_run_that_was_stopped_by_hand_or_failed_for_good_is_not_started_again(root, statuses, says):
    did, done = babysit(root, states="ACTIVE", statuses=statuses)
    assert done.returncode == 1 and did == [] and says in done.stderr and done.stderr.count("\n") == 1


def test_it_gives_up_on_a_run_that_gets_nowhere(root):
    did, done = babysit(root, states="ACTIVE", statuses="a:~failed~with~exit~code~1", checkpoints="20", tries=3)
    assert done.returncode == 1 and did == ["setup", "start"] * 3
    assert "3 consecutive attempts made no new checkpoint in gs://bucket/run" in done.stderr


def test_a_run_that_comes_on_between_failures_is_not_given_up(root):
    statuses = "a:~failed,~killed a:~running " * 4 + "a:~finished"
    did, done = babysit(root, states="ACTIVE", statuses=statuses, checkpoints="20 40 60 80", tries=1)
    assert done.returncode == 0, done.stderr
    assert did == ["setup", "start"] * 4 + ["delete"]


def test_it_gives_up_where_no_machine_can_be_had(root):
    did, done = babysit(root, states="NONE", statuses="-", created="no", tries=2)
    assert done.returncode == 1 and did == ["create"] * 3
    (root / "play" / "calls").unlink()


def test_waiting_ends_with_the_machines_or_with_a_sentence(root):
    play = root / "play"
    play.mkdir()
    _script(root / "bin" / "gcloud", PLAYER)
    for states, code, says in (
        ("CREATING\nACTIVE\n", 0, "gspo is ACTIVE"),
        ("CREATING\nFAILED\n", 1, "will not become"),
    ):
        (play / "states").write_text(states)
        done = _bash(root, 'bash launch/tpu.sh wait "$@"', *PLACE, "--poll=0", PLAY=str(play))
        assert done.returncode == code and says in done.stdout + done.stderr


def worker(root: Path, *arguments: str):
    return _bash(root, 'bash gspo_jax/launch/worker.sh "$@"', *arguments)


@pytest.fixture
def machine(root):
    """Return a home folder as push and setup leave it, whose `python` evaluates its arguments as a shell command."""
    shutil.copytree(root / "launch", root / "gspo_jax" / "launch")
    _script(root / "gspo_jax" / ".venv" / "bin" / "python", 'echo "called: $*"; eval "$*"')
    return root


def state_of(machine: Path, wanted: str) -> str:
    """Return the status of the run, once it contains `wanted` or a few seconds have passed."""
    for _ in range(100):
        said = worker(machine, "status").stdout
        if wanted in said:
            break
        time.sleep(0.05)
    return said.partition(": ")[2].strip()


def test_a_worker_tells_what_has_become_of_its_run(machine):
    assert state_of(machine, "none") == "none"
    assert worker(machine, "start", "sleep 60").returncode == 0  # and it returns at once
    assert state_of(machine, "running") == "running"
    again = worker(machine, "start", "true")
    assert again.returncode == 2 and "is already running; stop it first" in again.stderr
    assert worker(machine, "stop").stdout.endswith(": stopped, exit code 143\n")
    assert worker(machine, "start", FINISHES).returncode == 0
    assert state_of(machine, "finished") == "finished"
    for code, said in (
        (0, "failed with exit code 1"),  # some code has ended the trainer
        (3, "failed with exit code 3"),
        *((code, f"failed for good with exit code {code}") for code in (exits.MISTAKE, exits.DIVERGED, exits.TAKEN)),
    ):
        assert worker(machine, "start", f"exit {code}").returncode == 0
        assert state_of(machine, said) == said
    (machine / "run" / "exit").unlink()  # the state after a reboot
    assert state_of(machine, "killed") == "failed, killed"
    assert (machine / "run" / "log").read_text().splitlines()[0] == "called: sleep 60"


WAITS = "sleep 60 & trap 'kill $!' TERM; echo >ready; wait"
"""Shell command of a stub trainer that waits for SIGTERM, once it has written the file `ready`."""
SAVES = 'sleep 0.3; echo {} >"$GSPO_JAX_ENDED/stopped.json"'
"""Shell command of a stub trainer that saves, and says so as the trainer does."""
FINISHES = 'echo {} >"$GSPO_JAX_ENDED/finished.json"'
"""Shell command of one that says that its run is finished."""


def start(machine: Path, *commands: str) -> None:
    """Start a stub trainer, and wait until it listens to signals."""
    ready = machine / "gspo_jax" / "ready"
    ready.unlink(missing_ok=True)
    assert worker(machine, "start", "; ".join(commands)).returncode == 0
    for _ in range(100):
        if ready.exists():
            return
        time.sleep(0.05)
    raise AssertionError((machine / "run" / "log").read_text())


@pytest.mark.parametrize("command", ["stop", "end"])
def test_a_run_saves_before_it_is_ended(machine, command):
    """`end` is for one that is started again; the signal reaches the trainer, and none of the processes it started."""
    helper = "(trap 'touch struck; exit' TERM; while true; do sleep 0.1; done) & helper=$!"
    start(machine, helper, WAITS, SAVES, "kill -9 $helper")
    assert worker(machine, command).returncode == 0
    assert state_of(machine, "saved") == ("stopped, saved" if command == "stop" else "saved")
    assert not (machine / "gspo_jax" / "struck").exists()


def test_a_run_that_a_signal_from_elsewhere_saved_is_not_finished(machine):
    start(machine, "echo $$ >pid", WAITS, SAVES)
    os.kill(int((machine / "gspo_jax" / "pid").read_text()), signal.SIGTERM)
    assert state_of(machine, "saved") == "saved"


def test_a_run_that_ends_by_itself_while_it_is_stopped_is_finished(machine):
    start(machine, WAITS, FINISHES)
    assert worker(machine, "stop").stdout.endswith(": finished\n")


def test_a_run_that_does_not_end_is_killed_as_a_whole(machine):
    start(machine, "trap '' TERM", "echo >ready", "sleep 60")
    (machine / "run" / "patience").write_text("1\n")
    done = worker(machine, "stop")
    assert "the run has not ended 1 s after SIGTERM, and is killed" in done.stderr
    assert done.stdout.endswith(": stopped, killed\n")


def test_a_container_without_gcloud_fetches_by_gcsfs(machine):
    python = machine / "gspo_jax" / ".venv" / "bin" / "python"
    _script(python, 'printf "%s\\n" "$@" >called')
    assert worker(machine, "fetch", "gs://bucket/models/Qwen3").returncode == 0
    flag, program, *places = (machine / "gspo_jax" / "called").read_text().splitlines()
    assert flag == "-c" and "gcsfs.GCSFileSystem().get(" in program
    assert places == ["gs://bucket/models/Qwen3/", f"{machine / 'fetched' / 'Qwen3'}/"]


def test_setup_installs_and_fetches(machine):
    python = machine / "gspo_jax" / ".venv" / "bin" / "python"
    _script(python, 'if [ "$1" != -c ]; then echo "$*" >>calls; fi')
    _script(machine / "bin" / "bwrap", "")
    _script(machine / "bin" / "gcloud", 'echo "$*" >>"$HOME/fetched.log"')
    (machine / "home").mkdir()
    (machine / "gspo_jax" / "pyproject.toml").write_text("")
    done = worker(machine, "setup", "gs://bucket/models/Qwen3")
    assert done.returncode == 0, done.stderr
    assert (
        "-m pip install --disable-pip-version-check --no-input --no-compile -c launch/constraints.txt -e .[tpu]"
        in (machine / "gspo_jax" / "calls").read_text()
    )
    target = machine / "fetched" / "Qwen3"
    assert target.is_dir()
    fetched = (machine / "home" / "fetched.log").read_text()
    assert fetched == f"storage rsync --recursive gs://bucket/models/Qwen3 {target}\n"
