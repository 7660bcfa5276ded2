"""The report: grouping by seed, numbers worked by hand, the files it writes, and its errors for bad input."""

import base64
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gspo_jax import drawing, installs, report
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import MetricsWriter
from gspo_jax.folder.notes import ORIGIN_FILE, note, write_changes, write_config
from gspo_jax.folder.samples import SamplesWriter, make_samples
from gspo_jax.objectives import catalogue
from gspo_jax.studies import pages, panels, pictures, runs
from tests.tiny import mostly_slow


def _fake(
    folder: Path,
    *,
    seed: int = 0,
    name: str = "gspo",
    iterations: int = 4,
    routing: bool = True,
    rewards: Sequence[str] = (),
) -> Path:
    """Write a run with two mini-batches per iteration, whose every number can be worked out by hand."""
    config = {"seed": seed, "objective": {"name": name, "low": 3e-4}, "rewards": dict.fromkeys(rewards, 1.0)}
    write_config(folder, config, command=f"python -m gspo_jax.train --config.seed={seed} <&>")
    with MetricsWriter(folder) as writer:
        writer.write(0, {"eval/accuracy": 0.1 + seed / 100})
        for step in range(1, 2 * iterations + 1):
            iteration, minibatch = divmod(step - 1, 2)
            row = {"iteration": iteration, "minibatch": minibatch, "reward/mean": iteration + minibatch / 2 + seed}
            row |= {"clip_fraction/token": 0.15, "response_length/mean": 20.0, "actor/entropy": 1 / step}
            row |= {"clip_fraction/sequence": 0.1 * minibatch} | {f"reward/{each}": 1 / step for each in rewards}
            if routing:
                row |= {"routing/flip_rate": 0.01 * minibatch, "routing/flip_rate_per_layer": [0.0, 0.02 * minibatch]}
            if minibatch == 1:
                row |= {"eval/accuracy": 0.2 * iteration + seed / 100, "throughput/tokens_per_s": 100.0 + iteration}
                row |= {"timing/iteration_s": 10.0 + iteration}
            writer.write(step, row)
    samples = SamplesWriter(folder)
    for step in (2, 8):
        texts = {
            "prompts": ["1 < 2?"] * 4,
            "completions": [f"<b>{i}</b>\u2028" for i in range(4)],
            "answers": ["y"] * 4,
        }
        scored = [0.0, 0.25, float("nan"), 1.0]
        samples.write(step, make_samples(rewards=scored, scores={"right": scored}, special=["<eos>"], **texts))
    return folder


def test_a_curve_has_one_point_per_iteration(tmp_path):
    (group,) = runs.group_runs(
        [runs.load_run(_fake(tmp_path / "a", seed=0)), runs.load_run(_fake(tmp_path / "b", seed=4))]
    )
    reward = runs.curve(group, "reward/mean")
    assert reward is not None
    assert reward.steps.tolist() == [2, 4, 6, 8]
    # Iteration i has rewards i and i + 1/2; those of the second run are 4 higher.
    assert reward.raw.tolist() == [[0.25, 1.25, 2.25, 3.25], [4.25, 5.25, 6.25, 7.25]]
    last = runs.curve(group, "reward/mean", minibatch=1)
    assert last is not None and last.raw[0].tolist() == [0.5, 1.5, 2.5, 3.5]
    accuracy = runs.curve(group, "eval/accuracy")
    assert accuracy is not None and accuracy.steps.tolist() == [0, 2, 4, 6, 8]
    layers = runs.list_curve(group, "routing/flip_rate_per_layer")
    assert layers is not None
    np.testing.assert_allclose(layers[1], [[0.0, 0.01]] * 4)
    assert runs.curve(group, "no/such") is None and runs.list_curve(group, "no/such") is None


def test_smoothing_keeps_a_constant_and_a_line(tmp_path):
    (group,) = runs.group_runs([runs.load_run(_fake(tmp_path / "a", iterations=60))])
    constant, line = runs.curve(group, "clip_fraction/token"), runs.curve(group, "reward/mean")
    assert constant is not None and line is not None
    np.testing.assert_allclose(constant.smooth, 0.15)
    np.testing.assert_allclose(line.smooth[0, 5:-5], line.raw[0, 5:-5])  # a centred window does not lag


def test_runs_that_differ_in_their_seed_only_are_one_group(tmp_path):
    folders = [_fake(tmp_path / f"tiny-{seed}", seed=seed) for seed in (0, 1, 2)]
    folders += [_fake(tmp_path / "other", seed=0, name="grpo"), _fake(tmp_path / "again", seed=1, name="grpo")]
    groups = runs.group_runs([runs.load_run(folder) for folder in folders])
    assert [(group.label, len(group.runs)) for group in groups] == [("gspo", 3), ("grpo", 2)]
    alone = runs.group_runs([runs.load_run(folder) for folder in folders[:3]])
    assert [group.caption for group in alone] == ["tiny (3 seeds)"]
    rates = [_fake(tmp_path / f"rate=3e-05-{seed}", seed=seed, name="rspo") for seed in (10, 11)]
    (group,) = runs.group_runs([runs.load_run(folder) for folder in rates])
    assert group.label == "rate=3e-05", "the exponent is not the seed"
    (folders[0] / "config.json").unlink()  # runs without a config are never grouped
    groups = runs.group_runs([runs.load_run(folder) for folder in folders[:2]])
    assert [group.label for group in groups] == ["tiny-0", "tiny-1"]


def test_facts_worked_by_hand(tmp_path):
    loaded = [runs.load_run(_fake(tmp_path / f"s{seed}", seed=seed)) for seed in (0, 2)]
    (found,) = runs.facts(runs.group_runs(loaded))
    accuracy = found["metrics"]["eval/accuracy"]
    # Evaluations: first 0.10 and 0.12, last 0.60 and 0.62.
    assert accuracy["initial"] == pytest.approx({"mean": 0.11, "min": 0.10, "max": 0.12})
    assert accuracy["final"] == pytest.approx({"mean": 0.61, "min": 0.60, "max": 0.62})
    assert accuracy["change"] == pytest.approx({"mean": 0.50, "min": 0.50, "max": 0.50})
    assert found["metrics"]["reward/mean"]["change"]["mean"] == pytest.approx(3.0)  # 0.25 -> 3.25, both plus the seed
    assert [(run["seed"], run["updates"], run["tokens_per_s"]) for run in found["runs"]] == [
        (0, 8, 101.5),
        (2, 8, 101.5),
    ]


def test_the_seconds_of_a_run_leave_out_the_time_it_was_stopped(tmp_path):
    run = _fake(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[5:]:
        line["time"] += 3600  # stopped for an hour after two of four iterations
    lines[-1]["timing/iteration_s"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = runs.facts(runs.group_runs([runs.load_run(run)]))
    assert found["runs"][0]["seconds"] == 33.0  # 10 + 11 + 12; the last one is missing


def test_the_command_writes_picture_page_and_json(tmp_path):
    run = _fake(tmp_path / "run")
    out = tmp_path / "facts" / "report.json"
    command = [sys.executable, "-m", "gspo_jax.report", str(run), f"--json={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Held-out accuracy" in done.stdout and "+0.500" in done.stdout
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    for name, attribute in (("report.png", "src"), ("report-narrow.png", "srcset")):  # the browser chooses by its width
        png = (run / "report" / name).read_bytes()
        assert png.startswith(b"\x89PNG")
        assert f' {attribute}="data:image/png;base64,{base64.b64encode(png).decode()}"' in page
    assert '<meta name="viewport" content="width=device-width' in page and '<source media="(max-width: 700px)"' in page
    assert page.count("<table>") == page.count("<div class=wide><table>") > 0  # scrolls where it does not fit
    assert 'alt="Held-out accuracy, Reward, ' in page
    assert not re.search(r'(src|href)="(?!data:)', page)  # the page loads nothing from elsewhere
    assert "&lt;b&gt;3&lt;/b&gt;" in page and "<b>" not in page
    assert json.loads(out.read_text())["groups"][0]["metrics"]["eval/accuracy"]["final"]["mean"] == pytest.approx(0.6)


def test_many_runs_need_a_place_and_are_compared_there(tmp_path):
    folders = [_fake(tmp_path / f"{name}-{seed}", seed=seed, name=name) for name in ("gspo", "grpo") for seed in (0, 1)]
    with pytest.raises(UserError, match=r"report of 4 runs needs a folder.*--out=DIR"):
        report.report(folders)
    made = report.report([*folders, folders[0]], out=tmp_path / "both")  # a folder given twice counts once
    assert Path(made["narrow"]).read_bytes().startswith(b"\x89PNG")
    assert [len(group["runs"]) for group in made["groups"]] == [2, 2]
    page = Path(made["html"]).read_text(encoding="utf-8")
    assert "Settings that differ" in page and "objective.name" in page
    assert "0.605 [0.600, 0.610]" in page


@pytest.mark.parametrize("left", mostly_slow([1, 2, 3, 9], always=[1, 9]))
def test_a_run_that_goes_on_or_has_no_routing_can_be_drawn(tmp_path, left):
    run = _fake(tmp_path / "run", routing=left > 3)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:left]) + '{"step": 99, "rew')
    assert Path(report.report([run])["png"]).stat().st_size > 10_000


def test_numbers_that_are_null_are_passed_over(tmp_path):
    run = _fake(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "actor/entropy"):
        lines[3][name] = None
    lines[1]["routing/flip_rate_per_layer"] = lines[2]["routing/flip_rate_per_layer"] = [None, 0.5]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (group,) = runs.group_runs([runs.load_run(run)])
    reward, layers = runs.curve(group, "reward/mean"), runs.list_curve(group, "routing/flip_rate_per_layer")
    assert reward is not None and reward.raw.tolist() == [[0.25, 1.5, 2.25, 3.25]]  # 1.0 is null, which leaves 1.5
    assert layers is not None and layers[0].tolist() == [4, 6, 8]  # iteration 0 lacks its first layer
    assert Path(report.report([run])["png"]).exists()


def test_the_glossary_knows_what_is_drawn():
    glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    drawn = [*runs.SUMMARY, *(panel.metric for page in panels.PANELS.values() for panel in page)]
    assert [name for name in drawn if f"`{name}`" not in glossary] == []
    assert set(pages.COLUMNS) == set(pages.HOW_TO_READ) == set(panels.PANELS)
    assert set(runs.BY_MINIBATCH) < set(runs.SUMMARY)


def _family(folder: Path) -> list[Path]:
    """Write runs of every objective in the catalogue with three seeds, as the trainer would leave them."""
    folders = []
    for rank, name in enumerate(catalogue.__all__):
        for seed in range(3):
            config = base()
            config.seed, config.objective.name = seed, name
            folders.append(folder / f"{name}-{seed}")
            write_config(folders[-1], config.to_dict(), command=f"train {name} {seed}")
            with MetricsWriter(folders[-1]) as writer:
                writer.write(0, {"eval/accuracy": 0.1})
                for step in (1, 2, 3):
                    row = {"iteration": step, "minibatch": 0, "reward/mean": 0.1, "actor/entropy": 0.5, "loss": 0.0}
                    writer.write(step, row | {"eval/accuracy": 0.3 + 0.001 * rank + seed / 100})
    return folders


def test_all_objectives_can_be_told_apart(tmp_path):
    folders = _family(tmp_path)
    groups = runs.group_runs([runs.load_run(folder) for folder in folders])
    assert [group.label for group in groups] == catalogue.__all__  # the runs differ in nothing else
    assert len({group.look for group in groups}) == len(groups) == len(catalogue.__all__)
    table = tmp_path / "docs" / "results.md"
    made = report.report(folders, out=tmp_path / "docs", table=table)
    assert Path(made["png"]).stat().st_size > 10_000
    first, rule, *rows = _tables(table)[0]
    assert first.startswith("| runs | held-out accuracy |") and set(rule) == set("|-: ")
    best = sorted(catalogue.__all__, key=catalogue.__all__.index, reverse=True)  # accuracy rises with the rank
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == best
    assert rows[0].split(" | ")[1:5] == ["0.329 [0.319, 0.339]", "–", "–", "–"]  # 0.3 + 0.019 + 0, 0.01, 0.02
    assert made["baseline"] == catalogue.__all__[0] and made["verdicts"] == []  # nineteen sentences are none
    assert "Of 19 intervals about 1 would leave out 0 even if" in table.read_text(encoding="utf-8")


def test_the_table_worked_by_hand(tmp_path, capsys):
    folders = [_fake(tmp_path / f"{name}-{seed}", seed=seed, name=name) for name in ("gspo", "grpo") for seed in (0, 1)]
    lines = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {"eval/accuracy": 0.5, "timing/iteration_s": 100.0}  # one slow iteration leaves the median unchanged
    (folders[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = tmp_path / "new" / "table.md"
    arguments = [*map(str, folders), f"--out={tmp_path / 'both'}", f"--table={table}"]
    assert report.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(table)
    text = table.read_text(encoding="utf-8")
    header, _, *rows = [line.strip("| ").split(" | ") for line in _tables(table)[0]]
    # Final accuracy is 0.60 and 0.61, for gspo 0.50 and 0.61. In the last of four iterations: 0.15 of tokens clipped,
    # (0 + 0.1)/2 of responses, (0 + 0.01)/2 flipped, entropy (1/7 + 1/8)/2. Seconds per iteration: 11, 12, 13.
    tail = ["15.00%", "5.00%", "0.50%", "0.134", "12.00"]
    assert header[-1] == "s per iteration"
    assert rows == [["grpo", "0.605 [0.600, 0.610]", *tail], ["gspo", "0.555 [0.500, 0.610]", *tail]]
    assert "2 runs per row, 8 updates per run." in text
    command = text.split("```bash\n")[1].split("\n```")[0].replace("\\\n", "")
    assert command.split() == ["python", "-m", "gspo_jax.report", *arguments]
    assert "python -m gspo_jax.train --config.seed=0 <&>" in text


def test_a_table_says_where_runs_are_of_different_length(tmp_path):
    folders = [_fake(tmp_path / "a", iterations=2), _fake(tmp_path / "b", seed=1), _fake(tmp_path / "c", name="grpo")]
    found = runs.facts(runs.group_runs([runs.load_run(folder) for folder in folders]))
    made = pages.family_table(found, panels="training", differences="", command=["x"])
    assert "1 to 2 runs per row, 4 to 8 updates per run." in made


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the pictures of reports empty, for tests of what is written."""
    monkeypatch.setattr(report, "draw", lambda groups, shown, path, **_: Path(path).write_bytes(b""))


@pytest.fixture
def pairs(tmp_path, undrawn):
    """Write runs whose accuracy is, for gspo above grpo, 1, 2 and 3 points higher; and a third with a single seed."""
    folders = []
    for name, gains in (("gspo", (0.01, 0.02, 0.03)), ("grpo", (0.0, 0.0, 0.0)), ("rspo", (-0.04,))):
        for seed, gain in enumerate(gains):
            folders.append(_fake(tmp_path / f"{name}-{seed}", seed=seed, name=name))
            lines = [json.loads(line) for line in (folders[-1] / "metrics.jsonl").read_text().splitlines()]
            lines[-1]["eval/accuracy"] += gain
            (folders[-1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folders


def test_differences_from_a_baseline_seed_by_seed(tmp_path, capsys, pairs):
    """0.01, 0.02 and 0.03: mean 0.02, deviation 0.01, over √3, times t of two degrees, 4.303: 0.0248 to either side."""
    table, facts = tmp_path / "table.md", tmp_path / "facts.json"
    arguments = [*map(str, pairs), f"--baseline={pairs[4]}", f"--out={tmp_path / 'out'}", f"--table={table}"]
    assert report.main([*arguments, f"--json={facts}"]) == 0
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _tables(table)[1]]
    assert head == ["runs", "seeds", "held-out accuracy", "reward"]
    gspo = ["gspo", "3", "+0.020 [-0.005, +0.045]", "+0.000 [+0.000, +0.000]"]
    assert rows == [gspo, ["rspo", "1", "-0.040, one seed", "+0.000, one seed"]]
    said = capsys.readouterr().out
    answer = "Held-out accuracy of gspo less that of grpo: +0.020 [-0.005, +0.045] over 3 seeds"
    assert f"{answer}: the interval contains 0, so these runs do not tell which is better." in said
    assert "rspo less that of grpo: -0.040, one seed; it takes several to tell a difference from chance." in said
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert answer in page and "<h2>Differences from grpo, seed by seed</h2>" in page and "Student" in page
    made = json.loads(facts.read_text())
    assert made["baseline"] == "grpo" and made["groups"][1]["differences"] == {}
    found = made["groups"][0]["differences"]["eval/accuracy"]
    assert found["each"] == pytest.approx([0.01, 0.02, 0.03])
    assert found["low"] == pytest.approx(0.02 - 0.02484, abs=1e-5)
    assert " ".join(arguments) in table.read_text(encoding="utf-8").replace("\\\n   ", "").replace("  ", " ")


def test_a_difference_that_is_clear_is_bold_and_pairs_that_differ_at_the_start_are_named(tmp_path, pairs):
    lines = [json.loads(line) for line in (pairs[2] / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["eval/accuracy"] -= 0.008  # 0.01, 0.02 and 0.022: 0.0173 and 0.0160 to either side
    (pairs[2] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = tmp_path / "table.md"
    made = report.report(pairs[:6], out=tmp_path / "out", table=table, baseline=pairs[3])
    assert "| gspo | 3 | **+0.017 [+0.001, +0.033]** |" in table.read_text() and "began from" not in table.read_text()
    assert made["verdicts"] == [
        "Held-out accuracy of gspo less that of grpo: +0.017 [+0.001, +0.033] over 3 seeds: gspo is more accurate."
    ]
    assert "<b>+0.017 [+0.001, +0.033]</b>" in Path(made["html"]).read_text(encoding="utf-8")
    lines[0]["eval/accuracy"] = 0.5
    (pairs[2] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.report(pairs[:6], out=tmp_path / "out", table=table)
    assert "Not all runs of one seed began from the same policy" in table.read_text()


def test_samples_show_special_tokens_and_short_rewards(tmp_path, undrawn):
    run = _fake(tmp_path / "run")
    texts = {"prompts": ["<|user|>1 < 2?<|end|>"], "answers": ["<y>"]}
    completions = ["so " * 1000 + "<|end|>"]
    scored = {"rewards": [np.float32(0.3)], "scores": {}, "special": ["<|user|>", "<|end|>", "<|"]}
    SamplesWriter(run).write(2, make_samples(completions=completions, **texts, **scored))
    page = Path(report.report([run])["html"]).read_text(encoding="utf-8")
    assert "<pre><b class=token>&lt;|user|&gt;</b>1 &lt; 2?<b class=token>&lt;|end|&gt;</b></pre>" in page
    assert "so  … " in page and "so <b class=token>&lt;|end|&gt;</b></pre>" in page  # the end of a long text is shown
    assert "<td class=n>0.3</td>" in page and "0.30000001" not in page and "<pre>&lt;y&gt;</pre>" in page


def test_runs_without_verdicts_are_compared_by_their_held_out_reward(tmp_path):
    """No number of theirs is called an accuracy, in text, table or picture."""
    for name, gain in (("grpo", 0.0), ("gspo", 0.1)):
        for seed in range(3):
            run = _fake(tmp_path / f"{name}-{seed}", seed=seed, name=name)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for line in lines:
                if (accuracy := line.pop("eval/accuracy", None)) is not None:
                    line |= {"eval/reward": 3 * accuracy + gain + seed / 1000, "eval/reward_stderr": 0.1}
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = [tmp_path / f"{name}-{seed}" for name in ("grpo", "gspo") for seed in range(3)]
    made = report.report(folders, out=tmp_path / "out", table=tmp_path / "table.md")
    assert made["verdicts"] == [
        "Held-out reward of gspo less that of grpo: +0.100 [+0.100, +0.100] over 3 seeds, the same for each: it takes "
        "more to know their spread."
    ]
    table, page = (tmp_path / "table.md").read_text(), (tmp_path / "out" / "report.html").read_text()
    assert table.startswith("| runs | held-out reward |") and table.index("| gspo |") < table.index("| grpo |")
    assert "ccuracy" not in table + re.sub(r"data:image/png;base64,[^\"]*", "", page)
    assert 'alt="Held-out reward, Reward, ' in page


def test_the_page_tells_where_a_run_began_and_what_changed(tmp_path, undrawn):
    run = _fake(tmp_path / "run")
    note(run, ORIGIN_FILE, folder="/runs/<a>", iteration=40, taken=["weights", "data"])
    change = {"field": "optimizer.learning_rate", "before": 1e-6, "after": 5e-7, "update": 3, "iteration": 2}
    write_changes(run, [change])
    made = report.report([run])
    page = Path(made["html"]).read_text(encoding="utf-8")
    assert f"<p>{run} began from /runs/&lt;a&gt;@40: weights, data</p>" in page
    assert f"<p>{run}: optimizer.learning_rate 1e-06 → 5e-07 from update 3 on</p>" in page
    assert made["groups"][0]["runs"][0]["changes"] == [change]
    write_changes(run, [])
    assert "Where runs began" in page and not (run / "changes.json").exists()


def _evaluated(run: Path, step: int, completions: list[str], *, reward: float) -> None:
    """Add an evaluation's examples to a run, and its rewards to the line of a step."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[step] |= {"eval/reward": reward, "eval/reward_stderr": 0.01, "eval/reward/<count>": reward}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = {"prompts": [f"<{i}>?" for i in range(len(completions))], "answers": [""] * len(completions)}
    scored = {"rewards": [reward] * len(completions), "scores": {}, "special": ["<eos>"]}
    SamplesWriter(run, after_step=step, folder="held_out").write(
        step, make_samples(completions=completions, **texts, **scored)
    )


def test_completions_before_and_after_are_side_by_side(tmp_path, undrawn):
    run = _fake(tmp_path / "run")
    _evaluated(run, 0, ["rambling <eos>", "also"], reward=0.1)
    made = report.report([run])
    assert "Before and after" not in Path(made["html"]).read_text() and not made["notes"], "there is no after yet"
    _evaluated(run, 8, ["1. fog", "2. hail"], reward=0.9)
    made = report.report([run])
    page = Path(made["html"]).read_text(encoding="utf-8")
    assert "<h2>Before and after: run</h2>" in page and "<th>update 0</th><th>update 8</th>" in page
    before, after = "rambling <b class=token>&lt;eos&gt;</b>", "1. fog"
    texts = "<pre>&lt;0&gt;?</pre>", *(f"<pre class=long>{text}</pre>" for text in (before, after))
    assert "".join(f"<td>{text}</td>" for text in texts) + "<td class=n>0.1</td><td class=n>0.9</td>" in page
    assert "<td>&lt;count&gt;</td><td class=n>0.100</td><td class=n>0.900</td>" in page
    assert made["notes"] == [], "the accuracy rose too"
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:  # as where no function scored anything
        line.pop("eval/reward/<count>", None)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "<h2>Before and after: run</h2><p>Means" in Path(report.report([run])["html"]).read_text(encoding="utf-8")


def test_a_run_that_games_its_reward_is_named(tmp_path, undrawn):
    run, other = _fake(tmp_path / "run", iterations=1), _fake(tmp_path / "other", name="grpo", iterations=1)
    _evaluated(run, 0, ["a"], reward=0.1)  # the accuracy falls from 0.1 to 0
    _evaluated(run, 2, ["b"], reward=0.9)
    made = report.report([run, other], out=tmp_path / "out")
    assert [text.startswith(f"{run}: the reward may be gamed") for text in made["notes"]] == [True]
    page = Path(made["html"]).read_text(encoding="utf-8")
    assert f"<h2>Read this first</h2><p><b>{run}: the reward may be gamed" in page
    assert page.index("Read this first") < page.index("Differences from")


def test_no_title_is_there_twice(tmp_path, undrawn):
    for count in (1, 2):
        folders = [_fake(tmp_path / f"{name}-0", name=name) for name in ("gspo", "grpo")[:count]]
        page = Path(report.report(folders, out=tmp_path / "out")["html"]).read_text(encoding="utf-8")
        titles = re.findall(r"<h[12]>(.*?)</h[12]>", page)
        assert len(set(titles)) == len(titles) and titles[0] == f"{count} run{'s' * (count > 1)} of 8 updates"


def _tables(file: Path) -> list[list[str]]:
    """Return the lines of each table of a markdown file."""
    parts = file.read_text(encoding="utf-8").split("\n\n")
    return [part.splitlines() for part in parts if part.startswith("|")]


VARIANTS = {"gspo": "none", "grpo": "none", "grpo, r2": "r2", "grpo, r3": "r3", "rspo": "none", "gmpo": "none"}


def _variant(folder: Path, label: str, *, seed: int = 0, minibatches: int = 3, last: float = 0.6) -> Path:
    """Write ten iterations of a run of the routing comparison, as the trainer would leave them."""
    routing = {"replay": VARIANTS[label], "balance_weight": 0.0}
    config = {"seed": seed, "objective": {"name": label.partition(",")[0]}, "routing": routing}
    folder = folder / f"{label.replace(', ', '_')}-{seed}"
    write_config(folder, config, command=f"train {label} {seed}")
    with MetricsWriter(folder) as writer:
        writer.write(0, {"eval/accuracy": 0.2})
        for i in range(10 * minibatches):
            iteration, minibatch = divmod(i, minibatches)
            late = iteration == 9  # the last tenth of the run
            row = {"iteration": iteration + 1, "minibatch": minibatch, "reward/mean": 0.25 * late + seed}
            row |= {"reward/mean": 2.0} if last < 0.6 and iteration < 5 else {}
            row |= {
                "routing/flip_rate": 0.01 * minibatch * (1 + late) + 0.02 * seed,
                "routing/router_kl": 1e-6 * minibatch,
            }
            row |= {"routing/flip_rate_per_layer": [0.01 * minibatch, 0.02 * minibatch]}
            row |= {"ratio/token_log_std": 0.03 * minibatch, "ratio/sequence_log_std": 0.002 * minibatch}
            clipped = 0.1 if label == "gspo" else 0.001
            row |= {"clip_fraction/token": clipped * minibatch, "clip_fraction/sequence": clipped * minibatch / 2}
            row |= {"mismatch/kl": 2e-9} if minibatch == 0 else {}
            row |= {"eval/accuracy": last if late else 0.6} if minibatch + 1 == minibatches else {}
            writer.write(i + 1, row)
    return folder


@pytest.fixture
def figures(monkeypatch):
    """Collect the figures of reports for a page; those for a phone are drawn too."""
    kept, picture = [], pictures.picture

    @contextmanager
    def keep(path, *, width, height):
        with picture(path, width=width, height=height) as figure:
            kept.extend([figure] if width == pictures.PAGE.width else [])
            yield figure

    monkeypatch.setattr(pictures, "picture", keep)
    return kept


def test_labels_leave_out_what_is_not_there(tmp_path):
    folders = [_variant(tmp_path, label) for label in VARIANTS]
    assert [group.label for group in runs.group_runs([runs.load_run(folder) for folder in folders])] == list(VARIANTS)
    weights = []
    for weight in (0.0, 0.5):  # 0 is a number like any other
        folder = tmp_path / f"weight {weight}"
        write_config(folder, {"routing": {"balance_weight": weight}}, command="")
        MetricsWriter(folder).write(0, {"eval/accuracy": 0.1})
        weights.append(runs.load_run(folder))
    assert [group.label for group in runs.group_runs(weights)] == ["balance_weight=0.0", "balance_weight=0.5"]
    with_and_without = [runs.load_run(folder) for folder in (folders[1], folders[2])]
    assert [group.label for group in runs.group_runs(with_and_without)] == ["replay=none", "replay=r2"]
    objectives = []
    for name, replay, correction in (("grpo", "none", ""), ("minirl", "none", "tis"), ("minirl", "r2", "tis")):
        settings = {"mismatch.correction": correction, "objective.name": name, "routing.replay": replay}
        objectives.append(runs.RunData(tmp_path / f"{name}-{replay}", [], settings, ""))
    assert [group.label for group in runs.group_runs(objectives)] == ["grpo", "minirl, tis", "minirl, tis, r2"]


def test_the_routing_page_shows_six_variants_that_can_be_read(tmp_path, figures):
    folders = [_variant(tmp_path, label, seed=seed) for label in VARIANTS for seed in (0, 1)]
    report.report(folders, out=tmp_path / "out", panels="routing")
    (figure,) = figures
    axes = {found.get_title(loc="left"): found for found in figure.axes}
    of_several = [panel.title for panel in panels.PANELS["routing"] if not panel.only_alone]
    assert list(axes) == of_several and len(axes) == 11  # all differences are 0, which no panel shows
    named = {title: {text.get_text() for text in found.texts} for title, found in axes.items()}
    for title in of_several:
        texts = named[title]
        accuracies = {f"60.0% {label}" if len(label) <= 10 else "60.0%" for label in VARIANTS}
        wanted = accuracies if title == "Held-out accuracy" else set(VARIANTS)
        assert wanted <= texts
    figure.draw_without_rendering()  # texts keep the size of their last draw, which was for the file
    page = figure.bbox
    for found in axes.values():
        names = [text.get_window_extent() for text in found.texts if text.get_text() in VARIANTS]
        assert all(box.x1 < page.x1 and box.y0 > page.y0 for box in names)
        assert all(above.y0 - below.y0 > 0.8 * below.height for below, above in itertools.pairwise(names))
    assert [text.get_text() for text in figure.texts[:6]] == list(VARIANTS)  # the legend
    assert max(text.get_window_extent().x1 for text in figure.texts) < page.x1
    report.report(folders, out=tmp_path / "out")
    left_out = ("response_length/mean", "actor/entropy")  # without data
    titles = [panel.title for panel in panels.PANELS["training"] if panel.metric not in left_out]
    assert [found.get_title(loc="left") for found in figures[1].axes] == titles


def test_an_axis_is_logarithmic_only_where_lines_are_far_apart(tmp_path, figures):
    folders = [_variant(tmp_path, label) for label in ("gspo", "grpo")]
    for shown in (folders, folders[:1]):
        report.report(shown, out=tmp_path / "out", panels="routing")
    both, alone = ({found.get_title(loc="left"): found for found in figure.axes} for figure in figures)
    clipped = both["Clip fraction, tokens"]
    assert clipped.get_yscale() == "log" and clipped.get_ylim() == pytest.approx((0.001 / 1.6, 0.16))
    assert clipped.yaxis.get_major_formatter()(0.001, 0) == "0.1%"
    assert alone["Clip fraction, tokens"].get_yscale() == "linear"
    assert all(
        both[title].get_yscale() == "linear" for title in ("Reward", "Router KL, old to new", "Routing flip rate")
    )
    tiny = both["Sampler to trainer KL"].yaxis.get_major_formatter()
    assert [tiny(value, 0) for value in (0.0, 2e-9, 2.5e-9, 0.5)] == ["0", "2e-9", "2.5e-9", "0.5"]


def test_a_single_group_has_a_map_of_layers_by_mini_batch(tmp_path, figures):
    report.report([_variant(tmp_path, "grpo", seed=seed) for seed in (0, 1)], out=tmp_path / "out", panels="routing")
    (axes,) = (found for found in figures[0].axes if found.get_title(loc="left") == "Flip rate by layer and mini-batch")
    (mesh,) = axes.collections
    # Layers 0 and 1 flip 1% and 2% more with each mini-batch.
    np.testing.assert_allclose(mesh.get_array(), [[0, 0.01, 0.02], [0, 0.02, 0.04]], atol=1e-9)
    assert axes.get_xlim() == (-0.5, 2.5) and axes.get_ylim() == (-0.5, 1.5)  # a cell is around its number


def test_a_label_on_a_logarithmic_axis_stands_at_its_line(tmp_path):
    with drawing.picture(tmp_path / "x.png", width=4, height=3) as figure:
        axes = figure.add_axes((0.1, 0.2, 0.6, 0.7))
        axes.set(yscale="log", ylim=(1e-4, 1))
        drawing.label_ends(axes, [(1e-2, "middle", "#000000"), (0.0, "nothing", "#000000")], size=10)
    assert {text.get_text(): pytest.approx(text.get_position()[1]) for text in axes.texts} == {
        "middle": 0.5,
        "nothing": 0,
    }


def test_the_routing_table_worked_by_hand(tmp_path, capsys):
    folders = [_variant(tmp_path, "grpo", seed=0, last=0.2), _variant(tmp_path, "grpo", seed=1)]
    folders += [_variant(tmp_path, "grpo, r2", seed=seed, minibatches=2) for seed in (0, 1)]
    table = tmp_path / "table.md"
    flags = ["--panels=routing", f"--out={tmp_path / 'out'}", f"--table={table}"]
    assert report.main([*map(str, folders), *flags]) == 0
    text = table.read_text(encoding="utf-8")
    header, _, *rows = [line.strip("| ").split(" | ") for line in _tables(table)[0]]
    assert header[3:5] == ["collapsed", "flip rate, 0 / 1 / last"]
    # Two runs of three mini-batches: reward (0.25 + 1.25)/2; flips 0.02·m + 0.02·seed, means 1%, 3%, 5%; spreads
    # 0.03·(0 + 1 + 2)/3, 0.002·…; clipped 0.001·…; one of the two had a reward of 2 before. Two
    # mini-batches: flips 1% and 3%, the last one; spreads and clip fractions are half as large.
    r2 = ["0.600 [0.600, 0.600]", "0.750", "0 of 2", "1.00% / 3.00%", "0.0150", "0.00100", "0.050%", "0.025%"]
    free = ["0.400 [0.200, 0.600]", "0.750", "1 of 2", "1.00% / 3.00% / 5.00%", "0.0300", "0.00200", "0.100%", "0.050%"]
    assert rows == [["replay=r2", *r2, "2.0e-09"], ["replay=none", *free, "2.0e-09"]]
    command = text.split("```bash\n")[1].split("\n```")[0].replace("\\\n", "")
    assert command.split() == ["python", "-m", "gspo_jax.report", *map(str, folders), *flags]
    (none, r2) = report.report(folders, out=tmp_path / "out")["groups"]
    assert [run["collapsed"] for run in none["runs"]] == [True, False]
    assert r2["minibatches"]["routing/flip_rate"] == pytest.approx([0.01, 0.03])


def test_labels_are_moved_apart_and_stay_inside():
    assert drawing.spread_labels([0.1, 0.5], gap=0.08) == [0.1, 0.5]
    assert drawing.spread_labels([0.5, 0.52], gap=0.08) == pytest.approx([0.47, 0.55])  # centred on the middle of both
    for ends in ([0.93, 0.95, 0.97], [0.0, 0.01, 0.02], [0.5] * 12):
        close = drawing.spread_labels(ends, gap=0.08)
        assert min(close) >= 0 and max(close) <= 0.96 and min(np.diff(close)) > 0.079


@pytest.mark.parametrize("count", [2, 12, 30])
def test_labels_at_the_ends_of_lines_do_not_overlap(tmp_path, count):
    with drawing.picture(tmp_path / "x.png", width=4, height=3) as figure:
        axes = figure.add_axes((0.1, 0.2, 0.6, 0.7))
        axes.set_ylim(0, 10)
        drawing.label_ends(axes, [(5 + i / 100, f"gspo_token{i}", "#000000") for i in range(count)], size=10.5)
        boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == count and len(axes.lines) in (count - 1, count)  # moved labels (all or all but one) are joined
    glyphs = axes.texts[0].get_fontsize() * figure.dpi / 72
    assert min(np.diff([box.y0 for box in boxes])) > 1.1 * glyphs
    assert boxes[0].y1 > axes.bbox.y0 and boxes[-1].y0 < axes.bbox.y1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["{}/rnu"], r"folder .* does not exist; did you mean .*run\?"),
        (["{}/run", "--jsn=x"], r"did you mean --json\?"),
        (["{}/run", "--tabel=x"], r"did you mean --table\?"),
        (["{}/run", "--baseline={}/rnu"], "--baseline=.*/rnu is none of the runs; name one of those"),
        (["{}/run", "--panels=router"], r"'router'.*training.*routing"),
        (["{}/run", "--table={}/run/metrics.jsonl/x"], "metrics.jsonl"),
        (["{}/empty"], "metrics.jsonl has no complete line yet"),
        (["{}"], "metrics.jsonl is missing"),
        (["{}/run", "--out={}/run/metrics.jsonl/x"], "cannot be written to .*choose another --out"),
        (["{}/run", "--json={}/run/metrics.jsonl/x"], "metrics.jsonl"),
        ([], "required: RUN"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, says):
    _fake(tmp_path / "run", iterations=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"st')
    assert report.main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error) and error.count("\n") == 1


@pytest.mark.parametrize("content", ["null", "[]", "5", '{"a": ', '{"a": ' + "[" * 100_000, "\xff"])
@pytest.mark.parametrize(
    "name", ["config.json", "samples/step_000002.jsonl", "held_out/step_000002.jsonl", "metrics.jsonl"]
)
def test_a_damaged_file_of_a_run_is_one_sentence(tmp_path, capsys, name, content):
    file = _fake(tmp_path / "run", iterations=1) / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content.encode("latin-1") + b"\n")
    assert report.main([str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file} ") and error.count("\n") == 1


@pytest.mark.parametrize("name", ["report", "report/report.png", "report/report.html"])
def test_a_report_is_not_written_through_a_link(tmp_path, capsys, name):
    run, victim = _fake(tmp_path / "run", iterations=1), tmp_path / "victim"
    victim.mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(victim / "file" if "/" in name else victim)
    assert report.main([str(run)]) == 2
    assert re.fullmatch(rf"error: {run / name} is a link to .*outside the run folder.*\n", capsys.readouterr().err)
    assert not list(victim.iterdir())


@pytest.mark.parametrize("name", ["report.png", "report-narrow.png", "report.html"])
def test_a_report_elsewhere_replaces_links(tmp_path, name):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "victim")
    assert report.main([str(_fake(tmp_path / "run", iterations=1)), f"--out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "out" / name).is_symlink()


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    drawing.text_width.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(_fake(tmp_path / "run", iterations=1))]) == 2
    assert f"run {installs.of_extra('report')}\n" in capsys.readouterr().err
