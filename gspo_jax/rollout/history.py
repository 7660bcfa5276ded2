"""Responses of earlier epochs, by prompt, which drafts are copied from."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from gspo_jax.types import Prompts, TextRows

ROWS = 4
"""Most responses kept per prompt."""
TOKENS = 2**26
"""Most tokens kept, 256 MiB. Beyond, the prompts that were answered longest ago are forgotten."""


class History:
    """Keeps the newest responses to every prompt, on the host of each process.

    No sampled token depends on what it holds.
    """

    def __init__(self, length: int, *, rows: int = ROWS, tokens: int = TOKENS):
        """Start empty.

        Args:
          length: most tokens of a response.
          rows: responses kept per prompt.
          tokens: kept in all.
        """
        self._length, self._rows, self._room = length, rows, tokens
        self._kept: dict[bytes, list[Int[np.ndarray, " t"]]] = {}
        """By the prompt's tokens; the one answered longest ago first."""
        self._held = 0

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, prompts: Prompts) -> TextRows:
        """Return the responses kept for prompts [P, S]; of length 0 where there are fewer."""
        P = len(prompts.lengths)
        tokens, lengths = np.zeros((P, self._rows, self._length), np.int32), np.zeros((P, self._rows), np.int32)
        for p, (text, length) in enumerate(zip(*map(np.asarray, (prompts.tokens, prompts.lengths)), strict=True)):
            for row, response in enumerate(self._kept.get(_name(text, int(length)), ())):
                tokens[p, row, : len(response)], lengths[p, row] = response, len(response)
        kept: Any = tokens, lengths
        return TextRows(*kept)

    def add(
        self,
        prompts: Int[np.ndarray, "B S"],
        prompt_lengths: Int[np.ndarray, " B"],
        tokens: Int[np.ndarray, "B T"],
        lengths: Int[np.ndarray, " B"],
    ) -> None:
        """Keep the first responses to each prompt in place of those kept before."""
        new: dict[bytes, list[np.ndarray]] = {}
        for row, (text, length) in enumerate(zip(prompts, prompt_lengths, strict=True)):
            own = new.setdefault(_name(text, int(length)), [])
            if len(own) < self._rows:
                own.append(np.array(tokens[row, : lengths[row]], np.int32))
        for name, responses in new.items():
            self._held -= sum(map(len, self._kept.pop(name, ())))
            self._kept[name] = responses
            self._held += sum(map(len, responses))
        while self._held > self._room and len(self._kept) > 1:
            self._held -= sum(map(len, self._kept.pop(next(iter(self._kept)))))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return everything, by checkpoint name."""
        names = [np.frombuffer(name, np.int32) for name in self._kept]
        responses = [response for own in self._kept.values() for response in own]
        none = [np.zeros(0, np.int32)]
        return {
            "history_prompts": np.concatenate([*none, *names]),
            "history_prompt_lengths": np.array([len(name) for name in names], np.int32),
            "history_counts": np.array([len(own) for own in self._kept.values()], np.int32),
            "history_tokens": np.concatenate([*none, *responses]),
            "history_lengths": np.array([len(response) for response in responses], np.int32),
        }

    def restore(self, named: Mapping[str, np.ndarray]) -> None:
        """Take over what `to_arrays` returned; nothing, if a checkpoint has none."""
        if "history_prompts" not in named:
            return
        names = _parts(named["history_prompts"], named["history_prompt_lengths"])
        responses = iter(_parts(named["history_tokens"], named["history_lengths"]))
        for name, count in zip(names, named["history_counts"], strict=True):
            self._kept[name.astype(np.int32).tobytes()] = [next(responses)[: self._length] for _ in range(count)]
        self._held = sum(len(response) for own in self._kept.values() for response in own)


def _name(text: Int[np.ndarray, " S"], length: int) -> bytes:
    return np.asarray(text[:length], np.int32).tobytes()


def _parts(joined: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(joined, np.cumsum(lengths)[:-1]) if len(lengths) else []
