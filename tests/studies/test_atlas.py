"""The atlas: curves against values worked by hand, what is drawn of them, and the command with its errors."""

import dataclasses
import math
import re
import sys

import numpy as np
import pytest
from matplotlib.text import Text

from gspo_jax import drawing, installs, objectives
from gspo_jax.objectives import catalogue
from gspo_jax.objectives.surrogates import Surrogate, TokenBatch
from gspo_jax.studies.looks import OBJECTIVES
from tests.pods import drawer

atlas = drawer("atlas")

E2 = math.exp(2)
SOFT = 4 * E2 / (1 + E2) ** 2
"""4p(1 − p) with p = σ(2): SAPO's weight kernel at ratio 3 and τ = 1."""


@pytest.mark.parametrize(
    "name, advantage, ratio, weight, gated",
    [
        # The weight is r inside the clip, and 0 only where min() picks the clipped side.
        ("grpo", 1, 1.1, 1.1, False),
        ("grpo", 1, 1.25, 0.0, True),
        ("grpo", 1, 0.5, 0.5, False),
        ("grpo", -1, 0.75, 0.0, True),
        ("grpo", -1, 1.9, 1.9, False),
        ("dapo", 1, 1.25, 1.25, False),
        ("dapo", 1, 1.3, 0.0, True),
        ("gspo", 1, 1.0003, 1.0003, False),
        ("gspo", 1, 1.0005, 0.0, True),
        ("gspo_token", -1, 0.9995, 0.0, True),
        # The weight is the ratio up to 1 + 4 and constant beyond, for either sign of Â.
        ("cispo", 1, 3.0, 3.0, False),
        ("cispo", 1, 7.0, 5.0, True),
        ("cispo", -1, 7.0, 5.0, True),
        ("reinforce", 1, 0.3, 1.0, False),
        ("rloo", -1, 1.7, 1.0, False),
        # The bound is e^0.4 = 1.49; one token is its own geometric mean.
        ("gmpo", 1, 1.45, 1.45, False),
        ("gmpo", 1, 1.5, 0.0, True),
        ("gmpo", -1, 0.6, 0.0, True),
        ("sapo", 1, 1.0, 1.0, False),
        ("sapo", -1, 1.0, 1.0, False),
        ("sapo", 1, 3.0, SOFT * 3, True),
        # π_old is 0.1, so a ratio of 2.4 is a change of 0.14, and 2.6 one of 0.16.
        ("dppo_tv", 1, 2.4, 2.4, False),
        ("dppo_tv", 1, 2.6, 0.0, True),
        ("minirl", 1, 1.2, 1.2, False),
        ("minirl", -1, 0.7, 0.0, True),
        ("vespo", 1, 2.0, 4 * math.exp(-3), True),
        # Where Â < 0 the band ends at 1 + 7e-4, which gspo does not bound.
        ("tbpo", -1, 1.0006, 1.0006, False),
        ("tbpo", -1, 1.0008, 0.0, True),
        ("tbpo", 1, 1.0005, 0.0, True),
        # The first token has no prefix. The penalty of dro: 1 − 0.1·log r / Â.
        ("minpro", -1, 7.0, 5.0, True),
        ("dro", 1, 2.0, 1 - 0.1 * math.log(2), False),
        ("dro", -1, 2.0, 1 + 0.1 * math.log(2), False),
    ],
)
def test_gates_worked_by_hand(name, advantage, ratio, weight, gated):
    found = atlas.gate(objectives.make(name), np.array([ratio]), advantage=advantage)
    np.testing.assert_allclose(found.weight, [weight], rtol=2e-5)
    assert found.gated.tolist() == [gated]


def test_gains_worked_by_hand():
    def gain(name, ratio, **more):
        return atlas.gate(objectives.make(name), np.array([ratio]), **{"advantage": 1.0, **more}).gain[0]

    assert gain("grpo", 1.5) == pytest.approx(1.2)
    assert gain("grpo", 1.5, advantage=-1.0) == pytest.approx(-1.5)
    assert gain("sapo", 1.0) == pytest.approx(2.0)  # 4·σ(0)
    assert gain("reinforce", 2.0) == pytest.approx(math.log(0.2))  # π = 2·0.1
    assert gain("rspo", 1.2) == pytest.approx(1.2)
    assert gain("rspo", 1.2, router_shift=0.8) == pytest.approx(0.96)
    assert gain("rspo", 1.2, router_shift=0.5) == pytest.approx(0.96)  # γ is raised to its floor γ_min


@pytest.mark.parametrize(
    "name, low, high",
    [("grpo", 0, 2), ("gspo", 0.999, 1.001), ("cispo", 0, 6), ("gmpo", 0, 2), ("reinforce", 0, 2), ("sapo", 0, 3.2)],
)
def test_the_window_holds_every_gate(name, low, high):
    assert atlas.window(objectives.make(name)) == pytest.approx((low, high), abs=0.02)


def test_stretches_that_are_gated():
    ratios, gated = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), np.array([True, True, False, False, True])
    found = atlas.Gate(ratios, ratios, ratios, gated)
    assert atlas.gated_spans(found) == [(0.1, 0.2), (0.5, 0.5)]
    assert atlas.gated_spans(found._replace(gated=~gated)) == [(0.3, 0.4)]
    assert atlas.gated_spans(found._replace(gated=gated & False)) == []


@pytest.fixture
def panel(tmp_path):
    with drawing.picture(tmp_path / "panel.png", width=4, height=4) as figure:
        yield figure.add_axes((0.1, 0.5, 0.8, 0.3)), figure.add_axes((0.1, 0.1, 0.8, 0.3))


@pytest.mark.parametrize(
    "name, says",
    [
        ("grpo", ["Â = −1: cut below 0.8", "Â = +1: cut above 1.2"]),
        ("gspo", ["Â = −1: cut below 1 − 3e-4", "Â = +1: cut above 1 + 4e-4"]),
        ("cispo", ["Â = −1: capped above 5", "Â = +1: capped above 5"]),
        ("sapo", ["Â = −1: damped above 2.68", "Â = +1: damped above 2.76"]),  # 1 + 2·asinh(1)/τ
        ("rloo", []),
    ],
)
def test_a_panel_says_where_its_gates_are(panel, name, says):
    upper, lower = panel
    atlas.draw_objective(upper, lower, atlas.evaluate(name), OBJECTIVES[name])
    assert [text.get_text() for text in lower.texts] == says
    assert upper.get_title(loc="left") == name


def test_a_panel_draws_gain_and_weight_for_both_signs(panel):
    upper, lower = panel
    look = OBJECTIVES["dapo"]
    atlas.draw_objective(upper, lower, atlas.evaluate("dapo"), look)
    (down_gain, up_gain), (down, up) = upper.lines[:2], lower.lines[:2]
    assert up.get_color() == up_gain.get_color() == look.color
    assert [text.get_color() for text in upper.findobj(Text) if text.get_text() == "dapo"] == [look.color]
    assert down.get_color() == down_gain.get_color() != look.color and down.get_linewidth() > 2 * up.get_linewidth()
    (mark,) = [line for line in upper.lines if line.get_marker() == look.marker]
    assert mark.get_xdata()[0] == 1 and mark.get_ydata()[0] == 0  # the gain is relative to the one at ratio 1
    x, y = (np.asarray(data) for data in up.get_data())
    assert np.isnan(y).sum() == 1 and x[np.isnan(y)] == pytest.approx(1.28, abs=2e-3)  # the line breaks at the gate
    assert np.nanmax(y[x > 1.29]) == 0 and np.nanmax(down.get_ydata()) == pytest.approx(2, abs=1e-3)
    assert np.max(up_gain.get_ydata()) == pytest.approx(0.28) and np.max(down_gain.get_ydata()) == pytest.approx(0.2)


@pytest.mark.slow
def test_another_objective_appears_by_itself(tmp_path, monkeypatch):
    def surrogate(b: TokenBatch) -> Surrogate:
        never = b.mask & False
        return Surrogate(b.advantages * b.logprobs, b.logprobs, never, never)

    def flat() -> objectives.Objective:
        return dataclasses.replace(objectives.make("reinforce"), name="flat", surrogate=surrogate)

    drawn = []
    real = atlas.draw_objective
    monkeypatch.setattr(atlas, "draw_objective", lambda *panel: (drawn.append(panel[2].objective.name), real(*panel)))
    monkeypatch.setattr(catalogue, "flat", flat, raising=False)
    monkeypatch.setattr(catalogue, "__all__", [*catalogue.__all__, "flat"])
    assert atlas.main([f"--out={tmp_path / 'new'}"]) == 0
    assert sorted(drawn) == sorted([*catalogue.__all__] * 2)  # for a page and for a phone
    for name in ("atlas.png", "atlas-narrow.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ouf=x"], r"unrecognized arguments: --ouf=x; did you mean --out\?"),
        (["x"], "unrecognized arguments: x"),
        (["--out={}/file/x"], "cannot be written to .*choose another --out"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, says):
    (tmp_path / "file").write_text("")
    assert atlas.main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error) and error.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    drawing.text_width.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert atlas.main([f"--out={tmp_path}"]) == 2
    assert f"run {installs.of_extra('report')}\n" in capsys.readouterr().err
