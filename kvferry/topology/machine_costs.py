"""What copying and moving bytes costs on a machine: the constants of the choice of a strategy.

``kvferry bench --calibrate`` measures them and writes them to a file; without one the figures
below stand. They need only be right in proportion: they choose, they promise nothing.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError
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


DEFAULT_WIRES: Mapping[str, WireCosts] = {
    "shm": WireCosts(transfer_s=1.5e-4, byte_s=8e-11, operation_s=1.5e-8),
    "vm": WireCosts(transfer_s=1.5e-4, byte_s=1.2e-10, operation_s=4e-8),
    "tcp": WireCosts(transfer_s=4e-4, byte_s=4e-10, operation_s=1e-5),
    "ucx": WireCosts(transfer_s=5e-4, byte_s=9e-10, operation_s=5e-5),
    "nixl": WireCosts(transfer_s=3e-4, byte_s=2.2e-10, operation_s=5e-6),
    "cuda_ipc": WireCosts(transfer_s=2e-4, byte_s=1e-12, operation_s=1e-10),
}
"""Between processes of one host, on two cores of an AMD EPYC server; that of ``cuda_ipc`` is an
order of magnitude, from the memory bandwidth of one GPU of 2024."""

_ALIKE = {Addressing.BOTH: "shm", Addressing.PACKED: "tcp", Addressing.SEGMENTS: "nixl"}
"""Whose costs stand for those of a transport of which nothing is known."""


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Seconds for work on this machine, one thread each."""

    copy_byte_s: float = 8e-11
    """Per byte of a copy in host memory."""
    piece_s: float = 1.5e-8
    """Per contiguous piece of a strided copy, beside its bytes."""
    convert_byte_s: float = 2e-10
    """Per byte that a conversion of the dtype writes."""
    wires: dict[str, WireCosts] = field(default_factory=dict)
    """Transport name → what its reads take; those that are not here are as by default."""

    def wire(self, mover: MoverTraits) -> WireCosts:
        """The costs of a transport; those of one like it if nothing is known of it."""
        known = {**DEFAULT_WIRES, **self.wires}
        return known.get(mover.name) or known[_ALIKE[mover.addressing]]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on a machine, as the file holds it."""

    machine: dict[str, str]
    """Facts for people: processor, date, versions."""
    costs: MachineCosts

    def encode(self) -> bytes:
        """The file's bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def default_costs_path() -> Path:
    """Where the machine's costs are kept: in the user's cache folder, as XDG says."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvferry" / "costs.json"


def load_costs(path: Path | None = None) -> MachineCosts:
    """The constants of a calibration.

    Args:
        path: a file that ``kvferry bench --calibrate`` wrote. If left out, the one of
            :func:`default_costs_path`, or the built-in figures where there is none.

    Raises:
        ConfigError: the file cannot be read or is no calibration; calibrate again.
    """
    found = path or default_costs_path()
    if path is None and not found.exists():
        return MachineCosts()
    try:
        costs = msgspec.json.decode(found.read_bytes(), type=Calibration).costs
    except OSError as error:
        raise ConfigError(f"{found}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{found}: is no calibration: {error}; run `kvferry bench --calibrate`"
        ) from error
    for name, value in _numbers(costs):
        if not 0 <= value < 1:
            raise ConfigError(f"{found}: {name} is {value} s, allowed are 0 to 1")
    return costs


def _numbers(costs: MachineCosts) -> list[tuple[str, float]]:
    own = {name: value for name, value in asdict(costs).items() if name != "wires"}
    wires = [
        (f"wires.{name}.{key}", value)
        for name, wire in costs.wires.items()
        for key, value in asdict(wire).items()
    ]
    return [*own.items(), *wires]
