"""The time of a whole iteration from its programs' times: sampling by simulation, training by counting packed rows.

Response lengths are drawn from a distribution, independently of one another; prompts have their full length. Programs
take the time that `plan` projects for them. Of a run's iterations this leaves out dynamic sampling (more than one
round), several turns, evaluation, checkpoints and what the host does between two programs.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from gspo_jax.errors import UserError
from gspo_jax.kernels.decode_attention_tpu import block_columns
from gspo_jax.lengths import Lengths
from gspo_jax.models.cache import segments
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import costs as costs_lib
from gspo_jax.planning import sampling
from gspo_jax.planning.setting import Setting
from gspo_jax.rollout import prefixes as prefixes_lib
from gspo_jax.training.packing import Packer

PHASES = ("reshard", "prefill", "decode", "reward", "score", "update")
"""Phases of an iteration, in order."""
PROGRAMS = ("update", "score", "sample_prefill", "sample_decode", "reshard")
"""Programs whose times an iteration is made of."""
ANSWER_S = {"math_verify_flexible": 0.015}
"""Seconds of one core for an answer, by reward function that reads whole answers; all others take none.

`math_verify_flexible` took 4 to 15 ms for answers of 13,000 to 51,000 characters without a box, 1 ms for those with
one, on one core of a CPU machine: `time.process_time` around `rewards.isolated.math_verify_flexible`. `math_verify`
reads only what announces an answer.
"""
FILLING, MEASURED = 10, 6
"""Iterations until the buffer of partial rollouts is as it stays, and those whose mean is reported."""


class Rows(NamedTuple):
    """Rows of tokens that the trainer computes for some responses, on all chips together."""

    microbatches: int
    """Micro-batches."""
    positions: float
    """Positions of the rows, padding included."""
    pairs: float
    """Pairs of a query and a key that attention computes, in one layer and one head."""
    tokens: int
    """Positions that hold a token."""
    seen: float
    """Pairs of a token and another one that it sees."""


class Rate(NamedTuple):
    """Time of a program that reads rows of tokens."""

    position_s: float
    """Seconds of a chip for each position of its rows, without attention."""
    pair_s: float
    """Seconds of a chip for each of its pairs."""

    def seconds(self, rows: Rows, chips: int) -> float:
        """Seconds for these rows, spread evenly over the chips."""
        return (rows.positions * self.position_s + rows.pairs * self.pair_s) / chips

    def padding(self, rows: Rows, chips: int) -> float:
        """Seconds of these that go to padding: positions without a token, and pairs that no token sees."""
        return self.seconds(rows, chips) - (rows.tokens * self.position_s + rows.seen * self.pair_s) / chips


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run in numbers: batch, rows, slots, and the times of its programs."""

    chips: int
    """Chips of the slice."""
    prompts: int
    """Prompts of a batch, P."""
    group_size: int
    """Responses to each prompt, G."""
    prompt_length: int
    """Tokens of every prompt."""
    limit: int
    """Most tokens of a response."""
    minibatches: int
    """Updates of an iteration."""
    in_flight: int | None
    """Prompts of a sampling call with partial rollouts; None without."""
    packer: Packer
    """Packs the responses into rows."""
    reshard_s: float
    """Seconds of a cast and reshard of the weights for the sampler."""
    prefill_s: float
    """Seconds of the prefill of a batch's prompts."""
    decoder: sampling.Decoder
    """Slots of the decoder, and costs of its steps."""
    reward_s: float
    """Seconds that the hosts take for the rewards of a batch."""
    update: Rate
    """Forward and backward pass and optimizer step."""
    forward: Rate
    """The trainer's forward pass, which also stands for the prefill of partial rollouts' prefixes."""
    scores: bool
    """True if a batch is scored: log π_old is the trainer's, or there are a reference or a critic."""


@dataclasses.dataclass(frozen=True)
class Iteration:
    """An iteration of a run, or the mean of several."""

    by_phase: dict[str, float]
    """Seconds of each phase."""
    waits: dict[str, dict[str, float]]
    """Seconds of these in which chips do no work, by phase and reason."""
    tokens: float
    """Tokens of the responses that it learns from."""
    counts: dict[str, float]
    """Sampling calls, decode steps, micro-batches of an update, and most positions of prefixes on a batch shard."""
    sampled: Sequence[sampling.Batch]
    """Responses and sampling calls of each iteration that it is the mean of."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        return sum(self.by_phase.values())

    def facts(self, lengths: str, chips: int) -> dict[str, Any]:
        """The iteration as `plan --json` writes it."""
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
    """A program's projected time, with the link time that its schedule leaves exposed."""
    seconds = facts["seconds"]
    return seconds["executed"] / setting.rates.efficiency + (seconds["exposed"] or 0.0)


def attention_seconds(facts: Mapping[str, Any], setting: Setting) -> float:
    """The part of `program_seconds` that attention takes."""
    return facts["executed_by"].get("attention", 0.0) / setting.rates.efficiency


def decode_steps(loops: Sequence[costs_lib.Costs], setting: Setting) -> list[dict[str, Any]]:
    """Costs of a decode step in each phase, as `sampling.Step`, from those of its loop; each halves the slots."""
    config, rates = setting.config, setting.rates
    shards = mesh_lib.batch_shards(dict(setting.engine.meshes.sampler.shape))
    responses = config.data.prompts_per_batch * config.sampling.group_size
    slots = min(config.sampling.slots or responses, responses) // shards
    columns = math.prod(segments(config.sampling.max_response_length))
    found = []
    for phase, costs in enumerate(loops):
        own = sum(c.times * c.seconds(rates) for c in costs.operations if "ring_softmax" in c.operation)
        fixed_s, key_s = costs.executed(rates) - own, own / ((slots >> phase) * columns)
        step = sampling.Step(slots >> phase, fixed_s / rates.efficiency, key_s / rates.efficiency)
        found.append(step._asdict())
    return found


def make_run(programs: Mapping[str, Mapping[str, Any]], setting: Setting) -> Run:
    """What the iterations of a planned run follow from.

    Raises:
      UserError: a program is missing, or has no time because it does not fit.
    """
    for name in PROGRAMS:
        if "seconds" not in programs.get(name, {}):
            why = "does not fit" if name in programs else "is not among --programs"
            raise UserError(f"--lengths needs the times of all programs, and {name} {why}")
    config, chips = setting.config, setting.mesh.size
    data, training, critic = config.data, config.training, setting.engine.critic
    hosts = len({device.process_index for device in setting.mesh.devices.flat})
    workers = 1 if config.scoring.workers is None else config.scoring.workers  # the cores of a host are not known here
    answers = math.ceil(data.prompts_per_batch * config.sampling.group_size / (hosts * workers))
    return Run(
        chips=chips,
        prompts=data.prompts_per_batch,
        group_size=config.sampling.group_size,
        prompt_length=data.max_prompt_length,
        limit=config.sampling.max_response_length,
        minibatches=training.minibatches,
        in_flight=config.sampling.partial.prompts,
        packer=setting.engine.packer,
        reshard_s=program_seconds(programs["reshard"], setting),
        prefill_s=program_seconds(programs["sample_prefill"], setting),
        decoder=_decoder(setting, programs["sample_decode"]["steps"]),
        reward_s=answers * sum(ANSWER_S.get(name, 0.0) for name in config.rewards),
        update=rate(programs["update"], setting, "update"),
        forward=rate(programs["score"], setting, "score"),
        scores=training.old_logprobs == "recompute" or config.reference.kl_weight > 0 or critic is not None,
    )


def rate(facts: Mapping[str, Any], setting: Setting, name: str) -> Rate:
    """The rate of "update" or "score", planned with responses of full length."""
    rows, chips, seconds = full_rows(setting, name), setting.mesh.size, program_seconds(facts, setting)
    times, attention = setting.config.training.minibatches if name == "score" else 1, attention_seconds(facts, setting)
    return Rate(chips * (seconds - attention) / (times * rows.positions), chips * attention / (times * rows.pairs))


def full_rows(setting: Setting, name: str) -> Rows:
    """Rows that "update" or "score" computes for a mini-batch of responses of full length, as programs are planned."""
    packer, work = setting.engine.packer, setting.work(name)
    parts = setting.mesh.size / (packer.minibatches if name == "score" else 1)
    positions = parts * work.tokens
    count = round(positions / (packer.shards * packer.row_lengths[0]))
    return Rows(count, positions, parts * work.pairs, round(positions), parts * work.pairs)


def _decoder(setting: Setting, steps: list[dict[str, Any]]) -> sampling.Decoder:
    config, sampler, model = setting.config, setting.engine.meshes.sampler, setting.model
    limit, unfinished = config.sampling.max_response_length, config.sampling.partial
    shards = mesh_lib.batch_shards(dict(sampler.shape))
    in_flight = unfinished.prompts or config.data.prompts_per_batch
    column_bytes = model.num_kv_heads // sampler.shape["tensor"] * setting.head_bytes
    with jax.set_mesh(sampler):
        pieces = setting.engine.sampler.pieces(in_flight * config.sampling.group_size)
    return sampling.Decoder(
        shards=shards,
        lockstep=sampler.shape["expert"],
        steps=tuple(sampling.Step(**step) for step in steps),
        block=block_columns(segments(limit)[1], column_bytes, scaled=bool(config.sampling.cache_dtype)),
        polled=pieces is not None,
        share=1.0 if unfinished.prompts is None else unfinished.share,
    )


def packed_rows(packer: Packer, lengths: Int[np.ndarray, "P G"], *, prompt: int) -> list[Rows]:
    """Rows of each mini-batch. A micro-batch has one row for each shard and attends as long as the busiest of them."""
    flat, parts = lengths.reshape(-1), packer.parts(lengths.reshape(-1))
    packing, found = packer(flat, np.full_like(flat, prompt)), []
    for index, own in enumerate(parts):
        at = np.flatnonzero(packing.responses[index] >= 0)
        shard = at // (packing.responses.shape[1] // packer.shards)
        turn = packing.kind[index][at] * (packing.turn.max() + 1) + packing.turn[index][at]
        rows = np.stack([turn, shard, packing.prompt[index][at]])
        prompts = np.unique(rows, axis=1)
        n = own[packing.responses[index][at]].astype(np.float64)
        busy = np.zeros((turn.max() + 1, packer.shards))
        np.add.at(busy, tuple(rows[:2]), n * (n + 1) / 2 + prompt * n)
        np.add.at(busy, tuple(prompts[:2]), prompt * (prompt + 1) / 2)
        tokens = int(own.sum()) + prompts.shape[1] * prompt
        positions = packer.shards * int(packing.slots[index])
        pairs = packer.shards * float(busy.max(axis=1).sum())
        found.append(Rows(int(packing.turns[index].sum()), positions, pairs, tokens, float(busy.sum())))
    return found


def prefix_rows(prefix: Int[np.ndarray, " B"], *, group_size: int, prompt: int, limit: int, shards: int) -> Rows:
    """Rows that a sampling call reads its prefixes again in: as many on every batch shard as the fullest needs."""
    if not prefix.any():
        return Rows(0, 0, 0, 0, 0)
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
    return Rows(rows, shards * rows * width, shards * float(busy.max(axis=1).sum()), tokens, float(busy.sum()))


def batches(run: Run, lengths: Lengths, seed: int) -> Iterator[sampling.Batch]:
    """Yield what the run's iterations sample, from the first, without end."""
    draw = partial(lengths.draw, random=np.random.default_rng(seed))
    if run.in_flight is None:
        return sampling.whole(run.decoder, draw, groups=run.prompts, size=run.group_size)
    return sampling.partial(run.decoder, draw, groups=run.prompts, size=run.group_size, in_flight=run.in_flight)


def simulate(run: Run, lengths: Lengths, *, seed: int = 0) -> Iteration:
    """The mean iteration with response lengths drawn from `lengths`, once partial rollouts have filled the buffer."""
    return mean_of(run, _measured(run, lengths, seed))


def simulate_sampling(run: Run, lengths: Lengths, *, seed: int = 0) -> dict[str, float]:
    """The phases of sampling alone, in seconds, of the mean iteration that `simulate` returns."""
    sampled = _measured(run, lengths, seed)
    return _sampling_phases(run, sampled, _prefixes(run, sampled))


def _measured(run: Run, lengths: Lengths, seed: int) -> list[sampling.Batch]:
    filling = 0 if run.in_flight is None else FILLING
    return list(itertools.islice(batches(run, lengths, seed), filling, filling + MEASURED))


def typical(run: Run, found: Iteration) -> Iteration:
    """One of the iterations that `found` is the mean of: that whose sampling takes most nearly as long as the mean."""
    mean = sum(_sampling_seconds(batch) for batch in found.sampled) / len(found.sampled)
    return mean_of(run, [min(found.sampled, key=lambda batch: abs(_sampling_seconds(batch) - mean))])


def _sampling_seconds(batch: sampling.Batch) -> float:
    return sum(call.seconds for call in batch.calls)


def mean_of(run: Run, sampled: Sequence[sampling.Batch]) -> Iteration:
    """The mean iteration of some batches; training, whose time hardly changes among them, is the last one's."""
    last, calls = sampled[-1], [call for batch in sampled for call in batch.calls]
    prefixes = _prefixes(run, sampled)
    updates = packed_rows(run.packer, last.lengths, prompt=run.prompt_length)
    scored = updates if run.scores else []

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(sampled)

    by_phase = {
        **_sampling_phases(run, sampled, prefixes),
        "reward": run.reward_s,
        "score": sum(run.forward.seconds(rows, run.chips) for rows in scored),
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


def _prefixes(run: Run, sampled: Sequence[sampling.Batch]) -> list[Rows]:
    """Rows of prefixes of each sampling call."""
    size = {"group_size": run.group_size, "prompt": run.prompt_length, "limit": run.limit}
    every = (prefix for batch in sampled for prefix in batch.prefixes)
    return [prefix_rows(prefix, **size, shards=run.decoder.shards) for prefix in every]


def _sampling_phases(run: Run, sampled: Sequence[sampling.Batch], prefixes: Sequence[Rows]) -> dict[str, float]:
    """Mean seconds of the phases of sampling."""
    prompts_s = run.prefill_s * (run.in_flight or run.prompts) / run.prompts
    prefill = sum(prompts_s + run.forward.seconds(rows, run.chips) for rows in prefixes)
    decode = sum(call.seconds for batch in sampled for call in batch.calls)
    return {"reshard": run.reshard_s, "prefill": prefill / len(sampled), "decode": decode / len(sampled)}
