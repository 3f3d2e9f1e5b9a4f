"""How a transfer is run: the strategies, and what a mover can do of them."""

import enum
from dataclasses import dataclass


class Strategy(enum.StrEnum):
    """The ways in which the cells of a plan get from source memory into their final places."""

    STRIDED = "strided"
    """One pass from source memory to the final place, layout change included."""
    DIRECT = "direct"
    """One wire operation per contiguous piece, into its final place."""
    IN_PLACE = "in place"
    """Whole blocks into their final slots, then a permute of those blocks."""
    STAGED = "staged"
    """Dense chunks into staging memory, then an unpack (and conversion) into place."""


class Addressing(enum.StrEnum):
    """What a mover does with tiles × runs."""

    BOTH = "both"
    """It reads source memory and writes target memory itself, in one pass."""
    PACKED = "packed"
    """Our code packs at the source and unpacks at the target; the wire between is dense."""
    SEGMENTS = "segments"
    """One wire operation per contiguous piece."""


@dataclass(frozen=True, slots=True)
class MoverTraits:
    """What a transport can do, as far as the choice of a strategy depends on it."""

    name: str
    addressing: Addressing
    fences: bool
    """Whether a terminal state proves that nothing can land any more."""
