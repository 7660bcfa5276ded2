"""Samples from a run or a Hugging Face folder: responses to a prompt or to a file of rows, or a chat.

    python -m gspo_jax.sample --workdir=runs/tiny --prompt='584+605=?' --samples=4
    python -m gspo_jax.sample --workdir=runs/tiny --in=rows.jsonl --out=completions.jsonl --score
    python -m gspo_jax.sample --workdir=runs/tiny

Prompts are under the run's chat template, system prompt, examples and instruction, and responses from its sampler, with
its environment, as in an evaluation. Each line of `--out` is a response: the row's fields, `prompt` (the text that the
model saw), `completion`, `sample`, `finish` (eos or length), `tokens` (their number), and on request `reward` and
`scores`, `token_ids`, `logprobs` and `routes`.
"""

import collections
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict
from rich.console import Console

from gspo_jax import cli, talk
from gspo_jax.config import base
from gspo_jax.config_files import config_flag, last_given, load_config
from gspo_jax.data import rows, tasks
from gspo_jax.data.records import Record, Records
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.folder.notes import existing_folder, read_config
from gspo_jax.measuring import completions
from gspo_jax.measuring.completions import Response
from gspo_jax.measuring.opened import open_policy
from gspo_jax.measuring.responder import Asked, Responder, Sampling
from gspo_jax.models import huggingface
from gspo_jax.parallel import processes
from gspo_jax.progress import Progress, printable
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.setup import same


def open(folder: str | Path, step: int | None = None, *, config: ConfigDict | None = None) -> Responder:
    """Return the policy in a folder, ready to answer: `with open("runs/tiny") as policy: policy.sample(["1+1=?"])`.

    Nothing in the folder changes, and a run in it may go on training.

    Args:
      folder: run folder, or a Hugging Face folder.
      step: iteration of the run's checkpoint, 0 for the policy that it began with. None: the newest.
      config: None: the run's, or `folder_config`'s. Needed for a run in a bucket.

    Raises:
      UserError: the folder, the step or the config does not allow it.
    """
    is_run = str(folder).startswith(storage.BUCKET) or "model_type" not in (read_config(existing_folder(folder)) or {})
    if config is None:
        config = same.of_folder(folder) if is_run else folder_config(folder)
    if config is None:
        raise UserError(
            f"{folder} has no config.json; give a run or a Hugging Face folder, or a bucket's run its config"
        )
    if not is_run and step is not None:
        raise UserError(f"step is {step}, and {folder} is a model without iterations; leave it out")
    cli.prepare(config)
    with ExitStack() as stack:
        # Reward workers start when something is to be scored.
        opened = stack.enter_context(open_policy(config, folder if is_run else None, make_scorer=lambda: Scorer({})))
        _, name = opened.load(step)
        return Responder(opened, f"{folder}, {name}" if is_run else str(folder), stack.pop_all())


def folder_config(folder: str | Path) -> ConfigDict:
    """Return the default config for a Hugging Face folder, with at most half of its positions for a response.

    Raises:
      UserError: the folder has no model of a known family.
    """
    model, config = huggingface.read_config(Path(folder)), base()
    config.cpu_devices = 1
    config.model.folder = str(folder)
    half = model.max_position_embeddings // 2
    config.data.max_prompt_length = min(config.data.max_prompt_length, half)
    config.sampling.max_response_length = min(config.sampling.max_response_length, half)
    config.training.minibatches = 1
    config.rewards = ConfigDict({"exact_answer": 1.0})
    config.eval.correct = "exact_answer"
    return config


def main(config: ConfigDict) -> None:
    """Run the command."""
    given = flags.FLAGS
    source, target = given["in"].value, given.out
    _check(source, target)
    with open(given.workdir or given.model, given.step, config=config) as policy:
        try:
            sampling = policy.sampling(n=given.samples, temperature=given.temperature, max_tokens=given.max_tokens)
        except UserError as error:
            raise UserError(_as_flags(str(error))) from None
        if given.prompt is not None:
            _answer(policy, sampling, given.prompt, target)
        elif source is not None:
            _answer_rows(policy, sampling, source, target)
        else:
            talk.Conversation(policy, sampling, seed=given.seed).run()


def _check(source: str | None, target: str | None) -> None:
    given = flags.FLAGS
    asks_rows, chats = source is not None, source is None and given.prompt is None
    if given.workdir and given.model:
        raise UserError("--workdir and --model are both given; give the run, or the Hugging Face folder")
    if given.prompt is not None and asks_rows:
        raise UserError("--prompt and --in are both given; give one of them")
    if asks_rows and target is None:
        raise UserError("--in needs a file for the responses; give one with --out=FILE")
    if given.score and not asks_rows:
        raise UserError("--score needs rows with reference answers; give a file of them with --in=FILE")
    for name, asked in (("out", target is not None), ("samples", given.samples > 1)):
        if chats and asked:
            raise UserError(f"--{name} is for --prompt or --in, and without either this is a chat; give one of them")
    for name in ("logprobs", "routes"):
        if given[name].value and target is None:
            raise UserError(f"--{name} goes into the file of responses; give one with --out=FILE")
    if chats and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("a chat needs a terminal, and there is none; give --prompt=TEXT, or --in=FILE and --out=FILE")
    if chats and processes.count() > 1:
        raise UserError(f"a chat has one process, and there are {processes.count()}; give --prompt=TEXT or --in=FILE")
    cli.check_new_file(target, flag="out")


def _answer(policy: Responder, sampling: Sampling, prompt: str, target: str | None) -> None:
    given = flags.FLAGS
    asked = policy.ask(prompt, sampling)
    with completions.new_file(target) as add:
        with talk.waiting(Console(stderr=True), policy):
            ((responses,),) = policy.respond([asked], sampling, seed=given.seed, routes=given.routes)
        add(_lines(asked.record, responses))
    for number, response in enumerate(responses if processes.is_first() else []):
        if len(responses) > 1:
            print(f"{number + 1} of {len(responses)}, {talk.length(response)}:")
        print(printable(response.text))


def _answer_rows(policy: Responder, sampling: Sampling, source: str, target: str) -> None:
    """Write the responses to a file's rows, in order, as they come."""
    given, begun = flags.FLAGS, time.monotonic()
    asked = _asked(policy, _read(policy.opened.config, source), sampling)
    calls = -(-len(asked) // policy.at_a_time(len(asked), sampling))
    options = {"seed": given.seed, "score": given.score, "routes": given.routes}
    finished, left = collections.Counter[str](), iter(asked)
    with completions.new_file(target) as add, Progress(calls, label="sample") as progress:
        for part in policy.respond(asked, sampling, **options):
            for responses, one in zip(part, left, strict=False):
                add(_lines(one.record, responses))
                finished.update(response.finish for response in responses)
            progress.advance()
    if processes.is_first():
        seconds = time.monotonic() - begun
        print(f"{finished.total()} responses, {finished['length']} cut, in {seconds:.1f} s: {target}")


def _read(config: ConfigDict, source: str) -> Records:
    """Return a file's records, as training reads rows; a reference answer is needed only for scores."""
    given, instruction = config.data, config.data.instruction
    instruction = tasks.own_instruction(given.task) if instruction is None else instruction
    whole = {"": rows.Source(source, source, prompt=given.prompt, instruction=instruction)}
    return rows.load(whole, split="test", answer=given.answer if flags.FLAGS.score else "", limit=None)


def _asked(policy: Responder, records: Records, sampling: Sampling) -> list[Asked]:
    """Return the prompts that can be asked; a warning counts the others. Raises UserError if there is none."""
    asked, wrong = [], []
    for record in records:
        try:
            asked.append(policy.ask(record, sampling))
        except UserError as error:
            wrong.append(f"{record['id']}: {_as_flags(str(error))}")
    if not asked:
        raise UserError(f"no row of {records.name} can be asked; the first is {wrong[0]}")
    if wrong:
        logging.warning("%d of %d rows are left out; the first is %s", len(wrong), len(records), wrong[0])
    return asked


def _lines(record: Record, responses: Sequence[Response]) -> list[dict[str, Any]]:
    wanted = flags.FLAGS.logprobs
    return [completions.line(record, each, sample=i, logprobs=wanted) for i, each in enumerate(responses)]


def _as_flags(text: str) -> str:
    """Name flags instead of arguments and config fields in a message."""
    for name, flag in {"n is": "samples is", "max_tokens": "max_tokens", "sampling.temperature": "temperature"}.items():
        text = re.sub(rf"(?<!-)\b{re.escape(name)}", f"--{flag}", text)
    return text


def _config_of_flags(argv: Sequence[str]) -> ConfigDict:
    """Return the config where neither --config nor a run folder gives one."""
    workdir, model = last_given(argv, "workdir"), last_given(argv, "model")
    if model is not None:
        return folder_config(model)
    if workdir is None:
        raise UserError("--workdir is missing: a run to sample from; or give a Hugging Face folder, --model=DIR")
    if workdir.startswith(storage.BUCKET):
        return load_config(config_flag(argv))  # raises
    existing_folder(workdir)
    raise UserError(f"{workdir} holds no run; give the --workdir of one, or a Hugging Face folder, --model=DIR")


if __name__ == "__main__":
    cli.run(main, "sample", fallback=_config_of_flags)
