"""The way in which cells reach a target, decided by one rule in one function.

*Placed*: the transport writes cells directly to their final place, in one pass of its movers, or
with one wire segment per contiguous copy. *Staged*: the transport brings dense chunks into bounded
staging memory; then a copy unpacks or converts the chunks into place
(:mod:`kvferry.transports.staged`).

A transport that cannot prove the end of a read must not write memory that another request will own;
and no transport can convert elements. Otherwise only the length of segments decides. A wire has a
cost per segment, and dense chunks come in longer segments if the source has a different layout.
"""

from dataclasses import dataclass
from typing import Literal

from kvferry.layouts.arrays import HOST
from kvferry.transports.base import DeviceTransport, Transport


@dataclass(frozen=True, slots=True)
class Way:
    """The way of the cells of one pair of KV cache groups."""

    kind: Literal["placed", "staged", "refused"]
    """``refused`` if the transport cannot serve the engine's memory; only plans have this kind."""
    reason: str
    """Reason for the choice, in a few words."""

    @property
    def placed(self) -> bool:
        """Whether the transport writes the cells directly into place."""
        return self.kind == "placed"

    def __str__(self) -> str:
        return self.kind


def choose_way(
    transport: Transport | type[Transport],
    *,
    device: str,
    conversion: tuple[str, str] | None,
    segment_bytes: float,
    source_bytes: float,
) -> Way:
    """The way in which a transport brings cells to a target.

    Args:
        transport: the transport that moves the cells.
        device: device of the target memory: ``cpu``, or for example ``cuda:0``.
        conversion: dtypes of source and target if they differ.
        segment_bytes: mean bytes of a contiguous copy, for example in a typical request.
        source_bytes: mean bytes of a contiguous piece at the source. A transport with ``SEGMENTS``
            moves such a piece at once into staging memory; if these pieces are no longer than
            ``segment_bytes``, staging saves nothing.
    """
    kind = transport if isinstance(transport, type) else type(transport)
    name, least = transport.name, transport.least_segment_bytes
    if conversion is not None:
        return Way("staged", f"{conversion[0]} becomes {conversion[1]} on the way")
    if not transport.fences:
        return Way("staged", f"{name} cannot prove that a read has ended")
    if device != HOST and not issubclass(kind, DeviceTransport):
        return Way("staged", f"{name} does not write memory on {device}")
    if segment_bytes < least and source_bytes >= 2 * segment_bytes:
        return Way(
            "staged",
            f"segments have {segment_bytes:,.0f} bytes on average, {name} places those of "
            f"{least:,} and more",
        )
    return Way("placed", f"{name} writes the cells where they belong")
