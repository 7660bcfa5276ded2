"""The oracle of packed rows: a row for each response alone, its padded prompt and then its padded tokens.

An `Alone` has the interface of `training.layout.Layout`, and nothing of its code.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct

from gspo_jax.types import Responses


@struct.dataclass
class Alone:
    """Rows [B, N] of N = S + T positions: what is known of a response is its row."""

    responses: Responses

    @property
    def targets(self):
        return self.responses.tokens

    @property
    def valid(self):
        in_prompt = jnp.arange(self.responses.prompts.shape[1])[None] < self.responses.prompt_lengths[:, None]
        return jnp.concatenate([in_prompt, self.responses.mask], axis=1)

    def forward(self, model, routing, remat):
        tokens = jnp.concatenate([self.responses.prompts, self.responses.tokens], axis=1)
        return model(tokens, self.valid, routing=routing, remat=remat)

    def rows(self, x):
        return x

    def rows_of_tokens(self, x):
        return x

    def whole(self, x, fill: Any):
        del fill  # a row has every position
        return x

    def predicting(self, x):
        """Return values one position earlier; those of the first token are at the prompt's last real one."""
        B = len(x)
        last = x[jnp.arange(B), self.responses.prompt_lengths - 1][:, None]
        return jnp.concatenate([last, x[:, self.responses.prompts.shape[1] : -1]], axis=1)

    def scored(self, x):
        return x

    def own(self, x):
        return x[:, self.responses.prompts.shape[1] :]
