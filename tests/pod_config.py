"""Config for multi-process tests: configs/tiny.py:ARGUMENTS, as small as possible.

After such a short cold start the policy is hardly ever right, so the reward is a well-formed final answer combined with
the overlong penalty.
"""

from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import cli

ROOT = Path(__file__).resolve().parent.parent


def get_config(arg: str = "") -> ConfigDict:
    """Return the config; `arg` as in configs/tiny.py."""
    config = cli.load_config(f"{ROOT}/configs/tiny.py:{','.join(word for word in (arg, 'runlocal') if word)}")
    config.coldstart.steps = 60
    if "steps" in arg:
        config.data.max_prompt_length = 16  # countdown prompts, with a tokenizer trained on arithmetic
    config.sampling.group_size = 4
    config.overlong.update({"penalty": 1.0, "cache": 24})
    config.rewards = ConfigDict({"answer_format": 1.0})
    config.eval.correct = "answer_format"
    config.eval.every = 1
    config.processes.heartbeat_s = 5
    return config
