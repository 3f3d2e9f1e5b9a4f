"""The PullConnector, broken in one way each; engines on hosts load it from here."""

from concurrent.futures import Future

import msgspec

from kvferry.connectors.pull import PullConnector
from kvferry.control.messages import FinishAnswer


class ForgetsToConfirm(PullConnector):
    """Takes its loads for good, and never tells the source that it is done with the blocks."""

    @classmethod
    def worker(cls, context, rank):
        worker = super().worker(context, rank)

        def finish(*_arguments, **_keys):
            answer = Future()
            answer.set_result(FinishAnswer.HELD)
            return answer

        worker._client.finish = finish
        return worker


class SwapsTwoBlocks(PullConnector):
    """Takes the first two blocks of a prompt for each other."""

    @classmethod
    def worker(cls, context, rank):
        worker = super().worker(context, rank)
        start = worker.start_load_kv

        def swapped(metadata):
            metadata.loads = [_swap(load) for load in metadata.loads]
            start(metadata)

        worker.start_load_kv = swapped
        return worker


def _swap(load):
    (table,) = load.ticket.block_ids
    if len(table) < 3:  # the second is not full
        return load
    first, second, *others = table
    ticket = msgspec.structs.replace(load.ticket, block_ids=([second, first, *others],))
    return msgspec.structs.replace(load, ticket=ticket)
