"""Batches of token ids from records, resumable at any batch.

All prompts are tokenised once before the first batch. Those that do not fit are left out, never cut. The order depends
on the seed alone and differs in every epoch of every part. Every process reads whole batches: prompts are small, and
groups of responses may move between processes later.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import grain
import numpy as np
from absl import logging
from jaxtyping import Bool, Int

from gspo_jax.data.chat import Message, ToolSchemas
from gspo_jax.data.contents import FieldDigests, changes
from gspo_jax.data.records import VERBATIM, CorruptRecord, Part, Record, Records
from gspo_jax.data.tokenizer import GUARD, Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.types import Prompts

Defects = Callable[[Record], str]
"""Record -> its defect, "" if usable."""
_SCAN_CHUNK = 1024
"""Records tokenised at a time by the scan."""
_MAX_CORRUPT = 10
"""Unreadable records to leave out before giving up."""
_TOKENS = "prompt as tokens"


@dataclasses.dataclass(frozen=True)
class WorkedBatch:
    """Demonstrations for the supervised cold start."""

    prompts: Int[np.ndarray, "B S"]
    prompt_lengths: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B T"]
    """Right padded, EOS included."""
    mask: Bool[np.ndarray, "B T"]
    """True on responses, EOS included."""


_Batch = TypeVar("_Batch", Prompts, WorkedBatch)


@dataclasses.dataclass(frozen=True)
class PromptStyle:
    """Shared beginning of all prompts."""

    system: str = ""
    """System prompt for conversations without their own."""
    shots: tuple[Message, ...] = ()
    """Worked examples, after the system prompt."""
    tools: ToolSchemas = ()
    """Tools of prompts without their own."""


PLAIN = PromptStyle()


def conversation(record: Record, style: PromptStyle) -> list[Message]:
    """Return a prompt's turns, with the instruction on a new line of the last user turn."""
    turns: list[Message] = list(record.get("messages") or [{"role": "user", "content": record["question"]}])
    head: list[Message] = []
    if turns[0]["role"] == "system":
        head = [turns.pop(0)]
    elif system := record.get("system", style.system):
        head = [{"role": "system", "content": system}]
    if instruction := record["instruction"]:
        last = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
        turns[last] = {"role": "user", "content": f"{turns[last]['content']}\n{instruction}"}
    return [*head, *style.shots, *turns]


def prompt_text(record: Record, tokenizer: Tokenizer, style: PromptStyle = PLAIN) -> str:
    """Return the text that a response continues: the conversation under the chat template.

    Special tokens are guarded (`Tokenizer.guard`), except in a VERBATIM question.
    """
    return tokenizer.chat(_guarded(record, tokenizer, style), tools=tools_of(record, tokenizer, style))


def _guarded(record: Record, tokenizer: Tokenizer, style: PromptStyle) -> list[Message]:
    turns = conversation(record, style)
    own = turns.pop() if record.get(VERBATIM) else None
    guarded = [tokenizer.guarded(turn) for turn in turns]
    return guarded if own is None else [*guarded, own]


def tools_of(record: Record, tokenizer: Tokenizer, style: PromptStyle) -> ToolSchemas:
    """Return a prompt's tools, guarded."""
    return tokenizer.guarded_json(record.get("tools") or style.tools)


class Batches(Generic[_Batch]):
    """Endless batches with a position to save and restore.

    `usable` and `skipped` count records in use and left out, `skipped_by` the latter by reason.
    """

    def __init__(
        self, dataset: grain.MapDataset[_Batch], usable: "_UsableRecords", settings: Mapping[str, Any]
    ) -> None:
        self._iterator = iter(
            dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))  # threads, not processes
        )
        self._settings = dict(settings) | {"usable prompts": len(usable.indices)}
        if len(usable.parts) > 1:
            self._settings["weights"] = [part.weight for part in usable.parts]
        self._content, self._name = usable.content, usable.name
        self.usable = len(usable.indices)
        self.skipped_by = usable.skipped
        self.skipped = sum(usable.skipped.values())

    def __iter__(self) -> "Batches[_Batch]":
        return self

    def __next__(self) -> _Batch:
        return next(self._iterator)

    def get_state(self) -> str:
        """Return the position, settings and data digests as JSON for `set_state`."""
        state = {"grain": self._iterator.get_state(), "settings": self._settings, "content": self._content}
        return json.dumps(state)

    def difference(self, state: str) -> str:
        """Return how data, seed or batch size differ from those that a position was saved with, "" if they do not.

        Data are the prompt tokens and all fields of the records in use.
        """
        saved = json.loads(state)
        for name, value in self._settings.items():
            if (there := saved["settings"].get(name)) != value:
                return f"the data position was saved with {name} {there}, but this run has {value}"
        if changed := changes(saved["content"], self._content):
            return (
                f"the records of {self._name} are not those that the data position was saved with: they differ in "
                f"{', '.join(changed)}"
            )
        return ""

    def check_state(self, state: str) -> None:
        """Raise UserError if a position was saved with other data, seed or batch size; see `difference`."""
        if difference := self.difference(state):
            raise UserError(f"{difference}; put back what was there, or start a new run")

    def set_state(self, state: str) -> None:
        """Continue from a saved position, after `check_state`."""
        self.check_state(state)
        self._iterator.set_state(json.loads(state)["grain"])


class EvalBatches:
    """Re-iterable batches of every usable prompt once, in order, with the counts of `Batches`.

    `content` has digests of the prompt tokens and of each field.
    """

    def __init__(self, usable: "_UsableRecords", make: Callable[[list[int]], Prompts], *, rows: int) -> None:
        self._usable, self._make, self._rows = usable, make, rows
        self.content = usable.content
        self.usable = len(usable.indices)
        self.skipped_by = usable.skipped
        self.skipped = sum(usable.skipped.values())

    def __len__(self) -> int:
        return -(-self.usable // self._rows)

    def __iter__(self) -> Iterator[Prompts]:
        for start in range(0, len(self) * self._rows, self._rows):
            places = np.arange(start, start + self._rows)
            indices = self._usable.indices[np.minimum(places, self.usable - 1)]  # the last prompt pads the last batch
            batch = self._make(indices.tolist())
            yield dataclasses.replace(batch, valid=places < self.usable)


def prompt_batches(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompts_per_batch: int,
    max_prompt_length: int,
    seed: int,
    style: PromptStyle = PLAIN,
    defect: Defects = lambda record: "",
) -> Batches[Prompts]:
    """Return endless batches of training prompts, reshuffled every epoch.

    Records with a `defect` and prompts that are empty, too long, rejected by the chat template or outside the
    vocabulary are left out and reported in one warning. Repeated questions and batches larger than the data only cause
    a warning. Parts are mixed by weight, each with its own epochs.

    Args:
      prompts_per_batch: P.
      max_prompt_length: S, in tokens.
      defect: further reason to leave out a record.

    Raises:
      UserError: no prompt is usable, or too many records are corrupt.
    """
    usable = _scan(source, tokenizer, max_prompt_length, style, functools.partial(_defective, defect))
    make = functools.partial(_prompt_batch, source, tokenizer, max_prompt_length, style)
    indices = _index_batches(usable, prompts_per_batch, seed=seed)
    return Batches(indices.map(make), usable, {"seed": seed, "batch size": prompts_per_batch})


def eval_batches(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompts_per_batch: int,
    max_prompt_length: int,
    style: PromptStyle = PLAIN,
    defect: Defects = lambda record: "",
) -> EvalBatches:
    """Return batches of every prompt once, in order, otherwise as in `prompt_batches`.

    Rows that pad the last batch have `valid` False.
    """
    usable = _scan(source, tokenizer, max_prompt_length, style, functools.partial(_defective, defect))
    make = functools.partial(_prompt_batch, source, tokenizer, max_prompt_length, style)
    return EvalBatches(usable, make, rows=prompts_per_batch)


def worked_batches(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    batch: int,
    max_prompt_length: int,
    max_response_length: int,
    seed: int,
    style: PromptStyle = PLAIN,
) -> Batches[WorkedBatch]:
    """Return endless shuffled batches of demonstrations, otherwise as in `prompt_batches`.

    Worked responses of more than `max_response_length` tokens, EOS included, or with an EOS token inside are also left
    out. Special tokens in `worked` count as such unless guarded.
    """
    ends = tokenizer.ends()

    def encode_worked(records: list[Record]) -> list[list[int]]:
        worked = tokenizer.encode_batch([record["worked"] for record in records])
        return [[*ids, tokenizer.eos_ids[0]] for ids in worked]

    def problem(record: Record, worked: list[int]) -> _Problem | None:
        if any(end in record["worked"].replace(GUARD, "") for end in ends):
            return _ENDS
        return _length_problem("worked response", len(worked), max_response_length, "sampling.max_response_length")

    def make(indices: list[int]) -> WorkedBatch:
        records = [source[i] for i in indices]
        prompts = tokenizer.encode_batch([prompt_text(record, tokenizer, style) for record in records])
        tokens, lengths = _pad(encode_worked(records), max_response_length, tokenizer.pad_id)
        mask = np.arange(max_response_length)[None, :] < lengths[:, None]
        return WorkedBatch(*_pad(prompts, max_prompt_length, tokenizer.pad_id), tokens, mask)

    usable = _scan(
        source, tokenizer, max_prompt_length, style, lambda records: map(problem, records, encode_worked(records))
    )
    indices = _index_batches(usable, batch, seed=seed)
    return Batches(indices.map(make), usable, {"seed": seed, "batch size": batch})


@dataclasses.dataclass(frozen=True)
class _UsableRecords:
    indices: Int[np.ndarray, " N"]
    skipped: dict[str, int]
    content: dict[str, str]
    """Digests in order: of prompt tokens, and of each field."""
    parts: Sequence[Part]
    name: str

    def mixed(self) -> list[tuple[list[int], float]]:
        ends = np.cumsum([part.count for part in self.parts])
        cuts = np.split(self.indices, np.searchsorted(self.indices, ends[:-1]))
        return [(own.tolist(), part.weight) for own, part in zip(cuts, self.parts, strict=True) if len(own)]


class _Epochs(Sequence[int]):
    """Endless epochs of the same elements, each shuffled with its own seed.

    Grain would add the epoch to the seed: the second epoch of one run would be the first of another.
    """

    def __init__(self, elements: Sequence[int], *seed: int) -> None:
        self._elements, self._seed = grain.MapDataset.source(elements), seed
        self._shuffled = functools.lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, place: Any) -> Any:
        epoch, within = divmod(place, len(self._elements))
        return self._shuffled(epoch)[within]

    def __repr__(self) -> str:
        return f"epochs of {self._elements!r}"

    def _shuffle(self, epoch: int) -> grain.MapDataset[int]:
        (seed,) = np.random.SeedSequence([*self._seed, epoch]).generate_state(1)
        return self._elements.shuffle(seed=int(seed))


def _index_batches(usable: _UsableRecords, rows: int, *, seed: int) -> grain.MapDataset[list[int]]:
    if len(usable.indices) < rows:
        logging.warning(
            "a batch of %d takes the %d usable records more than once; give more records, or use a smaller batch",
            rows,
            len(usable.indices),
        )
    parts = usable.mixed()
    streams = [grain.MapDataset.source(_Epochs(indices, seed, number)) for number, (indices, _) in enumerate(parts)]
    endless = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, [weight for _, weight in parts])
    # Without drop_remainder, Grain rounds the endless length up and overflows.
    return endless.batch(rows, drop_remainder=True, batch_fn=list)


class _Problem(NamedTuple):
    reason: str
    """Name it is counted under."""
    remedy: str
    length: int = 0
    """Number of tokens, if too many."""


_EMPTY = _Problem("empty prompt", "give each record a question")
_UNKNOWN = _Problem("token outside the vocabulary", "use a tokenizer whose vocabulary covers the questions")
_ENDS = _Problem("token that ends a turn inside the worked response", "leave that token out; it is added")
_CORRUPT = _Problem("corrupt", "restore the file, or delete a generated data set so that it is built again")


def _length_problem(what: str, length: int, limit: int, field: str) -> _Problem | None:
    if length <= limit:
        return None
    remedy = f"the shortest has {length}, so set {field} to {length} or more"
    return _Problem(f"{what} longer than {limit} tokens", remedy, length)


def _prompt_problem(record: Record, prompt: list[int] | _Problem, tokenizer: Tokenizer, limit: int) -> _Problem | None:
    if not record["question"].strip() or not prompt:  # a chat template may wrap an empty one in tokens
        return _EMPTY
    if isinstance(prompt, _Problem):
        return prompt
    if problem := _length_problem("prompt", len(prompt), limit, "data.max_prompt_length"):
        return problem
    return _UNKNOWN if tokenizer.unk_id is not None and tokenizer.unk_id in prompt else None


def _defective(defect: Defects, records: list[Record]) -> list[_Problem | None]:
    return [_Problem(reason, "correct them") if (reason := defect(record)) else None for record in records]


def _encode_prompts(records: list[Record], tokenizer: Tokenizer, style: PromptStyle) -> list[list[int] | _Problem]:
    tools = [tools_of(record, tokenizer, style) for record in records]
    texts = tokenizer.chat_all([_guarded(record, tokenizer, style) for record in records], tools=tools)
    ids = iter(tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
    return [
        next(ids) if isinstance(text, str) else _Problem("rejected by the chat template", str(text)) for text in texts
    ]


def _scan(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    limit: int,
    style: PromptStyle,
    further: Callable[[list[Record]], Iterable[_Problem | None]],
) -> _UsableRecords:
    """Keep usable records and report the others. Repeated questions stay, as they may be weights.

    `further` finds problems of records beyond those of their prompts.
    """
    indices: list[int] = []
    questions: set[bytes] = set()  # as digests
    content = FieldDigests()
    skipped = collections.Counter(source.left_out if isinstance(source, Records) else {})
    shortest = {_CORRUPT.reason: _CORRUPT}  # per reason, the shortest: it asks for least
    for start in range(0, len(source), _SCAN_CHUNK):
        readable: list[tuple[int, Record]] = []
        for i in range(start, min(start + _SCAN_CHUNK, len(source))):
            try:
                readable.append((i, source[i]))
            except CorruptRecord as error:
                skipped[_CORRUPT.reason] += 1
                logging.warning("skipped: %s", error)
                if skipped[_CORRUPT.reason] > _MAX_CORRUPT:
                    raise UserError(
                        f"more than {_MAX_CORRUPT} corrupt records in {source!r}, the last: {error}; {_CORRUPT.remedy}"
                    ) from error
        records = [record for _, record in readable]
        prompts = _encode_prompts(records, tokenizer, style)
        for (i, record), prompt, other in zip(readable, prompts, further(records), strict=True):
            if problem := _prompt_problem(record, prompt, tokenizer, limit) or other:
                skipped[problem.reason] += 1
                shortest[problem.reason] = min(shortest.get(problem.reason, problem), problem, key=lambda p: p.length)
                continue
            indices.append(i)
            content.add(record | {_TOKENS: np.asarray(prompt, np.int32).tobytes().hex()})
            asked = json.dumps(record["messages"]) if "messages" in record else record["question"]
            questions.add(hashlib.blake2b(asked.encode(), digest_size=16).digest())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    if not indices:
        if not skipped:
            raise UserError(f"{source!r} has no records; give at least one")
        reason = skipped.most_common(1)[0][0]
        remedy = shortest[reason].remedy if reason in shortest else "correct them"
        raise UserError(f"none of the {len(source)} records of {source!r} is usable ({reasons}); {remedy}")
    if skipped:
        total = len(indices) + sum(skipped.values())
        logging.warning("%d of %d records are left out: %s", sum(skipped.values()), total, reasons)
    if repeated := len(indices) - len(questions):
        logging.warning("%d of %d usable records repeat an earlier question; they are kept", repeated, len(indices))
    parts = source.parts if isinstance(source, Records) else [Part("", len(source), 1.0)]
    name = source.name if isinstance(source, Records) else "the list"
    return _UsableRecords(np.asarray(indices, np.int64), dict(skipped), content.by_field(), parts, name)


def _prompt_batch(
    source: Sequence[Record], tokenizer: Tokenizer, length: int, style: PromptStyle, indices: list[int]
) -> Prompts:
    records = [source[i] for i in indices]
    texts = [prompt_text(record, tokenizer, style) for record in records]
    tokens, lengths = _pad(tokenizer.encode_batch(texts), length, tokenizer.pad_id)
    arrays: Any = {"tokens": tokens, "lengths": lengths}  # NumPy's, placed on its mesh by the sampler
    plain = [text.replace(GUARD, "") for text in texts]
    return Prompts(**arrays, texts=plain, records=records, valid=np.ones(len(records), bool))


def _pad(rows: list[list[int]], length: int, pad: int) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    tokens = np.full((len(rows), length), pad, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.asarray([len(ids) for ids in rows], np.int32)
