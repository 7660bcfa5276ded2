"""A game as an environment: find a number by guesses, with a reward that the game itself gives.

    python -m gspo_jax.train --config=configs/tiny.py:runlocal --workdir=runs/game --config.environment.turns=3 \
        --config.functions.guessing=examples/game.py:Guessing --config.environment.name=guessing \
        --config.rewards.environment=1.0
"""

import re


class Guessing:
    """The number is the record's answer. The sooner it is found, the greater the reward."""

    def reset(self, record: dict[str, str]) -> str:
        """Hide the number, and return what takes the place of the record's question."""
        self.number, self.guesses = int(record["answer"]), 0
        return "guess?"

    def step(self, message: dict[str, str]) -> tuple[str | None, float]:
        """Say whether the number is greater or less than the last one of the turn."""
        self.guesses += 1
        guess = re.search(r"(-?\d{1,9})\D*$", message["content"])
        if guess is None:
            return "a number", 0.0
        if int(guess[1]) == self.number:
            return None, 1 / self.guesses
        return "more" if int(guess[1]) < self.number else "less", 0.0
