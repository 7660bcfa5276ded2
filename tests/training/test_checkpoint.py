"""Checkpoints: exact restore on another mesh, retention of the newest, and clear errors where one does not fit."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from gspo_jax.config import base
from gspo_jax.errors import Diverged, UserError
from gspo_jax.folder.notes import SAVED_FILE, note
from gspo_jax.folder.storage import RunFolder
from gspo_jax.models import transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.run import resume
from gspo_jax.training.checkpoint import (
    AllDamaged,
    Checkpointer,
    load_newest,
    named_leaves,
    restore,
    set_all_aside,
    steps,
)
from gspo_jax.training.state import make_optimizer, new_state, state_shardings
from gspo_jax.types import Weights
from tests.tiny import CONFIG, params, place

OPTIMIZER, _ = make_optimizer(
    learning_rate=1e-3,
    schedule="constant",
    warmup_updates=0,
    total_updates=1,
    b1=0.9,
    b2=0.95,
    weight_decay=0.0,
    no_decay=(),
    max_grad_norm=1.0,
)
RUN = {"iteration": 3, "prompts": '{"next": 7}', "key": [1, 2], "config": {"seed": 0, "data": {}}}


def ANY(run):
    """Accept every run."""


def spec(sizes, config=CONFIG):
    shapes = transformer.abstract(config)[1]
    mesh = mesh_lib.make_mesh(sizes)
    return jax.eval_shape(partial(new_state, optimizer=OPTIMIZER), Weights.full(shapes)), state_shardings(
        shapes, OPTIMIZER, mesh
    )


@pytest.fixture
def saved(tmp_path):
    """Return a folder after steps 1 to 3 of a run that keeps two checkpoints, and the last state saved."""
    mesh = mesh_lib.make_mesh({"data": 2, "fsdp": 2, "expert": 2})
    state = jax.jit(partial(new_state, optimizer=OPTIMIZER))(Weights.full(place(params(), mesh)))
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, dataclasses.replace(state, updates=jnp.asarray(step)), RUN)
    checkpointer.close()
    return tmp_path, dataclasses.replace(state, updates=jnp.asarray(3))


def test_restores_exactly_on_another_mesh(saved):
    folder, state = saved
    shapes, shardings = spec({"fsdp": 4, "tensor": 2})
    restored = restore(folder, shapes, shardings, check=ANY)
    Checkpointer(folder).close()
    assert (restored.step, restored.run) == (3, RUN)
    for (name, a), b in zip(named_leaves(state).items(), jax.tree.leaves(restored.state), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    for leaf, sharding in zip(jax.tree.leaves(restored.state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]


def params_alone():
    """Return shapes and shardings of the policy's parameters, as a reader requests them."""
    return ({"policy": {"params": state.params}} for state in spec({"data": 8}))


def test_saving_small_arrays_compiles_only_the_digest(tmp_path, caplog):
    """Replicas share the writing of large arrays only, since each slice of a shape is a program."""
    with jax.set_mesh(mesh_lib.make_mesh({"data": 8})), jax.log_compiles():
        state = jax.device_put({"a": np.ones((8, 13)), "b": np.ones((16, 3))}, jax.sharding.PartitionSpec())
        caplog.clear()
        with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
            checkpointer.save(1, state, RUN)
            checkpointer.save(2, state, RUN)
    compiled = [record.getMessage() for record in caplog.records if "XLA compilation" in record.getMessage()]
    assert len(compiled) == 1 and "jit(digest_all)" in compiled[0]


def test_a_reader_takes_only_the_parameters(saved):
    folder, state = saved
    restored = load_newest(folder, *params_alone())
    assert restored.step == 3
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(restored.state["policy"]["params"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_arrays_of_any_shape_beside_the_state(tmp_path):
    """Extra arrays round-trip with their dtypes, empty ones included; a checkpoint saved without any restores none."""
    state, mesh = {"x": jnp.ones(3)}, mesh_lib.make_mesh({"data": 8})
    arrays = {"mask": np.ones((2, 3), bool), "none": np.zeros((2, 0, 4), np.int8), "keys": np.ones((1, 2), np.uint32)}
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        for step, given in enumerate((arrays, {})):
            checkpointer.save(step, state, RUN, given)
            checkpointer.wait()
            places = {"x": mesh_lib.replicated(mesh)}
            restored = restore(tmp_path, jax.eval_shape(lambda: state), places, check=ANY)
            assert restored is not None and restored.arrays.keys() == given.keys()
            for name, array in restored.arrays.items():
                assert array.dtype == arrays[name].dtype
                np.testing.assert_array_equal(array, arrays[name])


def test_a_save_in_flight_is_not_the_newest(tmp_path):
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(2)}, RUN)
        assert checkpointer.latest is None
        checkpointer.wait()
        assert checkpointer.latest == 1
        checkpointer.save(2, {"w": jnp.ones(2)}, RUN)
        assert checkpointer.latest == 1


def test_nothing_to_restore(tmp_path):
    assert restore(tmp_path, *spec({"data": 8}), check=ANY) is None
    assert load_newest(tmp_path, {}, {}) is None


def test_what_a_killed_save_leaves_behind_is_no_checkpoint(saved):
    folder, _ = saved
    (folder / "4.orbax-checkpoint-tmp-123").mkdir()
    assert load_newest(folder, *params_alone()).step == 3
    checkpointer = Checkpointer(folder)
    assert checkpointer.latest == 3
    deadline = time.monotonic() + 10
    while list(folder.glob("*tmp*")) and time.monotonic() < deadline:
        time.sleep(0.05)  # Orbax removes it in the background
    checkpointer.close()
    assert not list(folder.glob("*tmp*"))


@pytest.mark.faults
def test_another_architecture_is_refused_by_name(saved):
    folder, _ = saved
    with pytest.raises(UserError, match=r"checkpoint 3 does not fit.*embed.*\(64, 32\).*\(128, 32\)"):
        restore(folder, *spec({"data": 8}, dataclasses.replace(CONFIG, vocab_size=128)), check=ANY)
    with pytest.raises(UserError, match=r"checkpoint 3 does not fit.* in the checkpoint and missing here"):
        restore(folder, *params_alone(), check=ANY)


def flip(path, place):
    """Flip one bit of the byte at `place`."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(data)


def files_of(step):
    """Return the files of a checkpoint that are not empty, in order of their names."""
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


def largest(folder):
    """Return the largest file below a folder."""
    return max(files_of(folder), key=lambda path: path.stat().st_size)


@pytest.fixture
def two(tmp_path):
    """Return a folder with steps 1 and 2, and all that was saved in each, by name."""
    mesh = mesh_lib.make_mesh({"data": 2, "fsdp": 2, "expert": 2})
    state = jax.jit(partial(new_state, optimizer=OPTIMIZER))(Weights.full(place(params(), mesh)))
    tokens = np.random.default_rng(0).integers(0, 2**31, (4, 100), np.int32)  # nothing to compress
    arrays = {"tokens": tokens, "none": np.zeros((2, 0), np.int8)}
    states = {step: dataclasses.replace(state, updates=jnp.asarray(step)) for step in (1, 2)}
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state, RUN | {"iteration": step}, arrays)
    return tmp_path / "checkpoints", {step: named_leaves(state) | arrays for step, state in states.items()}


def assert_whole(found, saved):
    """Assert that all that was saved in a step came back, bit by bit."""
    assert found.run == RUN | {"iteration": found.step}
    for name, leaf in (named_leaves(found.state) | found.arrays).items():
        np.testing.assert_array_equal(leaf, saved[found.step][name], err_msg=name)


@pytest.mark.faults
def test_no_flipped_byte_goes_unseen(two, tmp_path, caplog):
    """A restore notices each of 60 flipped bytes all over a checkpoint, unless it changes nothing that is restored."""
    whole, saved = two
    shapes, shardings = spec({"data": 8})
    rng, noticed = np.random.default_rng(0), 0
    for number in range(60):
        folder = tmp_path / f"flipped-{number}" / "checkpoints"
        shutil.copytree(whole, folder)
        files = files_of(folder / "2")  # every file once, and then in proportion to their sizes
        sizes = np.array([path.stat().st_size for path in files])
        path = files[number] if number < len(files) else rng.choice(files, p=sizes / sizes.sum())
        flip(path, int(rng.integers(path.stat().st_size)))
        caplog.clear()
        found = restore(folder, shapes, shardings, check=ANY)
        assert_whole(found, saved)
        if found.step == 1:
            noticed += 1
            assert "checkpoint 2: " in caplog.text and "moved to" in caplog.text
            assert [path.name.partition("-")[0] for path in (folder.parent / "damaged").iterdir() if path.is_dir()] == [
                "2"
            ]
    assert noticed > 30


DAMAGE = {
    "missing": Path.unlink,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "changed": lambda path: flip(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_missing_or_cut_or_changed_is_noticed(damage, two, caplog):
    folder, saved = two
    DAMAGE[damage](largest(folder / "2"))
    found = load_newest(folder, *params_alone())
    assert (
        found.step == 1
        and "using checkpoint 1" in caplog.text
        and sorted(p.name for p in folder.iterdir()) == ["1", "2"]
    )
    found = restore(folder, *spec({"data": 8}), check=ANY)
    assert found.step == 1 and steps(folder) == [1]
    assert_whole(found, saved)
    with contextlib.closing(Checkpointer(folder, keep=2)) as checkpointer:
        checkpointer.save(2, found.state, RUN)
    assert restore(folder, *spec({"data": 8}), check=ANY).step == 2


LOST = {"emptied": lambda path: os.truncate(path, 0), "cut": lambda path: os.truncate(path, 7), "gone": Path.unlink}


@pytest.mark.faults
def test_a_half_written_checkpoint_neither_passes_nor_stops_a_run(tmp_path):
    """Whatever a loss of power leaves of the newest checkpoint, or of the best, under its final name."""
    saved = {"w": jnp.arange(1000.0)}
    shapes, places = jax.eval_shape(lambda: saved), {"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    with contextlib.closing(Checkpointer(tmp_path / "whole", keep=2, keep_best=True)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, saved, RUN, quality={"accuracy": 1 / step})
    names = [str(path.relative_to(tmp_path / "whole" / "3")) for path in files_of(tmp_path / "whole" / "3")]
    unsynced = [
        name for name in names if not name.endswith(("ocdbt", "_sharding", "_strings.json")) and "/d/" not in name
    ]
    assert "metrics/metrics" in unsynced and len(unsynced) < len(names)
    each = [([name], how) for name, how in zip(names, itertools.cycle(LOST), strict=False)]
    many = [(some, how) for some in (unsynced, names) for how in LOST]
    best = [(1, some, how) for some in (["metrics/metrics"], names) for how in ("emptied", "cut")]
    fell_back = 0
    for number, (step, some, how) in enumerate([*((3, *case) for case in (*each, *many)), *best]):
        folder = tmp_path / str(number) / "checkpoints"
        shutil.copytree(tmp_path / "whole", folder)
        for path in files_of(folder / str(step)):
            if str(path.relative_to(folder / str(step))) in some or (step == 1 and some == names):
                LOST[how](path)
        found = restore(folder, shapes, places, check=ANY)
        fell_back += found.step == 2
        assert found.step in ((2, 3) if step == 3 else (3,)), (some, how)
        np.testing.assert_array_equal(found.state["w"], saved["w"])
        with contextlib.closing(Checkpointer(folder, keep=2, keep_best=True)) as checkpointer:
            checkpointer.save(found.step + 1, saved, RUN, quality={"accuracy": 0.0})
        assert steps(folder)[:2] == [found.step + 1, found.step], (some, how)
    assert fell_back >= len(many) + 3


def test_a_save_that_was_waited_for_is_on_the_disk(tmp_path, monkeypatch):
    """Orbax leaves its JSON files and the names of its folders to the file system."""
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.add(os.fstat(descriptor).st_ino), fsync(descriptor)))
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": jnp.ones(3)}, RUN, quality={"accuracy": 0.5})
            checkpointer.wait()
            written = (tmp_path, tmp_path / str(step), *(tmp_path / str(step)).rglob("*"))
            assert not [path for path in written if path.stat().st_ino not in synced]
            synced.clear()


def test_a_save_in_flight_takes_no_notice_of_the_clock(tmp_path, monkeypatch):
    state = {"w": jax.random.normal(jax.random.key(0), (2**22,))}
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        for step, hours in enumerate((9, -14), 1):
            checkpointer.save(step, state, RUN)
            monkeypatch.setattr(time, "time", lambda now=time.time, hours=hours: now() + 3600 * hours)
            checkpointer.wait()
    assert steps(tmp_path) == [2, 1]


def test_a_clock_that_is_set_back_overwrites_no_damaged_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "then")
    for _ in range(3):
        with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
            checkpointer.save(1, {"w": jnp.ones(3)}, RUN)
        set_all_aside(tmp_path / "checkpoints")
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == ["1-then", "1-then-2", "1-then-3"]


def test_a_changed_byte_beside_the_state_is_noticed(two):
    folder, saved = two
    DAMAGE["changed"](largest(folder / "2" / "arrays"))
    found = restore(folder, *spec({"data": 8}), check=ANY)
    assert found.step == 1
    assert_whole(found, saved)


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_read_again(two, monkeypatch):
    """Here it comes back with the warning, which is between the two attempts."""
    folder, _ = two
    there, away = folder / "2" / "run", folder / "away"
    there.rename(away)
    monkeypatch.setattr(logging, "warning", lambda *given: away.exists() and away.rename(there))
    assert load_newest(folder, *params_alone()).step == 2


def test_if_nothing_can_be_restored_the_error_says_so_once(two):
    folder, _ = two
    for step in (1, 2):
        for path in files_of(folder / str(step)):
            flip(path, path.stat().st_size // 2)
    with pytest.raises(
        AllDamaged, match=r"no checkpoint in .* can be restored \(checkpoint 2: .*; checkpoint 1: .*--start_over"
    ) as error:
        restore(folder, *spec({"data": 8}), check=ANY)
    assert "\n" not in str(error.value)
    begins = begin(folder.parent)
    with pytest.raises(AllDamaged):
        begins(start_over=False)
    assert begins(start_over=True).boundary.done == 0 and steps(folder) == []
    assert sum(path.is_dir() for path in (folder.parent / "damaged").iterdir()) == 2


def begin(workdir):
    """Return `resume.start` for a run folder, with an engine whose initial weights are none."""
    shapes, shardings = spec({"data": 8})
    none = SimpleNamespace(frozen=None)
    engine = SimpleNamespace(
        state_shapes=shapes,
        shardings=shardings,
        load=lambda folder: none,
        begin=lambda weights: None,
        policy=None,
        teacher=None,
        meshes=SimpleNamespace(trainer=None),
    )
    given = {"measured_on": {}, "folder": workdir, "source": None, "asked": None}
    prompts = SimpleNamespace(get_state=lambda: "")
    return partial(resume.start, base(), engine, RunFolder(name="run", local=workdir), prompts, **given)


def test_a_run_that_has_lost_its_checkpoints_begins_again_only_if_told_so(tmp_path):
    begins = begin(tmp_path)
    assert begins(start_over=False).boundary.done == 0
    note(tmp_path, SAVED_FILE, step=7)
    with pytest.raises(UserError, match=r"the run in run had saved checkpoint 7, but .* holds none; .*--start_over"):
        begins(start_over=False)
    assert begins(start_over=True).boundary.done == 0


def test_numbers_that_are_not_finite_are_never_saved(tmp_path):
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(3), "v": jnp.ones(2)}, RUN)
        with pytest.raises(
            Diverged, match=r"checkpoint 2 is not saved, because v \(and 1 more\) holds NaN or infinite"
        ):
            checkpointer.save(2, {"w": jnp.array([jnp.nan, 1, -jnp.inf]), "v": jnp.array([jnp.inf, 0])}, RUN)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("name", ["accuracy", "reward"])
def test_the_best_checkpoint_is_kept(tmp_path, name):
    """Beside the newest; a process that starts again knows which one it was."""
    for qualities in ({1: 0.1, 2: 0.9, 3: None, 4: 0.5}, {5: 0.4, 6: None, 7: 0.3}):
        with contextlib.closing(Checkpointer(tmp_path, keep=1, keep_best=True)) as checkpointer:
            for step, x in qualities.items():
                checkpointer.save(step, {"w": jnp.ones(3)}, RUN, quality=None if x is None else {name: x})
    assert steps(tmp_path) == [7, 2]
