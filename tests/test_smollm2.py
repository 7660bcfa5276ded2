"""The data and rewards of configs/smollm2.py."""

import pytest

from configs.smollm2 import KNOWN, exact_count, get_config, items, known, lists, right, share
from gspo_jax.errors import UserError


def test_training_never_names_a_held_out_category() -> None:
    train, test = ({row["category"] for row in lists(split)} for split in ("train", "test"))
    assert len(test) == 12 and train | test == KNOWN.keys() and not train & test
    assert len(lists("test")) == 144 and lists("test") == lists("test")
    assert {row["question"] for row in lists("train")} >= {"List two fruits.", "Give me a list of five tools."}


@pytest.mark.parametrize(
    ("completion", "names", "counted", "share"),
    [
        ("1. Hammer\n2. Saw", ["hammer", "saw"], 1, 1.0),
        ("Sure:\n\n- **Hammers**: for nails\n- Saws (sharp)\n", ["hammers", "saws"], 1, 1.0),
        ("1) A drill – loud\n* axe.", ["a drill", "axe"], 1, 1.0),
        ("1. Sinatra\n2. Breeze", ["sinatra", "breeze"], 1, 0.0),
        ("1. A claw hammer, for nails\n2. Hammerhead", ["a claw hammer", "hammerhead"], 1, 0.5),
        ("1. Saw — for wood\n2. Axe—for trees", ["saw", "axe"], 1, 1.0),
        ("1. saw hammer\n2. screw driver", ["saw hammer", "screw driver"], 1, 0.5),
        ("1. Hammer\n2. Hammer", ["hammer", "hammer"], 0, 0.5),
        ("1. Hammer\n2. Saw\n3. Moon", ["hammer", "saw", "moon"], 0, 2 / 3),
        ("1. Hammer\n2. one that is very long indeed", ["hammer", "one that is very long indeed"], 0, 0.5),
        ("Hammer and saw.", [], 0, 0.0),
        ("1. \n2. !", [""], 0, 0.0),
    ],
)
def test_lines_are_counted_and_their_names_known(completion, names, counted, share) -> None:
    record = {"answer": "2", "category": "tools"}
    assert items(completion) == names
    assert exact_count("", completion, record) == counted
    assert known("", completion, record) == pytest.approx(share)
    assert right("", completion, record) == float(counted and share >= 0.5)


def test_plurals_count_as_what_they_are_many_of() -> None:
    fruits, vegetables = ({"answer": "3", "category": name} for name in ("fruits", "vegetables"))
    assert known("", "1. Cherries\n2. Peaches\n3. Limes", fruits) == 1.0
    assert known("", "1. Bell peppers", vegetables) == pytest.approx(1 / 3), "once, though peppers are known too"


def test_arguments_of_the_config() -> None:
    none = {"exact_count": 0.0, "known": 0.0, "share": 0.0, "right": 0.0}
    assert get_config().rewards.to_dict() == none | {"exact_count": 1.0, "known": 1.0}
    assert get_config("share,runlocal").rewards.to_dict() == none | {"share": 1.0}
    assert get_config("share,runlocal").iterations == 2
    with pytest.raises(UserError, match="takes no argument 'sare'; use share, runlocal, or none"):
        get_config("sare")


def test_one_known_line_is_worth_nothing_but_its_share() -> None:
    record = {"answer": "4", "category": "tools"}
    assert [reward("", "1. Hammer", record) for reward in (exact_count, known, share, right)] == [0, 0.25, 1, 0]
    assert share("", "Hammer", record) == 0
