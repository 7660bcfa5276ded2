"""The decoder with its own copy of the weights."""

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
from gspo_jax.rollout.drafting import NO_DRAFTS, Drafting
from gspo_jax.rollout.loop import Decoded, DecodeStats
from gspo_jax.rollout.pages import fitting, page_columns
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.precision import Precision
from gspo_jax.rollout.prefixes import Prefix, bucket, pack
from gspo_jax.rollout.sampling import SamplingParams, StopRule
from gspo_jax.types import KeptRecord, Prompts, Rollout, RouterRecord, SamplerStats, Weights

POLL_STEPS = 256
"""Decode steps between checks for a stop request; a shorter decode is one program."""
HEARD_STEPS = 32
"""The same where somebody hears of responses as they end."""

Heard = Callable[[Int[np.ndarray, " n"], list[list[int]]], None]
"""Hears of responses that have ended, each once: their numbers in the call, and tokens with prefixes.

Each process hears of its own."""


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
        pool_tokens: int | None = None,
        page: int | None = None,
        poll_steps: int | None = POLL_STEPS,
        router_logprobs: bool = False,
        precision: Precision | None = None,
        cache_dtype: CacheDtype | None = None,
        shares_frozen: bool = False,
        drafting: Drafting = NO_DRAFTS,
    ):
        """Create a sampler without weights; compiles nothing yet. For other arguments see `decoder`.

        Args:
          graph: the model, computing in `dtype`.
          mesh: the trainer's, or its devices in the same order along other axes.
          dtype: of the weights, except those declared float32.
          slots: None or more than there are responses: all.
          pool_tokens: of the pool of keys and values, over all devices; None: slots × longest response.
          page: tokens per page of the pool; None: by `pages.default_columns`.
          poll_steps: decode steps between calls of `poll`; None: only before a sampling call.
          precision: rounds weights not declared float32.
          drafting: what decoding drafts; no token depends on it.
          shares_frozen: use the trainer's frozen weights, already in this layout and dtype.
        """
        self._graph, self._shapes, self.shares_frozen = graph, shapes, shares_frozen
        self._model = shapes.model(graph).config
        self.reshard = decoder.make_reshard(self.moved(shapes), mesh, dtype, precision)
        self._weights: Weights | None = None
        self.sampling, self._slots, self._router_logprobs = sampling, slots, router_logprobs
        self._cache_dtype = cache_dtype
        self._pool_tokens, self.drafting = pool_tokens, drafting
        self.columns = page_columns(page, stop.max_length, mesh.devices.flat[0].platform)
        self.group_size, self.stop, self.mesh = group_size, stop, mesh
        self.copy_bytes = 0
        """Size of the newest copy of the weights, over all devices."""
        self.stats = SamplerStats()
        """Work since the weights were last loaded."""
        self.policies = 0
        self.poll: Callable[[], None] = lambda: None
        """Called before every sampling call and every `poll_steps` decode steps; may raise to end the call."""
        self.poll_steps = poll_steps
        self.cuts_prompts = True
        """Whether a call's prompts are cut to the smallest `bucket` that holds the longest."""
        self._sampled_shapes: set[tuple[Any, ...]] = set()

    @property
    def prefill_options(self) -> dict[str, Any]:
        return {
            "sampling": self.sampling,
            "router_logprobs": self._router_logprobs,
            "cache_dtype": self._cache_dtype,
        }

    def decode_options(self, responses: int, min_ended: float = 1.0) -> dict[str, Any]:
        """Static arguments of `decoder.decode`."""
        shards = mesh_lib.batch_shards(dict(self.mesh.shape))
        slots = responses if self._slots is None else min(self._slots, responses)
        tokens = None if self._pool_tokens is None else self._pool_tokens // shards
        length, grows = self.stop.max_length, min_ended < 1
        own, pool = fitting(slots // shards, length, tokens, self.columns, shards=shards, grows=grows)
        return {
            "sampling": self.sampling,
            "stop": self.stop,
            "slots": own * shards,
            "pool": pool,
            "min_ended": min_ended,
            "drafting": self.drafting,
        }

    def pieces(self, responses: int, min_ended: float = 1.0, *, heard: bool = False) -> PolledDecode | None:
        """Return the programs of a polled decode, or None if it fits `poll_steps`, `HEARD_STEPS` if heard."""
        options, steps = self.decode_options(responses, min_ended), self.poll_steps
        if heard:
            steps = min(HEARD_STEPS, steps or HEARD_STEPS)
        if steps is None or decoder.most_steps(responses, options["slots"], self.stop) <= steps:
            return None
        return PolledDecode(graph=self._graph, **options, poll_steps=steps)

    def moved(self, weights: Weights) -> Weights:
        """Return the trainer's weights that the sampler copies."""
        return Weights.full(weights.trainable) if self.shares_frozen else weights

    def copied(self, weights: Weights) -> Weights:
        """Return the sampler's weights: a copy of what is `moved`, plus shared arrays."""
        copy = self.reshard(self.moved(weights))
        return Weights(copy.trainable, weights.frozen) if self.shares_frozen else copy

    def load(self, weights: Weights) -> None:
        """Copy the trainer's weights, cast and resharded, and reset `stats`."""
        with jax.set_mesh(self.mesh):
            self._weights = copied = jax.block_until_ready(self.copied(weights))
        self.copy_bytes = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * leaf.sharding.num_devices
            for leaf in jax.tree.leaves(self.moved(copied))
        )
        self.stats = SamplerStats()

    def share(self, other: "Sampler") -> None:
        """Take the weights that `other`, a sampler of the same policy on the same mesh, has loaded, without a copy."""
        self._weights, self.copy_bytes = other._weights, other.copy_bytes

    def release(self) -> None:
        """Free the weights' memory for the update."""
        self._weights = None

    def __call__(
        self,
        prompts: Prompts,
        key: Key[Array, ""],
        *,
        first: int = 0,
        limits: Int[np.ndarray, " B"] | None = None,
        heard: Heard | None = None,
    ) -> Rollout:
        """Sample whole responses to prompts on the host, [P, S]. Response i uses the key `fold_in(key, first + i)`.

        `heard` is called while others are still being sampled.

        Raises:
          RuntimeError: input shapes sampled before were compiled again, though no program was dropped.
        """
        return self.resume(prompts, self.keys(prompts, key, first), limits=limits, heard=heard).rollout

    def keys(self, prompts: Prompts, key: Key[Array, ""], first: int) -> UInt32[np.ndarray, "B words"]:
        """Return key data of the responses to `prompts`, numbered from `first`. Consumes `key`."""
        numbers = first + np.arange(len(prompts.lengths) * self.group_size)
        return np.asarray(jax.random.key_data(decoder.response_keys(key, jnp.asarray(numbers))))

    def empty_routes(self, responses: int, positions: int) -> RouterRecord:
        """Return a host router record with nothing routed."""
        shape = (responses, positions, *self._model.route_shape)
        experts: Any = np.full(shape, -1, self._model.expert_dtype)
        logprobs: Any = np.zeros(shape, np.float32) if self._router_logprobs else None
        return RouterRecord(experts, logprobs)

    def empty_kept(self, responses: int) -> KeptRecord | None:
        """Return a host record of kept ids with nothing sampled, None if none are recorded."""
        if not (K := self.sampling.recorded):
            return None
        tokens = responses, self.stop.max_length
        ids: Any = np.full((*tokens, K), -1, np.int32)
        logprobs: Any = np.zeros((*tokens, K), np.float32)
        whole: Any = np.zeros(tokens, bool)
        return KeptRecord(ids, logprobs, whole)

    def resume(
        self,
        prompts: Prompts,
        keys: UInt32[np.ndarray, "B words"],
        *,
        prefix: Prefix | None = None,
        limits: Int[np.ndarray, " B"] | None = None,
        min_ended: float = 1.0,
        heard: Heard | None = None,
    ) -> Decoded:
        """Continue responses from their prefixes; counted in `stats`.

        Arguments are as in `decoder.prefill` and `decode`, on the host. Prompts that are cut are padded back in the
        result.

        Raises:
          ValueError: no weights are loaded.
          RuntimeError: input shapes sampled before were compiled again, though no program was dropped.
        """
        if self._weights is None:
            raise ValueError("the sampler has no weights; call load first")
        self.poll()
        width = prompts.tokens.shape[1]
        cut = prompts.tokens[:, : bucket(int(prompts.lengths.max()), width) if self.cuts_prompts else width]
        prompts = Prompts(cut, prompts.lengths, earlier=prompts.earlier)
        shards = mesh_lib.batch_shards(dict(self.mesh.shape))
        packed = None
        if prefix is not None:
            options = {"limit": self.stop.max_length, "with_ends": self._model.is_recurrent}
            packed = pack(prompts, prefix, shards=shards, **options)
        rows = packed and (packed.tokens.shape, packed.ends is not None and packed.ends.shape)
        compiled, dropped = _programs.count()
        shapes = (prompts.tokens.shape, width, rows, limits is None, min_ended, heard is None, dropped)
        placed: Any = hosts.shard_rows(self.mesh, (prompts, keys, packed, limits))
        with jax.set_mesh(self.mesh):
            batch, key_data, rows, most = placed
            own_keys, start = jax.random.wrap_key_data(key_data), time.perf_counter()
            prefilled = jax.block_until_ready(
                decoder.prefill(self._graph, self._weights, batch, own_keys, rows, **self.prefill_options)
            )
            middle, taken = time.perf_counter(), 0

            def poll() -> None:
                nonlocal taken
                taken += 1
                self.poll()

            inputs = self._weights, prefilled, own_keys, most
            if (pieces := self.pieces(len(keys), min_ended, heard=heard is not None)) is not None:
                told = None if heard is None else self._tell(heard, len(keys))
                decoded = pieces(*inputs, prompt_length=width, poll=poll, heard=told)
            else:
                options = self.decode_options(len(keys), min_ended)
                decoded = decoder.decode(self._graph, *inputs, **options, prompt_length=width)
            decoded = jax.block_until_ready(decoded)
            self._count(decoded.stats, prefill_s=middle - start, decode_s=time.perf_counter() - middle)
        shapes = *shapes, taken > 1  # the first decode of several pieces adds programs
        if _programs.count()[0] > compiled and shapes in self._sampled_shapes:
            # Otherwise every iteration would silently pay for compilation.
            raise RuntimeError(f"prompts of shape {shapes[0]} were sampled before, yet the sampler was compiled again")
        self._sampled_shapes.add(shapes)
        return decoded

    def _tell(self, heard: Heard, responses: int) -> Callable[[Array, Array], None]:
        """Return what tells of this process's responses that have ended since the last time."""
        own, told = hosts.own_rows(self.mesh, responses), np.zeros(responses, bool)

        def tell(tokens: Array, lengths: Array) -> None:
            known = hosts.fetch_own_rows(self.mesh, lengths)
            new = np.flatnonzero((known > 0) & ~told[own])
            if new.size:
                texts = hosts.fetch_own_rows(self.mesh, tokens)
                heard(own[new], [texts[row, : known[row]].tolist() for row in new])
                told[own[new]] = True

        return tell

    def _count(self, work: DecodeStats, *, prefill_s: float, decode_s: float) -> None:
        work, stats = hosts.allgather(work), self.stats
        self.stats = SamplerStats(
            prefill_s=stats.prefill_s + prefill_s,
            decode_s=stats.decode_s + decode_s,
            steps=stats.steps + int(work.steps.max()),
            slot_steps=stats.slot_steps + int(work.slot_steps.sum()),
            filled=stats.filled + float(work.filled.sum()),
            decode_tokens=stats.decode_tokens + int(work.decode_tokens.sum()),
            sampled_tokens=stats.sampled_tokens + int(work.sampled_tokens.sum()),
            busy_steps=stats.busy_steps + int(work.busy_steps.sum()),
            drafted=stats.drafted + int(work.drafted.sum()),
            accepted=stats.accepted + int(work.accepted.sum()),
            kept=stats.kept + (0.0 if work.kept is None else float(work.kept.sum())),
        )


class _Programs:
    """Counts the programs that samplers of this process have compiled."""

    def __init__(self):
        self._newest = self._dropped = 0

    def count(self) -> tuple[int, int]:
        """Return how many there are, and how often they were dropped before, as by `jax.clear_caches`."""
        programs: tuple[Any, ...] = decoder.prefill, decoder.decode, *polled.PROGRAMS
        now = sum(program._cache_size() for program in programs)
        self._dropped += now < self._newest
        self._newest = now
        return now, self._dropped


_programs = _Programs()
