"""Runs that begin from another run's checkpoint, of every kind of run folder, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from gspo_jax import exits
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.notes import ORIGIN_FILE, read_note
from gspo_jax.folder.samples import read_samples
from gspo_jax.folder.storage import RunFolder, split_step
from gspo_jax.run import branch
from gspo_jax.run.branch import Request, Source
from gspo_jax.train import train
from gspo_jax.training.checkpoint import describe
from gspo_jax.training.state import make_optimizer, with_new_schedule
from tests.pods import ROOT, Pod, rows_of, run_processes, state_of, train_flags
from tests.run.test_train import tiny
from tests.tiny import on_one_device

ADDER = ROOT / "tests" / "golden" / "adder"
ONE = {"mesh__data": 1, "mesh__fsdp": 1, "mesh__expert": 1}
"""Fields of runs on one device."""
EIGHT = {"mesh__data": 4, "mesh__expert": 2, "sampling__slots": 32}
"""Fields of a run that begins from one of them on eight."""


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return what every file of a folder holds, and when it was written."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def first_state(workdir: Path, alone: Path) -> dict[str, np.ndarray]:
    """Return the leaves of a run's checkpoint 0, copied to the new folder `alone`."""
    shutil.copytree(workdir / "checkpoints" / "0", alone / "0")
    return {name: np.asarray(leaf) for name, leaf in state_of(alone, 0).items()}


def asked(workdir: Path, iteration: int) -> list[str]:
    """Return the prompts of the samples of an iteration of two updates."""
    return [sample["prompt"] for sample in read_samples(workdir)[2 * iteration]]


def copied(config: ConfigDict, **changes: object) -> ConfigDict:
    """Return a copy with other fields, whose names have __ for dots."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("runs/a", ("runs/a", None)),
        ("runs/a@40", ("runs/a", 40)),
        ("gs://bucket/a@0", ("gs://bucket/a", 0)),
        ("runs/a@b", ("runs/a@b", None)),
        ("runs/a@b@7", ("runs/a@b", 7)),
        ("runs/a@4/", ("runs/a@4/", None)),
        ("@4", ("", 4)),
    ],
)
def test_digits_after_the_last_at_are_a_step(given, found):
    assert split_step(given) == found


@pytest.mark.parametrize(
    ("given", "parts", "says"),
    [
        ("", ["data"], r"^--from_parts says what to take .*; name that run too, --from=RUN"),
        ("TMP/a", ["weight"], r"^--from_parts has 'weight'; did you mean 'weights'\? there are weights, moments, data"),
        ("TMP/a", ["moments", "data"], "^--from_parts has moments without weights, .*; add weights to it"),
        ("TMP/b@3", [], "^--from and --workdir are both .*b; without --from a run goes on from its newest checkpoint"),
        ("s3://x/y", [], "neither a local folder nor a bucket"),
        ("@3", [], "the name of the run folder is empty; give one, such as --from="),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(tmp_path, given, parts, says):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=says):
        branch.parse(given.replace("TMP", str(tmp_path)), parts, tmp_path / "b")


def test_parts_are_in_one_order(tmp_path):
    assert branch.parse("", [], tmp_path) is None
    assert branch.parse(str(tmp_path), ["data", "weights"], tmp_path / "b") == Request(
        str(tmp_path), None, ("weights", "data")
    )


NOTED = {"folder": "/runs/a", "iteration": 40, "taken": ["weights", "data"]}


@pytest.mark.parametrize(
    ("given", "noted", "says"),
    [
        (None, NOTED, ""),
        (Request("/runs/a", None, None), NOTED, ""),
        (Request("/runs/a", 40, ("weights", "data")), NOTED, ""),
        (
            Request("/runs/b", None, None),
            NOTED,
            r"began from /runs/a@40 \(weights, data\), and --from is /runs/b;",
        ),
        (Request("/runs/a", 20, None), NOTED, r"and --from is /runs/a@20; leave it out to resume this run, or give"),
        (
            Request("/runs/a", None, ("weights",)),
            NOTED,
            r"and --from is /runs/a with --from_parts=weights; leave",
        ),
        (Request("/runs/a", None, None), None, r"did not begin from another one, and --from is /runs/a; leave it out"),
    ],
)
def test_a_resumed_run_keeps_its_origin(given, noted, says):
    if not says:
        branch.check_same_origin(given, noted, "runs/new")
        return
    with pytest.raises(UserError, match=f"^the run in runs/new .*{says}"):
        branch.check_same_origin(given, noted, "runs/new")


def test_a_folder_with_a_run_of_its_own_is_not_begun_again(tmp_path):
    files, given = RunFolder(name="new", local=tmp_path), Request("/runs/a", None, None)
    assert branch.request_of(None, files, saved=None) is None
    assert branch.request_of(given, files, saved=None) == given
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"^new already has config.json, of a run that .*; give --workdir a new"):
        branch.request_of(given, files, saved=None)
    assert branch.request_of(given, files, saved=3) == given, "its checkpoints are damaged, and it starts over"
    (tmp_path / ORIGIN_FILE).write_text(json.dumps(NOTED))
    assert branch.request_of(None, files, saved=None) == Request("/runs/a", 40, ("weights", "data"))


FULL, LORA = {"model.folder": "m"}, {"model.folder": "m", "adapter.rank": 4}
SHAPE = {"coldstart.steps": 3, "model.architecture.num_layers": 2}


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        (
            FULL,
            LORA,
            r"trained all weights, and this one trains adapters; .* --from=RUN --to=FOLDER\) and begin",
        ),
        (
            LORA,
            FULL,
            r"trained adapters, and this one trains all weights; .* --to=FOLDER --merge\) and begin from",
        ),
        (LORA, LORA | {"adapter.rank": 8}, "^adapter.rank is 8 here and 4 in the run in RUN; set it back to take its"),
        (LORA, LORA | {"adapter.alpha": 1.0}, "^adapter.alpha is 1.0 here and 8.0 in the run in RUN"),
        (LORA, LORA | {"adapter.targets": ("q_proj",)}, r"^adapter.targets is \['q_proj'\] here"),
        (LORA, LORA | {"optimizer.learning_rate": 1.0, "adapter.folder": "x"}, ""),
        (FULL, SHAPE, "^the run in RUN began from model.folder 'm' and has no cold start; set --config.model.folder=m"),
        (SHAPE, SHAPE | {"model.architecture.num_layers": 3}, "^model.architecture.num_layers is 3 here and 2 in the"),
        (SHAPE, SHAPE | {"coldstart.vocab_size": 400}, "^coldstart.vocab_size is 400 here and 320 in the run in RUN"),
        (SHAPE, SHAPE | {"coldstart.steps": 9, "seed": 1}, ""),
        (SHAPE, FULL, ""),  # its files are compared when they are read
    ],
)
def test_weights_of_another_model_are_refused_in_one_sentence(tmp_path, there, here, says):
    ours, theirs = base(), base()
    for config, changes in ((ours, here), (theirs, there)):
        with config.unlocked():
            config.update_from_flattened_dict(changes)
    if there is SHAPE:
        (tmp_path / "coldstart").mkdir()
    files = RunFolder(name="RUN", local=tmp_path)
    saved = json.loads(json.dumps(theirs.to_dict()))
    source = Source(request=Request("RUN", None, None), files=files, step=1, content={"run": {"config": saved}})
    if not says:
        branch._check_model(ours, source)
        return
    with pytest.raises(UserError, match=says):
        branch._check_model(ours, source)


def test_moments_go_on_and_the_schedule_begins_again():
    """After three updates: the fourth one's moments are corrected as a fourth's, its learning rate is a first one's."""
    given = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.0, "no_decay": (), "max_grad_norm": 1e9}
    optimizer, rate = make_optimizer(learning_rate=0.1, schedule="cosine", warmup_updates=2, total_updates=10, **given)
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    for _ in range(3):
        _, state = optimizer.update({"w": jnp.full(3, 2.0)}, state, params)
    moved, state = optimizer.update({"w": jnp.full(3, 2.0)}, with_new_schedule(state), params)
    np.testing.assert_allclose(moved["w"], -float(rate(0)), rtol=1e-5)  # equal gradients: m / √v = 1, once corrected
    counts = {
        type(node).__name__: int(node.count)
        for node in jax.tree.leaves(
            state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState | optax.ScaleByScheduleState)
        )
        if hasattr(node, "count")
    }
    assert counts == {"ScaleByAdamState": 4, "ScaleByScheduleState": 1}


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> tuple[ConfigDict, Path]:
    """Return the config and folder of a finished run of all weights on one device, with a cold start of its own."""
    folder = tmp_path_factory.mktemp("own")
    config = copied(tiny(folder), **ONE, sampling__slots=4)
    config.coldstart.steps, config.log.samples_every, config.log.samples = 5, 1, 32
    with on_one_device():
        train(config, folder / "run")
    return config, folder / "run"


@pytest.mark.slow
def test_a_run_begins_where_another_one_was(own, tmp_path, capsys):
    """On more devices. It takes bits and prompts, leaves the other folder as it is, and then needs nothing of it."""
    config, workdir = own
    other, new = shutil.copytree(workdir, tmp_path / "a"), tmp_path / "new"
    before = contents(other)
    config = copied(config, iterations=1, optimizer__learning_rate=5e-5, **EIGHT)
    train(config, new, begin_from=f"{other}@1")
    assert contents(other) == before
    said = " ".join(capsys.readouterr().out.split())
    taken = f"beginning from iteration 1 (update 2) of {other}: weights, optimizer moments and data position"
    rates = "learning rate 4.55e-06 at the first update, the first of 10 of warm-up (optimizer.warmup_updates), "
    for text in (taken, "optimizer.learning_rate 0.0001 → 5e-05", "mesh.data 1 → 4", rates + "1.82e-05 at the last"):
        assert text in said
    origin = read_note(new, ORIGIN_FILE)
    assert origin is not None and origin["changed"]["iterations"] == [2, 1] and origin["left"] == {}
    assert describe(str(new / "checkpoints" / "1"))["run"]["origin"] == origin

    shutil.copytree(other / "checkpoints" / "1", tmp_path / "one" / "1")
    theirs, ours = state_of(tmp_path / "one", 1), first_state(new, tmp_path / "zero")
    restarted = {"updates", "skipped", *(name for name in theirs if name.endswith("opt_state.1.2.count"))}
    assert len(restarted) == 3 and ours.keys() == theirs.keys()
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(ours[name], 0 if name in restarted else np.asarray(leaf), err_msg=name)
    assert int(ours["policy.opt_state.1.0.count"]) == 2
    assert asked(new, 1) == asked(other, 2) != asked(other, 1)
    assert read_metrics(new)[0]["eval/accuracy"] is not None and read_metrics(new)[1]["actor/lr"] < 5e-6

    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match=f"^the run in {new} began from {other}@1 .*, and --from is {tmp_path}/b;"):
        train(config, new, begin_from=f"{tmp_path}/b")
    shutil.rmtree(other)
    shutil.rmtree(new / "checkpoints" / "1")  # as if it had stopped before its first iteration
    config.iterations = 2
    train(config, new, begin_from=str(other))  # as its first command says; or without
    said = " ".join(capsys.readouterr().out.split())
    assert "resuming from iteration 0" in said and f"this run began from iteration 1 (update 2) of {other}" in said
    assert [row["step"] for row in rows_of(new)] == [0, 1, 2, 3, 4]
    assert describe(str(new / "checkpoints" / "2"))["run"]["origin"] == origin


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_parts_are_taken_alone_and_a_cosine_begins_again(own, tmp_path, capsys):
    """Weights alone; the data position alone; a seed leaves the position behind, unless it was asked for."""
    config, other = own
    cosine = copied(config, iterations=1, optimizer__schedule="cosine", optimizer__warmup_updates=0)
    train(cosine, tmp_path / "weights", begin_from=str(other), parts=["weights"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"beginning from iteration 2 (update 4) of {other}: weights" in said
    assert "learning rate 0.0001 at the first update, 3.64e-05 at the last update there" in said
    state = first_state(tmp_path / "weights", tmp_path / "zero")
    assert all(not leaf.any() for name, leaf in state.items() if "opt_state" in name)
    assert asked(tmp_path / "weights", 1) == asked(other, 1)
    rates = [row["actor/lr"] for row in read_metrics(tmp_path / "weights") if "actor/lr" in row]
    np.testing.assert_allclose(rates, [1e-4, 5e-5], rtol=1e-5)  # half-way down after one update of two
    with pytest.raises(UserError, match=rf"^iterations is 2 here and 1 .* over its own .*--from={tmp_path}/weights"):
        train(copied(cosine, iterations=2), tmp_path / "weights")

    seeded = copied(config, iterations=1, seed=3)
    says = "^the data position was saved with seed 0, but this run has 3; .* leave the data position out, --from_parts="
    with pytest.raises(UserError, match=says):
        train(seeded, tmp_path / "seeded", begin_from=str(other), parts=["weights", "data"])
    train(seeded, tmp_path / "seeded", begin_from=str(other))
    said = " ".join(capsys.readouterr().out.split())
    assert "the prompts begin at the beginning: the data position was saved with seed 0, but this run has 3" in said
    assert "weights and optimizer moments" in said

    train(copied(config, iterations=1), tmp_path / "data", begin_from=f"{other}@1", parts=["data"])
    assert asked(tmp_path / "data", 1) == asked(other, 2)
    with pytest.raises(UserError, match=r"has no checkpoint 7; there are 1, 2, numbered by iterations"):
        train(config, tmp_path / "none", begin_from=f"{other}@7")
    with pytest.raises(UserError, match=r"^folder .*/rum does not exist; did you mean .*/run"):
        train(config, tmp_path / "none", begin_from=f"{other.parent}/rum")


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_with_a_folder_s_model_begins_from_one_with_a_cold_start(own, tmp_path):
    """The same model and tokenizer are taken from elsewhere; others are refused."""
    config, other = own
    model = shutil.copytree(other / "coldstart", tmp_path / "model")
    config = copied(config, iterations=1, model__folder=str(model))
    train(config, tmp_path / "new", begin_from=str(other))
    assert not (tmp_path / "new" / "coldstart").exists()
    config = copied(config, model__folder=str(ADDER))
    says = rf"^\w+\.json of the model is not what it was in the run in {other}; .*--config.model.folder={other}/coldst"
    with pytest.raises(UserError, match=says):
        train(config, tmp_path / "refused", begin_from=str(other))
    assert not (tmp_path / "refused" / "checkpoints").exists()


@pytest.fixture(scope="module")
def adder(tmp_path_factory) -> ConfigDict:
    """Return the config of a run of one iteration from tests/golden/adder."""
    config = tiny(tmp_path_factory.mktemp("adder"))
    config.model.folder, config.iterations, config.sampling.slots = str(ADDER), 1, 32
    return config


@pytest.mark.slow
def test_adapters_are_taken_beside_their_base(adder, tmp_path):
    """With a KL to the base."""
    config = copied(adder, adapter__rank=4, optimizer__learning_rate=1e-2, reference__kl_weight=0.01)
    train(config, tmp_path / "a")
    train(config, tmp_path / "new", begin_from=str(tmp_path / "a"))
    theirs, ours = state_of(tmp_path / "a" / "checkpoints", 1), first_state(tmp_path / "new", tmp_path / "zero")
    adapters = [name for name in theirs if ".params." in name]
    assert adapters and all("_adapter" in name for name in adapters)
    for name in adapters:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert max(row.get("reference/kl", 0) for row in read_metrics(tmp_path / "new")) > 1e-7, "it begins off its base"
    with pytest.raises(UserError, match="are not those that the checkpoint's adapters were trained beside"):
        train(copied(config, adapter__base_dtype="int8"), tmp_path / "other", begin_from=str(tmp_path / "a"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_critic_is_taken_left_behind_or_made(adder, tmp_path, capsys):
    without = copied(adder, **ONE, sampling__slots=4)
    config = copied(without, objective__name="ppo", critic__trunk="policy")
    train(config, tmp_path / "a")
    theirs = state_of(tmp_path / "a" / "checkpoints", 1)
    train(config, tmp_path / "both", begin_from=str(tmp_path / "a"))
    ours = first_state(tmp_path / "both", tmp_path / "zero")
    critics = [name for name in theirs if name.startswith("critic.") and not name.endswith("opt_state.1.2.count")]
    assert any(np.asarray(theirs[name]).any() for name in critics)
    for name in critics:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    capsys.readouterr()
    train(without, tmp_path / "without", begin_from=str(tmp_path / "a"))
    assert "the critic is left behind" in capsys.readouterr().out
    train(config, tmp_path / "again", begin_from=str(tmp_path / "without"))
    assert "the critic is new, with the taken weights: it has no critic" in " ".join(capsys.readouterr().out.split())


@pytest.mark.faults
def test_two_processes_begin_where_one_was(whole, data, tmp_path):
    """On half its devices, without partial rollouts. Process 0 chooses the checkpoint for both, or both end by its
    sentence.
    """
    fields = {"model.folder": ADDER, "data.data_dir": data, "iterations": 1, "reference.kl_weight": 0.01}
    fields |= {"cpu_devices": 4, "mesh.data": 1, "sampling.slots": 16}
    new = train_flags(f"{ROOT}/tests/pod_config.py:dapo", tmp_path / "new", fields)
    before, words = contents(whole), ["-m", "gspo_jax.train", *new]
    with Pod(2, *words, f"--from={whole}@1") as pod:
        for text in pod.finish():
            assert f"error: the run in {whole} has no checkpoint 1; there are 5, 6, numbered by iterations" in text
    assert [process.returncode for process in pod.processes] == [exits.MISTAKE] * 2
    said, _ = run_processes(2, *words, f"--from={whole}")
    assert f"beginning from iteration 6 (update 12) of {whole}: weights, optimizer moments and data position" in said
    assert "unfinished rollouts are left behind" in " ".join(said.split())
    assert rows_of(tmp_path / "new")[-1]["iteration"] == 1 and contents(whole) == before
    theirs, ours = state_of(whole / "checkpoints", 6), first_state(tmp_path / "new", tmp_path / "zero")
    assert ours.keys() == theirs.keys()
    for name, leaf in theirs.items():
        if "updates" not in name and "skipped" not in name and not name.endswith(".count"):
            np.testing.assert_array_equal(ours[name], np.asarray(leaf), err_msg=name)
