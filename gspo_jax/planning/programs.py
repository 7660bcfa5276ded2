"""The engine's programs with abstract arguments: shapes, dtypes and shardings. Nothing is allocated."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gspo_jax import engine as engine_lib
from gspo_jax.engine import Engine
from gspo_jax.kernels.packed_attention import Spans
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel import rows as rows_lib
from gspo_jax.parallel.mesh import placed
from gspo_jax.rollout import decoder, polled
from gspo_jax.rollout.pages import Pool
from gspo_jax.rollout.polled import PolledDecode
from gspo_jax.rollout.prefixes import PackedPrefix, few
from gspo_jax.setup import learning
from gspo_jax.setup.memory import prefix_rows
from gspo_jax.types import Batch, KeptRecord, OldPolicy, Packing, Prompts, Rollout, RouterRecord, Weights

NAMES = ("update", "score", "deal", "sample_prefill", "sample_decode", "reshard")


@dataclasses.dataclass(frozen=True)
class Program:
    """Jitted function with its mesh and abstract arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Static ones by value, arrays as shapes with shardings."""
    options: dict[str, Any]
    mesh: Mesh

    def trace(self) -> jax.stages.Traced:
        """Trace the program."""
        traceable: Any = self.function
        with jax.set_mesh(self.mesh):
            return traceable.trace(*self.arguments, **self.options)

    def results(self) -> Any:
        """Return the shapes of its results."""
        traceable: Any = self.function
        with jax.set_mesh(self.mesh):
            return traceable.eval_shape(*self.arguments, **self.options)


def make(name: str, engine: Engine) -> list[Program]:
    """Return the programs that the engine runs under a name in `NAMES`."""
    made = getattr(_Programs(engine), name)()
    return made if isinstance(made, list) else [made]


class _Programs:
    """Builder with one method per name in `NAMES`."""

    def __init__(self, engine: Engine):
        config = engine.config
        self.engine, self.config, self.model = engine, config, engine.policy.config
        self.mesh, self.sampler_mesh = engine.meshes.trainer, engine.meshes.sampler
        self.prompts, self.group = config.data.prompts_per_batch, config.sampling.group_size
        self.rows = self.prompts * self.group
        self.S, self.T = config.data.max_prompt_length, config.sampling.max_response_length
        self.critic = engine.critic

    def update(self) -> Program:
        engine = self.engine
        state, index = placed(engine.state_shapes, engine.shardings), jax.ShapeDtypeStruct((), jnp.int32)
        teacher = engine.updating_teacher(engine.teacher_shapes)
        arguments = engine.objective, state, engine.trained.frozen, self._batch(), index, teacher
        return Program(engine.programs.update, arguments, {}, self.mesh)

    def score(self) -> Program:
        """Build the scoring of a batch.

        A run without any scores is planned with `training.old_logprobs="recompute"`.
        """
        config, engine = self.config, self.engine
        score, teacher = engine.programs.score, engine.scoring_teacher(engine.teacher_shapes)
        own = learning.recomputes(config) or engine.objective.by_energy
        if not (own or config.reference.kl_weight or teacher or self.critic):
            with jax.set_mesh(self.mesh):
                score = engine_lib.make_score(config, engine.policy, None, None, recompute=True)
        critic = None
        if self.critic is not None:
            critic = placed(self.critic.shapes, mesh_lib.param_shardings(self.critic.shapes, self.mesh))
        batch = Batch(rollout=self._rollout(self._places), packing=self._packing())
        arguments = engine.trained, critic, engine.reference_shapes, batch, teacher
        return Program(score, arguments, {}, self.mesh)

    def deal(self) -> Program:

        def each(shape: tuple[int, ...], dtype: Any) -> Any:
            return _rows(self.mesh, (self.rows, *shape), dtype)

        return Program(self.engine.programs.deal, (self._rollout(each), self._packing()), {}, self.mesh)

    def sample_prefill(self) -> Program:
        """Build the prefill of a batch's prompts, without partial rollouts' prefixes."""
        return self._prefill(self.prompts)

    def sample_decode(self) -> list[Program]:
        """Build the decode loop, whole or in the pieces of `rollout.polled`.

        With partial rollouts all prompts are in flight, with prefixes of half the maximum length.
        """
        in_flight, sampler = self.config.sampling.partial.prompts, self.engine.sampler
        prompts, prefix, limits, min_ended = in_flight or self.prompts, None, None, 1.0
        responses = prompts * self.group
        if in_flight is not None:
            min_ended = self.config.sampling.partial.share
        options = sampler.decode_options(responses, min_ended)
        if in_flight is not None:
            prefix = self._prefix(responses, options["slots"], options["pool"])
            limits = _rows(self.sampler_mesh, (responses,), jnp.int32)
        prefill = self._prefill(prompts, prefix)
        graph, weights, _, keys, _ = prefill.arguments
        prefilled = prefill.results()
        places = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.sampler_mesh, spec), part),
            decoder.prefilled_specs(prefix, "tensor" if self.model.cached.heads > 1 else None),
            prefilled,
        )
        inputs = placed(prefilled, places), keys, limits
        if (pieces := sampler.pieces(responses, min_ended)) is not None:
            return self._pieces(pieces, weights, inputs)
        return [Program(decoder.decode, (graph, weights, *inputs), options, self.sampler_mesh)]

    def _pieces(self, decode: PolledDecode, weights: Weights, inputs: tuple[Any, ...]) -> list[Program]:
        """Build a decode's pieces."""
        found: list[Program] = []

        def piece(function: Any, *carried: Any, **options: Any) -> Any:
            found.append(Program(function, (decode, weights, inputs, *carried), options, self.sampler_mesh))
            return found[-1].results()

        state, pools = piece(polled.begin_piece)
        places = [NamedSharding(self.sampler_mesh, polled.pool_spec(x.shape)) for x in pools]
        state = jax.tree.map(lambda x: _rows(self.sampler_mesh, x.shape, x.dtype), state)
        piece(polled.advance_piece, state, placed(pools, places))
        piece(polled.finish_piece, state, prompt_length=self.S)
        return found

    def _prefill(self, prompts: int, prefix: PackedPrefix | None = None) -> Program:
        rows, responses = partial(_rows, self.sampler_mesh), prompts * self.group
        batch = Prompts(rows((prompts, self.S), jnp.int32), rows((prompts,), jnp.int32))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), responses))
        arguments = self.engine.policy.graph, self.engine.copied, batch, rows(keys.shape, keys.dtype), prefix
        return Program(decoder.prefill, arguments, self.engine.sampler.prefill_options, self.sampler_mesh)

    def _prefix(self, responses: int, slots: int, pool: Pool) -> PackedPrefix:
        shards = mesh_lib.batch_shards(dict(self.sampler_mesh.shape))
        count, width = prefix_rows(self.config, slots // shards, pool)
        each = _rows(self.sampler_mesh, (responses,), jnp.int32)
        tokens = _rows(self.sampler_mesh, (shards * count, width), jnp.int32)
        prefix = PackedPrefix(each, each, each, tokens, Spans(tokens, tokens, tokens))
        if not self.model.is_recurrent:
            return prefix
        ends = _rows(self.sampler_mesh, (shards * count, few(-(-responses // (shards * count)))), jnp.int32)
        return prefix._replace(number=each, ends=ends)

    def reshard(self) -> Program:
        sampler = self.engine.sampler
        return Program(sampler.reshard, (sampler.moved(self.engine.trained),), {}, self.sampler_mesh)

    def _places(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array [M, Q, *shape] of a packed batch."""
        places = self._packing().responses.shape
        return jax.ShapeDtypeStruct((*places, *shape), dtype, sharding=NamedSharding(self.mesh, rows_lib.PLACES))

    def _rollout(self, each: Callable[[tuple[int, ...], Any], Any]) -> Rollout:
        """Build a rollout. `each` makes an array from one response's shape."""
        S, T, model = self.S, self.T, self.model
        routed = (S + T, *model.route_shape)
        with_logprobs = learning.keeps_router_logprobs(self.config, model)
        kept = None
        if K := self.engine.sampler.sampling.recorded:
            kept = KeptRecord(each((T, K), jnp.int32), each((T, K), jnp.float32), each((T,), jnp.bool_))
        return Rollout(
            prompts=each((S,), jnp.int32),
            prompt_lengths=each((), jnp.int32),
            tokens=each((T,), jnp.int32),
            mask=each((T,), jnp.bool_),
            action_mask=each((T,), jnp.bool_),
            truncated=each((), jnp.bool_),
            behaviour_logprobs=each((T,), jnp.float32),
            logprobs=each((T,), jnp.float32),
            routes=RouterRecord(each(routed, model.expert_dtype), each(routed, jnp.float32) if with_logprobs else None),
            kept=kept,
        )

    def _batch(self) -> Batch:
        config, objective = self.config, self.engine.objective
        rollout, tokens = self._rollout(self._places), self._places((self.T,), jnp.float32)
        recomputed = learning.recomputes(config)
        routes = flips = None
        if recomputed and self.model.is_routed:
            logprobs = self._places(rollout.routes.experts.shape[2:], jnp.float32)
            routes = RouterRecord(rollout.routes.experts, logprobs)
            flips = self._places((self.T, self.model.route_shape[0]), self.model.expert_dtype)
        old = OldPolicy(
            tokens,
            tokens if config.reference.kl_weight else None,
            None if self.critic is None else tokens,
            routes,
            tokens if self.engine.scoring_teacher(self.engine.teacher_shapes) else None,
            flips,
            tokens if objective.by_energy else None,
        )
        distils = self.engine.teacher is not None and config.teacher.form == "advantage"
        by_step = len(config.step_rewards) > 0 or objective.turn_discount is not None
        of_tokens = self.critic is not None or by_step or distils or objective.by_energy
        return Batch(
            rollout=rollout,
            packing=self._packing(),
            old=old,
            mask=self._places((self.T,), jnp.bool_),
            advantages=tokens if of_tokens else self._places((), jnp.float32),
            returns=None if objective.critic is None else tokens,
            correction=None if learning.make_mismatch_correction(config) is None else tokens,
        )

    def _packing(self) -> Packing:
        """Return a packing. Its shapes do not depend on lengths."""
        nothing = np.zeros(self.rows, np.int32)
        packing = self.engine.packer(nothing, nothing)
        everywhere = mesh_lib.replicated(self.mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), packing)


def _rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.rows_sharding(mesh))
