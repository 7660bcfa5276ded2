"""Qwen3 and Qwen3-MoE (arXiv 2505.09388): blocks scanned over layers, the same for training, prefill and decode."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gspo_jax.kernels.attention import Rows
from gspo_jax.models.attention import Attend, Attention, attend_cached, attend_segments, rms_norm, segment_positions
from gspo_jax.models.cache import Cache, Slots, write_column
from gspo_jax.models.config import ModelConfig, ones, parameter
from gspo_jax.models.dispatch import GATHER, Dispatch
from gspo_jax.models.moe import MLP, MoE, Routes, Routing, split_experts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import constrain

Remat = Literal["none", "dots", "full", "offload"]

REMATS: dict[Remat, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names("dot"),
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What each layer keeps for its backward pass: all of it, its input and the outputs of its matmuls, or its input alone,
in the chip's memory or ("offload") the host's.

"dots" computes only what is cheap to compute again, and is the fastest where memory is slow; of experts it keeps the
whole buffers, sized for the worst load. "full" takes little of the chip, and "offload"
least, for traffic to the host.
"""

LEAN: tuple[Remat, ...] = ("full", "offload")
"""Those whose backward pass computes a whole layer again."""


@struct.dataclass
class Output:
    """What a forward returns: enough for chunked log-probs and for routing drift; logits only if asked."""

    hidden: Float[Array, "B T D"]
    """After the final norm, in the compute dtype."""
    routes: Routes
    """Stacked over layers: its arrays lead with L; K = 0 for a dense model."""
    head: Float[Array, "D V"]
    """The unembedding, in the compute dtype."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """hidden @ head in float32: for small checks. Training uses `kernels.logprobs.token_logprobs`."""
        return jnp.einsum("btd,dv->btv", self.hidden, self.head, preferred_element_type=jnp.float32)


class Block(nnx.Module):
    """Pre-norm attention and feed-forward; holds every layer's parameters, called on one layer's slice."""

    def __init__(self, config: ModelConfig, dispatch: Dispatch, *, rngs: nnx.Rngs):
        L, D = config.num_layers, config.hidden_size
        self.config = config
        self.attention_norm = parameter(rngs, (L, D), ("layers", "embed"), ones, float32=True)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = parameter(rngs, (L, D), ("layers", "embed"), ones, float32=True)
        self.mlp = MoE(config, dispatch, rngs=rngs) if config.num_experts else MLP(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        attend: Attend,
        asked: Routing | None = None,
        layer: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Routes, Any]:
        """Returns the residual stream, this layer's routes, and what `attend` kept.

        With `layer` the experts' kernels are still those of all layers; the other parameters are this layer's.
        """
        eps = self.config.rms_norm_eps
        with jax.named_scope("attention"):
            y, kept = self.attention(rms_norm(x, self.attention_norm[...], eps), positions, attend)
        x = constrain(x + y, "batch", None, None)
        with jax.named_scope("feed_forward"):
            y, routes = self.mlp(rms_norm(x, self.mlp_norm[...], eps), valid, asked, layer)
        return constrain(x + y, "batch", None, None), routes, kept


class Transformer(nnx.Module):
    """A causal language model. Parameters are float32; `dtype` is what it computes in.

    Router logits, softmaxes, norms and log-probs are float32 whatever the dtype. `dispatch` is how tokens reach their
    experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        dispatch: Dispatch = GATHER,
    ):
        V, D = config.vocab_size, config.hidden_size
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embed = parameter(rngs, (V, D), ("vocab", "embed"))
        self.layers = Block(config, dispatch, rngs=rngs)
        self.norm = parameter(rngs, (D,), ("embed",), ones, float32=True)
        self.head = None if config.tie_word_embeddings else parameter(rngs, (D, V), ("embed", "vocab"))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        valid: Bool[Array, "B T"] | None = None,
        *,
        prompt: int = 0,
        responses: int = 1,
        routing: Routing | None = None,
        remat: Remat = "none",
    ) -> Output:
        """The training forward: token t sees the valid tokens at or before it.

        With `prompt` = S and `responses` = G, a row is S tokens of a prompt and then G responses to it of equal length,
        each of which sees the prompt and itself, and is numbered as if it stood alone.

        Args:
          tokens: [B, T]; holes are allowed anywhere and marked by `valid`.
          valid: False on padding, which no token sees and no position counts; all True if not given.
          prompt: tokens of the prompt segment.
          responses: segments after it.
          routing: what is asked of the routers, beside routing.
          remat: what the backward pass finds kept of the forward, as `REMATS` says.
        """
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        out, _ = self._causal(tokens, valid, (prompt, responses), routing, keep_cache=False, remat=remat)
        return out

    def prefill(
        self, tokens: Int[Array, "P M"], valid: Bool[Array, "P M"], *, prompt: int, responses: int
    ) -> tuple[Output, tuple[Float[Array, "L P M Kv h"], Float[Array, "L P M Kv h"]]]:
        """The forward of `__call__` that keeps each layer's keys and values."""
        return self._causal(tokens, valid, (prompt, responses), None, keep_cache=True, remat="none")

    def decode(self, tokens: Int[Array, " B"], slots: Slots, cache: Cache) -> tuple[Output, Cache]:
        """Feeds one token to every slot; idle ones reach no expert, and what comes out there means nothing."""
        P = cache.prompt_lengths.shape[0]
        prompts = jnp.clip(slots.responses // cache.group_size, 0, P - 1)
        positions = (cache.prompt_lengths[prompts] + slots.ages - 1)[:, None]
        rows = None if slots.aligned else Rows.of(slots.responses, slots.active, P, cache.group_size)
        graph, stacked = nnx.split(self.layers)
        whole, sliced = split_experts(stacked)

        def layer(carry: tuple[Array, Array, Array], xs: tuple[nnx.State, Array]) -> tuple[Any, Routes]:
            x, ks, vs = carry
            params, index = xs

            def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
                own = write_column(ks, index, cache.step, k[:, 0]), write_column(vs, index, cache.step, v[:, 0])
                prompt = cache.prompt_k, cache.prompt_v, cache.prompt_lengths
                where = {"layer": index, "step": cache.step, "ages": slots.ages, "rows": rows}
                return attend_cached(q[:, 0], *prompt, *own, **where)[:, None], own

            block = nnx.merge(graph, params, whole)
            x, routes, (ks, vs) = block(x, positions, slots.active[:, None], attend, layer=index)
            return (x, ks, vs), routes

        layers = jnp.arange(self.config.num_layers)
        (x, k, v), routes = jax.lax.scan(layer, (self._embed(tokens[:, None]), cache.k, cache.v), (sliced, layers))
        return self._output(x, routes), dataclasses.replace(cache, k=k, v=v, step=cache.step + 1)

    def _causal(
        self,
        tokens: Array,
        valid: Array,
        segments: tuple[int, int],
        routing: Routing | None,
        *,
        keep_cache: bool,
        remat: Remat,
    ) -> tuple[Output, Any]:
        positions = segment_positions(valid, *segments)
        graph, stacked = nnx.split(self.layers)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            return attend_segments(q, k, v, valid, *segments), (k, v) if keep_cache else None

        def layer(x: Array, xs: tuple[nnx.State, Routing | None]) -> tuple[Array, tuple[Routes, Any]]:
            params, asked = xs
            x = checkpoint_name(x, "input")
            x, routes, kept = nnx.merge(graph, params)(x, positions, valid, attend, asked)
            return x, (routes, kept)

        layer = layer if remat == "none" else jax.checkpoint(layer, policy=REMATS[remat])
        x, (routes, kept) = jax.lax.scan(layer, self._embed(tokens), (stacked, routing))
        return self._output(x, routes), kept

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        # Gathered over fsdp first: the rows are spread over fsdp too, and a lookup cannot leave both there.
        embed = constrain(self.embed.astype(self.dtype), "vocab", None)
        return constrain(embed[tokens], "batch", None, None)

    def _output(self, x: Array, routes: Routes) -> Output:
        head = self.embed[...].T if self.head is None else self.head[...]
        head = constrain(head.astype(self.dtype), None, "vocab")  # gathered over fsdp once, not for every chunk
        return Output(rms_norm(x, self.norm[...], self.config.rms_norm_eps), routes, head)


def abstract(
    config: ModelConfig, *, dtype: DTypeLike = jnp.float32, dispatch: Dispatch = GATHER
) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
    """The model's graph and the shapes of its parameters; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, dispatch=dispatch)))


def init_params(config: ModelConfig, key: jax.Array, *, mesh: jax.sharding.Mesh | None = None) -> nnx.State:
    """Random float32 parameters, made where they will live."""
    _, shapes = abstract(config)
    shardings = None if mesh is None else mesh_lib.param_shardings(shapes, mesh)
    return jax.jit(lambda k: nnx.state(Transformer(config, rngs=nnx.Rngs(k))), out_shardings=shardings)(key)
