"""The decoder with its own copy of the weights, in its own layout and dtype."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Key, UInt32

from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import hosts
from gspo_jax.rollout import decoder
from gspo_jax.rollout.sampling import Sampling
from gspo_jax.types import Prompts, Rollout, RouterRecord


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
    drawn: int = 0
    """All tokens drawn: those and the first ones."""

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

        `mesh` is the sampler's own: the trainer's, or its devices in the same order along other axes.
        `slots` may be more than there are responses: then all decode at once.
        """
        self._graph, self._shapes = graph, shapes
        self._reshard = decoder.to_sampler(shapes, mesh, dtype)
        self._params: nnx.State | None = None
        self.group_size, self.length, self.pad_id, self.mesh = group_size, length, pad_id, mesh
        self.copy_bytes = 0
        """Bytes of the newest copy, over all devices."""
        self.spent = Spent()
        self._sampling = sampling
        self._router_logprobs = router_logprobs
        self._eos_ids, self._slots = eos_ids, slots
        self._seen: set[tuple[Any, ...]] = set()

    def load(self, params: nnx.State) -> None:
        """Casts and reshards the trainer's weights."""
        with jax.set_mesh(self.mesh):
            self._params = jax.block_until_ready(self._reshard(params))
        self.copy_bytes = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * leaf.sharding.num_devices
            for leaf in jax.tree.leaves(self._params)
        )
        self.spent = Spent()

    def release(self) -> None:
        """Lets go of the weights, so that an update has their memory."""
        self._params = None

    def __call__(
        self,
        prompts: Prompts,
        key: Key[Array, ""],
        *,
        first: int = 0,
        limits: Int[np.ndarray, " B"] | None = None,
    ) -> Rollout:
        """Samples whole responses; number i of them draws with `fold_in(key, first + i)`.

        Args:
          prompts: on the host.
          key: of all the responses.
          first: the number of the first response.
          limits: of each response, at most the sampler's length.

        Raises:
          RuntimeError: a shape that was sampled before was compiled again.
        """
        return self.go_on(prompts, self.keys(prompts, key, first), limits=limits).rollout

    def keys(self, prompts: Prompts, key: Key[Array, ""], first: int) -> UInt32[np.ndarray, "B words"]:
        """The data of the keys of responses to prompts, the first of which has the number `first`; consumes `key`."""
        numbers = first + np.arange(len(prompts.lengths) * self.group_size)
        return np.asarray(jax.random.key_data(decoder.response_keys(key, jnp.asarray(numbers))))

    def no_routes(self, responses: int, positions: int) -> RouterRecord:
        """A record of nothing, on the host, as there is of responses that have not begun."""
        config = nnx.merge(self._graph, self._shapes).config
        shape = (responses, positions, *config.route_shape)
        experts: Any = np.full(shape, -1, config.expert_dtype)
        logprobs: Any = np.zeros(shape, np.float32) if self._router_logprobs else None
        return RouterRecord(experts, logprobs)

    def go_on(
        self,
        prompts: Prompts,
        keys: UInt32[np.ndarray, "B words"],
        *,
        prefix: decoder.Prefix | None = None,
        limits: Int[np.ndarray, " B"] | None = None,
        enough: float = 1.0,
        budget: int | None = None,
    ) -> decoder.Decoded:
        """`decoder.generate` with the weights, counted in `spent`; what it is given is on the host.

        Of the room for prompts no more is computed than a bucket that holds the longest of them.

        Raises:
          RuntimeError: shapes that were sampled before were compiled again.
        """
        if self._params is None:
            raise ValueError("the sampler has no weights; call load first")
        longest = prompts.tokens.shape[1]
        prompts = Prompts(prompts.tokens[:, : bucket(int(prompts.lengths.max()), longest)], prompts.lengths)
        wide = None if prefix is None else prefix.tokens.shape[1]
        shapes = (prompts.tokens.shape, longest, wide, limits is None, enough, budget)
        compiled = _programs()
        placed: Any = hosts.to_rows(self.mesh, (prompts, keys, prefix, limits))
        with jax.set_mesh(self.mesh):
            decoded = self._run(*placed, longest=longest, enough=enough, budget=budget)
        if shapes in self._seen and _programs() > compiled:  # every iteration would pay for it in silence
            raise RuntimeError(
                f"the sampler was compiled again for prompts of shape {shapes[0]}, which it has sampled before"
            )
        self._seen.add(shapes)
        return decoded

    def _run(
        self,
        prompts: Prompts,
        key_data: UInt32[Array, "B words"],
        prefix: decoder.Prefix | None,
        limits: Int[Array, " B"] | None,
        *,
        longest: int,
        enough: float,
        budget: int | None,
    ) -> decoder.Decoded:
        """`go_on` with what it is given on the devices; prompts come back as wide as `longest`."""
        own_keys, B = jax.random.wrap_key_data(key_data), len(key_data)
        slots = decoder.check_slots(None if self._slots is None else min(self._slots, B), B)
        begun = time.perf_counter()
        prefilled = jax.block_until_ready(
            decoder.prefill(
                self._graph,
                self._params,
                prompts,
                own_keys,
                prefix,
                group_size=self.group_size,
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
                own_keys,
                limits,
                slots=slots,
                sampling=self._sampling,
                length=self.length,
                eos_ids=self._eos_ids,
                pad_id=self.pad_id,
                enough=enough,
                budget=budget,
                prompt_length=longest,
            )
        )
        self._count(decoded.work, read - begun, time.perf_counter() - read)
        return decoded

    def _count(self, work: decoder.Work, prefill_s: float, decode_s: float) -> None:
        work, spent = hosts.everywhere(work), self.spent
        spent.prefill_s += prefill_s
        spent.decode_s += decode_s
        spent.steps += int(work.steps.max())
        spent.slot_steps += int(work.slot_steps.sum())
        spent.tokens += int(work.tokens.sum())
        spent.drawn += int(work.drawn.sum())


def bucket(longest: int, size: int) -> int:
    """A quarter, a half, three quarters or all of `size`: the least of these that holds `longest`."""
    quarter = -(-size // 4)
    return min(-(-longest // quarter) * quarter, size)


def _programs() -> int:
    programs: tuple[Any, ...] = decoder.prefill, decoder.decode
    return sum(program._cache_size() for program in programs)
