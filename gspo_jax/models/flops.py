"""Forward and backward flops by formula, in addition to counts of traced and compiled programs.

A product of [m, k] and [k, n] counts 2·m·k·n. Norms, softmaxes and rotary positions are left out, as is usual.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax

from gspo_jax.kernels import delta_rule
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.transformer import abstract


@dataclasses.dataclass(frozen=True)
class Work:
    """The size of a forward's input."""

    tokens: float | int
    predictions: float | int
    """Positions with logits."""
    pairs: float | int
    """Visible (query, key) pairs in one layer and one head."""

    def __truediv__(self, parts: int) -> "Work":
        """Return an equal share of the work."""
        return Work(self.tokens / parts, self.predictions / parts, self.pairs / parts)


class Flops(NamedTuple):
    """Forward flops by part."""

    trunk: float | int
    """Projections, routers and feed-forward, except for `down`."""
    down: float | int
    """The feed-forward's last matrix. The backward pass does not need its output."""
    attention: float | int
    head: float | int
    adapters: float | int = 0
    """Low-rank adapters. If any, they alone are trained."""
    beside: float | int = 0
    """A teacher in an update, with all that comparing it over the vocabulary takes."""

    @property
    def forward(self) -> float | int:
        """Total flops."""
        return sum(self)

    def backward(self, *, recomputed: bool) -> float | int:
        """Return the flops of the gradients of every input and every trained parameter.

        The head's forward is always recomputed, the layers' only if `recomputed`. One of attention's five backward
        products recomputes the probabilities, in addition to the forward's two under remat.
        """
        again = self.head + (self.trunk + self.attention + self.adapters if recomputed else 0.0)
        return self._gradients + again + self.attention / 2

    @property
    def needed(self) -> float | int:
        """Forward and backward with nothing computed twice: the numerator of model-flops utilisation."""
        return self.forward + self._gradients

    @property
    def _gradients(self) -> float | int:
        """One product per frozen matrix, for its input, two per trained one."""
        matrices = self.trunk + self.down + self.head
        return (1 if self.adapters else 2) * matrices + 2 * (self.attention + self.adapters)


def forward(config: ModelConfig, work: Work) -> Flops:
    """Return the flops of one forward through layers of attention, or the delta rule in chunks, and SwiGLU."""
    D, stacks, projections = config.hidden_size, config.stacks, _projections(config)
    pair, token, values = 4 * config.num_heads * config.head_dim, 0.0, config.linear_value_heads
    if config.is_recurrent:
        dims = config.linear_key_dim, config.linear_value_dim
        token = values * delta_rule.flops(*dims, values // config.linear_key_heads)
    return Flops(
        trunk=sum(
            s.layers * work.tokens * (2 * own + 2 * D * (s.experts + 2 * s.active_width))
            for s, own in zip(stacks, projections, strict=True)
        ),
        down=sum(s.layers * work.tokens * (2 * D * s.active_width) for s in stacks),
        attention=sum(s.layers * (work.pairs * pair if s.state is None else work.tokens * token) for s in stacks),
        head=work.predictions * 2 * D * config.vocab_size,
    )


@functools.cache
def _projections(config: ModelConfig) -> list[int]:
    """Return the entries of the matrices of one layer's mixer, of each stack."""
    _, shapes = abstract(config)
    return [
        sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(block["attention"]) if leaf.ndim == 3)
        for _, block in sorted(dict(shapes["layers"]).items())
    ]


def pair_cost(config: ModelConfig) -> float:
    """Return the flops of a (query, key) pair relative to a token's, without the head."""
    token, pair = forward(config, Work(1, 0, 0)), forward(config, Work(0, 0, 1))
    return pair.forward / token.forward
