"""A run on a TPU slice: per-chip work and lower bounds."""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from gspo_jax.engine import Engine
from gspo_jax.models import flops as flops_lib
from gspo_jax.models import transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.dispatch import BLOCK, block_rooms
from gspo_jax.models.experts import room_for
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.planning import programs
from gspo_jax.planning.costs import Machine
from gspo_jax.planning.loads import SKEW
from gspo_jax.planning.rates import Rates
from gspo_jax.planning.topology import Chip, Torus
from gspo_jax.rollout.pages import Pool
from gspo_jax.setup import learning
from gspo_jax.setup.memory import state_bytes, token_bytes
from gspo_jax.training.packing import full_row, turns_at_full_length


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run's engine on chips of one generation."""

    engine: Engine
    chip: Chip
    rates: Rates
    skew: float = SKEW
    """Standard deviation of routers' preferences. See loads.py."""
    torus: Torus | None = None
    """None: all chips are neighbours."""
    slices: int = 1

    @property
    def machine(self) -> Machine:
        """Hardware that runs the programs."""
        return Machine(self.chip.cores, self.slices, self.torus)

    @property
    def config(self) -> ConfigDict:
        """The run's config."""
        return self.engine.config

    @property
    def model(self) -> ModelConfig:
        """Shape of the policy."""
        return self.engine.policy.config

    @property
    def routed(self) -> ModelConfig:
        """Shape whose experts' loads are drawn: the policy or, if it is dense, a teacher with routers."""
        teacher = self.engine.teacher
        return teacher.config if teacher is not None and not self.model.is_routed else self.model

    @property
    def mesh(self) -> Mesh:
        """The trainer's mesh."""
        return self.engine.meshes.trainer

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes whole layers."""
        return self.config.model.remat in transformer.LEAN

    def work(self, name: str) -> flops_lib.Work:
        """Return per-chip work. `sample_decode`: one step, all responses at full length, or the pool full."""
        data, sampling = self.config.data, self.config.sampling
        P = data.prompts_per_batch
        S, T = data.max_prompt_length, sampling.max_response_length
        if name == "sample_prefill":
            whole = flops_lib.Work(P * S, P, P * S * (S + 1) / 2)
        elif name == "sample_decode":
            (own, pool), shards = self.decoder_size, mesh_lib.batch_shards(dict(self.engine.meshes.sampler.shape))
            slots, columns = shards * own, shards * min(own * T, pool.pages * pool.columns)
            fed = 1 + self.engine.sampler.drafting.tokens
            whole = flops_lib.Work(fed * slots, fed * slots, fed * (slots * S + columns))
        elif name in ("deal", "reshard"):
            whole = flops_lib.Work(0, 0, 0)
        else:
            whole = self._trained_work(name)
        return whole / self.mesh.size

    def _trained_work(self, name: str) -> flops_lib.Work:
        """Return the work on all chips. Every row position predicts a token."""
        packer, size = self.engine.packer, self.row_size
        responses = self.config.data.prompts_per_batch * packer.group_size // packer.minibatches
        (turns, *_) = turns_at_full_length(responses // packer.shards, packer.row_lengths, **size)
        _, count = full_row(packer.row_lengths[0], **size)
        S, T, times = size["prompt"], size["response"], packer.minibatches if name == "score" else 1
        pairs = responses * (S * T + T * (T + 1) / 2) + responses / count * S * (S + 1) / 2
        tokens = packer.shards * turns * packer.row_lengths[0]
        return flops_lib.Work(times * tokens, times * tokens, times * pairs)

    def rows_at_once(self, name: str) -> int:
        """Return the rows of a shard that a program computes in one pass."""
        with jax.set_mesh(self.mesh):
            return learning.make_scoring(self.config).at_once if name == "score" else 1

    @property
    def row_size(self) -> dict[str, int]:
        """Maximum prompt and response tokens, and responses per prompt."""
        data, sampling = self.config.data, self.config.sampling
        size = {"prompt": data.max_prompt_length, "response": sampling.max_response_length}
        return size | {"group_size": sampling.group_size}

    @property
    def decoder_size(self) -> tuple[int, Pool]:
        """Slots and pool of a batch shard of the sampler."""
        data, sampling, sampler = self.config.data, self.config.sampling, self.engine.sampler
        in_flight, share = sampling.partial.prompts, sampling.partial.share
        responses = (in_flight or data.prompts_per_batch) * sampling.group_size
        options = sampler.decode_options(responses, 1.0 if in_flight is None else share)
        return options["slots"] // mesh_lib.batch_shards(dict(sampler.mesh.shape)), options["pool"]

    def expert_shards(self, name: str) -> int:
        """Return the number of chips that share a layer's experts."""
        meshes = self.engine.meshes
        return (meshes.sampler if name.startswith("sample") else meshes.trainer).shape["expert"]

    def filled(self, name: str, *, padded: bool = False) -> float:
        """Return the used fraction of expert buffer rows under balanced load.

        `padded`: with the rows that fill up an expert's blocks.
        """
        model, shards, k = self.routed, self.expert_shards(name), self.routed.experts_per_token
        likely = 2**20 * k
        if name == "sample_prefill" and self.config.model.dispatch == "ragged_all_to_all" and shards > 1:
            blocks, _, likely = block_rooms(int(self.work(name).tokens), k, model.num_experts // shards, shards)
            return (likely if padded else int(self.work(name).tokens) * k) / (blocks * BLOCK)
        return likely / self.room(name, likely) if model.is_routed else 1.0

    def room(self, name: str, likely: int) -> int:
        """Return the rows of a shard's expert buffers for `likely` pairs."""
        model, shards = self.routed, self.expert_shards(name)
        most = shards * min(model.experts_per_token, model.num_experts // shards)  # per token of the shard's own
        return room_for(likely // model.experts_per_token * most, likely)

    def least_chips(self) -> int:
        """Return the fewest chips with HBM for trainer state, gradients, frozen weights and the teacher's."""
        state = self.engine.state_shapes
        trained = (state.params, None if state.critic is None else state.critic.params)
        held = nbytes((state, trained, self.engine.policy.shapes.frozen, self.engine.teacher_shapes))
        return math.ceil(held / self.chip.memory)

    def formula(self, name: str) -> tuple[flops_lib.Flops, float]:
        """Return per-chip forward flops by part, and the multiplier for attention."""
        work, engine = self.work(name), self.engine
        forward = flops_lib.forward(self.model, work, is_step=name == "sample_decode")
        adapters = work.tokens * self._adapter_flops
        teacher = flops_lib.Flops(0, 0, 0, 0)
        if engine.teacher is not None and name == ("update" if engine.teacher.reads_in_update else "score"):
            teacher = flops_lib.forward(engine.teacher.config, work)
        if name == "score":
            count, adapted = self._policies_scored
            whole = flops_lib.Flops(*(count * own + other for own, other in zip(forward, teacher, strict=True)))
            again = forward.head if engine.objective.by_energy else 0.0
            return whole._replace(adapters=adapted * adapters, head=whole.head + again), 1.0
        forward = forward._replace(adapters=adapters)
        if name != "update":
            return forward, 1.0
        times = 3.5 + self.recomputes
        if teacher.forward:  # logits of both are computed once more, and again in the backward pass
            gradients = 1 if engine.policy.adapters is not None else 2
            more = teacher.forward + teacher.head + (2 + gradients) * forward.head
            forward, times = forward._replace(beside=more), times + teacher.attention / forward.attention
        return forward, times

    @property
    def _policies_scored(self) -> tuple[int, int]:
        """Passes of models of the policy's shape in "score", and those with adapters: its own, and the reference's."""
        config, engine = self.config, self.engine
        own, reference = learning.recomputes(config) or engine.objective.by_energy, config.reference.kl_weight > 0
        alone = engine.scoring_teacher(engine.teacher_shapes) is not None and engine.critic is None
        own = own or not (reference or alone)
        return own + reference, own + (reference and bool(engine.policy.adapter_folder))

    @property
    def _adapter_flops(self) -> float:
        """Adapter flops per token, 0 in full training."""
        policy, total = self.engine.policy, 0.0
        if policy.adapters is None:
            return total
        for variable in jax.tree.leaves(policy.shapes.trainable, is_leaf=lambda x: isinstance(x, nnx.Variable)):
            axes, model = variable.get_metadata("axes"), self.model
            met = model.experts_per_token / model.num_experts if "expert" in axes else 1.0
            total += 2 * math.prod(variable.shape) * met
        return total

    def least_bytes(self, name: str) -> float:
        """Return minimum HBM bytes per chip: its share of all weights and, in a decode step, the KV cache.

        Trained weights are read in the compute dtype, frozen ones as stored. Looking up an embedding costs nothing.
        """
        model, engine, chips = self.model, self.engine, self.mesh.size
        if name == "reshard":
            moved = engine.sampler.moved(engine.policy.shapes)
            return nbytes((moved, jax.eval_shape(engine.sampler.reshard, moved))) / chips
        if name == "deal":
            deal = programs.make(name, engine)[0]
            return nbytes((deal.arguments, deal.results())) / chips
        weights = engine.copied if name.startswith("sample") else engine.policy.shapes
        read = sum(x.size * engine.dtype.itemsize for x in _multiplied(weights.trainable, model))
        read += nbytes(_multiplied(weights.frozen, model))
        if engine.teacher is not None and name == ("update" if engine.teacher.reads_in_update else "score"):
            read += nbytes(_multiplied(engine.teacher.shapes, engine.teacher.config))
        seen = 0.0
        if name == "sample_decode":
            seen = self.work(name).pairs * token_bytes(self.config, model, {"tensor": 1})
            seen += 2 * self.work(name).tokens * state_bytes(self.config, model, {"tensor": 1})  # read and written
        return read / chips + seen


def _multiplied(params: nnx.State, model: ModelConfig) -> list[Any]:
    """Drop an embedding that is only looked up."""
    leaves = jax.tree.leaves_with_path(params)
    return [x for (first, *_), x in leaves if model.tie_word_embeddings or first != jax.tree_util.DictKey("embed")]


def nbytes(shapes: Any) -> int:
    """Return global bytes, each array once."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
