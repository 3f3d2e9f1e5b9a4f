"""One measured transfer."""

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """One measured transfer."""

    seconds: float
    """From the call to the data in place."""
    permute_seconds: float = 0.0
    """The part of it that changed the layout in a pass of its own."""
    segments: int = 0
    """Contiguous copies (of ours) or descriptors (of NIXL) after merging; 0 for a memcpy."""
