"""Flops, bytes, collectives, time bounds and warnings of one compiled program."""

from typing import Any

from gspo_jax.parallel import costs as costs_lib
from gspo_jax.planning.memory import shortened
from gspo_jax.planning.setting import Setting

EFFICIENCY = 0.83
"""Ratio of the summed per-operation bounds to the measured step time, in published v5p training of dense models with
32B to 128B parameters."""
AGREEMENT = 0.02
"""Largest relative difference between the three flop counts for which a projection is made."""
MUCH = 2e9
"""Bytes per chip in all-reduces over the whole slice above which a warning is given."""


def figures(
    costs: costs_lib.Costs, name: str, setting: Setting, *, traced_flops: float, scheduled: costs_lib.Program | None
) -> dict[str, Any]:
    """Flops, bytes, collectives and time bounds of a program, or of one step of the decode loop, on one chip.

    Args:
      costs: costs read off the compiled text.
      name: name of the program.
      setting: the run and its chips.
      traced_flops: flops of the traced program, per chip.
      scheduled: the program whose schedule shows how much of the collectives' time is exposed; None to leave that out.
    """
    chip, (forward, times) = setting.chip, setting.formula(name)
    attention = forward.attention * times if costs.kernels else 0.0  # attention kernels declare no flops
    if name == "update":
        written = forward.forward + forward.backward(recomputed=setting.recomputes)
        needed = forward.needed
    else:
        written = needed = forward.forward
    found = costs.flops + attention
    rates = costs_lib.Rates(chip.flops, chip.bandwidth, chip.links)
    with_kernels = rates._replace(kernel=attention / chip.flops / max(1.0, sum(costs.kernels.values())))
    seconds = {
        "compute": found / chip.flops,
        "hbm": costs.bytes / chip.bandwidth,
        "ici": costs.sent / chip.links,
        "attention": attention / chip.flops,
        "per_op": costs.seconds(rates),
        "exposed": None if scheduled is None else scheduled.elapsed(with_kernels) - costs.seconds(with_kernels),
        "floor": max(needed / chip.flops, setting.least_bytes(name) / chip.bandwidth),
    }
    counts = {"formula": written, "traced": traced_flops + attention, "compiled": found}
    if name == "sample_decode":  # the trace covers the whole program, not one step
        del counts["traced"]
    apart = max(counts.values()) / min(counts.values()) - 1 if all(counts.values()) else 0.0
    facts: dict[str, Any] = {
        "per": "step of the decode loop, all responses at their longest" if name == "sample_decode" else "run",
        "flops": found,
        "flops_by": counts,
        "flops_apart": round(apart, 4),
        "hbm_bytes": costs.bytes,
        "host_link_bytes": sum(c.times * c.host_bytes for c in costs.operations),
        "collectives": [
            {"kind": kind, "group": group, "count": round(count), "bytes": sent, "source": shortened(scope)}
            for (kind, group), (count, sent, scope) in costs.by_group().items()
        ],
        "ici_bytes": costs.sent,
        "seconds": seconds,
        "binds": max(("compute", "hbm", "ici"), key=lambda what: seconds[what]),
    }
    reliable = name not in ("update", "score") or apart <= AGREEMENT
    return facts | _projection(seconds, needed / chip.flops, reliable=reliable)


def _projection(seconds: dict[str, Any], needed_s: float, *, reliable: bool) -> dict[str, Any]:
    """Projected step time and MFU as [collectives hidden, exposed]; None unless the flop counts agree."""
    if not reliable:
        return {"projected_step_s": None, "projected_mfu": None}
    low = (seconds["per_op"] + seconds["attention"]) / EFFICIENCY
    high = low + seconds["ici"]
    return {"projected_step_s": [low, high], "projected_mfu": [needed_s / max(t, 1e-12) for t in (high, low)]}


def warnings(costs: costs_lib.Costs, setting: Setting, slices: int) -> list[str]:
    """Warnings about the costs of a program that fits in memory."""
    found = []
    reduced = [
        (times * t.bytes, t.scope)
        for times, t in costs.collectives
        if t.kind == "all-reduce" and t.group == setting.mesh.size > 1 and times * t.bytes > MUCH
    ]
    if reduced:
        sent = sum(size for size, _ in reduced) / 1e9
        found.append(f"{sent:.1f} GB of all-reduces over the whole slice ({shortened(max(reduced)[1])})")
    if slices > 1:
        found.append("traffic between slices is counted as if it went over ICI; the network between them is slower")
    copied = sum(
        c.times * c.bytes
        for c in costs.operations
        if c.operation.startswith("copy ") and c.times * c.bytes > 0.02 * costs.bytes
    )
    if copied:
        found.append(f"{copied / 1e9:.1f} GB of HBM traffic only changes the layout of arrays")
    if costs.unknown:
        found.append(f"{len(costs.unknown)} loops with data-dependent trip counts are counted as one iteration")
    return found
