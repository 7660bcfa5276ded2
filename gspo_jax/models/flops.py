"""Forward and backward flops by formula, in addition to counts of traced and compiled programs.

A product of [m, k] and [k, n] counts 2·m·k·n. Norms, softmaxes and rotary positions are left out, as is usual.
"""

import dataclasses
from typing import NamedTuple

from gspo_jax.kernels import delta_rule
from gspo_jax.models.config import ModelConfig


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
    """The feed-forward's last matrix, of layers that are rematerialised alone or last: nothing needs its output."""
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


def forward(config: ModelConfig, work: Work, *, is_step: bool = False) -> Flops:
    """Return the flops of one forward through layers of attention, or the delta rule in chunks, and SwiGLU.

    Args:
      is_step: of a decode step, where queries of latent attention meet latents, in place of expanded keys and values.
    """
    D, trunk, down, attention = config.hidden_size, 0, 0, 0
    for stack, is_last in ((stack, stack is run[-1]) for run in config.runs for stack in run):
        if stack.state is None:
            projections, pair = _latent(config, is_step=is_step) if config.latent else _attention(config)
            attention += stack.layers * work.pairs * pair
        else:
            projections, token = _delta_rule(config)
            attention += stack.layers * work.tokens * token
        trunk += stack.layers * work.tokens * (projections + 2 * D * (stack.experts + 2 * stack.active_width))
        last_matrix = stack.layers * work.tokens * 2 * D * stack.active_width
        trunk, down = (trunk, down + last_matrix) if is_last else (trunk + last_matrix, down)
    return Flops(trunk, down, attention, head=work.predictions * 2 * D * config.vocab_size)


def _attention(config: ModelConfig) -> tuple[int, int]:
    """Return a layer's flops of a token's projections, and of a (query, key) pair in all heads."""
    D, H, h = config.hidden_size, config.num_heads, config.head_dim
    gates = H * config.is_recurrent  # beside the delta rule, attention is gated
    return 2 * D * h * (2 * H + gates + 2 * config.num_kv_heads), 4 * H * h


def _latent(config: ModelConfig, *, is_step: bool) -> tuple[int, int]:
    """Return those of latent attention."""
    D, H, h, latent = config.hidden_size, config.num_heads, config.head_dim, config.latent
    assert latent is not None
    own, cached = latent.plain_dim + h, config.cached.key_dim
    queries = D * H * own if latent.query_rank is None else latent.query_rank * (D + H * own)
    # A step's kv_b takes as many, in its queries and outputs. It weighs whole cached keys, rotary part and all.
    keys = D * cached + latent.rank * H * (latent.plain_dim + latent.value_dim)
    pair = 2 * cached if is_step else own + latent.value_dim
    return 2 * (queries + keys + H * latent.value_dim * D), 2 * H * pair


def _delta_rule(config: ModelConfig) -> tuple[int, float]:
    """Return a layer's flops of a token's projections, and of the rule in all heads."""
    keys, values = config.linear_key_heads, config.linear_value_heads
    dk, dv = config.linear_key_dim, config.linear_value_dim
    projections = 2 * config.hidden_size * (2 * keys * dk + 3 * values * dv + 2 * values)
    return projections, values * delta_rule.flops(dk, dv, values // keys)


def pair_cost(config: ModelConfig) -> float:
    """Return the flops of a (query, key) pair relative to a token's, without the head."""
    token, pair = forward(config, Work(1, 0, 0)), forward(config, Work(0, 0, 1))
    return pair.forward / token.forward
