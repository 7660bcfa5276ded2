"""The pytrees that flow between parts: frozen, documented field by field, with shapes.

B rows = P prompts x G responses, the rows of a group adjacent; S prompt slots; T response tokens; L layers; K experts
per token. Every array is right padded.
"""

import difflib
from collections.abc import Iterable
from typing import TypeVar

from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

Module = TypeVar("Module", bound=nnx.Module)


class UserError(ValueError):
    """Something the user can mend: one sentence with the value, the limit and the remedy.

    Entry points print it alone, without a traceback.
    """


def choices(name: str, known: Iterable[str]) -> str:
    """The end of an error message about a name that is not among `known`: the nearest one, and all there are."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"there are {', '.join(names)}"


@struct.dataclass
class Prompts:
    """A batch of tokenised prompts."""

    tokens: Int[Array, "P S"]
    """Token ids, right padded."""
    lengths: Int[Array, " P"]
    """Real tokens of each prompt, 1..S."""


@struct.dataclass
class RouterRecord:
    """What a router did at every position of prompts and responses, N = S + T of them.

    -1 stands where nothing was routed or it is not known: at padding, and at a response's last token, which a sampler
    never feeds. Replay lets the router choose there.
    """

    experts: Int[Array, "B N L K"]
    """The experts that were used: its choice, most probable first, or what was replayed. In the smallest integer."""
    logprobs: Float[Array, "B N L K"] | None
    """log softmax of the router at those experts, float32; None if they were not asked for."""


@struct.dataclass
class Responses:
    """Responses to prompts, whoever wrote them: what scoring needs."""

    prompts: Int[Array, "B S"]
    """The prompt of each row, right padded (repeated within a group)."""
    prompt_lengths: Int[Array, " B"]
    """Real tokens of each prompt."""
    tokens: Int[Array, "B T"]
    """The response's ids, EOS included; the padding id after it."""
    mask: Bool[Array, "B T"]
    """True on the response's tokens, EOS included, and on what an environment said between them."""


@struct.dataclass
class Rollout(Responses):
    """What the decoder returns: responses, what the sampler thought of them, and the experts it chose."""

    action_mask: Bool[Array, "B T"]
    """True on the tokens that the policy drew: those of the mask that no environment said."""
    truncated: Bool[Array, " B"]
    """True where the response met its limit without an EOS."""
    behaviour_logprobs: Float[Array, "B T"]
    """Log-prob under the distribution really sampled from (temperature, top-k, top-p, min-p), of the policy that drew
    the token; 0 outside the action mask."""
    logprobs: Float[Array, "B T"]
    """Its log-prob under the full softmax at the sampling temperature; what the trainer's scoring must agree with."""
    routes: RouterRecord
    """What the sampler's routers did with prompt and response."""


@struct.dataclass
class OldPolicy:
    """What the policies that do not change during an iteration say of its responses."""

    logprobs: Float[Array, "B T"]
    """log π_old of the sampled tokens: the sampler's or the trainer's, by config."""
    reference_logprobs: Float[Array, "B T"] | None = None
    """log π_ref, under the reference's own routing; None without a reference."""
    values: Float[Array, "B T"] | None = None
    """The critic's value before each token; None without a critic."""
    routes: RouterRecord | None = None
    """How the trainer's forward routed under the old policy, under r3 as the sampler did; None unless recomputed."""


@struct.dataclass
class Experience:
    """A rollout with what the update learns from it."""

    rollout: Rollout
    mask: Bool[Array, "B T"]
    """True on the tokens to learn from: those of the action mask, less the rows that are filtered out."""
    old: OldPolicy
    advantages: Float[Array, " B"] | Float[Array, "B T"]
    """Â of each response, or of each token."""
    returns: Float[Array, "B T"] | None = None
    """What the critic learns to say before each token; None without a critic."""
    correction: Float[Array, "B T"] | None = None
    """Factor on the weight of each token, for what sampler and trainer disagree on; None for none."""

    @property
    def routes(self) -> RouterRecord:
        """Where the old policy routed: by the trainer's record where there is one, else by the sampler's."""
        return self.rollout.routes if self.old.routes is None else self.old.routes


@struct.dataclass
class Weights:
    """A policy's parameters in two disjoint parts; together they hold every parameter of its graph."""

    trainable: nnx.State
    """What gradients, optimizer and checkpoints know; float32 in the trainer."""
    frozen: nnx.State
    """What no update changes, such as the base of an adapter; empty in full training."""

    @classmethod
    def full(cls, params: nnx.State) -> "Weights":
        """All parameters trainable."""
        return cls(params, nnx.State({}))

    @property
    def whole(self) -> nnx.State:
        """Both parts as one tree."""
        return nnx.merge_state(self.trainable, self.frozen)

    def model(self, graph: nnx.GraphDef[Module]) -> Module:
        """The module that `graph` describes, with these parameters."""
        return nnx.merge(graph, self.trainable, self.frozen)
