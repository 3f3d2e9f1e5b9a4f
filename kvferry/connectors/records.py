"""Compares the lent cells with the received cells, by digests."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvferry.observe.records import TransferRecord


def digest_mismatch(
    sent: Iterable[TransferRecord], received: Iterable[TransferRecord]
) -> int | None:
    """The first token whose cells differ between source and target.

    Args:
        sent: the records of one lease from all ranks of the source, direction ``send``.
        received: the records of this lease from all ranks of the target, direction ``recv``.

    Returns:
        Position of the token; ``None`` if every moved token arrived bit for bit.

    Raises:
        ValueError: a side has no record, or a record has no digests, or the spans do not fit.
    """
    source_first, source = _sum(sent, "send")
    target_first, target = _sum(received, "recv")
    if target_first < source_first or len(target) > len(source) - (target_first - source_first):
        raise ValueError(
            f"records: {len(target)} tokens arrived from {target_first} on, {len(source)} were "
            f"lent from {source_first} on; these are not records of one lease"
        )
    lent = source[target_first - source_first :][: len(target)]
    different = np.flatnonzero(lent != target)
    return target_first + int(different[0]) if len(different) else None


def _sum(records: Iterable[TransferRecord], direction: str) -> tuple[int, npt.NDArray[np.uint64]]:
    """The first token, and for each token the sum of its digests over the ranks, modulo 2**64."""
    total: npt.NDArray[np.uint64] | None = None
    first = 0
    for record in records:
        if record.direction != direction or record.token_digests is None:
            raise ValueError(
                f"record of rank {record.rank}: is no {direction} record with digests; set "
                "record_digests on both engines"
            )
        digests = np.array(record.token_digests, dtype=np.uint64)
        if total is None:
            first, total = record.first_token, digests
        elif record.first_token != first or len(digests) != len(total):
            raise ValueError("records: the ranks speak of different tokens")
        else:
            total = total + digests
    if total is None:
        raise ValueError(f"records: no {direction} record")
    return first, total
