"""The split of log-ratios into what weights and what routes did."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import engine, estimates, noise
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.measuring import noise as measuring
from gspo_jax.routing import decomposition
from gspo_jax.routing.decomposition import LogRatios, Moments
from gspo_jax.studies import noise_figure
from gspo_jax.train import train
from gspo_jax.types import Packing, RouterRecord
from tests.run.test_family import ADDER, settings

MASK = np.array([[True, True, False], [True, True, True], [False, False, False], [True, False, False]])


def some(seed: int, rows: int = 4) -> LogRatios:
    """Return random log-ratios with garbage outside the mask."""
    random = np.random.default_rng(seed)
    mask = np.tile(MASK, (rows // 4, 1))
    old, replayed, native = (np.where(mask, random.normal(size=mask.shape), np.nan) for _ in range(3))
    return LogRatios.of(old, replayed, native, mask)


def test_the_parts_are_variances_and_covariance_by_numpy():
    ratios = some(0)
    assert all((x[~MASK] == 0).all() for x in ratios[:3]), "0 outside the mask"
    for these in (ratios, ratios.of_responses):
        d, w, r = (x[these.mask] for x in these[:3])
        one = decomposition.split(these.moments(2))
        np.testing.assert_allclose(one.whole, np.var(d), rtol=1e-12)
        np.testing.assert_allclose([one.weights, one.routes], [np.var(w), np.var(r)], rtol=1e-12)
        np.testing.assert_allclose(one.covariance, 2 * np.cov(w, r, ddof=0)[0, 1], rtol=1e-10)
        np.testing.assert_allclose(one.weights + one.routes + one.covariance, one.whole, rtol=1e-12)
        np.testing.assert_allclose(one.share, np.cov(r, d, ddof=0)[0, 1] / np.var(d), rtol=1e-10)


def test_responses_are_means_over_their_tokens():
    means = some(1).of_responses
    assert means.mask.tolist() == [[True], [True], [False], [True]]
    np.testing.assert_allclose(means.whole[1, 0], some(1).whole[1].mean())
    np.testing.assert_allclose(means.routes[0, 0], some(1).routes[0, :2].mean())
    assert means.weights[3, 0] == some(1).weights[3, 0] and means.weights[2, 0] == 0
    last = some(1).where(np.array([[False, True, True]])).of_responses
    np.testing.assert_allclose(last.whole[1, 0], some(1).whole[1, 1:].mean())


def test_moments_of_groups_add_up_and_nothing_has_no_variance():
    ratios = some(2, rows=16)
    whole, parts = ratios.moments(16), ratios.moments(4)
    assert len(parts.count) == 4 and len(whole.count) == 1
    np.testing.assert_allclose([x.sum() for x in parts], [x[0] for x in whole], rtol=1e-12)
    nothing = ratios.where(np.zeros_like(ratios.mask))
    assert decomposition.split(nothing.moments(4)) == (0, 0, 0, 0)
    assert np.isnan(decomposition.split(nothing.moments(4)).share), "a share of nothing"
    one = LogRatios.of(np.zeros((1, 1)), np.full((1, 1), 0.5), np.full((1, 1), 2.0), np.ones((1, 1), bool))
    assert decomposition.split(one.moments(1)) == (0, 0, 0, 0), "one number does not vary"


def test_an_interval_holds_the_share_and_shrinks_with_the_number_of_groups():
    few, many = some(3, rows=16), some(3, rows=1600)
    spans = [decomposition.share_interval(these.moments(4), seed=0) for these in (few, many)]
    for (low, high), these in zip(spans, (few, many), strict=True):
        assert low < decomposition.split(these.moments(4)).share < high
    assert spans[1][1] - spans[1][0] < 0.3 * (spans[0][1] - spans[0][0])


def test_effective_tokens_are_all_if_independent_and_one_if_equal():
    mask, zeros = np.ones((4000, 25), bool), np.zeros((4000, 25))
    drawn = np.random.default_rng(1).normal(size=zeros.shape)
    for ratios, want in ((drawn, 25), (np.repeat(drawn[:, :1], 25, axis=1), 1)):
        found = decomposition.metrics(LogRatios.of(zeros, zeros, ratios, mask))["noise/effective_tokens"]
        assert found == pytest.approx(want, rel=0.1)
    assert np.isnan(decomposition.metrics(LogRatios.of(zeros, zeros, zeros, mask))["noise/effective_tokens"])


def test_an_interval_is_the_percentiles_of_groups_drawn_anew():
    moments = some(7, rows=40).moments(4)
    drawn = np.random.default_rng(3).multinomial(10, np.full(10, 0.1), estimates.RESAMPLES)
    sums = np.array(moments)
    shares = [decomposition.split(Moments(*(sums * counts))).share for counts in drawn]
    found = decomposition.share_interval(moments, seed=3)
    assert found == pytest.approx(np.quantile(shares, [0.025, 0.975]))
    nothing = np.zeros((8, 3))
    still = LogRatios.of(nothing, nothing, nothing, np.ones((8, 3), bool)).moments(4)
    assert np.isnan(decomposition.share_interval(still, seed=0)).all()


def test_flips_are_compared_where_tokens_are_predicted():
    """One response of two tokens to a prompt of one token in two columns, one layer, two experts."""
    old = np.array([[[[3, 1]], [[9, 9]], [[2, 0]], [[5, 6]]]])
    new = np.array([[[[1, 3]], [[8, 8]], [[4, 2]], [[7, 7]]]])
    found = decomposition.flips(
        old, new, np.array([1]), prompt_columns=2, old_logprobs=np.log(np.full(old.shape, 0.25))
    )
    # Token 0 is predicted by the prompt's only token, which has the same set; token 1 by token 0, which lost expert 0.
    assert found.old.tolist() == [[[[False, False]], [[False, True]]]]
    assert found.count.tolist() == [[0, 1]]
    ratios = LogRatios.of(np.zeros((1, 2)), np.zeros((1, 2)), np.array([[0.5, 2.0]]), np.ones((1, 2), bool))
    by_flips = decomposition.by_flips(ratios, found, group_size=1)
    assert [one["tokens"] for one in by_flips[:3]] == [1, 1, 0]
    assert [one["routes_squared"] for one in by_flips[:3]] == [0.25, 4.0, 0.0]
    assert [one["tokens"] for one in decomposition.by_rank(ratios, found, group_size=1)] == [0, 1]
    shares = decomposition.by_probability(ratios, found, (0.0, 0.2, 0.3), group_size=1)
    assert [one["tokens"] for one in shares] == [0, 1] and shares[1]["routes_squared"] == 4.0
    unknown = decomposition.flips(np.full_like(old, -1), new, np.array([1]), prompt_columns=2)
    assert unknown.count.sum() == 0 and unknown.probability is None


def test_the_kl_of_routers_is_over_the_old_experts_where_tokens_are_predicted():
    """Two responses of up to three tokens in 2 + 3 positions, three layers, two of many experts."""
    random = np.random.default_rng(5)
    still, experts = np.zeros((2, 3)), np.tile(np.arange(2), (2, 5, 3, 1))
    ratios = LogRatios.of(still, still, still, np.array([[True, True, True], [True, False, False]]))
    before, after = (np.log(random.uniform(0.05, 0.45, size=experts.shape)) for _ in range(2))
    old, new = (RouterRecord(jnp.asarray(experts), jnp.asarray(x)) for x in (before, after))
    options: dict[str, Any] = {"group_size": 1, "unseen": np.array([False, True])}
    facts = measuring.described(ratios, old, old, new, np.array([2, 1]), **options)
    found = []
    for row, positions in ((0, (1, 2, 3)), (1, (0,))):  # the prompt's last token, and the response's but for its last
        p, q = (np.exp(x[row, positions]) for x in (before, after))
        found.append((p * np.log(p / q)).sum(-1) + (1 - p.sum(-1)) * np.log((1 - p.sum(-1)) / (1 - q.sum(-1))))
    assert facts["router_kl"] == pytest.approx(np.concatenate(found).mean(), rel=1e-5)
    assert facts["unseen"]["router_kl"] == pytest.approx(found[1].mean(), rel=1e-5)
    assert facts["flip_rate"] == 0 and (facts["tokens"], facts["unseen"]["tokens"]) == (4, 1)
    options["unseen"][:] = False
    assert "unseen" not in measuring.described(ratios, old, old, new, np.array([2, 1]), **options)


def test_responses_that_no_update_has_learned_from():
    responses: Any = np.array([[2, 0, -1], [1, 3, -1]], np.int32)
    others: Any = dict.fromkeys(("kind", "turn", "prompt", "start", "turns"), np.zeros((2, 3), np.int32))
    packing = Packing(responses=responses, row_lengths=(8,), size=2, **others)
    assert packing.unseen(0).all() and packing.unseen(0).shape == (4,)
    assert packing.unseen(1).tolist() == [False, True, False, True]
    assert not packing.unseen(2).any() and not packing.unseen(3).any()


def test_tokens_are_classed_by_the_number_the_rank_and_the_probability_of_what_they_lost():
    """Four tokens, two layers of nine experts: one keeps all, one loses two, one loses nine, one loses its last."""
    old = np.zeros((1, 4, 2, 9), bool)
    old[0, 1, 0, 3] = old[0, 1, 1, 2] = True
    old[0, 2, 1] = True
    old[0, 3, 1, 8] = True
    probability = np.zeros(old.shape)
    probability[0, 1, 0, 3], probability[0, 1, 1, 2], probability[0, 2, 1], probability[0, 3, 1, 8] = 0.2, 0.1, 0.5, 0.1
    probability[0, 0] = 0.9  # of experts that stayed
    found = decomposition.Flips(old, probability)
    mask = np.ones((1, 4), bool)
    ratios = LogRatios.of(np.zeros((1, 4)), np.array([[1.0, 2, 3, 4]]), np.array([[2.0, 4, 6, 8]]), mask)

    counts = decomposition.by_flips(ratios, found, group_size=1)
    assert [one["flips"] for one in counts] == list(range(9)) and counts[0]["weights_squared"] == 1
    assert {one["flips"]: one["routes_squared"] for one in counts if one["tokens"]} == {0: 1, 1: 16, 2: 4, 8: 9}
    ranks = decomposition.by_rank(ratios, found, group_size=1)
    assert [one["rank"] for one in ranks] == list(range(1, 10))
    assert {one["rank"]: one["routes_squared"] for one in ranks if one["tokens"]} == {1: 9, 3: 4, 9: 16}
    shares = decomposition.by_probability(ratios, found, (0.0, 0.1, 0.2, 0.4, 0.5), group_size=1)
    assert [(one["above"], one["up_to"]) for one in shares] == [(0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, 0.5)]
    assert [one["routes_squared"] for one in shares] == [16, 4, 0, 9]
    still = decomposition.by_flips(ratios, decomposition.Flips(np.zeros_like(old), None), group_size=1)[0]
    assert (still["tokens"], still["weights_squared"], still["routes_squared"]) == (4, 7.5, 7.5)


def test_positions_divide_the_responses():
    ratios = some(4, rows=16)
    for parts, edges in ((3, [0, 1, 2, 3]), (2, [0, 2, 3])):
        found = decomposition.by_position(ratios, parts=parts, group_size=4)
        for low, high, one in zip(edges[:-1], edges[1:], found, strict=True):
            values = ratios.whole[:, low:high][ratios.mask[:, low:high]]
            assert (one["from"], one["to"], one["tokens"]) == (low, high, len(values))
            assert one["whole"] == pytest.approx(np.var(values))
            assert one["share"] * one["whole"] == pytest.approx(one["routes"] + one["covariance"] / 2)
            assert one["interval"][0] < one["share"] < one["interval"][1]


def test_classes_have_intervals_over_groups_and_one_member_has_none():
    ratios = some(5, rows=400)
    drawn = decomposition.by_flips(ratios, decomposition.Flips(np.zeros((400, 3, 1, 2), bool), None), group_size=4)
    low, high = drawn[0]["interval"]
    square = drawn[0]["routes_squared"]
    assert low < square < high and square == pytest.approx((ratios.routes[ratios.mask] ** 2).mean())
    assert high - low < 0.5 * square and np.isnan(drawn[1]["interval"]).all()
    layer = decomposition.of_layer(ratios.moments(4))
    assert layer["interval"][0] < layer["routes"] < layer["interval"][1]


def test_means_over_more_tokens_vary_as_their_dependence_says():
    mask, zeros = np.ones((4000, 64), bool), np.zeros((4000, 64))
    mask[:1000, 32:] = False
    random = np.random.default_rng(2)
    weights, routes = random.normal(size=mask.shape), np.repeat(random.normal(size=(4000, 1)), 64, axis=1)
    found = decomposition.by_length(LogRatios.of(zeros, weights, weights + routes, mask), (4, 16, 64, 256))
    assert [(one["tokens"], one["responses"]) for one in found] == [(4, 4000), (16, 4000), (64, 3000)]
    for one in found:
        assert one["weights"] == pytest.approx(1 / one["tokens"], rel=0.1) and one["routes"] == pytest.approx(
            1, rel=0.1
        )
        assert one["effective_tokens"] == pytest.approx(2 / (1 + 1 / one["tokens"]), rel=0.1)
    assert decomposition.by_length(LogRatios.of(zeros, zeros, zeros, mask), (4,))[0]["whole"] == 0


@pytest.mark.parametrize("text", ["", "-1,1", "2,1", "1,1", "1;2", "one"])
def test_numbers_of_updates_that_do_not_rise(text):
    with pytest.raises(UserError, match=r"--updates is .*; use rising whole numbers"):
        noise.parse_updates(text)
    assert noise.parse_updates("0,1,2,16") == [0, 1, 2, 16]


@pytest.mark.slow
def test_the_command_and_the_metric_on_a_run(data, tmp_path):
    """The parts add up, flip rates agree, every layer has a part of its own, and the run folder stays as it was."""
    config = settings(data, model__folder=str(ADDER), iterations=2, routing__noise_every=2)
    config.optimizer.learning_rate, config.training.old_logprobs = 3e-3, "recompute"
    train(config, tmp_path / "run")
    (logged,) = [row for row in read_metrics(tmp_path / "run") if "noise/token" in row]
    assert logged["iteration"] == 2 and logged["noise/token_routes"] > 0
    assert 0 < logged["routing/replayed_flip_rate"] <= logged["routing/native_flip_rate"] < 1
    for level in ("token", "sequence"):
        parts = sum(logged[f"noise/{level}_{part}"] for part in decomposition.PARTS)
        assert parts == pytest.approx(logged[f"noise/{level}"], rel=1e-6)
    before = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*"))
    facts = noise.run(config, str(tmp_path / "run"), [0, 1, 2, 3])
    assert sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*")) == before, "nothing is written"
    json.dumps(facts, allow_nan=False)
    assert [one["updates"] for one in facts["after"]] == [0, 1, 2, 3] and facts["checkpoint"] == "iteration 2"
    before, *after = facts["after"]
    assert before["flip_rate"] == 0 and before["token"]["whole"] < 1e-10, "old log-probs are the trainer's"
    for one in after:
        for level in ("token", "sequence"):
            split = one[level]
            assert split["weights"] + split["routes"] + split["covariance"] == pytest.approx(split["whole"], rel=1e-6)
            assert split["interval"][0] <= split["share"] <= split["interval"][1]
        assert one.get("unseen", one)["tokens"] <= one["tokens"]
        assert 0 < one["router_kl"] < 1 and before["router_kl"] < 1e-6
        assert 0 < one["replayed_flip_rate"] < 1 and before["replayed_flip_rate"] == 0
        assert 0 < one["flip_interval"][0] <= one["flip_rate"] <= one["flip_interval"][1] < 1
        assert one["flip_rate"] == pytest.approx(np.mean(one["flip_rate_per_layer"]))
    last = facts["after"][-1]
    assert len(last["by_layer"]) == facts["layers"] == 2
    assert all(0 < layer["routes"] < 10 * last["token"]["routes"] for layer in last["by_layer"])
    (tmp_path / "noise.json").write_text(json.dumps(facts))
    out = tmp_path / "figure"
    assert noise_figure.main([str(tmp_path), str(tmp_path), f"--out={out}"]) == 0  # several runs in one figure
    assert all((out / name).stat().st_size > 10_000 for name in noise_figure.LAYOUTS)
    assert (out / "noise.md").read_text().count("\n") == 2 + 2 * 4


def test_a_folder_without_facts_is_named(tmp_path, capsys):
    assert noise_figure.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no noise.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_with_r2_the_ratio_of_an_update_has_no_part_of_the_routes(data, tmp_path, monkeypatch):
    """The spread of an update's own log-ratios is the part of the weights, although the routers' own choice moves."""
    config = settings(data, model__folder=str(ADDER), arg="single,runlocal")
    config.optimizer.update({"learning_rate": 3e-3, "warmup_updates": 0})
    config.training.update({"old_logprobs": "recompute", "minibatches": 1})
    config.sampling.slots = 4
    config.routing.replay = "r2"
    updates, build = [], engine.build

    def spied(*arguments, **options):
        made = build(*arguments, **options)

        def update(*arguments):
            state, metrics = made.programs.update(*arguments)
            updates.append(metrics)
            return state, metrics

        return dataclasses.replace(made, programs=dataclasses.replace(made.programs, update=update))

    monkeypatch.setattr(engine, "build", spied)
    facts = noise.run(config, str(tmp_path / "run"), [1, 2])
    split = facts["after"][0]["token"]  # what the second update starts from
    assert split["routes"] > 1e-3 * split["whole"], "the routers' own choice moves, overruled or not"
    assert float(updates[1]["ratio/token_log_std"]) ** 2 == pytest.approx(split["weights"], rel=1e-3)
    assert float(updates[0]["ratio/token_log_std"]) < 1e-4
