"""Numbers with units, and lists of numbers, for people."""

from collections.abc import Sequence
from itertools import pairwise

from kvferry.topology.layer_ranges import ranges_text


def bytes_text(count: float) -> str:
    """A number of bytes.

    >>> bytes_text(0), bytes_text(2048), bytes_text(3_500_000)
    ('0 B', '2.0 KiB', '3.3 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A duration.

    >>> seconds_text(0.0042), seconds_text(7.25), seconds_text(80), seconds_text(7300)
    ('4.2 ms', '7.2 s', '1 min 20 s', '2 h 1 min')
    """
    if abs(seconds) < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60} min"


def layers_text(layers: Sequence[int]) -> str:
    """Ascending layers; those that a replica gives in turn with others are told by their step.

    >>> layers_text([0, 1, 2, 5]), layers_text([1, 3, 5, 7, 9])
    ('0-2, 5', '1, 3 ... 9')
    """
    steps = {two - one for one, two in pairwise(layers)}
    if len(steps) == 1 and steps != {1} and len(layers) > 3:
        return f"{layers[0]}, {layers[1]} ... {layers[-1]}"
    return ranges_text(layers)
