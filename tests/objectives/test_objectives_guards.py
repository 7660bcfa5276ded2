"""The warnings: which settings and gates trigger them, which do not, and their text."""

import itertools

import pytest

from gspo_jax import objectives
from gspo_jax.objectives import catalogue
from gspo_jax.objectives.guards import clip_range_warning, rounding_warning


@pytest.mark.parametrize("name", catalogue.__all__)
def test_the_defaults_are_no_reason_to_warn(name):
    assert clip_range_warning(objectives.make(name)) is None


@pytest.mark.parametrize(
    ("name", "fine", "odd"),
    [
        ("gspo", {"low": 0.0499, "high": 0.0499}, {"low": 0.05}),
        ("gspo", {"low": 0.0499, "high": 0.0499}, {"high": 0.2}),
        ("gspo_token", {"low": 0.0}, {"low": 0.2, "high": 0.27}),
        ("grpo", {"low": 0.01, "high": 0.01}, {"low": 3e-4, "high": 4e-4}),
        ("dapo", {"low": 0.01}, {"low": 0.0099}),
        ("ppo", {"high": 0.01}, {"high": 0.0}),
        ("cispo", {"low": 0.01, "high": 0.01}, {"high": 0.009}),
        ("gmpo", {"log_clip": 0.01}, {"log_clip": 4e-4}),
        ("rspo", {"log_clip": 0.01}, {"log_clip": 4e-4}),
    ],
)
def test_a_bound_of_the_wrong_size_is_named(name, fine, odd):
    assert clip_range_warning(objectives.make(name, **fine)) is None
    said = clip_range_warning(objectives.make(name, **odd))
    assert said is not None and said.startswith(name)
    assert all(
        (f"{key}={odd[key]:g}" in said) if key in odd else (f"{key}=" not in said.split(":")[0])
        for key in objectives.make(name).bounds
    )


@pytest.mark.parametrize("name", catalogue.__all__)
def test_what_rounding_may_gate_is_no_reason_to_warn(name):
    for gated, recomputed in itertools.product((0.0, 0.02), (True, False)):
        assert rounding_warning(objectives.make(name), gated, recomputed=recomputed) is None


def test_too_much_gated_by_rounding_is_told_with_the_remedy():
    expected = (
        "18.8% of the responses with an advantage are gated in mini-batch 0, where every ratio is 1 but for rounding "
        "(2% at most): "
        "gspo does not tolerate the sampler's log-probs as the old policy's here; use "
        "--config.training.old_logprobs=recompute"
    )
    assert rounding_warning(objectives.gspo(), 0.1875, recomputed=False) == expected
    text = rounding_warning(objectives.grpo(), 0.0201, recomputed=True)
    assert (
        text is not None
        and text.startswith("2.0% of the tokens with an advantage are gated")
        and "a fault to report; use --config.model.dtype=float32" in text
    )


def test_the_sentence():
    assert clip_range_warning(objectives.gspo(low=0.2, high=0.27)) == (
        "gspo bounds the ratio of a whole response by low=0.2 and high=0.27: a mean over its tokens almost never "
        "moves that far, so next to nothing will be clipped; the GSPO paper uses low=3e-4 and high=4e-4"
    )
    assert clip_range_warning(objectives.grpo(low=3e-4, high=0.2)) == (
        "grpo bounds the ratio of every token by low=0.0003: many tokens leave such a narrow range within "
        "the first updates and will be clipped; papers with per-token ratios use 0.2 and more"
    )
