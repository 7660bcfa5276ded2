"""Records that no program can be judged by: each is told by its field, at the start of a run and by `score`."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from gspo_jax import cli, exits, score
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.measuring.published import Benchmark
from gspo_jax.rewards import scorer
from gspo_jax.rewards.code_records import defect
from gspo_jax.setup import data

ROOT = Path(__file__).parents[2]
CHECK = "def check(input, expected, output):\n    return True"
OF_FUNCTIONS = [
    ({}, "test_list and test are missing"),
    ({"test_list": None}, "test_list is missing"),
    ({"test_list": []}, "test_list is empty"),
    ({"test_list": ["", " \n"]}, "test_list has no tests"),
    ({"test_list": "assert f(1) == 1"}, "test_list is of type str instead of a list of texts"),
    ({"test_list": True}, "test_list is of type bool instead of a list of texts"),
    ({"test_list": [["assert f(1) == 1"]]}, "test_list holds values of type list instead of texts"),
    ({"test_list": [None]}, "test_list holds values of type null instead of texts"),
    ({"test_setup_code": ["import math"]}, "test_setup_code is of type list instead of a text"),
    ({"test_setup_code": 0}, "test_setup_code is of type int instead of a text"),
    ({"prelude": False}, "prelude is of type bool instead of a text"),
    ({"test": "def check(c):\n    assert c(1)"}, "entry_point is missing"),
    ({"test": "def check(c):\n    assert c(1)", "entry_point": 5}, "entry_point is of type int instead of a text"),
    ({"test": "def check(c):\n    assert c(1)", "entry_point": "def f"}, "entry_point does not name a function"),
    ({"test": " ", "entry_point": "f"}, "test is empty"),
    ({"test": ["def check(c): assert c(1)"], "entry_point": "f"}, "test is of type list instead of a text"),
    ({"test_setup_code": "import numpy as np"}, "test_setup_code imports numpy from outside the standard library"),
    ({"test_setup_code": "from .x import y"}, "test_setup_code imports .x from outside the standard library"),
    ({"test_list": ["import a.b\nassert f(1)"]}, "test_list imports a from outside the standard library"),
]
OF_WHOLE_PROGRAMS = [
    ({"inputs": None}, "inputs is missing"),
    ({"inputs": [], "outputs": []}, "inputs is empty"),
    ({"inputs": [3]}, "inputs holds values of type int instead of texts"),
    ({"outputs": [True]}, "outputs holds values of type bool instead of texts"),
    ({"outputs": ["1", "2"]}, "inputs and outputs are not of the same length"),
    ({"inputs": "3\n"}, "inputs is of type str instead of a list of texts"),
    ({"inputs": 3}, "inputs is of type int instead of a list of texts"),
    ({"compare": "numbr"}, "compare is numbr instead of one of exact token number livecodebench"),
    ({"compare": 0}, "compare is 0 instead of one of exact token number livecodebench"),
    ({"compare": ["number"]}, "compare is ['number'] instead of one of exact token number livecodebench"),
    ({"checker": [CHECK]}, "checker is of type list instead of a text"),
    ({"checker": "def check(a, b, c) return 1"}, "checker does not compile"),
    ({"checker": "def chek(a, b, c):\n    return check"}, "checker does not define check"),
    ({"checker": f"import numpy\n{CHECK}"}, "checker imports numpy from outside the standard library"),
]


@pytest.mark.parametrize(("fields", "says"), OF_FUNCTIONS, ids=lambda value: str(value)[:40])
def test_what_is_wrong_with_tests_is_told(fields, says):
    record = {"test_list": ["assert f(1) == 1"], **fields} if fields else {}
    assert defect("code_tests_share", "", record) == says


@pytest.mark.parametrize(("fields", "says"), OF_WHOLE_PROGRAMS, ids=lambda value: str(value)[:40])
def test_what_is_wrong_with_inputs_and_outputs_is_told(fields, says):
    assert defect("code_stdin", "", {"inputs": ["3"], "outputs": ["3"]} | fields) == says


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("code_tests", {"test_list": ("assert f(1)",), "test": None, "test_setup_code": None, "prelude": ""}),
        ("code_tests", {"test_list": ["assert f(("]}),  # told by the sandbox
        ("code_tests", {"test_list": ["try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert f(1)"]}),
        ("code_tests", {"test_list": ["from __future__ import annotations\nimport os.path, __main__\nassert f(1)"]}),
        ("code_tests", {"test": "def check(c):\n    assert c(1)", "entry_point": "Solution().solve"}),
        ("code_stdin", {"inputs": [""], "outputs": [""], "compare": None, "checker": ""}),
        ("code_stdin_share", {"inputs": ["1"], "outputs": ["1"], "compare": "", "checker": CHECK}),
        ("code_stdin", {"inputs": ["1"], "outputs": ["1"], "checker": "check = lambda i, e, o: o == '\\d'"}),
    ],
)
def test_other_records_are_right(name, record):
    assert defect(name, "", record) == ""


@pytest.mark.parametrize(
    ("question", "lacks"),
    [
        ('import numpy as np\ndef f(x):\n    """Doc."""\n', "numpy"),
        ("import os, pandas\n\ndef f(x):\n", "pandas"),
        ("Go on:\n```python\nfrom sortedcontainers import SortedList\ndef f(x):\n    pass\n```\n", "sortedcontainers"),
        ("from typing import List\ndef f(x):\n    'Doc.'\n", ""),
        ("I import numpy.\nimport duties rise: write f.\n", ""),
        ("Not as in\n```python\nimport numpy\n```\nbut by hand, write f.", ""),
    ],
)
@pytest.mark.parametrize("tests", [{"test_list": ["assert f(1) == 1"]}, {"test": "assert f(1)", "entry_point": "f"}])
def test_code_of_a_prompt_that_needs_a_package_is_told(question, lacks, tests):
    says = f"prompt imports {lacks} from outside the standard library" if lacks else ""
    assert defect("code_tests", question, tests | {"question": question}) == says
    assert defect("code_tests", question, tests) == says  # as `score` has it


def config_of(path, records):
    """Return a config that trains on these records, with a reward for programs."""
    rows = [{"question": f"Write {n}.", "answer": "", **record} for n, record in enumerate(records)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = cli.load_config(str(ROOT / "configs" / "tiny.py"))
    config.data.task, config.data.train, config.data.held_out, config.data.answer = "jsonl", str(path), 0.5, ""
    config.rewards = ConfigDict({"code_stdin": 1.0, "code_tests": 0.0})
    return config


def test_a_run_leaves_them_out_and_says_so(tmp_path, monkeypatch, caplog):
    fine = {"inputs": ["3"], "outputs": ["3"]}
    config = config_of(tmp_path / "rows.jsonl", [fine] * 40 + [fine | {"inputs": [3]}] * 40)
    tokenizer = Tokenizer.train(["Write 0123456789."], 300)
    with caplog.at_level(logging.WARNING):
        batches = [
            data.training_prompts(config, tokenizer, data.load_records(config, "train")),
            data.held_out_prompts(config, tokenizer, data.load_records(config, "test")),
        ]
    assert sum(found.usable for found in batches) == 40
    assert [set(found.skipped_by) for found in batches] == [{"inputs holds values of type int instead of texts"}] * 2
    assert sum("left out: " in message and "inputs holds values" in message for message in caplog.messages) == 2
    config = config_of(tmp_path / "rows.jsonl", [fine | {"compare": "numbr"}] * 40)
    with pytest.raises(UserError, match=r"is usable \(\d+ compare is numbr instead of one of exact .*\); correct them"):
        data.training_prompts(config, tokenizer, data.load_records(config, "train"))


def test_problems_of_livecodebench_are_kept_whichever_reward_reads_them(tmp_path):
    config = config_of(tmp_path / "rows.jsonl", [])
    config.eval.correct = "code_stdin"
    problem = {"question": "Write 1.", "answer": "", "instruction": ""}
    records = [problem | {"inputs": ["1"], "outputs": ["1"]}, problem | {"test_list": ["assert f(1) == 1"]}]
    assert Benchmark("livecodebench", config, records, 1).prompts(Tokenizer.train(["Write 1."], 300)).usable == 2


def test_scores_say_which_field(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer, "Sandbox", lambda **_: SimpleNamespace(close=lambda: None))  # none is asked
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"completion": "print(1)", "inputs": [3], "outputs": ["1"]}))
    assert score.main(["--reward=code_stdin", f"--in={source}", f"--out={target}"]) == exits.UNSCORED
    written = json.loads(target.read_text())
    assert written["scores"] == {"code_stdin": None}
    assert written["errors"] == {"code_stdin": "inputs holds values of type int instead of texts"}
