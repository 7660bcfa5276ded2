"""Write decode.npz: what the decoder sampled when each slot's keys were a ring of its newest tokens.

    git checkout 91d27db && python -m tests.golden.make_decode      # from the repository root

The tiny model in float32, with cases that differ in slots, lengths, truncation, prefixes and the cache's dtype.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.models import transformer
from gspo_jax.rollout.decoder import response_keys
from gspo_jax.rollout.prefixes import Prefix, pack
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from tests.tiny import CONFIG, generate, prompts, weights

FILE = Path(__file__).with_name("decode.npz")
CASES = ("plain", "truncated", "int8", "resumed", "long")


def decoded(case: str) -> dict[str, np.ndarray]:
    """Return the tokens, experts and log-probs of a case."""
    rng, batch = np.random.default_rng(0), prompts()
    count, longest = (64, 512) if case == "long" else (32, 70)
    limits = jnp.asarray(rng.integers(16 if case == "long" else 1, longest + 1, count), jnp.int32)
    options: dict[str, Any] = {"sampling": SamplingParams(), "slots": {"plain": 8, "long": 16}.get(case, 7)}
    if case == "truncated":
        options["sampling"] = SamplingParams(temperature=0.6, top_k=20, top_p=0.9)
    if case == "int8":
        options["cache_dtype"] = "int8"
    if case == "resumed":
        said = Prefix(rng.integers(4, 60, (count, 64)), np.minimum(rng.integers(0, 65, count), limits - 1))
        options["prefix"] = pack(batch, said, shards=1, limit=longest)
    stop = StopRule(max_length=longest, eos_ids=() if case == "long" else (3,))
    keys = response_keys(jax.random.key(1), jnp.arange(count))
    graph, _ = transformer.abstract(CONFIG)
    found = generate(graph, weights(), batch, keys, limits=limits, stop=stop, router_logprobs=True, **options).rollout
    return {
        "tokens": np.where(found.mask, found.tokens, -1).astype(np.int8),
        "experts": np.asarray(found.routes.experts),
        "logprobs": np.asarray(found.logprobs),
    }


if __name__ == "__main__":
    np.savez_compressed(FILE, **{f"{case}/{name}": x for case in CASES for name, x in decoded(case).items()})
