"""Collapse, survival and paired differences by hand, and the command."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gspo_jax import estimates, survival
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import MetricsWriter
from gspo_jax.folder.notes import write_config
from gspo_jax.studies import records
from gspo_jax.studies.paired import difference, written
from gspo_jax.studies.runs import collapse, load_run
from gspo_jax.studies.survival import Course, by_luck, kept, rule, surviving


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


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([0.1, 0.2, 0.9, 0.9], 1.0),  # a rise counts 1, however steep
        ([0.1] * 5 + [0.2] * 5 + [0.4] * 9, 1.0),
        ([1.0] * 5 + [0.0] * 5, (5 + 0.8 + 0.6 + 0.4 + 0.2) / 10),
        ([0.5] * 5 + [0.0] * 5, (5 + 0.8 + 0.6 + 0.4 + 0.2) / 10),  # whatever the height
        ([0.0, 0.0], 0.0),
    ],
)
def test_the_reward_kept_is_of_the_best_so_far(rewards, share):
    assert kept(np.array(rewards)) == pytest.approx(share)


def test_the_rule_holds_its_level_where_the_old_one_did_not():
    p = np.linspace(0, 1, 101)
    lost = [np.array([stats.binom(5, x).pmf(k) for x in p]) for k in range(6)]
    fewer = lost[0] + lost[1]
    want = ((lost[4] + lost[5]) * (1 - (1 - fewer) ** 11)).max()
    assert by_luck(5, 11, least=4, most=1) == pytest.approx(want, abs=2e-3) == pytest.approx(0.21, abs=0.005)
    assert rule(5, 11) == 0 and by_luck(5, 11, least=5, most=0) < 0.01
    assert rule(3, 5) is None and rule(10, 6) == 2 and rule(10, 1) == 3
    for seeds, arms in ((5, 1), (5, 11), (10, 6), (10, 11)):
        k = rule(seeds, arms)
        assert k is not None
        assert (
            by_luck(seeds, arms, least=seeds - k, most=k)
            <= 0.05
            < by_luck(seeds, arms, least=seeds - k - 1, most=k + 1)
        )


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


@pytest.mark.parametrize("count", [5, 10])
def test_the_exact_test_is_scipys_over_all_signs(count):
    values = np.random.default_rng(count).normal(0.4, size=count)
    want = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=False
    ).pvalue
    assert estimates.sign_flip_p(values) == pytest.approx(want)
    assert estimates.sign_flip_p(np.abs(values)) == pytest.approx(2.0 ** (1 - count)), "the least there is"
    ranks = stats.rankdata(np.abs(values)) * np.sign(values)
    assert estimates.sign_flip_p(ranks) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)
    assert estimates.student_p(values) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert np.isnan(estimates.student_p(np.full(5, 0.3)))


def test_holms_method_by_hand_and_against_closed_testing():
    nan = float("nan")
    assert estimates.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3·0.01, 2·0.03, then no less
    assert estimates.holm([0.9, nan, 0.5]) == pytest.approx([1.0, nan, 1.0], nan_ok=True)
    p = np.random.default_rng(0).uniform(size=5) ** 3
    closed = [
        max(
            min(1.0, len(own) * min(p[list(own)]))
            for size in range(1, 6)
            for own in itertools.combinations(range(5), size)
            if number in own
        )
        for number in range(5)
    ]
    assert estimates.holm(p.tolist()) == pytest.approx(closed), "Holm closes Bonferroni's test of every intersection"


def test_the_interval_of_a_count_is_clopper_and_pearsons():
    for count, total in ((4, 5), (0, 5), (5, 5), (3, 10)):
        want = stats.binomtest(count, total).proportion_ci(method="exact")
        assert estimates.proportion_interval(count, total) == pytest.approx((want.low, want.high))
    assert estimates.proportion_interval(4, 5) == pytest.approx((0.28, 0.99), abs=0.006)


def test_equivalent_is_an_interval_inside_the_margin():
    found = difference({0: 0.01, 1: -0.01, 2: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert found is not None and found.high == pytest.approx(0.01 * 4.303 / 3**0.5, rel=1e-3)
    assert found.is_within(0.025) and not found.is_within(0.0248)
    wide = difference({0: 0.5, 1: -0.5, 2: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert wide is not None and wide.low < 0 < wide.high and not wide.is_within(0.1), "0 inside is not enough"
    alone = difference({0: 0.0}, {0: 0.0})
    assert alone is not None and not alone.is_within(1.0)


def test_a_record_has_what_a_table_needs_when_the_runs_are_gone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(survival, "draw", lambda *given, **options: None)
    folders = [run(tmp_path / f"grpo-{seed}", [1.0] * 5 + [0.25 * seed] * 5, seed=seed) for seed in (0, 1)]
    folders += [run(tmp_path / f"gspo-{seed}", [1.0] * 9 + [0.9], seed=seed, objective="gspo") for seed in (0, 1)]
    record = tmp_path / "study.csv"
    for folder in folders:
        records.add(record, folder.name, load_run(folder), ["objective.name"])
    records.add(record, folders[0].name, load_run(folders[0]), ["objective.name"])  # again: no row twice
    assert len(record.read_text().splitlines()) == 41
    made = {}
    for name, words in (("runs", list(map(str, folders))), ("record", [str(record)])):
        assert survival.main([*words, "--baseline=grpo", f"--out={tmp_path / name}"]) == 0
        made[name] = (tmp_path / name / "survival.md").read_text()
    assert made["runs"] == made["record"] and "| reward kept |" in made["record"]
    again = [str(tmp_path / "record/survival.json"), "--baseline=grpo", f"--out={tmp_path / 'again'}"]
    capsys.readouterr()
    assert survival.main([*again, "--primary=gspo vs grpo", "--margin=0.1"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(made["record"]), "numbers alone make the tables anew"
    assert "| gspo vs grpo | reward at the end | 2 | +0.775 [-0.813, +2.363] | 0.5 | 0.5 | not shown |" in said
    assert survival.main([str(record), "--baseline=grpo", "--primary=gspo vs rspo", f"--out={tmp_path}"]) == 2
    assert "names 'rspo'; use LABEL vs LABEL of grpo, gspo" in capsys.readouterr().err


def test_a_seed_of_several_machines_is_named(tmp_path):
    record = tmp_path / "study.csv"
    for name in ("grpo", "gspo"):
        folder = run(tmp_path / f"{name}-3", [0.5] * 3, seed=3, objective=name)
        records.add(record, folder.name, load_run(folder), ["objective.name"])
    runs = records.load(record)
    assert survival.mixed_seeds(runs) == []
    other = replace(runs[1], versions={"machine": "another"})
    assert survival.mixed_seeds([runs[0], other]) == [3]


def test_a_file_that_is_no_record_is_one_sentence(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        UserError, match=r"other\.csv is no record of a study, which has the columns run, seed, iteration"
    ):
        records.load(tmp_path / "other.csv")
    with pytest.raises(UserError, match="has no run; train some with sweep --record="):
        records.load(tmp_path / "none.csv")
    (tmp_path / "survival.json").write_text('[{"label": "x"}]')
    with pytest.raises(UserError, match="is not what survival writes"):
        survival.observed([str(tmp_path / "survival.json")])
    with pytest.raises(UserError, match="give it alone"):
        survival.observed([str(tmp_path / "survival.json"), "x"])


def test_the_command(tmp_path, capsys):
    folders = [run(tmp_path / f"grpo-{seed}", [1.0] * 5 + [0.0] * 5, seed=seed) for seed in (0, 1)]
    better = [1.0] * 9 + [0.9]
    folders += [run(tmp_path / f"gspo-{seed}", better, seed=seed, objective="gspo") for seed in (0, 1)]
    words = [str(folder) for folder in folders]
    assert survival.main([*words, f"--baseline={folders[1]}", f"--out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert said == (tmp_path / "out" / "survival.md").read_text()
    assert "| grpo | 2 | 2 [16%, 100%] | 8, 8 | 0.000 [0.000, 0.000] | baseline |" in said
    assert "| gspo | 2 | 0 [0%, 84%] | – | 0.900 [0.900, 0.900] | +0.900 [+0.900, +0.900] | 0.5 | – |" in said
    facts = {one["label"]: one for one in json.loads((tmp_path / "out" / "survival.json").read_text())}
    assert facts["grpo"]["collapsed"] == 2 and facts["gspo"]["differences"]["mean"]["mean"] == pytest.approx(0.49)
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in survival.LAYOUTS)
    assert survival.main([*words, f"--baseline={tmp_path}"]) == 2
    assert "is none of the runs" in capsys.readouterr().err
