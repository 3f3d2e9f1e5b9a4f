"""How cells come to a target, by one rule in one function.

*Placed*: the transport writes the cells where they belong, in one pass of its movers, or with one
wire segment per contiguous copy. *Staged*: it brings dense chunks into bounded staging memory, from
which they are unpacked, or converted, into place (:mod:`kvferry.transports.staged`).

A transport that cannot prove that a read has ended must not write memory that somebody else will
own; nor can any transport convert elements. Beyond that only the length of segments decides: a wire
pays for each of them, and dense chunks come in longer ones where the source's layout is another.
"""

from dataclasses import dataclass

from kvferry.layouts.arrays import HOST
from kvferry.transports.base import DeviceTransport, Transport


@dataclass(frozen=True, slots=True)
class Way:
    """The way of the cells of one pair of KV cache groups."""

    placed: bool
    """Whether the transport writes them where they belong; staged otherwise."""
    reason: str
    """Why, in a few words."""

    def __str__(self) -> str:
        return "placed" if self.placed else "staged"


def choose_way(
    transport: Transport | type[Transport],
    *,
    device: str,
    conversion: tuple[str, str] | None,
    segment_bytes: float,
    source_bytes: float,
) -> Way:
    """The way by which a transport brings cells to a target.

    Args:
        transport: what moves them.
        device: of the target's memory: ``cpu``, or for example ``cuda:0``.
        conversion: dtype of the source and of the target where they differ.
        segment_bytes: mean bytes of a contiguous copy, for example of a typical request.
        source_bytes: the same of what is contiguous at the source, which is what a wire of segments
            moves at once into staging; where that is no longer, staging saves nothing.
    """
    kind = transport if isinstance(transport, type) else type(transport)
    name, least = transport.name, transport.least_segment_bytes
    if conversion is not None:
        return Way(placed=False, reason=f"{conversion[0]} becomes {conversion[1]} on the way")
    if not transport.fences:
        return Way(placed=False, reason=f"{name} cannot prove that a read has ended")
    if device != HOST and not issubclass(kind, DeviceTransport):
        return Way(placed=False, reason=f"{name} does not write memory on {device}")
    if segment_bytes < least and source_bytes >= 2 * segment_bytes:
        return Way(
            placed=False,
            reason=f"segments have {segment_bytes:,.0f} bytes on average, "
            f"{name} places those of {least:,} and more",
        )
    return Way(placed=True, reason=f"{name} writes the cells where they belong")
