"""The length law's table and picture, from synthetic log-ratios."""

import json

import numpy as np
import pytest

from gspo_jax.errors import UserError
from gspo_jax.folder import lines
from gspo_jax.routing import decomposition
from gspo_jax.routing.decomposition import LogRatios
from gspo_jax.studies import lengths, noise_figure


def facts(seed: int, *, updates: int = 1) -> dict:
    """Return what `noise` measures of weights that move tokens apart, and of routes that move a response as one."""
    random, shape = np.random.default_rng(seed), (800, 64)
    mask, weights = np.ones(shape, bool), random.normal(size=shape)
    routes = np.repeat(random.normal(size=(800, 1)), 64, axis=1)
    ratios = LogRatios.of(np.zeros(shape), weights, weights + routes, mask)
    after = {"updates": updates, "flip_rate": 0.1, "flip_interval": [0.0, 0.2], "tokens_changed": 0.5}
    for level, these in (("token", ratios), ("sequence", ratios.of_responses)):
        one = decomposition.split(these.moments(8))
        after[level] = one._asdict() | {"share": one.share, "interval": [0.0, 1.0]}
    flips = decomposition.Flips(np.zeros((*shape, 1, 2), bool), None)
    after["by_length"] = decomposition.by_length(ratios, (4, 16, 64, 256))
    after["by_position"] = decomposition.by_position(ratios, parts=4, group_size=8)
    after["by_flips"] = decomposition.by_flips(ratios, flips, group_size=8)
    after["by_rank"] = decomposition.by_rank(ratios, flips, group_size=8)
    known = {"layers": 24, "experts": 64, "experts_per_token": 8, "router": "drawn", "sampler": ""}
    still = {"token": {"whole": 0.0, "weights": 0.0, "routes": 0.0, "covariance": 0.0, "share": None, "interval": []}}
    before = after | still | {"updates": 0, "by_length": [], "sequence": still["token"]}
    return lines.finite(known | {"learning_rate": 1e-4, "after": [before, after]})


def test_exponents_are_those_of_independent_and_of_equal_tokens(tmp_path, capsys):
    files = [tmp_path / f"24-drawn-{seed}.json" for seed in range(3)]
    for seed, file in enumerate(files):
        file.write_text(json.dumps(facts(seed)))
    (kind,) = kinds = lengths.by_kind([noise_figure.read(file) for file in files])
    assert kind == (24, "drawn", "", 1) and len(kinds[kind]) == 3
    for own in kinds[kind]:
        assert lengths.exponent(own, "weights") == pytest.approx(1, abs=0.05)
        assert lengths.exponent(own, "routes") == pytest.approx(0, abs=1e-9)
    assert lengths.main([*map(str, files), f"--out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert said == (tmp_path / "out/lengths.md").read_text()
    assert "| 24 layers, routers drawn, 1 update | 3 | 1.0" in said and said.rstrip().endswith("| 2 | 2 | 2 |")
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in lengths.LAYOUTS)
    assert noise_figure.main([str(files[0]), f"--out={tmp_path / 'noise'}"]) == 0
    assert "| – | 0.00e+00 | – |" in (tmp_path / "noise/noise.md").read_text(), "0 of 0 is no share"


def test_files_without_lengths_are_one_sentence(tmp_path, capsys):
    short = facts(0)
    short["after"] = short["after"][:1]
    (tmp_path / "short.json").write_text(json.dumps(short))
    assert lengths.main([str(tmp_path / "short.json"), f"--out={tmp_path}"]) == 2
    assert "no file has a variance at two lengths; measure longer responses" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"has no noise\.json of this version"):
        noise_figure.read(tmp_path / "none.json")
