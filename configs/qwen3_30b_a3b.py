"""recipe"""

from gspo_jax.config import base


def get_config(arg=""):
    c = base()
    c.model.published = "Qwen3-30B-A3B"
    c.mesh.update({"data": 1, "fsdp": -1, "expert": 1, "tensor": 1})
    c.sampling.mesh.update({"data": -1, "expert": 16})
    c.data.task = "gsm8k"
    c.data.prompts_per_batch = 64
    c.sampling.group_size = 16
    c.data.max_prompt_length = 512
    c.sampling.max_response_length = 3968
    c.training.logprob_chunk = 64 * 1024
    c.rewards.math_verify = 1.0
    c.eval.correct = "math_verify"
    return c
