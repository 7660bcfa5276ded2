"""GSPO teaches a tiny mixture-of-experts policy arithmetic, on a simulated pod of eight devices.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Takes about three minutes on two cores; held-out accuracy rises from 0.23 to 0.77 (three seeds: README.md).
Nothing is downloaded: problems are generated, and the cold start trains the tokenizer and a model that is sometimes
right. That model first learns to show its work and then sees many answers without it; GSPO has to discover that showing
the work pays off. Arguments, joined by commas, change the run:

- `countdown`: reach a target with three numbers, instead of arithmetic.
- `steps`: countdown with a reward for every valid step, credited token by token with gspo_token.
- `calculator`: multi-turn; the value after each `=` is computed for the policy, which learns to use it (gspo_token).
- `python`: multi-turn; expressions too hard for the model alone, which learns to have a Python program compute them.
- `tool`: multi-turn, with a tool in the chat template; a key lies behind several doors, and calls open them one by one.
- `code`: programs from examples; the reward is the share of asserts that they pass in the sandbox.
- `partial`: partial rollouts; no sampling call waits for the longest responses.
- `distil`: a student of half the layers, taught by a run of this config alone, without a reward (docs/distillation.md).
- `dapo`: full DAPO, with dynamic sampling and overlong shaping; `objective.name=dapo` alone is only its loss.
- `single`: on one device; without the simulated exchange a run takes about a third of the processor time.
- `runlocal`: the same programs for two short iterations.
"""

from ml_collections import ConfigDict

from gspo_jax.config import adamw, base
from gspo_jax.errors import UserError


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` is a comma-separated list of ARGUMENTS."""
    chosen = set(arg.split(",")) - {""}
    if unknown := chosen - ARGUMENTS.keys():
        raise UserError(f"configs/tiny.py takes no argument {min(unknown)!r}; use {', '.join(ARGUMENTS)}")
    config = base()
    config.iterations = 100
    config.mesh = ConfigDict({"data": 2, "fsdp": 2, "expert": 2, "tensor": 1})

    config.model.dtype = "float32"
    config.model.remat = "dots"
    config.model.architecture = ConfigDict(
        {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "num_experts": 16,
            "experts_per_token": 4,
            "moe_intermediate_size": 32,
        }
    )
    config.coldstart.steps = 1000
    config.coldstart.terse = (0.0, 0.0, 0.0, 0.6)
    config.coldstart.batch = 32

    config.data.task = "arithmetic"
    config.data.data_dir = "runs/data"
    config.data.options = ConfigDict({"difficulty": "long"})
    config.data.prompts_per_batch = 32
    config.data.max_prompt_length = 8
    config.sampling.max_response_length = 32
    config.rewards = ConfigDict({"exact_answer": 1.0})
    config.eval.every = 10
    config.eval.correct = "exact_answer"

    # A tiny model makes large updates on short responses, so the clip range is ten times the paper's.
    config.objective.gspo = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.objective.gspo_token = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.objective.tbpo = ConfigDict({"low": 3e-3, "high": 4e-3, "high_neg": 7e-3})
    config.optimizer = adamw(learning_rate=1e-4, schedule="constant", warmup_updates=10)

    config.critic.optimizer = adamw(learning_rate=1e-3, schedule="constant", warmup_updates=10)
    for name, change in ARGUMENTS.items():  # in this order: later changes build on earlier ones
        if name in chosen:
            change(config)
    return config


def countdown(config: ConfigDict) -> None:
    """Train on countdown: three numbers and a target."""
    config.data.task = "countdown"
    config.data.options = ConfigDict({"difficulty": "medium"})
    config.data.max_prompt_length = 12
    config.rewards = ConfigDict({"countdown": 1.0})
    config.eval.prompts = 128
    config.eval.correct = "countdown"


def steps(config: ConfigDict) -> None:
    """Train on countdown with a reward per valid step."""
    countdown(config)
    config.objective.name = "gspo_token"
    config.step_rewards = ConfigDict({"countdown_steps": 1.0})


def calculator(config: ConfigDict) -> None:
    """Train on arithmetic with a tool: a turn ends with `=`, and the next one begins after the result."""
    config.objective.name = "gspo_token"
    config.sampling.stop_ids = ("=",)
    config.environment.name = "calculator"
    config.environment.turns = 6


def python(config: ConfigDict) -> None:
    """Train on expressions with a tool: a turn ends with a code block, and the next one begins after its output."""
    config.iterations = 30
    config.data.task = "expression"
    config.data.options = ConfigDict({"difficulty": "medium"})
    config.data.max_prompt_length = 16
    config.sampling.max_response_length = 48
    config.sampling.stop_ids = ("```\n",)  # what closes a block; the line that opens one goes on
    config.environment.name = "python"


def tool(config: ConfigDict) -> None:
    """Train to call a tool as often as it takes, in place of a guess."""
    config.iterations = 30
    config.model.architecture.update({"num_layers": 3, "num_experts": 8, "experts_per_token": 2})
    config.coldstart.steps = 500
    config.coldstart.batch = 16
    config.coldstart.terse = (0.0, 0.0, 0.0, 0.5)
    config.coldstart.vocab_size = 384
    config.data.task = "rooms"
    config.data.options = ConfigDict({"difficulty": "medium"})
    config.data.prompts_per_batch = 8
    config.data.max_prompt_length = 192  # the cold start's have the earlier turns, too
    config.sampling.max_response_length = 112
    config.environment.name = "rooms"
    config.environment.turns = 4
    config.rewards = ConfigDict({"environment": 1.0})
    config.eval.prompts = 32
    config.eval.every = 15
    config.eval.correct = "environment"
    config.optimizer.learning_rate = 2e-4


def code(config: ConfigDict) -> None:
    """Train on programs from examples, with what they do as the reward."""
    config.iterations = 50
    config.coldstart.steps = 1500
    config.coldstart.terse = (0.0, 0.0, 0.0, 0.0, 0.6)
    config.data.task = "induction"
    config.data.options = ConfigDict({"difficulty": "easy"})
    config.data.max_prompt_length = 24
    config.data.prompts_per_batch = 16
    config.sampling.max_response_length = 64
    config.rewards = ConfigDict({"code_tests_share": 1.0, "code_tests": 0.0})
    config.eval.prompts = 64
    config.eval.every = 25
    config.eval.correct = "code_tests"


def partial(config: ConfigDict) -> None:
    """Keep 1.5 times as many groups in flight as make a batch."""
    config.sampling.partial.prompts = 48


def dapo(config: ConfigDict) -> None:
    """Train with all of DAPO, arXiv 2503.14476."""
    config.objective.name = "dapo"
    config.sampling.rounds = 4
    config.overlong = ConfigDict({"penalty": 1.0, "cache": 6, "filter": True})


def distil(config: ConfigDict) -> None:
    """Learn from the policy in runs/teacher alone, by the reverse KL; the reward is only measured."""
    config.iterations = 250
    config.model.architecture.update({"num_layers": 2, "num_experts": 8, "experts_per_token": 2})
    config.coldstart.steps = 300
    config.teacher.update({"folder": "runs/teacher", "form": "full"})
    config.rewards = ConfigDict({"exact_answer": 0.0})
    config.data.prompts_per_batch = 128
    config.sampling.group_size = 2  # nothing is compared within a group: more prompts teach more
    config.training.minibatches = 2
    config.optimizer.learning_rate = 1e-3
    config.eval.every = 50


def single(config: ConfigDict) -> None:
    """Train on one simulated device, or on all that an accelerator has, without expert parallelism."""
    config.cpu_devices = 1
    config.mesh.update({"data": 1, "fsdp": -1, "expert": 1})


def runlocal(config: ConfigDict) -> None:
    """Shrink the run to about a minute on a laptop."""
    config.iterations = 2
    config.coldstart.steps = 20
    config.data.prompts_per_batch = 8
    config.sampling.group_size = 8
    config.eval.prompts = 16
    config.training.minibatches = 2
    config.checkpoint.every = 1
    if config.sampling.partial.prompts is not None:
        config.sampling.partial.prompts = 16


ARGUMENTS = {
    "countdown": countdown,
    "steps": steps,
    "calculator": calculator,
    "python": python,
    "tool": tool,
    "code": code,
    "partial": partial,
    "dapo": dapo,
    "distil": distil,
    "single": single,
    "runlocal": runlocal,
}
