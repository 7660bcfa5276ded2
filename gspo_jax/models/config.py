"""Model shapes, stacks of equal layers, and the declaration of a parameter."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from gspo_jax.errors import UserError, choices
from gspo_jax.parallel import mesh as mesh_lib

Kind = TypeVar("Kind", bound=Hashable)

FAMILIES: dict[str, Any] = {}
"""By file name. Filled by `models/families`."""


def plain_frequencies(theta: float, head_dim: int) -> Float[Array, " half"]:
    """Return theta^(-2i/h), i from 0 to h/2 - 1."""
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Rotary frequencies stretched for long contexts, as in Llama 3.1: f becomes f / `factor` below a band of
    frequencies, stays above it, and is mixed linearly inside.
    """

    factor: float
    low_freq_factor: float
    """The band begins where `original_max_position_embeddings` positions are this many turns, …"""
    high_freq_factor: float
    """… and ends here."""
    original_max_position_embeddings: int

    amplitude = 1.0
    latent_growth = 1.0

    def frequencies(self, theta: float, head_dim: int) -> Float[Array, " half"]:
        """Return `plain_frequencies`, stretched."""
        plain = plain_frequencies(theta, head_dim)
        turns = plain * (self.original_max_position_embeddings / (2 * math.pi))
        kept = jnp.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope:
    """Rotary frequencies stretched for long contexts by YaRN (arXiv 2309.00071): f becomes f / `factor` from one pair
    of a head's columns on, stays above it until another, and is mixed linearly, by the pair's number, between them.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    """The mixed pairs begin with the one that turns this often in `original_max_position_embeddings` positions, …"""
    beta_slow: float = 1.0
    """… and end with the one that turns this often."""
    truncate: bool = True
    """Both are made whole numbers, outwards."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """Growth of attention with the logarithm of `factor`. Latent attention takes this one for its scores."""
    attention_factor: float | None = None
    """Amplitude of the rotation; None: from `factor` and both of the above."""

    @property
    def amplitude(self) -> float:
        """By which cosine and sine are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def latent_growth(self) -> float:
        """By which latent attention multiplies its scores, beside the amplitude."""
        return self._growth(self.mscale_all_dim or 0.0) ** 2

    def _growth(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, theta: float, head_dim: int) -> Float[Array, " half"]:
        """Return `plain_frequencies`, stretched."""

        def pair(turns: float) -> float:
            """Return the number, with a fraction, of the pair that makes so many turns."""
            wanted = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return head_dim * math.log(wanted) / (2 * math.log(theta))

        plain, first, last = plain_frequencies(theta, head_dim), pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001
        stretched = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - first) / width, 0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)


Rope = Llama3Rope | YarnRope
"""Rotary positions stretched for long contexts: `frequencies`, `amplitude` of the rotation, and `latent_growth`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention (`models/latent.py`), beside the width of a head's rotary part: `head_dim`.

    There are as many heads of keys and values as of queries.
    """

    rank: int
    """Width r of the latent that keys and values are made of."""
    query_rank: int | None
    """Width of the latent that queries are made of. None: they are made of the residual stream."""
    plain_dim: int
    """Width of the part of a head's query and key without positions."""
    value_dim: int
    """Width of a head's value."""
    interleaved: bool
    """True if the rotary pairs are adjacent columns. Else they are half a head apart."""


class Cached(NamedTuple):
    """What a cache holds of a token."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    """0: the keys are the values too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants that change a model's computation."""

    family: str = "qwen3"
    """File in `models/families`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Unused by an all-MoE model, kept for the Hugging Face config."""
    latent: Latent | None = None
    """None: attention with grouped keys and values."""
    num_experts: int = 0
    """Per routed layer; 0 for a dense model."""
    dense_layers: int = 0
    """Dense layers before the routed ones."""
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    """Make the chosen experts' weights sum to one."""
    expert_groups: int = 1
    """Groups of adjacent experts. A sigmoid router first chooses among these, as in DeepSeek-V3."""
    groups_per_token: int = 1
    """Groups that a token's experts are chosen from."""
    routed_scaling_factor: float = 1.0
    """A sigmoid router's factor of the chosen experts' weights."""
    shared_intermediate_size: int = 0
    """Inner width of a routed layer's shared experts, which every token passes, all side by side; 0: none."""
    rope_theta: float = 1e6
    rope_scaling: Rope | None = None
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions, its first, that positions turn."""
    qk_norm: bool = False
    """Norm queries and keys, in a family where only some models do (GLM-4.5)."""
    attention_bias: bool = False
    """Give queries, keys and values a bias; in latent attention latents and outputs, but not queries made directly."""
    attention_multiplier: float | None = None
    """Factor of q·k in attention; None: 1 / √head_dim."""
    embedding_multiplier: float = 1.0
    """Factor of embedded tokens, as are the next two of Granite's."""
    residual_multiplier: float = 1.0
    """Factor of a layer's two outputs before they are added to the residual stream."""
    logits_scaling: float = 1.0
    """Divisor of logits."""
    rms_norm_eps: float = 1e-6
    zero_centred_norms: bool = False
    """Norms multiply by one plus their weight."""
    layer_types: tuple[str, ...] = ()
    """Each layer's mixer, "linear_attention" (the gated delta rule) or "full_attention"; (): all are alike."""
    linear_key_heads: int = 0
    """Heads of keys, and of queries, of linear attention; the next of values, and the width of both kinds."""
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv_width: int = 4
    """Tokens that the convolution before linear attention sees, the newest among them."""
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Raise a UserError for inconsistent sizes."""
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                f"use num_kv_heads of {', '.join(map(str, mesh_lib.divisors(self.num_heads)))}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs, use an even number")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise UserError(
                f"partial_rotary_factor {self.partial_rotary_factor:g} turns {self.rotary_dim} of the {self.head_dim} "
                "dimensions of a head; use one up to 1 that turns an even number"
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"experts_per_token {self.experts_per_token} is outside 1 to num_experts {self.num_experts}; "
                "choose one inside"
            )
        if self.latent is not None and self.num_kv_heads != self.num_heads:
            raise UserError(
                f"num_kv_heads {self.num_kv_heads} is not num_heads {self.num_heads}, and latent attention makes keys "
                "and values for every head; set it to the same"
            )
        if not 0 <= self.dense_layers <= self.num_layers:
            raise UserError(
                f"dense_layers {self.dense_layers} is outside 0 to num_layers {self.num_layers}; choose one"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        groups, chosen = self.expert_groups, self.groups_per_token
        if not 1 <= chosen <= groups:
            raise UserError(f"groups_per_token {chosen} is outside 1 to expert_groups {groups}; choose one inside")
        if groups == 1:
            return
        if self.num_experts % groups or self.num_experts < 2 * groups:
            most = [n for n in mesh_lib.divisors(self.num_experts) if 2 * n <= self.num_experts]
            raise UserError(
                f"expert_groups {groups} does not divide the {self.num_experts} experts into groups of two or more; "
                f"use one of {', '.join(map(str, most))}"
            )
        if chosen * self.num_experts // groups < self.experts_per_token:
            raise UserError(
                f"groups_per_token {chosen} has {chosen * self.num_experts // groups} experts to choose "
                f"{self.experts_per_token} from; use {-(-self.experts_per_token * groups // self.num_experts)} or more"
            )

    @property
    def stacks(self) -> tuple["Stack", ...]:
        """The layers as the family stacks them.

        Raises:
          UserError: no family has this name.
        """
        if self.family not in FAMILIES:
            raise UserError(f"unknown model family {self.family!r}; {choices(self.family, FAMILIES)}")
        return FAMILIES[self.family].stacks(self)

    @property
    def runs(self) -> tuple[tuple["Stack", ...], ...]:
        """Stacks by the scan that runs them: one alone, or those whose layers alternate."""
        stacks, runs = list(self.stacks), []
        while stacks:
            runs.append(tuple(stacks[: stacks[0].turns]))
            del stacks[: stacks[0].turns]
        return tuple(runs)

    @property
    def layer_numbers(self) -> tuple[range, ...]:
        """The layers of each stack, counted from the model's first."""
        first, found = 0, []
        for run in self.runs:
            end = first + sum(stack.layers for stack in run)
            found += [range(first + i, end, len(run)) for i in range(len(run))]
            first = end
        return tuple(found)

    @property
    def is_recurrent(self) -> bool:
        """True if any layer keeps a state of each text in place of keys and values."""
        return any(stack.state is not None for stack in self.stacks)

    def norm_scale(self, weight: Array) -> Array:
        """Return the factor of a norm with this weight."""
        return 1 + weight if self.zero_centred_norms else weight

    @property
    def norm_init(self) -> Callable[..., Any]:
        """The initialiser of norms' weights."""
        return zeros if self.zero_centred_norms else ones

    @property
    def routed_layers(self) -> int:
        """L, the leading dimension of routes, load and drift; 0 for a dense model."""
        return sum(stack.layers for stack in self.stacks if stack.is_routed)

    @property
    def is_routed(self) -> bool:
        """True if any layer has a router."""
        return self.routed_layers > 0

    @property
    def route_shape(self) -> tuple[int, int]:
        """[L, K], routed layers and experts per token; (0, 0) for a dense model."""
        return (self.routed_layers, self.experts_per_token) if self.is_routed else (0, 0)

    @property
    def expert_dtype(self) -> np.dtype:
        """The smallest signed integer dtype for expert ids and -1."""
        return np.min_scalar_type(-max(self.num_experts, 1))

    @property
    def cached(self) -> "Cached":
        """What the decoder's cache holds of a token."""
        if (latent := self.latent) is not None:
            return Cached(self.num_layers, 1, latent.rank + self.head_dim, 0)
        layers = sum(stack.layers for stack in self.stacks if stack.state is None)
        return Cached(layers, self.num_kv_heads, self.head_dim, self.head_dim)

    def rope_frequencies(self) -> Float[Array, " half"]:
        """Return the radians per position by which the pairs of a head turn."""
        kind = plain_frequencies if self.rope_scaling is None else self.rope_scaling.frequencies
        return kind(self.rope_theta, self.rotary_dim)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that positions turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def rope_amplitude(self) -> float:
        """By which rotations multiply what they turn."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.amplitude

    def check_mesh(self, sizes: dict[str, int], *, frozen: bool = False) -> None:
        """Raise a UserError if a mesh axis does not divide its dimension.

        A `frozen` dense model may share a mesh with a mixture of experts: its columns are spread over `expert`.
        """
        if not self.is_routed and sizes["expert"] > 1 and not frozen:
            raise UserError(f"mesh axis expert = {sizes['expert']} but the model is dense; use expert = 1")
        routed = [stack for stack in self.stacks if stack.is_routed]
        ranks = () if self.latent is None else (self.latent.rank, self.latent.query_rank)
        split: dict[str, list[tuple[str, int]]] = {
            "tensor": [
                ("number of heads", self.num_heads),
                ("number of key/value heads", self.num_kv_heads),
                ("vocabulary size", self.vocab_size),
                *(("feed-forward width", stack.width) for stack in self.stacks),
                *(("shared experts' width", stack.shared_width) for stack in routed),
                ("number of linear attention's key heads", self.linear_key_heads),
                ("number of linear attention's value heads", self.linear_value_heads),
            ],
            "fsdp": [("hidden size", self.hidden_size), *(("width of latents", rank) for rank in ranks if rank)],
            "expert": [("number of experts", stack.experts) for stack in routed],
        }
        for axis, dimensions in split.items():
            for what, size in dimensions:
                if size % sizes[axis]:
                    raise UserError(
                        f"mesh axis {axis} = {sizes[axis]} does not divide the {what} {size}; "
                        f"use one of {', '.join(map(str, mesh_lib.divisors(size)))}"
                    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Consecutive layers of equal shapes, run by one scan."""

    layers: int
    attention: Callable[..., nnx.Module]
    """Called as `attention(config, stack, rngs=…)`."""
    feed_forward: Callable[..., nnx.Module]
    """Called as `feed_forward(config, stack, dispatch, rngs=…)`."""
    width: int
    """Inner width F of the feed-forward, or of one expert."""
    experts: int = 0
    """Per layer; 0 for dense layers."""
    experts_per_token: int = 0
    shared_width: int = 0
    """Inner width of the experts that every token passes beside routed ones; 0: none."""
    state: Callable[..., Any] | None = None
    """`state(config, dtype)` returns the shapes of a text's state in one layer; None: layers keep keys and values."""
    turns: int = 1
    """Number of stacks, this one among them, whose layers alternate: one of each, then the next of each, …"""

    @property
    def is_routed(self) -> bool:
        """True if the layers have a router."""
        return self.experts > 0

    @property
    def active_width(self) -> int:
        """Inner width per token: K · F and that of shared experts if routed, F if dense."""
        return self.width * self.experts_per_token + self.shared_width if self.is_routed else self.width


def periods(kinds: Sequence[Kind]) -> list[tuple[tuple[Kind, ...], int]]:
    """Return patterns of layers that repeat, and how often, from the first layer to the last.

    Each is the one that covers most of the layers left, the shortest of equals: one for a model whose layers alternate
    throughout.
    """
    kinds, found = list(kinds), []
    while kinds:
        best, covered = 1, 0
        for size in range(1, len(kinds) // 2 + 1):
            same = next((i for i in range(size, len(kinds)) if kinds[i] != kinds[i - size]), len(kinds))
            times = same // size
            if (times > 1 or size == 1) and size * times > covered:
                best, covered = size, size * times
        covered = covered or 1
        found.append((tuple(kinds[:best]), covered // best))
        del kinds[:covered]
    return found


STDDEV = 0.02
"""Standard deviation of new matrices."""


def normal(stddev: float = STDDEV) -> Callable[..., jax.Array]:
    """Return the initialiser of matrices, a plain normal."""
    return jax.nn.initializers.normal(stddev)


ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    init: Callable[..., Any] | None = None,
    *,
    float32: bool = False,
    kind: type[nnx.Param] = nnx.Param,
) -> nnx.Param[jax.Array]:
    """Declare a parameter: shape, logical axes (see parallel/mesh.py) and initialiser.

    The trainer stores float32. `float32` marks parameters that trainer and sampler read in float32, whatever the
    compute dtype. `kind` tells trained parameters from others.
    """
    return kind((init or normal())(rngs.params(), shape, jnp.float32), axes=axes, float32=float32)


def dotted(key: jax.tree_util.KeyPath) -> str:
    """Return a path like "layers.0.mlp.gate". A leaf's last key is the value inside its nnx.Param."""
    return jax.tree_util.keystr(key[:-1], simple=True, separator=".")


def by_path(params: nnx.State) -> dict[str, Any]:
    """Return leaves by path."""
    return {dotted(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(params)}
