"""Partial rollouts and multi-turn episodes: resumed responses equal uninterrupted ones, replies are not trained on."""

import itertools
import math
import time
from concurrent.futures import Future, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.calls.outcomes import settled
from gspo_jax.errors import StopRequested
from gspo_jax.models import transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout.decoder import response_keys
from gspo_jax.rollout.drafting import NO_DRAFTS, Drafting
from gspo_jax.rollout.episodes import Answer, Buffer, Episodes, Player, spread_over_shards
from gspo_jax.rollout.history import History
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.prefixes import bucket
from gspo_jax.rollout.sampler import Sampler
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.training.scoring import Scoring, score
from gspo_jax.types import HOST_COLUMNS, Prompts, Weights
from tests.alone import Alone
from tests.tiny import CONFIG, params, place, prompts, weights

GRAPH, _SHAPES = transformer.abstract(CONFIG)
SHAPES = Weights.full(_SHAPES)
G, T, KEY = 2, 16, jax.random.key(2)
GOES_ON = range(52, 64)
"""Stop ids that hand the turn to the environment, which replies; 5 also ends a turn, but gets no reply."""
MESH = mesh_lib.make_mesh({"data": 2}, devices=jax.devices()[:2])
PROMPTS = prompts(P=12, S=6, seed=3)
NAMES, RECORDS = [f"prompt {i}" for i in range(12)], [{"number": str(i)} for i in range(12)]


@pytest.fixture(scope="module", autouse=True)
def mesh():
    """Run on a mesh of two devices."""
    with jax.set_mesh(MESH):
        yield


def other_params():
    """Return the parameters of a second policy, scaled by 1.1."""
    return jax.tree.map(lambda x: x * 1.1, params())


class Replying:
    """An environment on token ids, of a function of prompts, responses and records."""

    asks_last = False

    def __init__(self, function):
        self.function = function

    def open(self, turns):
        return [(None, False)] * len(turns)

    def text(self, prompt):
        return f"tokens {prompt}"

    def begin(self, turns):
        replies = self.function([t.text for t in turns], [t.tokens for t in turns], [t.record for t in turns])
        return [settled(Answer(reply)) for reply in replies]

    def wait(self, pending, *, within_s=math.inf):
        pass

    def finish(self, ids):
        pass


def make_sampler(*, poll_steps: int | None = None, drafting: Drafting = NO_DRAFTS) -> Sampler:
    """Return a sampler without weights."""
    return Sampler(
        GRAPH,
        SHAPES,
        MESH,
        dtype=jnp.float32,
        group_size=G,
        sampling=SamplingParams(keep_top=4),
        stop=StopRule(max_length=T, eos_ids=(5, *GOES_ON)),
        slots=4,  # fewer than responses, so that resumed ones are refilled too
        poll_steps=poll_steps,
        router_logprobs=True,
        drafting=drafting,
    )


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return make_sampler()


@pytest.fixture(autouse=True)
def first_policy(sampler):
    """Load the same initial policy before every test."""
    sampler.load(Weights.full(place(params(), MESH)))


def some(first: int, count: int):
    """Return `count` prompts from `first` on, with their texts and records."""
    rows = slice(first, first + count)
    return Prompts(PROMPTS.tokens[rows], PROMPTS.lengths[rows], NAMES[rows], RECORDS[rows])


def in_fours(start: int = 0):
    """Yield four prompts at a time, endlessly, in the order of the response numbers."""
    return (some(first % 12, 4) for first in itertools.count(start, 4))


def row_of(played, i: int) -> int:
    """Return the row that response i of a batch has in the uninterrupted rollout of all prompts."""
    return int(played.records[i]["number"]) * G + i % G


@pytest.fixture(scope="module")
def unbroken(sampler):
    """Return all responses, sampled in two uninterrupted calls as large as those of a buffer."""
    sampler.load(Weights.full(place(params(), MESH)))
    return in_halves(sampler, PROMPTS)


def in_halves(sampler, batch: Prompts):
    """Return the responses to all prompts, sampled for six at a time."""
    cuts = slice(0, 6), slice(6, 12)
    halves = [sampler(Prompts(batch.tokens[rows], batch.lengths[rows]), KEY, first=rows.start * G) for rows in cuts]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *jax.device_get(halves))


@jax.jit
def trainers(weights, rollout):
    """Return the trainer's scores of a rollout under given weights."""
    return score(GRAPH, weights, Alone(rollout), Scoring(logprob_chunk=64))


def check_kept(rollout):
    """Assert that every drawn token, and no other, has a record with its own log-prob, bit by bit."""
    kept, drawn = rollout.kept, rollout.action_mask
    own = kept.ids == rollout.tokens[..., None]
    np.testing.assert_array_equal(own.sum(axis=2), drawn)
    np.testing.assert_array_equal(np.where(own, kept.logprobs, 0).sum(axis=2), rollout.logprobs)
    assert (kept.ids[drawn] >= 0).all() and (kept.ids[~drawn] == -1).all()
    assert (kept.logprobs[drawn] < 0).all() and not kept.logprobs[~drawn].any() and not kept.whole.any()


def test_a_later_round_goes_on_with_the_numbers_of_responses(sampler):
    """Sampling prompts again in one iteration continues the response numbering, so the keys are new."""
    batch = some(0, 4)
    keys, later = (sampler.keys(batch, KEY, n) for n in (0, 5))
    np.testing.assert_array_equal(later, jax.random.key_data(response_keys(KEY, 5 + jnp.arange(4 * G))))
    np.testing.assert_array_equal(later[:3], keys[5:])


@pytest.mark.slow
def test_short_prompts_are_read_in_a_shorter_bucket(sampler, unbroken):
    """The shorter prefill bucket changes nothing: tokens and routes are those of the narrow batch, padded."""
    wide = Prompts(np.pad(PROMPTS.tokens, ((0, 0), (0, 2))), PROMPTS.lengths)
    found = in_halves(sampler, wide)
    np.testing.assert_array_equal(found.prompts, np.repeat(wide.tokens, G, axis=0))
    np.testing.assert_array_equal(found.tokens, unbroken.tokens)
    for name, nothing in (("experts", -1), ("logprobs", 0)):
        wider, own = getattr(found.routes, name), getattr(unbroken.routes, name)
        np.testing.assert_array_equal(wider[:, 6:8], nothing)
        np.testing.assert_array_equal(np.delete(wider, [6, 7], axis=1), own)


@pytest.mark.slow
def test_a_policy_that_does_not_change_samples_the_same_in_parts(sampler, unbroken):
    """Under a fixed policy, partial rollouts equal one call: tokens, log-probs, routes. No response comes twice."""
    player = Player(sampler)
    buffer, seen = Buffer(player, groups=2, group_size=G, in_flight=6, min_ended=0.5), []
    prompts = in_fours()
    for left in (6, 4):  # four new groups at a time while fewer than six are in flight
        played = buffer.play(prompts, KEY)
        assert len(buffer) == left
        rows = [row_of(played, i) for i in range(4)]
        seen += rows
        found = jax.device_get(played.rollout)
        for name in ("tokens", "mask", "action_mask", "truncated", "prompts"):
            np.testing.assert_array_equal(getattr(found, name), getattr(unbroken, name)[rows])
        np.testing.assert_array_equal(found.routes.experts, unbroken.routes.experts[rows])
        np.testing.assert_allclose(found.logprobs, unbroken.logprobs[rows], atol=1e-5)
        np.testing.assert_allclose(found.behaviour_logprobs, found.logprobs)
        np.testing.assert_allclose(found.routes.logprobs, unbroken.routes.logprobs[rows], atol=1e-5)
        np.testing.assert_array_equal(found.kept.ids, unbroken.kept.ids[rows])
        assert played.rollout.tokens.sharding == mesh_lib.rows_sharding(MESH)
    assert len(set(seen)) == len(seen) == 8


def test_each_token_keeps_the_log_prob_of_the_policy_that_drew_it(sampler):
    """Tokens drawn before a weight sync keep the old policy's log-probs; later tokens have the new policy's.

    Both are compared with the trainer's scores, which see all preceding tokens, to 1e-4.
    """
    player = Player(sampler)
    buffer = Buffer(player, groups=2, group_size=G, in_flight=6, min_ended=0.5)
    prompts = in_fours()
    first = buffer.play(prompts, KEY)
    assert not first.stale_tokens.any()
    left = buffer.episodes
    begun = dict(zip([row_of(left, i) for i in range(len(left))], left.sampled_tokens, strict=True))
    sampler.load(Weights.full(place(other_params(), MESH)))
    sampler.policies += 1
    prompts, both = in_fours(), 0  # responses are numbered anew
    for _ in range(2):  # a third batch would have new responses to prompts of the first
        played = buffer.play(prompts, KEY)
        rollout, older = jax.device_get(played.rollout), played.stale_tokens
        assert older.tolist() == [begun.get(row_of(played, i), 0) for i in range(len(older))]
        ended = rollout.mask.sum(axis=1)
        both += ((older > 0) & (older < ended)).sum()
        by_old = np.arange(T)[None] < older[:, None]
        for policy, own in ((weights(), by_old), (Weights.full(other_params()), ~by_old)):
            here = own & rollout.mask
            scores = np.asarray(trainers(policy, played.rollout).logprobs)
            np.testing.assert_allclose(rollout.logprobs[here], scores[here], atol=1e-4)
        check_kept(rollout)
        known = (rollout.routes.experts >= 0).all(axis=(2, 3))
        np.testing.assert_array_equal(known.sum(axis=1), rollout.prompt_lengths + ended - 1, "the routes are whole")
    assert both, "some responses are begun by one policy and ended by the other"


def test_a_buffer_goes_on_from_its_arrays(sampler):
    """A buffer restored from the arrays that a checkpoint stores yields bitwise equal batches."""
    player = Player(sampler)
    settings = {"groups": 2, "group_size": G, "in_flight": 6, "min_ended": 0.5}
    buffer = Buffer(player, **settings)
    buffer.play(in_fours(), KEY)
    left = buffer.episodes
    saved = left.to_arrays(), left.texts.tolist(), left.records.tolist()
    again = Buffer(player, **settings, episodes=Episodes.from_arrays(*saved))

    sampler.policies += 1
    a, b = (each.play(in_fours(), jax.random.key(9)) for each in (buffer, again))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    for name in HOST_COLUMNS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


REPLY = [7, 8, 5]
"""Reply tokens of the environment; the stop id 5 among them must not end the response."""


def answer(prompts, responses, records):
    """Reply where the last token hands over the turn, else return None."""
    return [REPLY if response[-1] in GOES_ON else None for response in responses]


def test_every_shard_gets_groups_of_all_ages(sampler, monkeypatch):
    """Two shards: of six groups without prefixes, the first shard gets the oldest, the third and the fifth oldest."""
    groups = np.array([1, 2, 4, 5, 7, 8])
    np.testing.assert_array_equal(spread_over_shards(groups, 0 * groups, 2), [1, 4, 7, 2, 5, 8])
    tokens = np.array([9, 1, 3, 4, 0, 5])
    np.testing.assert_array_equal(spread_over_shards(groups, tokens, 2), [1, 4, 7, 2, 5, 8], "9, then 3, then 0")
    drawn = np.random.default_rng(0).integers(0, 1000, 64)
    dealt = drawn[spread_over_shards(np.arange(64), drawn, 8)].reshape(8, 8).sum(axis=1)
    assert np.ptp(dealt) < 0.1 * dealt.mean()
    player, calls = Player(sampler), []
    resume = player.resume
    monkeypatch.setattr(
        player, "resume", lambda some, **how: calls.append(list(some.texts[::G])) or resume(some, **how)
    )
    buffer = Buffer(player, groups=2, group_size=G, in_flight=6, min_ended=0.5)
    buffer.play(in_fours(), KEY)
    assert calls[0] == [NAMES[i] for i in (0, 2, 4, 1, 3, 5)]


def test_turns(sampler):
    """Replies follow each turn; their tokens are in the mask and the routes, but not in the action mask."""
    heard = []

    def reply(prompts, responses, records):
        heard.extend(zip(prompts, responses, [record["number"] for record in records], strict=True))
        return answer(prompts, responses, records)

    player = Player(sampler, environment=Replying(reply), max_turns=3)
    played = player.answer(some(0, 6), jax.random.key(57))  # whose responses end in all four ways
    rollout = jax.device_get(played.rollout)
    assert set(played.turns) == {1, 2, 3}
    kinds = set()
    for i in range(12):
        n = int(rollout.mask[i].sum())
        tokens, own = rollout.tokens[i, :n].tolist(), rollout.action_mask[i, :n]
        assert own[0] and not rollout.action_mask[i, n:].any() and not rollout.tokens[i, n:].any()
        said = [t for t, drawn in zip(tokens, own, strict=True) if not drawn]
        assert said == REPLY * (len(said) // 3)
        turn = len(said) // 3 + 1
        assert played.turns[i] == turn
        stopped = tokens[-1] in (5, *GOES_ON) and own[-1]
        no_room = tokens[-1] in GOES_ON and own[-1] and turn < 3
        assert rollout.truncated[i] == (not stopped or no_room)
        assert not no_room or n + 3 >= T
        kinds.add("no room" if no_room else "cut" if not stopped else "last turn" if tokens[-1] in GOES_ON else "over")
        asked = [h for h in heard if h[0] == NAMES[i // G] and h[1] == tokens[: len(h[1])]]
        assert len(asked) >= turn - 1 and all(h[2] == str(i // G) for h in asked)
    assert kinds == {"no room", "cut", "last turn", "over"}
    drawn = rollout.action_mask
    scores = np.asarray(trainers(weights(), played.rollout).logprobs)
    np.testing.assert_allclose(rollout.logprobs[drawn], scores[drawn], atol=1e-4)
    assert not rollout.logprobs[~drawn].any() and not rollout.behaviour_logprobs[~drawn].any()
    check_kept(rollout)
    np.testing.assert_allclose(sampler.stats.kept_share, np.exp(rollout.kept.logprobs)[drawn].sum() / drawn.sum())
    known = (rollout.routes.experts >= 0).all(axis=(2, 3)).sum(axis=1)
    np.testing.assert_array_equal(known, rollout.prompt_lengths + rollout.mask.sum(axis=1) - 1)


@pytest.mark.slow
def test_responses_begin_with_an_opening(sampler):
    """Opening tokens are in the mask but are no actions, and the stop id among them does not end the response."""
    rollout = jax.device_get(Player(sampler, opening=REPLY).answer(some(0, 12), KEY).rollout)
    np.testing.assert_array_equal(rollout.tokens[:, :3], [REPLY] * 24)
    np.testing.assert_array_equal(rollout.action_mask, rollout.mask & (np.arange(T) >= 3))
    scores = np.asarray(trainers(weights(), rollout).logprobs)
    np.testing.assert_allclose(rollout.logprobs[rollout.action_mask], scores[rollout.action_mask], atol=1e-4)
    assert rollout.mask.sum(axis=1).min() < T, "responses can still end early"


@pytest.mark.slow
def test_shapes_are_compiled_once_unless_their_programs_are_dropped():
    """Weights in another type are refused, as no run may compile in every iteration; a dropped program is not."""
    own = make_sampler()
    own.load(Weights.full(place(params(), MESH)))
    before = own(some(0, 2), KEY)
    jax.clear_caches()
    np.testing.assert_array_equal(before.tokens, own(some(0, 2), KEY).tokens)
    own._weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), own._weights)
    with pytest.raises(RuntimeError, match=r"^prompts of shape \(2, 6\) were sampled before, yet the sampler was comp"):
        own(some(0, 2), KEY)


@pytest.mark.slow
def test_a_call_of_several_pieces_may_follow_one_of_a_single_piece():
    """Its ended responses are heard in between, by a program that the first call did not need."""
    own, ended = make_sampler(poll_steps=1), []
    own.load(Weights.full(place(params(), MESH)))
    for longest, calls in ((1, 0), (T, 1)):
        own(some(0, 2), KEY, limits=np.full(2 * G, longest, np.int32), heard=lambda rows, _: ended.append(rows))
        assert (len(ended) > 0) == calls


@pytest.mark.slow
def test_turns_in_parts(sampler):
    """Multi-turn episodes that are cut off and resumed equal those played to the end in one call."""
    player = Player(sampler, environment=Replying(answer), max_turns=3)
    whole = player.answer(some(0, 12), KEY)
    buffer = Buffer(player, groups=2, group_size=G, in_flight=6, min_ended=0.5)
    prompts = in_fours()
    for _ in range(4):
        played = buffer.play(prompts, KEY)
        rows = [row_of(played, i) for i in range(4)]
        np.testing.assert_array_equal(played.turns, whole.turns[rows])
        for name in ("tokens", "action_mask", "truncated"):
            expected = np.asarray(getattr(whole.rollout, name))[rows]
            np.testing.assert_array_equal(getattr(played.rollout, name), expected)


class Rewarding(Replying):
    """Rewards each turn with its number and a tenth of its last token; hears which episodes are over."""

    asks_last = True

    def __init__(self):
        super().__init__(answer)
        self.finished = []

    def begin(self, turns):
        replies = self.function([], [turn.tokens for turn in turns], [])
        rewards = [len(turn.turns) + turn.turns[-1][-1] / 100 for turn in turns]
        return [settled(Answer(*each)) for each in zip(replies, rewards, strict=True)]

    def finish(self, ids):
        self.finished += ids


def test_turns_have_their_ends_and_rewards(sampler):
    """Also the last, which gets no reply; not one that was cut off. One without room for its reply is truncated."""
    environment = Rewarding()
    played = Player(sampler, environment=environment, max_turns=3).answer(some(0, 6), jax.random.key(57))
    rollout, no_room = jax.device_get(played.rollout), 0
    for i in range(12):
        n, own = int(rollout.mask[i].sum()), rollout.action_mask[i]
        ends = [t + 1 for t in range(n) if own[t] and (t + 1 == n or not own[t + 1])]
        assert played.turn_ends[i].tolist() == ends + [0] * (3 - len(ends)) and len(ends) == played.turns[i]
        stopped = [rollout.tokens[i, end - 1] in (5, *GOES_ON) for end in ends]
        assert all(stopped[:-1])
        wants = [turn + rollout.tokens[i, end - 1] / 100 for turn, end in enumerate(ends, 1)]
        wants = [want if done else math.nan for want, done in zip(wants, stopped, strict=True)]
        np.testing.assert_allclose(played.turn_rewards[i], wants + [math.nan] * (3 - len(ends)), rtol=1e-6)
        no_room += bool(stopped[-1] and rollout.truncated[i])
    assert no_room and len(set(environment.finished)) == len(environment.finished) == 12


class Held(Replying):
    """Holds back its replies to two of three prompts until two more sampling calls were made, or somebody waits."""

    def __init__(self, function, sampler, monkeypatch, *, hold=lambda number: number % 3):
        super().__init__(function)
        self.hold, self.held, self.calls, self.outlived, self.waits, self.asked = hold, [], 0, 0, [], []
        self.finished = []
        resume = sampler.resume
        monkeypatch.setattr(sampler, "resume", lambda *given, **how: self.sampled(resume(*given, **how)))

    def sampled(self, decoded):
        self.calls += 1
        due = [future for since, future in self.held if self.calls - since >= 2 and not future.done()]
        self.outlived += len(due)
        for future in due:
            future.set_result(future.answer)
        return decoded

    def begin(self, turns):
        self.asked += [(turn.id, len(turn.turns)) for turn in turns]
        answers = super().begin(turns)
        for i, turn in enumerate(turns):
            if self.hold(int(turn.record["number"])):
                held = Future()
                held.answer, answers[i] = answers[i].result(), held
                self.held.append((self.calls, held))
        return answers

    def wait(self, pending, *, within_s=math.inf):
        self.waits.append(within_s)
        if within_s == math.inf:
            for _, future in self.held:
                future.done() or future.set_result(future.answer)
        wait(pending, timeout=within_s)

    def finish(self, ids):
        self.finished += ids


def check_played(played, whole):
    """Check that the responses of a batch are those of one call for all prompts."""
    rows = [row_of(played, i) for i in range(len(played.turns))]
    np.testing.assert_array_equal(played.turns, whole["turns"][rows])
    for name in ("tokens", "action_mask", "truncated"):
        np.testing.assert_array_equal(getattr(played.rollout, name), whole[name][rows])
    return rows


@pytest.fixture(scope="module")
def in_turns(sampler):
    """Return turns, tokens and action masks of all episodes, six prompts at a time, each reply awaited."""
    sampler.load(Weights.full(place(params(), MESH)))
    player = Player(sampler, environment=Replying(answer), max_turns=3)
    halves = [player.answer(some(first, 6), KEY, first=first * G) for first in (0, 6)]
    names = ("tokens", "action_mask", "truncated")
    found = {name: np.concatenate([getattr(half.rollout, name) for half in halves]) for name in names}
    return found | {"turns": np.concatenate([half.turns for half in halves])}


def test_episodes_go_on_while_others_wait_for_their_replies(sampler, in_turns, monkeypatch):
    """Also from arrays, by a player that has asked nothing. Each turn is asked about once by each."""
    environment = Held(answer, sampler, monkeypatch)
    player = Player(sampler, environment=environment, max_turns=3, patience_s=0.0)
    settings = {"groups": 2, "group_size": G, "in_flight": 6, "min_ended": 0.5}
    buffer, prompts = Buffer(player, **settings), in_fours()
    rows = check_played(buffer.play(prompts, KEY), in_turns)
    assert environment.outlived, "two sampling calls were made while a reply was pending"
    left = buffer.episodes
    assert left is not None and left.waiting.any() and not left.live[left.waiting].any()
    assert not left.prefix_lengths[left.waiting].any()
    saved = left.to_arrays(), left.texts.tolist(), left.records.tolist()
    for made in (player, Player(sampler, environment=Held(answer, sampler, monkeypatch), max_turns=3, patience_s=0.0)):
        again, prompts = Buffer(made, **settings, episodes=Episodes.from_arrays(*saved)), in_fours(8)
        again.started, again._policies = buffer.started, buffer._policies
        more = rows + check_played(again.play(prompts, KEY), in_turns)
        assert len(set(more)) == len(more) == 8
        asked = made._environment.asked
        assert len(set(asked)) == len(asked), "a turn was asked about twice"
    assert len(set(environment.finished)) == len(environment.finished)


def test_nothing_is_busy_while_all_episodes_wait(sampler, monkeypatch):
    """Five looks a second at most, and no sampling call without an episode to sample."""
    environment = Held(answer, sampler, monkeypatch, hold=lambda number: True)
    player = Player(sampler, environment=environment, max_turns=2, patience_s=0.0)
    episodes = player.begin(some(0, 6), KEY)
    while episodes.live.any():
        episodes = player.resume(episodes, patient=False)
    assert episodes.waiting.any()
    environment.waits.clear()
    calls, begun = environment.calls, time.monotonic()
    for _ in range(3):
        episodes = player.resume(episodes, patient=False)
    assert environment.calls == calls and time.monotonic() - begun >= 0.6 * 0.99
    assert environment.waits == [0.0, 0.2] * 3
    assert player.finish(episodes).ended.all()


class Opening(Replying):
    """Begins episodes with prompts of its own: `opened` holds those of all."""

    def __init__(self, opened):
        super().__init__(answer)
        self.opened = opened

    def open(self, turns):
        return self.opened


def test_an_environment_begins_the_episodes_of_a_group_alike(sampler, caplog):
    """The first that did not fail decides; others have failed. A group that failed keeps its prompt."""
    lost, kept = (None, True), (None, False)
    opened = [([3, 4], False), ([3, 4], False), lost, ([9] * 6, False), ([1], False), ([2], False), lost, lost]
    begun = Player(sampler, environment=Opening(opened)).begin(some(0, 4), KEY)
    assert begun.failed.tolist() == [False, False, True, False, False, True, True, True]
    rollout: Any = begun.rollout
    prompts = [row[:n].tolist() for row, n in zip(rollout.prompts, rollout.prompt_lengths, strict=True)]
    own = PROMPTS.tokens[3, : PROMPTS.lengths[3]].tolist()
    assert prompts == [[3, 4]] * 2 + [[9] * 6] * 2 + [[1]] * 2 + [own] * 2
    assert "reset gave 1 of 8 episodes another prompt than the first of their group" in caplog.text
    caplog.clear()
    begun = Player(sampler, environment=Opening([kept] * 8)).begin(some(0, 4), KEY)
    assert not begun.failed.any() and not caplog.text
    np.testing.assert_array_equal(begun.rollout.prompts, np.repeat(PROMPTS.tokens[:4], G, axis=0))


@pytest.mark.slow
def test_drafts_change_no_turn(sampler):
    """Episodes of several turns, whole and in parts, with drafts from those that were played before."""
    whole = Player(sampler, environment=Replying(answer), max_turns=3).answer(some(0, 12), KEY)
    drafting = make_sampler(drafting=Drafting("history", 3, fixed_rows=10**9))
    drafting.load(Weights.full(place(params(), MESH)))
    player = Player(drafting, environment=Replying(answer), max_turns=3, history=History(T))
    for _ in range(2):
        played = player.answer(some(0, 12), KEY)
        np.testing.assert_array_equal(played.turns, whole.turns)
        for name in ("tokens", "action_mask", "truncated"):
            np.testing.assert_array_equal(getattr(played.rollout, name), np.asarray(getattr(whole.rollout, name)))
        np.testing.assert_array_equal(played.rollout.routes.experts, whole.rollout.routes.experts)
        np.testing.assert_allclose(played.rollout.logprobs, whole.rollout.logprobs, atol=1e-6)
    before = drafting.stats
    assert before.accepted > 0
    buffer, prompts = Buffer(player, groups=2, group_size=G, in_flight=6, min_ended=0.5), in_fours()
    for _ in range(4):
        played = buffer.play(prompts, KEY)
        rows = [row_of(played, i) for i in range(4)]
        for name in ("tokens", "action_mask", "truncated"):
            expected = np.asarray(getattr(whole.rollout, name))[rows]
            np.testing.assert_array_equal(getattr(played.rollout, name), expected)
    assert drafting.stats.accepted > before.accepted


@pytest.mark.parametrize(
    ("longest", "size", "want"), [(1, 16, 4), (4, 16, 4), (5, 16, 8), (13, 16, 16), (3, 6, 4), (5, 6, 6), (1, 1, 1)]
)
def test_prompts_and_prefixes_come_in_four_lengths(longest, size, want):
    assert bucket(longest, size) == want


def test_a_call_can_be_ended_before_and_in_the_midst_of_its_decode_steps(monkeypatch):
    """By its `poll`; tests/rollout/test_decoder.py has the decoder that calls it."""

    def decode(self, *inputs, poll, **options):
        polls.append(self.poll_steps)
        poll()

    def poll() -> None:
        polls.append(0)
        if len(polls) == 3:
            raise StopRequested

    monkeypatch.setattr(PolledDecode, "__call__", decode)
    polled, polls = make_sampler(poll_steps=2), []
    polled.load(Weights.full(place(params(), MESH)))
    polled.poll = poll
    with pytest.raises(StopRequested):
        polled(some(0, 6), KEY)
    assert polls == [0, 2, 0]


class OpeningSome(Replying):
    """Begins the episodes of some prompts with another one, and fails in one episode."""

    def __init__(self):
        super().__init__(lambda texts, tokens, records: [None] * len(texts))

    def open(self, turns):
        own = {"prompt 1": [7, 8, 9], "prompt 3": [7] * 6}
        return [(own.get(turn.text), number == 0) for number, turn in enumerate(turns)]


def test_a_prompt_of_the_environment_takes_the_place_of_its_text(sampler):
    """Rewards and samples have the prompt that the policy reads, whichever episode of the group fails."""
    episodes = Player(sampler, environment=OpeningSome(), max_turns=2).begin(some(0, 4), KEY)
    assert episodes.texts[::G].tolist() == ["prompt 0", "tokens [7, 8, 9]", "prompt 2", "tokens [7, 7, 7, 7, 7, 7]"]
    assert (episodes.texts[::G] == episodes.texts[1::G]).all()
    assert episodes.rollout.prompt_lengths.tolist()[2:4] == [3, 3] and episodes.failed.sum() == 1
    assert (episodes.rollout.prompts[2:4, :3] == [7, 8, 9]).all()
