"""metrics.jsonl after crashes, with a failing TensorBoard and with odd values; samples and config.json."""

import json
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from gspo_jax.errors import UserError
from gspo_jax.folder import lines, notes, tensorboard
from gspo_jax.folder.metrics import MetricsWriter, read_metrics
from gspo_jax.folder.notes import read_config
from gspo_jax.folder.samples import SamplesWriter, make_samples, read_samples
from gspo_jax.versions import versions


def _write(workdir: Path, steps: range, *, after_step: int | None = None) -> None:
    with MetricsWriter(workdir, after_step=after_step) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 8, "routing/flip_rate_per_layer": [0.0, step / 4]})


def _events(workdir: Path) -> list[Event]:
    """Return the events of a run in the order in which TensorBoard reads them, that of the files' names."""
    return [event for path in sorted((workdir / "tb").iterdir()) for event in _events_of(path)]


def _events_of(path: Path) -> list[Event]:
    """Read TFRecords by hand: length (8 bytes), its CRC (4), data, CRC (4)."""
    events, data = [], path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_values_become_strict_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            np.int64(0),
            {
                "python": 0.5,
                "count": 3,
                "skipped": np.bool_(True),
                "float32": np.float32(0.1),
                "jax": jnp.float32(0.25),
                "bfloat16": jnp.bfloat16(1.5),
                "nan": float("nan"),
                "list": jnp.array([0.5, jnp.inf]),
            },
        )
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row.pop("time") > 1.7e9
    assert row == {
        "step": 0,
        "python": 0.5,
        "count": 3,
        "skipped": 1,
        "float32": 0.1,
        "jax": 0.25,
        "bfloat16": 1.5,
        "nan": None,
        "list": [0.5, None],
    }


def test_float32_reads_back_exactly(tmp_path):
    values = np.random.default_rng(0).normal(size=200).astype(np.float32)
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"x": values})
    assert np.array_equal(np.asarray(read_metrics(tmp_path)[0]["x"], np.float32), values)


@pytest.mark.parametrize("value", ["text", None, np.zeros((2, 2)), np.zeros(lines.MAX_LIST + 1)])
def test_what_is_no_metric_is_refused_by_name(tmp_path, value):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="metric actor/odd"):
        writer.write(0, {"actor/odd": value})


def test_lines_are_on_disk_before_the_process_dies(tmp_path):
    program = (
        "import os, signal, sys; from gspo_jax.folder.metrics import MetricsWriter; w = MetricsWriter(sys.argv[1])\n"
        "for step in range(5): w.write(step, {'x': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    code = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode
    assert code == -signal.SIGKILL
    assert [row["x"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.faults
@pytest.mark.parametrize("after_step", [3, 5])
def test_no_step_twice_and_none_missing_wherever_the_line_was_cut(tmp_path, after_step):
    whole = tmp_path / "whole"
    _write(whole, range(10))
    text = (whole / "metrics.jsonl").read_bytes()
    start_of_last = text[:-1].rindex(b"\n") + 1
    cut_run = tmp_path / "cut"
    cut_run.mkdir()
    for cut in range(start_of_last, len(text), 7):
        (cut_run / "metrics.jsonl").write_bytes(text[:cut])
        _write(cut_run, range(after_step + 1, 12), after_step=after_step)
        lines = [json.loads(line) for line in (cut_run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(12))
        assert [line["reward/mean"] for line in lines] == [step / 8 for step in range(12)]


def test_a_line_that_is_cut_while_an_evaluation_joins_it_is_completed(tmp_path):
    """A checkpoint covers the line but not the evaluation, which the resumed run repeats; lost data reads as zeros."""

    def evaluate(writer: MetricsWriter) -> None:
        writer.write(3, {"eval/accuracy": 0.25, "eval/failed": 0.0})

    _write(tmp_path, range(4))
    path = tmp_path / "metrics.jsonl"
    covered = path.read_bytes()
    with MetricsWriter(tmp_path, after_step=3) as writer:
        evaluate(writer)
    whole = path.read_bytes()
    for cut in range(len(covered) - 1, len(whole)):
        for rest in (b"", bytes(len(whole) - cut), b"\0\n"):
            path.write_bytes(whole[:cut] + rest)
            with MetricsWriter(tmp_path, after_step=3) as writer:
                evaluate(writer)
            assert path.read_bytes() == whole, cut


def test_resume_keeps_lines_byte_for_byte(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"x": 0.1 + 0.2, "y": float("nan"), "z": [1, 2.5], "f": np.float32(1 / 3)})
        writer.write(1, {"x": 1})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    MetricsWriter(tmp_path, after_step=0).close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:1]


def test_a_repeated_evaluation_adds_only_what_is_missing(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(4, {"reward/mean": 0.5})
        writer.write(4, {"eval/accuracy": 0.25})
    with MetricsWriter(tmp_path, after_step=4) as writer:
        writer.write(4, {"eval/accuracy": 0.75, "eval/format": 1.0})
        writer.write(4, {"eval/accuracy": 0.5})
        with pytest.raises(ValueError, match="step 3 come after step 4"):
            writer.write(3, {"x": 0})
        writer.write(5, {"reward/mean": 0.75})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]  # one line per step; an evaluation goes into the line of its update
    assert [{name: value for name, value in row.items() if name != "time"} for row in rows] == [
        {"step": 4, "reward/mean": 0.5, "eval/accuracy": 0.25, "eval/format": 1.0},
        {"step": 5, "reward/mean": 0.75},
    ]


def test_a_fresh_start_sets_the_old_lines_aside(tmp_path):
    _write(tmp_path, range(5))
    _write(tmp_path, range(2))
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]
    assert len((tmp_path / "metrics.jsonl.old").read_text().splitlines()) == 5


def test_a_gap_before_the_resumed_step_is_said(tmp_path, caplog):
    _write(tmp_path, range(3))
    MetricsWriter(tmp_path, after_step=6).close()
    assert "ends at step 2, but the run continues from step 6" in caplog.text


def test_tensorboard_gets_scalars_and_spread_lists(tmp_path):
    _write(tmp_path, range(3))
    _write(tmp_path, range(2, 4), after_step=1)
    events = _events(tmp_path)
    seen = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert (2, "reward/mean", 0.25) in seen
    assert (2, "routing/flip_rate_per_layer/1", 0.5) in seen
    # The second file opens by telling TensorBoard to drop step 2 of the first.
    assert [event.step for event in events if event.session_log.status] == [0, 2]


def test_tensorboard_follows_a_clock_that_was_set_back(tmp_path, monkeypatch):
    """TensorBoard reads the files in the order of their names; events reach the disk within seconds all the same."""
    now = time.time()
    for start in range(3):
        monkeypatch.setattr(time, "time", lambda hours=start: now - 3600 * hours)
        _write(tmp_path, range(start, start + 1), after_step=start - 1 if start else None)
    assert [event.step for event in _events(tmp_path) if event.summary.value] == [0, 1, 2]
    monkeypatch.setattr(tensorboard, "_TB_FLUSH_S", 0.0)
    with MetricsWriter(tmp_path, after_step=2) as writer:
        for step in (3, 4):
            writer.write(step, {"x": 0.5})
            monkeypatch.setattr(time, "time", lambda: now - 36000)
        assert _events_of(max((tmp_path / "tb").iterdir()))[-1].step == 4


@pytest.mark.faults
@pytest.mark.parametrize("when", ["at the start", "later"])
def test_training_goes_on_without_tensorboard(tmp_path, monkeypatch, caplog, when):
    if when == "at the start":
        (tmp_path / "tb").write_text("a file where the folder should be")
    else:
        written = tensorboard.EventsWriter.write_event

        def full_after_three(self, event):
            if event.step >= 3:
                raise OSError(28, "No space left on device")
            return written(self, event)

        monkeypatch.setattr(tensorboard.EventsWriter, "write_event", full_after_three)
    _write(tmp_path, range(50))
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(50))
    assert caplog.text.count("TensorBoard output is off") == 1


def test_reader_leaves_out_a_half_written_line_and_names_a_broken_one(tmp_path):
    _write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text + '{"step": 3, "rew')
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    path.write_text(text.replace('{"step": 1,', '{"ste\0p": 1,'))
    with pytest.raises(UserError, match="line 2 is not"):
        read_metrics(tmp_path)
    _write(tmp_path, range(3, 4), after_step=2)  # a resume must not fail on the broken line
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 2, 3]


def test_reader_names_the_nearest_folder(tmp_path):
    (tmp_path / "tiny").mkdir()
    with pytest.raises(UserError, match=r"did you mean .*tiny\?"):
        read_metrics(tmp_path / "tiyn")
    with pytest.raises(UserError, match=r"metrics.jsonl is missing"):
        read_metrics(tmp_path / "tiny")


def test_samples_and_config(tmp_path):
    writer = SamplesWriter(tmp_path)
    for step in (4, 10):
        texts = {"prompts": ["<bos>1+1="], "completions": ["2\x1b≤\u2028\ud800<eos>"], "answers": ["2"]}
        scores = {"exact": np.ones(1, np.float32), "judge": np.full(1, np.nan)}
        special = ["<pad>", "<bos>", "<eos>"]
        writer.write(step, make_samples(rewards=jnp.ones(1), scores=scores, special=special, **texts))
    assert (tmp_path / "samples" / "step_000010.jsonl").exists()
    sample = {"prompt": "<bos>1+1=", "completion": "2\x1b≤\u2028\ud800<eos>", "reward": 1.0, "answer": "2"}
    sample |= {"special": ["<bos>", "<eos>"], "scores": {"exact": 1.0, "judge": None}}  # the tokens that it has
    assert read_samples(tmp_path)[10] == [sample]
    assert read_samples(tmp_path, "held_out") == {}
    SamplesWriter(tmp_path, after_step=4)
    assert list(read_samples(tmp_path)) == [4]

    assert read_config(tmp_path) is None
    notes.write_config(tmp_path, {"seed": 1, "model": {"layers": 4}}, command="python -m gspo_jax.train")
    start = {"command": "python -m gspo_jax.train", "versions": versions()}
    assert read_config(tmp_path) == {**start, "seed": 1, "model": {"layers": 4}}


OLD_SAMPLE = {"prompt": "p", "completion": "c", "reward": None, "answer": ""}


def test_samples_of_older_runs_lack_fields(tmp_path):
    (tmp_path / "samples").mkdir()
    file = tmp_path / "samples" / "step_000001.jsonl"
    file.write_text(json.dumps(OLD_SAMPLE) + "\n")
    assert read_samples(tmp_path)[1] == [OLD_SAMPLE | {"special": [], "scores": {}}]
    for damaged in ({"scores": [1.0]}, {"scores": {"a": "1"}}, {"special": [""]}, {"reward": "1"}, {"answer": None}):
        file.write_text(json.dumps(OLD_SAMPLE | damaged) + "\n")
        with pytest.raises(UserError, match=r"step_000001.jsonl has a line that is not a sample; delete it"):
            read_samples(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "samples/step_000001.jsonl", "metrics.jsonl"])
def test_a_temporary_file_that_is_a_link_is_not_followed(tmp_path, name):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    _write(run, range(1, 3))
    (run / "samples").mkdir()
    (run / f"{name}.tmp").symlink_to(victim)
    notes.write_config(run, {"seed": 1}, command="train")
    _write(run, range(2, 3), after_step=1)
    samples = SamplesWriter(run, after_step=1)
    samples.write(
        1, make_samples(prompts=["a"], completions=["b"], rewards=[1.0], answers=["c"], scores={}, special=[])
    )
    assert victim.read_text() == "precious"
    assert notes.fields_of(read_config(run)) == {"seed": 1} and len(read_samples(run)[1]) == 1
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
