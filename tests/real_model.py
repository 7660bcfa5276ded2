"""A process that asks SmolLM2-135M-Instruct, on one device with all of XLA's optimisations, and writes what it says.

    python -m tests.real_model MODEL_FOLDER SCRATCH_FOLDER

Writes to the scratch folder `logits.npz`, tokens and logits of the golden texts, `float32.npz` and `bfloat16.npz`,
greedy responses to the golden prompts with log-probs of sampler and trainer, and `benchmark.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from configs.smollm2 import get_config
from gspo_jax import cli
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.iteration import collect
from gspo_jax.measuring import published
from gspo_jax.measuring.opened import open_policy
from tests.tiny import load_model

GOLDEN = Path(__file__).with_name("golden") / "smollm2.npz"
PROBLEMS = (("What is 7 + 5?", "12"), ("What is 2 + 2?", "4"), ("What is 977 * 613 + 5?", "598906"))


def questions(split: str) -> list[dict[str, str]]:
    """Return the golden prompts."""
    del split
    return [{"question": str(prompt), "answer": ""} for prompt in np.load(GOLDEN)["prompts"]]


def nothing(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """Score 0."""
    del prompt, completion, record
    return 0.0


def config_for(model: str, dtype: str) -> ConfigDict:
    """Return the config of greedy answers to the golden prompts."""
    config = get_config()
    config.model.folder, config.model.dtype = model, dtype
    config.functions = ConfigDict({name: f"{__file__}:{name}" for name in ("questions", "nothing")})
    config.data.task, config.rewards, config.eval.correct = "questions", ConfigDict({"nothing": 1.0}), "nothing"
    config.data.prompts_per_batch, config.sampling.group_size, config.training.minibatches = 8, 1, 1
    config.sampling.max_response_length, config.sampling.temperature, config.sampling.top_k = 64, 1.0, 1
    config.training.old_logprobs = "recompute"
    return config


def predict(model: str, folder: Path) -> None:
    """Compute logits of the golden texts, padded to one length, where transformers has the highest."""
    golden, tokenizer, (policy, _) = np.load(GOLDEN), Tokenizer.load(Path(model)), load_model(Path(model))
    tokens = [tokenizer.encode(text) for text in golden["texts"].tolist()]
    rows = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
    for row, ids in enumerate(tokens):
        rows[row, : len(ids)] = ids
    graph, weights = nnx.split(policy)  # as constants they would take minutes to compile
    logits = np.asarray(jax.jit(lambda weights, rows: nnx.merge(graph, weights)(rows).logits)(weights, rows))
    arrays = {}
    for row, ids in enumerate(tokens):
        own, arrays[f"tokens_{row}"] = logits[row, : len(ids)], np.array(ids)
        if len(ids) == len(golden[f"top_{row}"]):
            arrays[f"logits_{row}"] = np.take_along_axis(own, golden[f"top_{row}"], axis=-1)
        arrays[f"norm_{row}"] = jax.nn.logsumexp(own, axis=-1)
    np.savez(folder / "logits.npz", **arrays)


def answer(model: str, dtype: str, folder: Path) -> None:
    """Sample from the cache, and score the packed responses with the trainer."""
    with open_policy(config_for(model, dtype)) as opened:
        made, state, _ = opened.start()
        batch = collect(made, opened.player, opened.scorer, state, iter(opened.prompts()), jax.random.key(0))
    found = {
        "tokens": batch.rollout.tokens,
        "mask": batch.rollout.action_mask,
        "sampler": batch.rollout.logprobs,
        "trainer": batch.old.logprobs,
    }
    columns = batch.packing.in_order({name: np.asarray(x) for name, x in found.items()})
    asked = np.array([record["question"] for record in batch.records])
    np.savez(folder / f"{dtype}.npz", **columns, questions=asked)


def take_benchmark(model: str, folder: Path) -> None:
    """Answer a file of problems greedily, judged by math-verify."""
    rows = [{"question": question, "answer": answer} for question, answer in PROBLEMS]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_for(model, "float32")
    config.data.prompts_per_batch = len(PROBLEMS)
    config.rewards, config.eval.correct = ConfigDict({"math_verify_flexible": 1.0}), "math_verify_flexible"
    facts = published.run(config, folder / "run", name=str(folder / "problems.jsonl"), place="", samples=1)
    (folder / "benchmark.json").write_text(json.dumps(facts))


def main(model: str, scratch: str) -> None:
    """Write the four files."""
    cli.prepare(config_for(model, "float32"))
    predict(model, Path(scratch))
    for dtype in ("float32", "bfloat16"):
        answer(model, dtype, Path(scratch))
    take_benchmark(model, Path(scratch))


if __name__ == "__main__":
    main(*sys.argv[1:])
