"""Records that flow between packages, frozen.

Shape letters: B = P · G responses to P prompts, a group's G adjacent; S prompt tokens; T response tokens; N = S + T; L
routed layers; K experts per token. All arrays are right-padded. A packed batch has [M, Q] places for its responses
instead of [B]: M mini-batches, and Q / shards places per batch shard. `*B` stands for either, or for [Q].
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int, Shaped

Module = TypeVar("Module", bound=nnx.Module)


_LATER: Any = None
"""Default of fields not filled yet, or unknown."""


@struct.dataclass
class TextRows:
    """Texts of P groups, in tokens, which drafts are copied from."""

    tokens: Int[Array, "P R M"]
    lengths: Int[Array, "P R"]
    """Tokens known so far; 0: none."""


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Tokenised prompts. Only tokens, lengths and earlier responses enter jitted programs."""

    tokens: Int[Array, "P S"]
    """Token ids, int32, right-padded."""
    lengths: Int[Array, " P"]
    """Tokens of each prompt, 1..S."""
    texts: Sequence[str] = _LATER
    records: Sequence[Any] = _LATER
    valid: Bool[np.ndarray, " P"] = _LATER
    """False on rows that pad an evaluation's last batch."""
    earlier: TextRows | None = None
    """Earlier responses to each prompt."""


jax.tree_util.register_dataclass(
    Prompts, data_fields=["tokens", "lengths", "earlier"], meta_fields=[], drop_fields=["texts", "records", "valid"]
)


@struct.dataclass
class RouterRecord:
    """Choices of the L routed layers at every prompt and response position.

    Dense layers have no entry. Experts are -1 where nothing was routed or the routing is unknown: at padding, and at a
    response's last token, which the sampler never feeds. There, replay leaves the choice to the router.
    """

    experts: Int[Array, "*B N L K"]
    """Ids used, own or replayed, most probable first, in the smallest integer dtype."""
    logprobs: Float[Array, "*B N L K"] | None
    """Router log-probs at those experts, float32; None if not requested."""


@struct.dataclass
class Responses:
    """Prompts and responses from any source."""

    prompts: Int[Array, "*B S"]
    """Right-padded; repeated within a group."""
    prompt_lengths: Int[Array, "*B"]
    tokens: Int[Array, "*B T"]
    """EOS included; the padding id after the end."""
    mask: Bool[Array, "*B T"]
    """True on the policy's tokens, EOS included, and on the environment's replies."""


@struct.dataclass
class KeptRecord:
    """Probable ids in each sampled token's place, itself among them, with the sampler's log-probs.

    Unused are entries past a smaller set's last, and those outside the action mask.
    """

    ids: Int[Array, "*B T K"]
    """int32; -1 in unused entries."""
    logprobs: Float[Array, "*B T K"]
    """At the sampling temperature: under the full softmax, or where `whole` renormalised over these ids. 0 in unused
    entries. float32, since bfloat16 rounds a probability of exp(-8) by up to 3%."""
    whole: Bool[Array, "*B T"]
    """True where the ids are all that truncation (top-k, top-p, min-p) left."""


@struct.dataclass
class Rollout(Responses):
    """Sampled responses, with the sampler's log-probs and routes."""

    action_mask: Bool[Array, "*B T"]
    """True on the policy's tokens alone."""
    truncated: Bool[Array, "*B"]
    """True for responses that reached their token limit without an EOS."""
    behaviour_logprobs: Float[Array, "*B T"]
    """Log-probs under the distribution sampled from, after temperature, top-k, top-p and min-p; 0 outside the action
    mask."""
    logprobs: Float[Array, "*B T"]
    """Log-probs as the trainer scores: under the full softmax at the sampling temperature, or where `kept.whole`
    renormalised over the kept ids; 0 outside the action mask."""
    routes: RouterRecord
    kept: KeptRecord | None = None
    """None without `sampling.keep_top`."""


@struct.dataclass
class OldPolicy:
    """A rollout's scores under the policies fixed during an iteration."""

    logprobs: Float[Array, "*B T"]
    """log π_old, by the sampler or the trainer."""
    reference_logprobs: Float[Array, "*B T"] | None = None
    """log π_ref, under the reference's own routing; None without a reference."""
    values: Float[Array, "*B T"] | None = None
    """The critic's estimate before each token; None without a critic."""
    routes: RouterRecord | None = None
    """The trainer's, following the sampler's under r3 and r3w; None unless recomputed."""
    teacher_logprobs: Float[Array, "*B T"] | None = None
    """log π_T; None without a teacher, or if it is compared over the whole vocabulary."""
    flips: Int[Array, "*B T L"] | None = None
    """Experts of the rollout's record, of K, that the trainer's routers would not choose at the position that predicts
    each token; -1 where unknown. None unless recomputed."""
    energy: Float[Array, "*B T"] | None = None
    """`advantages.score_energy` of each token; None unless the advantages need it."""


@struct.dataclass
class Packing:
    """Assignment of responses to rows, for each of M mini-batches.

    Every shard has Q / shards places, one response each, empty ones last. All int32.
    """

    responses: Int[Array, "*M Q"]
    """Number in the batch of each place's response; -1 if empty."""
    kind: Int[Array, "*M Q"]
    """Index into `row_lengths`; meaningless if empty."""
    turn: Int[Array, "*M Q"]
    """Index of the micro-batch within its kind."""
    prompt: Int[Array, "*M Q"]
    """Row offset of the prompt."""
    start: Int[Array, "*M Q"]
    """Row offset of the response."""
    turns: Int[Array, "*M kinds"]
    """Micro-batches of each kind of row."""
    row_lengths: tuple[int, ...] = struct.field(pytree_node=False)
    """Tokens of each kind of row, longest first."""
    size: int = struct.field(pytree_node=False)
    """Responses of a mini-batch."""

    @property
    def slots(self) -> Int[Array, "*M"]:
        """Token slots per shard for each mini-batch."""
        return self.turns @ np.array(self.row_lengths)

    @property
    def places(self) -> Int[np.ndarray, " B"]:
        """Place of each response, counted over all M · Q; on the host."""
        flat = np.asarray(self.responses).reshape(-1)
        live = np.flatnonzero(flat >= 0)
        return live[np.argsort(flat[live])]

    def unseen(self, updates: int) -> Bool[np.ndarray, " B"]:
        """Return the responses that none of the first `updates` mini-batches has; on the host."""
        responses = np.asarray(self.responses)
        return np.isin(np.arange((responses >= 0).sum()), responses[:updates], invert=True)

    def in_order(self, tree: Any) -> Any:
        """Reorder host arrays of places, [M, Q, …], to the batch's order, [B, …]."""
        places = self.places
        return jax.tree.map(lambda x: np.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))[places], tree)


@struct.dataclass(kw_only=True)
class Rewards:
    """Rewards: NumPy arrays, the same in every process, until they enter a jitted program."""

    total: Float[np.ndarray, "*B"]
    """Weighted sum of the reward functions; NaN if one of them, or of the step rewards, failed: no score."""
    learn: Bool[np.ndarray, "*B"]
    """False for responses that carry no gradient. Scored ones still count in their group's baseline."""
    by_name: dict[str, Float[np.ndarray, " B"]] = dataclasses.field(default_factory=dict)
    """Score of each reward function, mean per step for step-reward functions; NaN without a score."""
    without_worker: Bool[np.ndarray, " B"] | None = None
    """True for responses scored without a worker process; None if no function is isolated."""
    failed: dict[str, Bool[np.ndarray, " B"]] = dataclasses.field(default_factory=dict)
    """True where a reward function was asked and has no score."""
    of_steps: Float[np.ndarray, "*B T"] | None = None
    """Weighted reward of a step at its last token, 0 elsewhere."""
    steps: Bool[np.ndarray, "*B T"] | None = None
    """True at tokens that end a step."""
    turn_ends: Int[np.ndarray, "*B turns"] | None = None
    """Tokens up to the end of each turn, 0 past the last; None without an environment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """An iteration's responses and everything learned from them, filled in step by step.

    Rewards and the columns [B] are NumPy arrays, the same in every process, which jitted programs do not see.
    Everything else is on the devices.
    """

    rollout: Rollout
    """[B, …], then [M, Q, …] once packed, with zeros in empty places."""
    texts: Shaped[np.ndarray, " B"] = _LATER
    """The prompts."""
    records: Shaped[np.ndarray, " B"] = _LATER
    """Data record of each prompt, with its answer."""
    prompt_lengths: Int[np.ndarray, " B"] = _LATER
    lengths: Int[np.ndarray, " B"] = _LATER
    """Tokens of each response, an environment's replies included."""
    drawn: Int[np.ndarray, " B"] = _LATER
    """Sampled tokens of each response."""
    truncated: Bool[np.ndarray, " B"] = _LATER
    """True for responses cut off at the length limit."""
    turns: Int[np.ndarray, " B"] = _LATER
    """Turns of the policy."""
    stale_tokens: Int[np.ndarray, " B"] = _LATER
    """Tokens sampled by older policies (partial rollouts)."""
    failed: Bool[np.ndarray, " B"] = _LATER
    """True for episodes whose environment failed, which have no score."""
    turn_ends: Int[np.ndarray, "B turns"] | None = None
    """Tokens up to the end of each of the policy's turns, 0 past the last; None without an environment."""
    turn_rewards: Float[np.ndarray, "B turns"] | None = None
    """The environment's reward of each turn, NaN where it gave none; None if it gives no rewards."""
    rewards: Rewards = _LATER
    packing: Packing = _LATER
    """Set by `Engine.pack`, which deals the rollout to its places."""
    old: OldPolicy = _LATER
    mask: Bool[Array, "*M Q T"] = _LATER
    """Tokens to learn from: the action mask, without filtered-out responses."""
    advantages: Float[Array, "*M Q"] | Float[Array, "*M Q T"] = _LATER
    """Â of each response, or of each token."""
    returns: Float[Array, "*M Q T"] | None = None
    """The critic's target before each token."""
    correction: Float[Array, "*M Q T"] | None = None
    """Weight of each token, for sampler–trainer mismatch."""

    @property
    def routes(self) -> RouterRecord:
        """Routes under the old policy: the trainer's if recorded, otherwise the sampler's."""
        return self.rollout.routes if self.old.routes is None else self.old.routes

    def minibatch(self, index: Array | int) -> "Batch":
        """Return the device arrays of one mini-batch, in its places [Q, …]."""
        return jax.tree.map(lambda x: x[index], self)


HOST_COLUMNS = (
    "texts",
    "records",
    "prompt_lengths",
    "lengths",
    "drawn",
    "truncated",
    "turns",
    "stale_tokens",
    "failed",
    "turn_ends",
    "turn_rewards",
    "rewards",
)

jax.tree_util.register_dataclass(
    Batch,
    data_fields=[field.name for field in dataclasses.fields(Batch) if field.name not in HOST_COLUMNS],
    meta_fields=[],
    drop_fields=HOST_COLUMNS,
)


@struct.dataclass
class Weights:
    """A policy's parameters in two disjoint parts."""

    trainable: nnx.State
    """Parameters with gradients and optimizer state, stored in checkpoints; float32 in the trainer. Buffers beside them
    have gradients of zero."""
    frozen: nnx.State
    """Changed by no update, such as an adapter's base; empty in full training."""

    @classmethod
    def full(cls, params: nnx.State) -> "Weights":
        return cls(params, nnx.State({}))

    @property
    def whole(self) -> nnx.State:
        return nnx.merge_state(self.trainable, self.frozen)

    def model(self, graph: nnx.GraphDef[Module]) -> Module:
        return nnx.merge(graph, self.trainable, self.frozen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of a sweep that one report compares, from `get_sweep` of a config file."""

    runs: Sequence[Mapping[str, Any]]
    """Config fields that each run changes, by dotted name."""
    seeds: int = 1
    """Seeds of each run, counted from the config's."""
    panels: str = "training"
    """Page of the report: "training" or "routing"."""
    name: str = ""
    """Folder of the runs and their report, below the sweep's; needed if a sweep has several comparisons."""
    title: str = ""
    """Heading of the table; empty: the name."""


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """Sampling time and work since the sampler last loaded weights."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    """Decode steps of the slowest shard in each call."""
    slot_steps: int = 0
    """Decode steps times slots, summed over shards."""
    filled: float = 0.0
    """Share of the pools with live keys, summed over slot-steps."""
    decode_tokens: int = 0
    sampled_tokens: int = 0
    """Including each response's first token, sampled by prefill."""
    busy_steps: int = 0
    """Slot-steps that sampled a token, or several by drafts."""
    drafted: int = 0
    accepted: int = 0
    """Drafts fed, and of these right ones."""
    kept: float = 0.0
    """As in `DecodeStats`, summed over shards."""

    @property
    def occupancy(self) -> float:
        """Fraction of slot-steps that sampled a token; 1 before any decode step."""
        return self.busy_steps / self.slot_steps if self.slot_steps else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a slot with a response samples in a step; 1 without drafts."""
        return self.decode_tokens / self.busy_steps if self.busy_steps else 1.0

    @property
    def acceptance(self) -> float:
        """Share of the drafts fed that were right; 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def kept_share(self) -> float:
        """Mean of `kept` over sampled tokens; 1 before any."""
        return self.kept / self.sampled_tokens if self.sampled_tokens else 1.0

    @property
    def pool(self) -> float:
        """Mean share of the pools that holds live keys; 1 before any decode step."""
        return self.filled / self.slot_steps if self.slot_steps else 1.0
