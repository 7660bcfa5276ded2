"""Stage: how fast this machine is. Its rates for `plan` beside what is expected, and each device beside the others."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.bringup.stages import FAILED, OK, WARNING, Given, Result
from gspo_jax.doctor import Finding
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import processes
from gspo_jax.planning import calibration
from gspo_jax.planning import rates as rates_lib
from gspo_jax.planning.calibration import LARGE, SMALL, kind_of, per_turn
from gspo_jax.planning.topology import CHIPS, torus_of

FILE = "rates.json"
GOOD, POOR = 0.5, 0.2
"""Shares of the expected rate, below which a rate is doubtful, and wrong."""
SLOW = {"cpu": 0.25, "accelerator": 0.8}
"""Share of the median device's rate, below which a device is slow. Simulated devices share their cores with others."""
WIDTH = 2048
"""Elements of a gathered row."""
ALONE_S = 0.05
"""Seconds of each loop on a device alone."""
CALLS = 200
"""Calls from the host that are timed together."""
GPUS = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 2.0e12),
}
"""Published dense bfloat16 flops and memory bytes per second, by the first part that a device's name has."""


class Expected(NamedTuple):
    """A rate that devices of a kind reach, and who says so."""

    rate: float
    source: str


def run(given: Given) -> Result:
    """Measure the rates, write them for `plan`, and compare them."""
    mesh = mesh_lib.make_mesh({"data": -1})
    device = mesh.local_devices[0]
    rates = calibration.measure(mesh)
    figures: dict[str, Any] = {"rates": dataclasses.asdict(rates), "more": more(device)}
    figures["groups"] = [
        {
            "devices": split.shape["fsdp"],
            "latency_s": calibration.gathering(split, SMALL),
            "bytes_per_s": calibration.bytes_per_s(split),
        }
        for split in calibration.groups(mesh)
    ]
    figures["by_device"] = by_device()
    if processes.is_first():
        rates_lib.write(given.out / FILE, rates, generation=calibration.generation(device))
    wanted = expected(device, list(mesh.devices.flat))
    measured = {"matrix products": rates.flops, "memory": rates.bandwidth, "links": rates.links}
    figures["expected"] = {name: one._asdict() for name, one in wanted.items()}
    findings = [judged(name, measured[name], one) for name, one in wanted.items()]
    findings += compared(figures["by_device"], SLOW[kind_of(device)])
    if not wanted:
        text = f"{rates.flops:.3g} flops/s and {rates.bandwidth:.3g} bytes/s; nothing published to compare with"
        findings.append(Finding("rates", OK, text))
    return findings, figures


def more(device: Any) -> dict[str, float]:
    """Measure what `Rates` does not have: bytes per second of reads, rows and transposes, and the host's seconds."""
    kind = kind_of(device)
    size = LARGE[kind] // (8 if kind == "cpu" else 1)
    long = jax.device_put(jnp.ones(size, jnp.float32), device)
    rows = jax.device_put(jnp.ones((size // WIDTH, WIDTH), jnp.bfloat16), device)
    order = jax.device_put(np.random.default_rng(0).permutation(len(rows)).astype(np.int32), device)
    square = jax.device_put(jnp.ones((int(size**0.5),) * 2, jnp.float32), device)
    one = jax.device_put(jnp.zeros((), jnp.float32), device)
    return {
        "read_bytes_per_s": long.nbytes / per_turn(lambda _, x: (x[0], jnp.max(x[0] - x[1])), (long, one)),
        "row_bytes_per_s": 2 * rows.nbytes / per_turn(lambda _, x: x[order], rows),
        "transposed_bytes_per_s": 2 * square.nbytes / per_turn(lambda _, x: x.T + 1, square),
        "dispatch_s": calls(jax.jit(lambda x: x + 1), one),
        "fetch_s": timed(lambda: jax.device_get(one + 1)),
    }


def calls(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Return the seconds that a call takes the host, of many that the device is not waited for between."""

    def many() -> None:
        y = x
        for _ in range(CALLS):
            y = f(y)
        jax.block_until_ready(y)

    return timed(many) / CALLS


def timed(f: Callable[[], Any]) -> float:
    """Return the least seconds of a few calls, after one that compiles."""
    f()
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def by_device() -> list[dict[str, float]]:
    """Measure each device alone, and return in the first process those of all."""
    found = []
    for device in jax.local_devices():
        kind = kind_of(device)
        side, dtype = calibration.SIDES[kind][0], jnp.float32 if kind == "cpu" else jnp.bfloat16
        matrix = jax.device_put(jnp.full((side, side), 1 / side, dtype), device)
        long = jax.device_put(jnp.zeros(LARGE[kind] // 4, jnp.float32), device)
        flops = 2 * side**3 / per_turn(lambda _, x, matrix=matrix: x @ matrix, matrix, least_s=ALONE_S)
        bandwidth = 2 * long.nbytes / per_turn(lambda _, x: x + 1, long, least_s=ALONE_S)
        found.append({"device": device.id, "flops": flops, "bandwidth": bandwidth})
    return [one for told in processes.tell_first(found) for one in told]


def expected(device: Any, devices: Sequence[Any]) -> dict[str, Expected]:
    """Return the rates to expect of a device among others, as far as there are any.

    Of links, those that a chip in a corner of its slice has to others: a collective waits for it.
    """
    kind = calibration.generation(device)
    if kind in CHIPS:
        chip, source = CHIPS[kind], f"published peak of {kind}"
        found = {"matrix products": chip.flops, "memory": chip.bandwidth}
        own = [one for one in devices if calibration.slice_of(one) == calibration.slice_of(device)]
        if links := torus_of(kind, own).corner_links:
            found["links"] = chip.links * links / (2 * chip.rank)
    elif device.platform == "cpu":
        source = "numpy's here, in this process" + (
            f", over {len(devices)} simulated devices" if len(devices) > 1 else ""
        )
        found = {"matrix products": numpy_flops() / len(devices), "memory": numpy_bandwidth() / len(devices)}
    else:
        named = next((rates for name, rates in GPUS.items() if name in device.device_kind), None)
        if named is None:
            return {}
        source, found = (
            f"published peak of {device.device_kind}",
            dict(zip(("matrix products", "memory"), named, strict=True)),
        )
    return {name: Expected(rate, source) for name, rate in found.items()}


def numpy_flops() -> float:
    """Return the flops per second of numpy's matrix product."""
    side = calibration.SIDES["cpu"][-1]
    x = np.ones((side, side), np.float32)
    return 2 * side**3 / timed(lambda: x @ x)


def numpy_bandwidth() -> float:
    """Return the bytes per second of numpy's sum of an array and a number, in place."""
    x = np.zeros(LARGE["cpu"], np.float32)
    return 2 * x.nbytes / timed(lambda: np.add(x, 1, out=x))


def judged(name: str, rate: float, wanted: Expected) -> Finding:
    """Compare a rate with what is expected."""
    share = rate / wanted.rate
    text = f"{rate:.3g}/s, {share:.0%} of {wanted.rate:.3g} ({wanted.source})"
    if share >= GOOD:
        return Finding(name, OK, text)
    remedy = (
        "Look for other load, throttling or a wrong topology, and run the stage again; plan --rates counts with it."
    )
    return Finding(name, WARNING if share >= POOR else FAILED, text, remedy)


def compared(devices: Sequence[Mapping[str, float]], least: float) -> list[Finding]:
    """Return the devices that are slower than the median one."""
    found = []
    for name in ("flops", "bandwidth") if len(devices) > 1 else ():
        middle = statistics.median(one[name] for one in devices)
        for one in devices:
            if one[name] < least * middle:
                text = f"device {one['device']} has {one[name] / middle:.0%} of the median device's {name}"
                found.append(Finding("devices", FAILED, text, "Replace its host: a run waits for the slowest device."))
    if devices and not found:
        found.append(Finding("devices", OK, f"{len(devices)} measured alone, none far below the median"))
    return found
