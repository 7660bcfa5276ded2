"""Forward and backward flops by formula: the third count, beside those of a traced and of a compiled program.

A product of [m, k] and [k, n] counts 2·m·k·n flops. Norms, softmaxes and rotary positions are left out, as is usual.
"""

import dataclasses
from typing import NamedTuple

from gspo_jax.models.config import LayerFlops, ModelConfig


@dataclasses.dataclass(frozen=True)
class Work:
    """The size of a forward's input."""

    tokens: float | int
    """Tokens that pass through the layers."""
    predictions: float | int
    """Positions whose logits are computed."""
    pairs: float | int
    """Pairs of a query and a key that it sees, in one layer and one head."""

    def __truediv__(self, parts: int) -> "Work":
        """An equal share of the work."""
        return Work(self.tokens / parts, self.predictions / parts, self.pairs / parts)


class Flops(NamedTuple):
    """Flops of a forward, by part."""

    trunk: float | int
    """Projections, routers and feed-forward, except for `down`."""
    down: float | int
    """The feed-forward's last matrix, whose output the backward pass does not need."""
    attention: float | int
    """Scores and weighted values."""
    head: float | int
    """The unembedding."""
    adapters: float | int = 0
    """Low-rank adapters, which alone are trained; 0: every matrix is."""

    @property
    def forward(self) -> float | int:
        """Flops of the whole forward."""
        return sum(self)

    def backward(self, *, recomputed: bool) -> float | int:
        """Flops of the gradients of every input and every trained parameter.

        The head's forward is always computed again; that of the layers if `recomputed`. Of attention's five products
        in the backward pass, one recomputes the probabilities, in addition to the forward's two under remat.
        """
        again = self.head + (self.trunk + self.attention + self.adapters if recomputed else 0.0)
        return self._gradients + again + self.attention / 2

    @property
    def needed(self) -> float | int:
        """Flops of forward and backward with nothing computed twice: the numerator of model-flops utilisation."""
        return self.forward + self._gradients

    @property
    def _gradients(self) -> float | int:
        """Flops of the backward pass alone: a frozen matrix has one product, for its input, a trained one two."""
        matrices = self.trunk + self.down + self.head
        return (1 if self.adapters else 2) * matrices + 2 * (self.attention + self.adapters)


def of_layer(config: ModelConfig, *, active_width: int, experts: int = 0) -> LayerFlops:
    """Flops of one layer of grouped-query attention and SwiGLU.

    Args:
      config: the model's sizes.
      active_width: inner width that a token passes through: F, or K · F of K experts.
      experts: experts that the router scores; 0 for a dense layer.
    """
    D, h = config.hidden_size, config.head_dim
    projections = 2 * D * h * (2 * config.num_heads + 2 * config.num_kv_heads)
    down = 2 * D * active_width
    return LayerFlops(projections + 2 * D * experts + 2 * down, down, 4 * config.num_heads * h)


def forward(config: ModelConfig, work: Work) -> Flops:
    """Flops of one forward: the layers of every stack, and the head."""
    stacks = config.stacks
    return Flops(
        trunk=sum(stack.layers * work.tokens * stack.flops.trunk for stack in stacks),
        down=sum(stack.layers * work.tokens * stack.flops.down for stack in stacks),
        attention=sum(stack.layers * work.pairs * stack.flops.attention for stack in stacks),
        head=work.predictions * 2 * config.hidden_size * config.vocab_size,
    )


def pair_cost(config: ModelConfig) -> float:
    """Flops of a (query, key) pair relative to those of a token, in all layers and without the head."""
    token, pair = forward(config, Work(1, 0, 0)), forward(config, Work(0, 0, 1))
    return pair.forward / token.forward
