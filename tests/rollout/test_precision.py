"""Weights rounded to what a rollout engine would store."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.folder.metrics import read_metrics
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout.decoder import make_reshard
from gspo_jax.rollout.precision import rounded
from gspo_jax.train import train
from gspo_jax.types import Weights
from tests.rollout.test_decoder import SHAPES
from tests.run.test_family import ADDER, settings
from tests.tiny import EIGHT, params


def test_int8_has_a_scale_for_every_output():
    x = jnp.array([[-127.0, 0.0, 1.0], [50.4, 0.0, 0.5], [-0.6, 0.0, -0.26]])
    want = [[-127.0, 0.0, 1.0], [50.0, 0.0, 64 / 127], [-1.0, 0.0, -33 / 127]]
    np.testing.assert_allclose(rounded(x, "int8", inputs=0), want, rtol=1e-6)
    np.testing.assert_allclose(rounded(x.T, "int8", inputs=1), np.transpose(want), rtol=1e-6)
    big = jax.random.normal(jax.random.key(0), (3, 64, 32))
    error = jnp.abs(rounded(big, "int8", inputs=-2) - big)
    assert (error <= jnp.abs(big).max(axis=1, keepdims=True) / 254 * 1.0001).all() and error.max() > 0
    again = rounded(rounded(big, "int8", inputs=-2), "int8", inputs=-2)
    np.testing.assert_allclose(again, rounded(big, "int8", inputs=-2), rtol=1e-6, err_msg="it is a projection")


def test_bfloat16_keeps_the_dtype_and_eight_bits():
    x = jnp.array([1.0, 1 + 2**-8, 1 + 2**-7], jnp.float32)
    np.testing.assert_array_equal(rounded(x, "bfloat16", inputs=0), [1.0, 1.0, 1 + 2**-7])
    assert rounded(x, "bfloat16", inputs=0).dtype == jnp.float32


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_sampler_s_copy_is_rounded_but_for_norms_and_routers(precision):
    mesh = mesh_lib.make_mesh(EIGHT)
    weights = Weights.full(params())
    plain, copy = (make_reshard(SHAPES, mesh, jnp.float32, how)(weights) for how in (None, precision))
    for (path, exact), found in zip(jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(copy), strict=True):
        name, exact = jax.tree_util.keystr(path), np.asarray(exact)
        if "norm" in name or "router" in name or "scale" in name:
            np.testing.assert_array_equal(found, exact)
        else:
            inputs = -1 if "embed" in name else -2
            np.testing.assert_allclose(found, rounded(jnp.asarray(exact), precision, inputs=inputs), rtol=1e-6)
            assert (np.asarray(found) != exact).mean() > 0.5, name


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_sampler_and_trainer_differ_by_the_precision_of_the_weights(data, tmp_path):
    """The KL of a batch hangs on its rarest token, so the mean difference of log-probs tells bfloat16 from int8."""
    kl, mean = {}, {}
    for precision in ("", "bfloat16", "int8"):
        config = settings(data, arg="single,runlocal", model__folder=str(ADDER), iterations=1, sampling__slots=4)
        config.sampling.weights_dtype = precision
        train(config, tmp_path / f"run-{precision}")
        measured = read_metrics(tmp_path / f"run-{precision}")[1]
        kl[precision], mean[precision] = measured["mismatch/kl"], measured["mismatch/mean"]
    assert kl[""] < 1e-8 < 1e-6 < min(kl["bfloat16"], kl["int8"]) and max(kl.values()) < 0.1
    assert mean[""] < 1e-6 < 1e-4 < mean["bfloat16"] < mean["int8"] < 0.1
