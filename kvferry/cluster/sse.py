"""Server-sent events, as far as OpenAI's streams use them."""

from collections.abc import AsyncIterator

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def event(payload: object) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def payloads(lines: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """The payloads of a stream's lines, in order, ``[DONE]`` included."""
    async for line in lines:
        if line.startswith("data:"):
            yield line[5:].strip().encode()
