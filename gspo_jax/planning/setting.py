"""A run on a TPU slice: each program's share of work, resident memory and lower bounds per chip."""

import dataclasses
import math

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from gspo_jax.engine import Engine
from gspo_jax.models import flops as flops_lib
from gspo_jax.models import transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.dispatch import HEADROOM
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.rates import Rates
from gspo_jax.parallel.topology import Chip


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run's engine on chips of one generation."""

    engine: Engine
    """The run's programs."""
    chip: Chip
    """Memory, bandwidth and peak flops of one chip."""
    rates: Rates
    """What a chip attains, and what its operations take at least."""

    @property
    def config(self) -> ConfigDict:
        """The run's config."""
        return self.engine.config

    @property
    def model(self) -> ModelConfig:
        """Shape of the policy."""
        return self.engine.policy.config

    @property
    def mesh(self) -> Mesh:
        """The trainer's mesh."""
        return self.engine.meshes.trainer

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes whole layers."""
        return self.config.model.remat in transformer.LEAN

    def work(self, name: str) -> flops_lib.Work:
        """A chip's share of a program's work; for `sample_decode`, of one step with all responses at full length."""
        data, sampling = self.config.data, self.config.sampling
        P, G = data.prompts_per_batch, sampling.group_size
        S, T = data.max_prompt_length, sampling.max_response_length
        rows = P * G
        if name == "sample_prefill":
            whole = flops_lib.of_rows(P, prompt=S, response=0, share=1)
            whole = dataclasses.replace(whole, predictions=P)
        elif name == "sample_decode":
            slots = sampling.slots or rows
            whole = flops_lib.Work(slots, slots, slots * (S + T))
        elif name == "reshard":
            whole = flops_lib.Work(0, 0, 0)
        else:
            rows, share = self._learned(name)
            whole = flops_lib.of_rows(rows, prompt=S, response=T, share=share)
        return whole / self.mesh.size

    def _learned(self, name: str) -> tuple[int, int]:
        """Rows of an update, or else of a batch to score, and how many of them share a prompt."""
        training, G = self.config.training, self.config.sampling.group_size
        rows = self.config.data.prompts_per_batch * G
        rows = rows // training.minibatches if name == "update" else rows
        with jax.set_mesh(self.mesh):
            return rows, mesh_lib.shared_rows(rows // training.microbatches, G)

    def attention_rows(self, name: str) -> tuple[int, int, int]:
        """Tokens of one row that attention kernels read in a program; of them the prompt's; responses after it."""
        S, T = self.config.data.max_prompt_length, self.config.sampling.max_response_length
        if name not in ("update", "score"):
            return S, 0, 1
        _, share = self._learned(name)
        return S + share * T, S, share

    def expert_shards(self, name: str) -> int:
        """Number of chips over which a program spreads the experts of a layer while it computes."""
        meshes = self.engine.meshes
        return (meshes.sampler if name.startswith("sample") else meshes.trainer).shape["expert"]

    def filled(self, name: str) -> float:
        """Fraction of the experts' buffer rows in use if load is balanced."""
        model, shards = self.model, self.expert_shards(name)
        dispatch = self.config.model.dispatch
        if not model.is_routed or dispatch == "capacity":
            return 1.0
        K = model.experts_per_token
        share = K / (shards * min(K, model.num_experts // shards))
        return share if name == "update" else max(share, 1 / HEADROOM)  # the others have buffers for the usual load

    def least_chips(self) -> int:
        """Minimum chips whose HBM holds trainer state and gradients, under any sharding."""
        state = self.engine.state_shapes
        trained = (state.params, None if state.critic is None else state.critic.params)
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state, trained)))
        return math.ceil(held / self.chip.memory)

    def resident(self, name: str) -> int:
        """Bytes per chip of trainer state that stays in HBM while a program runs, other than its arguments."""
        if name == "update":
            return 0
        state, places = self.engine.state_shapes, self.engine.shardings
        given = {"score": ("policy.params", "critic.params"), "reshard": ("policy.params",)}.get(name, ())
        leaves = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(places), strict=True)
        return sum(
            math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
            for (path, x), place in leaves
            if not jax.tree_util.keystr(path).startswith(tuple(f".{part}" for part in given))
        )

    def formula(self, name: str) -> tuple[flops_lib.Flops, float]:
        """Flops of a forward pass on one chip, by part, and how many times the program runs those of attention."""
        forward = flops_lib.forward(self.model, self.work(name))
        return forward, 3.5 + self.recomputes if name == "update" else 1.0

    def least_bytes(self, name: str) -> float:
        """Minimum HBM bytes per chip: its share of all weights once and, in a decode step, of the live KV cache."""
        model, chips = self.model, self.mesh.size
        embedding = model.vocab_size * model.hidden_size
        layers = flops_lib.forward(model, flops_lib.Work(1, 0, 0))
        active = (layers.trunk + layers.down) / 2  # parameters that a token uses
        idle = sum(stack.layers * stack.width * (stack.experts - stack.experts_per_token) for stack in model.stacks)
        whole = active + 3 * model.hidden_size * idle
        if name == "reshard":
            return (4 + 2) * (whole + 2 * embedding) / chips
        seen = 0.0
        if name == "sample_decode":
            seen = self.work(name).pairs * 2 * 2 * model.num_kv_heads * model.head_dim * model.num_layers
        return 2 * (whole + embedding) / chips + seen
