"""The TPU compiler takes every program by which `first` checks kernels, for a slice that is not attached.

With those of XLA that `first` compares them with, and the seconds of processor time that all take:

    JAX_PLATFORMS=cpu python -m tests.bringup.test_kernels_ahead v5e:2x4 tpu xla
"""

import json
import sys
import time

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from gspo_jax.bringup import kernels
from gspo_jax.planning import topology
from tests import ahead


def figures(target: str, *platforms: str) -> dict:
    """Return the number of programs, as these platforms trace them, and the seconds that they took."""
    device, begun, texts = topology.describe(target)[0], time.process_time(), set()
    sharding = SingleDeviceSharding(device)
    for platform in platforms:
        own = AbstractDevice(device.device_kind, 1, platform)
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=own)):
            for kernel in kernels.all_kernels():
                first = next(iter(kernel.loads.values()))()
                shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), first)
                lowered = jax.jit(kernel.run, donate_argnums=kernel.donated).lower(*shapes)
                if (text := lowered.as_text()) not in texts:
                    texts.add(text)
                    lowered.compile()
    return {"programs": len(texts), "seconds": time.process_time() - begun}


@pytest.mark.slow
@ahead.needs_libtpu
def test_the_tpu_compiler_takes_the_programs() -> None:
    assert ahead.figures("tests.bringup.test_kernels_ahead", "v5e:2x2", "tpu")["programs"] > 20


if __name__ == "__main__":
    print(json.dumps(figures(*sys.argv[1:])))
