"""One iteration of group sequence policy optimization: prompts, decode, rewards, log-probs, advantages, updates.

Shared by `train`, `bench`, the notebooks and your own loops (examples/own_loop.py), so it knows no folder, clock, log,
signal or config.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from jaxtyping import Array, Key

from gspo_jax.engine import Engine
from gspo_jax.rollout.episodes import Plays
from gspo_jax.training.metrics import Metrics
from gspo_jax.training.state import TrainState
from gspo_jax.types import Batch, Prompts, Rewards


class Rewarder(Protocol):
    """Source of rewards: a `rewards.batches.BatchScorer`, or your own."""

    def begin(self, batch: Batch) -> Callable[[], Rewards]:
        """Start to reward an unpacked batch, and return at once a function that waits for its rewards."""
        ...


class Observer:
    """Listener that does nothing. Each method may raise to end the iteration."""

    def enter(self, phase: str) -> None:
        """A phase begins: "reshard", "sample", "score", "reward" or "update"."""

    def collected(self, state: TrainState, batch: Batch) -> None:
        """A batch is ready, before its first update of this state."""

    def updated(self, state: TrainState, batch: Batch, minibatch: int, measured: Metrics) -> None:
        """An update was made or skipped, with these metrics."""


_NOBODY = Observer()


def iterate(
    engine: Engine,
    player: Plays,
    scorer: Rewarder,
    state: TrainState,
    prompts: Iterator[Prompts],
    key: Key[Array, ""],
    observer: Observer = _NOBODY,
) -> tuple[TrainState, Batch, list[Metrics]]:
    """Sample a batch with this state's weights, and update on each of its mini-batches.

    Args:
      player: plays single responses, turns, partial rollouts or rounds of dynamic sampling.
      state: parameters and optimizer state; donated.
      prompts: read by the player.
      key: response i is sampled with `fold_in(key, i)`.

    Returns:
      The new state, the batch, and each update's metrics. Drop the batch before the next iteration, or both are on the
      devices.
    """
    batch = collect(engine, player, scorer, state, prompts, key, observer)
    observer.collected(state, batch)
    measured: list[Metrics] = []
    for minibatch in range(engine.minibatches):
        state, metrics = engine.update(state, batch, minibatch)
        observer.updated(state, batch, minibatch, metrics)
        measured.append(metrics)
    return state, batch, measured


def collect(
    engine: Engine,
    player: Plays,
    scorer: Rewarder,
    state: TrainState,
    prompts: Iterator[Prompts],
    key: Key[Array, ""],
    observer: Observer = _NOBODY,
) -> Batch:
    """Return an iteration's batch before its updates; see `iterate`."""
    observer.enter("reshard")
    engine.sync(state)
    observer.enter("sample")
    batch = player.play(prompts, key)
    observer.enter("reward")
    earned = scorer.begin(batch)  # runs in parallel with the device
    observer.enter("score")
    batch = engine.pack(batch)
    old = engine.score(state, batch)
    observer.enter("reward")
    rewards = earned()
    observer.enter("update")
    return engine.experience(batch, old, rewards)
