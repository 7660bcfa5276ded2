"""Supervised training by cross-entropy, on a task's worked answers or on the assistant's turns of conversations.

RL then begins from a policy that is sometimes right. Writes a Hugging Face folder, tokenizer included, for `train` to
start from. The model is the one in `model.folder`, or a small new one with a new tokenizer.

    python -m gspo_jax.coldstart --config=configs/tiny.py --workdir=runs/cold
    python -m gspo_jax.coldstart --config=configs/gsm8k.py --config.model.folder=Qwen3-0.6B --workdir=runs/sft \
        --config.coldstart.conversations=conversations.jsonl --config.coldstart.steps=200
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from gspo_jax import cli, foreign
from gspo_jax.data import contents, rows
from gspo_jax.data.chat import ToolSchemas
from gspo_jax.data.pipeline import worked_batches
from gspo_jax.data.records import Record, Records
from gspo_jax.data.supervised import assistant_turns, conversations, worked_answers
from gspo_jax.data.tokenizer import CHATML, Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.models import huggingface, transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.config_json import read_if_any
from gspo_jax.objectives.surrogates import token_mean
from gspo_jax.parallel import hosts, processes
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.progress import Progress
from gspo_jax.setup import data, inputs, keys, learning, policy, relevance
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.training import state as state_lib
from gspo_jax.training.layout import Layout, deal, fold_rows
from gspo_jax.training.scoring import Scoring, score
from gspo_jax.training.state import Learner, make_optimizer
from gspo_jax.types import Packing, Responses, Weights

MADE_BY = "made_by.json"


def made_by(config: ConfigDict) -> dict[str, Any]:
    """Return all that a cold start depends on: config fields, and digests of their files.

    A model folder counts by name only.
    """
    files = inputs.of_rows(config) | inputs.of_functions(config)
    fields = json.loads(json.dumps(relevance.of_cold_start(config)))  # as they are read again
    return fields | {f"{name} (content)": one for name, one in files.items()}


def digest(config: ConfigDict) -> str:
    """Return eight hexadecimal digits, equal for runs that can share one cold start."""
    return contents.digest(made_by(config))[:8]


def check_reuse(config: ConfigDict, folder: Path, *, may_change: tuple[str, ...]) -> None:
    """Raise a UserError if the cold start in `folder` has another config or other files.

    A folder without record passes, as do changed fields with prefixes in `may_change`.
    """
    before = read_if_any(folder / MADE_BY)
    if not before:
        return
    now = made_by(config)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not name.startswith(may_change):
            raise UserError(
                f"{name} is {now.get(name)!r} here and {before.get(name)!r} in the cold start in {folder}; set it "
                "back, or start another run with another --workdir"
            )


def coldstart(
    config: ConfigDict,
    records: Sequence[Record],
    mesh: Mesh,
    folder: Path,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Train for `config.coldstart.steps` steps and save the model atomically.

    Args:
      config: without `model.folder`, a new model and tokenizer are trained.
      records: with worked answers or conversations (see `load`).
      mesh: the trainer's.
      folder: must not exist.
      on_step: called before every step.
    """
    cold, style = config.coldstart, data.prompt_style(config)
    if config.model.folder:
        model_config, tokenizer = policy.read_folder(config, Path(config.model.folder))
    else:
        tokenizer = _new_tokenizer(conversations(records), style.tools, cold.vocab_size)
        model_config = policy.cold_start_model(config, eos_token_ids=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id)
    if cold.conversations or "turns" in records[0]:
        records = assistant_turns(conversations(records), tokenizer, style)
    else:
        records = worked_answers(records, tokenizer)
    batches = {
        terse: worked_batches(
            demonstrations(records, terse=terse, seed=config.seed),
            tokenizer,
            batch=cold.batch,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.sampling.max_response_length,
            seed=config.seed,
            style=style,
        )
        for terse in {0.0, *cold.terse}
    }
    model, step = _begin(config, model_config, mesh)
    packer = learning.make_packer(config, model_config, mesh_lib.batch_shards(mesh.shape), cold_start=True)
    loss = jnp.nan
    reports = -(-cold.steps // cold.log_every)
    with Progress(reports, label="cold start") as progress:
        for report in range(reports):
            for number in range(report * cold.log_every, min((report + 1) * cold.log_every, cold.steps)):
                batch = next(batches[_terse(config, number)])
                on_step()
                fields: tuple[Any, ...] = (batch.prompts, batch.prompt_lengths, batch.tokens, batch.mask)
                packing = packer(batch.mask.sum(axis=1), batch.prompt_lengths)
                model, loss = step(model, Responses(*hosts.shard_rows(mesh, fields)), packing)
            progress.advance(cross_entropy=float(loss), stage=_stage(config, report))
    unfinished = folder.with_name(folder.name + ".partial")
    huggingface.save(model.params, model_config, unfinished)  # every process takes part
    if processes.is_first():
        tokenizer.save(unfinished)
        (unfinished / MADE_BY).write_text(json.dumps(made_by(config), indent=2) + "\n", encoding="utf-8")
        storage.sync_tree(unfinished)
        os.replace(unfinished, folder)
    processes.wait_for_all("cold start")


def _terse(config: ConfigDict, step: int) -> float:
    stages = config.coldstart.terse or (0.0,)
    return stages[step * len(stages) // config.coldstart.steps]


def _stage(config: ConfigDict, report: int) -> str | None:
    last = min((report + 1) * config.coldstart.log_every, config.coldstart.steps) - 1
    share = _terse(config, last)
    if not share:
        return None
    begin = next(step for step in range(last + 1) if _terse(config, step))
    return f"(since step {begin}, {share:.0%} of the answers come without the work, and are harder to predict)"


def load(config: ConfigDict) -> Sequence[Record]:
    """Return the records to learn: conversations if configured, else the task's."""
    if config.coldstart.conversations:
        given = config.data
        return rows.conversations(
            config.coldstart.conversations, prompt=given.prompt, answer=given.answer, limit=given.limit or None
        )
    return data.load_records(config, "train")


def _new_tokenizer(shown: Sequence[Record], tools: ToolSchemas, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on conversations, with a chat template if there are tools."""
    template = CHATML if tools else None
    bare = Tokenizer.train((), vocab_size, template=template)
    texts = bare.chat_all([record["messages"] for record in shown], tools=[tools] * len(shown))
    return Tokenizer.train((text for text in texts if isinstance(text, str)), vocab_size, template=template)


def demonstrations(records: Sequence[Record], *, terse: float, seed: int) -> Records:
    """Return the records as demonstrations, a fraction `terse` with the final answer alone, also in place of calls.

    The policy learns to work problems out and to guess. RL discovers which pays.
    """
    short = np.random.default_rng(seed).random(len(records)) < terse

    def convert(index: int, record: Record) -> Record:
        final = record.get("final", record["worked"])
        return record | {"worked": "".join(final.rpartition("####")[1:])} if short[index] else record

    return Records("demonstrations", records, convert=convert, where=lambda _: repr(records))


def _begin(
    config: ConfigDict, model_config: ModelConfig, mesh: Mesh
) -> tuple[Learner, Callable[[Learner, Responses, Packing], tuple[Learner, Float[Array, ""]]]]:
    cold = config.coldstart
    graph, shapes = transformer.abstract(
        model_config, dtype=jnp.dtype(config.model.dtype), dispatch=config.model.dispatch
    )
    optimizer, _ = make_optimizer(total_updates=cold.steps, **cold.optimizer)
    scoring = Scoring(logprob_chunk=config.training.logprob_chunk, remat=config.model.remat)

    @jax.value_and_grad
    def loss(params: nnx.State, layout: Layout, weights: Float[Array, "B T"]) -> Float[Array, ""]:
        scores = score(graph, Weights.full(params), layout, scoring)
        return -jnp.where(layout.responses.mask, weights * scores.logprobs, 0).sum()

    def add_rows(params: nnx.State, batch: Responses, packing: Packing) -> tuple[Array, nnx.State]:
        dealt = deal((batch, token_mean(batch.mask)), packing)
        (batch, weights), packing = jax.tree.map(lambda x: x[0], (dealt, packing))  # of the one mini-batch

        def add(total: tuple[Array, nnx.State], layout: Layout) -> tuple[Array, nnx.State]:
            return jax.tree.map(jnp.add, total, loss(params, layout, weights))

        nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return fold_rows(add, nothing, batch, packing, group_size=1)

    @partial(jax.jit, donate_argnums=0)
    def step(learner: Learner, batch: Responses, packing: Packing) -> tuple[Learner, Float[Array, ""]]:
        value, gradient = add_rows(learner.params, batch, packing)
        if not cold.train_router:
            routers, others = nnx.split_state(gradient, lambda path, _: path[-1] == "router", ...)
            gradient = nnx.merge_state(jax.tree.map(jnp.zeros_like, routers), others)
        return state_lib.step(learner, optimizer, gradient), value

    if config.model.folder:
        params = huggingface.load_params(Path(config.model.folder), model_config, mesh)
    else:
        params = transformer.init_params(model_config, keys.init_key(config), mesh=mesh)
    shardings = state_lib.learner_shardings(shapes, optimizer, mesh)
    return jax.jit(partial(state_lib.new_learner, optimizer=optimizer), out_shardings=shardings)(params), step


def main(config: ConfigDict) -> None:
    """Run the command."""
    folder = Path(flags.FLAGS.workdir)
    foreign.check_name(folder, "--workdir")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; give --workdir a new folder")
    if not config.coldstart.steps:
        raise UserError("coldstart.steps is 0, so there is nothing to train; set it above 0")
    model = check(config, count_devices=jax.device_count)
    storage.check_folder(folder.absolute())
    records = load(config)
    mesh = make_meshes(config, model).trainer
    with jax.set_mesh(mesh):
        coldstart(config, records, mesh, folder)
    print(f"the model and its tokenizer are in {folder}")


if __name__ == "__main__":
    cli.run(main, "coldstart")
