"""Whatever a benchmark's answers or a cold start depend on changes its digest: every field of the config is tried."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax import coldstart
from gspo_jax.config import base, source
from gspo_jax.config import benchmark as section_of_benchmark
from gspo_jax.data import contents, pipeline
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.measuring import published
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.setup import inputs, relevance
from gspo_jax.setup.fields import at, names
from gspo_jax.types import Weights

PROBLEMS = [{"id": str(i), "question": f"{i}+1=", "answer": str(i + 1), "instruction": ""} for i in range(3)]


def whole() -> ConfigDict:
    """The default config, with a field in each of the sections that begin empty."""
    config = base()
    config.rewards.exact_answer = 1.0
    config.step_rewards.countdown_steps = 1.0
    config.model.architecture.num_layers = 2
    config.data.options.seed = 0
    config.data.sources.own = source("rows.jsonl")
    config.benchmarks.own = section_of_benchmark("rows.jsonl")
    config.functions.judge = "math:sqrt"
    return config


WHOLE = whole()
FIELDS = tuple(names(WHOLE))


def other(value: Any, kind: type) -> Any:
    """Another value of a field's kind; of a placeholder, the first there is."""
    if kind is bool:
        return not value
    if kind is str:
        return f"{value or ''}x"
    if kind is tuple:
        return (*value, "x")
    assert kind in (int, float), kind
    return kind(1) if value is None or math.isinf(value) else value + kind(1)


@contextlib.contextmanager
def perturbed(name: str) -> Iterator[ConfigDict]:
    """The whole config with another value of a field."""
    place, _, key = name.rpartition(".")
    section = at(WHOLE, place) if place else WHOLE
    before, kind = section[key], section.get_type(key)
    section[key] = "math:floor" if place == "functions" else other(before, kind)
    yield WHOLE
    section[key] = before


def unchanged(digest: Callable[[ConfigDict], str]) -> set[str]:
    """The fields whose change changes no digest."""
    found, before = set(), digest(WHOLE)
    for name in FIELDS:
        with perturbed(name) as config:
            found |= {name} if digest(config) == before else set()
    return found


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train([problem["question"] for problem in PROBLEMS], 300)


@functools.cache
def answering(scale: float = 1.0, **files: str) -> published.Answering:
    """A policy of two weights."""
    mesh = mesh_lib.make_mesh({"data": 1}, devices=jax.devices()[:1])
    weights: Any = Weights.full(nnx.State({"a": jnp.ones(2) * scale}))
    nobody: Any = None
    return published.Answering(nobody, tokenizer(), weights, "update 1", files, mesh)


def eval_batches(problems: list[dict[str, Any]] = PROBLEMS) -> pipeline.EvalBatches:
    return pipeline.eval_batches(problems, tokenizer(), prompts_per_batch=2, max_prompt_length=8)


def protocol(by: published.Answering, batches: pipeline.EvalBatches) -> dict[str, Any]:
    return published.Benchmark("rows.jsonl", WHOLE, PROBLEMS, 4)._protocol(by, batches)


def is_listed(name: str, unused: dict[str, str]) -> bool:
    return name.startswith(tuple(unused))


def test_every_field_counts_for_answers_unless_it_is_listed_with_a_reason():
    """The change of a listed field changes nothing, so that answers that are there are not sampled again in vain."""
    assert len(FIELDS) > 150
    same = unchanged(lambda config: contents.digest(relevance.of_answers(config)))
    assert same == {name for name in FIELDS if is_listed(name, relevance.NOT_OF_ANSWERS)}
    assert not same & set(OF_ANSWERS) and set(FIELDS) > set(OF_ANSWERS)
    assert protocol(answering(), eval_batches())["settings"] == relevance.of_answers(WHOLE)


OF_ANSWERS = (
    *("seed", "model.dtype", "adapter.alpha", "functions.judge", "rewards.exact_answer"),
    *("data.prompts_per_batch", "data.system", "data.instruction", "data.few_shot", "data.enable_thinking"),
    *(f"sampling.{name}" for name in ("prefix", "stop_ids", "cache_dtype", "weights_dtype", "temperature", "top_p")),
    *(f"sampling.{name}" for name in ("top_k", "min_p", "max_response_length", "group_size", "slots", "mesh.data")),
    *("environment.name", "environment.turns", "scoring.timeout_s", "scoring.unsafe", "eval.correct", "mesh.tensor"),
)
"""Fields that no list may have."""


def test_problems_answers_weights_and_files_count_by_content():
    def digest(by: published.Answering, batches: pipeline.EvalBatches) -> str:
        return contents.digest(protocol(by, batches))

    last, by = PROBLEMS[-1], answering()
    before, found = digest(by, eval_batches()), []
    for changed in ({"answer": "7"}, {"question": "5+5="}, {"hint": "none"}):
        found.append(digest(by, eval_batches([*PROBLEMS[:-1], last | changed])))
    found += [digest(by, eval_batches(PROBLEMS[:-1])), digest(by, eval_batches(PROBLEMS[::-1]))]
    found += [digest(answering(2.0), eval_batches()), digest(answering(judge="0"), eval_batches())]
    assert len({before, *found}) == 8 and digest(by, eval_batches()) == before


def test_a_cold_start_depends_on_every_field_that_is_not_listed_with_a_reason():
    same = unchanged(coldstart.digest)
    listed = {name for name in FIELDS if is_listed(name, relevance.NOT_OF_COLD_START)}
    assert same == listed - set(relevance.OF_COLD_START)
    assert not same & {"data.test", "data.held_out", "coldstart.conversations", "data.sources.own.test"}


@pytest.mark.parametrize("table", ["NOT_OF_ANSWERS", "NOT_OF_COLD_START"])
def test_what_is_listed_exists_and_has_a_reason(table):
    for prefix, reason in getattr(relevance, table).items():
        assert reason and any(name.startswith(prefix) for name in FIELDS), prefix


def test_files_that_fields_name_count_by_content(tmp_path):
    """Of a folder, every file that is not hidden; of functions, the file of the module."""
    rows, folder, code = tmp_path / "rows.jsonl", tmp_path / "folder", tmp_path / "judge.py"
    folder.mkdir()
    rows.write_text("1")
    (folder / "train.jsonl").write_text("1")
    code.write_text("def judge(prompt, completion, record):\n    return 1.0\n")
    config = base()
    config.functions.judge = f"{code}:judge"
    for name in ("data.train", "data.test", "data.few_shot", "coldstart.conversations"):
        section, _, key = name.partition(".")
        config[section][key] = str(rows)
    config.data.folder, config.data.sources.own = str(folder), source(str(rows), test=str(folder))

    def read():
        return inputs.of_rows(config) | inputs.of_functions(config)

    before, cold = read(), coldstart.digest(config)
    (folder / ".hidden").write_text("2")
    assert read() == before and len(before) == 8
    rows.write_text("2")
    after, now = read(), coldstart.digest(config)
    assert {name for name in before if before[name] != after[name]} == {
        *("data.train", "data.test", "data.few_shot", "coldstart.conversations", "data.sources.own.train")
    }
    (folder / "test.jsonl").write_text("1")
    assert contents.changes(after, read()) == ["data.folder", "data.sources.own.test"]
    assert len({cold, now, coldstart.digest(config)}) == 3
    code.write_text("def judge(prompt, completion, record):\n    return 0.0\n")
    assert "functions.judge (judge.py)" in contents.changes(after, read())


def test_a_function_counts_with_the_file_that_defines_it(tmp_path, monkeypatch):
    (tmp_path / "within.py").write_text("def judge(): pass")
    (tmp_path / "outer.py").write_text("from within import judge")
    monkeypatch.syspath_prepend(tmp_path)
    config = base()
    config.functions.update({"judge": "outer:judge"})
    found = inputs.of_functions(config)
    assert {"functions.judge (outer.py)", "functions.judge (within.py)"} <= found.keys()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"b": 1, "a": [1, None]}, {"a": [1, None], "b": 1}, True),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"a": "1"}, False),
        (("x",), ["x"], True),
        ({"x", "y", "z"}, {"z", "y", "x"}, True),
        (b"\xff", b"\xfe", False),
        (jnp.arange(2).__array__(), [0, 1], True),
        ({1: 2, "a": 3}, {1: 2, "a": 4}, False),
        (object(), object(), True),  # their addresses say nothing
        (math.nan, math.nan, True),
        ("\udcff", "?", False),
    ],
)
def test_values_have_the_same_digest_in_every_process(one, other, same):
    assert (contents.digest(one) == contents.digest(other)) == same
