"""Weak scaling: reading plans, the table and the picture, and errors for files that are no plans."""

import json

import pytest
from matplotlib.colors import to_rgba
from matplotlib.text import Text

from tests.pods import drawer

scaling = drawer("scaling")


def plan(chips: int, **facts) -> dict:
    """Return what `plan` writes, for one program."""
    collectives = [
        {"kind": "all-gather", "group": "64", "count": 2, "bytes": 60e9, "source": ""},
        {"kind": "all-gather", "group": "4", "count": 2, "bytes": 20e9, "source": ""},
        {"kind": "all-reduce", "group": "4", "count": 2, "bytes": chips * 1e7, "source": ""},
        {"kind": "ragged-all-to-all", "group": "4", "count": 2, "bytes": 5e9, "source": ""},
    ]
    update = {
        "fits": True,
        "flops": 400e12 + chips * 1e9,
        "peak_bytes": 40e9,
        "resident_bytes": 2e9,
        "collectives": collectives,
        "seconds": {"executed": 1.25},
        "projected_step_s": [1.5, 1.9],
        "warnings": ["needs 3.0 GB more than a chip has"],
    }
    return {"topology": f"v5p:{chips}", "mesh": {"data": 1, "fsdp": chips}, "programs": {"update": update | facts}}


@pytest.fixture
def files(tmp_path):
    for chips in (1024, 16):
        (tmp_path / f"{chips}.json").write_text(json.dumps(plan(chips)))
    return [str(tmp_path / "1024.json"), str(tmp_path / "16.json")]


def test_slices_are_compared_from_the_smallest(files, tmp_path, capsys):
    out = tmp_path / "out"
    assert scaling.main([*files, f"--out={out}"]) == 0
    said = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in said.splitlines()[2:]]
    assert rows == [
        ["v5p:16, 16 chips", "fsdp 16", "400.02", "+0.00%", "85.2", "0.2", "42.0", "1.25", "1.50–1.90"],
        ["v5p:1024, 1024 chips", "fsdp 1024", "401.02", "+0.25%", "95.2", "10.2", "42.0", "1.25", "1.50–1.90"],
    ]
    assert (out / "scaling.md").read_text() == said
    for name in ("scaling.png", "scaling-narrow.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_bytes_are_told_by_kind(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(plan(16)))
    point = scaling.read(tmp_path / "plan.json", "update")
    assert point.sent == {"all-gather": 80e9, "all-reduce": 1.6e8, "others": 5e9}


def test_a_picture_for_a_phone_has_one_column_and_texts_of_a_size(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    (tmp_path / "plan.json").write_text(json.dumps(plan(16)))
    for columns in (3, 1):
        scaling.draw([scaling.read(tmp_path / "plan.json", "update")], tmp_path / "x.png", "update", columns=columns)
    wide, narrow = drawn
    assert len({axes.get_position().x0 for axes in wide.axes}) == 3
    assert len({axes.get_position().x0 for axes in narrow.axes}) == 1
    scale = 390 / (narrow.get_figwidth() * 72)  # a phone is 390 CSS pixels wide
    assert min(text.get_fontsize() for text in narrow.findobj(Text)) * scale >= 9
    shades = {patch.get_facecolor() for patch in wide.axes[1].patches}
    assert shades == {to_rgba(scaling.COLORS[kind]) for kind in ("all-gather", "others")}  # all-reduce is too little


def test_a_slice_that_is_too_small_and_one_without_a_projection(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(plan(16, fits=False, projected_step_s=None)))
    point = scaling.read(tmp_path / "small.json", "update")
    assert "42.0 (does not fit) | 1.25 | none |" in scaling.table([point], "update")
    scaling.draw([point], tmp_path / "drawn.png", "update")


def test_what_is_no_plan(files, tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    failed = plan(64)
    del failed["programs"]["update"]["flops"]
    (tmp_path / "failed.json").write_text(json.dumps(failed))
    for arguments, says in (
        ([str(tmp_path / "none.json")], "none.json is not a plan"),
        (
            [str(tmp_path / "run.json")],
            "run.json is not a plan ('programs'); make one: python -m gspo_jax.plan --json=",
        ),
        ([str(tmp_path / "failed.json")], "update did not compile: it needs 3.0 GB more than a chip has; leave this"),
        ([*files, "--program=score"], "has no program 'score', only update; plan it"),
        ([*files, "--programs=score"], "did you mean --program?"),
        ([*files, f"--out={files[0]}"], "choose another --out"),
    ):
        assert scaling.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and says in error and error.count("\n") == 1
