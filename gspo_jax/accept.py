"""Tells how many tokens a decode step would have added with drafts, from completions that are there already.

    python -m gspo_jax.accept runs/tiny gsm8k.jsonl --tokenizer=Qwen3-0.6B

A source is a run folder, whose `samples/` and tokenizer are read, or a file of rows with the fields `--completion` and
`--prompt`, cut into tokens by `--tokenizer`. Completions of one prompt are a group; with a number `epoch` in the rows,
those of the epoch before are drafts of the next, as earlier steps of a run are. A group's responses are decoded side by
side, by the drafter of the sampler (rollout/drafts.py): what it reads is what would have been there at the time.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from rich.console import Console

from gspo_jax import cli
from gspo_jax.data import files
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import fields_of, read_config
from gspo_jax.folder.samples import read_samples
from gspo_jax.folder.storage import SAMPLES
from gspo_jax.parser import make_parser
from gspo_jax.progress import make_table
from gspo_jax.rollout.drafts import MOST, Drafter
from gspo_jax.rollout.history import ROWS
from gspo_jax.setup import policy
from gspo_jax.studies.acceptance import Acceptance, Group, measure


class _Completion(NamedTuple):
    prompt: str
    text: str
    epoch: int


def accept(
    source: Path,
    *,
    tokenizer: Path | None,
    drafts: Sequence[int],
    prompt: str = "prompt",
    completion: str = "completion",
    together: int | None = None,
) -> list[Acceptance]:
    """Return what every drafter does on a source's completions, with so many drafts a step.

    Args:
      tokenizer: its folder; None: a run's own.
      prompt, completion: fields of a file's rows.
      together: responses of a group decoded at a time; None: all.

    Raises:
      UserError: the source has no completions, or no tokenizer is known.
    """
    completions, known = _read(source, prompt, completion)
    folder = tokenizer or known
    if folder is None:
        raise UserError(f"{source} is a file of texts; give the folder of the model's tokenizer with --tokenizer")
    groups = grouped(completions, Tokenizer.load(folder))
    if all(len(response) < 2 for group in groups for response in group.responses):
        raise UserError(f"{source} has only completions of one token; give some in which a step can follow the prefill")
    drafters: list[Drafter] = ["own"]
    if any(len(group.responses) > 1 for group in groups):
        drafters.append("group")
    if any(group.earlier for group in groups):
        drafters.append("history")
    return [measure(groups, drafter, count, together=together) for drafter in drafters for count in drafts]


def grouped(completions: Sequence[_Completion], tokenizer: Tokenizer) -> list[Group]:
    """Return the groups of one prompt and epoch, each with those responses of the epoch before that a run keeps."""
    texts: dict[tuple[str, int], list[list[int]]] = {}
    encoded = tokenizer.encode_batch([one.text for one in completions])
    for one, tokens in zip(completions, encoded, strict=True):
        whole = tokens if tokens and tokens[-1] in tokenizer.eos_ids else [*tokens, tokenizer.eos_ids[0]]
        texts.setdefault((one.prompt, one.epoch), []).append(whole)
    epochs: dict[str, list[int]] = {}
    for prompt, epoch in texts:
        epochs.setdefault(prompt, []).append(epoch)
    prompts = dict(zip(epochs, tokenizer.encode_batch(list(epochs)), strict=True))
    found = []
    for (prompt, epoch), responses in texts.items():
        before = max((other for other in epochs[prompt] if other < epoch), default=None)
        earlier = [] if before is None else texts[prompt, before][:ROWS]
        found.append(Group(prompts[prompt], responses, earlier))
    return found


def _read(source: Path, prompt: str, completion: str) -> tuple[list[_Completion], Path | None]:
    """Return the completions of a run or file, and the folder of a run's tokenizer."""
    if source.is_dir():
        fields = read_config(source)
        if fields is None:
            raise UserError(f"{source} is no run folder; give the --workdir of a run, or a file of rows")
        by_step = read_samples(source)
        found = [_Completion(row["prompt"], row["completion"], step) for step, rows in by_step.items() for row in rows]
        if not found:
            raise UserError(f"{source / SAMPLES} has no completions yet; train with --config.log.samples_every=1")
        return found, policy.initial_folder(ConfigDict(fields_of(fields)), source)
    found = list(_rows(source, prompt, completion))
    if not found:
        raise UserError(f"{source} has no completions; give a file of JSON Lines with `{prompt}` and `{completion}`")
    return found, None


def _rows(source: Path, prompt: str, completion: str) -> Iterator[_Completion]:
    for row in files.read(str(source), "train", alone=True):
        try:
            fields = row.fields()
        except files.Defect as defect:
            raise UserError(f"{row.where}: {defect}; correct it") from None
        for name in (prompt, completion):
            if not isinstance(fields.get(name), str):
                raise UserError(f"{row.where} has no text `{name}`; name its fields with --prompt and --completion")
        if not isinstance(epoch := fields.get("epoch", 0), int):
            raise UserError(f"{row.where} has the epoch {epoch!r}; write a whole number")
        yield _Completion(fields[prompt], fields[completion], epoch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return make_parser("accept").run(_command, arguments)


def _command(given: Namespace) -> None:
    cli.check_facts_file(given.json)
    drafts = _counts(given.drafts)
    if given.together is not None and given.together < 1:
        raise UserError(f"--together is {given.together}; decode at least 1 response of a group at a time")
    fields = {"prompt": given.prompt, "completion": given.completion}
    options = {"tokenizer": given.tokenizer, "drafts": drafts, "together": given.together, **fields}
    found = {str(source): accept(Path(source), **options) for source in dict.fromkeys(given.sources)}
    cli.write_facts(given.json, {name: [one.facts() for one in results] for name, results in found.items()})
    for name, results in found.items():
        Console().print(make_table(list(map(_row, results)), title=name))


def _row(one: Acceptance) -> dict[str, Any]:
    """Return a row of the printed table: shares, and tokens per step in all, by position and by group."""
    found: dict[str, Any] = {"drafter": one.drafter, "drafts": one.drafts}
    tokens = {"used": one.with_draft, "right": one.accepted, "per step": one.tokens_per_step, **one.by_position}
    tokens |= dict(zip(("25%", "50%", "75%"), one.by_group, strict=True))
    return found | {name: round(value, 2) for name, value in tokens.items()}


def _counts(written: str) -> list[int]:
    """Read numbers of drafts, such as 1,2,4."""
    words = written.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= MOST for word in words):
        raise UserError(f"--drafts is {written}; use whole numbers from 1 to {MOST}, joined by commas")
    return list(dict.fromkeys(map(int, words)))


if __name__ == "__main__":
    sys.exit(main())
