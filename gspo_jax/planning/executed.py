"""Work that kernels execute beyond what is needed, for rows at their longest and random expert loads; parts of a time.

A kernel's own module says what it computes: attention_tpu.py the blocks that its mask visits, grouped_matmul_tpu.py the
tiles that a load visits. Another kernel whose work is not what it declares takes a row in `kernels`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np

from gspo_jax.kernels import attention_tpu, grouped_matmul_tpu, packed_attention_tpu
from gspo_jax.parallel.costs import Cost, Costs, KernelCall, Kernels, Work
from gspo_jax.parallel.rates import Rates
from gspo_jax.planning.setting import Setting
from gspo_jax.training.packing import full_row

GROUPED: tuple[str, ...] = ("grouped_matmul", "grouped_outer")
"""Beginnings of the names of the grouped matmul kernels."""
ATTENTION: tuple[str, ...] = ("splash_", "packed_attention", "ring_softmax")
"""Beginnings of the names of the attention kernels."""
DRAWS = 16
"""Random expert loads over which executed rows are averaged."""


def kernels(setting: Setting, name: str) -> Kernels:
    """Return the functions for the executed work of the kernels in one program."""
    splash, grouped = _splash(setting, name), _grouped(setting, name)
    return {"splash_": splash, "packed_attention": _packed(setting), **dict.fromkeys(GROUPED, grouped)}


def _splash(setting: Setting, name: str) -> Callable[[KernelCall], Work]:
    """Attention computes every block that its mask visits, whole."""
    T, prompt, responses = setting.attention_rows(name)
    heads = setting.model.num_heads // setting.model.num_kv_heads

    def work(call: KernelCall) -> Work:
        computed = attention_tpu.computed_products(T, T, heads=heads, prompt=prompt, responses=responses)
        count = next(count for begin, count in computed.items() if call.name.startswith(begin))
        *rows, group, queries, width = next(a.dims for a in call.operands if a.dtype in ("bf16", "f32"))
        assert group == heads and 0 <= queries - T < T, (
            f"{call.name} has queries {queries} by {group}, not {T} by {heads}"
        )
        return Work(2.0 * width * count * math.prod(rows), call.declared.bytes)

    return work


def _packed(setting: Setting) -> Callable[[KernelCall], Work]:
    """Attention over packed rows computes every pair of blocks that is visited, whole; a shard has one row at a time.

    Rows are taken to hold as many responses of full length as fit, and where none fits, one as long as the row.
    """
    size = setting.row_size

    def work(call: KernelCall) -> Work:
        q = next(a for a in call.operands if len(a.dims) == 4)
        *heads, tokens, width = q.dims
        block = packed_attention_tpu.block_length(tokens, int(q.bytes / math.prod(q.dims)))
        pairs = packed_attention_tpu.visited_blocks(*_row_at_full_length(tokens, **size), block=block) * block**2
        products = 5 if call.name.startswith("packed_attention_backward") else 2
        return Work(2.0 * width * products * pairs * math.prod(heads), call.declared.bytes)

    return work


def _row_at_full_length(tokens: int, *, prompt: int, response: int, group_size: int) -> tuple[np.ndarray, ...]:
    """Prompt's start and end and the own segment's start of each token, [1, tokens], as in `packed_attention.Spans`."""
    response = min(response, tokens - prompt)
    groups, count = full_row(tokens, prompt=prompt, response=response, group_size=group_size)
    before = np.zeros(tokens, np.int32)
    after, own = before.copy(), np.arange(1, tokens + 1, dtype=np.int32)
    for begin in (prompt + count * response) * np.arange(groups):
        own[begin : begin + prompt] = begin
        for start in begin + prompt + response * np.arange(count):
            inside = slice(start, start + response)
            before[inside], after[inside], own[inside] = begin, begin + prompt, start
    return before[None], after[None], own[None]


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
        rows = np.mean([grouped_matmul_tpu.executed_rows(sizes, int(tile[1])) for sizes in loads])
        filled = np.count_nonzero(loads) / DRAWS
        held = min(experts // shards, room)
        weights = sum(a.bytes / a.dims[0] for a in (*call.operands, *call.results) if len(a.dims) == 3)
        flops, moved = call.declared
        return Work(flops * rows / room, weights * filled + (moved - weights * held) * arrived / room)

    return work


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
    if name.startswith(GROUPED):
        return "grouped_matmul"
    if cost.waits == "collective":
        return "collectives"
    if cost.waits and cost.seconds(rates) == rates.operation:
        return "latency"
    compute = cost.executed.flops / rates.flops >= cost.executed.bytes / rates.bandwidth
    return "matmul" if compute and cost.executed.flops else "memory"
