"""A reward that a server gives: many responses are asked about at a time, the first while others are still decoded.

    python -m gspo_jax.train --config=configs/tiny.py:runlocal --workdir=runs/async_reward \
        --config.functions.terse=examples/async_reward.py:terse --config.rewards.terse=0.1

`python examples/http_server.py 8001` stands in for your server, which SCORES_URL names.
"""

import os

import httpx

from gspo_jax.rewards import answer_part

URL = os.environ.get("SCORES_URL", "http://127.0.0.1:8001")
CLIENT = httpx.AsyncClient(timeout=30.0, limits=httpx.Limits())


async def terse(prompt: str, completion: str, record: dict[str, str]) -> float | None:
    """Return the server's score of the answer behind all thoughts; 0, without a call, if a thought is left open."""
    answer = answer_part(prompt, completion)
    if answer is None:
        return 0.0
    reply = await CLIENT.post(f"{URL}/score", json={"question": record["question"], "response": answer})
    reply.raise_for_status()
    return reply.json()["score"]
