"""The decoder with its own copy of the weights, in its own layout and dtype."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Int

from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import decoder
from gspo_jax.rollout.sampling import Sampling
from gspo_jax.types import Prompts, Rollout


@dataclasses.dataclass
class Spent:
    """What sampling has taken since weights were last loaded."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    """Of the decode loop, on the shard that took most."""
    slot_steps: int = 0
    """Steps times slots, over all shards."""
    tokens: int = 0
    """Drawn in those."""

    @property
    def occupancy(self) -> float:
        """The share of slot-steps that drew a token; 1 where there were none."""
        return self.tokens / self.slot_steps if self.slot_steps else 1.0


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
        slots: int | None = None,
        router_logprobs: bool = False,
    ):
        """`graph` computes in `dtype`; the other arguments are those of `decoder.generate`.

        `slots` may be more than there are responses: then all decode at once.
        """
        self._graph, self._mesh = graph, mesh
        self._reshard = decoder.to_sampler(shapes, mesh, dtype)
        self._params: nnx.State | None = None
        self._group_size, self._slots = group_size, slots
        self.copy_bytes = 0
        """Bytes of the newest copy, over all devices of this process."""
        self.spent = Spent()
        self._sampling = sampling
        self._router_logprobs = router_logprobs
        self._ends = {"length": length, "eos_ids": eos_ids, "pad_id": pad_id}
        self._seen: set[tuple[int, ...]] = set()

    def load(self, params: nnx.State) -> None:
        """Casts and reshards the trainer's weights."""
        self._params = jax.block_until_ready(self._reshard(params))
        leaves = jax.tree.leaves(self._params)
        self.copy_bytes = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
        self.spent = Spent()

    def release(self) -> None:
        """Lets go of the weights, so that an update has their memory."""
        self._params = None

    def __call__(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        first: int = 0,
        limits: Int[np.ndarray, " B"] | None = None,
    ) -> Rollout:
        """Samples; response i draws with `fold_in(key, first + i)`.

        Args:
          prompts: this process's rows, on the host.
          key: of all the responses.
          first: the number of the first response.
          limits: of each of this process's responses, at most the sampler's length.

        Raises:
          RuntimeError: a shape that was sampled before was compiled again.
        """
        if self._params is None:
            raise ValueError("the sampler has no weights; call load first")
        numbers = first + np.arange(len(prompts.lengths) * self._group_size)
        placed, numbers, limits = mesh_lib.to_rows(self._mesh, (prompts, numbers, limits))
        keys = decoder.response_keys(key, jnp.asarray(numbers))
        slots = decoder.check_slots(None if self._slots is None else min(self._slots, keys.size), keys.size)
        compiled = _programs()
        begun = time.perf_counter()
        prefilled = jax.block_until_ready(
            decoder.prefill(
                self._graph,
                self._params,
                placed,
                keys,
                group_size=self._group_size,
                sampling=self._sampling,
                router_logprobs=self._router_logprobs,
            )
        )
        read = time.perf_counter()
        decoded = jax.block_until_ready(
            decoder.decode(
                self._graph,
                self._params,
                prefilled,
                keys,
                limits,
                slots=slots,
                sampling=self._sampling,
                **self._ends,
            )
        )
        self._count(decoded.work, read - begun, time.perf_counter() - read)
        self._guard(placed.tokens.shape, compiled, limited=limits is not None)
        return decoded.rollout

    def _count(self, work: decoder.Work, prefill_s: float, decode_s: float) -> None:
        steps, slot_steps, tokens = jax.device_get((work.steps, work.slot_steps, work.tokens))
        spent = self.spent
        spent.prefill_s += prefill_s
        spent.decode_s += decode_s
        spent.steps += int(steps.max())
        spent.slot_steps += int(slot_steps.sum())
        spent.tokens += int(tokens.sum())

    def _guard(self, shape: tuple[int, ...], compiled: int, *, limited: bool) -> None:
        """Programs are compiled once for a shape; if not, every iteration would pay for it in silence."""
        kind = (*shape, int(limited))
        if kind in self._seen and _programs() > compiled:
            raise RuntimeError(
                f"the sampler was compiled again for prompts of shape {shape}, which it has sampled before"
            )
        self._seen.add(kind)


def _programs() -> int:
    programs: tuple[Any, ...] = decoder.prefill, decoder.decode
    return sum(program._cache_size() for program in programs)
