"""What a forward and a backward pass must compute, by formula: the third count beside a traced and a compiled program.

A product of [m, k] and [k, n] takes 2·m·k·n flops. Norms, softmaxes and rotations are left out, as is usual.
"""

import dataclasses
from typing import NamedTuple

from gspo_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Work:
    """What a forward is given."""

    tokens: float | int
    """That go through the layers."""
    predictions: float | int
    """Positions whose logits are computed."""
    pairs: float | int
    """Of a query and a key that it sees, in one layer and one head."""

    def __truediv__(self, parts: int) -> "Work":
        """A share of it."""
        return Work(self.tokens / parts, self.predictions / parts, self.pairs / parts)


def of_rows(rows: float | int, *, prompt: int, response: int, share: int) -> Work:
    """Of `rows` responses of full length to prompts of full length, each read once for `share` of its responses."""
    S, T, packed = prompt, response, rows / share
    pairs = S * (S + 1) / 2 + share * (S * T + T * (T + 1) / 2)
    return Work(packed * (S + share * T), rows * T, packed * pairs)


class Flops(NamedTuple):
    """Of a forward, by part."""

    trunk: float | int
    """Projections, routers and feed-forward, but for `down`."""
    down: float | int
    """The last matrix of the feed-forward: its output is not needed to go backward."""
    attention: float | int
    head: float | int

    @property
    def forward(self) -> float | int:
        """All of it."""
        return sum(self)

    def backward(self, *, recomputed: bool) -> float | int:
        """Of the gradient of every input and every parameter.

        The head's forward is always computed again, those of the layers where they are `recomputed`.

        Of attention's five products in the backward pass one forms the probabilities anew, besides the two of a
        forward where that is recomputed.
        """
        again = self.trunk + self.attention if recomputed else 0.0
        return 2 * (self.trunk + self.down) + 2.5 * self.attention + 3 * self.head + again

    @property
    def needed(self) -> float | int:
        """Of forward and backward with nothing computed twice: what a model-flops utilisation counts."""
        return 3 * self.forward


def forward(config: ModelConfig, work: Work) -> Flops:
    """Flops of one forward."""
    D, h, L = config.hidden_size, config.head_dim, config.num_layers
    projections = 2 * D * h * (2 * config.num_heads + 2 * config.num_kv_heads)
    if config.num_experts:
        down = 2 * D * config.moe_intermediate_size * config.experts_per_token
        router = 2 * D * config.num_experts
    else:
        down, router = 2 * D * config.intermediate_size, 0
    return Flops(
        trunk=L * work.tokens * (projections + router + 2 * down),
        down=L * work.tokens * down,
        attention=L * work.pairs * 4 * config.num_heads * h,
        head=work.predictions * 2 * D * config.vocab_size,
    )
