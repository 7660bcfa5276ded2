"""Turn records into batches of token ids, with Grain, on threads, resumable at any batch.

All prompts are tokenised once before the first batch, and those that do not fit are left out; no prompt is ever cut.
Batches depend on the seed alone, from which every epoch of every part of the records has an order of its own. With
several processes, each reads every batch whole: prompts are small, and groups of responses may move to other processes
later.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import grain
import numpy as np
from absl import logging
from jaxtyping import Bool, Int

from gspo_jax.data.chat import Message
from gspo_jax.data.contents import FieldDigests, changes
from gspo_jax.data.records import VERBATIM, CorruptRecord, Part, Record, Records
from gspo_jax.data.tokenizer import GUARD, Tokenizer
from gspo_jax.errors import UserError
from gspo_jax.types import Prompts

Defects = Callable[[Record], str]
"""Returns what makes a record unusable, in words under which it is counted; "" if nothing does."""
_SCAN_CHUNK = 1024
"""Records tokenised at a time while scanning for usable ones."""
_TOKENS = "prompt as tokens"
"""What the tokens that the model sees are called among the fields of a record."""


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts to sample responses to."""

    prompts: Prompts
    """Token ids, NumPy int32, right padded to max_prompt_length; and lengths."""
    texts: list[str]
    """The prompts as text, as passed to reward functions."""
    records: list[Record]
    valid: Bool[np.ndarray, " P"]
    """False on rows that pad the last batch of an evaluation."""


@dataclasses.dataclass(frozen=True)
class WorkedBatch:
    """A batch of demonstrations, prompts with a worked response each, for the supervised cold start."""

    prompts: Int[np.ndarray, "B S"]
    prompt_lengths: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B T"]
    """Token ids of the worked responses, EOS included, right padded."""
    mask: Bool[np.ndarray, "B T"]
    """True on the responses, EOS included."""


_Batch = TypeVar("_Batch", PromptBatch, WorkedBatch)


@dataclasses.dataclass(frozen=True)
class PromptStyle:
    """The beginning that all prompts share."""

    system: str = ""
    """System prompt of conversations without one; "": none."""
    shots: tuple[Message, ...] = ()
    """Turns of worked examples, between the system prompt and the record's own turns."""


PLAIN = PromptStyle()
"""Prompts begin with their own first turn."""


def conversation(record: Record, style: PromptStyle) -> list[Message]:
    """Return the turns of a record's prompt; its instruction ends the last user turn, after a line break."""
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

    Special tokens in what is said are guarded (`Tokenizer.guard`), but for those of a VERBATIM question.
    """
    return tokenizer.chat(_guarded(record, tokenizer, style))


def _guarded(record: Record, tokenizer: Tokenizer, style: PromptStyle) -> list[Message]:
    """The turns of a record's prompt, with special tokens guarded."""
    turns = conversation(record, style)
    own = turns.pop() if record.get(VERBATIM) else None
    guarded = [guard(turn, tokenizer) for turn in turns]
    return guarded if own is None else [*guarded, own]


def guard(turn: Message, tokenizer: Tokenizer) -> Message:
    """Return a turn with the special tokens in what it says guarded."""
    return {name: said if name == "role" else tokenizer.guard(said, turn["role"]) for name, said in turn.items()}


class Batches(Generic[_Batch]):
    """An endless iterator over batches whose position can be saved and restored.

    `usable` is the number of records in use, `skipped` the number left out, and `skipped_by` counts them by reason.
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
        """Return the position as JSON for `set_state`: the next batch, the settings and the digests of the data."""
        state = {"grain": self._iterator.get_state(), "settings": self._settings, "content": self._content}
        return json.dumps(state)

    def check_state(self, state: str) -> None:
        """Raise a UserError if a position was saved with other data, seed or batch size.

        The data are the records in use: the tokens of their prompts, and every field that a reward can read.
        """
        saved = json.loads(state)
        for name, value in self._settings.items():
            if saved["settings"].get(name) != value:
                raise UserError(
                    f"the data position was saved with {name} {saved['settings'].get(name)}, but this run has {value}; "
                    "set it back, or start a new run"
                )
        if changed := changes(saved["content"], self._content):
            raise UserError(
                f"the records of {self._name} are not those that the data position was saved with: they differ in "
                f"{', '.join(changed)}; put them back, or start a new run"
            )

    def set_state(self, state: str) -> None:
        """Continue from a saved position; raises as `check_state`."""
        self.check_state(state)
        self._iterator.set_state(json.loads(state)["grain"])


class EvalBatches:
    """Batches of every usable prompt once, in order; re-iterable. `usable`, `skipped`, `skipped_by` as in `Batches`.

    `content` has the digests of the records in use: of the tokens of their prompts, and of each field.
    """

    def __init__(self, usable: "_UsableRecords", make: Callable[[list[int]], PromptBatch], *, rows: int) -> None:
        self._usable, self._make, self._rows = usable, make, rows
        self.content = usable.content
        self.usable = len(usable.indices)
        self.skipped_by = usable.skipped
        self.skipped = sum(usable.skipped.values())

    def __len__(self) -> int:
        return -(-self.usable // self._rows)

    def __iter__(self) -> Iterator[PromptBatch]:
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
    shuffle: bool = True,
    max_corrupt: int = 10,
    style: PromptStyle = PLAIN,
    defect: Defects = lambda record: "",
) -> Batches[PromptBatch]:
    """Return endless batches of training prompts, reshuffled every epoch.

    Prompts that are empty, too long, rejected by the chat template, or contain a token outside the vocabulary are left
    out, counted, and reported in one warning, and so are records with a `defect`. Repeated questions, and a batch
    larger than the data, are used as they are after a warning. Several parts of the records are mixed by weight, each
    reshuffled every epoch of its own.

    Args:
      source: records, as returned by `tasks.load`.
      prompts_per_batch: P.
      max_prompt_length: S, in tokens.
      seed: seed of the order.
      shuffle: False keeps the order of the records.
      max_corrupt: unreadable records to leave out before giving up.
      style: what every prompt begins with.
      defect: tells what else makes a record unusable.

    Raises:
      UserError: no prompt is usable, or too many records are corrupt.
    """
    usable = _scan_prompts(source, tokenizer, max_prompt_length, max_corrupt, style, defect)

    def make(indices: list[int]) -> PromptBatch:
        return _prompt_batch(source, indices, tokenizer, max_prompt_length, style)

    indices = _index_batches(usable, prompts_per_batch, seed=seed, shuffle=shuffle)
    return Batches(indices.map(make), usable, {"seed": seed, "shuffle": int(shuffle), "batch size": prompts_per_batch})


def eval_batches(
    source: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    prompts_per_batch: int,
    max_prompt_length: int,
    max_corrupt: int = 10,
    style: PromptStyle = PLAIN,
    defect: Defects = lambda record: "",
) -> EvalBatches:
    """Return batches of every prompt once, in order, for evaluation; arguments and errors as in `prompt_batches`.

    All batches have the same shape; rows that pad the last one have `valid` False.
    """
    usable = _scan_prompts(source, tokenizer, max_prompt_length, max_corrupt, style, defect)

    def make(indices: list[int]) -> PromptBatch:
        return _prompt_batch(source, indices, tokenizer, max_prompt_length, style)

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
    style: PromptStyle = PLAIN,
) -> Batches[WorkedBatch]:
    """Return endless shuffled batches of `batch` demonstrations; other arguments and errors as in `prompt_batches`.

    Also leaves out records whose worked response is longer than `max_response_length` tokens, EOS included, or has an
    EOS token inside. Special tokens in `worked` count as such, unless they are guarded.
    """
    ends = tokenizer.ends()

    def checked(record: Record, prompt: list[int] | _Problem, worked: list[int]) -> list[int] | _Problem:
        if isinstance(prompt, _Problem):
            return prompt
        if problem := _prompt_problem(prompt, tokenizer, max_prompt_length):
            return problem
        if any(end in record["worked"].replace(GUARD, "") for end in ends):
            return _ENDS
        too_long = _length_problem("worked response", len(worked), max_response_length, "sampling.max_response_length")
        return too_long or prompt

    def encode_worked(records: list[Record]) -> list[list[int]]:
        worked = tokenizer.encode_batch([record["worked"] for record in records])
        return [[*ids, tokenizer.eos_ids[0]] for ids in worked]

    def check(records: list[Record]) -> list[list[int] | _Problem]:
        prompts = _encode_prompts(records, tokenizer, style)
        return list(map(checked, records, prompts, encode_worked(records)))

    def make(indices: list[int]) -> WorkedBatch:
        records = [source[i] for i in indices]
        prompts = tokenizer.encode_batch([prompt_text(record, tokenizer, style) for record in records])
        tokens, lengths = _pad(encode_worked(records), max_response_length, tokenizer.pad_id)
        mask = np.arange(max_response_length)[None, :] < lengths[:, None]
        return WorkedBatch(*_pad(prompts, max_prompt_length, tokenizer.pad_id), tokens, mask)

    usable = _scan(source, check, max_corrupt)
    indices = _index_batches(usable, batch, seed=seed, shuffle=True)
    return Batches(indices.map(make), usable, {"seed": seed, "batch size": batch})


@dataclasses.dataclass(frozen=True)
class _UsableRecords:
    """Indices of the usable records, and counts of the others by reason."""

    indices: Int[np.ndarray, " N"]
    skipped: dict[str, int]
    content: dict[str, str]
    """Digests of the usable records in order: of the tokens of their prompts, and of each field."""
    parts: Sequence[Part]
    """Parts of the records that are mixed by weight."""
    name: str
    """Name of the records for messages."""

    def mixed(self) -> list[tuple[list[int], float]]:
        """The usable indices of each part that has any, and its weight."""
        ends = np.cumsum([part.count for part in self.parts])
        cuts = np.split(self.indices, np.searchsorted(self.indices, ends[:-1]))
        return [(own.tolist(), part.weight) for own, part in zip(cuts, self.parts, strict=True) if len(own)]


class _Epochs(Sequence[int]):
    """An endless sequence of the same elements, epoch after epoch; each epoch shuffled with a seed of its own.

    Grain would add the number of the epoch to the seed, and the second epoch of one run would be the first of another.
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


def _index_batches(usable: _UsableRecords, rows: int, *, seed: int, shuffle: bool) -> grain.MapDataset[list[int]]:
    """Return an endless stream of batches of `rows` record indices, reshuffled every epoch if `shuffle`."""
    if len(usable.indices) < rows:
        logging.warning(
            "a batch of %d takes the %d usable records more than once; give more records, or use a smaller batch",
            rows,
            len(usable.indices),
        )
    streams, weights = [], []
    for number, (indices, weight) in enumerate(usable.mixed()):
        elements = grain.MapDataset.source(indices)
        streams.append(grain.MapDataset.source(_Epochs(indices, seed, number)) if shuffle else elements.repeat(None))
        weights.append(weight)
    endless = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, weights)
    # An endless stream has no remainder to drop, but without drop_remainder Grain rounds its length up and overflows.
    return endless.batch(rows, drop_remainder=True, batch_fn=list)


class _Problem(NamedTuple):
    """The reason why a record is not usable."""

    reason: str
    """Reason under which the record is counted; the same text for all records that share it."""
    remedy: str
    length: int = 0
    """Number of tokens, if that is the problem."""


_EMPTY = _Problem("empty prompt", "give each record a question")
_UNKNOWN = _Problem("token outside the vocabulary", "use a tokenizer whose vocabulary covers the questions")
_ENDS = _Problem("token that ends a turn inside the worked response", "leave that token out; it is added")
_CORRUPT = _Problem("corrupt", "restore the file, or delete a generated data set so that it is built again")


def _length_problem(what: str, length: int, limit: int, field: str) -> _Problem | None:
    """Return the problem of a text with more than `limit` tokens, else None; `field` is the config field of `limit`."""
    if length <= limit:
        return None
    remedy = f"the shortest has {length}, so set {field} to {length} or more"
    return _Problem(f"{what} longer than {limit} tokens", remedy, length)


def _prompt_problem(ids: list[int], tokenizer: Tokenizer, limit: int) -> _Problem | None:
    """Return the problem that makes a prompt unusable, or None."""
    if not ids:
        return _EMPTY
    if problem := _length_problem("prompt", len(ids), limit, "data.max_prompt_length"):
        return problem
    return _UNKNOWN if tokenizer.unk_id is not None and tokenizer.unk_id in ids else None


def _scan_prompts(
    source: Sequence[Record], tokenizer: Tokenizer, limit: int, max_corrupt: int, style: PromptStyle, defect: Defects
) -> _UsableRecords:
    def checked(record: Record, prompt: list[int] | _Problem) -> list[int] | _Problem:
        if isinstance(prompt, _Problem):
            return prompt
        reason = defect(record)
        return _prompt_problem(prompt, tokenizer, limit) or (_Problem(reason, "correct them") if reason else prompt)

    def check(records: list[Record]) -> list[list[int] | _Problem]:
        return list(map(checked, records, _encode_prompts(records, tokenizer, style)))

    return _scan(source, check, max_corrupt)


_Check = Callable[[list[Record]], list[list[int] | _Problem]]
"""Records -> the tokens of each one's prompt, or why it cannot be used."""


def _encode_prompts(records: list[Record], tokenizer: Tokenizer, style: PromptStyle) -> list[list[int] | _Problem]:
    """Return the token ids of each record's prompt, or the problem of one that the chat template rejects."""
    texts = tokenizer.chat_all([_guarded(record, tokenizer, style) for record in records])
    ids = iter(tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
    return [
        next(ids) if isinstance(text, str) else _Problem("rejected by the chat template", str(text)) for text in texts
    ]


def _scan(source: Sequence[Record], check: _Check, max_corrupt: int) -> _UsableRecords:
    """Read every record once; keep those in which `check` finds no problem, count and report the others.

    Repeated questions are kept, since a data set may weight its questions so, and reported.
    """
    indices: list[int] = []
    questions: set[bytes] = set()  # as digests
    content = FieldDigests()
    skipped = collections.Counter(source.left_out if isinstance(source, Records) else {})
    shortest = {_CORRUPT.reason: _CORRUPT}  # per reason, the shortest: its remedy asks for least
    for start in range(0, len(source), _SCAN_CHUNK):
        readable: list[tuple[int, Record]] = []
        for i in range(start, min(start + _SCAN_CHUNK, len(source))):
            try:
                readable.append((i, source[i]))
            except CorruptRecord as error:
                skipped[_CORRUPT.reason] += 1
                logging.warning("skipped: %s", error)
                if skipped[_CORRUPT.reason] > max_corrupt:
                    raise UserError(
                        f"more than {max_corrupt} corrupt records in {source!r}, the last: {error}; {_CORRUPT.remedy}"
                    ) from error
        for (i, record), found in zip(readable, check([r for _, r in readable]), strict=True):
            # An empty question counts as empty even if a chat template wraps it in tokens.
            found = found if record["question"].strip() else _EMPTY
            if isinstance(found, _Problem):
                skipped[found.reason] += 1
                shortest[found.reason] = min(shortest.get(found.reason, found), found, key=lambda p: p.length)
                continue
            indices.append(i)
            content.add(record | {_TOKENS: np.asarray(found, np.int32).tobytes().hex()})
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
    source: Sequence[Record], indices: list[int], tokenizer: Tokenizer, length: int, style: PromptStyle
) -> PromptBatch:
    records = [source[i] for i in indices]
    texts = [prompt_text(record, tokenizer, style) for record in records]
    tokens, lengths = _pad(tokenizer.encode_batch(texts), length, tokenizer.pad_id)
    prompts = Prompts(tokens, lengths)  # type: ignore[arg-type]  # NumPy arrays; the caller places them on its mesh
    plain = [text.replace(GUARD, "") for text in texts]
    return PromptBatch(prompts, plain, records, np.ones(len(records), bool))


def _pad(rows: list[list[int]], length: int, pad: int) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Return the rows right padded to `length`, and their lengths."""
    tokens = np.full((len(rows), length), pad, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.asarray([len(ids) for ids in rows], np.int32)
