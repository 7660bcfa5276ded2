"""Collapse, survival and paired differences by hand, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gspo_jax import estimates, survival
from gspo_jax.folder.metrics import MetricsWriter
from gspo_jax.folder.notes import write_config
from gspo_jax.studies.paired import difference, written
from gspo_jax.studies.runs import collapse
from gspo_jax.studies.survival import Course, surviving


def run(folder: Path, rewards: list[float], *, seed: int, objective: str = "grpo") -> Path:
    """Write a run of one update per iteration."""
    write_config(folder, {"seed": seed, "objective": {"name": objective}}, command="train")
    with MetricsWriter(folder) as writer:
        for step, reward in enumerate(rewards, start=1):
            writer.write(step, {"iteration": step, "minibatch": 0, "reward/mean": reward})
    return folder


def course(seed: int, collapsed: int | None, *, iterations: int = 10, final: float = 0.0) -> Course:
    return Course(seed, iterations, collapsed, final, 0.0)


@pytest.mark.parametrize(
    ("rewards", "at"),
    [
        ([1.0] * 10, None),
        ([1.0] * 5 + [0.0] * 5, 8),  # means 1, .8, .6, .4: the third 0 takes it below half
        ([1.0] * 5 + [0.0] * 3 + [1.0] * 9, 8),  # though it recovers
        ([1.0] * 5 + [0.5] * 20, None),  # half is not less than half
        ([0.5] * 5 + [1.0] * 5 + [0.4] * 5, 15),  # of the highest so far, not of the first
        ([1.0, 0.0, 0.0, 0.0], 3),  # means 1, 1/2, 1/3
        ([0.2, 0.0], None),
    ],
)
def test_collapse_is_half_of_the_highest_mean_of_five(rewards, at):
    assert collapse(np.array(rewards)) == at


def test_survival_counts_runs_that_end_early_as_long_as_they_were_seen():
    courses = [course(0, 4), course(1, None, iterations=6), course(2, 8), course(3, None)]
    # Of four, one is lost at 4; of the three left one ends at 6, so that at 8 one of two is lost.
    assert surviving(courses, 10).tolist() == pytest.approx([1.0] * 4 + [0.75] * 4 + [0.375] * 3)
    assert surviving([course(0, None)], 3).tolist() == [1.0] * 4


def test_differences_are_between_runs_of_one_seed():
    base, arm = {0: 0.5, 1: 0.1, 2: 0.3, None: 1.0}, {2: 0.5, 0: 0.6, 7: 9.0, None: 5.0}
    found = difference(arm, base)
    assert found is not None and found.seeds == 2 and found.mean == pytest.approx(0.15)
    assert found.each == pytest.approx((0.2, 0.1))
    # 0.2 and 0.1: deviation 0.0707, over √2, times t of one degree, 12.706.
    assert found.high - found.mean == pytest.approx(0.05 * 12.706, rel=1e-3) and not found.is_clear
    assert difference(arm, {3: 0.0}) is None
    equal = difference({0: 0.6, 1: 0.2}, base)
    assert equal is not None and equal.is_flat and not equal.is_clear
    clear = difference({0: 0.6, 1: 0.2, 2: 0.41}, base)
    assert clear is not None and clear.is_clear
    alone = difference({0: 0.6}, base)
    assert alone is not None and not alone.is_clear and written(alone) == "+0.100, one seed"


def test_the_interval_of_few_values_is_scipys():
    values = np.random.default_rng(0).normal(size=5)
    want = stats.ttest_1samp(values, 0.0).confidence_interval(estimates.COVERAGE)
    assert estimates.student_interval(values) == pytest.approx((want.low, want.high))
    assert estimates.student_interval(values[:1]) == (values[0], values[0])


def test_the_command(tmp_path, capsys):
    folders = [run(tmp_path / f"grpo-{seed}", [1.0] * 5 + [0.0] * 5, seed=seed) for seed in (0, 1)]
    better = [1.0] * 9 + [0.9]
    folders += [run(tmp_path / f"gspo-{seed}", better, seed=seed, objective="gspo") for seed in (0, 1)]
    words = [str(folder) for folder in folders]
    assert survival.main([*words, f"--baseline={folders[1]}", f"--out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert said == (tmp_path / "out" / "survival.md").read_text()
    assert "| grpo | 2 | 2 | 8, 8 | 0.000 [0.000, 0.000] | baseline |" in said
    assert "| gspo | 2 | 0 | – | 0.900 [0.900, 0.900] | +0.900 [+0.900, +0.900] |" in said  # not bold: no spread
    facts = {one["label"]: one for one in json.loads((tmp_path / "out" / "survival.json").read_text())}
    assert facts["grpo"]["collapsed"] == 2 and facts["gspo"]["differences"]["mean"]["mean"] == pytest.approx(0.49)
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in survival.LAYOUTS)
    assert survival.main([*words, f"--baseline={tmp_path}"]) == 2
    assert "is none of the runs" in capsys.readouterr().err
