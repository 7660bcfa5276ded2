"""The packer: every response whole in one row, few token slots, and the same work on every shard."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.lengths import Lengths
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rows import merge_rows, take_rows
from gspo_jax.training import packing as packing_lib
from gspo_jax.training.layout import Layout, deal, mask_of_rows, predicted
from gspo_jax.training.packing import Packer, default_budget, row_lengths, tokens_at_full_length, turns_at_full_length
from tests.alone import Alone
from tests.tiny import EIGHT, MESHES, mesh_id, mostly_slow, responses


def rows_of(packer: Packer, packing, minibatch: int, lengths, prompts) -> dict[tuple, np.ndarray]:
    """Return each row's owners by (shard, kind, turn): b + 1 for response b, -g - 1 for the prompt of group g."""
    found: dict[tuple, np.ndarray] = {}
    each = packing.responses.shape[1] // packer.shards
    for place, b in enumerate(packing.responses[minibatch]):
        if b < 0 or not lengths[b]:
            continue
        kind, turn = int(packing.kind[minibatch, place]), int(packing.turn[minibatch, place])
        row = found.setdefault((place // each, kind, turn), np.zeros(packer.row_lengths[kind], int))
        start, prompt, group = packing.start[minibatch, place], packing.prompt[minibatch, place], b // packer.group_size
        assert start + lengths[b] <= len(row)
        assert not row[start : start + lengths[b]].any(), "no two responses share a slot"
        row[start : start + lengths[b]] = b + 1
        its_prompt = row[prompt : prompt + prompts[b]]
        assert np.isin(its_prompt, (0, -group - 1)).all(), "a prompt's slots are its own"
        its_prompt[:] = -group - 1
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_response_is_whole_in_one_row_behind_its_prompt(data):
    G, shards, minibatches = (data.draw(st.sampled_from(x)) for x in ((1, 2, 4), (1, 2, 4), (1, 2)))
    groups = minibatches * shards * data.draw(st.integers(1, 4))
    longest, prompt = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
    kinds = data.draw(st.sampled_from([(1,), (1, 4)]))
    budget = prompt + longest + data.draw(st.integers(0, 200))
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    lengths = rng.integers(0, longest + 1, groups * G)
    prompts = np.repeat(rng.integers(1, prompt + 1, groups), G)
    packer = Packer(
        group_size=G, minibatches=minibatches, shards=shards, row_lengths=tuple(budget // part for part in kinds)
    )
    packing = packer(lengths, prompts)
    for minibatch in range(minibatches):
        own = packer.parts(np.arange(len(lengths)))[minibatch]
        rows = rows_of(packer, packing, minibatch, lengths, prompts)
        for (_, kind, turn), row in rows.items():
            assert turn < packing.turns[minibatch, kind]
            used = np.flatnonzero(row)
            assert used.tolist() == list(range(len(used))), "padding comes last"
            owners = [x for i, x in enumerate(row[used]) if i == 0 or x != row[i - 1]]
            heads = [-x - 1 for x in owners if x < 0]
            assert len(set(heads)) == len(heads), "a prompt comes once"
            group = None
            for owner in owners:  # each prompt, then the responses to it
                group = -owner - 1 if owner < 0 else group
                assert owner < 0 or (owner - 1) // G == group
        every = np.zeros(len(lengths), int)
        counts = sum((np.bincount(row[row > 0] - 1, minlength=len(lengths)) for row in rows.values()), every)
        np.testing.assert_array_equal(counts[own], lengths[own])
        places = packing.responses[minibatch]
        assert sorted(places[places >= 0]) == own.tolist()
        assert packing.turns[minibatch].sum() >= 1


def test_empty_responses_take_the_places_that_others_leave():
    """Here the responses of one shard fill all of its places."""
    rng = np.random.default_rng(5552)
    lengths, prompts = rng.integers(0, 51, 48), np.repeat(rng.integers(1, 4, 24), 2)
    assert (lengths == 0).any()
    packing = Packer(group_size=2, minibatches=2, shards=4, row_lengths=(136,))(lengths, prompts)
    assert sorted(packing.responses[packing.responses >= 0]) == list(range(48))


def test_a_packing_by_hand():
    """Two prompts of 2, responses of 5, 3, 2 and 2 in rows of 10: 2 + 5 + 3 fill one, 2 + 2 + 2 six of another."""
    packer = Packer(group_size=2, minibatches=1, shards=1, row_lengths=(10,))
    packing = packer(np.array([5, 3, 2, 2]), np.full(4, 2))
    assert packing.turns.tolist() == [[2]]
    assert packing.start[0, packing.places].tolist() == [2, 7, 2, 4]
    assert packing.prompt[0, packing.places].tolist() == [0, 0, 0, 0]
    turn = packing.turn[0, packing.places]
    assert turn[0] == turn[1] != turn[2] == turn[3]


RECIPE = {"group_size": 16, "minibatches": 4, "shards": 64, "row_lengths": row_lengths(16384), "pair_cost": 6.5e-5}
"""The 30B recipe with responses of up to 15,872 tokens on 64 chips: 32 responses for a chip and update."""


def lognormal(sigma: float, count: int, seed: int) -> np.ndarray:
    return Lengths(f"lognormal:4096:{sigma}", 15872, "the limit").draw(count, np.random.default_rng(seed))


def executed_over_needed(packer: Packer, packing, lengths, prompts) -> float:
    """Return token slots over response tokens and each group's prompt, once for each shard and mini-batch with it."""
    needed = int(lengths.sum())
    each = packing.responses.shape[1] // packer.shards
    for places in packing.responses:
        for shard in range(packer.shards):
            own = places[shard * each : (shard + 1) * each]
            groups = np.unique(own[own >= 0] // packer.group_size)
            needed += prompts[groups * packer.group_size].sum()
    return float(packing.slots.sum() * packer.shards / needed)


@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.2])
def test_at_log_normal_lengths_few_slots_are_empty_and_shards_have_the_same_work(sigma):
    """Whatever the lengths' spread; busiest shard against the mean of work over micro-batches, attention included."""
    packer, rng = Packer(**RECIPE), np.random.default_rng(0)
    lengths, prompts = lognormal(sigma, 8192, 1), np.repeat(rng.integers(64, 513, 512), 16)
    packing = packer(lengths, prompts)
    assert executed_over_needed(packer, packing, lengths, prompts) <= 1.15
    assert packer.metrics(packing, lengths, prompts)["packing/imbalance"] <= 1.05


def test_with_few_responses_the_longest_sets_the_bound():
    packer = dataclasses.replace(Packer(**RECIPE), minibatches=1)
    for seed in range(5):
        lengths = lognormal(0.8, 256, seed)
        prompts = np.full(256, 512)
        loads = packer.loads(packer(lengths, prompts), 0, lengths, prompts)
        own, shared = packing_lib.work(lengths, prompts, packer.pair_cost)
        assert loads.max() <= 1.05 * max(loads.mean(), (own + shared).max())


def test_responses_of_full_length_fill_the_rows_of_a_recipe():
    packer = dataclasses.replace(Packer(**RECIPE), row_lengths=(16384, 4096))
    packing = packer(np.full(1024, 3968), np.full(1024, 512))
    assert packing.turns.tolist() == [[1, 0]] * 4
    size = {"prompt": 512, "response": 3968, "group_size": 16}
    assert turns_at_full_length(4, (16384, 4096), **size) == (1, 0)
    assert tokens_at_full_length(4, **size) == 16384


@pytest.mark.parametrize(
    ("responses", "prompt", "response", "budget"),
    [(16, 32, 512, 1056), (16, 32, 128, 1056), (32, 512, 1024, 8704), (2, 512, 1024, 2560), (16, 8, 24, 400)],
)
def test_rows_of_the_default_budget_have_little_to_spare_at_full_length(responses, prompt, response, budget):
    """At most 3% of a shard's slots; the fewest tokens from 1024 on, unless the shard has fewer in all."""
    size = {"prompt": prompt, "response": response, "group_size": 8}
    assert default_budget(responses, **size) == budget
    (turns,) = turns_at_full_length(responses, (budget,), **size)
    assert turns * budget <= 1.03 * tokens_at_full_length(responses, **size)
    assert row_lengths(1024) == (1024,) and row_lengths(16384) == (16384, 4096)


@pytest.mark.parametrize(
    "sizes", mostly_slow([None, EIGHT, *MESHES[4:]], always=(EIGHT,)), ids=lambda s: mesh_id(s or {})
)
def test_rows_are_taken_from_any_shard(sizes):
    rng = np.random.default_rng(0)
    tree = {
        "a": rng.integers(0, 99, (16, 3)),
        "b": rng.normal(size=(16, 2, 2)).astype(np.float32),
        "c": rng.random(16) > 0.5,
        "of a dense model": np.zeros((16, 3, 0), np.int32),
    }
    rows = rng.integers(-1, 16, (3, 24)).astype(np.int32)
    if sizes is None:
        found = jax.jit(take_rows)(tree, rows)
    else:
        mesh = mesh_lib.make_mesh(sizes)
        with jax.set_mesh(mesh):
            found = jax.jit(take_rows)(hosts.shard_rows(mesh, tree), rows)
    for name, x in tree.items():
        live = (rows >= 0).reshape(*rows.shape, *(1,) * (x.ndim - 1))
        np.testing.assert_array_equal(found[name], np.where(live, x[rows], 0), err_msg=name)


@pytest.mark.parametrize("sizes", [None, EIGHT], ids=lambda s: mesh_id(s or {}))
def test_rows_of_two_batches_are_merged(sizes):
    rng = np.random.default_rng(0)
    one, other = ({"a": rng.integers(0, 99, (16, 3)), "b": rng.random(16)} for _ in range(2))
    rows = rng.permutation(32)[:16].astype(np.int32)
    if sizes is None:
        found = jax.jit(merge_rows)(one, other, rows)
    else:
        mesh = mesh_lib.make_mesh(sizes)
        with jax.set_mesh(mesh):
            found = jax.jit(merge_rows)(*hosts.shard_rows(mesh, (one, other)), rows)
    for name in one:
        np.testing.assert_allclose(found[name], np.concatenate([one[name], other[name]])[rows], err_msg=name)


@pytest.mark.parametrize("sizes", mostly_slow([None, EIGHT], always=(None, EIGHT)), ids=lambda s: mesh_id(s or {}))
def test_rows_hold_the_values_of_each_response_alone(sizes):
    """Every value of a response's positions is in its row, and comes back from there; so do those of predictions."""
    G, B, T = 4, 64, 10
    rollout, rng = responses(P=16, G=G, T=T), np.random.default_rng(0)
    S = rollout.prompts.shape[1]
    each = rng.normal(size=(B, S + T, 3)).astype(np.float32)
    each[:, :S] = np.repeat(each[::G, :S], G, axis=0)
    packer = Packer(group_size=G, minibatches=1, shards=8 if sizes else 1, row_lengths=(32,))
    packing = packer(rollout.mask.sum(axis=1), rollout.prompt_lengths)

    turns = int(packing.turns.max())

    @jax.jit
    def packed(rollout, each, packing):
        (own, values), packing = jax.tree.map(lambda x: x[0], (deal((rollout, each), packing), packing))

        def turn(number):
            rows = Layout.of(own, packing, 0, number)
            x = rows.rows(values)
            ahead = rows.scored(rows.predicting(x[..., 0]))
            mask = rows.responses.mask
            counts = predicted(rows, mask), mask_of_rows(rows, mask)
            return rows.live, rows.whole(x, -7), rows.own(x[..., 1]), ahead, (counts[0] * x[..., 0]).sum(), counts

        *found, summed, counts = jax.lax.map(turn, jnp.arange(turns))
        return found, (summed.sum(), *(x.sum() for x in counts))

    if sizes is None:
        found = packed(rollout, each, packing)
    else:
        mesh = mesh_lib.make_mesh(sizes)
        with jax.set_mesh(mesh):
            found = packed(*hosts.shard_rows(mesh, (rollout, each)), packing)
    found, (summed, *tokens) = jax.device_get(found)
    live, whole, own, ahead = (np.moveaxis(x, 0, 1)[packing.places] for x in found)
    np.testing.assert_array_equal(live.sum(axis=1), 1, "each response is in one row")
    at = live.argmax(axis=1)[:, None]
    whole, own, ahead = (
        np.take_along_axis(x, at.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0] for x in (whole, own, ahead)
    )
    alone = Alone(rollout)
    real = np.asarray(alone.valid)
    np.testing.assert_array_equal(whole, np.where(real[..., None], each, -7))
    np.testing.assert_array_equal(own, np.where(rollout.mask, each[:, S:, 1], 0))
    expected = np.where(rollout.mask, np.asarray(alone.predicting(each[..., 0])), 0)
    np.testing.assert_array_equal(ahead, expected)
    assert tokens == [rollout.mask.sum()] * 2
    np.testing.assert_allclose(summed, expected.sum(), rtol=1e-4)
