"""Responses of a batch as records on the host, and as lines of a file."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.folder.lines import dumps, to_python
from gspo_jax.parallel import hosts, processes
from gspo_jax.types import Batch, Rewards


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """A response of T tokens. With an environment, a whole episode: the policy's turns and the replies to them."""

    prompt: str
    """Text that it continues, under the chat template."""
    text: str
    """Without special tokens, except thought marks."""
    finish: Literal["eos", "length"]
    """Whether the policy, or the environment, ended it, or the limit on tokens."""
    tokens: Int[np.ndarray, " T"]
    """EOS included."""
    sampled: Bool[np.ndarray, " T"]
    """False on tokens of `sampling.prefix` and of an environment's replies."""
    logprobs: Float[np.ndarray, " T"]
    """Under the full softmax at the sampling temperature, as the trainer scores; 0 on tokens that were not sampled."""
    routes: Int[np.ndarray, "T L K"] | None
    """Experts that computed each token in the L routed layers, most probable first; -1 at the last token, which was
    never fed. None if not requested."""
    reward: float | None
    """Weighted sum of the scores, None if one with a weight is missing or nothing was scored."""
    scores: dict[str, float | None]
    """By reward function, unweighted. Empty if nothing was scored."""


def responses_of(
    batch: Batch, tokenizer: Tokenizer, rewards: Rewards | None = None, *, routes: bool = False
) -> list[Response]:
    """Return the responses of a batch that is not packed, in order. Every process must call it.

    `routes` are fetched from the devices if requested.
    """
    rollout = batch.rollout
    columns = rollout.tokens, rollout.mask, rollout.action_mask, rollout.logprobs
    tokens, mask, sampled, logprobs = hosts.allgather(columns)
    experts = hosts.allgather(rollout.routes.experts)[:, rollout.prompts.shape[1] :] if routes else None
    found = []
    for row, kept in enumerate(mask):
        own = tokens[row][kept]
        found.append(
            Response(
                prompt=batch.texts[row],
                text=tokenizer.decode(own.tolist()),
                finish="length" if batch.truncated[row] else "eos",
                tokens=own,
                sampled=sampled[row][kept],
                logprobs=logprobs[row][kept],
                routes=None if experts is None else experts[row][kept],
                reward=None if rewards is None else _number(rewards.total[row]),
                scores={} if rewards is None else {name: _number(of[row]) for name, of in rewards.by_name.items()},
            )
        )
    return found


def line(record: Record, response: Response, *, sample: int, logprobs: bool = False) -> dict[str, Any]:
    """Return a response as a line: the record's fields and its own, which `gspo_jax.score` and `accept` read.

    Args:
      sample: its number among the responses to the prompt.
      logprobs: include log-probs. They and routes, if any, are written by token, beside `token_ids`.
    """
    found: dict[str, Any] = {
        **record,
        "prompt": response.prompt,
        "completion": response.text,
        "sample": sample,
        "finish": response.finish,
        "tokens": len(response.tokens),
    }
    if response.scores:
        found |= {"reward": response.reward, "scores": response.scores}
    if logprobs or response.routes is not None:
        found["token_ids"] = response.tokens.tolist()
    if logprobs:
        of_tokens = zip(response.logprobs, response.sampled, strict=True)
        found["logprobs"] = [to_python("logprob", value) if own else None for value, own in of_tokens]
    if response.routes is not None:
        found["routes"] = response.routes.tolist()
    return found


@contextmanager
def new_file(file: str | Path | None) -> Iterator[Callable[[Iterable[dict[str, Any]]], None]]:
    """Yield a function that adds lines to a new file, flushed so that they outlive this process.

    It writes nothing on other processes than the first, or without a file.
    """
    if file is None or not processes.is_first():
        yield lambda lines: None
        return
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(file, "x", encoding="utf-8") as opened:

        def add(lines: Iterable[dict[str, Any]]) -> None:
            opened.write("".join(dumps(each) + "\n" for each in lines))
            opened.flush()

        yield add


def _number(value: Any) -> float | None:
    number = float(str(np.float32(value)))  # the shortest decimal
    return number if math.isfinite(number) else None
