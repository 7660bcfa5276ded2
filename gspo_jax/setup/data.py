"""Records, prompt batches and reward functions, from a config."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax import secrets
from gspo_jax.calls.calls import Limits
from gspo_jax.data import files, rows, tasks
from gspo_jax.data.pipeline import (
    Batches,
    Defects,
    EvalBatches,
    PromptStyle,
    eval_batches,
    prompt_batches,
)
from gspo_jax.data.records import Record
from gspo_jax.data.rows import Source
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.parallel import processes
from gspo_jax.rewards import code, code_records, environments
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.rewards.step_scorer import StepScorer
from gspo_jax.setup import functions, servers
from gspo_jax.types import Prompts

Scores = Callable[[str, Record], bool]
"""Decides if the named reward scores a record. By default its source does."""


def load_records(config: ConfigDict, split: str) -> Sequence[Record]:
    """Load the first `data.limit` training records, or the first `eval.prompts` test records."""
    data = config.data
    limit = config.eval.prompts if split == "test" else data.limit
    return tasks.load(
        data.task,
        own=functions.load(config),
        split=split,
        folder=data.folder or None,
        data_dir=data.data_dir or None,
        limit=limit if limit else None,
        instruction=data.instruction,
        sources=sources(config),
        answer=data.answer,
        held_out=data.held_out,
        **({} if data.task == "jsonl" else data.options),  # for generated tasks
    )


def sources(config: ConfigDict) -> dict[str, Source]:
    """Return the sources of task jsonl, by name.

    Raises:
      UserError: rows are missing, named twice, or for another task.
    """
    data = config.data
    given = {f"data.{name}": len(data[name]) > 0 for name in ("train", "test", "sources", "prompt", "folder")}
    if data.task != "jsonl":
        allowed = ["data.folder", *(["data.prompt"] if data.few_shot or config.coldstart.conversations else [])]
        wrong = [name for name, there in given.items() if there and name not in allowed]
        if wrong:
            raise UserError(
                f"{wrong[0]} is for the task 'jsonl', and data.task is {data.task!r}; leave it empty, or set data.task "
                "to 'jsonl'"
            )
        return {}
    if given["data.test"] and not given["data.train"]:
        raise UserError(f"data.test is {data.test!r} without data.train; set both, or give each source its own test")
    there = [name for name in ("data.train", "data.folder", "data.sources") if given[name]]
    if len(there) != 1:
        said = " and ".join(there) if there else "none of them"
        raise UserError(f"task jsonl reads data.train, data.folder or data.sources, and {said} is set; set one")
    for name, source in data.sources.items():
        if not source.train:
            raise UserError(f"data.sources.{name}.train is empty; give a file or folder")
    if Path(data.folder).is_file() or files.parts(Path(data.folder)):
        raise UserError(f"data.folder is {data.folder!r}, a file, which would be held out too; set data.train to it")
    instruction = data.instruction or ""
    if not given["data.sources"]:
        train, test = data.train or data.folder, data.test or data.folder
        return {"": Source(train, test, prompt=data.prompt, instruction=instruction)}
    return {
        name: Source(
            source.train,
            source.test,
            prompt=data.prompt if source.prompt is None else source.prompt,
            weight=source.weight,
            system=source.system,
            instruction=instruction if source.instruction is None else source.instruction,
        )
        for name, source in data.sources.items()
    }


def prompt_style(config: ConfigDict) -> PromptStyle:
    """Return the shared beginning of all prompts: the system prompt, tools, and `data.few_shot` as turns.

    Raises:
      UserError: the examples are missing, or one has a system prompt.
    """
    data, shots = config.data, []
    if data.few_shot:
        examples = rows.conversations(data.few_shot, prompt=data.prompt, answer=data.answer, limit=data.shots or None)
        for example in examples:
            if example["messages"][0]["role"] == "system":
                raise UserError(f"data.few_shot: {example['id']} has a system prompt; move it to data.system")
            shots += example["messages"]
    return PromptStyle(data.system, tuple(shots), tools=environment_tools(config))


def environment_tools(config: ConfigDict) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of the environment's tools, none without."""
    if not config.environment.name:
        return ()
    tools = environments.tools_of(environments.find(config.environment.name, functions.own(config)))
    return () if tools is None else tuple(tools.schemas)


def training_prompts(config: ConfigDict, tokenizer: Tokenizer, records: Sequence[Record]) -> Batches[Prompts]:
    """Return endless shuffled batches of training prompts, with a checkpointable position."""
    return prompt_batches(
        records,
        tokenizer,
        prompts_per_batch=config.data.prompts_per_batch,
        max_prompt_length=config.data.max_prompt_length,
        seed=config.seed,
        style=prompt_style(config),
        defect=_defects(config, None),
    )


def held_out_prompts(
    config: ConfigDict, tokenizer: Tokenizer, records: Sequence[Record], *, scores: Scores | None = None
) -> EvalBatches:
    """Return batches that cover every test prompt once, in order."""
    return eval_batches(
        records,
        tokenizer,
        prompts_per_batch=config.data.prompts_per_batch,
        max_prompt_length=config.data.max_prompt_length,
        style=prompt_style(config),
        defect=_defects(config, scores),
    )


def make_scorer(config: ConfigDict, *, scores: Scores | None = None) -> Scorer:
    """Return the weighted rewards, in worker processes if they may hang. Every process must call this."""
    own, scoring = functions.own(config), config.scoring
    for name in scoring.environment:
        if name not in os.environ:
            raise UserError(
                f"scoring.environment has {name!r}, which is not set; export it, or take it out of the list"
            )
        secrets.keep(name)
    return Scorer(
        config.rewards.to_dict(),
        own=own,
        timeout_s=scoring.timeout_s,
        workers=scoring_workers(config),
        unsafe=scoring.unsafe,
        scores=scores or _scores(config),
        askers=servers.make(config),
        limits=call_limits(config),
        most_failed=scoring.most_failed,
        environment=scoring.environment,
    )


def call_limits(config: ConfigDict) -> Limits:
    """Return the limits of calls of rewards and environments."""
    scoring = config.scoring
    return Limits(
        concurrency=scoring.concurrency,
        tokens=scoring.tokens_in_flight,
        deadline_s=scoring.deadline_s,
        tries=scoring.tries,
    )


def _scores(config: ConfigDict) -> Scores:
    of_source = {name: tuple(source.rewards or config.rewards) for name, source in config.data.sources.items()}
    return lambda name, record: not of_source or name in of_source[record[rows.SOURCE]]


def _defects(config: ConfigDict, scores: Scores | None) -> Defects:
    """Return record -> why a program reward or a server's cannot score it, or "". Such records are left out.

    Program rewards that neither have a weight nor decide correctness are ignored.
    """
    scores, decides = scores or _scores(config), correct_for(config)
    names = [name for name in config.rewards if name in code.__all__]
    fields = {name: made.fields for name, made in servers.make(config).items()}

    def defect(record: Record) -> str:
        reasons = (
            code_records.defect(name, record["question"], record)
            for name in names
            if scores(name, record) and (config.rewards[name] or name == decides(record))
        )
        missing = (
            f"no field {field!r}, which the template of {name} has"
            for name, needed in fields.items()
            for field in sorted(needed - record.keys())
            if scores(name, record)
        )
        return next(filter(None, itertools.chain(reasons, missing)), "")

    return defect


def scoring_workers(config: ConfigDict) -> int:
    """Return this process's number of reward workers and sandboxes."""
    return processes.own_cores() if config.scoring.workers is None else int(config.scoring.workers)


def correct_for(config: ConfigDict) -> Callable[[Record], str]:
    """Return record -> name of the reward that decides correctness in evaluations."""
    usual = config.eval.correct
    of_source = {name: source.correct or usual for name, source in config.data.sources.items()}
    return lambda record: of_source[record[rows.SOURCE]] if of_source else usual


def make_step_scorer(config: ConfigDict) -> StepScorer | None:
    """Return the weighted step rewards, if any."""
    if not len(config.step_rewards):
        return None
    return StepScorer(config.step_rewards.to_dict(), own=functions.own(config))
