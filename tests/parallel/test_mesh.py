"""Mesh axes, the logical-axis rules, and their error messages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from gspo_jax.errors import UserError
from gspo_jax.models import transformer
from gspo_jax.parallel import mesh as mesh_lib
from tests.tiny import CONFIG


def test_rest_axis_takes_what_is_left():
    assert mesh_lib.mesh_sizes({"data": -1, "expert": 2}, 8) == (4, 1, 2, 1)
    assert mesh_lib.mesh_sizes({}, 1) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"data": 3}, ["data=3", "needs 3 devices", "there are 8"]),
        ({"data": 3, "fsdp": -1}, ["multiple of 3", "there are 8"]),
        ({"data": -1, "fsdp": -1}, ["-1", "once"]),
        ({"pipeline": 2}, ["pipeline", "data, fsdp, expert, tensor"]),
        ({"data": 0}, ["data=0", "positive"]),
    ],
)
def test_bad_sizes_are_named(sizes, says):
    with pytest.raises(UserError) as error:
        mesh_lib.mesh_sizes(sizes, 8)
    assert all(word in str(error.value) for word in says), error.value


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"expert": 3}, ["expert = 3", "experts 8", "1, 2, 4, 8"]),
        ({"tensor": 4}, ["tensor = 4", "key/value heads 2", "1, 2"]),
        ({"fsdp": 7}, ["fsdp = 7", "hidden size 32"]),
    ],
)
def test_mesh_that_does_not_fit_the_model(sizes, says):
    with pytest.raises(UserError) as error:
        CONFIG.check_mesh({axis: sizes.get(axis, 1) for axis in mesh_lib.AXES})
    assert all(word in str(error.value) for word in says), error.value


def test_check_divides_offers_the_neighbours():
    with pytest.raises(UserError, match="60 is not divisible by data = 8; use 56 or 64"):
        mesh_lib.check_divides("global batch", 60, "data", 8)
    mesh_lib.check_divides("global batch", 64, "data", 8)


def test_every_parameter_is_split_as_the_table_says():
    _, shapes = transformer.abstract(CONFIG)
    mesh = mesh_lib.make_mesh({"fsdp": 2, "expert": 2, "tensor": 2})
    trainer = mesh_lib.param_shardings(shapes, mesh)
    split = PartitionSpec(None, ("expert", "fsdp"), None, ("tensor",))  # whole experts: 8 are split over expert × fsdp
    assert trainer["layers"][0]["mlp"]["gate"].get_value().spec == split
    assert trainer["layers"][0]["attention"]["q"].get_value().spec == PartitionSpec(None, ("fsdp",), ("tensor",))
    sampler = mesh_lib.param_shardings(shapes, mesh, mesh_lib.SAMPLER)
    assert sampler["layers"][0]["mlp"]["gate"].get_value().spec == PartitionSpec(None, ("expert",), None, ("tensor",))
    for leaf in jax.tree.leaves(sampler):
        assert "fsdp" not in str(leaf.spec)
        assert "data" not in str(leaf.spec)


@pytest.mark.parametrize(
    ("experts", "sizes", "axes"),
    [(128, (1, 64), ("expert", "fsdp")), (128, (4, 64), ("expert",)), (8, (2, 4), ("expert", "fsdp"))],
)
def test_experts_are_split_whole_where_there_are_enough(experts, sizes, axes):
    assert mesh_lib.expert_axes(experts, dict(zip(("expert", "fsdp"), sizes, strict=True))) == axes


@dataclasses.dataclass(frozen=True)
class Chip:
    """A stand-in for a TPU device with the attributes that a mesh reads."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    process_index: int = 0


def test_only_the_data_axis_spans_slices():
    chips = [Chip(i, slice_index=i % 2, coords=(i // 2 % 2, i // 4, 0)) for i in range(8)]
    mesh = mesh_lib.make_mesh({"data": 4, "fsdp": 2}, chips)
    slices = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)[:, :, 0, 0]
    np.testing.assert_array_equal(slices, [[0, 0], [0, 0], [1, 1], [1, 1]])
    with pytest.raises(UserError, match=r"mesh.data 1 is not divisible by the number of slices = 2; use 2"):
        mesh_lib.make_mesh({"fsdp": 8}, chips)
    with pytest.raises(UserError, match="needs 4 devices but there are 8"):
        mesh_lib.make_mesh({"data": 4}, chips)


def test_a_reshaped_mesh_has_the_same_devices_in_the_same_order():
    mesh = mesh_lib.make_mesh({"data": 2, "fsdp": 4})
    other = mesh_lib.reshaped(mesh, {"expert": 4, "tensor": -1})
    assert dict(other.shape) == {"data": 1, "fsdp": 1, "expert": 4, "tensor": 2}
    assert other.devices.ravel().tolist() == mesh.devices.ravel().tolist()
    assert set(other.axis_types) == {jax.sharding.AxisType.Auto}


def test_constrain_needs_no_mesh():
    x = jnp.ones((4, 2))
    assert mesh_lib.constrain(x, "batch", None) is x
