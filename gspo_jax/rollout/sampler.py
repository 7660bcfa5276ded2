"""The decoder with its own copy of the weights, in its own layout and dtype."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import decoder
from gspo_jax.rollout.sampling import Sampling
from gspo_jax.types import Prompts, Rollout


class Sampler:
    """Samples groups of responses with the weights last given to `load`."""

    def __init__(
        self,
        graph: nnx.GraphDef[Transformer],
        shapes: nnx.State,
        mesh: Mesh,
        *,
        dtype: DTypeLike,
        group_size: int,
        length: int,
        sampling: Sampling,
        eos_ids: tuple[int, ...],
        pad_id: int,
        router_logprobs: bool = False,
    ):
        """`graph` computes in `dtype`; the other arguments are those of `decoder.generate`."""
        self._graph, self._mesh = graph, mesh
        self._reshard = decoder.to_sampler(shapes, mesh, dtype)
        self._params: nnx.State | None = None
        self._group_size = group_size
        self.copy_bytes = 0
        """Bytes of the newest copy, over all devices of this process."""
        self._settings = {
            "length": length,
            "sampling": sampling,
            "eos_ids": eos_ids,
            "pad_id": pad_id,
            "router_logprobs": router_logprobs,
        }

    def load(self, params: nnx.State) -> None:
        """Casts and reshards the trainer's weights."""
        self._params = jax.block_until_ready(self._reshard(params))
        leaves = jax.tree.leaves(self._params)
        self.copy_bytes = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)

    def release(self) -> None:
        """Lets go of the weights, so that an update has their memory."""
        self._params = None

    def __call__(self, prompts: Prompts, key: jax.Array, *, first: int = 0) -> Rollout:
        """Samples; response i draws with `fold_in(key, first + i)`. `prompts` are this process's rows, on the host."""
        if self._params is None:
            raise ValueError("the sampler has no weights; call load first")
        numbers = first + np.arange(len(prompts.lengths) * self._group_size)
        placed, numbers = mesh_lib.to_rows(self._mesh, (prompts, numbers))
        keys = decoder.response_keys(key, jnp.asarray(numbers))
        rollout, _ = decoder.generate(
            self._graph, self._params, placed, keys, group_size=self._group_size, **self._settings
        )
        return rollout
