"""Stage: what is here. Chips, their memory and places, versions, and what a run needs of the hosts."""

from typing import Any

import jax

from gspo_jax import doctor
from gspo_jax.bringup.stages import FAILED, WARNING, Given, Result
from gspo_jax.config import base
from gspo_jax.doctor import Finding
from gspo_jax.planning.calibration import generation
from gspo_jax.planning.topology import CHIPS

LEFT_OUT = ("mesh", "strays", "run folder", "disk", "bubblewrap")
"""Checks of `doctor` that are of a run, or of what only some rewards need."""
LEAST_MEMORY = 0.9
"""Of what the compiler grants a chip of its generation."""


def run(given: Given) -> Result:
    """Check this host, and list its devices."""
    findings = [one for one in doctor.examine(base(), None) if one.check not in LEFT_OUT]
    facts = [facts_of(device) for device in jax.local_devices()]
    kind = generation(jax.devices()[0])
    if (kinds := {device.device_kind for device in jax.devices()}) - {jax.devices()[0].device_kind}:
        text = f"devices of different kinds: {', '.join(sorted(kinds))}"
        findings.append(Finding("devices", FAILED, text, "Run on chips of one kind."))
    findings += memory_findings(kind, [fact["memory"] for fact in facts])
    return findings, {"kind": kind, "devices": facts}


def facts_of(device: Any) -> dict[str, Any]:
    """Return what a device says of itself."""
    memory = (device.memory_stats() or {}).get("bytes_limit")
    place = {name: getattr(device, name, None) for name in ("coords", "core_on_chip", "slice_index")}
    return {"id": device.id, "kind": device.device_kind, "memory": memory, **place}


def memory_findings(kind: str, sizes: list[int | None]) -> list[Finding]:
    """Warn of chips with less memory than `plan` counts on."""
    if kind not in CHIPS:
        return []
    granted = CHIPS[kind].memory
    if short := [size for size in sizes if size is not None and size < LEAST_MEMORY * granted]:
        text = f"a chip gives {min(short) / 1e9:.1f} GB, and plan counts on {granted / 1e9:.1f} GB of a {kind}"
        return [Finding("memory", WARNING, text, "Stop other processes that hold it; leave plan's headroom free.")]
    return []
