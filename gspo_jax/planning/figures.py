"""Flops, bytes, collectives, time bounds, executed time and warnings of one compiled program."""

from typing import Any

from gspo_jax.planning import costs as costs_lib
from gspo_jax.planning import executed
from gspo_jax.planning.memory import shortened
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.setting import Setting

AGREEMENT = 0.02
"""Largest relative difference between the three flop counts for which a projection is made."""
MUCH = 2e9
"""Bytes per chip in all-reduces over the whole slice above which a warning is given."""


def figures(
    costs: costs_lib.Costs, name: str, setting: Setting, *, traced_flops: float, scheduled: costs_lib.Program | None
) -> dict[str, Any]:
    """Flops, bytes, collectives and times of a program, or of one step of the decode loop, on one chip.

    Args:
      costs: costs read off the compiled text.
      name: name of the program.
      setting: the run and its chips.
      traced_flops: flops of the traced program, per chip.
      scheduled: the program whose schedule shows how much of the collectives' time is exposed; None to leave that out.
    """
    chip, rates, (forward, times) = setting.chip, setting.rates, setting.formula(name)
    attention = forward.attention * times if costs.kernels else 0.0  # attention kernels declare no flops
    if name == "update":
        written = forward.forward + forward.backward(recomputed=setting.recomputes)
        needed = forward.needed
    else:
        written = needed = forward.forward
    found = costs.flops + attention
    seconds = {
        "compute": found / chip.flops,
        "hbm": costs.bytes / chip.bandwidth,
        "ici": costs.sent / chip.links,
        "attention": attention / chip.flops,
        "per_op": costs.seconds(Rates(chip.flops, chip.bandwidth, chip.links)),
        "executed": costs.executed(rates),
        "exposed": None if scheduled is None else scheduled.elapsed(rates) - costs.executed(rates),
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
        "executed_by": executed.parts(costs, rates),
        "binds": max(("compute", "hbm", "ici"), key=lambda what: seconds[what]),
    }
    reliable = name not in ("update", "score") or apart <= AGREEMENT
    low = seconds["executed"] / rates.efficiency
    high = low + costs.sent / rates.links
    return facts | _projection(low, high, needed / chip.flops, reliable=reliable)


def _projection(low: float, high: float, needed_s: float, *, reliable: bool) -> dict[str, Any]:
    """Projected step time and MFU as [collectives hidden, exposed]; None unless the flop counts agree."""
    if not reliable:
        return {"projected_step_s": None, "projected_mfu": None}
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
    if unknown := sorted(kernel for kernel in costs.kernels if not kernel.startswith(executed.ATTENTION)):
        found.append(f"the work of kernels without a cost estimate is not counted: {', '.join(unknown)}")
    if costs.unknown:
        found.append(f"{len(costs.unknown)} loops with data-dependent trip counts are counted as one iteration")
    return found
