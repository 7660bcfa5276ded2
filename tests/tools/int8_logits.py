"""How far logits and log-probs of a folder's model move when its matrices are int8.

    python -m tests.tools.int8_logits FOLDER

Both are computed in float32.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gspo_jax.models import huggingface, transformer


def differences(folder: str) -> dict[str, float]:
    """Return root mean squares over random texts: of logits, of what int8 adds to them, and to the log-probs."""
    config = huggingface.read_config(folder)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (16, 32)))
    found = []
    for base in ("trained", "int8"):
        graph, _ = transformer.abstract(config, base=base)
        logits = nnx.merge(graph, huggingface.load_params(folder, config, base=base))(tokens).logits
        found.append((logits, jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)))
    (exact, logprobs), (near, moved) = found
    rms = lambda x: round(float(jnp.sqrt((x**2).mean())), 4)  # noqa: E731
    return {"logits": rms(exact), "of_int8": rms(near - exact), "of_logprobs": rms(moved - logprobs)}


if __name__ == "__main__":
    print(json.dumps(differences(sys.argv[1])))
