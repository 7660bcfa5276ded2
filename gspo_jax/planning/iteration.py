"""Time of a whole iteration: simulated sampling, and training from packed rows.

Response lengths are independent draws. Prompts have full length. Left out: dynamic sampling beyond one round, multiple
turns, evaluation, checkpoints, and host work between programs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from gspo_jax.errors import UserError
from gspo_jax.lengths import Lengths
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import costs as costs_lib
from gspo_jax.planning import decoding
from gspo_jax.planning.programs import NAMES
from gspo_jax.planning.setting import Setting
from gspo_jax.rollout import prefixes as prefixes_lib
from gspo_jax.rollout.loop import slot_counts
from gspo_jax.setup import learning
from gspo_jax.training.packing import Packer

PHASES = ("reshard", "prefill", "decode", "reward", "score", "update")
ANSWER_S = {"math_verify_flexible": 0.015}
"""CPU-core seconds per answer of reward functions that read whole answers.

Measured 4 to 15 ms for 13,000 to 51,000 characters without a box and 1 ms with one (`time.process_time` around
`rewards.isolated.math_verify_flexible`). `math_verify` reads only what announces an answer.
"""
FILLING, MEASURED = 10, 6
"""Iterations to fill the buffer of partial rollouts, and to average over."""


class TokenRows(NamedTuple):
    """Rows that the trainer computes, over all chips."""

    microbatches: int
    positions: float
    """Padding included."""
    pairs: float
    """Query-key pairs computed, per layer and head."""
    tokens: int
    """Without padding."""
    seen: float
    """Unmasked pairs."""


class Rate(NamedTuple):
    """Time of a program per row position and pair."""

    position_s: float
    """Chip-seconds without attention."""
    pair_s: float
    """Chip-seconds."""

    def seconds(self, rows: TokenRows, chips: int) -> float:
        """Return the seconds for rows spread evenly over the chips."""
        return (rows.positions * self.position_s + rows.pairs * self.pair_s) / chips

    def padding(self, rows: TokenRows, chips: int) -> float:
        """Return the part of `seconds` spent on padding and masked pairs."""
        return self.seconds(rows, chips) - (rows.tokens * self.position_s + rows.seen * self.pair_s) / chips


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes of a run, and the times of its programs for a batch."""

    chips: int
    prompts: int
    """Prompts per batch, P."""
    group_size: int
    """Responses per prompt, G."""
    prompt_length: int
    limit: int
    """Maximum response tokens."""
    minibatches: int
    """Updates per iteration."""
    in_flight: int | None
    """Prompts per sampling call with partial rollouts, else None."""
    packer: Packer
    reshard_s: float
    deal_s: float
    prefill_s: float
    decoder: decoding.Decoder
    reward_s: float
    update: Rate
    """Forward, backward and optimizer step."""
    forward: Rate
    """Also stands for the prefill of partial rollouts' prefixes."""
    scores: bool
    """True if log π_old is the trainer's, or there is a reference, critic, or teacher of sampled tokens."""


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration, or the mean of several."""

    by_phase: dict[str, float]
    """Seconds per phase."""
    waits: dict[str, dict[str, float]]
    """Idle seconds by phase and reason."""
    tokens: float
    """Response tokens."""
    counts: dict[str, float]
    sampled: Sequence[decoding.Sampled]
    """Per averaged iteration."""

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return sum(self.by_phase.values())

    def facts(self, lengths: str, chips: int) -> dict[str, Any]:
        """Return the iteration as `plan --json` writes it."""
        return {
            "lengths": lengths,
            "seconds": self.seconds,
            "tokens_per_s_per_chip": self.tokens / self.seconds / chips,
            "by_phase": self.by_phase,
            "waits": self.waits,
            "tokens": self.tokens,
            **self.counts,
        }


def program_seconds(facts: Mapping[str, Any], setting: Setting) -> float:
    """Return projected seconds with exposed link time."""
    seconds = facts["seconds"]
    return seconds["executed"] / setting.rates.efficiency + (seconds["exposed"] or 0.0)


KERNEL = "paged_attention"
"""Name of the kernel that reads keys in a decode step."""


def decode_steps(loops: Sequence[tuple[costs_lib.Costs, float]], setting: Setting) -> list[dict[str, Any]]:
    """Return each phase's `decoding.Step` as a dict, from costs and elapsed seconds."""
    rates, data = setting.rates, setting.config.data
    most, pool = setting.decoder_size
    longest = pool.columns * pool.per_response(setting.config.sampling.max_response_length)
    found = []
    for slots, (costs, elapsed) in zip(slot_counts(most, setting.engine.sampler.drafting), loops, strict=False):
        own = sum(c.times * (c.seconds(rates) - rates.launch) for c in costs.operations if KERNEL in c.operation)
        columns = min(slots * longest, pool.pages * pool.columns) + slots * data.max_prompt_length
        fixed_s, key_s = costs.executed(rates) - own, own / columns
        exposed = elapsed - costs.executed(rates)
        step = decoding.Step(slots, fixed_s / rates.efficiency + exposed, key_s / rates.efficiency)
        found.append(step._asdict())
    return found


def make_run(programs: Mapping[str, Mapping[str, Any]], setting: Setting, *, tokens_per_step: float = 1.0) -> Recipe:
    """Return the recipe of a planned run, whose slots sample so many tokens in a step.

    Raises:
      UserError: a program is missing or does not fit.
    """
    for name in NAMES:
        if "seconds" not in programs.get(name, {}):
            why = "does not fit" if name in programs else "is not among --programs"
            raise UserError(f"--lengths needs the times of all programs, and {name} {why}")
    config, chips = setting.config, setting.mesh.size
    data, training, engine = config.data, config.training, setting.engine
    scored = engine.critic is not None or engine.scoring_teacher(engine.teacher_shapes) is not None
    scored = scored or engine.objective.by_energy
    hosts = len({device.process_index for device in setting.mesh.devices.flat})
    workers = 1 if config.scoring.workers is None else config.scoring.workers  # the cores of a host are not known here
    answers = math.ceil(data.prompts_per_batch * config.sampling.group_size / (hosts * workers))
    return Recipe(
        chips=chips,
        prompts=data.prompts_per_batch,
        group_size=config.sampling.group_size,
        prompt_length=data.max_prompt_length,
        limit=config.sampling.max_response_length,
        minibatches=training.minibatches,
        in_flight=config.sampling.partial.prompts,
        packer=setting.engine.packer,
        reshard_s=program_seconds(programs["reshard"], setting),
        deal_s=program_seconds(programs["deal"], setting),
        prefill_s=program_seconds(programs["sample_prefill"], setting),
        decoder=dataclasses.replace(
            _decoder(setting, programs["sample_decode"]["steps"]), tokens_per_step=tokens_per_step
        ),
        reward_s=answers * sum(ANSWER_S.get(name, 0.0) for name in config.rewards),
        update=rate(programs["update"], setting, "update"),
        forward=rate(programs["score"], setting, "score"),
        scores=learning.recomputes(config) or config.reference.kl_weight > 0 or scored,
    )


def rate(facts: Mapping[str, Any], setting: Setting, name: str) -> Rate:
    """Return the rate of "update" or "score" as planned, at full length."""
    rows, chips, seconds = full_rows(setting, name), setting.mesh.size, program_seconds(facts, setting)
    times = setting.config.training.minibatches if name == "score" else 1
    attention = facts["executed_by"].get("attention", 0.0) / setting.rates.efficiency
    return Rate(chips * (seconds - attention) / (times * rows.positions), chips * attention / (times * rows.pairs))


def full_rows(setting: Setting, name: str) -> TokenRows:
    """Return the rows of "update" or "score" as planned, at full length."""
    packer, work = setting.engine.packer, setting.work(name)
    parts = setting.mesh.size / (packer.minibatches if name == "score" else 1)
    positions = parts * work.tokens
    count = round(positions / (packer.shards * packer.row_lengths[0]))
    return TokenRows(count, positions, parts * work.pairs, round(positions), parts * work.pairs)


def _decoder(setting: Setting, steps: list[dict[str, Any]]) -> decoding.Decoder:
    config, sampler, unfinished = setting.config, setting.engine.meshes.sampler, setting.config.sampling.partial
    in_flight = unfinished.prompts or config.data.prompts_per_batch
    pieces = setting.engine.sampler.pieces(in_flight * config.sampling.group_size)
    slots, pool = setting.decoder_size
    return decoding.Decoder(
        shards=mesh_lib.batch_shards(dict(sampler.shape)),
        lockstep=sampler.shape["expert"],
        steps=tuple(decoding.Step(**step) for step in steps),
        prompt=config.data.max_prompt_length,
        page=pool.columns,
        pages=None if pool.is_whole(slots, config.sampling.max_response_length) else pool.pages,
        poll_steps=None if pieces is None else pieces.poll_steps,
        share=1.0 if unfinished.prompts is None else unfinished.share,
    )


def packed_rows(packer: Packer, lengths: Int[np.ndarray, "P G"], *, prompt: int) -> list[TokenRows]:
    """Return the rows of each mini-batch.

    A micro-batch has one row per shard and attends as long as the busiest.
    """
    flat, parts = lengths.reshape(-1), packer.parts(lengths.reshape(-1))
    packing, found = packer(flat, np.full_like(flat, prompt)), []
    for index, own in enumerate(parts):
        at = np.flatnonzero(packing.responses[index] >= 0)
        shard = at // (packing.responses.shape[1] // packer.shards)
        turn = packing.kind[index][at] * (packing.turn.max() + 1) + packing.turn[index][at]
        rows = np.stack([turn, shard, packing.prompt[index][at]])
        prompts = np.unique(rows, axis=1)
        n = flat[packing.responses[index][at]].astype(np.float64)
        busy = np.zeros((turn.max() + 1, packer.shards))
        np.add.at(busy, tuple(rows[:2]), n * (n + 1) / 2 + prompt * n)
        np.add.at(busy, tuple(prompts[:2]), prompt * (prompt + 1) / 2)
        tokens = int(own.sum()) + prompts.shape[1] * prompt
        positions = packer.shards * int(packing.slots[index])
        pairs = packer.shards * float(busy.max(axis=1).sum())
        found.append(TokenRows(int(packing.turns[index].sum()), positions, pairs, tokens, float(busy.sum())))
    return found


def prefix_rows(prefix: Int[np.ndarray, " B"], *, group_size: int, prompt: int, limit: int, shards: int) -> TokenRows:
    """Return the rows of re-read prefixes: as many on each batch shard as the fullest needs."""
    if not prefix.any():
        return TokenRows(0, 0, 0, 0, 0)
    groups, longest = np.arange(len(prefix)) // group_size, prefixes_lib.row_tokens(prompt, limit)
    places, rows, width = prefixes_lib.place(
        prefix, np.full_like(prefix, prompt), groups, shards=shards, longest=longest
    )
    busy, tokens = np.zeros((rows, shards)), int(prefix.sum())
    for shard, own in enumerate(places):
        for i, at in own.items():
            n = float(prefix[i])
            busy[at.row, shard] += n * (n + 1) / 2 + prompt * n
        for row, _ in {(at.row, at.prompt) for at in own.values()}:
            busy[row, shard] += prompt * (prompt + 1) / 2
            tokens += prompt
    return TokenRows(rows, shards * rows * width, shards * float(busy.max(axis=1).sum()), tokens, float(busy.sum()))


def batches(run: Recipe, lengths: Lengths, seed: int) -> Iterator[decoding.Sampled]:
    """Yield the samples of each iteration, without end."""
    draw = partial(lengths.draw, random=np.random.default_rng(seed))
    if run.in_flight is None:
        return decoding.whole(run.decoder, draw, groups=run.prompts, size=run.group_size)
    return decoding.partial(run.decoder, draw, groups=run.prompts, size=run.group_size, in_flight=run.in_flight)


def simulate(run: Recipe, lengths: Lengths, *, seed: int = 0) -> Iteration:
    """Return the mean iteration after partial rollouts filled the buffer."""
    return mean_of(run, _measured(run, lengths, seed))


def simulate_sampling(run: Recipe, lengths: Lengths, *, seed: int = 0) -> dict[str, float]:
    """Return mean seconds of the sampling phases, as in `simulate`."""
    sampled = _measured(run, lengths, seed)
    return _sampling_phases(run, sampled, _prefixes(run, sampled))


def _measured(run: Recipe, lengths: Lengths, seed: int) -> list[decoding.Sampled]:
    filling = 0 if run.in_flight is None else FILLING
    return list(itertools.islice(batches(run, lengths, seed), filling, filling + MEASURED))


def typical(run: Recipe, found: Iteration) -> Iteration:
    """Return the iteration of `found` with sampling time nearest the mean."""
    mean = sum(_sampling_seconds(batch) for batch in found.sampled) / len(found.sampled)
    return mean_of(run, [min(found.sampled, key=lambda batch: abs(_sampling_seconds(batch) - mean))])


def _sampling_seconds(batch: decoding.Sampled) -> float:
    return sum(call.seconds for call in batch.calls)


def mean_of(run: Recipe, sampled: Sequence[decoding.Sampled]) -> Iteration:
    """Return the mean iteration of some batches. Training, which hardly varies, is the last one's."""
    last, calls = sampled[-1], [call for batch in sampled for call in batch.calls]
    prefixes = _prefixes(run, sampled)
    updates = packed_rows(run.packer, last.lengths, prompt=run.prompt_length)
    scored = updates if run.scores else []

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(sampled)

    by_phase = {
        **_sampling_phases(run, sampled, prefixes),
        "reward": run.reward_s,
        "score": run.deal_s + sum(run.forward.seconds(rows, run.chips) for rows in scored),
        "update": sum(run.update.seconds(rows, run.chips) for rows in updates),
    }
    waits = {
        "prefill": {"padding": mean(run.forward.padding(rows, run.chips) for rows in prefixes)},
        "decode": {
            "idle slots": mean(call.idle_s for call in calls),
            "other shards": mean(call.waiting_s for call in calls),
        },
        "reward": {"hosts": run.reward_s},
        "score": {"padding": sum(run.forward.padding(rows, run.chips) for rows in scored)},
        "update": {"padding": sum(run.update.padding(rows, run.chips) for rows in updates)},
    }
    counts = {
        "sampling_calls": len(calls) / len(sampled),
        "decode_steps": mean(call.steps for call in calls),
        "microbatches": sum(rows.microbatches for rows in updates) / run.minibatches,
        "prefix_tokens": max(rows.positions for rows in prefixes) / run.decoder.shards,
    }
    tokens = mean(float(batch.lengths.sum()) for batch in sampled)
    return Iteration(by_phase=by_phase, waits=waits, tokens=tokens, counts=counts, sampled=sampled)


def _prefixes(run: Recipe, sampled: Sequence[decoding.Sampled]) -> list[TokenRows]:
    size = {"group_size": run.group_size, "prompt": run.prompt_length, "limit": run.limit}
    every = (prefix for batch in sampled for prefix in batch.prefixes)
    return [prefix_rows(prefix, **size, shards=run.decoder.shards) for prefix in every]


def _sampling_phases(
    run: Recipe, sampled: Sequence[decoding.Sampled], prefixes: Sequence[TokenRows]
) -> dict[str, float]:
    prompts_s = run.prefill_s * (run.in_flight or run.prompts) / run.prompts
    prefill = sum(prompts_s + run.forward.seconds(rows, run.chips) for rows in prefixes)
    decode = sum(call.seconds for batch in sampled for call in batch.calls)
    return {"reshard": run.reshard_s, "prefill": prefill / len(sampled), "decode": decode / len(sampled)}
