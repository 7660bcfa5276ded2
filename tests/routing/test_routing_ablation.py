"""The routing comparison: what its config holds fixed and what it varies, and that its docs page is true."""

import re
from pathlib import Path

import pytest

from gspo_jax import cli
from gspo_jax.errors import UserError
from gspo_jax.setup.checks import check
from gspo_jax.setup.learning import make_objective
from gspo_jax.sweeping.grid import comparisons, make_plan

ROOT = Path(__file__).parents[2]
VARIANTS = ("gspo", "grpo", "grpo_r2", "grpo_r3", "rspo", "gmpo")
DOC = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")


def _config(arguments: str):
    return cli.load_config(str(ROOT / f"configs/routing_ablation.py:{arguments}"))


def _flat(tree, prefix: str = "") -> dict:
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _differences(one: str, other: str) -> dict:
    first, second = (_flat(_config(arguments).to_dict()) for arguments in (one, other))
    assert first.keys() == second.keys()
    return {name: (first[name], second[name]) for name in first if first[name] != second[name]}


@pytest.mark.parametrize("regime", ["", ",offpolicy", ",runlocal", ",offpolicy,runlocal", ",runlocal,offpolicy"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_run_that_train_accepts(variant, regime):
    config = _config(variant + regime)
    check(config)
    assert config.data.prompts_per_batch % config.training.minibatches == 0, "mini-batches consist of whole groups"
    assert config.iterations == (2 if "runlocal" in regime else 50)


@pytest.mark.parametrize("regime", ["", ",offpolicy"])
def test_variants_differ_in_objective_and_replay_only(regime):
    base = f"grpo{regime}"
    for variant, name, replay in (
        ("gspo", "gspo", "none"),
        ("grpo_r2", "grpo", "r2"),
        ("grpo_r3", "grpo", "r3"),
        ("rspo", "rspo", "none"),
        ("gmpo", "gmpo", "none"),
    ):
        wanted = {} if name == "grpo" else {"objective.name": ("grpo", name)}
        wanted |= {} if replay == "none" else {"routing.replay": ("none", replay)}
        assert _differences(base, variant + regime) == wanted
    assert _config(base).training.old_logprobs == "recompute"
    objectives = [make_objective(_config(variant + regime)) for variant in VARIANTS]
    assert len({(objective.weights, objective.advantage) for objective in objectives}) == 1


def test_regimes_differ_in_updates_only():
    wanted = {"training.minibatches": (4, 16), "optimizer.learning_rate": (1e-4, 2e-4)}
    for variant in VARIANTS:
        assert _differences(variant, f"{variant},offpolicy") == wanted
    tiny = _flat(cli.load_config(str(ROOT / "configs/tiny.py:single")).to_dict())
    changed = {name for name, value in _flat(_config("gspo").to_dict()).items() if tiny[name] != value}
    assert changed == {"iterations", "training.old_logprobs", "objective.grpo.high", "objective.rspo.apply"}


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("gsop", r"has no variant 'gsop'; begin with one of gspo, .*gmpo"),
        ("offpolicy,gspo", "no argument 'gspo' after the variant; use offpolicy, runlocal"),
        ("grpo,r2", "no argument 'r2' after the variant; use offpolicy, runlocal"),
    ],
)
def test_a_wrong_argument_is_told_what_there_is(arguments, says):
    with pytest.raises(UserError, match=says):
        _config(arguments)


@pytest.mark.parametrize("arg", ["", "runlocal"])
def test_the_sweep_has_every_variant_in_both_regimes(arg, tmp_path):
    words = [f"--config={ROOT / 'configs/routing_ablation.py'}:{arg}"]
    on_policy, off_policy = make_plan(words, comparisons(words, [], "1"), tmp_path)
    for page, regime in ((on_policy, ""), (off_policy, ",offpolicy")):
        wanted = [_config(f"{variant}{regime}{arg and ','}{arg}") for variant in VARIANTS]
        assert [run.config.to_dict() for run in page.runs] == [config.to_dict() for config in wanted]
        assert page.panels == "routing"
    assert len({run.cold.folder for run in (*on_policy.runs, *off_policy.runs) if run.cold}) == 1
    with pytest.raises(UserError, match="the sweep has every variant and regime; leave 'grpo' out"):
        comparisons([f"{words[0].partition(':')[0]}:grpo"], [], None)


def test_the_config_is_found_from_any_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert _config("gspo").objective.name == "gspo"


def test_the_page_names_what_there_is():
    glossary = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    metrics = set(re.findall(r"`((?:routing|ratio|mismatch|clip_fraction)/[a-z_]+)`", DOC))
    assert len(metrics) > 10 and [name for name in metrics if f"`{name}`" not in glossary] == []
    for flag in re.findall(r"`?--config\.([a-z_.]+)=", DOC):
        cli.check_overrides([f"--config.{flag}="], _config("gspo"))
    assert all(f"`{variant}`" in DOC for variant in VARIANTS)
    made_by_the_comparison = {"routing/on_policy.png", "routing/off_policy.png", "routing/results.md"}
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", DOC) if "://" not in link}
    assert made_by_the_comparison < links
    assert [link for link in links - made_by_the_comparison if not (ROOT / "docs" / link).exists()] == []
