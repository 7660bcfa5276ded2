"""Whole runs: every config for two iterations, the run folder they leave, resuming, and evaluation."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from gspo_jax import cli, coldstart, evaluate
from gspo_jax.data.tokenizer import EOS, Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.folder.samples import read_samples
from gspo_jax.models import huggingface
from gspo_jax.profiling.phases import Span
from gspo_jax.run.log import response_metrics
from gspo_jax.run.session import Watch
from gspo_jax.setup import players, policy
from gspo_jax.train import train
from tests.pods import assert_same_bits, assert_same_metrics
from tests.tiny import CONFIG, params

ROOT = Path(__file__).parents[2]
PROBLEMS = [(f"Ann has {a} pens and buys {b} more. How many has she now?", a + b) for a in range(4) for b in range(6)]


def tiny(folder: Path) -> ConfigDict:
    config = cli.load_config(str(ROOT / "configs/tiny.py:runlocal"))
    config.data.data_dir = str(folder / "data")
    config.data.options.difficulty = "easy"  # the smallest data set
    config.sampling.group_size = 4
    config.eval.every = 1
    config.overlong.update({"penalty": 1.0, "cache": 24})  # few answers are right, but some responses are overlong
    return config


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory) -> tuple[ConfigDict, Path, dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("tiny")
    config = tiny(folder)
    return config, folder / "run", train(config, folder / "run")


def test_tiny_config_leaves_a_whole_run_folder(tiny_run):
    config, workdir, facts = tiny_run
    rows = read_metrics(workdir)
    updates = config.iterations * config.training.minibatches
    assert [row["step"] for row in rows] == list(range(updates + 1))
    assert rows[0].keys() == {"step", "time", *facts["first"]}, "the first row is the cold start's evaluation"
    assert rows[0]["eval/accuracy"] == facts["first"]["eval/accuracy"]
    assert rows[-1]["eval/accuracy"] == facts["last"]["eval/accuracy"]
    assert [(row["iteration"], row["minibatch"]) for row in rows[1:]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(row["update/skipped"] == 0 for row in rows[1:])
    assert rows[1]["mismatch/max"] < 1e-4
    assert rows[1]["routing/flip_rate"] == 0
    assert len(rows[2]["routing/flip_rate_per_layer"]) == 4
    assert "timing/iteration_s" in rows[2]
    assert "timing/iteration_s" not in rows[1]
    assert rows[2]["timing/start_s"] > 0 and rows[2]["timing/evaluate_s"] > 0, "before the first iteration"
    assert "timing/start_s" not in rows[4] and rows[4]["timing/save_s"] > 0, "between the two"
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["1", "2"]
    assert list((workdir / "tb").iterdir())
    samples = read_samples(workdir)[updates]
    assert {"prompt", "completion", "reward", "answer", "special"} <= samples[0].keys()
    ended = [row["completion"] for row in samples if row["special"] == [EOS]]
    assert ended and all(text.endswith(EOS) for text in ended)  # special tokens are shown
    assert json.loads((workdir / "config.json").read_text())["iterations"] == 2


def test_a_stopped_run_resumes_to_the_same_bits(tiny_run, tmp_path, monkeypatch):
    """Parameters, optimizer state and metrics equal those of a run that never stopped; test_faults.py has kill -9.

    Its second iteration is traced besides, and nearly all of the devices' time has the names of its programs.
    Until the first update of an iteration there is nothing to save, and from then on there is. The best checkpoint is
    kept beside the newest.
    """
    updated, settled = Watch.updated, []

    def recorded(watch: Watch, *given):
        run = watch._run
        assert (run.engine.sampler.poll, run.scorer.scorer.interrupted) == (run.phases.poll, run.phases.noticed)
        settled.append(run.phases.settled())
        updated(watch, *given)
        settled.append(run.phases.settled())

    monkeypatch.setattr(Watch, "updated", recorded)
    config, workdir, facts = tiny_run
    stopped = tmp_path / "stopped"
    shutil.copytree(workdir, stopped)
    shutil.rmtree(stopped / "checkpoints" / "2")
    best = stopped / "checkpoints" / "1" / "metrics" / "metrics"
    assert json.loads(best.read_text()) == {"accuracy": read_metrics(workdir)[2]["eval/accuracy"]}
    best.write_text('{"accuracy": 2.0}')
    config = config.copy_and_resolve_references()
    config.checkpoint.update({"keep": 1, "keep_best": True})
    assert train(config, stopped, profile=Span(2, 4))["last"] == pytest.approx(facts["last"])
    seen = json.loads((stopped / "profile" / "operations.json").read_text())
    assert seen.keys() == {f"iteration-2-{phase}" for phase in ("reshard", "sample", "score", "update")}
    running = sum(phase["running_s"] for phase in seen.values())
    assert sum(phase["joined"] * phase["running_s"] for phase in seen.values()) > 0.7 * running
    assert read_metrics(stopped)[-1]["timing/profile_s"] > 0
    assert any("feed_forward" in one["scope"] for one in seen["iteration-2-update"]["operations"])
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == ["1", "2"]
    assert_same_bits(workdir, stopped, step=2)
    assert settled == [True, False, False, False]
    assert max(row["actor/grad_norm"] for row in read_metrics(workdir)[1:]) > 0.1, "some update has a gradient"


@pytest.mark.slow
def test_a_sampler_with_a_mesh_of_its_own_trains_the_same(tmp_path):
    """By rspo, whose ratios take the sampler's routes. A base in int8 is resharded with its scales."""
    config, shared, own = tiny(tmp_path), tmp_path / "shared", tmp_path / "own"
    config.model.folder, config.objective.name = str(ROOT / "tests" / "golden" / "adder"), "rspo"
    config.iterations, config.sampling.slots = 1, 32
    config.adapter.update({"rank": 4, "base_dtype": "int8"})
    train(config, shared)
    config.sampling.mesh.update({"data": 1, "fsdp": 1, "expert": 4, "tensor": 2})
    train(config, own)
    assert_same_metrics(shared, own, but=("reshard/", "decode/"))  # resharding and decode waits differ by layout
    assert read_samples(own) == read_samples(shared)
    first, second = read_metrics(own)[1:]
    assert first["routing/router_shift"] == pytest.approx(1.0, abs=1e-5), "policy and router have not moved yet"
    assert 0.5 < second["routing/router_shift"] < 1.0


def test_a_finished_run_is_left_as_it_is(tiny_run, capsys):
    config, workdir, facts = tiny_run
    before = (workdir / "metrics.jsonl").read_text()
    assert train(config, workdir) == facts
    said = capsys.readouterr().out
    assert f"already finished: 2 iterations are done in {workdir}; --config.iterations=4 goes on\n" in said
    assert "mean@" not in said, "it is not evaluated again"
    assert (workdir / "metrics.jsonl").read_text() == before


def test_evaluation_alone_repeats_the_runs_own(tiny_run, capsys):
    """Evaluating the newest checkpoint, with the same keys, repeats the run's final evaluation."""
    config, workdir, facts = tiny_run
    result = evaluate.evaluate_folder(config, workdir)
    assert result.metrics() == pytest.approx(facts["last"])
    assert result.samples == config.sampling.group_size


def test_another_architecture_in_the_same_folder_is_refused(tiny_run, tmp_path):
    config, workdir, _ = tiny_run
    shutil.copytree(workdir, tmp_path / "run")
    first = tmp_path / "run" / "coldstart"
    narrow = dataclasses.replace(huggingface.read_config(first), moe_intermediate_size=16)
    huggingface.save(params(narrow, scale=1.0), narrow, first)
    differs = (
        r"does not fit this config: .*mlp.*\(4, 16, 32, 64\).*\(4, 16, 16, 64\).*architecture.moe_intermediate_size"
    )
    with pytest.raises(UserError, match=differs):
        train(config, tmp_path / "run")


def test_another_objective_in_the_same_folder_is_refused(tiny_run):
    config, workdir, _ = tiny_run
    other = config.copy_and_resolve_references()
    other.objective.name = "grpo"
    before = (workdir / "config.json").read_text()
    with pytest.raises(UserError, match=r"objective.name is 'grpo' here and 'gspo' in the run in .*another --workdir"):
        train(other, workdir)
    assert (workdir / "config.json").read_text() == before


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory) -> Path:
    """Return a Hugging Face folder with a random Qwen3-MoE, a real byte-level BPE tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    tokenizer = Tokenizer.train([q for q, _ in PROBLEMS] * 4, 320)
    config = dataclasses.replace(CONFIG, vocab_size=320, eos_token_ids=tokenizer.eos_ids)
    huggingface.save(params(config, scale=1.0), config, folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def jsonl_folder(tmp_path_factory) -> Path:
    """Return a folder of problems in GSM8K's JSONL format."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        lines = [json.dumps({"question": q, "answer": f"It is a sum.\n#### {a}"}) for q, a in PROBLEMS]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def gsm8k(hf_folder: Path, jsonl_folder: Path) -> ConfigDict:
    config = cli.load_config(str(ROOT / "configs/gsm8k.py:runlocal"))
    config.model.folder, config.data.folder = str(hf_folder), str(jsonl_folder)
    config.sampling.max_response_length = 16
    return config


def test_what_needs_experts_is_refused_of_a_dense_model(jsonl_folder, hf_folder, tmp_path):
    dense = dataclasses.replace(
        huggingface.read_config(hf_folder), num_experts=0, experts_per_token=0, moe_intermediate_size=0
    )
    huggingface.save(params(dense, scale=1.0), dense, tmp_path / "dense")
    Tokenizer.load(hf_folder).save(tmp_path / "dense")
    config = gsm8k(tmp_path / "dense", jsonl_folder)
    config.objective.name = "rspo"
    with pytest.raises(UserError, match="rspo is for mixtures of experts, and the model is dense; use gmpo"):
        train(config, tmp_path / "run")
    config.objective.name, config.adapter.expert_rank = "gspo", 2
    with pytest.raises(UserError, match=r"adapter.expert_rank is 2, and the model has no experts; set it to 0"):
        train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_policy_with_random_weights_trains_and_resumes(tmp_path):
    """Adapters beside a base in int8, which is drawn again, the same, when the run goes on."""
    config, workdir = tiny(tmp_path), tmp_path / "run"
    config.model.random, config.coldstart.steps, config.iterations = True, 0, 1
    config.adapter.update({"rank": 4, "base_dtype": "int8"})
    train(config, workdir)
    found = sorted(path.name for path in (workdir / "coldstart").iterdir() if path.suffix != ".safetensors")
    assert "random_weights.json" in found and len(found) == len(list((workdir / "coldstart").iterdir()))
    config.iterations = 2
    train(config, workdir)
    assert len(read_metrics(workdir)) == 5
    drawn = tmp_path / "again"
    policy.write_random(config, drawn)
    assert (drawn / "config.json").read_text() == (workdir / "coldstart" / "config.json").read_text()


@pytest.mark.slow
def test_the_gsm8k_config_trains_an_olmoe_with_the_sampler_s_routes(jsonl_folder, hf_folder, tmp_path, capsys):
    """A second family, from a Hugging Face folder: with R3, old log-probs recomputed, and completions printed."""
    tokenizer, chosen = Tokenizer.load(hf_folder), {"family": "olmoe", "intermediate_size": 16, "norm_topk_prob": False}
    shape = dataclasses.replace(CONFIG, **chosen, vocab_size=320, eos_token_ids=tokenizer.eos_ids)
    weights = params(shape, scale=1.0)
    weights["head"][...] = weights["head"][...].at[:, jnp.asarray(tokenizer.eos_ids)].multiply(24)  # some end early
    huggingface.save(weights, shape, tmp_path / "olmoe")
    tokenizer.save(tmp_path / "olmoe")
    config = gsm8k(tmp_path / "olmoe", jsonl_folder)
    config.iterations, config.mesh.expert = 2, 2
    config.training.update({"old_logprobs": "recompute", "minibatches": 2, "row_tokens": 288})
    config.routing.replay = "r3"
    config.overlong.update({"penalty": 1.0, "cache": 12})
    train(config, tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if "minibatch" in row]
    assert len(rows) == 2 * config.training.minibatches
    assert all(0 < row["routing/replayed"] < 1 and row["update/skipped"] == 0 for row in rows)
    assert rows[0]["routing/flip_rate"] < 0.01
    assert all(np.isfinite([row["routing/router_kl"], row["routing/router_shift"]]).all() for row in rows)
    assert max(row["actor/grad_norm"] for row in rows) > 0
    assert max(row["routing/router_kl"] for row in rows) > rows[0]["routing/router_kl"]
    assert rows[-1]["timing/score_s"] > 0
    assert {"reward/math_verify", "reward/answer_format", "reward/without_worker", "timing/queue_s"} <= rows[-1].keys()
    printed = capsys.readouterr().out
    assert printed.count("reward ") >= 2 and "How many has she now?" in printed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data.max_prompt_length": 4}, "prompt longer than 4 tokens"),
        ({"data.folder": "no/such/folder"}, "no/such/folder"),
        ({"mesh.tensor": 8, "mesh.fsdp": 1}, "tensor = 8 does not divide the number of heads 4; use one of 1, 2, 4"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_folder_or_limit_that_does_not_fit_is_one_sentence(change, says, hf_folder, jsonl_folder, tmp_path):
    config = gsm8k(hf_folder, jsonl_folder)
    config.update_from_flattened_dict(change)
    with pytest.raises(UserError, match=says):
        train(config, tmp_path / "run")


def test_a_vocabulary_that_is_too_small_for_the_tokenizer(hf_folder, jsonl_folder, tmp_path):
    words = [f"{a}{b}{c} {c}{a}{b}" for a in "bdfgk" for b in "aeiou" for c in ("lm", "nt", "rs", "st")]
    Tokenizer.train(words * 4, 400).save(hf_folder.parent / "large")
    for name in ("config.json", "model.safetensors"):
        (hf_folder.parent / "large" / name).write_bytes((hf_folder / name).read_bytes())
    config = gsm8k(hf_folder.parent / "large", jsonl_folder)
    with pytest.raises(UserError, match="320"):
        train(config, tmp_path / "run")


def test_texts_in_a_config_are_looked_up_with_the_model(hf_folder, jsonl_folder):
    config, tokenizer = gsm8k(hf_folder, jsonl_folder), Tokenizer.load(hf_folder)
    config.sampling.stop_ids = (7, "=")
    assert players.stop_ids(config, tokenizer) == (7, *tokenizer.encode("="))
    config.sampling.prefix = "3+4"
    assert players.opening(config, tokenizer) == tokenizer.encode("3+4")
    config.sampling.stop_ids = ("= ?",)
    with pytest.raises(UserError, match=r"sampling.stop_ids has '= \?', which is \d tokens; use texts of one"):
        policy.read_folder(config, hf_folder)
    config.sampling.update({"stop_ids": (), "prefix": "0123456789abcdef"})
    with pytest.raises(UserError, match=r"sampling.prefix has 16 tokens and .* is 16; use a shorter text, or a limit"):
        policy.read_folder(config, hf_folder)


def test_thinking_that_the_chat_template_does_not_switch_is_refused(hf_folder, jsonl_folder, tmp_path):
    folder = Path(shutil.copytree(hf_folder, tmp_path / "model"))
    config = gsm8k(folder, jsonl_folder)
    config.data.enable_thinking = False
    policy.read_folder(config, folder)  # without a template, contents are joined
    template = folder / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}<think>")
    with pytest.raises(UserError, match=r"^data.enable_thinking is False, and .* same prompt if it is True; leave it"):
        policy.read_folder(config, folder)
    template.write_text("{{ messages[0].content }}{{ '<think>' if thinking else '</think>' }}")
    asked = [{"role": "user", "content": "7"}]
    assert policy.read_folder(config, folder)[1].chat(asked) == "7</think>"
    config.data.enable_thinking = True
    assert policy.read_folder(config, folder)[1].chat(asked) == "7<think>"


def test_response_metrics_leave_failures_out_of_the_mean():
    columns = {"reward/mean": np.array([1.0, np.nan]), "reward/steps": np.array([np.nan, np.nan])}
    columns |= {"length": np.array([2, 4]), "truncated": np.array([True, False]), "trainable": np.array([True, False])}
    columns["drawn"] = np.array([2, 3])
    assert not {"response/turns", "response/drawn", "response/older"} & response_metrics(columns).keys()
    columns |= {"turns": np.array([1, 2]), "older": np.array([1, 0])}
    found = response_metrics(columns)
    assert found["reward/mean"] == 1.0 and np.isnan(found["reward/steps"])
    assert (found["response_length/mean"], found["response_length/max"], found["response/truncated"]) == (3.0, 4, 0.5)
    assert (found["response/turns"], found["response/drawn"], found["response/older"]) == (1.5, 5 / 6, 1 / 5)


def test_demonstrations_are_cut_down_to_the_answer_by_share():
    records = [{"worked": "1+1=2 #### 2"}] * 1000
    short = sum(r["worked"] == "#### 2" for r in coldstart.demonstrations(records, terse=0.3, seed=0))
    assert 250 < short < 350
    assert coldstart.demonstrations(records, terse=0.0, seed=0)[:] == records
