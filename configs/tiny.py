"""A tiny mixture-of-experts policy learns arithmetic by GSPO on a simulated pod of eight devices.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Nothing is downloaded: the problems are generated, the tokenizer and the model are made by the cold start, which teaches
worked answers until the policy is sometimes right. `configs/tiny.py:runlocal` is the same program for a few iterations.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """`arg` may be "runlocal"."""
    config = ConfigDict()
    config.seed = 0
    config.cpu_devices = 8  # simulated devices, where jax runs on CPU
    config.iterations = 150  # each: sample, score, four updates
    config.mesh = ConfigDict({"data": 2, "fsdp": 2, "expert": 2, "tensor": 1})

    config.model = ConfigDict()
    config.model.folder = ""  # a Hugging Face folder; empty: the cold start makes the model
    config.model.dtype = "float32"
    config.model.remat = False
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

    config.data = ConfigDict()
    config.data.task = "arithmetic"
    config.data.folder = ""
    config.data.data_dir = "runs/data"
    config.data.limit = 0
    config.data.options = ConfigDict({"difficulty": "medium"})
    config.data.prompts_per_batch = 32
    config.data.max_prompt_length = 16

    config.coldstart = ConfigDict()
    config.coldstart.steps = 400
    config.coldstart.batch = 64
    config.coldstart.vocab_size = 320
    config.coldstart.log_every = 100
    config.coldstart.optimizer = _adamw(learning_rate=3e-3, schedule="cosine", warmup_updates=20, b2=0.95)

    config.sampling = ConfigDict({"group_size": 8, "max_response_length": 32})
    config.sampling.update({"temperature": 1.0, "top_k": 0, "top_p": 1.0})

    config.rewards = ConfigDict({"exact_answer": 1.0})

    config.objective = ConfigDict({"name": "gspo"})
    config.objective.gspo = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.objective.gspo_token = ConfigDict({"low": 3e-3, "high": 4e-3})
    config.objective.grpo = ConfigDict({"low": 0.2, "high": 0.27})

    config.update = ConfigDict()
    config.update.minibatches = 4
    config.update.microbatches = 1
    config.update.old_logprobs = "sampler"  # or "recompute": score with the trainer's model
    config.update.logprob_chunk = 4096  # tokens whose logits exist at once

    config.optimizer = _adamw(learning_rate=1e-3, schedule="constant", warmup_updates=10, b2=0.95)

    config.eval = ConfigDict({"every": 25, "prompts": 256, "correct": "exact_answer"})
    config.log = ConfigDict({"samples_every": 25, "samples": 4})
    config.checkpoint = ConfigDict({"every": 25, "keep": 2})

    if arg == "runlocal":
        config.iterations = 2
        config.coldstart.steps = 20
        config.eval.prompts = 32
        config.checkpoint.every = 1
    elif arg:
        raise ValueError(f"configs/tiny.py takes no argument {arg!r}; use runlocal or none")
    return config


def _adamw(*, learning_rate: float, schedule: str, warmup_updates: int, b2: float) -> ConfigDict:
    return ConfigDict(
        {
            "learning_rate": learning_rate,
            "schedule": schedule,
            "warmup_updates": warmup_updates,
            "b1": 0.9,
            "b2": b2,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        }
    )
