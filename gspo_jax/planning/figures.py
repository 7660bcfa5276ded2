"""Flops, bytes, collectives, times and warnings of one compiled program."""

from typing import Any

from gspo_jax.planning import costs as costs_lib
from gspo_jax.planning import executed
from gspo_jax.planning.memory import shortened
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.setting import Setting

AGREEMENT = 0.02
"""Maximum relative spread of flop counts for a projection."""
MUCH = 2e9
"""Bytes per chip in whole-slice all-reduces above which to warn."""


def figures(
    costs: costs_lib.Costs,
    name: str,
    setting: Setting,
    *,
    traced_flops: float,
    elapsed: float,
) -> dict[str, Any]:
    """Return figures of a program, or of one decode step, on one chip.

    `traced_flops` is per chip. `elapsed` is the executed time with exposed collective time.
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
        "dcn": costs.dcn / chip.dcn if costs.dcn else None,
        "attention": attention / chip.flops,
        "per_op": costs.seconds(Rates(chip.flops, chip.bandwidth, chip.links)),
        "executed": costs.executed(rates),
        "exposed": elapsed - costs.executed(rates),
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
        "dcn_bytes": costs.dcn,
        "seconds": seconds,
        "executed_by": executed.parts(costs, rates),
        "binds": max(("compute", "hbm", "ici", "dcn"), key=lambda what: seconds[what] or 0.0),
    }
    if name in ("update", "score") and apart > AGREEMENT:
        return facts | {"projected_step_s": None, "projected_mfu": None}
    low = seconds["executed"] / rates.efficiency  # with collectives hidden; `high` with them exposed
    high = low + costs.sent / rates.links + costs.dcn / rates.dcn
    mfu = [needed / chip.flops / max(t, 1e-12) for t in (high, low)]
    return facts | {"projected_step_s": [low, high], "projected_mfu": mfu}


def warnings(costs: costs_lib.Costs, setting: Setting) -> list[str]:
    """Return warnings for a program that fits in memory."""
    found = []
    reduced = [
        (times * t.bytes, t.scope)
        for times, t in costs.collectives
        if t.kind == "all-reduce" and t.group == setting.mesh.size // setting.slices > 1 and times * t.bytes > MUCH
    ]
    if reduced:
        sent = sum(size for size, _ in reduced) / 1e9
        found.append(f"{sent:.1f} GB of all-reduces over the whole slice ({shortened(max(reduced)[1])})")
    copied = sum(
        c.times * c.bytes
        for c in costs.operations
        if c.operation.startswith("copy ") and c.times * c.bytes > 0.02 * costs.bytes
    )
    if copied:
        found.append(f"{copied / 1e9:.1f} GB of HBM traffic only changes the layout of arrays")
    if unknown := sorted(kernel for kernel in costs.kernels if not kernel.startswith(executed.ATTENTION)):
        found.append(f"the work of kernels without a cost estimate is not counted: {', '.join(unknown)}")
    if costs.unsized:
        found.append(f"grids known only at run time are counted as one step: {', '.join(costs.unsized)}")
    if costs.unknown:
        found.append(f"{len(costs.unknown)} loops with data-dependent trip counts are counted as one iteration")
    return found
