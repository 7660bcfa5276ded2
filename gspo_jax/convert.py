"""Conversion of a model between Hugging Face format and an Orbax checkpoint, on the CPU, with tokenizer files.

    python -m gspo_jax.convert --from=HF_FOLDER --to=FOLDER
    python -m gspo_jax.convert --from=MODEL.gguf --to=HF_FOLDER [--dtype=bfloat16]
    python -m gspo_jax.convert --from=FOLDER --to=HF_FOLDER [--dtype=bfloat16]
    python -m gspo_jax.convert --from=RUN_WITH_ADAPTERS --to=FOLDER [--merge]

An Orbax folder has the parameters in `checkpoints/` and a config.json in Hugging Face format. The newest checkpoint of
a run folder becomes a Hugging Face folder, which inference servers can load. A run with adapters becomes a `peft`
folder of these alone or, with --merge, a model that has them in its weights. A GGUF file, quantised or not, becomes a
Hugging Face folder with its tokenizer; only one tensor at a time is in memory.
"""

import json
import math
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from gspo_jax import cli, foreign
from gspo_jax.data import gguf as gguf_tokenizer
from gspo_jax.data.tokenizer import FILES, Tokenizer, check_vocabulary
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.folder.notes import fields_of, read_config
from gspo_jax.folder.storage import CHECKPOINTS, RunFolder
from gspo_jax.models import gguf, huggingface, int8, lora, peft, transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parser import make_parser
from gspo_jax.setup import policy
from gspo_jax.training.checkpoint import Checkpointer, load_newest
from gspo_jax.types import Weights

DTYPES = ("float32", "bfloat16")


def convert(source: Path, target: Path, *, dtype: str | None = None, merge: bool = False) -> dict[str, Any]:
    """Write the model in `source` to the new folder `target` in the other format and return a summary.

    Args:
      source: a Hugging Face folder, a converted folder, a run folder or a GGUF file.
      target: a missing or empty folder.
      dtype: "float32" or "bfloat16". By default the source's, float32 for a run or a GGUF file. Orbax keeps norms and
        routers in float32.
      merge: merge a run's adapters into the weights.

    Raises:
      UserError: `source` is none of these folders, or `target` is not empty.
    """
    if dtype not in (None, *DTYPES):
        raise UserError(f"dtype is {dtype!r}; use {' or '.join(DTYPES)}")
    foreign.check_name(source, "--from")
    foreign.check_name(target, "--to")
    if not source.is_dir() and source.suffix.lower() != ".gguf":
        raise UserError(
            f"{source} is not a folder; give a Hugging Face folder, a converted folder, a run folder or a .gguf file"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder; give --to a new one")
    if not source.is_dir():
        if merge:
            raise UserError(f"{source} is not a run and has no adapters to merge; leave out --merge")
        return _convert_gguf(source, target, jnp.dtype(dtype or "float32"))
    if (source / CHECKPOINTS).is_dir():
        storage.find(source, flag="--from")
        storage.check_contents(source)
        model = _load(source)
    elif merge:
        raise UserError(f"{source} is not a run and has no adapters to merge; leave out --merge")
    else:
        config = huggingface.read_config(source)
        params = huggingface.load_params(source, config, dtype=dtype)
        model = _Model(Weights.full(params), config, source, in_hugging_face_format=True)
    if merge and model.adapters is None:
        raise UserError(f"{source} has no adapters to merge; leave out --merge")
    copied = [name for name in FILES if foreign.is_file(model.tokenizer / name, inside=model.tokenizer)]
    params, written = model.weights.whole, "huggingface"
    if model.adapters is not None and merge:
        dtype = dtype or "float32"
        scales, base = int8.split(model.weights.frozen)
        params = lora.merge(model.weights.trainable, base, model.adapters, scales=scales, dtype=jnp.dtype(dtype))
    if model.adapters is not None and not merge:
        if dtype is not None:
            raise UserError(f"dtype is {dtype!r}, and adapters are written in float32; leave out --dtype")
        params, written = model.weights.trainable, "peft"
        peft.save(params, model.config, model.adapters, target, base=str(model.tokenizer))
    elif model.in_hugging_face_format:
        written = "orbax"
        _save(params, model.config, target)
    else:
        huggingface.save(params, model.config, target, dtype=dtype)
    for name in copied:
        shutil.copyfile(model.tokenizer / name, target / name)
    if model.stops is not None:
        model.stops.save_stops(target)
    stored = "float32" if written == "peft" else json.loads((target / huggingface.CONFIG).read_text())["torch_dtype"]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return _facts(source, target, written, model.config, jnp.dtype(stored), count)


def _facts(
    source: Path, target: Path, written: str, config: ModelConfig, dtype: np.dtype, parameters: int
) -> dict[str, Any]:
    return {
        "from": str(source),
        "to": str(target),
        "format": written,
        "model_type": huggingface.config_json(config, dtype)["model_type"],
        "dtype": dtype.name,
        "parameters": parameters,
        "bytes": sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
    }


def _convert_gguf(source: Path, target: Path, dtype: np.dtype) -> dict[str, Any]:
    """Write a Hugging Face folder. Header, tokenizer and chat template are checked before anything is written."""
    file = gguf.File(source)
    config = huggingface.of_fields(source, gguf.config_fields(file))
    shapes = huggingface.tensor_shapes(config)
    gguf.check(file, shapes)
    tokenizer = gguf_tokenizer.read(source, file.metadata)
    check_vocabulary(tokenizer, config.vocab_size)
    with tempfile.TemporaryDirectory() as tried:
        tokenizer.save(tried)
        Tokenizer.load(tried)
    interleaved = config.family == "llama"
    tensors = gguf.tensors(file, shapes, head_dim=config.head_dim, interleaved=interleaved)
    huggingface.write(target, config, shapes, tensors, dtype)
    tokenizer.save(target)
    return _facts(source, target, "huggingface", config, dtype, sum(map(math.prod, shapes.values())))


class _Model(NamedTuple):
    """Loaded model."""

    weights: Weights
    config: ModelConfig
    tokenizer: Path
    """Folder with its tokenizer. For a run, the initial model's."""
    adapters: lora.Adapters | None = None
    """None if it has no adapters."""
    in_hugging_face_format: bool = False
    stops: Tokenizer | None = None
    """A run's tokenizer, with all its EOS tokens."""


def _save(params: nnx.State, config: ModelConfig, folder: Path) -> None:
    """Write an Orbax folder. Its config.json comes last, so a folder without one is unfinished."""
    checkpointer = Checkpointer(folder / CHECKPOINTS)
    checkpointer.save(0, {"params": params}, run={"iteration": 0})
    checkpointer.close()
    fields = huggingface.config_json(config, jax.tree.leaves(params["embed"])[0].dtype)
    (folder / huggingface.CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _load(folder: Path) -> _Model:
    fields = read_config(folder)
    if fields is None:
        raise UserError(f"{folder} has {CHECKPOINTS} but no {huggingface.CONFIG}; it is incomplete, write it again")
    return _load_converted(folder, fields) if "model_type" in fields else _load_run(folder, fields)


def _load_converted(folder: Path, fields: dict[str, Any]) -> _Model:
    config = huggingface.read_config(folder)
    shapes = huggingface.with_dtype(transformer.abstract(config)[1], jnp.dtype(fields["torch_dtype"]))
    shardings = mesh_lib.param_shardings(shapes, _one_device())
    restored = load_newest(folder / CHECKPOINTS, {"params": shapes}, {"params": shardings})
    if restored is None:
        raise UserError(f"{folder / CHECKPOINTS} holds no checkpoint; convert the model again")
    return _Model(Weights.full(restored.state["params"]), config, folder)


def _load_run(folder: Path, fields: dict[str, Any]) -> _Model:
    """Load a run's newest checkpoint. Shape and tokenizer are the initial model's."""
    config = ConfigDict(fields_of(fields))
    first = policy.initial_folder(config, folder)
    model, tokenizer = policy.read_folder(config, first)
    files = RunFolder(name=str(folder), local=folder)
    made = policy.make_policy(config, model)
    weights, _ = policy.weights_of_run(config, files, made, _one_device())
    return _Model(weights, model, first, made.adapters, stops=tokenizer)


def _one_device() -> jax.sharding.Mesh:
    return mesh_lib.make_mesh({}, devices=jax.devices()[:1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return make_parser("convert").run(_command, arguments, place="--to")


def _command(given: Namespace) -> None:
    cli.check_facts_file(given.json)
    cli.check_output_folder(given.target, flag="to")
    storage.find(given.target, flag="--to")
    jax.config.update("jax_platforms", "cpu")  # a model may fit the host but not an accelerator
    done = convert(given.source, given.target, dtype=given.dtype, merge=given.merge)
    cli.write_facts(given.json, done)
    size = f"{done['parameters'] / 1e6:,.2f} M parameters, {done['dtype']}, {done['bytes'] / 1e6:,.1f} MB"
    print(f"{done['to']}: {done['model_type']} in {done['format']} format, {size}")


if __name__ == "__main__":
    sys.exit(main())
