"""Terminal output of a plan."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from gspo_jax.planning.topology import CHIPS, counted
from gspo_jax.planning.tune import Try

GB = 1e9


def _print(console: Console, text: str, **style: Any) -> None:
    """Print a line unwrapped, without rich's highlighting."""
    console.print(text, highlight=False, soft_wrap=True, **style)


def show_header(console: Console, facts: Mapping[str, Any]) -> None:
    """Print slice, mesh, minimum chips and expert loads."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in facts["mesh"].items())
    spread = "" if facts["skew"] is None else f"; routers' preferences spread by {facts['skew']:g}"
    _print(
        console,
        f"{facts['topology']}, {counted(facts['chip'], math.prod(facts['mesh'].values()))}, mesh {mesh}; parameters, "
        f"gradients and optimizer alone need {facts['least_chips']}{spread}",
    )
    if CHIPS[facts["chip"]].chiplets > 1:
        _print(console, "each chiplet is a device; below, a chip's figures are those of a chiplet")


def show_fit(console: Console, name: str, facts: Mapping[str, Any]) -> None:
    """Print whether a program fits."""
    fits, gb = "fits" if facts["fits"] else "does not fit", (facts["peak_bytes"] + facts["resident_bytes"]) / GB
    room = f"{gb:.1f} of {facts['limit_bytes'] / GB:.1f} GB"
    _print(console, f"{name} {fits}, {room}, compiled in {facts['compile_s']:.0f} s")


def show_verdict(console: Console, verdict: str) -> None:
    """Print the plan in one sentence."""
    _print(console, verdict, style="bold", markup=False)


def show_program(console: Console, name: str, facts: Mapping[str, Any]) -> None:
    """Print a program's memory, costs and warnings."""
    fits = "fits" if facts["fits"] else "DOES NOT FIT"
    _print(
        console,
        f"\n[bold]{name}[/bold]: {fits}, {facts['peak_bytes'] / GB:.2f} GB beside {facts['resident_bytes'] / GB:.2f} "
        f"of {facts['limit_bytes'] / GB:.2f} GB ({facts['headroom']:.0%} free)",
    )
    held = ", ".join(f"{kind} {size / GB:.2f}" for kind, size in facts["hbm_by_kind"].items() if size > 0.005 * GB)
    on_host = f"; {facts['host_bytes'] / GB:.2f} of host memory" if facts["host_bytes"] else ""
    _print(console, f"  at the peak, GB: {held}{on_host}")
    if decoder := facts.get("decoder"):
        tokens = decoder["pages"] * decoder["page"]
        _print(
            console,
            f"  on each batch shard {decoder['slots']} slots and a pool of {tokens:,} tokens, in pages of "
            f"{decoder['page']}",
        )
    if facts["fits"]:
        _show_costs(console, facts)
    for line in facts.get("largest", []):
        _print(console, f"  {line}", markup=False)
    for text in facts["warnings"]:
        _print(console, f"  warning: {text}", style="yellow", markup=False)


def _show_costs(console: Console, facts: Mapping[str, Any]) -> None:
    seconds, per = facts["seconds"], facts["per"]
    counts = ", ".join(f"{by} {count / 1e12:.2f}" for by, count in facts["flops_by"].items())
    _print(console, f"  Tflop per chip and {per}: {counts} ({facts['flops_apart']:.1%} apart)")
    most, others = facts["collectives"][:4], facts["collectives"][4:]
    for c in [*most, *(c for c in others if "between slices" in c["kind"])]:
        sent = f"{c['count']} times, {c['bytes'] / GB:.2f} GB sent, most in {c['source']}"
        _print(console, f"  {c['kind']} over {c['group']}: {sent}", markup=False)
    if facts["host_link_bytes"]:
        _print(console, f"  to and from host memory: {facts['host_link_bytes'] / GB:.2f} GB")
    bounds = ", ".join(f"{what} {1e3 * s:.2f}" for what, s in seconds.items() if s is not None)
    _print(console, f"  ms: {bounds}; {facts['binds']} binds")
    parts = ", ".join(f"{part.replace('_', ' ')} {1e3 * s:.2f}" for part, s in facts["executed_by"].items())
    _print(console, f"  executed, ms: {parts}")
    if facts["projected_step_s"] is None:
        _print(console, "  no projection: the flop counts are too far apart", style="yellow")
    elif seconds["floor"]:
        low, high = facts["projected_step_s"]
        _print(
            console,
            f"  projected (ahead of time, not measured): {1e3 * low:.1f} ms with collectives hidden, "
            f"{1e3 * high:.1f} ms with them exposed, {low / seconds['floor']:.2f} to "
            f"{high / seconds['floor']:.2f} times the floor",
        )


def show_cycles(console: Console, facts: Mapping[str, Any]) -> None:
    """Print executed and estimated times as a markdown table."""
    for line in cycles_table(facts["cycles"]):
        _print(console, f"  {line}", markup=False)


def cycles_table(found: Mapping[str, Any]) -> list[str]:
    """Return a markdown table of executed and estimated times, in ms."""
    head = ["operation", "bound by", "count", "executed", "estimated", "ratio", "why"]
    rows = [
        [
            f"`{line['opcode']} {line['scope']}`".replace(" `", "`") if line["opcode"] else line["scope"],
            line["bound"],
            f"{line['count']}",
            *(f"{1e3 * line[of]:.2f}" for of in ("executed_s", "estimated_s")),
            f"{line['estimated_s'] / line['executed_s']:.2f}" if line["executed_s"] else "",
            line["why"],
        ]
        for line in found["lines"]
    ]
    total = [f"{1e3 * found[of]:.2f}" for of in ("executed_s", "estimated_s")]
    ratio = f"{found['estimated_s'] / max(found['executed_s'], 1e-12):.2f}"
    rows.append(["all with an estimate", "", "", *total, ratio, ""])
    rows.append(["all without", "", "", f"{1e3 * found['without_estimate_s']:.2f}", "", "", ""])
    return markdown_table(head, rows)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a markdown table's lines."""
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def show_iteration(console: Console, facts: Mapping[str, Any]) -> None:
    """Print an iteration's phases and waits."""
    _print(
        console,
        f"\n[bold]iteration[/bold] with lengths {facts['lengths']} (projected, not measured): "
        f"{facts['seconds']:.1f} s, {facts['tokens_per_s_per_chip']:,.0f} response tokens per second and chip",
    )
    for phase, seconds in facts["by_phase"].items():
        waits = ", ".join(f"{why} {s:.1f}" for why, s in facts["waits"].get(phase, {}).items() if s >= 0.05)
        if seconds:
            _print(console, f"  {phase:8} {seconds:7.1f} s" + (f", of it {waits}" if waits else ""))
    prefixes = facts["prefix_tokens"]
    kept = f", up to {prefixes:,.0f} tokens of prefixes on a batch shard" if prefixes else ""
    _print(
        console,
        f"  {facts['tokens']:,.0f} tokens, {facts['decode_steps']:,.0f} decode steps in {facts['sampling_calls']:.1f} "
        f"sampling calls, {facts['microbatches']:.1f} micro-batches per update{kept}",
    )


def show_try(console: Console, one: Try) -> None:
    """Print one tried setting."""
    seconds = "" if one.seconds is None else f"{one.seconds:.1f} s"
    free = "" if one.headroom is None else f"{one.headroom:.0%} free"
    changes = " ".join(f"{field}={value}" for field, value in one.changes.items()) or "as the config has it"
    _print(
        console, f"{one.part:9} {seconds:>9} {free:>9}  {changes}" + (f": {one.note}" if one.note else ""), markup=False
    )
