"""Functions of the user's own: found by reference, checked before a run, and used like the catalogue's."""

import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from gspo_jax import cli, references
from gspo_jax.data import supervised, tasks
from gspo_jax.errors import UserError
from gspo_jax.setup import data, learning
from gspo_jax.setup.checks import check

EXAMPLES = Path(__file__).parents[2] / "examples"


def config_with(**own: str) -> ConfigDict:
    """The short run of configs/tiny.py, with these functions."""
    config = cli.load_config("configs/tiny.py:runlocal")
    config.functions = ConfigDict(own)
    return config


@pytest.fixture
def written(tmp_path):
    """A function that writes a file and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_is_imported_once_and_may_import_its_neighbours(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    (tmp_path / "mine.py").write_text(
        "import beside\ncalls = []\ndef a(): return beside.VALUE\ndef b(): return calls\n"
    )
    a, b = (references.function(f"{tmp_path}/mine.py:{name}") for name in "ab")
    assert a() == 3 and references.function(f"{tmp_path}/mine.py:a") is a
    assert b() is sys.modules[a.__module__].calls
    assert references.function("gspo_jax.rewards.functions:countdown").__name__ == "countdown"


NEIGHBOURS = {
    "plain.py": "",
    "chain.py": "import plain, chain",
    "room/__init__.py": "",
    "room/table.py": "from . import chair\nfrom .lamps import bulb",
    "room/chair.py": "from . import table",
    "room/lamps/bulb.py": "from .. import chair",
    "room/unused.py": "",
    "unused.py": "",
}
ROOM = ["room/__init__.py", "room/chair.py", "room/lamps/bulb.py", "room/table.py"]


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("", []),
        ("import json, numpy, gspo_jax.rewards.functions", []),
        ("import plain as other", ["plain.py"]),
        ("from plain import *", ["plain.py"]),
        ("import chain", ["chain.py", "plain.py"]),
        ("def later():\n    from room.table import anything", ROOM),
        ("import room.table", ROOM),
        ("from room import table", ROOM),
        ("try:\n    import no_such, room\nexcept ImportError:\n    pass", ["room/__init__.py"]),
        ("from room.lamps import bulb", ROOM),
    ],
)
def test_files_of_a_function_are_what_it_imports_of_the_users_own(tmp_path, monkeypatch, text, imported):
    """Whether it is named by its file or by its module."""
    for name, content in {**NEIGHBOURS, "mine.py": f"{text}\ndef f(): pass\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    modules = {"mine", "plain", "chain", "room", "unused"}
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        monkeypatch.delitem(sys.modules, name)
    references.module.cache_clear()
    references.function.cache_clear()
    for reference in (f"{tmp_path}/mine.py:f", "mine:f"):
        assert references.files(reference) == [tmp_path / name for name in ["mine.py", *imported]]


def test_files_of_a_function_of_a_package_have_the_package(tmp_path, monkeypatch):
    """A function that another module defines has that module's files; functions of installed packages have one file."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("VALUE = 1")
    (tmp_path / "shop" / "front.py").write_text("from shop.back import f")
    (tmp_path / "shop" / "back.py").write_text("def f(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    found = references.files("shop.front:f")
    assert found == [tmp_path / "shop" / name for name in ("front.py", "back.py", "__init__.py")]
    assert [file.name for file in references.files("packaging.version:parse")] == ["version.py"]
    assert references.files("time:sleep") == []


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("", "f", r"mine.py has no function 'f'; it defines none$"),
        ("def g(): pass\nf = 3\n", "f", r"mine.py has no function 'f'; it has g$"),
        ("def f(:\n", "f", r"mine.py cannot be imported, .*mine.py:1 raises SyntaxError: "),
        (
            "import no_such\n",
            "f",
            r"cannot be imported, .*mine.py:1 raises ModuleNotFoundError: No module named 'no_such'$",
        ),
        ("1/0\n", "f", r"cannot be imported, .*mine.py:1 raises ZeroDivisionError: division by zero$"),
        ("import sys\nsys.exit(3)\n", "f", r"cannot be imported, .*mine.py:2 raises SystemExit: 3$"),
        ("def f(): pass\n", "f g", r"mine.py:f g' names no function; use 'path/to/file.py:function' or "),
    ],
)
def test_a_reference_that_leads_nowhere_is_one_sentence(written, text, name, says):
    config = config_with(mine=f"{written(text)}:{name}")
    with pytest.raises(UserError, match=r"functions.mine: .*" + says):
        check(config)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no/such.py:f", "there is no file 'no/such.py'; give the path of a .py file from the current folder"),
        ("no_such.module:f", "there is no module 'no_such'; install it, start where it can be imported, or give"),
        ("gspo_jax.no_such:f", "there is no module 'gspo_jax.no_such'; install it"),
        ("mine", "'mine' names no function; use 'path/to/file.py:function' or 'package.module:function'"),
    ],
)
def test_a_reference_to_nothing_is_one_sentence(reference, says):
    with pytest.raises(UserError, match=f"functions.mine: {says}"):
        check(config_with(mine=reference))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("exact_answer", "reward"),
        ("math_verify", "reward"),
        ("countdown_steps", "step reward"),
        ("calculator", "environment"),
        ("gspo", "objective"),
        ("tis", "mismatch correction"),
        ("gsm8k", "task"),
    ],
)
def test_a_name_of_the_catalogue_is_taken(name, kind):
    with pytest.raises(
        UserError, match=f"functions.{name} has the name of the catalogue's {kind} '{name}'; choose ano"
    ):
        check(config_with(**{name: f"{EXAMPLES}/reward.py:brief"}))


@pytest.mark.parametrize(
    ("section", "kind"), [("rewards", "reward"), ("step_rewards", "step reward"), ("environment", "environment")]
)
def test_a_wrong_signature_is_one_sentence(written, section, kind):
    config = config_with(mine=f"{written('def f(completion): return 1.0')}:f")
    config.objective.name = "gspo_token"
    if section == "environment":
        config.environment.name = "mine"
    else:
        config[section].mine = 1.0
    says = rf"functions.mine: .*mine.py:f is mine\(completion\), but {kind}s are called with \(prompt, completion, rec"
    with pytest.raises(UserError, match=says):
        check(config)


@pytest.mark.parametrize(
    ("text", "section", "says"),
    [
        ("def f(): return 3", "objective", "mine returns 3; return a gspo_jax.objectives.Objective"),
        (
            "def f(*, low): return low",
            "objective",
            "mine needs its hyper-parameter 'low'; give it, or a default to the function",
        ),
        ("def f(): return 3", "mismatch", r"mine returns 3; return a function of \(old_logprobs, sampler_logprobs, m"),
    ],
)
def test_a_factory_that_makes_nothing_of_use_is_one_sentence(written, text, section, says):
    config = config_with(mine=f"{written(text)}:f")
    if section == "objective":
        config.objective.name = "mine"
    else:
        config.mismatch.correction, config.training.old_logprobs = "mine", "recompute"
    with pytest.raises(UserError, match=says):
        check(config)


def test_hyper_parameters_of_an_objective_come_from_its_section():
    config = config_with(soft_gspo=f"{EXAMPLES}/objective.py:soft_gspo")
    config.objective.name = "soft_gspo"
    assert check(config) and learning.make_objective(config).name == "soft_gspo"
    config.objective.soft_gspo = ConfigDict({"tau": 3.0})
    assert check(config) and learning.make_objective(config).level == "sequence"
    config.objective.soft_gspo = ConfigDict({"tau_pos": 3.0})
    config.objective.update({"mine": 3})
    config.functions.mine = f"{EXAMPLES}/objective.py:soft_gspo"
    with pytest.raises(UserError, match=r"objective.mine is 3; it is a section, so use a ConfigDict of its fields"):
        check(config)
    del config.objective["mine"]
    with pytest.raises(UserError, match=r"objective.soft_gspo: .*no hyper-parameter 'tau_pos'; .*tau"):
        check(config)


def test_unknown_names_list_the_users_own_too():
    config = config_with(brief=f"{EXAMPLES}/reward.py:brief")
    config.rewards.breif = 0.1
    with pytest.raises(
        UserError, match=r"no reward 'breif'; did you mean 'brief'\? there are .*exact_answer.*math_verify.*, brief"
    ):
        check(config)


def test_own_rewards_score_in_this_process_and_in_one_of_their_own():
    config = config_with(**{name: f"{EXAMPLES}/reward.py:{name}" for name in ("brief", "balanced")})
    config.rewards.brief = config.rewards.balanced = 1.0
    with data.make_scorer(config) as scorer:
        scores = scorer.score(["", ""], ["(1+2)=3", "((1"], [{"answer": "3"}] * 2)
    assert scores.by_name["balanced"].tolist() == [1.0, 0.0]
    assert scores.by_name["brief"].tolist() == [0.125, 0.625]


def test_rows_of_an_own_task_are_records(written):
    config = cli.load_config("examples/dataset.py")
    check(config)
    train, test = (data.load_records(config, split) for split in ("train", "test"))
    assert len(train) == 103 and set(train[0]) == {"id", "question", "answer", "worked", "factors", "instruction"}
    assert not {record["question"] for record in train} & {record["question"] for record in test}
    config.data.options.smallest = 3
    with pytest.raises(UserError, match=r"task products cannot be called with split 'test' and .*'smallest'"):
        data.load_records(config, "test")
    config = config_with(
        mine=f"{written('def f(split, none=False): return [] if none else [dict(question=split, answer=3)]')}:f"
    )
    config.data.task = "mine"
    with pytest.raises(UserError, match=r"task mine is a function, .*; leave data.folder and data.data_dir empty"):
        data.load_records(config, "train")
    config.data.data_dir = ""
    config.data.options = {"none": True}
    with pytest.raises(UserError, match=r"mine/train, .* has no records; have the function return at least one row"):
        data.load_records(config, "train")
    config.data.options = {}
    with pytest.raises(UserError, match=r"task mine, train row 0 is .*; return dicts with a question and an answer"):
        data.load_records(config, "train")


def say(role, content="", **more):
    return {"role": role, "content": content, **more}


OPEN = {"function": {"name": "open", "arguments": '{"door": 4}'}}
EPISODE = [say("assistant", tool_calls=[OPEN]), say("tool", "key 83"), say("assistant", "#### 83")]


def rows_of(made, split):
    """Return the rows of an own task that returns one row, `made` beside a question and an answer."""
    row = {"question": "Door 4?", "answer": "83"} | made
    return tasks.load("mine", split=split, own={"mine": lambda split: [row]})


def test_rows_of_an_own_task_may_be_conversations_and_episodes():
    (record,) = rows_of({"messages": [say("system", ""), say("user", "Door 4?")], "turns": EPISODE}, "train")
    assert record["messages"] == [say("user", "Door 4?")] and record["question"] == "Door 4?"
    (whole,) = supervised.conversations([record])
    assert [turn["role"] for turn in whole["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert whole["messages"][1]["tool_calls"][0]["function"] == {"name": "open", "arguments": {"door": 4}}
    (plain,) = supervised.conversations(rows_of({"turns": EPISODE}, "train"))
    assert plain["messages"] == whole["messages"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "Door 4?"}, "messages are not a list"),
        ({"messages": [{"content": "?"}]}, "message without role"),
        ({"messages": [say("user", "?"), say("assistant", "!")]}, "messages end with the assistant's turn"),
        ({"turns": "83"}, "turns are not a list"),
        ({"turns": []}, "turns do not end with the assistant's"),
        ({"turns": EPISODE[:2]}, "turns do not end with the assistant's"),
        ({"turns": EPISODE[1:]}, "tool's reply without a call before it"),
    ],
)
def test_conversations_that_are_none_are_refused_by_their_row(row, says):
    with pytest.raises(UserError, match=f"^task mine, test row 0: {says}; write messages with role and content"):
        rows_of(row, "test")


def test_flags_add_names_to_a_config():
    words = ["--config=tiny", "--config.functions.brief=examples/reward.py:brief", "--config.rewards.exact_answer=0.5"]
    config = cli.read_config([*words, "--config.rewards.brief=0.1", "--config.seed=3"])
    assert config.rewards.brief == 0.1 and config.functions.brief == "examples/reward.py:brief"
    assert config.rewards.exact_answer == 0.5 and config.seed == 3
    assert cli.read_config([*words, "--config.rewards.brief", "1"]).rewards.brief == 1.0
    with pytest.raises(UserError, match=r"rewards.brief is 'much'; use a number"):
        cli.read_config([*words, "--config.rewards.brief=much"])


def test_a_command_keeps_the_flags_that_add_names():
    """They reach the config, and the command that a run tells its user to repeat is whole."""
    shows = "lambda config: print(config.rewards.brief, *sys.argv[1:])"
    script = f"import sys; from gspo_jax import cli; cli.run({shows}, 'doctor')"
    flags = ["--config=configs/tiny.py:runlocal", "--config.functions.brief=examples/reward.py:brief"]
    flags += ["--config.rewards.brief=0.1", "--config.seed=3"]
    said = subprocess.run([sys.executable, "-c", script, *flags], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said.split() == ["0.1", *flags]


@pytest.mark.parametrize(
    ("head", "section", "says"),
    [
        ("@own_process\nasync def mine", "rewards", "coroutine function, and functions marked own_process are none"),
        ("async def mine", "step_rewards", "coroutine function, and step rewards are none; write def, not async def"),
        ("@batched\n@own_process\ndef mine", "rewards", "marked own_process and batched; use one of the two"),
    ],
)
def test_nobody_would_await_it(written, head, section, says):
    names = "prompts, completions, records" if "batched" in head else "prompt, completion, record"
    file = written(f"from gspo_jax.rewards import batched, own_process\n\n{head}({names}): return 1.0\n")
    config = config_with(mine=f"{file}:mine")
    config.objective.name = "gspo_token"
    config[section].mine = 1.0
    with pytest.raises(UserError, match=f"functions.mine is {'a ' if 'coroutine' in says else ''}{says}"):
        check(config)


def test_an_environment_of_the_catalogue_may_be_a_class():
    check(cli.load_config("configs/tiny.py:tool,single"), count_devices=lambda: 1)
