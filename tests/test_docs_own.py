"""docs/own.md, docs/own/ and docs/data.md match examples/: code, commands, each of which is run, and sentences."""

import dataclasses
import doctest
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from examples import http_server, judge_server
from gspo_jax import cli, config_files, references
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.notes import read_config
from gspo_jax.folder.samples import read_samples
from gspo_jax.models import huggingface, transformer
from gspo_jax.rewards import environments
from gspo_jax.rollout.episodes import TurnOver
from gspo_jax.setup import data, players, teacher
from gspo_jax.setup.checks import check
from gspo_jax.setup.fields import at
from gspo_jax.setup.turns import TokenTurns
from gspo_jax.tool_calls import TRIAL_TOOLS
from tests.pods import run_commands
from tests.servers import closed_port

ROOT = Path(__file__).parents[1]
OVERVIEW = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
DATA = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "own").glob("*.md"))}
GOLDEN = ROOT / "tests" / "golden"
ADDER = GOLDEN / "adder"
SHORT = (
    *("iterations=1", "training.minibatches=1", "cpu_devices=1", "mesh.data=1", "mesh.fsdp=1", "mesh.expert=1"),
    "sampling.slots=4",
)
"""Fields of the config that shorten a run. So few slots are never halved, so that the decoder compiles one loop."""
SMALL = ("data.prompts_per_batch=4", "sampling.group_size=4", "eval.prompts=4")
"""Fields of a small batch."""


def _blocks(language: str, page: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


SHOWN = {page: re.findall(r"^This is \[`examples/(\w+)\.py`\]", text, re.MULTILINE) for page, text in PAGES.items()}
"""The examples of a page, each with its code and its command, in this order."""
EXAMPLES = [(page, example) for page, examples in SHOWN.items() for example in examples]


def _command(page: str, example: str) -> str:
    """Return the command of a page that trains with an example."""
    return _blocks("bash", page)[SHOWN[page].index(example)]


def _words(command: str, module: str = "train") -> list[str]:
    """Return the words of a command that trains, without those that start the trainer."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[1:3] == ["-m", f"gspo_jax.{module}"]
    return words[3:]


def test_every_example_has_a_page():
    assert sorted(example for _, example in EXAMPLES) == sorted(
        {path.stem for path in (ROOT / "examples").glob("*.py")}
        - {"http_server", "judge_server", "judged", "mcp_server", "mixture", "own_loop", "trials"}
    )
    for example in (ROOT / "examples").glob("*.jsonl"):
        assert len(example.read_bytes().splitlines()) < 40


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_whole_examples(page):
    assert len(_blocks("python", page)) == len(_blocks("bash", page)) == len(SHOWN[page]) > 0
    for shown, example in zip(_blocks("python", page), SHOWN[page], strict=True):
        _, docstring, code = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8").split('"""', 2)
        assert shown.strip() == code.strip()
        assert len(docstring.splitlines() + code.splitlines()) < 50
        (command,) = re.findall(r"^    (python -m (?:.*\\\n)*.*)$", docstring, re.MULTILINE)
        assert _words(command) == _words(_command(page, example))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tries_in_python_comes_out(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    tried = doctest.DocTestParser().get_doctest("\n".join(_blocks("pycon", page)), {}, page, None, None)
    said: list[str] = []
    assert not doctest.DocTestRunner().run(tried, out=said.append).failed, "".join(said)
    assert tried.examples[-1].want


def _config(words: list[str]) -> ConfigDict:
    """Return the config that a command's arguments mean to gspo_jax.train."""
    return cli.read_config(config_files.config_words(words))


def _of_data() -> list[str]:
    """The commands of docs/data.md: rows, mixture, supervised training."""
    return re.findall(r"^```bash\n(.*?)^```", DATA, re.MULTILINE | re.DOTALL)


def _examples(*examples: str) -> list[str]:
    """The words of the commands of examples, without the configs."""
    commands = [_command(page, example) for page, example in EXAMPLES if example in examples]
    return [word for command in commands for word in _words(command) if "--config=" not in word]


def _dense(folder: Path) -> Path:
    """Write and return the folder of a dense model of one layer."""
    shape = dataclasses.replace(
        huggingface.read_config(ADDER), num_layers=1, num_experts=0, experts_per_token=0, moe_intermediate_size=0
    )
    huggingface.save(transformer.init_params(shape, jax.random.key(0)), shape, folder)
    Tokenizer.load(ADDER).save(folder)
    return folder


def _without_workdir(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("--workdir")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder with the runs of the pages' commands, by name, each of one iteration on one device."""
    folder = tmp_path_factory.mktemp("own")
    dense, small = _dense(folder / "dense"), [f"--config.{field}" for field in SMALL]
    generated, easy = f"--config.data.data_dir={folder}/data", "--config.data.options.difficulty=easy"
    tiny = "--config=configs/tiny.py:runlocal"
    rows, mixture = (_words(command) for command in _of_data()[:2])
    style = [word for word in rows if word.startswith(("--config.data.system", "--config.data.few_shot"))]
    objective = _without_workdir(_examples("objective"))
    judge = [*_words(_command("judge", "judge")), *small, generated, f"--config.judge.url={judge_server.start()}"]
    distillation = [*_words(_command("distillation", "distillation")), generated, f"--config.teacher.folder={ADDER}"]
    together = _examples("reward", "step_reward", "environment", "dataset")
    runs = {
        "together": (dense, ["--config=examples/dataset.py", *together, *small]),
        "mixture": (dense, [*mixture, *style, *objective, "--config.data.max_prompt_length=64"]),
        "taught": (dense, [*distillation, *small]),
        "own": (ADDER, [tiny, *_examples("reward", "environment"), generated, easy]),
        "game": (ADDER, [tiny, *_examples("async_reward", "game"), generated, *small]),
        "judged": (ADDER, judge),
        "compared": (ADDER, [word.replace("=examples/judge.py", "=examples/judge.py:pairwise") for word in judge]),
    }
    short = [f"--config.{field}" for field in SHORT]
    commands = [
        [
            "gspo_jax.train",
            *_without_workdir(words),
            f"--workdir={folder}/{name}",
            f"--config.model.folder={model}",
            *short,
        ]
        for name, (model, words) in runs.items()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCORES_URL", http_server.start())
        ended = run_commands(commands, seconds=1200)
    for name, (code, out, err) in zip(runs, ended, strict=True):
        assert code == 0, f"{name}: {out}{err}"
    return folder


def _last(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a run's last metrics and the samples of its first update."""
    return list(read_metrics(folder))[-1], read_samples(folder)[1]


@pytest.mark.slow
def test_all_examples_train_together(trained):
    """The reward, step reward, environment and data set, in one run."""
    measured, samples = _last(trained / "together")
    assert 0 <= measured["reward/brief"] <= 1 and 0 <= measured["reward/balanced"] <= 1
    assert "reward/equations" in measured and measured["response/turns"] >= 1  # an untrained model takes no steps
    assert all("*" in sample["prompt"] for sample in samples)


@pytest.mark.slow
def test_a_mixture_trains_with_shots_and_an_objective(trained):
    measured, samples = _last(trained / "mixture")
    assert all(sample["prompt"].startswith("Add. 1+1=#### 2\n2+5=#### 7\n") for sample in samples)
    assert read_config(trained / "mixture")["objective"]["name"] == "soft_gspo"
    assert 0 <= measured["reward/exact_answer"] <= 1 and 0 <= measured["reward/answer_format"] <= 1
    assert not [name for name in measured if name.startswith("routing/")], "the model is dense"


@pytest.mark.slow
def test_the_command_of_distillation_trains_with_a_teacher_beside_a_reward(trained):
    measured, _ = _last(trained / "taught")
    assert measured["teacher/kl"] > 1 and 0 <= measured["reward/exact_answer"] <= 1


@pytest.mark.slow
def test_the_command_of_sft_trains_on_conversations(tmp_path):
    words = [*_words(_of_data()[2], "coldstart"), f"--workdir={tmp_path}/sft", "--config.coldstart.terse=()"]
    words += [f"--config.{field}" for field in SHORT]
    command = [sys.executable, "-m", "gspo_jax.coldstart", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sft" / "model.safetensors").is_file() and (tmp_path / "sft" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_the_command_of_a_page_trains_with_its_function(trained):
    """As it is printed, on a policy that solves some of the problems: a reward and an environment, in one run."""
    measured, samples = _last(trained / "own")
    assert 0 <= measured["reward/brief"] < 1 and 0 < measured["reward/balanced"] <= 1
    assert measured["response/turns"] > 1
    assert any(word in sample["completion"] for word in ("digits", "wrong") for sample in samples)


@pytest.mark.slow
def test_a_game_trains_with_the_reward_of_a_server(trained):
    measured, samples = _last(trained / "game")
    assert 0 < measured["reward/terse"] <= 1 and measured["reward/terse/failed"] == measured["reward/failed"] == 0
    assert 0 <= measured["reward/environment"] <= 1 and measured["response/turns"] > 1
    assert all(sample["prompt"] == "guess?" for sample in samples)


@pytest.mark.slow
def test_the_command_of_the_judges_page_trains_against_the_stand_in(trained):
    """Scoring and comparing, in two runs."""
    single, compared = (list(read_metrics(trained / name)) for name in ("judged", "compared"))
    assert any(0 < each.get("reward/judge", 0) < 1 for each in single)
    assert sum(each.get("judge/calls", 0) for each in single) > 0
    assert all(each["reward/judge"] == 0.5 for each in compared if "reward/judge" in each), "half of a group wins"
    assert {each["judge/position_bias"] for each in compared if "judge/position_bias" in each} == {0.0}


def _set(name: str, value: object, *, then: Callable[[ConfigDict], Any] = check) -> Callable[[ConfigDict], Any]:
    """Return a mistake in a config: a field that is set."""

    def make(config: ConfigDict) -> None:
        section, _, key = name.rpartition(".")
        at(config, section)[key] = value
        then(config)

    return make


def _written(name: str, text: str, *, then: Callable[[ConfigDict], Any] = check) -> Callable[[ConfigDict], Any]:
    """Return a mistake in a file: mine.py, in which the config's function `name` is."""

    def make(config: ConfigDict) -> None:
        Path("mine.py").write_text(text, encoding="utf-8")
        config.functions[name] = f"mine.py:{name}"
        then(config)

    return make


def _template(text: str) -> Callable[[ConfigDict], Any]:
    """Return a mistake in the judge's template."""

    def make(config: ConfigDict) -> None:
        Path("mine.txt").write_text(text, encoding="utf-8")
        config.judge.rubric = "mine.txt"
        check(config)

    return make


def _comparing(config: ConfigDict) -> None:
    """Have comparisons decide what is correct."""
    config.judge.pairwise, config.judge.rubric, config.eval.correct = True, "examples/comparison.txt", "judge"
    check(config)


def _reply(config: ConfigDict) -> None:
    """Have the config's environment reply to the end of a turn."""
    tokenizer = Tokenizer.load(ADDER)
    over = TurnOver(b"0", "1+1=?", {"answer": "2"}, [tokenizer.eos_ids[0]], [[tokenizer.eos_ids[0]]], [0])
    with players.make_replies(config) as replies:
        turns = TokenTurns(replies, tokenizer, tokenizer.encode, 64)
        turns.wait(turns.begin([over]))


def _compare_tokens(config: ConfigDict) -> None:
    """Compare the teacher's tokenizer with the adder's."""
    teacher.check_tokens(config, Tokenizer.load(ADDER))


def _list_tools(config: ConfigDict) -> None:
    """Read the tools of the config's environment."""
    environments.tools_of(references.function(config.functions[config.environment.name]))


def _read(config: ConfigDict) -> None:
    """Read the config's data set."""
    data.load_records(config, "train")


MISTAKES: dict[str, dict[str, Callable[[ConfigDict], Any]]] = {
    "own": {
        "another file": _set("functions.brief", "rewards.py:brief"),
        "another function": _set("functions.brief", "examples/reward.py:breif"),
        "no function": _set("functions.brief", "examples/reward.py"),
        "a name of the catalogue": _set("functions.countdown", "examples/reward.py:brief"),
        "a name that no function has": _set("rewards.breif", 0.1),
    },
    "reward": {
        "`def brief(completion)`": _written("brief", "def brief(completion): return 1.0"),
        "a weight that is no number": lambda _: cli.read_config(["--config=tiny", "--config.rewards.brief=much"]),
        "`eval.correct` is no reward of the run": _set("eval.correct", "right"),
        "`async def` in a process of its own": _written(
            "balanced",
            "from gspo_jax.rewards import own_process\n"
            "@own_process\n"
            "async def balanced(prompt, completion, record): return 1.0",
        ),
    },
    "judge": {
        "no `judge.url`": _set("judge.url", ""),
        "a key in place of its name": _set("judge.key", "sk-0123456789"),
        "a variable that is not set": _set("judge.key", "JUDGE_KEY"),
        "another file": _set("judge.rubric", "rubrics.txt"),
        "another placeholder": _template("{competion}"),
        "comparisons that decide what is correct": _comparing,
    },
    "step_reward": {
        "an objective with one advantage per response": _set("objective.name", "gspo"),
        "`def equations(completion)`": _written("equations", "def equations(completion): return []"),
    },
    "environment": {
        "another name": _set("environment.name", "hnit"),
        "`def hint(completion)`": _written("hint", "def hint(completion): return None"),
        "a function's reply that is no text": _written(
            "hint", "def hint(prompt, completion, record): return 3", then=_reply
        ),
        "a class without `step`": _written("hint", "class hint: pass"),
        "rewards of a function": _set("rewards.environment", 1.0),
    },
    "tools": {
        "a tool that is no schema": _written("adding", "class adding: tools = [{'name': 'add'}]", then=_list_tools),
        "a server that is not there": _written(
            "adding",
            "from mcp import Client\n"
            "class adding:\n"
            "    @staticmethod\n"
            "    async def tools():\n"
            f"        async with Client('http://127.0.0.1:{closed_port()}/mcp') as client:\n"
            "            return (await client.list_tools()).tools\n",
            then=_list_tools,
        ),
        "a model whose chat template has no tools": lambda _: Tokenizer.load(ADDER).chat(
            [{"role": "user", "content": "?"}], tools=TRIAL_TOOLS
        ),
    },
    "objective": {
        "another name": _set("objective.name", "soft_gpso"),
        "a hyper-parameter that it does not have": _set("objective.soft_gspo", {"tau_pos": 3.0}),
        "a hyper-parameter that has no value": _written("soft_gspo", "def soft_gspo(*, tau): return tau"),
        "no `Objective` returned": _written("soft_gspo", "def soft_gspo(): return 3"),
        "step rewards, without `token_advantages=True`": _set("step_rewards.countdown_steps", 1.0),
    },
    "distillation": {
        "an objective with one advantage per response": _set("objective.name", "gspo"),
        "the name of a model, which is not downloaded": _set("teacher.folder", "Qwen3-8B"),
        "a teacher with other tokens": _set("teacher.folder", str(GOLDEN / "counter"), then=_compare_tokens),
        "a negative weight": _set("teacher.weight", -0.1),
    },
    "dataset": {
        "another name": _set("data.task", "product", then=_read),
        "an option that the function does not take": _set("data.options.smallest", 3, then=_read),
        "a row with a number": _written(
            "products",
            "def products(split, largest): return [{'question': '2*3', 'answer': 6}]",
            then=_read,
        ),
        "`turns` that end with the user's": _written(
            "products",
            "def products(split, largest):\n"
            "    return [{'question': '2*3', 'answer': '6', 'turns': [{'role': 'assistant', 'content': '?'},"
            " {'role': 'user', 'content': '!'}]}]",
            then=_read,
        ),
        "`data.data_dir` left as it was": _set("data.data_dir", "runs/data", then=_read),
    },
}
"""How to make the mistakes that a page lists."""


@pytest.mark.parametrize("page", MISTAKES)
def test_mistakes_end_with_the_sentences_of_the_page(page, tmp_path, monkeypatch):
    text = PAGES.get(page, OVERVIEW)
    shown = dict(re.findall(r"^\| ([^|]*) \| `([^|]*)` \|$", text, re.MULTILINE))
    assert shown.keys() == MISTAKES[page].keys()
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    command = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    for mistake, make in MISTAKES[page].items():
        config = _config(_words(command))
        references.module.cache_clear()  # mine.py is another file each time
        references.function.cache_clear()
        with pytest.raises(UserError) as raised, config.unlocked():
            make(config)
        says = re.escape(shown[mistake]).replace("…", ".*")
        assert re.fullmatch(says, str(raised.value)), raised.value
