"""Work on a device beside the stream on which the engine computes."""

from collections.abc import Callable
from typing import Any

import torch


class SideStream:
    """A stream of its own on a CUDA device.

    Work starts when what the current stream holds so far is done, so a block is never touched
    while a step that was enqueued earlier still uses it. The engine's stream goes on meanwhile; it
    waits for the event before it uses the blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> torch.cuda.Event:
        """Enqueues what ``work`` enqueues; returns an event for its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            event: torch.cuda.Event = self._stream.record_event()
        return event
