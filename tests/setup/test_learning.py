"""Whose log-probs the old policy's are: `training.old_logprobs`; and over which tokens they are renormalised."""

import re

import pytest

from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.setup import learning, players
from gspo_jax.setup.same import check_same_run

CENTRED = {"mismatch.center": True}
GSPO, GRPO = {"objective.name": "gspo"}, {"objective.name": "grpo"}
WIDE = GSPO | {"objective.gspo.low": 0.01, "objective.gspo.high": 0.02}
FLOAT32, LONG = {"model.dtype": "float32"}, {"sampling.max_response_length": 8192}
SAMPLER = {"training.old_logprobs": "sampler"}


def config(changes):
    made = base()
    made.update_from_flattened_dict(changes)
    return made


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (GSPO, r"gspo's low=0\.0003 is less than 5 times what a sampler in bfloat16 rounds, 0\.0016$"),
        (GSPO | FLOAT32, ""),
        (GSPO | FLOAT32 | {"sampling.weights_dtype": "bfloat16"}, "a sampler in bfloat16 rounds"),
        (GSPO | FLOAT32 | {"sampling.cache_dtype": "int8"}, "a sampler in int8 rounds"),
        (WIDE | LONG, ""),  # the mean over 8192 tokens rounds by 6e-4
        (WIDE | {"sampling.max_response_length": 16}, r"gspo's low=0\.01 is less than 5 times .*, 0\.013$"),
        (GRPO, ""),
        (
            GRPO | LONG | {"sampling.weights_dtype": "int8"},
            r"grpo's .*=0\.2 is less than 3 times .* int8 rounds, 0\.12$",
        ),
        ({"objective.name": "reinforce"}, ""),  # has no bound
        (GRPO | FLOAT32 | {"routing.replay": "r2"}, "routing.replay 'r2' replays their routes$"),
        (GRPO | FLOAT32 | {"objective.advantage": "optimal_token_baseline"}, "the energies of the advantage$"),
        (GRPO | FLOAT32 | {"mismatch.correction": "tis"}, "mismatch.correction weighs them against the sampler's$"),
        (GRPO | FLOAT32 | CENTRED, "center is for tokens that no ratio to the sampler weighs$"),
        ({"objective.name": "vespo"} | CENTRED, "center is for tokens that no ratio to the sampler weighs$"),
        (GSPO | FLOAT32 | CENTRED, ""),
        ({"objective.name": "reinforce"} | CENTRED, ""),
    ],
)
def test_old_log_probs_are_recomputed_where_rounding_could_pass_the_bounds_or_they_are_needed(changes, why):
    made = config(changes)
    found = learning.why_recomputed(made)
    assert bool(found) == bool(why) == learning.recomputes(made)
    says = r"old log-probs are recomputed \(training.old_logprobs='auto'\): "
    assert not why or re.match(f"{says}.*{why}", found), found


def test_a_choice_is_kept():
    assert not learning.recomputes(config(GSPO | SAMPLER))
    assert learning.recomputes(config(GRPO | FLOAT32 | {"training.old_logprobs": "recompute"}))


def test_with_partial_rollouts_what_it_amounts_to_stays():
    """Not its word: a run of "sampler" goes on with "auto", unless bounds are narrowed so that "auto" recomputes."""
    partial = WIDE | LONG | {"sampling.partial.prompts": 64}
    saved = config(partial | SAMPLER).to_dict()
    check_same_run(config(partial), saved, "runs/a")
    narrowed = config(partial | {"objective.gspo.low": 1e-4})
    with pytest.raises(
        UserError, match=r"amounts to 'recompute' here and to 'sampler' in the run in runs/a, .* set it to"
    ):
        check_same_run(narrowed, saved, "runs/a")
    narrowed.training.old_logprobs = "sampler"
    check_same_run(narrowed, saved, "runs/a")


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({}, None),
        ({"keep_top": 20}, None),
        ({"top_p": 0.9, "keep_top": 20}, None),
        ({"top_k": 50, "keep_top": 50}, None),
        ({"top_k": 50, "top_p": 0.9, "keep_top": 20}, None),  # of some tokens no more than 20 are left
        ({"top_k": 50, "keep_top": 20}, r"sampling\.top_k 50 always leaves more ids .*sampling\.keep_top=50$"),
        ({"top_k": 320}, None),  # the whole vocabulary
        ({"top_k": 320, "top_p": 0.9}, r"sampling\.top_p 0\.9: responses are .*keep_top=64 "),
        ({"top_p": 0.9}, r"sampling\.top_p 0\.9: responses are .*keep_top=64 "),
        ({"top_k": 50, "min_p": 0.1}, r"sampling\.top_k 50 and sampling\.min_p 0\.1: responses are .*keep_top=50 "),
    ],
)
def test_truncated_sampling_without_kept_sets_is_warned_of(sampling, says):
    given = config({f"sampling.{name}": value for name, value in sampling.items()})
    found = players.truncation_warning(given, vocab_size=320)
    assert found is None if says is None else re.match(says, found)
