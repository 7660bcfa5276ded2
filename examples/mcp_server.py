"""An MCP server with two tools, over stdio, or over streamable HTTP at a port.

python examples/mcp_server.py 8002
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers", log_level="CRITICAL")


@server.tool()
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
