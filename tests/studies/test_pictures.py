"""Pictures of reports: what is drawn of which runs, small panels, what is left out, and texts that a phone can show."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from gspo_jax import drawing
from gspo_jax.objectives import catalogue
from gspo_jax.studies import panels, pictures, runs
from gspo_jax.studies.looks import OBJECTIVES

LEGIBLE = 9.0
"""Smallest size of a text, in CSS pixels, on a phone that is 390 of them wide."""


def _run(
    name: str, seed: int = 0, *, start: float = 0.2, gain: float = 0.1, scale: float = 1.0, **settings
) -> runs.RunData:
    """Return a run of four iterations of two mini-batches; all but accuracy and length are multiplied by `scale`."""
    rows: list[dict] = [{"step": 0, "eval/accuracy": start}]
    for step in range(1, 9):
        iteration, minibatch = divmod(step - 1, 2)
        row = {"step": step, "iteration": iteration, "minibatch": minibatch, "response_length/mean": 20.0}
        row |= {"reward/mean": scale * (iteration + seed), "clip_fraction/token": 0.1 * scale}
        row |= {"actor/entropy": scale / step, "routing/flip_rate": 0.01 * scale * minibatch}
        row |= {"routing/flip_rate_per_layer": [0.0, 0.02 * scale * minibatch]}
        rows.append(row | ({"eval/accuracy": start + gain * (iteration + 1)} if minibatch else {}))
    config = {"seed": seed, "objective.name": name, "routing.replay": "none"} | settings
    return runs.RunData(folder=Path(f"{name}-{seed}"), rows=rows, config=config, command="")


def _draw(monkeypatch, tmp_path, given, layout=pictures.PAGE):
    """Return the figure of some runs, as it was written."""
    groups, figures = runs.group_runs(given), []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    shown, note = panels.choose(groups, "training")
    pictures.draw(groups, shown, tmp_path / "x.png", base=groups[0], note=note, layout=layout)
    (figure,) = figures
    return figure


def _titled(figure) -> dict:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def _thick(axes) -> list:
    return [line for line in axes.lines if line.get_linewidth() > 1.5]


def test_a_benchmark_of_a_run_has_a_panel(monkeypatch, tmp_path):
    run = _run("gspo")
    run.rows[0].update({"benchmark/aime24": 0.1, "benchmark/aime24_low": 0.0, "benchmark/aime24_failed": 0.0})
    run.rows[-1].update({"benchmark/aime24": 0.3, "benchmark/aime24_low": 0.2, "benchmark/aime24_failed": 0.0})
    axes = _titled(_draw(monkeypatch, tmp_path, [run, _run("grpo")]))["Benchmark: aime24"]
    (line,) = _thick(axes)
    assert line.get_ydata().tolist() == [0.1, 0.3]


def test_each_reward_function_has_a_panel_unless_it_is_all_there_is(monkeypatch, tmp_path):
    weights = {"rewards.math_verify": 1.0, "step_rewards.countdown_steps": 0.2}
    several, alone = _run("gspo", **weights), _run("gspo", **{"rewards.math_verify": 1.0})
    for row in several.rows[1:]:
        row |= {"reward/math_verify": row["reward/mean"] - 0.1, "reward/countdown_steps": 0.5, "reward/zero_std": 0.3}
    for row in alone.rows[1:]:
        row["reward/math_verify"] = row["reward/mean"]
    titles = list(_titled(_draw(monkeypatch, tmp_path, [several])))
    assert titles[1:4] == ["Reward", "Reward: math_verify", "Reward: countdown_steps"]
    assert [title for title in _titled(_draw(monkeypatch, tmp_path, [alone])) if "Reward" in title] == ["Reward"]
    found = runs.facts(runs.group_runs([several]))[0]["metrics"]
    assert found["reward/math_verify"]["final"]["mean"] == pytest.approx(2.9)


def test_the_numbers_at_the_ends_of_lines_are_those_of_the_table(monkeypatch, tmp_path):
    """Of 48 iterations the last 4 are the last tenth; the ends of the lines, smoothed over 5, are other numbers."""
    run = _run("gspo")
    run.rows[1:] = [
        run.rows[1] | {"step": i, "iteration": i, "reward/mean": i % 5 / 4, "eval/accuracy": i / 100}
        for i in range(1, 49)
    ]
    axes = _titled(_draw(monkeypatch, tmp_path, [run]))
    ends = runs.facts(runs.group_runs([run]))[0]["metrics"]
    assert ends["reward/mean"]["final"]["mean"] == pytest.approx((0 + 1 + 2 + 3) / 16)
    assert [text.get_text() for text in axes["Reward"].texts] == ["0.375"]
    assert axes["Held-out accuracy"].texts[-1].get_text().splitlines()[0] == "48.0%"


@pytest.mark.parametrize(
    ("metric", "rounding", "real", "title"),
    [
        ("mismatch/kl", 1e-13, 1e-10, "Sampler to trainer KL"),
        ("routing/router_kl", -1e-7, 1e-6, "Router KL, old to new"),
        ("ratio/token_log_std", 1e-6, 1e-5, "Ratio spread, tokens"),
    ],
)
def test_what_is_rounding_is_no_result(metric, rounding, real, title):
    def left_out(value: float) -> tuple[str, dict]:
        run = _run("gspo")
        for row in run.rows[1:]:
            row[metric] = value
        groups = runs.group_runs([run])
        return panels.choose(groups, "routing")[1], runs.facts(groups)[0]["metrics"][metric]["final"]

    note, final = left_out(rounding)
    assert f"{title} (0 to rounding)" in note and final["mean"] == 0
    note, final = left_out(real)
    assert title not in note and final["mean"] == pytest.approx(real)
    assert runs.describe("mismatch/kl").write(0.0) == "0" and runs.describe("reward/mean").write(-1e-9) == "0.000"


def test_a_line_has_the_look_of_its_objective(monkeypatch, tmp_path):
    figure = _draw(monkeypatch, tmp_path, [_run("rspo"), _run("grpo"), _run("grpo", **{"routing.replay": "r2"})])
    rspo, grpo, r2 = _thick(_titled(figure)["Clip fraction"])
    assert [line.get_label() for line in (rspo, grpo, r2)] == ["rspo", "grpo", "grpo, r2"]
    assert rspo.get_color() == OBJECTIVES["rspo"].color and rspo.get_marker() == OBJECTIVES["rspo"].marker
    assert grpo.get_color() == OBJECTIVES["grpo"].color and grpo.get_linestyle() == "-"
    assert r2.get_marker() == grpo.get_marker() and r2.get_linestyle() == "--"
    names = {text.get_text(): text.get_color() for text in figure.texts}
    assert names["rspo"] == OBJECTIVES["rspo"].color


def test_six_groups_share_a_panel_and_seven_are_rows_of_dots(monkeypatch, tmp_path):
    names = catalogue.__all__[:7]
    given = [_run(name, seed, gain=0.1 + i / 100) for i, name in enumerate(names) for seed in (0, 1)]
    six = _titled(_draw(monkeypatch, tmp_path, given[:12]))
    assert len(_thick(six["Reward"])) == 6 and "Δ Held-out accuracy" in six
    figure = _draw(monkeypatch, tmp_path, given)
    assert figure.get_figheight() < 8 and len(figure.axes) == 7  # rewards do not differ
    axes = _titled(figure)
    assert list(axes)[:2] == ["Held-out accuracy", "Δ Held-out accuracy"]
    ranked = names[::-1]  # the most accurate first, as in the table
    for place, found in enumerate(axes.values()):
        labels = [text.get_text() for text in found.get_yticklabels()]
        assert labels == (ranked if place % 4 == 0 else [""] * 7)  # named at the left of the picture
    for title, reached in (("Held-out accuracy", 0.6), ("Δ Held-out accuracy", 0.0)):
        dots = [line for line in axes[title].lines if line.get_marker() not in ("o", "|", "None")]
        assert axes[title].get_ylim() == (6.5, -0.5)
        for line in dots:
            (at,), (place,) = line.get_data()
            name = ranked[round(place)]
            assert at == pytest.approx(reached + 4 * names.index(name) / 100)
            assert line.get_color() == OBJECTIVES[name].color and line.get_marker() == OBJECTIVES[name].marker
    written = " ".join(text.get_text() for text in figure.texts)
    assert "Left out: Flip rate by mini-batch, Flip rate by layer (too many groups)." in written


def test_every_run_of_a_group_is_drawn(monkeypatch, tmp_path):
    figure = _draw(
        monkeypatch, tmp_path, [_run("gspo", seed, gain=gain) for seed, gain in enumerate((0.1, 0.15, 0.05))]
    )
    (mean,) = _thick(_titled(figure)["Held-out accuracy"])
    each = [line for line in _titled(figure)["Held-out accuracy"].lines if len(line.get_xdata()) == 5 and line != mean]
    assert [line.get_ydata()[-1] for line in each] == pytest.approx([0.6, 0.8, 0.4])
    assert mean.get_ydata()[-1] == pytest.approx(0.6)
    assert any("thin: each run, thick: mean of 3 runs" in text.get_text() for text in figure.texts)


def test_what_runs_had_before_training_is_no_mean(monkeypatch, tmp_path):
    apart = _draw(monkeypatch, tmp_path, [_run("gspo", start=0.1), _run("grpo", start=0.5)])
    axes = _titled(apart)["Held-out accuracy"]
    assert [text.get_text() for text in axes.texts if "before" in text.get_text()] == ["before training 10.0–50.0%"]
    assert not [line for line in axes.lines if np.allclose(line.get_ydata(), 0.3)]
    (band,) = axes.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.1, 0.5))
    axes = _titled(_draw(monkeypatch, tmp_path, [_run("gspo"), _run("grpo")]))["Held-out accuracy"]
    assert [text.get_text() for text in axes.texts if "before" in text.get_text()] == ["before training 20.0%"]
    assert not axes.patches and [line for line in axes.lines if list(line.get_ydata()) == [0.2, 0.2]]


def test_an_evaluation_after_updates_is_not_before_training(monkeypatch, tmp_path):
    run = _run("gspo")
    del run.rows[0]
    axes = _titled(_draw(monkeypatch, tmp_path, [run]))["Held-out accuracy"]
    assert not [text for text in axes.texts if "before" in text.get_text()]


def test_panels_with_nothing_to_show_are_named(monkeypatch, tmp_path):
    run = _run("gspo", scale=0.0)
    for row in run.rows:
        row.pop("actor/entropy", None)
        if "response_length/mean" in row:
            row["response_length/mean"] = float("nan")
    figure = _draw(monkeypatch, tmp_path, [run])
    assert list(_titled(figure)) == ["Held-out accuracy"]
    written = " ".join(text.get_text() for text in figure.texts)
    assert written.endswith(
        "Left out: Reward, Clip fraction, Routing flip rate, Flip rate by mini-batch, Flip rate by layer (always 0); "
        "Response length, Entropy (no values)."
    )
    alive = _draw(monkeypatch, tmp_path, [run, _run("grpo")])
    assert len(alive.axes) == 8 and not any("Left out" in text.get_text() for text in alive.texts)


def test_a_run_of_zeros_is_one_sentence(monkeypatch, tmp_path):
    run = _run("gspo", start=0.0, gain=0.0, scale=0.0)
    for row in run.rows:
        row.pop("response_length/mean", None)
    figure = _draw(monkeypatch, tmp_path, [run])
    assert not figure.axes and figure.get_figheight() < 2
    assert "Left out: Held-out accuracy, Reward," in " ".join(text.get_text() for text in figure.texts)


def test_many_minibatches_are_five_lines(monkeypatch, tmp_path):
    run = _run("gspo")
    template = run.rows[-1]
    for i in range(32):
        at = {"step": 9 + i, "iteration": 4 + i // 16, "minibatch": i % 16, "routing/flip_rate": 0.001 * (i % 16)}
        run.rows.append(template | at)
    axes = _titled(_draw(monkeypatch, tmp_path, [run]))["Flip rate by mini-batch"]
    assert [line.get_label() for line in _thick(axes)] == ["0", "4", "8", "11", "15"]
    assert axes.get_xlabel() == "optimizer updates"
    two = _titled(_draw(monkeypatch, tmp_path, [_run("gspo", seed) for seed in (0, 1)]))
    assert two["Flip rate by mini-batch"].get_xlabel() == "optimizer updates (mean of 2 runs)"
    assert two["Flip rate by layer"].get_xlabel() == "optimizer updates (mean of 2 runs)"


@pytest.mark.parametrize("count", [1, 3, 6, 12])
def test_texts_can_be_read_on_a_phone(monkeypatch, tmp_path, count):
    given = [_run(name, seed) for name in catalogue.__all__[:count] for seed in (0, 1)]
    figure = _draw(monkeypatch, tmp_path, given, pictures.PHONE)
    figure.draw_without_rendering()
    scale = 390 / (figure.get_figwidth() * drawing.POINTS_PER_INCH)
    page = figure.bbox
    for text in figure.findobj(Text):
        assert text.get_fontsize() * scale >= LEGIBLE, text
    ticks = {tick for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_ticklabels()}
    written = [text for text in figure.findobj(Text) if text not in ticks and text.get_text() and text.get_visible()]
    for box in (text.get_window_extent() for text in written):
        assert box.x0 >= page.x0 and box.x1 <= page.x1
    panels_of_lines = [axes for title, axes in _titled(figure).items() if count in (3, 6) and "Δ" not in title]
    assert {round(axes.get_position().x0, 2) for axes in panels_of_lines} <= {0.19}  # one column


def test_texts_are_broken_where_they_end():
    text = "differences between runs of one seed, each below their mean"
    lines = drawing.wrap(text, 2.0, 11)
    assert " ".join(lines) == text and len(lines) > 1
    assert all(drawing.text_width(line, 11) <= 2.0 for line in lines)
    assert drawing.wrap("unbreakable", 0.1, 11) == ["unbreakable"]
    assert drawing.text_width("gspo", 20) == pytest.approx(2 * drawing.text_width("gspo", 10), rel=0.02)
