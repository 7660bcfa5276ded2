"""One outcome of several calls."""

import random
from concurrent.futures import Future

import pytest

from gspo_jax.calls.outcomes import Outcome, joined, mean, settled


def test_results_are_joined_in_their_order_whatever_comes_first():
    parts = [Future[int]() for _ in range(5)]
    whole = joined(parts, tuple)
    assert not whole.cancel()
    order = list(range(5))
    random.Random(0).shuffle(order)
    for place in order:
        assert not whole.done()
        parts[place].set_result(place)
    assert whole.result(timeout=0) == (0, 1, 2, 3, 4)
    with pytest.raises(ZeroDivisionError):
        joined([settled(0)], lambda results: 1 / results[0]).result(timeout=0)


def test_a_mean_leaves_failures_out_and_names_the_most_frequent_one():
    lost, late = Outcome(None, "reset, 2 times", cause="reset", retries=1), Outcome(None, "late", queued_s=1.0)
    assert mean([Outcome(1.0, queued_s=2.0), lost, Outcome(0.0, queued_s=3.0)]) == Outcome(0.5, queued_s=3.0, retries=1)
    failed = mean([late, lost, lost])
    assert (failed.value, failed.failed_by, failed.error) == (None, "reset", "reset, 2 times")
    assert (failed.retries, failed.queued_s) == (2, 1.0)
