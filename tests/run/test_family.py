"""Objectives train by their config line; so do both PPO critics, a reference, DAPO, step rewards and replay.

All runs start from a policy that is right some of the time, so that rewards within a group differ: tests/golden/adder
adds small numbers, tests/golden/counter plays countdown. To train both again, from the repository's root:

    JAX_NUM_CPU_DEVICES=8 python -m tests.run.test_family
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax import cli, coldstart, objectives
from gspo_jax import config as config_lib
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.routing import decomposition
from gspo_jax.setup import learning
from gspo_jax.setup.checks import check
from gspo_jax.setup.data import load_records
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.policy import make_policy, read_folder
from gspo_jax.train import train

ROOT = Path(__file__).parents[2]
ADDER, COUNTER = (ROOT / "tests" / "golden" / name for name in ("adder", "counter"))
PARTIAL = {"partial/left", "partial/calls", "response/older"}
"""The metrics of partial rollouts alone, which test_resume.py reads."""
NOISE = {
    *("routing/native_flip_rate", "routing/replayed_flip_rate"),
    *(f"noise/{name}" for name in ("token", "sequence", "effective_tokens")),
    *(f"noise/{level}_{part}" for level in ("token", "sequence") for part in ("share", *decomposition.PARTS)),
}
"""Those of routing.noise_every alone, which test_noise.py reads."""
BIAS = {
    "noise/bias",
    "noise/score_std",
    "timing/measure_s",
    *(f"noise/bias_{x}" for x in ("low", "high", "p", "tokens")),
}
"""Those of mismatch.bias_every alone, which test_bias.py reads."""
ISOLATED = {"timing/queue_s", "reward/without_worker"}
"""Those of isolated reward functions alone, which test_experience.py reads."""
TEACHER = {"teacher/kl"}
"""That of a teacher alone, which test_teacher.py reads."""
SERVERS = {"judge/calls", "judge/prompt_tokens", "judge/completion_tokens", "judge/position_bias", "reward_model/calls"}
"""Those of servers and of what fails, which tests/rewards and test_servers.py read."""
FAILURES = {"episode/failed", "reward/NAME/failed", "reward/retries"}
CLOCK = ("time", "timing/", "throughput/", "compile/")


def settings(data: Path, *, arg: str = "runlocal", **changes) -> ConfigDict:
    config = cli.load_config(str(ROOT / f"configs/tiny.py:{arg}"))
    config.data.data_dir = str(data)
    config.data.options.difficulty = "easy"
    config.model.architecture.update({"num_layers": 2, "num_experts": 8, "experts_per_token": 2})
    config.iterations = 3
    config.sampling.slots = 32  # four per device, which are never halved, so that the decoder compiles one loop
    if config.data.task == "arithmetic":
        config.rewards = ConfigDict({"exact_answer": 1.0, "answer_format": 1.0})  # answer_format is easy to learn
    config.coldstart.steps, config.coldstart.terse = 220, ()
    config.critic.optimizer.update({"learning_rate": 3e-3, "warmup_updates": 0})
    config.eval.every = config.log.samples_every = config.checkpoint.every = 100
    config.eval.prompts = 8
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def written() -> set[str]:
    """Return the set that collects the names of all metrics written by this file's runs."""
    return set()


def run(config: ConfigDict, workdir: Path, written: set[str]) -> list[dict]:
    """Train and return the rows of the updates, checking that none was skipped, all are finite and the policy moves."""
    train(config, workdir)
    rows = [row for row in read_metrics(workdir) if "minibatch" in row]
    written |= {name for row in read_metrics(workdir) for name in row if "/" in name}
    assert len(rows) == config.iterations * config.training.minibatches
    for row in rows:
        assert row["update/skipped"] == 0
        assert np.isfinite([row["actor/loss"], row["actor/entropy"], row["actor/grad_norm"]]).all()
    last = rows[-1]["iteration"]
    norms = [sum(row["actor/grad_norm"] for row in rows if row["iteration"] == i + 1) for i in range(last)]
    assert min(norms) > 0, "every iteration has a gradient"
    drifted = [row["ratio/token_log_max"] for row in rows if row["minibatch"] > 0]
    assert min(drifted) > 1e-5, "the policy moves between mini-batches"
    return rows


def assert_resumes(config: ConfigDict, workdir: Path, rows: list[dict]) -> None:
    """Assert that a run writes the same rows of updates once more, from its checkpoint before the newest."""
    shutil.rmtree(workdir / "checkpoints" / str(config.iterations))
    train(config, workdir)
    again = [row for row in read_metrics(workdir) if "minibatch" in row]
    for row, other in zip(rows, again, strict=True):
        same = [name for name in row if not name.startswith(("eval/", *CLOCK))]
        assert [row[name] for name in same] == [other[name] for name in same], "all of it is in the checkpoint"
    assert rows[-1]["time"] < again[-1]["time"], "the last iteration was made again"


@pytest.mark.parametrize("name", objectives.catalogue.__all__)
def test_every_objective_is_made_from_its_config_line(name, data):
    config = settings(data, objective__name=name)
    found, expected = learning.make_objective(config), objectives.make(name, **config.objective[name])
    for field in ("level", "token_advantages", "advantage", "bounds", "critic", "router_shift"):
        assert getattr(found, field) == getattr(expected, field), field


def use_ppo(config: ConfigDict, trunk: str) -> None:
    """Choose PPO with its KL in the reward, an entropy bonus, and R3."""
    config.objective.name, config.critic.trunk = "ppo", trunk
    config.reference.update({"kl_weight": 0.05, "place": "reward"})
    config.routing.replay = "r3"
    config.training.entropy_weight = 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_ppo_with_a_critic_of_its_own_and_its_kl_in_the_reward(data, tmp_path, written):
    """The critic learns, and a resumed run finds it in the checkpoint.

    On one device; test_update.py has PPO on eight.
    """
    config = settings(data, arg="single,runlocal", model__folder=str(ADDER), checkpoint__every=1, sampling__slots=4)
    use_ppo(config, "own")
    rows = run(config, tmp_path / "run", written)
    assert rows[0]["reference/kl"] == pytest.approx(0, abs=1e-8), "the reference is the initial policy"
    assert rows[-1]["reference/kl"] > 1e-7
    assert all(0.8 < row["routing/replayed"] < 1 for row in rows), "all tokens are replayed but each response's last"
    losses = [row["critic/loss"] for row in rows]
    assert losses[-1] < 0.8 * losses[0], losses
    assert_resumes(config, tmp_path / "run", rows)


@pytest.mark.slow
def test_a_sigmoid_router_beside_latent_attention_trains_with_r3w_and_resumes(data, tmp_path, written):
    """The biases, which the updates move, are the sampler's at once and in the checkpoint."""
    config = settings(data, iterations=2, checkpoint__every=1, coldstart__steps=1)
    config.routing.update({"replay": "r3w", "bias_rate": 0.05})
    own = {"family": "deepseek_v3", "dense_layers": 1, "expert_groups": 4, "groups_per_token": 2, "num_kv_heads": 4}
    own["latent"] = {"rank": 16, "query_rank": None, "plain_dim": 8, "value_dim": 12, "interleaved": True}
    config.model.architecture.update({"num_layers": 3, "shared_intermediate_size": 32, **own})
    config.sampling.top_p, config.sampling.keep_top = 0.5, 200
    config.routing.balance_weight = 0.1  # a policy that is never right has no other gradient
    config.optimizer.learning_rate = 3e-3
    rows = run(config, tmp_path / "run", written)
    assert all(0.8 < row["routing/replayed"] < 1 for row in rows)
    assert [row["routing/flip_rate"] > 0.01 for row in rows] == [False, True, False, True], "by the moved biases"
    assert all(0.5 < row["sampling/kept_whole"] <= 1 for row in rows if "sampling/kept_whole" in row)
    assert rows[0]["ratio/token_log_max"] < 3e-5, "of kept sets, to rounding"
    assert_resumes(config, tmp_path / "run", rows)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_the_whole_loop_of_dapo(data, tmp_path, written):
    """DAPO with a reference KL in the loss, a mismatch correction, R2, and router losses.

    On one device; `field_run` of tests/pods.py is DAPO on eight.
    """
    config = settings(
        data, arg="dapo,single,runlocal", model__folder=str(ADDER), sampling__max_response_length=18, iterations=2
    )
    config.sampling.slots, config.overlong.cache = 4, 6
    config.sampling.filter = "exact_answer"  # the penalty alone would keep groups of wrong answers
    config.reference.kl_weight, config.sampling.keep_top = 0.01, 4
    config.training.old_logprobs = "recompute"
    config.mismatch.update({"correction": "tis", "center": True})
    config.sampling.weights_dtype = "int8"
    config.routing.update({"replay": "r2", "balance_weight": 0.01, "z_weight": 0.001})
    rows = run(config, tmp_path / "run", written)
    assert all(0 < row["mismatch/center"] < 0.1 for row in rows if "mismatch/center" in row), "few weights are capped"
    last = [row for row in rows if "dynamic/rounds" in row]
    assert [row["minibatch"] for row in last] == [1] * config.iterations
    assert all(1 <= row["dynamic/rounds"] <= 4 and row["dynamic/filled"] < 1 for row in last)
    assert max(row["dynamic/rounds"] for row in last) > 1 and max(row["dynamic/dropped"] for row in last) > 0
    full = [row["iteration"] for row in last if row["dynamic/filled"] == 0]
    assert full, "some batch was filled with groups whose rewards differ"
    assert all(row["reward/zero_std"] == 0 for row in rows if row["iteration"] in full)
    assert all(0.5 < row["sampling/kept_mass"] < 1 for row in last)
    assert all(-1 <= row["reward/overlong"] <= 0 for row in rows)
    assert min(row["reward/overlong"] for row in rows) < 0
    assert all(row["response/learned"] <= 1 - row["response/truncated"] + 1e-6 for row in rows)
    assert min(row["response/learned"] for row in rows) < 1
    assert all(row["routing/replayed"] == 1 and row["routing/balance_loss"] > 0.5 for row in rows)
    assert rows[0]["routing/flip_rate"] == 0, "the old policy's routes are the trainer's own"
    assert max(row["routing/flip_rate"] for row in rows) > 0, (
        "the router's own choice drifts although replay overrules it"
    )


@pytest.mark.slow
def test_everything_at_once(data, tmp_path, written):
    """PPO in two turns with step rewards, dynamic sampling, overlong filtering, a mismatch correction, and R2.

    Wrong answers get a second turn; the environment's tokens are not trained on; a
    benchmark is taken before and after.
    """
    benchmark = {"question": "22 from 3 5 7:", "answer": "3*5+7", "numbers": "3 5 7", "target": "22"}
    (tmp_path / "own.jsonl").write_text(json.dumps(benchmark) + "\n")
    config = settings(data, arg="steps,runlocal", model__folder=str(COUNTER), iterations=1)
    config.optimizer.learning_rate = 3e-3  # one update has to move routes
    assert config.objective.name == "gspo_token"
    config.environment.name = "countdown_feedback"
    config.benchmarks.NAME = config_lib.benchmark(str(tmp_path / "own.jsonl"), every=2, samples=16)
    config.sampling.update({"max_response_length": 64, "rounds": 2, "filter": "countdown"})
    config.overlong.update({"penalty": 1.0, "cache": 6, "filter": True})
    use_ppo(config, "policy")
    config.training.old_logprobs = "recompute"
    config.mismatch.update({"correction": "tis", "negative_mask": 0.0})
    config.routing.update({"replay": "r2", "balance_weight": 0.01, "z_weight": 0.001})
    rows = run(config, tmp_path / "run", written)
    responses = config.data.prompts_per_batch * config.sampling.group_size / config.training.minibatches
    for row in rows:
        assert row["response/turns"] > 1 and row["response/drawn"] < 1
        assert row["update/tokens"] < row["response_length/mean"] * row["response/drawn"] * responses
        assert row["response/learned"] <= 1 - row["response/truncated"] + 1e-6
        assert -1 <= row["reward/overlong"] < 0 and 0 <= row["reward/countdown_steps"] <= 1
        assert row["routing/replayed"] == 1 and row["routing/balance_loss"] > 0.5
        assert np.isfinite(row["critic/loss"]) and row["reference/kl"] >= 0
    masked = [row["clip_fraction/negative_mask"] for row in rows]
    assert 0 < max(masked) < 1, "by rounding, the sampler finds about half of the responses likelier"
    assert rows[1]["reference/kl"] > 0, "the first mini-batch's policy is the reference"
    assert max(row["reward/countdown_steps"] for row in rows) > 0
    assert rows[0]["routing/flip_rate"] == 0, "the old policy's routes are the trainer's own"
    assert rows[1]["routing/flip_rate"] > 0, "the router's own choice drifts although replay overrules it"
    assert rows[1]["dynamic/rounds"] == 2 and 0 < rows[1]["dynamic/dropped"] < 1
    without = np.mean([row["reward/zero_std"] for row in rows])
    assert without == rows[1]["dynamic/filled"], "only what fills the batch has no contrast"
    taken = [row for row in read_metrics(tmp_path / "run") if "benchmark/NAME" in row]
    answers = [file.read_text().splitlines() for file in (tmp_path / "run" / "benchmarks").iterdir()]
    assert [row["step"] for row in taken] == [0, 2] and [len(lines) for lines in answers] == [16, 16]
    for row in taken:
        assert row["benchmark/NAME_low"] <= row["benchmark/NAME"] <= row["benchmark/NAME_high"]
        assert row["benchmark/NAME"] <= row["benchmark/NAME_pass_at_k"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_truncated_sampling_in_turns_leaves_ratios_at_one(data, tmp_path, written):
    """To rounding in the first mini-batch, by the sampler's log-probs and R3, of packed rows."""
    config = settings(data, arg="steps,single,runlocal", model__folder=str(COUNTER), iterations=1, sampling__slots=4)
    config.environment.name, config.routing.replay = "countdown_feedback", "r3"
    config.sampling.update({"max_response_length": 64, "top_p": 0.8, "keep_top": 32})
    config.training.old_logprobs = "sampler"
    rows = run(config, tmp_path / "run", written)
    assert rows[0]["ratio/token_log_max"] < 3e-5 and rows[0]["response/turns"] > 1
    assert rows[-1]["sampling/kept_whole"] > 0.9


def test_a_critic_s_own_trunk_has_the_policy_s_dispatch(data):
    config = settings(data, model__folder=str(ADDER), objective__name="ppo", model__dispatch="ragged_all_to_all")
    policy = make_policy(config, read_folder(config, ADDER)[0])
    critic = learning.make_critic(config, policy.config)
    models = [policy.shapes.model(policy.graph), nnx.merge(critic.graph, critic.shapes).trunk]
    assert [model.layers[0].mlp.dispatch for model in models] == ["ragged_all_to_all"] * 2


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("warning: ")]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_settings_and_batches_that_teach_nothing_are_warned_of_once(data, tmp_path, capsys):
    config = settings(data, arg="single,runlocal", model__folder=str(ADDER), sampling__group_size=1)
    config.objective.gspo.low = 0.2
    config.data.prompts_per_batch, config.sampling.slots = 16, 4
    config.environment.name, config.sampling.top_p = "calculator", 0.9
    train(config, tmp_path / "run")
    said = warnings(capsys.readouterr().out)
    assert len(said) == 5
    assert "gspo bounds the ratio of a whole response by low=0.2: " in said[0]
    assert "sampling.group_size is 1: " in said[1]
    assert "sampling.top_p 0.9: responses are sampled from another distribution than the full" in said[2]
    assert "calculator replied to no response of a whole batch; make turns end where it listens" in said[3]
    assert "all advantages of a batch are 0" in said[4]


@pytest.mark.slow
def test_every_metric_is_in_the_glossary_and_nothing_else(written):
    """The runs above write exactly the metrics that the glossary lists, but for those of partial rollouts, of
    isolated reward functions, of the noise's parts, of the bias, of a teacher, of servers, of failures and of traces.
    """
    documented = set(re.findall(r"`([a-z_]+/[A-Za-z0-9_/]+)`", (ROOT / "docs/metrics.md").read_text()))
    rewards = "|".join(("exact_answer", "answer_format", "countdown_steps", "countdown"))
    named = {re.sub(rf"^((?:eval/)?reward)/(?:{rewards})(?=_stderr$|$)", r"\1/NAME", name) for name in written}
    named = {re.sub(rf"^benchmark/NAME/(?:{rewards})$", "benchmark/NAME/REWARD", name) for name in named}
    others = PARTIAL | ISOLATED | NOISE | BIAS | TEACHER | SERVERS | FAILURES | {"timing/profile_s"}
    assert documented >= others
    assert named - others == documented - others


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step_rewards": {"countdown_steps": 1.0}}, "gspo has one advantage per response.* use gspo_token"),
        ({"reference.kl_weight": -1.0}, "reference.kl_weight is -1"),
        ({"reference.estimator": "k4"}, "reference.estimator is 'k4'; use 'k1', 'k2' or 'k3'"),
        ({"reference.place": "reward"}, "needs a critic; gspo has none, use 'loss'"),
        ({"critic.trunk": "both"}, "critic.trunk is 'both'; use 'own' or 'policy'"),
        ({"overlong.penalty": 1.0}, "overlong.cache is 0; use 1 to 32"),
        (
            {"mismatch.correction": "tis", "training.old_logprobs": "sampler"},
            "set training.old_logprobs to 'recompute'",
        ),
        ({"mismatch.correction": "tiss"}, "did you mean 'tis'"),
        ({"mismatch.center": True}, "sampling.keep_top 0, so that the sampler records no ids to centre over; set that"),
        (
            {"objective.name": "grpo", "mismatch.center": True, "sampling.keep_top": 20}
            | {"training.old_logprobs": "sampler"},
            "grpo then weighs each token by its ratio to the sampler.* set training.old_logprobs to 'recompute'",
        ),
        ({"sampling.rounds": 0}, "sampling.rounds is 0; use 1 to "),
        ({"sampling.keep_top": 321}, "sampling.keep_top is 321, and the model's vocabulary has 320 tokens; use fewer"),
        ({"objective.name": "ppo", "objective.ppo.lam": 2.0}, "lam=2.0 lies outside"),
        ({"objective.name": "cispo", "objective.cispo.mask": "pppo"}, "did you mean 'ppo'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_a_config_can_get_wrong(changes, says, tmp_path):
    config = settings(tmp_path)
    for name, value in changes.items():
        with config.unlocked():
            config.update_from_flattened_dict({name: ConfigDict(value) if isinstance(value, dict) else value})
    with pytest.raises(UserError, match=says):
        check(config)


def main() -> None:
    """Train the policies of tests/golden."""
    with tempfile.TemporaryDirectory() as data:
        for folder, arg in ((ADDER, "runlocal"), (COUNTER, "steps,runlocal")):
            config = settings(Path(data), arg=arg)
            mesh = make_meshes(config, check(config)).trainer
            shutil.rmtree(folder, ignore_errors=True)
            with jax.set_mesh(mesh):
                coldstart.coldstart(config, load_records(config, "train"), mesh, folder)


if __name__ == "__main__":
    main()
