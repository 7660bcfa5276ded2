"""The study's configs: that the testbed is a run, and that the sweep has the runs of the protocol."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from gspo_jax import cli
from gspo_jax.errors import UserError
from gspo_jax.models import transformer
from gspo_jax.setup.checks import check
from gspo_jax.sweeping.grid import comparisons, make_plan

ROOT = Path(__file__).parents[1]
PROTOCOL = " ".join((ROOT / "docs" / "evidence" / "protocol.md").read_text(encoding="utf-8").split())
EVIDENCE = str(ROOT / "configs" / "evidence.py")


def test_the_testbed_is_a_run_that_train_accepts():
    for arg in ("", ":arithmetic"):
        config = cli.load_config(str(ROOT / "configs/drift.py") + arg)
        check(config)
        longest = config.data.max_prompt_length + config.sampling.group_size * config.sampling.max_response_length
        assert config.training.row_tokens >= longest, "a group fits in a row"
    with pytest.raises(UserError, match="takes no argument 'adder'; use arithmetic, or none"):
        cli.load_config(str(ROOT / "configs/drift.py:adder"))
    (comparison,) = comparisons([f"--config={ROOT / 'configs/drift.py'}"], [], None)
    assert len(comparison.runs) == 9 and comparison.seeds == 1


def test_the_routers_arms_are_of_equal_size_and_differ_in_router_or_layers_alone():
    arms = runpy.run_path(str(ROOT / "configs/routers.py"))["ARMS"]
    sizes, of_testbed = {}, cli.load_config(str(ROOT / "configs/drift.py")).model.architecture.to_dict()
    for arm in ("renormalised", "bias", "shared", "linear_0", "linear_3"):
        config, changed = cli.load_config(f"configs/routers.py:{arm}"), arms[arm]
        model = check(config)
        assert config.model.architecture.to_dict() == of_testbed | changed
        _, shapes = transformer.abstract(model, dtype=jnp.dtype("float32"), dispatch="gather")
        whole = sum(x.size for x in jax.tree.leaves(shapes))
        expert = 3 * model.hidden_size * model.moe_intermediate_size
        sizes[arm] = whole, whole - model.routed_layers * (model.num_experts - model.experts_per_token) * expert
        assert model.routed_layers == 24
    whole, active = sizes["renormalised"]
    assert all(0.999 < own[0] / whole < 1.025 and 0.995 < own[1] / active < 1.12 for own in sizes.values())
    assert sizes["shared"] == pytest.approx(sizes["bias"], rel=2e-3), "an expert is shared, not added"
    with pytest.raises(UserError, match="no arm 'sigmoids'; did you mean 'sigmoid'"):
        cli.load_config("configs/routers.py:sigmoids")


def test_rewards_are_drawn_evenly_and_for_each_response_always_alike():
    drawn = runpy.run_path(str(ROOT / "configs/routers.py"))["drawn"]
    found = [drawn("471: a+", f"a+ {n}", {}) for n in range(1000)]
    assert 0 <= min(found) < 0.01 and 0.99 < max(found) < 1 and 0.45 < sum(found) / 1000 < 0.55
    assert len(set(found)) == 1000 and drawn("471: b+", "a+ 0", {}) != found[0]
    assert found == [drawn("471: a+", f"a+ {n}", {"answer": "1"}) for n in range(1000)]


def runs(step: str):
    (comparison,) = comparisons([f"--config={EVIDENCE}:{step}"], [], None)
    return [dict(run) | {"seed": run.get("seed", seed)} for run in comparison.runs for seed in range(comparison.seeds)]


@pytest.mark.parametrize(
    ("step", "count"),
    [
        ("screen", 24),
        ("second_screen", 24),
        ("bounds", 2),
        ("tune", 24),
        ("confirm", 60),
        ("tuned", 60),
        ("shallow", 60),
    ],
)
def test_the_sweep_has_the_runs_of_the_protocol(step, count):
    found = runs(step)
    assert len({str(sorted(run.items())) for run in found}) == count
    _, registered, text = PROTOCOL.partition(f"evidence.py:{step}`")
    assert registered, "the protocol has the step"
    said = [int(re.findall(rf"(\d+) {what}", text)[0]) for what in ("runs", "iterations")]
    assert said == [count, cli.load_config(f"{EVIDENCE}:{step}").iterations]
    seeds = {run["seed"] for run in found}
    assert seeds == ({0} if step == "tune" else {0, 1} if count < 60 else set(range(10, 15)))
    for run in found:
        assert run["mismatch.correction"] == ("tis" if run["objective.name"] == "minirl" else "")


def test_the_tuned_rate_is_the_best_of_the_tuning_for_every_objective():
    cells = [line.split("|") for line in (ROOT / "docs/evidence/tune.md").read_text(encoding="utf-8").splitlines()[2:]]
    reached = {}  # objective -> (reward over the run, learning rate) of each of its runs
    for cell in cells:
        name, rate = cell[1].strip().split(",")[0], cell[1].split("learning_rate=")[1]
        reached.setdefault(name, []).append((float(cell[7].split()[0]), float(rate)))
    rates = {run["objective.name"]: run["optimizer.learning_rate"] for run in runs("tuned")}
    assert {name: max(found)[1] for name, found in reached.items()} == rates and len(rates) == 8


@pytest.mark.parametrize("step", ["confirm", "tuned", "shallow"])
def test_arms_of_a_confirmation_are_those_of_the_protocol(step):
    arms = {(run["objective.name"], run["routing.replay"]) for run in runs(step)}
    (listed,) = re.findall(r"evidence\.py:confirm`: (.*?); \d+ iterations", PROTOCOL)
    named = {
        (re.findall(r"`(\w+)`", word)[0], "r2" if "R2" in word else "r3" if "R3" in word else "none")
        for word in listed.split(", ")
    }
    assert arms == named and len(arms) == 12


def test_other_words_are_refused():
    with pytest.raises(
        UserError, match=r"no step 'scren'; use screen, second_screen, bounds, tune, confirm, tuned, shallow"
    ):
        cli.load_config(f"{EVIDENCE}:scren")


STUDIES = str(ROOT / "configs" / "studies.py")
PAGES = {"grid": "repairs", "mismatch_screen": "mismatch", "mismatch_bfloat16": "mismatch"}
"""Pages of steps that are registered with another."""


@pytest.mark.parametrize(
    ("step", "seeds", "arms"),
    [
        ("repairs", range(15, 20), 7),
        ("grid", range(1), 24),
        ("clipping", range(20, 30), 7),
        ("mismatch_screen", range(2, 4), 12),
        ("mismatch", range(30, 40), 13),
        ("mismatch_bfloat16", range(40, 45), 4),
    ],
)
def test_a_registered_study_has_the_runs_of_its_page(step, seeds, arms):
    (comparison,) = comparisons([f"--config={STUDIES}:{step}"], [], None)
    found = [dict(run) for run in comparison.runs]
    page = " ".join((ROOT / f"docs/evidence/{PAGES.get(step, step)}.md").read_text(encoding="utf-8").split())
    _, registered, text = page.partition(f"studies.py:{step}`")
    assert registered and "before any of its runs" in page
    said = [int(re.findall(rf"(\d+) {what}", text)[0]) for what in ("runs", "iterations")]
    assert said == [len(found), cli.load_config(f"{STUDIES}:{step}").iterations]
    assert {run.pop("seed") for run in found} == set(seeds)
    assert len({str(sorted(run.items())) for run in found}) == arms
    order = [run["seed"] for run in comparison.runs]
    assert order == sorted(order), "cut short, a study has every arm on fewer seeds"


def test_the_runs_of_registered_studies_are_ones_that_train_accepts(tmp_path):
    for step in ("repairs", "grid", "clipping", "mismatch_screen", "mismatch"):
        words = [f"--config={STUDIES}:{step}", f"--config.model.folder={ROOT}/tests/golden/adder"]
        (comparison,) = comparisons(words, [], None)
        first = [run for run in comparison.runs if run["seed"] == comparison.runs[0]["seed"]]
        (page,) = make_plan(words, [replace(comparison, runs=first)], tmp_path)
        assert len({run.name for run in page.runs}) == len(page.runs)
    for arg, rounded in (("", ""), (":rounding", "int8")):
        config = cli.load_config(str(ROOT / "configs/length.py") + arg)
        check(config)
        assert config.sampling.weights_dtype == rounded and config.sampling.max_response_length > 1024
