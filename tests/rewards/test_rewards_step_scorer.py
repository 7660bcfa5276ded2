"""Step scores of a batch, and the tokens they are assigned to, with a real byte-level tokenizer."""

import math
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.rewards.step_scorer import StepScorer, place_step_rewards, place_turn_rewards

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True, database=None)

FAKE = """
def words(prompt, completion, record):
    return [(i, 1.0) for i in range(1, len(completion) + 1) if i == len(completion) or completion[i] == " "]

def letters(prompt, completion, record):
    return [(i + 1, float(c == "a")) for i, c in enumerate(completion)][::-1]

def moody(prompt, completion, record):
    if completion == "raise":
        raise ValueError("no mood for " + prompt)
    bad = {"nan": (1, float("nan")), "inf": (1, float("inf")), "zero": (0, 1.0), "far": (4, 1.0), "half": (1.5, 1.0)}
    return None if completion == "none" else [(1, 0.5), bad.get(completion, (2, 1.5))]

def broken(prompt, completion, record):
    raise ZeroDivisionError("always")
"""
NAN = math.nan


@pytest.fixture(scope="module", autouse=True)
def fake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "fake_steps.py").write_text(FAKE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def scorer(**functions):
    return StepScorer(functions, own={name: f"fake_steps:{name}" for name in functions})


def run(scorer, completions):
    return scorer.score([f"prompt {i}" for i in range(len(completions))], completions, [{}] * len(completions))


def test_countdown_end_to_end():
    record = {"numbers": "3 5 7", "target": "22"}
    completions = ["3*5=15 15+7=22 #### 3*5+7", "3*5=16 #### 1", "#### 22"]
    scores = StepScorer({"countdown_steps": 0.5}).score([""] * 3, completions, [record] * 3)
    assert scores.steps == [[(6, 0.5), (14, 0.5)], [(6, 0.0)], []]
    np.testing.assert_array_equal(scores.by_name["countdown_steps"], np.asarray([1, 0, NAN], np.float32))
    assert scores.by_name["countdown_steps"].dtype == np.float32 and scores.failed.sum() == 0


def test_functions_are_weighted_and_add_up_where_they_end_together():
    scores = run(scorer(words=2.0, letters=0.25), ["ab a", ""])
    # words ends at 2 and 4; letters at 1, 2, 3, 4 with 1, 0, 0, 1. The sums are 0.25, 2 + 0, 0, 2 + 0.25.
    assert scores.steps == [[(1, 0.25), (2, 2.0), (3, 0.0), (4, 2.25)], []]
    assert {name: s.tolist()[0] for name, s in scores.by_name.items()} == {"words": 1.0, "letters": 0.5}
    assert all(math.isnan(s[1]) for s in scores.by_name.values())


def test_a_weight_of_zero_only_records():
    scores = run(scorer(words=1.0, letters=0.0, moody=0.0), ["ab a", "raise", "nan"])
    assert scores.steps == [[(2, 1.0), (4, 1.0)], [(5, 1.0)], [(3, 1.0)]] and scores.failed.sum() == 0
    np.testing.assert_array_equal(scores.by_name["moody"], np.asarray([1, NAN, NAN], np.float32))


def test_what_is_no_step_leaves_a_completion_without_and_is_counted(caplog):
    """Invalid results and exceptions leave a completion without steps; they are counted and warned of once."""
    bad = ["nan", "inf", "zero", "far", "half", "none", "raise"]
    scores = run(scorer(words=1.0, moody=1.0), ["fine", *bad])
    assert scores.steps == [[(1, 0.5), (2, 1.5), (4, 1.0)], *[[]] * 7] and scores.failed.sum() == 7
    np.testing.assert_array_equal(scores.by_name["moody"], np.asarray([1, *[NAN] * 7], np.float32))
    assert np.isfinite(scores.by_name["words"]).all()
    assert "step reward 'moody' failed on 7 of 8 completions: returned nan as a step" in caplog.text
    assert len(caplog.records) == 1
    assert run(scorer(moody=1.0), ["far"]).failed.sum() == 1
    assert "returned a step that ends at character 4 of 3" in caplog.text


def test_a_function_that_always_raises_ends_the_run():
    with pytest.raises(RuntimeError, match=r"(?s)step reward 'broken' raised on all 2.*fake_steps\.py.*Zero"):
        run(scorer(words=1.0, broken=1.0), ["a", "b"])
    with pytest.raises(RuntimeError, match=r"(?s)'moody' raised on all 2.*no mood for prompt 0"):
        run(scorer(moody=1.0), ["raise", "raise"])


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({}, "no step reward function is given"),
        ({"countdown_step": 1.0}, "no step reward 'countdown_step'; did you mean 'countdown_steps'"),
        ({"countdown": 1.0}, "no step reward 'countdown'.*there are countdown_steps"),
        ({"re": 1.0}, "no step reward 're'"),  # a name in the module, but no reward
        ({"countdown_steps": math.inf}, "weight inf of step reward 'countdown_steps' is not finite"),
    ],
)
def test_wrong_settings_are_told(functions, message):
    with pytest.raises(UserError, match=message):
        StepScorer(functions)


def test_an_empty_batch_is_empty():
    scores = run(scorer(words=1.0), [])
    assert scores.steps == [] and scores.failed.sum() == 0 and scores.by_name["words"].shape == (0,)
    with pytest.raises(ValueError, match="1 prompts, 0 completions and 0 records"):
        scorer(words=1.0).score(["a"], [], [])


def test_an_environment_s_rewards_are_averaged_and_weighed_without_a_step_in_the_text():
    """A turn may have no text, and so may all of them. 1e18 times 2 is beyond the largest score."""
    rewards = [[(0, 0.5), (3, 1.0)], [], [(0, 2.0)], [(1, 1e18)]]
    records = [{"episode": each} for each in rewards]
    scorer = StepScorer({"environment": 2.0})
    scores = scorer.score([""] * 4, ["abc", "abc", "", "a"], records)
    assert scorer.turn_weight == 2.0 and scores.steps == [[]] * 4
    np.testing.assert_array_equal(scores.by_name["environment"], np.float32([0.75, np.nan, 2.0, 1e18]))
    assert scores.failed.tolist() == [False, False, False, True]


# --- to tokens -------------------------------------------------------------------------------------------------------

TEXTS = [f"{a}*{b}={a * b} #### {a}*{b}" for a in range(20) for b in range(20)] + ["日本 naïve 🦆 =15 "] * 9
TOKENIZER = Tokenizer.train(TEXTS, 300)
EOS = TOKENIZER.eos_ids[0]


def batch(*rows):
    """Return right-padded tokens and mask of the given rows of ids."""
    width = max(map(len, rows)) + 1
    tokens = np.full((len(rows), width), TOKENIZER.pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return tokens, mask


def where(steps, ids):
    """Return the tokens that the steps of one response are assigned to, with their rewards."""
    rewards, is_step = place_step_rewards([steps], *batch(ids), TOKENIZER.decode)
    assert rewards.dtype == np.float32 and is_step.dtype == bool and rewards.shape == is_step.shape == (1, len(ids) + 1)
    assert not rewards[~is_step].any()
    return {int(i): float(rewards[0, i]) for i in np.flatnonzero(is_step[0])}


def test_steps_land_on_the_tokens_that_end_them():
    ids = [*TOKENIZER.encode("3*5=15 15+7=22"), EOS]
    pieces = [TOKENIZER.decode([i]) for i in ids]
    assert pieces == ["3", "*", "5", "=", "1", "5", " ", "1", "5", "+", "7", "=", "2", "2", ""]
    assert where([(6, 1.0), (14, 0.5)], ids) == {5: 1.0, 13: 0.5}
    assert where([(14, 0.5), (6, 1.0)], ids) == {5: 1.0, 13: 0.5}  # order does not matter
    assert where([(6, 0.0)], ids) == {5: 0.0}  # a step of reward 0 is still a step
    assert where([(1, 1.0), (2, 2.0)], ids) == {0: 1.0, 1: 2.0}
    assert where([], ids) == {}


def test_steps_that_end_in_one_token_add_up():
    ids = TOKENIZER.encode("5 ####")
    assert [TOKENIZER.decode([i]) for i in ids] == ["5", " ####"]
    assert where([(1, 1.0), (3, 0.25), (6, 0.5)], ids) == {0: 1.0, 1: 0.75}
    assert where([(3, 0.5), (3, 0.5)], ids) == {1: 1.0}


def test_characters_of_many_tokens_count_once():
    ids = TOKENIZER.encode("é3=语5=1")  # neither é nor 语 was learned as one token: they take 2 and 3 byte tokens
    assert len(ids) == 2 + 1 + 1 + 3 + 1 + 1 + 1
    assert where([(2, 1.0), (5, 2.0), (7, 3.0)], ids) == {2: 1.0, 7: 2.0, 9: 3.0}
    assert where([(1, 1.0), (4, 2.0)], ids) == {1: 1.0, 6: 2.0}  # at the last byte, which completes the 语


def test_special_tokens_have_no_characters():
    ids = [EOS, *TOKENIZER.encode("1="), EOS, 9999, *TOKENIZER.encode("1"), EOS]
    assert where([(1, 1.0), (2, 2.0), (3, 3.0)], ids) == {1: 1.0, 2: 2.0, 5: 3.0}


def test_only_what_is_under_the_mask_counts():
    tokens, mask = batch(TOKENIZER.encode("12345"), TOKENIZER.encode("1"), [])
    mask[0, 1] = False  # the text becomes 1345
    rewards, is_step = place_step_rewards([[(2, 1.0), (4, 2.0)], [], []], tokens, mask, TOKENIZER.decode)
    np.testing.assert_array_equal(rewards, [[0, 0, 1, 0, 2, 0], [0] * 6, [0] * 6])
    np.testing.assert_array_equal(is_step, rewards > 0)


def test_steps_that_do_not_belong_to_the_tokens_are_an_error():
    tokens, mask = batch(TOKENIZER.encode("12"), TOKENIZER.encode("123"))
    with pytest.raises(ValueError, match="1 lists of steps for 2 responses"):
        place_step_rewards([[]], tokens, mask, TOKENIZER.decode)
    with pytest.raises(ValueError, match="a step of response 0 ends at 3, beyond its 2 characters"):
        place_step_rewards([[(3, 1.0)], [(3, 1.0)]], tokens, mask, TOKENIZER.decode)


def test_rewards_of_turns_land_on_their_last_tokens():
    mask = np.ones((3, 6), bool)
    mask[1, 4:] = False
    rewards, is_end = place_turn_rewards([([1, 2, 6], [0.5, 0.0, -1.0]), ([4], [2.0]), ([], [])], mask)
    np.testing.assert_array_equal(rewards, np.float32([[0.5, 0, 0, 0, 0, -1], [0, 0, 0, 2, 0, 0], [0] * 6]))
    assert [np.flatnonzero(row).tolist() for row in is_end] == [[0, 1, 5], [3], []] and rewards.dtype == np.float32


def naive(end, ids, decode):
    """Return the first token after which the prefix decodes to the text up to `end`, by trying each token in turn."""
    text = decode(ids)
    return next(i for i in range(len(ids)) if decode(ids[: i + 1])[:end] == text[:end])


def strips(ids):
    """Decode like SentencePiece, which drops a leading space, so that a text is not the sum of its pieces."""
    return TOKENIZER.decode(ids).removeprefix(" ")


IDS = st.one_of(
    st.text("日本语é🦆 =15ab#", max_size=20).map(TOKENIZER.encode),
    st.lists(st.integers(0, TOKENIZER.vocab_size + 1), max_size=20),  # special tokens, and bytes that are not UTF-8
)


@pytest.mark.parametrize("decode", [TOKENIZER.decode, strips])
@SETTINGS
@given(ids=IDS, data=st.data())
def test_every_place_is_found_as_by_trying_each_token(decode, ids, data):
    length = len(decode(ids))
    ends = data.draw(st.lists(st.integers(1, length), max_size=6)) if length else []
    rewards, is_step = place_step_rewards([[(end, 1.0) for end in ends]], *batch(ids), decode)
    expected = np.zeros(len(ids) + 1)
    for end in ends:
        expected[naive(end, ids, decode)] += 1
    np.testing.assert_array_equal(rewards[0], expected)
    np.testing.assert_array_equal(is_step[0], expected > 0)


@pytest.mark.parametrize(
    ("before", "step", "count"),
    [("", "3*5=15 ", 4000), ("#3", "语语语语3*5=15 ", 2001)],  # in the second text the middle token lies inside a 语
)
def test_thousands_of_steps_in_a_long_response_stay_cheap(before, step, count):
    """The search decodes every token a few times per halving, not once per step."""
    text = before + step * count
    ids = TOKENIZER.encode(text)
    decoded = 0

    def counting(some):
        nonlocal decoded
        decoded += len(some)
        assert decoded < 3 * len(ids) * math.ceil(math.log2(len(ids)))
        return TOKENIZER.decode(some)

    start = time.process_time()
    ends = [len(before) + len(step) * (i + 1) - 1 for i in range(count)]
    _, is_step = place_step_rewards([[(end, 1.0) for end in ends]], *batch(ids), counting)
    assert is_step.sum() == count and time.process_time() - start < 5
    decoded = 0
    _, is_step = place_step_rewards([[(len(text) - 1, 1.0)]], *batch(ids), counting)
    assert is_step.sum() == 1 and decoded < 6 * len(ids)
