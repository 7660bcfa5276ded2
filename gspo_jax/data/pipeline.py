"""Records to batches of token ids: Grain, on threads, resumable to the batch.

Every prompt is tokenised once before the first batch, so that those that do not fit are left out before records are
dealt. The batches depend on the seed alone: of several processes each reads all of them, since prompts are small, and
groups of responses may later change places with others. No prompt is ever cut.
"""

import collections
import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import grain
import numpy as np
from absl import logging
from jaxtyping import Bool, Int

from gspo_jax.data.records import CorruptRecord, Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.types import Prompts, UserError

_SCAN = 1024
"""Records tokenised at a time before the first batch."""


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts for responses to be sampled to."""

    prompts: Prompts
    """NumPy int32; tokens right padded to max_prompt_length."""
    texts: list[str]
    """The prompts as text, as the reward functions see them."""
    records: list[Record]
    valid: Bool[np.ndarray, " P"]
    """False on the rows that fill up the last batch of an evaluation."""


@dataclasses.dataclass(frozen=True)
class WorkedBatch:
    """Prompts with a worked response each, for the supervised cold start."""

    prompts: Int[np.ndarray, "B S"]
    prompt_lengths: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B T"]
    """The worked response and its end-of-sequence token, right padded."""
    mask: Bool[np.ndarray, "B T"]
    """True on the response, end-of-sequence included."""


_Batch = TypeVar("_Batch", PromptBatch, WorkedBatch)


def prompt_text(record: Record, tokenizer: Tokenizer) -> str:
    """The text a response continues: question and instruction as one user turn under the chat template."""
    instruction = record["instruction"]
    content = f"{record['question']}\n{instruction}" if instruction else record["question"]
    return tokenizer.chat([{"role": "user", "content": content}])


class Batches(Generic[_Batch]):
    """An endless iterator of batches whose state can be saved.

    `skipped` counts the records left out, `skipped_by` says why; `usable` is how many remain.
    """

    def __init__(self, dataset: grain.MapDataset[_Batch], usable: "_Usable", fingerprint: dict[str, int]) -> None:
        self._iterator = iter(
            dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))  # threads, no processes
        )
        self._fingerprint = fingerprint | {"usable prompts": len(usable.indices), "data checksum": usable.checksum}
        self.usable = len(usable.indices)
        self.skipped_by = usable.skipped
        self.skipped = sum(usable.skipped.values())

    def __iter__(self) -> "Batches[_Batch]":
        return self

    def __next__(self) -> _Batch:
        return next(self._iterator)

    def get_state(self) -> str:
        """JSON that `set_state` continues from, the next batch and what it is drawn from."""
        return json.dumps({"grain": self._iterator.get_state()} | self._fingerprint)

    def set_state(self, state: str) -> None:
        """Continues where `get_state` was called; raises UserError where that was other data, seed or batch size."""
        saved = json.loads(state)
        for key, value in self._fingerprint.items():
            if saved[key] != value:
                raise UserError(f"the saved data position is for {key} {saved[key]}, this run has {value}; set it back")
        self._iterator.set_state(saved["grain"])


class EvalBatches:
    """Every usable prompt once and in order; can be iterated again. `skipped` and `skipped_by` as in `Batches`."""

    def __init__(self, usable: "_Usable", make: Callable[[list[int]], PromptBatch], *, rows: int) -> None:
        self._usable, self._make, self._rows = usable, make, rows
        self.usable = len(usable.indices)
        self.skipped_by = usable.skipped
        self.skipped = sum(usable.skipped.values())

    def __len__(self) -> int:
        return -(-self.usable // self._rows)

    def __iter__(self) -> Iterator[PromptBatch]:
        for start in range(0, len(self) * self._rows, self._rows):
            places = np.arange(start, start + self._rows)
            indices = self._usable.indices[np.minimum(places, self.usable - 1)]  # the last prompt fills the last batch
            batch = self._make(indices.tolist())
            yield dataclasses.replace(batch, valid=places < self.usable)


def prompt_batches(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompts_per_batch: int,
    max_prompt_length: int,
    seed: int,
    shuffle: bool = True,
    max_corrupt: int = 10,
) -> Batches[PromptBatch]:
    """Endless batches of prompts for training, in a new order every epoch.

    A prompt that is too long, empty or has a token the vocabulary lacks is left out, counted, and told in one warning.

    Args:
      source: records, such as `tasks.load` returns.
      max_prompt_length: S, in tokens.
      max_corrupt: unreadable records to leave out before giving up.

    Raises:
      UserError: no prompt is left, or too many records are corrupt.
    """
    usable = _scan_prompts(source, tokenizer, max_prompt_length, max_corrupt)

    def make(indices: list[int]) -> PromptBatch:
        return _prompt_batch(source, indices, tokenizer, max_prompt_length)

    indices = _indices(usable, prompts_per_batch, seed=seed, shuffle=shuffle)
    return Batches(indices.map(make), usable, {"seed": seed, "shuffle": int(shuffle), "batch size": prompts_per_batch})


def eval_batches(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompts_per_batch: int,
    max_prompt_length: int,
    max_corrupt: int = 10,
) -> EvalBatches:
    """Every prompt once, in order, for held-out evaluation; arguments and errors as in `prompt_batches`.

    Batches have the same shape; rows that only fill the last one have `valid` False.
    """
    usable = _scan_prompts(source, tokenizer, max_prompt_length, max_corrupt)

    def make(indices: list[int]) -> PromptBatch:
        return _prompt_batch(source, indices, tokenizer, max_prompt_length)

    return EvalBatches(usable, make, rows=prompts_per_batch)


def worked_batches(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    batch: int,
    max_prompt_length: int,
    max_response_length: int,
    seed: int,
    max_corrupt: int = 10,
) -> Batches[WorkedBatch]:
    """Endless shuffled batches of prompts and worked responses; `batch` rows.

    As `prompt_batches`; a worked response that with its end-of-sequence token is longer than `max_response_length` is
    left out too.
    """

    def problem(prompt: list[int], worked: list[int]) -> _Problem | None:
        return _prompt_problem(prompt, tokenizer, max_prompt_length) or _length_problem(
            "worked response", len(worked), max_response_length, "sampling.max_response_length"
        )

    def encode(records: list[Record]) -> tuple[list[list[int]], list[list[int]]]:
        prompts = tokenizer.encode_batch([prompt_text(r, tokenizer) for r in records])
        worked = tokenizer.encode_batch([record["worked"] for record in records])
        return prompts, [[*ids, tokenizer.eos_ids[0]] for ids in worked]

    def check(records: list[Record]) -> list[_Problem | None]:
        return [problem(p, w) for p, w in zip(*encode(records), strict=True)]

    def make(indices: list[int]) -> WorkedBatch:
        prompts, worked = encode([source[i] for i in indices])
        tokens, lengths = _pad(worked, max_response_length, tokenizer.pad_id)
        mask = np.arange(max_response_length)[None, :] < lengths[:, None]
        return WorkedBatch(*_pad(prompts, max_prompt_length, tokenizer.pad_id), tokens, mask)

    usable = _scan(source, check, max_corrupt)
    indices = _indices(usable, batch, seed=seed, shuffle=True)
    return Batches(indices.map(make), usable, {"seed": seed, "batch size": batch})


@dataclasses.dataclass(frozen=True)
class _Usable:
    """Which records can be used, and how many cannot, by reason."""

    indices: Int[np.ndarray, " N"]
    skipped: dict[str, int]
    checksum: int
    """Of the questions, in order: the same numbers drawn from other data are another run."""


def _indices(usable: _Usable, rows: int, *, seed: int, shuffle: bool) -> grain.MapDataset[list[int]]:
    """An endless stream of `rows` record indices per batch; every epoch is shuffled anew."""
    dataset = grain.MapDataset.source(usable.indices.tolist())
    endless = (dataset.shuffle(seed=seed) if shuffle else dataset).repeat(None)
    # Nothing remains to be dropped, but rounding an endless length up, as Grain else does, overflows.
    return endless.batch(rows, drop_remainder=True, batch_fn=list)


class _Problem(NamedTuple):
    """Why a record cannot be used."""

    reason: str
    """As it is counted, the same for every record that has it."""
    remedy: str
    length: int = 0
    """Tokens, where there are too many."""


_EMPTY = _Problem("empty prompt", "give each record a question")
_UNKNOWN = _Problem("token outside the vocabulary", "use a tokenizer whose vocabulary covers the questions")
_CORRUPT = _Problem("corrupt", "restore the file, or delete a generated data set to have it built again")


def _length_problem(what: str, length: int, limit: int, field: str) -> _Problem | None:
    """`field` is the config's name for `limit`."""
    if length <= limit:
        return None
    remedy = f"the shortest has {length}, so set {field} to {length} or more"
    return _Problem(f"{what} longer than {limit} tokens", remedy, length)


def _prompt_problem(ids: list[int], tokenizer: Tokenizer, limit: int) -> _Problem | None:
    """Why a prompt cannot be used, None where it can."""
    if not ids:
        return _EMPTY
    if problem := _length_problem("prompt", len(ids), limit, "data.max_prompt_length"):
        return problem
    return _UNKNOWN if tokenizer.unk_id is not None and tokenizer.unk_id in ids else None


def _scan_prompts(source: Sequence[Record], tokenizer: Tokenizer, limit: int, max_corrupt: int) -> _Usable:
    def check(records: list[Record]) -> list[_Problem | None]:
        prompts = tokenizer.encode_batch([prompt_text(r, tokenizer) for r in records])
        return [_prompt_problem(ids, tokenizer, limit) for ids in prompts]

    return _scan(source, check, max_corrupt)


_Check = Callable[[list[Record]], list[_Problem | None]]


def _scan(source: Sequence[Record], check: _Check, max_corrupt: int) -> _Usable:
    """Reads every record once; keeps those for which `check` finds no problem, counts and reports the others."""
    indices: list[int] = []
    checksum = 0
    skipped: collections.Counter[str] = collections.Counter()
    mildest = {_CORRUPT.reason: _CORRUPT}  # of each reason, the record that would need the least
    for start in range(0, len(source), _SCAN):
        readable: list[tuple[int, Record]] = []
        for i in range(start, min(start + _SCAN, len(source))):
            try:
                readable.append((i, source[i]))
            except CorruptRecord as error:
                skipped[_CORRUPT.reason] += 1
                logging.warning("skipped: %s", error)
                if skipped[_CORRUPT.reason] > max_corrupt:
                    raise UserError(
                        f"more than {max_corrupt} corrupt records in {source!r}, the last: {error}; {_CORRUPT.remedy}"
                    ) from error
        for (i, record), problem in zip(readable, check([r for _, r in readable]), strict=True):
            # An empty question stays empty even where a chat template wraps it in tokens.
            problem = _EMPTY if not record["question"].strip() else problem
            if problem is None:
                indices.append(i)
                checksum = zlib.crc32(record["question"].encode(), checksum)
            else:
                skipped[problem.reason] += 1
                mildest[problem.reason] = min(mildest.get(problem.reason, problem), problem, key=lambda p: p.length)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    if not indices:
        if not skipped:
            raise UserError(f"no usable prompt in {source!r}, which has no records; give at least one")
        remedy = mildest[skipped.most_common(1)[0][0]].remedy
        raise UserError(f"no usable prompt among the {len(source)} of {source!r} ({reasons}); {remedy}")
    if skipped:
        logging.warning("%d of %d records are left out: %s", sum(skipped.values()), len(source), reasons)
    return _Usable(np.asarray(indices, np.int64), dict(skipped), checksum)


def _prompt_batch(source: Sequence[Record], indices: list[int], tokenizer: Tokenizer, length: int) -> PromptBatch:
    records = [source[i] for i in indices]
    texts = [prompt_text(record, tokenizer) for record in records]
    tokens, lengths = _pad(tokenizer.encode_batch(texts), length, tokenizer.pad_id)
    prompts = Prompts(tokens, lengths)  # type: ignore[arg-type]  # NumPy here; the caller puts them on its mesh
    return PromptBatch(prompts, texts, records, np.ones(len(records), bool))


def _pad(rows: list[list[int]], length: int, pad: int) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Rows right padded to `length`, and their lengths."""
    tokens = np.full((len(rows), length), pad, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.asarray([len(ids) for ids in rows], np.int32)
