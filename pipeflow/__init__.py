"""pipeflow: an asyncio pipeline framework for GPU work."""

__version__ = "0.1.0.dev0"
