"""What comes from elsewhere is a file, in its own folder; paths are spelled as every library reads them."""

import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from etils.epath import gpath

from gspo_jax import convert, foreign, score
from gspo_jax.data import benchmarks, contents, files, prepared
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.notes import read_config, read_saved
from gspo_jax.folder.samples import read_samples
from gspo_jax.models import huggingface, peft
from gspo_jax.models.lora import Adapters
from gspo_jax.setup import inputs
from gspo_jax.training import checkpoint
from gspo_jax.training.checkpoint import Checkpointer, load_newest
from tests.pods import ROOT, drawer
from tests.tiny import CONFIG

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.faults


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has at most 107 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fifo": (os.mkfifo, "is a FIFO, which nothing may ever fill"),
    "socket": (make_socket, "is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), r"(to /dev/zero, outside|is a device)"),
    "folder": (Path.mkdir, "(is a folder|Is a directory)"),
    "link": (lambda path: path.symlink_to("/etc/hostname"), "to /etc/hostname, outside"),
    "dangling link": (lambda path: path.symlink_to("/nowhere/at/all"), "to /nowhere/at/all, outside"),
}
"""What may be in a file's place, and what is said of it."""


def adapters(folder: Path) -> Path:
    (folder / peft.CONFIG).write_text("{}")
    return folder


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run: config": ("config.json", read_config),
    "run: saved": ("saved.json", read_saved),
    "run: metrics": ("metrics.jsonl", read_metrics),
    "run: samples": ("samples/step_000001.jsonl", read_samples),
    "run: held out": ("held_out/step_000001.jsonl", lambda folder: read_samples(folder, "held_out")),
    "run: anything": ("features.json", storage.check_contents),
    "run: lease": ("lease.json", storage.check_contents),
    "model: config": ("config.json", huggingface.read_config),
    "model: one file": ("model.safetensors", lambda f: huggingface.load_params(f, CONFIG)),
    "model: index": ("model.safetensors.index.json", lambda f: huggingface.load_params(f, CONFIG)),
    "model: tokenizer": ("tokenizer.json", Tokenizer.load),
    "model: digests": ("merges.txt", lambda f: inputs.of_run(_Config(), f)),
    "adapters: config": ("adapter_config.json", lambda f: peft.read_pairs(f, CONFIG, Adapters(rank=2))),
    "adapters: tensors": (
        "adapter_model.safetensors",
        lambda f: peft.read_pairs(adapters(f), CONFIG, Adapters(rank=2)),
    ),
    "data": ("train.jsonl", lambda f: list(files.read(str(f), "train"))),
    "data: part of a file": ("x-00000-of-00001.jsonl", lambda f: list(files.read(str(f / "x"), "train"))),
    "data: prepared": ("dataset_info.json", lambda f: prepared.open_prepared(str(f))),
    "data: a shard": ("x.array_record-00000-of-00001", lambda f: prepared.open_prepared(str(f))),
    "data: benchmark": ("test.jsonl", lambda f: benchmarks.read("livecodebench", str(f))),
}
"""A file in a folder, and what reads it."""


class _Config:
    """The part of a config that `inputs.of_run` would read next."""


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_of_the_folder_is_refused_before_it_is_opened(tmp_path, reader, other):
    name, read = READERS[reader]
    make, says = OTHERS[other]
    path = tmp_path / "folder" / name
    path.parent.mkdir(parents=True)
    make(path)
    if other == "folder" and "." in name and reader in ("data", "data: a shard", "data: part of a file"):
        return  # which may have any name
    with pytest.raises(UserError, match=says) as error:
        read(tmp_path / "folder")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
def test_files_that_a_user_names_are_files(tmp_path, kind):
    path = tmp_path / "x.jsonl"
    OTHERS[kind][0](path)
    readers = [lambda: list(score._read(path)), lambda: drawer("plan_tables").read(str(path))]
    for read in readers + [lambda: list(files.read(str(path), "train"))] * (kind != "folder"):
        with pytest.raises(UserError, match=OTHERS[kind][1]):
            read()


def test_files_that_a_user_names_may_be_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "rows.jsonl").write_text('{"question": "1+1"}\n')
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.jsonl").symlink_to("../disk/rows.jsonl")
    assert [row.content for row in files.read(str(tmp_path / "here" / "train.jsonl"), "train")] == [{"question": "1+1"}]
    (tmp_path / "folder").symlink_to("disk")
    assert len(list(files.read(str(tmp_path / "folder"), "train"))) == 1
    with pytest.raises(UserError, match="outside"):
        list(files.read(str(tmp_path / "here"), "train"))


def test_a_folder_that_is_a_link_out_of_the_data_is_not_read(tmp_path):
    for name in ("data", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere" / "train.jsonl").write_text("{}\n")
    (tmp_path / "data" / "main").symlink_to("../elsewhere")
    with pytest.raises(UserError, match=r"main/train.jsonl leads to .*elsewhere/train.jsonl, outside"):
        list(files.read(str(tmp_path / "data"), "train"))


CACHES = {
    "a snapshot": ("models--o--n/snapshots/1", "../../blobs/ab", "models--o--n/blobs/ab"),
    "below a snapshot": ("datasets--o--n/snapshots/1/main", "../../../blobs/ab", "datasets--o--n/blobs/ab"),
    "a snapshot whose cache was renamed": ("mine/snapshots/1", "../../blobs/ab", "mine/blobs/ab"),
    "files linked to a cache": ("local", "{}/hub/models--o--n/blobs/ab", "hub/models--o--n/blobs/ab"),
}
"""A folder; the link in it; the blob, as versions of huggingface_hub lay them out."""


@pytest.mark.parametrize("case", CACHES)
def test_links_of_hugging_face_s_cache_are_read(tmp_path, case):
    folder, link, blob = CACHES[case]
    for place in (tmp_path / folder, (tmp_path / blob).parent):
        place.mkdir(parents=True)
    (tmp_path / blob).write_text("{}")
    path = tmp_path / folder / "vocab.json"
    path.symlink_to(link.format(tmp_path))
    assert foreign.is_file(path, inside=tmp_path / folder)
    (tmp_path / folder / "whole").symlink_to("/etc")
    (tmp_path / blob).unlink()
    (tmp_path / blob).symlink_to("/etc/hostname")  # a blob is a file
    with pytest.raises(UserError, match="leads to /etc/hostname, outside"):
        foreign.is_file(path, inside=tmp_path / folder)
    with pytest.raises(UserError, match="leads to /etc/passwd, outside"):
        foreign.is_file(tmp_path / folder / "whole" / "passwd", inside=tmp_path / folder)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.json", "generation_config.json"])
def test_nothing_is_copied_through_a_link(tmp_path, name, capsys):
    (tmp_path / "secret").write_text('{"a": "secret"}')
    source = shutil.copytree(GOLDEN / "qwen3_tied", tmp_path / "model")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    assert convert.main([f"--from={source}", f"--to={tmp_path / 'out'}"]) == 2
    assert f"{source / name} leads to {tmp_path / 'secret'}, outside {source}" in capsys.readouterr().err
    assert "secret" not in "".join(p.read_text("latin-1") for p in (tmp_path / "out").rglob("*") if p.is_file())


def test_digests_of_a_folder_are_of_its_own_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="leads to /etc/hostname, outside"):
        contents.file_digest(tmp_path / "data")


OWN = {"checkpoints": False, "samples": False, "tb": False, "metrics.jsonl": True, "lease.json": True}


@pytest.mark.parametrize("name", OWN)
def test_a_run_s_own_files_and_folders_are_files_and_folders(tmp_path, name):
    (tmp_path / name).mkdir() if OWN[name] else (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"is a (file|folder), and a run has a (folder|file) of that name; remove it"):
        storage.check_contents(tmp_path)


NAMES = {
    "~/run": r"--workdir=~/run: the shell has left ~ as it is.*; write --workdir=/\S+/run \(or \./~/run",
    "~nobody-at-all/run": "write the path of the home folder instead",
    "a\0b": "zero byte",
    "a\udcffb": "not UTF-8",
    "a\\b": "a backslash, which TensorStore reads as /",
    "/gs/runs/a": "begins with /gs, which libraries read as a bucket",
    "/" + "x/" * 2000: "has 4000 bytes; give a --workdir of at most",
    "gs:/bucket/run": "neither a local folder nor a bucket; write a bucket as gs://NAME/RUN",
    "runs/logs:": r"has gs:/ in it, .*or a bucket as gs://NAME/RUN",
    "/hf/../s3/a": "begins with /s3",
    "gs://bucket/a[1]": r"'\[', which storage libraries read as a pattern",
    "gs://bucket/a?b": "pattern",
    "gs://bucket/a#b": "pattern",
    "http://x/y": "neither a local folder nor a bucket",
    "": "empty",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_a_library_reads_in_another_way_are_refused(name):
    with pytest.raises(UserError, match=NAMES[name]) as error:
        storage.find(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("~/run", rf"^~/run: the shell has left ~ .*; write {re.escape(os.path.expanduser('~'))}/run \(or"),
        (
            Path("GS://bucket/run"),
            "^the run folder is GS://bucket/run, where a path on this machine is needed",
        ),
    ],
)
def test_a_name_that_no_flag_has_given(name, says):
    with pytest.raises(UserError, match=says):
        foreign.check_name(name, "the run folder")


def test_a_path_is_that_of_the_system_and_not_of_its_text(tmp_path, monkeypatch):
    """Up from a link is up from where it leads; a second slash at the root says nothing."""
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/a")
    assert storage.find(tmp_path / "link" / ".." / "run") == tmp_path / "disk" / "run"
    assert str(storage.find(f"/{tmp_path}/run")) == str(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert storage.find("link/run") == tmp_path / "link" / "run"


PATTERNS = ["a[0]b", "[", "*", "**", "a?b", "{a,b}", "a[!x]", "%5B", "é [1] '\"$(x)`", "x:y", "#a;b|c&d", "a\nb"]


@pytest.mark.parametrize("name", PATTERNS)
def test_no_name_is_a_pattern(tmp_path, name):
    folder = tmp_path / name / "below"
    folder.mkdir(parents=True)
    (folder / "process_0").touch()
    assert [path.name for path in gpath.PosixGPath(folder).glob("process_*")] == ["process_0"]
    assert [path.name for path in gpath.PosixGPath(folder.parent).glob("*/process_0")] == ["process_0"]


def test_a_checkpoint_below_a_pattern_is_read_back(tmp_path, monkeypatch):
    state = {"a": jnp.arange(8.0), "b": jnp.ones((2, 3), jnp.bfloat16)}
    checkpointer = Checkpointer(tmp_path / "[1]*")
    checkpointer.save(1, state, {"iteration": 1})
    checkpointer.confirm(state)
    places = jax.tree.map(lambda x: x.sharding, state)
    found = load_newest(tmp_path / "[1]*", state, places)
    assert found is not None and found.state["a"].tolist() == list(range(8))
    # As it was without the change to etils: Orbax merges the arrays of no process.
    monkeypatch.setattr(gpath.PosixGPath, "glob", inspect.signature(storage._glob).parameters["matches"].default)
    checkpointer.save(2, state, {"iteration": 2})
    with pytest.raises(UserError, match=r"checkpoint 2 in .* does not read back as it was saved") as error:
        checkpointer.confirm(state)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    checkpointer.close()


def test_a_checkpoint_whose_bytes_differ_is_noticed_when_it_is_read_back(tmp_path):
    state = {"a": jnp.arange(8.0)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {"iteration": 1})
    checkpointer.wait()
    for file in (tmp_path / "1").rglob("_strings.json"):
        file.write_text(file.read_text().replace("float32", "float64"))
    with pytest.raises(UserError, match="does not read back as it was saved"):
        checkpointer.confirm(state)
    checkpointer.close()


def test_what_a_library_says_of_a_damaged_checkpoint_is_cut_and_kept(tmp_path, monkeypatch, caplog):
    """Orbax's text about a cut file has had 16,000 characters."""
    state = {"a": jnp.arange(8.0)}
    places = {"a": state["a"].sharding}
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(1, state, {"iteration": 1})
    checkpointer.close()

    def fail(*_: Any) -> None:
        raise ValueError("a handler\n" + "x" * 16_000 + " the end")

    monkeypatch.setattr(checkpoint, "describe", fail)
    with pytest.raises(UserError, match=r"no checkpoint in .* can be restored") as error:
        checkpoint.restore(tmp_path / "checkpoints", state, places, check=lambda run: None)
    assert len(str(error.value)) < 700 and all(len(record.getMessage()) < 500 for record in caplog.records)
    note = tmp_path / "damaged" / "1-process-0.txt"
    assert note.read_text().rstrip().endswith(" the end")
    assert f"all of it is in {note}" in str(error.value)
    note.unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read") as error:
        load_newest(tmp_path / "checkpoints", state, places)  # which writes nothing
    assert len(str(error.value)) < 700 and not note.exists()


def test_a_run_in_an_awkward_folder():
    """One of those of the command, which makes the sixty of docs/reliability.md."""
    words = [sys.executable, "-m", "tests.tools.folders", "--count=1", "--seed=3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
