"""A run's files in a bucket: downloaded, uploaded, never older than a checkpoint.

A local folder stands in for the bucket; the slow tests use an emulator of Google Cloud Storage.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from gspo_jax.errors import UserError
from gspo_jax.folder import storage as storage_lib
from gspo_jax.folder.metrics import MetricsWriter, read_metrics
from gspo_jax.folder.samples import SamplesWriter, make_samples
from gspo_jax.folder.storage import RunFolder, find, open_folder
from gspo_jax.parallel.compilation import SealedCache
from gspo_jax.training.checkpoint import Checkpointer, load_newest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Return the local folder that stands in for gs://bucket/run."""
    place = epath.Path(tmp_path / "bucket" / "run")
    monkeypatch.setattr(storage_lib, "find", lambda workdir: place)
    return place


def names(bucket) -> list[str]:
    return sorted(str(Path(path).relative_to(bucket)) for path in Path(bucket).rglob("*") if Path(path).is_file())


def test_a_folder_of_this_machine_stays_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_folder("runs/a") as folder:
        folder.publish()
        folder.share()
        assert (folder.name, folder.local, folder.bucket) == ("runs/a", tmp_path / "runs" / "a", None)
        assert folder.checkpoints == tmp_path / "runs" / "a" / "checkpoints"
    assert not (tmp_path / "runs").exists()


LINKS = ("config.json", "config.json.tmp", "metrics.jsonl", "metrics.jsonl.old", "samples", "samples/step_000001.jsonl")


@pytest.mark.faults
@pytest.mark.parametrize("name", [*LINKS, "tb", "report", "checkpoints", "checkpoints/1"])
@pytest.mark.parametrize("target", ["{}/victim", "{}/nothing", "../victim"])
def test_a_run_folder_with_a_link_out_of_it_is_refused(tmp_path, name, target):
    (tmp_path / "victim").mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target.format(tmp_path) if "{" in target else "../" * name.count("/") + target)
    with (
        pytest.raises(UserError, match=rf"^{link} is a link to .*, outside the run folder, .*; remove it") as error,
        open_folder(tmp_path / "run"),
    ):
        raise AssertionError("opened")
    assert "\n" not in str(error.value)


def test_a_run_folder_may_be_a_link_and_have_links_inside(tmp_path):
    (tmp_path / "disk" / "checkpoints").mkdir(parents=True)
    (tmp_path / "disk" / "newest").symlink_to("checkpoints")
    (tmp_path / "run").symlink_to("disk")
    with open_folder(tmp_path / "run") as folder, MetricsWriter(folder.local) as writer:
        writer.write(1, {"loss": 0.5})
    assert (tmp_path / "disk" / "metrics.jsonl").is_file()


def test_places():
    assert find("gs://bucket/a/run") == epath.Path("gs://bucket/a/run")
    assert str(find("gs://bucket/a/run") / "checkpoints") == "gs://bucket/a/run/checkpoints"
    with pytest.raises(UserError, match=r"^s3://bucket/run is neither .*; write a bucket as gs://NAME/RUN$"):
        find("s3://bucket/run")


def test_the_next_machine_finds_what_the_last_one_left(bucket):
    with open_folder("gs://bucket/run") as folder:
        (folder.local / "samples").mkdir()
        (folder.local / "samples" / "a.jsonl").write_text("one")
        (folder.local / "metrics.jsonl").write_text("line 1\n")
        (folder.local / "half.tmp").write_text("not yet")
        folder.publish()
        assert names(bucket) == ["metrics.jsonl", "samples/a.jsonl"]
        (bucket / "checkpoints" / "1").mkdir(parents=True)
        (bucket / "checkpoints" / "1" / "big").write_text("straight to the bucket")
        with open(folder.local / "metrics.jsonl", "a") as file:
            file.write("line 2\n")
        (folder.local / "samples" / "a.jsonl").unlink()
        local = folder.local
    assert not local.exists()
    assert names(bucket) == ["checkpoints/1/big", "metrics.jsonl"]
    with open_folder("gs://bucket/run") as folder:
        assert folder.local != local
        assert (folder.local / "metrics.jsonl").read_text() == "line 1\nline 2\n"
        assert not (folder.local / "checkpoints").exists()
        assert folder.checkpoints == bucket / "checkpoints"
        (folder.local / "metrics.jsonl").unlink()
        folder.publish()
        assert names(bucket) == ["checkpoints/1/big"], "downloaded files are known to be in the bucket"


def test_only_what_has_changed_is_copied_and_not_too_often(bucket):
    with open_folder("gs://bucket/run") as folder:
        for name in ("a", "b"):
            (folder.local / name).write_text(name)
        folder.publish()
        (bucket / "a").write_text("untouched")
        (folder.local / "b").write_text("newer")
        folder.publish(every_s=60)
        assert (bucket / "b").read_text() == "b", "less than a minute has passed"
        folder.publish()
        assert [(bucket / name).read_text() for name in ("a", "b")] == ["untouched", "newer"]


def test_another_process_publishes_nothing_and_gets_what_the_first_has(bucket, monkeypatch):
    with open_folder("gs://bucket/run") as first, open_folder("gs://bucket/run") as second:
        (first.local / "coldstart").mkdir()
        (first.local / "coldstart" / "config.json").write_text("{}")
        first.share()
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        (second.local / "mine").write_text("")
        second.share()
        assert (second.local / "coldstart" / "config.json").read_text() == "{}"
        assert names(bucket) == ["coldstart/config.json"]


def test_a_bucket_that_fails_later_does_not_end_the_run(bucket, monkeypatch, caplog):
    with open_folder("gs://bucket/run") as folder:
        (folder.local / "a").write_text("a")
        with monkeypatch.context() as broken:
            broken.setattr(RunFolder, "_upload", lambda *_: (_ for _ in ()).throw(OSError("503")))
            folder.publish()
        assert "not up to date (503)" in caplog.text and names(bucket) == []
        folder.publish(every_s=60)  # a failed upload does not count as a copy, so the next call retries
        assert names(bucket) == ["a"]


def test_a_bucket_that_cannot_be_used_is_told_at_once(tmp_path, bucket):
    (tmp_path / "bucket").write_text("a file where the bucket should be")
    with (
        pytest.raises(UserError, match=r"cannot use .*; check that the bucket exists and that this machine may write"),
        open_folder("gs://bucket/run"),
    ):
        pass


@pytest.mark.slow  # needs gcsfs
def test_a_bucket_that_nothing_serves_is_one_sentence_soon(monkeypatch):
    """Not after the library's own six tries of each request."""
    monkeypatch.setattr(storage_lib, "REACH_S", 0.1)
    with socket.create_server(("localhost", 0)) as server:
        place = f"localhost:{server.getsockname()[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", place)
        storage_lib.check_client("gs://bucket/run")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{place}")
    says = (
        r"^cannot use gs://bucket/run: localhost cannot be reached \(Connection refused\); .* or give a local folder$"
    )
    with pytest.raises(UserError, match=says), open_folder("gs://bucket/run"):
        pass


def test_metrics_and_samples_go_on_after_the_machine_is_lost(bucket):
    """After a resume, steps past the checkpoint appear once, locally and in the bucket."""
    with open_folder("gs://bucket/run") as folder, MetricsWriter(folder.local) as writer:
        samples = SamplesWriter(folder.local)
        texts = {"prompts": ["p"], "completions": ["c"], "rewards": [1.0], "answers": ["a"]}
        for step in (1, 2, 3):
            writer.write(step, {"loss": 0.5})
            samples.write(step, make_samples(scores={}, special=[], **texts))
        folder.publish()
    with open_folder("gs://bucket/run") as folder, MetricsWriter(folder.local, after_step=2) as writer:
        SamplesWriter(folder.local, after_step=2)
        writer.write(3, {"loss": 0.25})
        folder.publish()
    assert [(row["step"], row["loss"]) for row in read_metrics(bucket)] == [(1, 0.5), (2, 0.5), (3, 0.25)]
    assert [name for name in names(bucket) if name.startswith("samples")] == [
        *("samples/step_000001.jsonl", "samples/step_000002.jsonl")
    ]


SERVER = """
import sys
from gcp_storage_emulator.server import create_server
create_server("localhost", int(sys.argv[1]), in_memory=True, default_bucket="bucket").run()
"""


@pytest.fixture(scope="module")
def storage():
    """Return the environment in which gs:// is a local emulator with a bucket named `bucket`."""
    pytest.importorskip("gcp_storage_emulator")
    pytest.importorskip("gcsfs")
    url = f"http://localhost:{9100 + os.getpid() % 500}"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, url.rpartition(":")[2]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(3)
        assert server.poll() is None, f"nothing serves {url}"
        yield {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "JAX_PLATFORMS": "cpu"}
    finally:
        server.terminate()
        server.wait()


def python(environment: dict[str, str], *arguments: str, code: int = 0) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.faults
def test_a_container_without_gcloud_copies_a_folder(storage, tmp_path):
    put = "from etils import epath; f = epath.Path('gs://bucket/models/Mine'); f.mkdir(parents=True)"
    put += "; (f / 'config.json').write_text('{}'); (f / 'parts').mkdir(); (f / 'parts' / 'a').write_text('weights')"
    python(storage, "-c", put)
    shutil.copytree(ROOT / "launch", tmp_path / "tree" / "launch")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "mkdir"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    command = ["bash", str(tmp_path / "tree" / "launch" / "worker.sh"), "fetch", "gs://bucket/models/Mine"]
    for _ in range(2):  # a second start copies again
        subprocess.run(command, env=storage | {"PATH": str(tmp_path / "bin")}, check=True, timeout=120)
    here = tmp_path / "fetched" / "Mine"
    found = sorted(str(file.relative_to(here)) for file in here.rglob("*") if file.is_file())
    assert found == ["config.json", "parts/a"] and (here / "parts" / "a").read_text() == "weights"


@pytest.mark.faults
def test_a_run_in_a_bucket_resumes_on_a_new_machine(storage, tmp_path):
    command = ["-m", "gspo_jax.train", "--config=tests/pod_config.py:countdown,single", "--workdir=gs://bucket/run"]
    command += ["--config.sampling.slots=4", f"--config.data.data_dir={tmp_path / 'data'}"]
    command += ["--config.checkpoint.every=1"]
    python(storage, *command, "--config.iterations=2")
    assert "resuming from iteration 2 in gs://bucket/run" in python(storage, *command, "--config.iterations=3")
    evaluated = python(storage, "-m", "gspo_jax.evaluate", *command[2:-1])
    assert "iteration 3: mean@" in evaluated
    look = "from etils import epath; print(epath.Path('gs://bucket/run/metrics.jsonl').read_text())"
    rows = [json.loads(line) for line in python(storage, "-c", look).splitlines() if line.startswith("{")]
    steps = [row["step"] for row in rows]
    assert steps == list(range(len(steps))) and rows[-1]["iteration"] == 3
    branch = command[:-1]
    branch[branch.index("--workdir=gs://bucket/run")] = "--workdir=gs://bucket/branch"
    began = python(storage, *branch, "--from=gs://bucket/run@2", "--config.iterations=1", "--config.checkpoint.every=5")
    assert "beginning from iteration 2 (update 4) of gs://bucket/run: weights, optimizer moments and data po" in began
    resumed = python(storage, *branch, "--config.iterations=2", "--config.checkpoint.every=5")
    assert "this run began from iteration 2 (update 4) of gs://bucket/run" in resumed
    assert '{"step": 2}' in python(storage, "-c", look.replace("run/metrics.jsonl", "branch/saved.json"))
    assert "cannot use gs://nowhere/run" in python(
        storage, *command[:3], "--workdir=gs://nowhere/run", *command[4:], code=2
    )


@pytest.mark.faults
def test_a_damaged_program_in_a_bucket_is_removed(storage, monkeypatch):
    for name, value in storage.items():
        monkeypatch.setenv(name, value)
    cache, file = SealedCache("gs://bucket/compiled", max_size=-1), find("gs://bucket/compiled/key-cache")
    cache.put("key", b"program")
    assert cache.get("key") == b"program"
    file.write_bytes(file.read_bytes()[:-1])
    assert cache.get("key") is None and not file.exists()


@pytest.mark.faults
def test_a_save_that_was_cut_off_is_no_checkpoint(storage, monkeypatch):
    for name, value in storage.items():
        monkeypatch.setenv(name, value)
    place = find("gs://bucket/cut")
    shapes = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    shardings = {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    checkpointer = Checkpointer(place, keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": jnp.full(3, float(step))}, {"iteration": step})
    checkpointer.close()
    assert sorted(path.name for path in place.iterdir()) == ["2", "3"]
    (place / "3" / "commit_success.txt").unlink()
    restored = load_newest(place, shapes, shardings)
    assert restored is not None and restored.step == 2 and restored.state["w"].tolist() == [2.0, 2.0, 2.0]
    checkpointer = Checkpointer(place, keep=2)
    assert checkpointer.latest == 2
    checkpointer.save(3, {"w": jnp.full(3, 4.0)}, {"iteration": 3})
    checkpointer.close()
    restored = load_newest(place, shapes, shardings)
    assert restored is not None and restored.step == 3 and restored.state["w"].tolist() == [4.0, 4.0, 4.0]
