"""Shares of a run's time, from the metrics of its phases."""

import pytest

from gspo_jax.studies.goodput import PARTS, goodput


def test_shares_add_up() -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.5},
        {
            "timing/iteration_s": 10.0,
            "timing/sample_s": 4.0,
            "timing/reshard_s": 1.0,
            "timing/decode_s": 3.5,
            "timing/update_s": 3.0,
            "timing/reward_s": 1.0,
            "timing/start_s": 5.0,
            "timing/evaluate_s": 3.0,
            "compile/seconds": 2.0,
        },
        {"timing/iteration_s": 2.0, "timing/sample_s": 2.0, "timing/save_s": None, "timing/data_s": float("nan")},
    ]
    shares = goodput(rows)
    assert shares is not None
    assert shares["seconds"] == 20.0
    assert {name: share * 20 for name, share in shares.items() if share} == pytest.approx(
        {
            "seconds": 400,
            "sampling": 7,
            "updates": 3,
            "waiting": 1,
            "evaluating": 3,
            "starting": 5,
            "other": 1,
            "compiling": 2,
        }
    )
    assert sum(shares[name] for name in (*PARTS, "other")) == pytest.approx(1)


@pytest.mark.parametrize("rows", [[], [{"step": 1, "reward/mean": 0.5}], [{"timing/iteration_s": 0.0}]])
def test_no_times(rows: list[dict[str, float]]) -> None:
    assert goodput(rows) is None
