"""Publishers of KV cache events."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kvferry.config import KVEventsConfig
from kvferry.control.cache_events import CacheEventPublisher

FREE = "tcp://127.0.0.1:0"


@contextlib.contextmanager
def publishers() -> Iterator[Callable[..., CacheEventPublisher]]:
    """Opens one at each call, on free ports unless it is told otherwise; all are closed."""
    with contextlib.ExitStack() as opened:

        def open_one(**changes: Any) -> CacheEventPublisher:
            config = KVEventsConfig(**({"endpoint": FREE, "replay_endpoint": FREE} | changes))
            publisher = CacheEventPublisher(config)
            opened.callback(publisher.close)
            return publisher

        yield open_one
