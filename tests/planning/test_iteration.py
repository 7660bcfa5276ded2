"""The projected time of an iteration against one that is gone through step by step (stepwise.py), and its picture."""

import contextlib
import dataclasses
import itertools
import math
from functools import cache
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from ml_collections import ConfigDict
from rich.console import Console

from gspo_jax import cli, plan
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.lengths import Lengths
from gspo_jax.planning import decoding, iteration, timeline
from gspo_jax.planning.cost_records import Cost, Costs, OpWork
from gspo_jax.planning.decoding import Decoder, Step
from gspo_jax.planning.iteration import Rate, Recipe, TokenRows
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.show import show_iteration
from gspo_jax.rollout.drafting import NO_DRAFTS
from gspo_jax.rollout.pages import Pool
from gspo_jax.training.packing import Packer
from tests import stepwise
from tests.tiny import mostly_slow

DECODER = Decoder(
    shards=4,
    lockstep=2,
    steps=(Step(8, 3e-3, 1e-6), Step(4, 2e-3, 1e-6), Step(2, 1.5e-3, 1e-6)),
    prompt=20,
    page=16,
    pages=None,
    poll_steps=32,
)
LENGTHS = Lengths("lognormal:60:0.8", 250, "the limit")


def plainly(decoder: Decoder) -> stepwise.Decoding:
    """Return the same decoder for the oracle."""
    return stepwise.Decoding(
        shards=decoder.shards,
        lockstep=decoder.lockstep,
        slots=decoder.steps[0].slots,
        fixed=[step.fixed_s for step in decoder.steps],
        key=decoder.steps[0].key_s,
        prompt=decoder.prompt,
        page=decoder.page,
        pages=decoder.pages,
        poll=decoder.poll_steps,
        share=decoder.share,
    )


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"poll_steps": None},
        {"lockstep": 1},
        {"lockstep": 4, "share": 0.75},
        {"share": 0.5, "poll_steps": None},
        {"pages": 30, "share": 0.75},
        {"pages": 20, "share": 0.5, "lockstep": 1, "poll_steps": None},
        {"share": 0.75, "lockstep": 1},
        {"steps": (Step(32, 3e-3, 1e-6), Step(16, 2e-3, 1e-6))},  # a slot for each response
    ],
    ids=str,
)
def test_a_call_takes_what_its_steps_take(how):
    """128 responses on 4 shards; a quarter go on from prefixes, some have ended, some end with their first token."""
    decoder, random = dataclasses.replace(DECODER, **how), np.random.default_rng(1)
    lengths = LENGTHS.draw(128, random).astype(int)
    lengths[random.random(128) < 0.1] = 1
    done = np.where(random.random(128) < 0.25, lengths * random.random(128), 0).astype(int)
    done = np.where(random.random(128) < 0.1, lengths, done)
    left = lengths - done
    call = decoding.decode(decoder, np.where(left > 0, done, 0), left)
    seconds, steps, after = stepwise.generate(plainly(decoder), done, lengths)
    np.testing.assert_array_equal(call.sampled, after - done)
    assert call.steps == steps
    assert call.seconds == pytest.approx(seconds, rel=1e-9)
    assert call.used_s + call.idle_s + call.waiting_s == pytest.approx(seconds, rel=1e-9)
    assert call.used_s > 0 and call.idle_s >= 0 and call.waiting_s >= -1e-12
    assert (call.in_use <= call.width).all() and call.width.max() <= decoder.shards * decoder.steps[0].slots


def test_a_call_by_hand():
    """Lengths 5, 1, 3, 2 on two slots; prefill samples the first tokens, so 4, 0, 2 and 1 steps are needed.

    The slots take the first and the third; the third's slot takes the fourth for step 2, after which one response is
    left: the last step is in phase 2. Columns: step 0 reads 2 (each slot the one that it writes), step 1 reads 4, step
    2 reads 3 + 1, step 3 reads 4, and all half a page more for each busy slot.
    """
    decoder = Decoder(
        shards=1, lockstep=1, steps=(Step(2, 10.0, 1.0), Step(1, 5.0, 1.0)), prompt=0, page=2, pages=None, poll_steps=9
    )
    call = decoding.decode(decoder, np.zeros(4, int), np.array([5, 1, 3, 2]))
    assert call.sampled.tolist() == [5, 1, 3, 2] and call.steps == 4
    assert call.seconds == (10 + 4) + (10 + 6) + (10 + 6) + (5 + 5)
    assert call.idle_s == call.waiting_s == 0


def test_drafts_take_fewer_steps():
    """With two tokens a step, lengths 9, 1, 5 and 3 take the steps of the call by hand, and read twice the columns."""
    steps = Step(2, 10.0, 0.5), Step(1, 5.0, 0.5)
    decoder = Decoder(shards=1, lockstep=1, steps=steps, prompt=0, page=4, pages=None, poll_steps=9, tokens_per_step=2)
    call = decoding.decode(decoder, np.zeros(4, int), np.array([9, 1, 5, 3]))
    assert call.sampled.tolist() == [9, 1, 5, 3] and call.steps == 4
    assert call.seconds == (10 + 4) + (10 + 6) + (10 + 6) + (5 + 5)


def test_a_partial_call_with_drafts_samples_no_more_than_is_left():
    decoder = dataclasses.replace(DECODER, share=0.5, pages=30, tokens_per_step=1.6)
    left = LENGTHS.draw(128, np.random.default_rng(1)).astype(int)
    call = decoding.decode(decoder, np.zeros(128, int), left)
    whole = decoding.decode(dataclasses.replace(decoder, tokens_per_step=1.0), np.zeros(128, int), left)
    assert (call.sampled <= left).all() and (call.sampled == left).sum() >= 64
    assert call.steps < 0.8 * whole.steps


class Sized(NamedTuple):
    """What `decode_steps` reads of a setting."""

    config: Any
    rates: Rates
    decoder_size: tuple[int, Pool]
    engine: Any = SimpleNamespace(sampler=SimpleNamespace(drafting=NO_DRAFTS))


def test_links_and_launches_in_a_decode_step():
    """8 slots of 30 prompt columns and 2 pages of 50; 10 kernels of attention.

    A kernel reads for 5 ms and launches in 1. Everything else takes 20 ms, and 7 ms of links are not hidden.
    """
    config = ConfigDict({"data": {"max_prompt_length": 30}, "sampling": {"max_response_length": 90}})
    rates = Rates(1.0, 1.0, 1.0, launch=1e-3, efficiency=0.5)
    attention = Cost(10, 0, 0, 0, "custom-call paged_attention.1", "", OpWork(0, 5e-3), "kernel", None, steps=16)
    rest = Cost(1, 0, 0, 0, "fusion f", "", OpWork(0, 20e-3), "operation", None)
    costs = Costs((attention, rest), (), {}, ())
    (step,) = iteration.decode_steps([(costs, costs.executed(rates) + 7e-3)], Sized(config, rates, (8, Pool(50, 16))))
    assert step["slots"] == 8
    assert step["fixed_s"] == pytest.approx((10 * 1e-3 + 20e-3) / 0.5 + 7e-3)
    assert step["key_s"] == pytest.approx(10 * 5e-3 / 0.5 / (8 * 130))


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_partial_rollouts_take_the_same_groups(share):
    decoder = dataclasses.replace(DECODER, share=share)
    draws = [np.random.default_rng(3), np.random.default_rng(3)]
    ours = decoding.partial(decoder, lambda n: LENGTHS.draw(n, draws[0]).astype(int), groups=16, size=4, in_flight=28)
    theirs = stepwise.Rollouts(
        plainly(decoder), lambda n: LENGTHS.draw(n, draws[1]).astype(int), prompts=16, size=4, in_flight=28
    )
    for batch in itertools.islice(ours, 5):
        calls, lengths = theirs.next()
        np.testing.assert_array_equal(batch.lengths, lengths)
        assert [call.seconds for call in batch.calls] == pytest.approx([seconds for seconds, _ in calls], rel=1e-9)
        for prefix, (_, expected) in zip(batch.prefixes, calls, strict=True):
            np.testing.assert_array_equal(prefix, expected)


def test_rows_are_filled_alike():
    """Rows of the packer and, longest first, of a simple filling; positions, tokens and pairs of all mini-batches."""
    lengths = LENGTHS.draw(64 * 4, np.random.default_rng(0)).reshape(64, 4)
    packer = Packer(group_size=4, minibatches=2, shards=4, row_lengths=(300,), pair_cost=1e-3)
    found = iteration.packed_rows(packer, lengths, prompt=20)
    assert len(found) == 2
    for index, one in enumerate(found):
        part = lengths[index::2]
        rows, pairs = stepwise.rows(part, prompt=20, row_tokens=300)
        assert one.positions == one.microbatches * 4 * 300
        assert one.microbatches == pytest.approx(rows / 4, rel=0.15)
        assert one.seen == pytest.approx(pairs, rel=0.05)
        assert one.seen <= one.pairs <= 2 * one.seen
        assert part.sum() + 32 * 20 <= one.tokens <= one.positions


def test_padding_by_hand():
    """Prefixes of 300 and 900 tokens, each on its shard behind a prompt of 20: the bucket of 920 is 1024."""
    size = {"group_size": 2, "prompt": 20, "limit": 1000, "shards": 2}
    rows = iteration.prefix_rows(np.array([300, 0, 900, 0]), **size)
    few, many = (n * (n + 1) / 2 + 20 * n + 210 for n in (300, 900))
    assert rows == TokenRows(1, 2 * 1024, 2 * many, 1240, few + many)
    rate = Rate(2.0, 0.5)
    assert rate.seconds(rows, chips=2) == (2048 * 2 + 2 * many * 0.5) / 2
    assert rate.padding(rows, chips=2) == (808 * 2 + (many - few) * 0.5) / 2
    assert iteration.prefix_rows(np.zeros(4, int), **size) == TokenRows(0, 0, 0, 0, 0)
    beside = iteration.prefix_rows(np.array([900, 0, 0, 900, 900, 0, 0, 0]), **size)
    assert beside.microbatches == 2 and beside.positions == 2 * 2 * 1024


# The 30B recipe on v5p:4x4x4, whole responses, as `plan --json` had it with keys in rings; see docs/plan.md.
POSITIONS = 64 * 32 * 16384
PAIRS = 64 * 32 * 16384 * 16385 / 2
RECIPE = Recipe(
    chips=64,
    prompts=512,
    group_size=16,
    prompt_length=512,
    limit=15872,
    minibatches=4,
    in_flight=None,
    packer=Packer(group_size=16, minibatches=4, shards=64, row_lengths=(16384, 4096), pair_cost=6.5e-5),
    reshard_s=0.02,
    deal_s=0.0,
    prefill_s=0.32,
    decoder=Decoder(
        shards=64,
        lockstep=32,
        steps=tuple(Step(slots, ms / 1e3, 42.8e-9) for slots, ms in ((32, 12.9), (16, 12.7), (8, 11.9), (4, 12.0))),
        prompt=0,
        page=1984,
        pages=None,
        poll_steps=256,
    ),
    reward_s=1.0,
    update=Rate(48.32 / (POSITIONS / 64), 32.0 / (PAIRS / 64)),
    forward=Rate(66.38 / (4 * POSITIONS / 64), 36.58 / (4 * PAIRS / 64)),
    scores=False,
)
# `plan --config=configs/qwen3_30b_a3b.py:16k`.
PARTIAL = dataclasses.replace(
    RECIPE,
    in_flight=2048,
    packer=dataclasses.replace(RECIPE.packer, pair_cost=14.4e-5),
    deal_s=0.06,
    prefill_s=0.14,
    decoder=Decoder(
        shards=64,
        lockstep=32,
        steps=tuple(Step(slots, ms / 1e3, 42.4e-9) for slots, ms in ((96, 9.0), (48, 6.85), (24, 4.9), (12, 8.6))),
        prompt=512,
        page=256,
        pages=1152,
        poll_steps=256,
        share=0.4,
    ),
    update=Rate(7.84e-5, 7.66e-9),
    forward=Rate(2.29e-5, 2.256e-9),
)


def drawn(seed: int, *, limit: int):
    """Return a function that draws log-normal lengths of mean 4096 and σ 0.8, cut at `limit`, by inversion."""
    random, normal = np.random.default_rng(seed), NormalDist(math.log(4096) - 0.32, 0.8)

    def draw(count: int) -> np.ndarray:
        values = [math.exp(normal.inv_cdf(u)) for u in random.uniform(1e-12, 1, count)]
        return np.clip(np.array(values).round(), 1, limit).astype(int)

    return draw


Generated = list[tuple[list[tuple[float, np.ndarray]], np.ndarray]]
"""(seconds, prefixes) of each call of each iteration, and the lengths of its batch's groups."""


@cache
def generated(decoder: Decoder, prompts: int, size: int, limit: int, in_flight: int | None) -> Generated:
    """Return 2 iterations' generation step by step, or with partial rollouts of 4 after the first 8."""
    draw, decoding = drawn(5, limit=limit), plainly(decoder)
    if in_flight is None:
        found = []
        for _ in range(2):
            lengths = draw(prompts * size)
            seconds = stepwise.generate(decoding, 0 * lengths, lengths)[0]
            found.append(([(seconds, 0 * lengths)], lengths.reshape(prompts, size)))
        return found
    # Rows of prefixes come in few numbers, here 8 or 12: their mean needs more iterations.
    rollouts = stepwise.Rollouts(decoding, draw, prompts=prompts, size=size, in_flight=in_flight)
    return [rollouts.next() for _ in range(12)][8:]


def stepped(run: Recipe) -> dict[str, float]:
    """Return the mean seconds of the phases of iterations gone through step by step."""
    decoding, S, found = plainly(run.decoder), run.prompt_length, []
    for calls, lengths in generated(run.decoder, run.prompts, run.group_size, run.limit, run.in_flight):
        prefill = 0.0
        for _, prefix in calls:
            prefill += run.prefill_s * (run.in_flight or run.prompts) / run.prompts
            rows, pairs = stepwise.prefix_rows(
                prefix, shards=decoding.shards, size=run.group_size, prompt=S, row_tokens=S + run.limit
            )
            prefill += run.forward.position_s * rows * (S + run.limit)
            prefill += run.forward.pair_s * pairs
        update = 0.0
        for part in range(run.minibatches):
            row_tokens, shards = run.packer.row_lengths[0], run.packer.shards
            rows, pairs = stepwise.rows(lengths[part :: run.minibatches], prompt=S, row_tokens=row_tokens)
            positions = math.ceil(rows / shards) * shards * row_tokens
            update += (positions * run.update.position_s + pairs * run.update.pair_s) / run.chips
        decode = sum(seconds for seconds, _ in calls)
        found.append({"prefill": prefill, "decode": decode, "update": update})
    return {phase: float(np.mean([one[phase] for one in found])) for phase in found[0]}


def shrunk(run: Recipe) -> Recipe:
    """Return the run with an eighth of its chips, prompts and responses' length."""
    decoder = dataclasses.replace(run.decoder, shards=8, lockstep=4, page=run.decoder.page // 8)
    in_flight = None if run.in_flight is None else run.in_flight // 8
    packer = dataclasses.replace(run.packer, shards=8, row_lengths=(2048,))
    return dataclasses.replace(
        run, chips=8, prompts=64, prompt_length=64, limit=1984, in_flight=in_flight, packer=packer, decoder=decoder
    )


BOTH = [RECIPE, PARTIAL]


@pytest.mark.slow
@pytest.mark.parametrize("run", BOTH, ids=["whole", "partial"])
def test_the_recipes_iteration_step_by_step(run):
    """The rows of docs/plan.md, within a tenth of an iteration gone through step by step, on other draws."""
    found = iteration.simulate(run, Lengths("lognormal:4096:0.8", run.limit, "the limit"))
    expected = stepped(run)
    print({phase: round(s, 1) for phase, s in found.by_phase.items()}, found.seconds)
    print({phase: round(s, 1) for phase, s in expected.items()})
    for phase, seconds in expected.items():
        assert found.by_phase[phase] == pytest.approx(seconds, rel=0.1), phase
    others = found.by_phase["reshard"] + found.by_phase["reward"]
    assert found.seconds == pytest.approx(sum(expected.values()) + others, rel=0.1)


@pytest.mark.slow
def test_an_iteration_on_128_chips():
    """Another simulation, of 128 v5p chips, found 91 s of generation, 39 s of training, and 1.20 with partial rollouts.

    8192 responses, mean 4096, limit 16,384; here an eighth of chips and responses. Assumed: all chips' slots, 64 each,
    are one pool. A step takes 1.6 ms (1.54 for the weights, of 1.8 with one slot), 54 µs for each slot in use (2.46 ms
    of 16 slots without their keys), 35.6 ns for each key (98,304 bytes at 2765 GB/s). An update takes 1.81 s for 16,384
    tokens, a forward pass 0.46 s. All of it over 0.83, the part of a step's time that its operations account for.
    Partial rollouts: twice the prompts in flight, until 60% of the unfinished responses have ended, their prefixes read
    again without padding.
    """
    chips, limit, S = 128 // 8, 16384, 512
    slot_s, key_s = 54e-6 / 0.83, 35.6e-9 / 0.83
    pool = stepwise.Decoding(
        shards=1, lockstep=1, slots=64 * chips, fixed=[1.6e-3 / 0.83], key=key_s / chips, prompt=0,
        page=2 * round(slot_s / key_s), pages=None, poll=None,
    )  # fmt: skip
    draw = drawn(0, limit=limit)

    def training(lengths: np.ndarray) -> float:
        rows = sum(stepwise.rows(lengths[i::4], prompt=S, row_tokens=S + limit)[0] for i in range(4))
        return rows * (S + limit) / chips / 16384 * 1.81 / 0.83

    lengths = draw(1024)
    generation = stepwise.generate(pool, 0 * lengths, lengths)[0]
    learning = training(lengths.reshape(64, 16))
    print(generation, learning)
    assert generation == pytest.approx(91, rel=0.15)
    assert learning == pytest.approx(39, rel=0.15)

    rollouts = stepwise.Rollouts(dataclasses.replace(pool, share=0.6), draw, prompts=64, size=16, in_flight=128)
    seconds = []
    for _ in range(9):
        calls, taken = rollouts.next()
        again = sum(int(prefix.sum()) for _, prefix in calls) / chips / 16384 * 0.46 / 0.83
        seconds.append(sum(s for s, _ in calls) + again + training(taken))
    print(np.mean(seconds[5:]), (generation + learning) / np.mean(seconds[5:]))
    assert (generation + learning) / np.mean(seconds[5:]) == pytest.approx(1.20, rel=0.15)


@pytest.mark.parametrize("run", mostly_slow(BOTH, always=BOTH[:1]), ids=["whole", "partial"])
def test_a_small_iteration_step_by_step(run):
    run = shrunk(run)
    lengths = Lengths("lognormal:512:0.8", run.limit, "the limit")
    found = iteration.simulate(run, lengths)
    draws = [lengths.draw(1024, np.random.default_rng(i)) for i in range(4)]
    whole = plainly(dataclasses.replace(run.decoder, share=1.0))
    decode = np.mean([stepwise.generate(whole, 0 * n, n)[0] for n in draws])
    if run.in_flight is None:
        assert found.by_phase["decode"] == pytest.approx(decode, rel=0.05)
    else:
        assert found.by_phase["decode"] < decode, "partial rollouts do not wait for the longest responses"
    assert found.seconds == pytest.approx(sum(found.by_phase.values()))
    facts = found.facts(lengths.text, run.chips)
    assert set(facts) >= {"seconds", "tokens_per_s_per_chip", "by_phase", "waits"}
    assert tuple(facts["by_phase"]) == iteration.PHASES
    assert facts["tokens_per_s_per_chip"] * facts["seconds"] * run.chips == pytest.approx(found.tokens)
    assert all(s >= 0 for waits in found.waits.values() for s in waits.values())
    assert all(sum(waits.values()) <= found.by_phase[phase] for phase, waits in found.waits.items())
    assert facts == iteration.simulate(run, lengths).facts(lengths.text, run.chips), "the draws are seeded"


@pytest.mark.parametrize("run", BOTH, ids=["whole", "partial"])
def test_a_picture_is_of_one_iteration(monkeypatch, tmp_path, run):
    """The totals of its title, its phases and its bars are one, and its note has that of the other figures."""
    run, figures = shrunk(run), []
    found = iteration.simulate(run, Lengths("lognormal:512:0.8", run.limit, "the limit"))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    timeline.draw(run, found, "lognormal:512:0.8", "v5p:2x2x2, 8 chips", tmp_path / "drawn.png")
    (figure,) = figures
    strip, slots, bars = figure.axes
    title, note = (text.get_text() for text in figure.texts)
    shown = iteration.typical(run, found)
    assert title.endswith(f": {shown.seconds:.0f} s") and f"their mean, {found.seconds:.0f} s." in note
    assert strip.get_xlim()[1] == slots.get_xlim()[1] == pytest.approx(shown.seconds)
    assert sum(bar.get_width() for bar in strip.patches) == pytest.approx(shown.seconds)
    small = sum(s for s in shown.by_phase.values() if s < timeline.SHOWN * shown.seconds)
    assert sum(bar.get_width() for bar in bars.patches) + small == pytest.approx(shown.seconds)
    assert f", {small:.1f} s" in bars.get_title(loc="left")


def test_it_is_shown_and_drawn(tmp_path):
    run = shrunk(PARTIAL)
    found = iteration.simulate(run, Lengths("lognormal:512:0.8", 1984, "the limit"))
    console = Console(record=True, width=200)
    show_iteration(console, found.facts("lognormal:512:0.8", 8))
    said = console.export_text()
    assert "iteration with lengths lognormal:512:0.8 (projected, not measured)" in said and "idle slots" in said
    timeline.draw(run, found, "lognormal:512:0.8", "v5p:2x2x2, 8 chips", tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"lengths": "lognormal:4096"}, "--lengths is 'lognormal:4096'; write it as uniform:16:3968 or lognormal"),
        ({"lengths": "uniform:1:5000"}, "does not lie in 1 to 3968, which is sampling.max_response_length"),
        (
            {"lengths": "lognormal:99:1", "only": ["update"]},
            "all programs, and --programs leaves out score, deal, sample_pre",
        ),
        ({"figure": "x.png"}, "--figure=x.png needs the lengths of responses, such as --lengths=lognormal:4096:0.8"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(asked, says, tmp_path):
    with pytest.raises(UserError, match=says):
        plan.plan(cli.load_config("configs/qwen3_30b_a3b.py"), "v5p:4x4x4", cache=tmp_path, **asked)


def test_a_program_without_a_time():
    with pytest.raises(UserError, match="--lengths needs the times of all programs, and score does not fit"):
        iteration.make_run({"update": {"seconds": {}}, "score": {"fits": False}}, setting=None)


@pytest.mark.parametrize(
    ("draft", "lengths", "accepted", "says"),
    [
        ("own", "lognormal:512:0.8", None, "give the tokens per step, such as --accepted=1.6"),
        ("none", "lognormal:512:0.8", 1.6, "--accepted is 1.6; with sampling.draft=none"),
        ("own", "lognormal:512:0.8", 4.5, "from 1 to 4 tokens"),
        ("own", None, None, ""),
        ("own", None, 1.6, "--accepted=1.6 needs the lengths"),
        ("own", "lognormal:512:0.8", 4.0, ""),
        ("none", "lognormal:512:0.8", None, ""),
    ],
)
def test_what_drafts_gain_is_given(draft, lengths, accepted, says):
    config = base()
    config.sampling.draft = draft
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        plan.check_accepted(config, lengths, accepted)
