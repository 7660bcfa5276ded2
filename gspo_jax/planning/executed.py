"""Executed work of kernels, for rows at full length and the expert loads of loads.py.

Each kernel's module says what it computes: blocks that a mask visits (packed_attention_tpu.py) or tiles that a load
visits (visits_tpu.py). Other kernels that execute more than they declare, or whose grid is known only at run time, need
a row in `kernels`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gspo_jax.kernels import (
    decode_attention_tpu,
    decode_experts_tpu,
    delta_rule_tpu,
    packed_attention_tpu,
    visits_tpu,
)
from gspo_jax.kernels.row_sums_tpu import ROW_SUMS
from gspo_jax.planning import loads as loads_lib
from gspo_jax.planning.cost_records import Cost, Costs, KernelCall, OpWork
from gspo_jax.planning.costs import CostedProgram, Kernels
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.setting import Setting
from gspo_jax.planning.topology import Chip

GROUPED: tuple[str, ...] = ("grouped_matmul", "grouped_outer")
"""Name prefixes."""
ATTENTION: tuple[str, ...] = ("packed_", "paged_attention", delta_rule_tpu.NAME)
"""Name prefixes."""


def costed(setting: Setting, name: str, text: str) -> CostedProgram:
    """Return a program of the run with its cost model."""
    work = {"kernels": kernels(setting, name), "passes": passes(setting, name)}
    return CostedProgram(text, filled=filled(setting, name), machine=setting.machine, **work)  # pyright: ignore[reportArgumentType]


def kernels(setting: Setting, name: str) -> Kernels:
    """Return the executed work of a program's kernels, by name prefix."""
    packed, grouped = _packed(setting, name), _grouped(setting, name)
    fill = setting.filled(name)

    def sums(call: KernelCall) -> OpWork:  # only rows that arrive
        tile, rows = _tile(call), next(a.dims[0] for a in call.operands if len(a.dims) == 2)
        visits = math.ceil(fill * rows / tile) + call.results[0].dims[0]
        return OpWork(fill * call.declared.flops, call.declared.bytes, visits)

    own = {"paged_attention": _paged(setting), "decode_experts": _decode_experts(setting, name)}
    own[delta_rule_tpu.NAME] = delta_rule(setting.chip)
    return own | {"packed_attention": packed, ROW_SUMS: sums, **dict.fromkeys(GROUPED, grouped)}


def passes(setting: Setting, name: str) -> Callable[[Sequence[KernelCall]], float]:
    """Return how often the busiest shard uses its experts' buffers again, from the kernels of such a pass."""

    def more(calls: Sequence[KernelCall]) -> float:
        rooms = [_room(call) for call in calls if call.name.startswith(GROUPED)]
        return max((_loads(setting, name, room).passes(room) for room in rooms), default=0.0)

    return more


def _tile(call: KernelCall) -> int:
    found = re.search(r"_(\d+)(?:\.|$)", call.name)
    assert found, f"{call.name} does not end in a number"
    return int(found[1])


def _room(call: KernelCall) -> int:
    """Return the rows of a grouped kernel's buffer."""
    return next(a.dims[0] for a in call.operands if len(a.dims) == 2)


def _loads(setting: Setting, name: str, room: int) -> loads_lib.Loads:
    """Return the loads of experts' buffers with `room` rows."""
    experts, shards = setting.routed.num_experts, setting.expert_shards(name)
    arriving = setting.filled(name, padded=True) * room
    if name == "sample_decode":  # a small buffer is rounded up: find the phase that has this one
        slots, _ = setting.decoder_size
        phases = (setting.model.experts_per_token * (slots >> phase) for phase in range(slots.bit_length()))
        arriving = next((pairs for pairs in phases if setting.room(name, pairs) == room), arriving)
    return loads_lib.draw(arriving, experts, shards, skew=setting.skew)


def filled(setting: Setting, name: str) -> dict[str, float]:
    """Return the needed fraction of a kernel's declared flops, by name prefix."""
    return {ROW_SUMS: 0.0, **dict.fromkeys(GROUPED, setting.filled(name))}


def _packed(setting: Setting, name: str) -> Callable[[KernelCall], OpWork]:
    """Count the parts of blocks that segments visit."""
    rows = setting.rows_at_once(name)

    def work(call: KernelCall) -> OpWork:
        query = next(a for a in call.operands if len(a.dims) == 2)
        total, width = query.dims
        tokens = total // rows
        size, prompt = setting.row_size, name == "sample_prefill"
        length = size["prompt"] if prompt else tokens
        block = packed_attention_tpu.block_length(length, round(query.bytes / math.prod(query.dims)))
        if prompt:  # rows end to end, each with one text
            size = {"prompt": 0, "response": length + -length % block, "group_size": tokens}
        spans, part = spans_at_full_length(tokens, **size), packed_attention_tpu.part_length(block)
        visits, computed = (rows * packed_attention_tpu.visited_blocks(*spans, block=size) for size in (block, part))
        products = 5 if call.name.startswith("packed_attention_backward") else 2
        return OpWork(2.0 * products * width * part**2 * computed, call.declared.bytes, visits)

    return work


def _paged(setting: Setting) -> Callable[[KernelCall], OpWork]:
    """Count a grid step per block of keys and values, which both cores share."""

    def work(call: KernelCall) -> OpWork:
        blocks = math.ceil(call.declared.bytes / decode_attention_tpu.BLOCK_BYTES)
        return OpWork(call.declared.flops, call.declared.bytes, math.ceil(blocks / setting.chip.cores))

    return work


def _decode_experts(setting: Setting, name: str) -> Callable[[KernelCall], OpWork]:
    """Count whole parts of experts' rows on the busiest shard, and the one-hot products that pick and return them."""

    def work(call: KernelCall) -> OpWork:
        tokens = next(a.dims[0] for a in call.operands if len(a.dims) == 2 and a.dtype in ("bf16", "f32"))
        _, _, D, F = next(a.dims for a in call.operands if len(a.dims) == 4)
        shards, model, rows = setting.expert_shards(name), setting.model, decode_experts_tpu.PART
        blocks, among = map(int, re.findall(r"_(\d+)", call.name)[:2])
        arriving = among * model.experts_per_token / shards
        parts = tokens / among * loads_lib.draw(arriving, model.num_experts, shards, skew=setting.skew).parts(rows)
        return OpWork(parts * rows * (6 * D * F + 4 * blocks * among * D), call.declared.bytes)

    return work


def delta_rule(chip: Chip) -> Callable[[KernelCall], OpWork]:
    """Count the cycles of each chunk and value head."""

    def work(call: KernelCall) -> OpWork:
        cycles = next(n for kernel, n in delta_rule_tpu.CYCLES.items() if call.name.startswith(kernel))
        rows = (a for a in (*call.operands, *call.results) if len(a.dims) == 2 and a.dtype in ("bf16", "f32"))
        tokens, width = min(a.dims for a in rows)  # of the outputs, or of their gradient
        chunks = tokens * width / delta_rule_tpu.CHUNK**2
        return OpWork(chunks * cycles * chip.flops / (chip.clock * chip.cores), call.declared.bytes)

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
    """Count whole tiles with a group's rows, and weights of non-empty groups, on the busiest shard.

    Cost estimates assume full buffers.
    """

    def work(call: KernelCall) -> OpWork:
        tile, room = _tile(call), _room(call)
        sizes = _loads(setting, name, room).part(room, first=not call.rare)
        if not len(sizes):  # no such pass in any draw
            return OpWork(0.0, 0.0, 0.0)
        experts, draws = sizes.shape[1], len(sizes)
        rows = float(np.mean([visits_tpu.executed_rows(one, tile) for one in sizes]))
        ends = sizes.cumsum(axis=1)
        visits = float(np.where(sizes > 0, -(-ends // tile) - (ends - sizes) // tile, 0).sum()) / draws
        filled = np.count_nonzero(sizes) / draws
        outer = call.name.startswith(GROUPED[1])  # writes zeros for empty groups
        weights = sum(a.bytes / a.dims[0] for a in (*call.operands, *call.results) if len(a.dims) == 3)
        flops, moved, _ = call.declared
        rest = (moved - weights * min(experts, room)) * float(ends[:, -1].mean()) / room
        return OpWork(flops * rows / room, weights * filled + rest, visits + outer * (experts - filled))

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
    if cost.waits == "kernel":
        return "kernels"
    if cost.waits == "collective":
        return "collectives"
    bound = cost.bound(rates)
    return "matmul" if bound == "compute" else bound
