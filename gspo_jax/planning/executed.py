"""Work that kernels execute beyond what is needed, for rows at their longest and random expert loads; parts of a time.

A kernel's own module says what it computes: attention_tpu.py and packed_attention_tpu.py the blocks that a mask visits,
visits_tpu.py the tiles that a load visits. Another kernel whose work is not what it declares takes a row in `kernels`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np

from gspo_jax.kernels import attention_tpu, packed_attention_tpu, visits_tpu
from gspo_jax.kernels.row_sums_tpu import ROW_SUMS
from gspo_jax.planning.costs import Cost, Costs, KernelCall, Kernels, Work
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.setting import Setting

GROUPED: tuple[str, ...] = ("grouped_matmul", "grouped_outer")
"""Beginnings of the names of the grouped matmul kernels."""
ATTENTION: tuple[str, ...] = ("splash_", "packed_", "ring_softmax")
"""Beginnings of the names of the attention kernels."""
DRAWS = 16
"""Random expert loads over which executed rows are averaged."""


def kernels(setting: Setting, name: str) -> Kernels:
    """Return the functions for the executed work of the kernels in one program."""
    splash, packed, grouped = _splash(setting), _packed(setting), _grouped(setting, name)
    sums = _row_sums(setting, name)
    return {"splash_": splash, "packed_attention": packed, ROW_SUMS: sums, **dict.fromkeys(GROUPED, grouped)}


def filled(setting: Setting, name: str) -> dict[str, float]:
    """Return the fraction of a kernel's declared flops that a program needs, by the beginning of the kernel's name."""
    return {ROW_SUMS: 0.0, **dict.fromkeys(GROUPED, setting.filled(name))}


def _splash(setting: Setting) -> Callable[[KernelCall], Work]:
    """Attention of prompts computes every block that its mask visits, whole."""
    T = setting.config.data.max_prompt_length
    heads = setting.model.num_heads // setting.model.num_kv_heads

    def work(call: KernelCall) -> Work:
        count = attention_tpu.computed_products(T, heads=heads)
        *rows, group, queries, width = next(a.dims for a in call.operands if a.dtype in ("bf16", "f32"))
        assert group == heads and 0 <= queries - T < T, (
            f"{call.name} has queries {queries} by {group}, not {T} by {heads}"
        )
        return Work(2.0 * width * count * math.prod(rows), call.declared.bytes)

    return work


def _packed(setting: Setting) -> Callable[[KernelCall], Work]:
    """Attention of packed rows computes the blocks that their segments visit, whole: here responses of full length."""

    def work(call: KernelCall) -> Work:
        query = next(a for a in call.operands if len(a.dims) == 4)
        groups, heads, tokens, width = query.dims
        block = packed_attention_tpu.block_length(tokens, round(query.bytes / math.prod(query.dims)))
        visits = packed_attention_tpu.visited_blocks(*spans_at_full_length(tokens, **setting.row_size), block=block)
        products = 5 if call.name.startswith("packed_attention_backward") else 2
        return Work(2.0 * products * groups * heads * width * block**2 * visits, call.declared.bytes)

    return work


def spans_at_full_length(
    tokens: int, *, prompt: int, response: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spans, as `packed_attention.Spans` has them, of a row of full-length responses after prompts, [1, tokens]."""
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


def _grouped(setting: Setting, name: str) -> Callable[[KernelCall], Work]:
    """A grouped matmul computes the tiles that the groups' rows lie in, whole, and reads the weights of filled groups.

    Each token's choice is random: the groups are drawn. Cost estimates are for buffers that are full.
    """
    experts, shards = setting.model.num_experts, setting.expert_shards(name)
    fill = setting.filled(name)

    def work(call: KernelCall) -> Work:
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
        return Work(flops * rows / room, weights * filled + (moved - weights * held) * arrived / room)

    return work


def _row_sums(setting: Setting, name: str) -> Callable[[KernelCall], Work]:
    """Sums of experts' rows, written as products, are computed for the rows that arrive."""
    fill = setting.filled(name)
    return lambda call: call.declared._replace(flops=fill * call.declared.flops)


def parts(costs: Costs, rates: Rates) -> dict[str, float]:
    """Executed seconds by kind of operation: attention, grouped and other matmuls, memory, latency, collectives."""
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
