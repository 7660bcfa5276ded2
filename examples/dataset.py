"""A data set of one's own, and a config that trains on it.

    python -m gspo_jax.train --config=examples/dataset.py --workdir=runs/own_dataset

Rows have a question, an answer, the worked solution for a cold start, and any texts that the rewards read.
"""

import random

from ml_collections import ConfigDict

from gspo_jax.cli import load_config


def products(split: str, *, largest: int = 9) -> list[dict[str, str]]:
    """Return products of two numbers; the test split has every seventh of them."""
    pairs = [(a, b) for a in range(2, largest + 1) for b in range(2, largest + 1)]
    random.Random(0).shuffle(pairs)
    held_out = pairs[::7]
    chosen = held_out if split == "test" else [pair for pair in pairs if pair not in held_out]
    return [
        {"question": f"{a}*{b}", "answer": str(a * b), "worked": f"#### {a * b}", "factors": f"{a} {b}"}
        for a, b in chosen
    ]


def get_config() -> ConfigDict:
    """Return the short run of configs/tiny.py, on products."""
    config = load_config("configs/tiny.py:runlocal")
    config.functions.products = "examples/dataset.py:products"
    config.data.task = "products"
    config.data.data_dir = ""  # where generated tasks are built
    config.data.options = ConfigDict({"largest": 12})
    return config
