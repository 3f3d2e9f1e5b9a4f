"""The PullConnector, broken in one way each; engines on hosts load it from here."""

from concurrent.futures import Future
from typing import Any

import msgspec

from kvferry.connectors.pull import PullConnector
from kvferry.connectors.pull.metadata import ids_of, packed
from kvferry.control.messages import FinishAnswer


class ForgetsToConfirm(PullConnector):
    """Takes its loads for good, and never tells the source that it is done with the blocks."""

    @classmethod
    def worker(cls, context, rank):
        worker: Any = super().worker(context, rank)

        def finish(*_arguments, **_keys):
            answer: Future[FinishAnswer] = Future()
            answer.set_result(FinishAnswer.HELD)
            return answer

        worker.client.finish = finish
        return worker


class SwapsTwoBlocks(PullConnector):
    """Takes the first two blocks of a prompt for each other."""

    @classmethod
    def worker(cls, context, rank):
        worker: Any = super().worker(context, rank)
        start = worker.start_load_kv

        def swapped(metadata):
            metadata.loads = [_swap(load) for load in metadata.loads]
            start(metadata)

        worker.start_load_kv = swapped
        return worker


def _swap(load):
    (table,) = map(ids_of, load.source_tables)
    if len(table) < 3:  # the second is not full
        return load
    first, second, *others = table
    return msgspec.structs.replace(load, source_tables=packed([[second, first, *others]]))
