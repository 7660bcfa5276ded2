"""The teacher of on-policy distillation: another model, frozen, with the policy's tokens."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from gspo_jax.data.tokenizer import Tokenizer, read_vocabulary
from gspo_jax.errors import UserError
from gspo_jax.models import huggingface
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.transformer import Transformer
from gspo_jax.setup import policy


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Static part of a teacher. It computes in model.dtype."""

    folder: Path
    config: ModelConfig
    graph: nnx.GraphDef[Transformer]
    shapes: nnx.State
    """Its weights as stored: no gradient, optimizer or copy in the sampler."""
    reads_in_update: bool
    """True if updates compare it over the whole vocabulary; otherwise it scores sampled tokens before them."""

    def load(self, mesh: Mesh) -> nnx.State:
        """Read its weights into the trainer's layout of frozen weights: over fsdp, expert and tensor."""
        return policy.load_frozen(self.folder, self.config, self.shapes, mesh)


def make_teacher(config: ConfigDict, sizes: Mapping[str, int]) -> Teacher | None:
    """Return the configured teacher, if any, without allocating. `sizes`: the trainer's mesh. Raise as `read_model`."""
    model, section = read_model(config, sizes), config.teacher
    if model is None:
        return None
    options = {"dtype": jnp.dtype(config.model.dtype), "dispatch": config.model.dispatch}
    graph, shapes = policy.abstract_frozen(model, section.dtype, **options)
    return Teacher(Path(section.folder), model, graph, shapes, reads_in_update=section.form == "full")


def read_model(config: ConfigDict, sizes: Mapping[str, int]) -> ModelConfig | None:
    """Return the shape of the teacher, if any, from its config.json.

    Raises:
      UserError: see `huggingface.read_config`, or it has too few positions, or the mesh `sizes` do not divide it. A
        mesh with a -1 is not checked.
    """
    folder = config.teacher.folder
    if not folder:
        return None
    model = huggingface.read_config(folder)
    policy.check_positions(config, model, f"the teacher in {folder}")
    if -1 not in sizes.values():
        try:
            model.check_mesh(dict(sizes), frozen=True)
        except UserError as error:
            raise UserError(f"the teacher in {folder}: {error}") from None
    return model


def check_tokens(config: ConfigDict, tokenizer: Tokenizer) -> None:
    """Raise a UserError that names the first id, if any, that the teacher's tokenizer gives another token."""
    if not config.teacher.folder:
        return
    own, theirs = tokenizer.vocabulary, read_vocabulary(Path(config.teacher.folder))
    for index in sorted(own.keys() | theirs.keys()):
        if own.get(index) != theirs.get(index):
            here, there = (repr(ids[index]) if index in ids else "no token" for ids in (own, theirs))
            raise UserError(
                f"id {index} is {here} in the policy's tokenizer and {there} in that of the teacher in "
                f"{config.teacher.folder}; distillation compares token by token, so use a teacher with the policy's "
                "tokenizer"
            )
