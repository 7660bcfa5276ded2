"""The decoder with its own copy of the weights, in the sampler's layout and dtype."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Key, UInt32

from gspo_jax.models.cache import CacheDtype
from gspo_jax.models.transformer import Transformer
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import decoder, polled
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.precision import Precision
from gspo_jax.rollout.prefixes import PackedPrefix, Prefix, bucket, pack
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.rollout.shard import Decoded, DecodeStats
from gspo_jax.types import Prompts, Rollout, RouterRecord, SamplerStats, Weights

POLL_STEPS = 256
"""Decode steps between two checks for a stop request; a decode of fewer is one program."""


class Sampler:
    """Samples groups of responses with the weights last given to `load`."""

    def __init__(
        self,
        graph: nnx.GraphDef[Transformer],
        shapes: Weights,
        mesh: Mesh,
        *,
        dtype: DTypeLike,
        group_size: int,
        sampling: SamplingParams,
        stop: StopRule,
        slots: int | None = None,
        poll_steps: int | None = POLL_STEPS,
        router_logprobs: bool = False,
        precision: Precision | None = None,
        cache_dtype: CacheDtype | None = None,
        shares_frozen: bool = False,
    ):
        """Create a sampler without weights, which compiles nothing yet.

        Args:
          graph: the model, computing in `dtype`.
          shapes: shapes and metadata of its parameters.
          mesh: the sampler's own mesh: the trainer's, or its devices in the same order along other axes.
          dtype: dtype of the sampler's weights, except those declared float32.
          group_size: responses per prompt, G.
          sampling: as in `decoder.generate`, like `stop` and `router_logprobs`.
          stop: when a response ends.
          slots: responses decoded at a time, over all devices; None, or more than there are responses: all.
          poll_steps: decode steps after which `poll` is called; None: only before a sampling call.
          router_logprobs: also record the router's log-probs of the experts it chose.
          precision: what the weights, except those declared float32, are rounded to; None: to `dtype` alone.
          cache_dtype: as in `decoder.generate`.
          shares_frozen: the trainer has the frozen weights in this layout and dtype, so that there is no copy of them.
        """
        self._graph, self._shapes, self.shares_frozen = graph, shapes, shares_frozen
        self.reshard = decoder.make_reshard(self.moved(shapes), mesh, dtype, precision)
        """Casts and reshards the trainer's `moved` weights."""
        self._weights: Weights | None = None
        self._sampling, self._slots, self._router_logprobs = sampling, slots, router_logprobs
        self._poll_steps, self._cache_dtype = poll_steps, cache_dtype
        self.group_size, self.stop, self.mesh = group_size, stop, mesh
        self.copy_bytes = 0
        """Size of the sampler's newest copy of the weights in bytes, summed over devices."""
        self.stats = SamplerStats()
        """Time and work since the weights were last loaded."""
        self.poll: Callable[[], None] = lambda: None
        """Called before every sampling call and every `poll_steps` decode steps; may raise to end the call."""
        self._sampled_shapes: set[tuple[Any, ...]] = set()

    @property
    def prefill_options(self) -> dict[str, Any]:
        """Static arguments of `decoder.prefill`."""
        return {
            "sampling": self._sampling,
            "router_logprobs": self._router_logprobs,
            "cache_dtype": self._cache_dtype,
        }

    def decode_options(self, responses: int) -> dict[str, Any]:
        """Static arguments of `decoder.decode` for a call of this many responses; needs the sampler's mesh in scope."""
        slots = None if self._slots is None else min(self._slots, responses)
        return {"sampling": self._sampling, "stop": self.stop, "slots": decoder.resolve_slots(slots, responses)}

    def pieces(self, responses: int, min_ended: float = 1.0) -> PolledDecode | None:
        """The programs of a decode of this many responses, or None if `decoder.decode` does it in one.

        It is one where it takes at most `poll_steps` steps. Needs the sampler's mesh in scope.
        """
        options, steps = self.decode_options(responses), self._poll_steps
        if steps is None or decoder.most_steps(responses, options["slots"], self.stop) <= steps:
            return None
        return PolledDecode(graph=self._graph, **options, min_ended=min_ended, poll_steps=steps)

    def moved(self, weights: Weights) -> Weights:
        """The trainer's weights that the sampler keeps a copy of."""
        return Weights.full(weights.trainable) if self.shares_frozen else weights

    def copied(self, weights: Weights) -> Weights:
        """The sampler's weights: a copy of what is `moved`, beside the trainer's own arrays."""
        copy = self.reshard(self.moved(weights))
        return Weights(copy.trainable, weights.frozen) if self.shares_frozen else copy

    def load(self, weights: Weights) -> None:
        """Cast and reshard the trainer's weights into the sampler's copy, and reset `stats`."""
        with jax.set_mesh(self.mesh):
            self._weights = copied = jax.block_until_ready(self.copied(weights))
        self.copy_bytes = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * leaf.sharding.num_devices
            for leaf in jax.tree.leaves(self.moved(copied))
        )
        self.stats = SamplerStats()

    def release(self) -> None:
        """Drop the weights, so that the update can use their memory."""
        self._weights = None

    def __call__(
        self,
        prompts: Prompts,
        key: Key[Array, ""],
        *,
        first: int = 0,
        limits: Int[np.ndarray, " B"] | None = None,
    ) -> Rollout:
        """Sample whole responses to prompts on the host. Response i uses the key `fold_in(key, first + i)`.

        Args:
          prompts: on the host, [P, S].
          key: shared by all responses.
          first: number of the first response.
          limits: token limit of each response, at most the stop rule's length; None: that length for all.

        Raises:
          RuntimeError: input shapes sampled before were compiled again.
        """
        return self.resume(prompts, self.keys(prompts, key, first), limits=limits).rollout

    def keys(self, prompts: Prompts, key: Key[Array, ""], first: int) -> UInt32[np.ndarray, "B words"]:
        """Key data of the responses to `prompts`, numbered from `first`. Consumes `key`."""
        numbers = first + np.arange(len(prompts.lengths) * self.group_size)
        return np.asarray(jax.random.key_data(decoder.response_keys(key, jnp.asarray(numbers))))

    def empty_routes(self, responses: int, positions: int) -> RouterRecord:
        """A router record on the host with no position routed yet, for responses that have not started."""
        config = self._shapes.model(self._graph).config
        shape = (responses, positions, *config.route_shape)
        experts: Any = np.full(shape, -1, config.expert_dtype)
        logprobs: Any = np.zeros(shape, np.float32) if self._router_logprobs else None
        return RouterRecord(experts, logprobs)

    def resume(
        self,
        prompts: Prompts,
        keys: UInt32[np.ndarray, "B words"],
        *,
        prefix: Prefix | None = None,
        limits: Int[np.ndarray, " B"] | None = None,
        min_ended: float = 1.0,
    ) -> Decoded:
        """Continues responses from their prefixes with the loaded weights; counted in `stats`.

        The arguments are those of `decoder.generate`, on the host. Prompts are cut to the smallest `bucket` that holds
        the longest of them, and padded back to their original width in the result.

        Raises:
          ValueError: no weights are loaded.
          RuntimeError: input shapes sampled before were compiled again.
        """
        if self._weights is None:
            raise ValueError("the sampler has no weights; call load first")
        self.poll()
        width = prompts.tokens.shape[1]
        prompts = Prompts(prompts.tokens[:, : bucket(int(prompts.lengths.max()), width)], prompts.lengths)
        shards = mesh_lib.batch_shards(dict(self.mesh.shape))
        packed = None if prefix is None else pack(prompts, prefix, shards=shards, limit=self.stop.max_length)
        shapes = (prompts.tokens.shape, width, packed and packed.tokens.shape, limits is None, min_ended)
        compiled = _compiled_programs()
        inputs: Any = hosts.shard_rows(self.mesh, (prompts, keys, packed, limits))
        with jax.set_mesh(self.mesh):
            decoded = self._generate(*inputs, prompt_length=width, min_ended=min_ended)
        if shapes in self._sampled_shapes and _compiled_programs() > compiled:
            # Without this error every iteration would silently pay for compilation.
            raise RuntimeError(f"prompts of shape {shapes[0]} were sampled before, yet the sampler was compiled again")
        self._sampled_shapes.add(shapes)
        return decoded

    def _generate(
        self,
        prompts: Prompts,
        key_data: UInt32[Array, "B words"],
        prefix: PackedPrefix | None,
        limits: Int[Array, " B"] | None,
        *,
        prompt_length: int,
        min_ended: float,
    ) -> Decoded:
        """`resume` with inputs on the devices: `decoder.generate`, with prefill and decode timed apart."""
        keys, B = jax.random.wrap_key_data(key_data), len(key_data)
        start = time.perf_counter()
        prefilled = jax.block_until_ready(
            decoder.prefill(
                self._graph,
                self._weights,
                prompts,
                keys,
                prefix,
                **self.prefill_options,
            )
        )
        middle = time.perf_counter()
        inputs: tuple[Any, ...] = self._weights, prefilled, keys, limits
        if (pieces := self.pieces(B, min_ended)) is not None:
            decoded = pieces(*inputs, prompt_length=prompt_length, poll=self.poll)
        else:
            options: dict[str, Any] = {**self.decode_options(B), "min_ended": min_ended}
            decoded = decoder.decode(self._graph, *inputs, **options, prompt_length=prompt_length)
        decoded = jax.block_until_ready(decoded)
        self._count(decoded.stats, prefill_s=middle - start, decode_s=time.perf_counter() - middle)
        return decoded

    def _count(self, work: DecodeStats, *, prefill_s: float, decode_s: float) -> None:
        """Add one call to `stats`."""
        work, stats = hosts.allgather(work), self.stats
        self.stats = SamplerStats(
            prefill_s=stats.prefill_s + prefill_s,
            decode_s=stats.decode_s + decode_s,
            steps=stats.steps + int(work.steps.max()),
            slot_steps=stats.slot_steps + int(work.slot_steps.sum()),
            decode_tokens=stats.decode_tokens + int(work.decode_tokens.sum()),
            sampled_tokens=stats.sampled_tokens + int(work.sampled_tokens.sum()),
        )


def _compiled_programs() -> int:
    programs: tuple[Any, ...] = decoder.prefill, decoder.decode, *polled.PROGRAMS
    return sum(program._cache_size() for program in programs)
