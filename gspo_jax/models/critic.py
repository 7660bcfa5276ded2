"""PPO's critic: a value head on its own trunk or on the policy's."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gspo_jax.models.config import ModelConfig, parameter
from gspo_jax.models.dispatch import Dispatch
from gspo_jax.models.transformer import Transformer


class Critic(nnx.Module):
    """V = h · w: the value of the text before a token, from the hidden state h that predicts the token.

    The head starts at zero.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        own_trunk: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        dispatch: Dispatch = "gather",
    ):
        # A trunk that predicts no tokens needs no unembedding.
        trunk = dataclasses.replace(config, tie_word_embeddings=True)
        self.trunk = Transformer(trunk, rngs=rngs, dtype=dtype, dispatch=dispatch) if own_trunk else None
        self.head = parameter(rngs, (config.hidden_size,), ("embed",), jax.nn.initializers.zeros, float32=True)

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Return float32 values."""
        return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), self.head[...])


def abstract(
    config: ModelConfig, *, own_trunk: bool, dtype: DTypeLike, dispatch: Dispatch = "gather"
) -> tuple[nnx.GraphDef[Critic], nnx.State]:
    """Return the critic's graph and parameter shapes, without allocating any."""
    return nnx.split(
        nnx.eval_shape(
            lambda: Critic(config, own_trunk=own_trunk, rngs=nnx.Rngs(0), dtype=dtype, dispatch=dispatch),
        )
    )


def first_params(shapes: nnx.State, policy: nnx.State) -> nnx.State:
    """Return initial parameters: a copy of the policy as trunk, and a zero head.

    A copy, because the update donates both models' buffers.
    """
    trunk = dict(jax.tree_util.tree_leaves_with_path(policy))

    def begin(path: jax.tree_util.KeyPath, shape: jax.ShapeDtypeStruct) -> jax.Array:
        of_trunk = path[0] == jax.tree_util.DictKey("trunk")
        return jnp.copy(trunk[path[1:]]) if of_trunk else jnp.zeros(shape.shape, shape.dtype)

    return jax.tree_util.tree_map_with_path(begin, shapes)
