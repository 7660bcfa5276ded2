"""The engine's programs with abstract arguments, i.e. shapes, dtypes and shardings; nothing is allocated.

`plan` compiles them without devices or weights.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from gspo_jax import engine as engine_lib
from gspo_jax.engine import Engine
from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.models import huggingface
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.rollout import decoder, polled, prefixes
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.prefixes import PackedPrefix
from gspo_jax.setup import learning, sampling
from gspo_jax.types import Experience, OldPolicy, Packing, Prompts, Rollout, RouterRecord, Weights

NAMES = ("update", "score", "sample_prefill", "sample_decode", "reshard")


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the mesh and the arguments to trace it with."""

    function: Callable[..., Any]
    """The jitted function."""
    arguments: tuple[Any, ...]
    """Positional arguments: static ones by value, arrays as shapes with shardings."""
    options: dict[str, Any]
    """Static keyword arguments."""
    mesh: Mesh
    """Mesh in scope while tracing and compiling."""

    def trace(self) -> jax.stages.Traced:
        """The traced program."""
        traceable: Any = self.function
        with jax.set_mesh(self.mesh):
            return traceable.trace(*self.arguments, **self.options)

    def results(self) -> Any:
        """The shapes of what it returns."""
        traceable: Any = self.function
        with jax.set_mesh(self.mesh):
            return traceable.eval_shape(*self.arguments, **self.options)


def make(name: str, engine: Engine) -> list[Program]:
    """What the engine runs under this name, one of `NAMES`: one program, or several that follow one another."""
    made = getattr(_Programs(engine), name)()
    return made if isinstance(made, list) else [made]


class _Programs:
    """Builds the programs; one method per name in `NAMES`."""

    def __init__(self, engine: Engine):
        config = engine.config
        self.engine, self.config, self.model = engine, config, engine.policy.config
        self.mesh, self.sampler_mesh = engine.meshes.trainer, engine.meshes.sampler
        self.prompts, self.group = config.data.prompts_per_batch, config.sampling.group_size
        self.rows = self.prompts * self.group
        self.S, self.T = config.data.max_prompt_length, config.sampling.max_response_length
        self.critic = engine.critic

    def update(self) -> Program:
        """One optimizer step on a mini-batch."""
        engine = self.engine
        state, index = placed(engine.state_shapes, engine.shardings), jax.ShapeDtypeStruct((), jnp.int32)
        arguments = engine.objective, state, trained(engine).frozen, self._experience(), index
        return Program(engine.update, arguments, {}, self.mesh)

    def score(self) -> Program:
        """Scoring of a whole batch: the trainer's log-probs, the reference's, and the critic's values, as configured.

        A run that needs none of these, because log π_old is the sampler's, has no such program; it is planned as with
        `training.old_logprobs="recompute"`.
        """
        config, engine = self.config, self.engine
        score = engine.score
        if not (config.training.old_logprobs == "recompute" or config.reference.kl_weight or self.critic):
            with jax.set_mesh(self.mesh):
                score = engine_lib.make_score(config, engine.policy, None, recompute=True)
        critic = None
        if self.critic is not None:
            critic = placed(self.critic.shapes, mesh_lib.param_shardings(self.critic.shapes, self.mesh))
        arguments = trained(engine), critic, reference(engine), self._rollout(), self._packing()
        return Program(score, arguments, {}, self.mesh)

    def sample_prefill(self) -> Program:
        """Prefill of a batch's prompts; that of partial rollouts' prefixes is not planned."""
        return self._prefill(self.prompts)

    def sample_decode(self) -> list[Program]:
        """The decode loop of a sampling call, whole or, as `rollout.polled` runs a long one, in pieces.

        With partial rollouts it has all prompts in flight, and in every slot a response whose prefix has half of the
        longest possible length.
        """
        in_flight, sampler = self.config.sampling.partial.prompts, self.engine.sampler
        prompts, prefix, limits, min_ended = in_flight or self.prompts, None, None, 1.0
        responses = prompts * self.group
        with jax.set_mesh(self.sampler_mesh):
            options = sampler.decode_options(responses)
        if in_flight is not None:
            min_ended = self.config.sampling.partial.share
            prefix = self._prefix(responses, slots=options["slots"])
            limits = _rows(self.sampler_mesh, (responses,), jnp.int32)
        prefill = self._prefill(prompts, prefix)
        graph, weights, _, keys, _ = prefill.arguments
        with jax.set_mesh(self.sampler_mesh):
            prefilled = decoder.prefill.eval_shape(*prefill.arguments, **prefill.options)
            pieces = sampler.pieces(responses, min_ended)
        places = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.sampler_mesh, spec), part),
            decoder.prefilled_specs(prefix, "tensor"),
            prefilled,
        )
        inputs = placed(prefilled, places), keys, limits
        if pieces is not None:
            return self._pieces(pieces, weights, inputs)
        options["min_ended"] = min_ended
        return [Program(decoder.decode, (graph, weights, *inputs), options, self.sampler_mesh)]

    def _pieces(self, decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...]) -> list[Program]:
        """The pieces of a decode; of those that move slots together only the first, which moves the most."""
        found: list[Program] = []

        def piece(function: Any, *carried: Any, **options: Any) -> Any:
            program = Program(function, (decode, weights, inputs, *carried), options, self.sampler_mesh)
            if function is not polled.shrink_piece or options["phase"] == 1:
                found.append(program)
            return program.results()

        def sharded(carried: Any) -> Any:
            progress, rings = carried
            places = [NamedSharding(self.sampler_mesh, PartitionSpec(*polled.RINGS[: x.ndim])) for x in rings]
            return jax.tree.map(lambda x: _rows(self.sampler_mesh, x.shape, x.dtype), progress), placed(rings, places)

        carried = sharded(piece(polled.begin_piece))
        with jax.set_mesh(self.sampler_mesh):
            phases = decode.phases(inputs[0], inputs[2])
        for phase in range(phases):
            if phase:
                carried = sharded(piece(polled.shrink_piece, *carried, phase=phase))
            carried = sharded(piece(polled.advance_piece, *carried, phase=phase)[0])
        piece(polled.finish_piece, carried[0], prompt_length=self.S)
        return found

    def _prefill(self, prompts: int, prefix: PackedPrefix | None = None) -> Program:
        rows, responses = partial(_rows, self.sampler_mesh), prompts * self.group
        batch = Prompts(rows((prompts, self.S), jnp.int32), rows((prompts,), jnp.int32))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), responses))
        arguments = self.engine.policy.graph, copied(self.engine), batch, rows(keys.shape, keys.dtype), prefix
        return Program(decoder.prefill, arguments, self.engine.sampler.prefill_options, self.sampler_mesh)

    def _prefix(self, responses: int, *, slots: int) -> PackedPrefix:
        shards = mesh_lib.batch_shards(dict(self.sampler_mesh.shape))
        count, width = prefix_rows(self.config, slots // shards)
        each = _rows(self.sampler_mesh, (responses,), jnp.int32)
        tokens = _rows(self.sampler_mesh, (shards * count, width), jnp.int32)
        return PackedPrefix(each, each, each, tokens, Spans(tokens, tokens, tokens))

    def reshard(self) -> Program:
        """Cast and reshard of the weights that the sampler has a copy of."""
        sampler = self.engine.sampler
        return Program(sampler.reshard, (sampler.moved(trained(self.engine)),), {}, self.sampler_mesh)

    def _rollout(self) -> Rollout:
        rows, model = partial(_rows, self.mesh), self.model
        B, S, T = self.rows, self.S, self.T
        routed = (B, S + T, *model.route_shape)
        kept = sampling.keeps_router_logprobs(self.config, model)
        return Rollout(
            prompts=rows((B, S), jnp.int32),
            prompt_lengths=rows((B,), jnp.int32),
            tokens=rows((B, T), jnp.int32),
            mask=rows((B, T), jnp.bool_),
            action_mask=rows((B, T), jnp.bool_),
            truncated=rows((B,), jnp.bool_),
            behaviour_logprobs=rows((B, T), jnp.float32),
            logprobs=rows((B, T), jnp.float32),
            routes=RouterRecord(rows(routed, model.expert_dtype), rows(routed, jnp.float32) if kept else None),
        )

    def _experience(self) -> Experience:
        config, objective = self.config, self.engine.objective
        rollout, mask = self._rollout(), _rows(self.mesh, (self.rows, self.T), jnp.bool_)
        tokens = _rows(self.mesh, mask.shape, jnp.float32)
        recomputed = config.training.old_logprobs == "recompute"
        routes = None
        if recomputed and self.model.is_routed:
            logprobs: Any = _rows(self.mesh, rollout.routes.experts.shape, jnp.float32)
            routes = RouterRecord(rollout.routes.experts, logprobs)
        old = OldPolicy(
            tokens,
            tokens if config.reference.kl_weight else None,
            None if self.critic is None else tokens,
            routes,
        )
        of_tokens = self.critic is not None or len(config.step_rewards) > 0
        return Experience(
            rollout,
            mask=mask,
            old=old,
            advantages=tokens if of_tokens else _rows(self.mesh, (self.rows,), jnp.float32),
            returns=None if objective.critic is None else tokens,
            correction=None if learning.make_mismatch_correction(config) is None else tokens,
            packing=self._packing(),
        )

    def _packing(self) -> Packing:
        """The packing of a batch: its shapes do not depend on the lengths."""
        nothing = np.zeros(self.rows, np.int32)
        packing = self.engine.packer(nothing, nothing)
        everywhere = mesh_lib.replicated(self.mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), packing)


def prefix_rows(config: ConfigDict, slots: int) -> tuple[int, int]:
    """Rows of prefixes that a batch shard with so many slots is planned with, and their tokens: half a row a slot."""
    return prefixes.few(-(-slots // 2)), prefixes.row_tokens(
        config.data.max_prompt_length, config.sampling.max_response_length
    )


def trained(engine: Engine) -> Weights:
    """Shapes of the trainer's weights."""
    return placed(engine.policy.shapes, mesh_lib.param_shardings(engine.policy.shapes, engine.meshes.trainer))


def copied(engine: Engine) -> Weights:
    """Shapes of the sampler's weights: its copy, beside frozen weights of the trainer's if it reads these."""
    shapes = jax.eval_shape(engine.sampler.copied, engine.policy.shapes)
    return placed(shapes, mesh_lib.param_shardings(shapes, engine.meshes.sampler, mesh_lib.SAMPLER))


def reference(engine: Engine) -> nnx.State | None:
    """Shapes of the reference's parameters, as `setup.policy.reference_params` has them; None without a KL."""
    policy = engine.policy
    if not engine.config.reference.kl_weight:
        return None
    if policy.adapters is not None:
        return trained(engine).trainable if policy.adapter_folder else nnx.State({})
    shapes = huggingface.with_dtype(policy.shapes.trainable, engine.dtype)
    return placed(shapes, mesh_lib.param_shardings(shapes, engine.meshes.trainer))


def shard_bytes(shapes: Any) -> int:
    """Bytes per chip of a tree of shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def placed(shapes: Any, shardings: Any) -> Any:
    """The shapes with shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.rows_sharding(mesh))
