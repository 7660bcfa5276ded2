"""An environment with a tool behind HTTP: the policy calls it, reads the result, and goes on.

    python -m gspo_jax.train --config=gsm8k --workdir=runs/http_tool --config.model.folder=Qwen3-0.6B \
        --config.data.folder=gsm8k --config.environment.turns=4 \
        --config.functions.adding=examples/http_tool.py:Adding --config.environment.name=adding

`python examples/http_server.py 8001` stands in for your server, which TOOLS_URL names.
"""

import os
from typing import Any

import httpx

from gspo_jax.rewards.tools import tool_replies

URL = os.environ.get("TOOLS_URL", "http://127.0.0.1:8001")
CLIENT = httpx.AsyncClient(timeout=30.0, limits=httpx.Limits())
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}


async def add(a: float, b: float) -> dict[str, float]:
    """Ask the server."""
    reply = await CLIENT.post(f"{URL}/add", json={"a": a, "b": b})
    reply.raise_for_status()
    return reply.json()


class Adding:
    """Answers the tool calls of a turn; a turn without one is the last."""

    tools = (
        {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}},
    )

    async def step(self, message: dict[str, Any]) -> list[dict[str, str]] | None:
        """Return the results of the calls, asked for side by side."""
        return await tool_replies(message, {"add": add}) or None
