"""An environment with the tools of an MCP server, to which each episode has a session of its own.

    python -m gspo_jax.train --config=gsm8k --workdir=runs/mcp_tool --config.model.folder=Qwen3-0.6B \
        --config.data.folder=gsm8k --config.environment.turns=4 \
        --config.functions.numbers=examples/mcp_tool.py:Numbers --config.environment.name=numbers

MCP_URL names a server over streamable HTTP. Without it, each session starts examples/mcp_server.py, over stdio.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from gspo_jax.rewards.tools import Held, tool_replies

HERE = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("mcp_server.py"))])
SERVER = os.environ.get("MCP_URL") or HERE


class Numbers:
    """Answers the tool calls of a turn; a turn without one is the last."""

    @staticmethod
    async def tools() -> list[dict[str, Any]]:
        """Return what tools the server has, as a chat template takes them."""
        async with Client(SERVER) as client:
            listed = (await client.list_tools()).tools
        shown = [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in listed]
        return [{"type": "function", "function": each} for each in shown]

    async def reset(self, record: dict[str, str]) -> None:
        self.held = Held(Client(SERVER))
        self.client = await self.held.enter()
        self.functions = {tool.name: partial(self.call, tool.name) for tool in (await self.client.list_tools()).tools}

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool and return the texts of its result, which may be those of an error."""
        result = await self.client.call_tool(tool, arguments)
        return "\n".join(part.text for part in result.content if part.type == "text")

    async def step(self, message: dict[str, Any]) -> list[dict[str, str]] | None:
        return await tool_replies(message, self.functions) or None

    async def close(self) -> None:
        await self.held.leave()
