"""Checkpoints: exact restore on another mesh, retention of the newest, and clear errors where one does not fit."""

import contextlib
import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.models import transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.training.checkpoint import Checkpointer, load_newest, named_leaves
from gspo_jax.training.state import make_optimizer, new_state, state_shardings
from gspo_jax.types import UserError, Weights
from tests.tiny import CONFIG, params, place

OPTIMIZER, _ = make_optimizer(
    learning_rate=1e-3,
    schedule="constant",
    warmup_updates=0,
    total_updates=1,
    b1=0.9,
    b2=0.95,
    weight_decay=0.0,
    max_grad_norm=1.0,
)
RUN = {"iteration": 3, "prompts": '{"next": 7}', "key": [1, 2], "config": {"seed": 0, "data": {}}}


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
    checkpointer = Checkpointer(folder)
    restored = checkpointer.restore(shapes, shardings)
    checkpointer.close()
    assert (restored.step, restored.run) == (3, RUN)
    for (name, a), b in zip(named_leaves(state).items(), jax.tree.leaves(restored.state), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    for leaf, sharding in zip(jax.tree.leaves(restored.state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]


def params_alone():
    """Return shapes and shardings of the policy's parameters, as a reader requests them."""
    return ({"policy": {"params": state.params}} for state in spec({"data": 8}))


def test_saving_small_arrays_compiles_nothing(tmp_path, caplog):
    """Replicas share the writing of large arrays only, since each slice of a shape is a program."""
    with jax.set_mesh(mesh_lib.make_mesh({"data": 8})), jax.log_compiles():
        state = jax.device_put({"a": np.ones((8, 13)), "b": np.ones((16, 3))}, jax.sharding.PartitionSpec())
        caplog.clear()
        with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
            checkpointer.save(1, state, RUN)
    assert not [record.getMessage() for record in caplog.records if "XLA compilation" in record.getMessage()]


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
            restored = checkpointer.restore(jax.eval_shape(lambda: state), {"x": mesh_lib.replicated(mesh)})
            assert restored is not None and restored.arrays.keys() == given.keys()
            for name, array in restored.arrays.items():
                assert array.dtype == arrays[name].dtype
                np.testing.assert_array_equal(array, arrays[name])


def test_nothing_to_restore(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.restore(*spec({"data": 8})) is None
    checkpointer.close()
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


def test_another_architecture_is_refused_by_name(saved):
    folder, _ = saved
    checkpointer = Checkpointer(folder)
    with pytest.raises(UserError, match=r"checkpoint 3 does not fit.*embed.*\(64, 32\).*\(128, 32\)"):
        checkpointer.restore(*spec({"data": 8}, dataclasses.replace(CONFIG, vocab_size=128)))
    checkpointer.close()
