"""What copying and moving bytes costs on a machine: the constants of the choice of a strategy.

``kvferry bench --calibrate`` measures them and writes them to a file; without one the figures
below stand. They need only be right in proportion: they choose, they promise nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.topology.strategies import Addressing, MoverTraits


@dataclass(frozen=True, slots=True)
class WireCosts:
    """What a transport takes for a read."""

    transfer_s: float
    """Seconds per read, however small: threads woken, messages exchanged."""
    byte_s: float
    """Seconds per byte."""
    operation_s: float
    """Seconds per wire operation: a contiguous piece, or a dense chunk where our code packs."""


_LOCAL = WireCosts(transfer_s=1.5e-4, byte_s=8e-11, operation_s=1.5e-8)

DEFAULT_WIRES: Mapping[str, WireCosts] = {
    "shm": _LOCAL,
    "vm": WireCosts(transfer_s=1.5e-4, byte_s=1.2e-10, operation_s=2e-7),
    "tcp": WireCosts(transfer_s=4e-4, byte_s=4e-10, operation_s=1e-5),
    "ucx": WireCosts(transfer_s=5e-4, byte_s=9e-10, operation_s=5e-5),
    "nixl": WireCosts(transfer_s=3e-4, byte_s=2.2e-10, operation_s=5e-6),
}
"""Medians on two cores of an AMD EPYC server, between processes of one host."""

_UNKNOWN = {Addressing.BOTH: "shm", Addressing.PACKED: "tcp", Addressing.SEGMENTS: "nixl"}
"""Whose costs stand for those of a transport of which nothing is known."""


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Seconds for work on this machine, one thread each."""

    copy_byte_s: float = 8e-11
    """Per byte of a copy in host memory."""
    piece_s: float = 1.5e-8
    """Per contiguous piece of a strided copy, beside its bytes."""
    convert_byte_s: float = 5e-10
    """Per byte that a conversion of the dtype writes."""
    wires: Mapping[str, WireCosts] = field(default_factory=lambda: dict(DEFAULT_WIRES))
    """Transport name → what its reads take."""

    def wire(self, mover: MoverTraits) -> WireCosts:
        """The costs of a transport; those of one like it if nothing is known of it."""
        if mover.name in self.wires:
            return self.wires[mover.name]
        alike = _UNKNOWN[mover.addressing]
        return self.wires.get(alike, DEFAULT_WIRES[alike])
