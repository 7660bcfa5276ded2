"""An objective of one's own, from the catalogue's primitives: GSPO whose clip is soft.

    python -m gspo_jax.train --config=configs/tiny.py:runlocal --workdir=runs/own_objective \
        --config.functions.soft_gspo=examples/objective.py:soft_gspo --config.objective.name=soft_gspo
"""

import jax.numpy as jnp

from gspo_jax.objectives import Objective
from gspo_jax.objectives.surrogates import Surrogate, TokenBatch, log_ratio, row_mean, sequence_mean, soft_gated


def soft_gspo(*, tau: float = 100.0) -> Objective:
    """GSPO's ratio of a whole response under SAPO's smooth gate; `tau` is the gate's steepness."""

    def surrogate(b: TokenBatch) -> Surrogate:
        log_s = row_mean(log_ratio(b.logprobs, b.old_logprobs, b.mask), b.mask)[:, None]
        return soft_gated(jnp.broadcast_to(log_s, b.mask.shape), b.advantages, tau_pos=tau, tau_neg=1.05 * tau)

    return Objective(name="soft_gspo", surrogate=surrogate, weights=sequence_mean, level="sequence")
