"""Looks of groups of runs: fixed for an objective, stable for all else, and told apart by colour-blind readers."""

import itertools

import numpy as np
import pytest

from gspo_jax import drawing
from gspo_jax.objectives import catalogue
from gspo_jax.studies.looks import OBJECTIVES, OTHERS, PATTERNS, REPLAYS, looks, variant

# Machado et al. 2009 (doi:10.1109/TVCG.2009.113), severity 1, for linear RGB.
SEEN_BY = {
    "everyone else": np.eye(3),
    "protanopes": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopes": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = TO_XYZ.sum(axis=1)


def _linear(color: str) -> np.ndarray:
    values = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(color: str, seen: np.ndarray) -> np.ndarray:
    """Return a colour in CIELAB as it is seen, where a distance of 2.3 is just noticeable."""
    x, y, z = np.cbrt(TO_XYZ @ np.clip(seen @ _linear(color), 0, 1) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _nearest(colors) -> float:
    """Return the smallest distance between any two colours, for any reader."""
    pairs = itertools.combinations(colors, 2)
    return min(float(np.linalg.norm(_lab(a, seen) - _lab(b, seen))) for a, b in pairs for seen in SEEN_BY.values())


def test_distances_of_known_colours():
    assert _lab("#FFFFFF", np.eye(3)) == pytest.approx([100, 0, 0], abs=1e-3)
    assert _lab("#FF0000", np.eye(3)) == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    red_green = [_nearest(["#D62728", "#2CA02C"]), _nearest(["#D55E00", "#0072B2"])]
    assert red_green[0] < red_green[1] / 2  # the usual red and green


def test_every_objective_has_a_look_of_its_own():
    assert set(OBJECTIVES) == set(catalogue.__all__)
    marks = [(look.marker, look.hollow) for look in (*OBJECTIVES.values(), *OTHERS)]
    assert len(set(marks)) == len(marks)  # without any colour
    assert _nearest([look.color for look in OBJECTIVES.values()]) > 15
    assert _nearest([look.color for look in OTHERS]) > 12


@pytest.mark.parametrize("name", OBJECTIVES)
def test_replays_are_told_apart_by_pattern_and_by_shade(name):
    seen = [variant(OBJECTIVES[name], i) for i in range(len(REPLAYS))]
    assert len({str(look.pattern) for look in seen}) == len(REPLAYS) and seen[0] == OBJECTIVES[name]
    assert {look.marker for look in seen} == {OBJECTIVES[name].marker}
    assert _nearest([look.color for look in seen]) > 5


def test_names_can_be_read_on_white():
    for look in (*OBJECTIVES.values(), *OTHERS):
        luminance = float((TO_XYZ @ _linear(look.color))[1])
        assert 1.05 / (luminance + 0.05) > 2.6, look


def test_an_objective_looks_the_same_in_every_figure():
    names = ["rspo", "mine", "gspo", "grpo"]
    all_four = looks([(name, name, "none") for name in names])
    for name, look in zip(names, all_four, strict=True):
        assert looks([(name, name, "none")]) == [look]
        assert looks([("gspo_token", "gspo_token", "none"), (name, name, "none")])[1] == look
    assert all_four[2] == OBJECTIVES["gspo"] and all_four[1] in OTHERS
    two = [looks([(name, name, "none")])[0] for name in ("mine", "yours")]
    assert looks([(name, name, "none") for name in ("mine", "yours")]) == two and two[0] != two[1]
    own = [look.color for look in looks([(name, name, "none") for name in ("a", "b", "c", "d", "e", "f")])]
    assert len(set(own)) == 6


def test_replays_keep_the_colour_of_their_objective():
    groups = [
        ("gspo", "gspo", "none"),
        ("grpo, r3", "grpo", "r3"),
        ("grpo", "grpo", "none"),
        ("grpo, r2", "grpo", "r2"),
    ]
    found = looks(groups)
    assert [look.pattern for look in found] == [PATTERNS[i] for i in (0, 2, 0, 1)]
    assert found[2] == OBJECTIVES["grpo"] and found[0] == OBJECTIVES["gspo"]
    assert looks(groups[1:]) == found[1:]  # r3 is r3 with or without its neighbours
    assert looks(groups[1:2]) == found[1:2]


def test_runs_that_differ_in_something_else():
    of_one = looks([(f"learning_rate={x}", "gspo", "none") for x in (1, 2, 3)])
    assert len({look.color for look in of_one}) == 3 and set(of_one) <= set(OTHERS)
    of_two = looks([(f"{name}, {x}", name, "none") for name in ("gspo", "grpo") for x in (1, 2)])
    assert [look.marker for look in of_two] == ["o", "o", "s", "s"]
    assert [look.pattern for look in of_two] == [PATTERNS[0], PATTERNS[1]] * 2
    unknown = looks([("run-a", None, "none"), ("run-b", None, "none")])
    assert len(set(unknown)) == 2 and set(unknown) <= set(OTHERS)
    assert len(looks([(str(i), None, "none") for i in range(20)])) == 20


def test_mixed_colours():
    assert drawing.mix("#000000", "#FFFFFF", 0.5) == "#808080"
    assert drawing.mix("#D55E00", "#FFFFFF", 0.0) == "#D55E00" and drawing.mix("#D55E00", "#FFFFFF", 1.0) == "#FFFFFF"
