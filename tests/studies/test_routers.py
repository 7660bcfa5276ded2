"""The routers' study: its random models, and its page's tables by numbers worked by hand, arms, and picture."""

import dataclasses
import json
import math
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from gspo_jax import cli
from gspo_jax.models import huggingface
from gspo_jax.models.config import by_path
from gspo_jax.setup import keys
from gspo_jax.setup.policy import cold_start_model
from gspo_jax.studies import random_models
from tests.pods import ROOT, drawer

routers = drawer("routers")
PAGE = "\n\n".join(
    f"<!-- table: {name} -->\n<!-- end -->" for name in ("means", "all responses", "from the testbed", "one change")
)


def facts(flips: float, kl: float) -> dict[str, object]:
    split = {"whole": 1e-3, "share": 0.5}
    return {
        "flip_rate_per_layer": [0.002, flips],
        "flip_rate": flips,
        "tokens_changed": 0.5,
        "router_kl": kl,
        "token": split,
        "sequence": split,
    }


def made(folder: Path) -> Path:
    """Write a study of three seeds, in which sigmoids flip one point more, and 1.1, 1.2 and 1.3 times the KL."""
    for name in routers.ARMS:
        for seed in range(3):
            more = (0.01, 1.1 + 0.1 * seed) if name == "sigmoid" else (0, 1)
            place = folder / f"{name}-{seed}" / "noise.json"
            place.parent.mkdir(parents=True)
            found = facts(0.01 * (1 + seed) + more[0], 1e-4 * more[1])
            place.write_text(json.dumps({"after": [found | {"unseen": found}]}))
    return folder


def test_means_and_differences_by_hand(tmp_path):
    arms = routers.read(made(tmp_path))
    rows = {row.split(" | ")[0].strip("| "): row for row in routers.means(arms)}
    half = 4.302653 * 1 / math.sqrt(3)  # Student's t with two degrees of freedom, a spread of one point
    assert f"| 3 | 2% [−{half - 2:.3g}%, {2 + half:.3g}%] |" in rows["softmax, renormalised"]
    assert rows["softmax, renormalised"].endswith("| 0.20%, 2.0% |")
    apart = {row.split(" | ")[0].strip("| "): row for row in routers.apart(arms, lambda name: routers.ARMS[name].base)}
    assert "softmax, renormalised | +1.00 [+1.00, +1.00] |" in apart["sigmoid, bias 0"], "flat: not bold"
    ratios = [math.log(x) for x in (1.1, 1.2, 1.3)]
    mean = sum(ratios) / 3
    half = 4.302653 * math.sqrt(sum((x - mean) ** 2 for x in ratios) / 2 / 3)
    low, high = math.exp(mean - half), math.exp(mean + half)
    assert low < 1 < high and f"| ×1.2 [{low:.2g}, {high:.2g}] |" in apart["sigmoid, bias 0"]
    assert "sigmoid, bias 0 | −1.00 [−1.00, −1.00]" in apart["sigmoid with bias"]
    assert len(apart) == 2 + len(routers.ARMS) - 1


def test_the_arms_are_those_of_the_config_and_all_are_asked_for(tmp_path, capsys):
    arms = runpy.run_path(str(ROOT / "configs/routers.py"))["ARMS"]
    assert routers.ARMS.keys() == arms.keys() | {"moving"}
    assert {arm.base for arm in routers.ARMS.values()} <= routers.ARMS.keys() | {""}
    folder = made(tmp_path)
    (folder / "groups-1/noise.json").write_text("{}")
    assert routers.main([str(folder)]) == 2 and "groups-1/noise.json is not of one update" in capsys.readouterr().err
    assert routers.main([str(tmp_path / "none")]) == 2
    assert "has no renormalised-SEED/noise.json; make it with" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_gets_its_tables_and_pictures(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert routers.main([str(made(tmp_path / "noise")), f"--page={page}", f"--out={tmp_path / 'out'}"]) == 0
    text = page.read_text()
    assert text.count("<!-- table: ") == 4 and text.count("| sigmoid with bias |") == 7
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in routers.LAYOUTS)


@pytest.mark.slow
def test_random_models_have_matrices_of_unit_gain(tmp_path):
    config = cli.load_config("configs/routers.py:bias")
    config.model.architecture.num_layers = 4
    model = cold_start_model(config)
    found = by_path(random_models.params(model, jax.random.key(0), bias=0.3))
    inputs = {"o": 64, "out": 64, "down": 16, "conv": 4, "embed": 1}
    for path, x in found.items():
        name = path.rpartition(".")[2]
        if name == "choice_bias":
            assert np.std(x) == pytest.approx(0.3, rel=0.15)
        elif name in ("router", "head", *inputs) or x.ndim > 2:
            assert np.std(x) == pytest.approx(inputs.get(name, 64) ** -0.5, rel=0.15), path
        else:
            assert "norm" in path or name in ("a_log", "dt_bias"), f"{path} is not drawn"
    random_models.write(config, tmp_path / "made", bias=0.3)
    read = huggingface.read_config(tmp_path / "made")
    assert read == dataclasses.replace(model, eos_token_ids=read.eos_token_ids, pad_token_id=read.pad_token_id)
    again = by_path(random_models.params(model, keys.init_key(config), bias=0.3))
    assert all(
        np.array_equal(x, again[path]) for path, x in by_path(huggingface.load_params(tmp_path / "made", read)).items()
    )
