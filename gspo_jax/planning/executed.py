"""Executed work of kernels, for rows at full length and random expert loads.

Each kernel's module says what it computes: blocks that a mask visits (attention_tpu.py, packed_attention_tpu.py) or
tiles that a load visits (visits_tpu.py). Other kernels that execute more than they declare need a row in `kernels`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np

from gspo_jax.kernels import attention_tpu, packed_attention_tpu, visits_tpu
from gspo_jax.kernels.row_sums_tpu import ROW_SUMS
from gspo_jax.planning.cost_records import Cost, Costs, KernelCall, OpWork
from gspo_jax.planning.costs import Kernels
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.setting import Setting

GROUPED: tuple[str, ...] = ("grouped_matmul", "grouped_outer")
"""Name prefixes."""
ATTENTION: tuple[str, ...] = ("splash_", "packed_", "ring_softmax")
"""Name prefixes."""
DRAWS = 16
"""Random expert loads to average over."""


def kernels(setting: Setting, name: str) -> Kernels:
    """Return the executed work of a program's kernels, by name prefix."""
    splash, packed, grouped = _splash(setting), _packed(setting), _grouped(setting, name)
    fill = setting.filled(name)

    def sums(call: KernelCall) -> OpWork:  # only rows that arrive
        return call.declared._replace(flops=fill * call.declared.flops)

    return {"splash_": splash, "packed_attention": packed, ROW_SUMS: sums, **dict.fromkeys(GROUPED, grouped)}


def filled(setting: Setting, name: str) -> dict[str, float]:
    """Return the needed fraction of a kernel's declared flops, by name prefix."""
    return {ROW_SUMS: 0.0, **dict.fromkeys(GROUPED, setting.filled(name))}


def _splash(setting: Setting) -> Callable[[KernelCall], OpWork]:
    """Count whole blocks that the mask visits."""
    T = setting.config.data.max_prompt_length
    padded = attention_tpu.padded_length(T)
    heads = setting.model.num_heads // setting.model.num_kv_heads

    def work(call: KernelCall) -> OpWork:
        count = attention_tpu.computed_products(T, heads=heads)
        *rows, group, queries, width = next(a.dims for a in call.operands if a.dtype in ("bf16", "f32"))
        assert (group, queries) == (heads, padded), (
            f"{call.name} has queries {queries} by {group}, not {padded} by {heads}"
        )
        return OpWork(2.0 * width * count * math.prod(rows), call.declared.bytes)

    return work


def _packed(setting: Setting) -> Callable[[KernelCall], OpWork]:
    """Count the parts of blocks that segments visit."""

    def work(call: KernelCall) -> OpWork:
        query = next(a for a in call.operands if len(a.dims) == 2)
        tokens, width = query.dims
        block = packed_attention_tpu.block_length(tokens, round(query.bytes / math.prod(query.dims)))
        block = packed_attention_tpu.part_length(block)
        visits = packed_attention_tpu.visited_blocks(*spans_at_full_length(tokens, **setting.row_size), block=block)
        products = 5 if call.name.startswith("packed_attention_backward") else 2
        return OpWork(2.0 * products * width * block**2 * visits, call.declared.bytes)

    return work


def spans_at_full_length(
    tokens: int, *, prompt: int, response: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of `packed_attention.Spans`, [1, tokens], for prompts with full-length responses."""
    S, T, G = prompt, response, group_size
    at = np.arange(tokens)
    begin, end, own = np.zeros(tokens, int), np.zeros(tokens, int), at + 1
    first = 0
    while first + S + T <= tokens:
        count = min(G, (tokens - first - S) // T)
        own[first : first + S] = first
        for start in range(first + S, first + S + count * T, T):
            own[start : start + T] = start
            begin[start : start + T], end[start : start + T] = first, first + S
        first += S + count * T
    return begin[None], end[None], own[None]


def _grouped(setting: Setting, name: str) -> Callable[[KernelCall], OpWork]:
    """Count whole tiles with a group's rows, and weights of non-empty groups, for random loads.

    Cost estimates assume full buffers.
    """
    experts, shards = setting.model.num_experts, setting.expert_shards(name)
    fill = setting.filled(name)

    def work(call: KernelCall) -> OpWork:
        tile = re.search(r"_(\d+)(?:\.|$)", call.name)
        assert tile, f"{call.name} does not end in its tile"
        room = next(a.dims[0] for a in call.operands if len(a.dims) == 2)
        arrived = round(fill * room)
        even = np.full(experts, 1 / experts)
        loads = np.random.default_rng(0).multinomial(arrived * shards, even, DRAWS)[:, : experts // shards]
        rows = np.mean([visits_tpu.executed_rows(sizes, int(tile[1])) for sizes in loads])
        filled = np.count_nonzero(loads) / DRAWS
        held = min(experts // shards, room)
        weights = sum(a.bytes / a.dims[0] for a in (*call.operands, *call.results) if len(a.dims) == 3)
        flops, moved = call.declared
        return OpWork(flops * rows / room, weights * filled + (moved - weights * held) * arrived / room)

    return work


def parts(costs: Costs, rates: Rates) -> dict[str, float]:
    """Return executed seconds by part."""
    found: Counter[str] = Counter()
    for cost in costs.operations:
        found[_part(cost, rates)] += cost.times * cost.seconds(rates)  # pyright: ignore[reportArgumentType]
    return dict(found)


def _part(cost: Cost, rates: Rates) -> str:
    name = cost.operation.partition(" ")[2]
    if name.startswith(ATTENTION):
        return "attention"
    if name.startswith((*GROUPED, ROW_SUMS)):
        return "grouped_matmul"
    if cost.waits == "collective":
        return "collectives"
    if cost.waits and cost.seconds(rates) == rates.operation:
        return "latency"
    compute = cost.executed.flops / rates.flops >= cost.executed.bytes / rates.bandwidth
    return "matmul" if compute and cost.executed.flops else "memory"
