"""Records that flow between packages: frozen and documented field by field, with shapes.

Shape letters: B = P · G rows for P prompts and G responses each, the rows of a group adjacent; S prompt tokens;
T response tokens; N = S + T; L routed layers, i.e. those with a router; K experts per token. All arrays are
right-padded.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int, Shaped

Module = TypeVar("Module", bound=nnx.Module)


@struct.dataclass
class Prompts:
    """A batch of tokenised prompts."""

    tokens: Int[Array, "P S"]
    """Token ids, right-padded."""
    lengths: Int[Array, " P"]
    """Number of tokens in each prompt, 1..S."""


@struct.dataclass
class RouterRecord:
    """Choices of the L routed layers at every prompt and response position, N = S + T.

    Dense layers of a mixed model have no entry; L = K = 0 for a dense model.

    Experts are -1 where nothing was routed or the routing is unknown: at padding, and at a response's last token, which
    the sampler never feeds to the model. At these positions replay leaves the choice to the router.
    """

    experts: Int[Array, "B N L K"]
    """Expert ids used, most probable first: the router's own choice, or the replayed one. Smallest integer dtype that
    holds them."""
    logprobs: Float[Array, "B N L K"] | None
    """Log-softmax of the router at those experts, float32; None if not requested."""


@struct.dataclass
class Responses:
    """Prompts and responses, from any source: the input of scoring."""

    prompts: Int[Array, "B S"]
    """Prompt of each row (repeated within a group), right-padded."""
    prompt_lengths: Int[Array, " B"]
    """Number of tokens in each prompt."""
    tokens: Int[Array, "B T"]
    """Response token ids, EOS included; the padding id after the end."""
    mask: Bool[Array, "B T"]
    """True on response tokens: the policy's, EOS included, and the environment's replies between them."""


@struct.dataclass
class Rollout(Responses):
    """Sampled responses, with the sampler's log-probs and expert choices."""

    action_mask: Bool[Array, "B T"]
    """True on the tokens sampled from the policy: `mask` without an environment's tokens."""
    truncated: Bool[Array, " B"]
    """True for responses that reached their token limit without an EOS."""
    behaviour_logprobs: Float[Array, "B T"]
    """Log-prob of each token under the behaviour policy, i.e. the distribution it was actually sampled from, including
    temperature, top-k, top-p and min-p; 0 outside the action mask."""
    logprobs: Float[Array, "B T"]
    """Log-prob of each token under the same weights' full softmax at the sampling temperature, which the trainer's
    scoring must agree with; 0 outside the action mask."""
    routes: RouterRecord
    """Experts the sampler's routers chose for prompt and response."""


@struct.dataclass
class OldPolicy:
    """Log-probs, values and routes of a rollout under the policies that stay fixed during an iteration."""

    logprobs: Float[Array, "B T"]
    """log π_old of the sampled tokens, by the sampler or by the trainer, depending on the config."""
    reference_logprobs: Float[Array, "B T"] | None = None
    """log π_ref of the sampled tokens, under the reference policy's own routing; None without a reference policy."""
    values: Float[Array, "B T"] | None = None
    """The critic's value estimate before each token; None without a critic."""
    routes: RouterRecord | None = None
    """Routes of the trainer's forward pass under the old policy, which under r3 follow the sampler's; None unless
    recomputed."""


@struct.dataclass
class Packing:
    """Rows that compute the responses of each of N mini-batches.

    Every shard has Q / shards places, each for a response; places without one come last. Arrays are int32.
    """

    responses: Int[Array, "N Q"]
    """Response in each place, counted within the mini-batch; -1 if the place is empty."""
    places: Int[Array, "N B"]
    """The inverse: place of each response of the mini-batch."""
    kind: Int[Array, "N Q"]
    """Index into `row_lengths` of the row that holds it; meaningless if the place is empty."""
    turn: Int[Array, "N Q"]
    """Number of that row's micro-batch among those of its kind."""
    prompt: Int[Array, "N Q"]
    """Offset in the row of the first token of the response's prompt."""
    start: Int[Array, "N Q"]
    """Offset in the row of the response's first token."""
    turns: Int[Array, "N kinds"]
    """Micro-batches of each kind of row."""
    row_lengths: tuple[int, ...] = struct.field(pytree_node=False)
    """Tokens of a row of each kind, longest first."""

    @property
    def slots(self) -> Int[Array, " N"]:
        """Token slots that each shard executes for each mini-batch."""
        return self.turns @ np.array(self.row_lengths)


@struct.dataclass
class Experience:
    """A rollout with everything the update learns from it."""

    rollout: Rollout
    mask: Bool[Array, "B T"]
    """True on the tokens to learn from: the action mask, without rows that are filtered out."""
    old: OldPolicy
    """The fixed policies' view of the rollout."""
    advantages: Float[Array, " B"] | Float[Array, "B T"]
    """Â of each response, or of each token."""
    returns: Float[Array, "B T"] | None = None
    """The critic's regression target before each token; None without a critic."""
    correction: Float[Array, "B T"] | None = None
    """Weight of each token that corrects for the mismatch between sampler and trainer; None without a correction."""
    packing: Packing | None = None
    """Rows that compute the responses; None before the batch is packed."""

    @property
    def routes(self) -> RouterRecord:
        """Routes under the old policy: the trainer's if recorded, otherwise the sampler's."""
        return self.rollout.routes if self.old.routes is None else self.old.routes


@struct.dataclass
class Weights:
    """A policy's parameters in two disjoint parts; together they hold every parameter of its graph."""

    trainable: nnx.State
    """Parameters with gradients and optimizer state, stored in checkpoints; float32 in the trainer."""
    frozen: nnx.State
    """Parameters that no update changes, such as the base of an adapter; empty in full training."""

    @classmethod
    def full(cls, params: nnx.State) -> "Weights":
        """Weights with all parameters trainable."""
        return cls(params, nnx.State({}))

    @property
    def whole(self) -> nnx.State:
        """Both parts as one tree."""
        return nnx.merge_state(self.trainable, self.frozen)

    def model(self, graph: nnx.GraphDef[Module]) -> Module:
        """The module that `graph` describes, with these parameters."""
        return nnx.merge(graph, self.trainable, self.frozen)


class EpisodeBatch(NamedTuple):
    """A batch of finished episodes: the rollout on the devices, all other fields on the host, one entry per row."""

    rollout: Rollout
    """The responses."""
    texts: Shaped[np.ndarray, " B"]
    """Prompt text of each response."""
    records: Shaped[np.ndarray, " B"]
    """Data record of each prompt, such as its answer."""
    turns: Int[np.ndarray, " B"]
    """Turns the policy took."""
    stale_tokens: Int[np.ndarray, " B"]
    """Tokens sampled by policies older than the current one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of a sweep that one report compares, from `get_sweep` of a config file."""

    runs: Sequence[Mapping[str, Any]]
    """Fields that each run changes in the config, by dotted name."""
    seeds: int = 1
    """Seeds of each run, counted from the config's."""
    panels: str = "training"
    """Page of the report: "training" or "routing"."""
    name: str = ""
    """Folder of the runs, and of their report, below the sweep's; needed if a sweep has several comparisons."""
    title: str = ""
    """Heading of the table; empty: the name."""


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """Sampling time and work since the sampler last loaded weights."""

    prefill_s: float = 0.0
    """Wall-clock seconds spent in prefill."""
    decode_s: float = 0.0
    """Wall-clock seconds spent in the decode loop."""
    steps: int = 0
    """Decode steps, of the shard that took the most in each call."""
    slot_steps: int = 0
    """Decode steps times slots, summed over shards."""
    decode_tokens: int = 0
    """Tokens sampled by the decode loop."""
    sampled_tokens: int = 0
    """All sampled tokens: those of the decode loop, and the first of each response, which prefill samples."""

    @property
    def occupancy(self) -> float:
        """Fraction of slot-steps that sampled a token; 1 before any decode step."""
        return self.decode_tokens / self.slot_steps if self.slot_steps else 1.0
