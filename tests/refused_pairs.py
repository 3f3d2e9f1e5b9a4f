"""Five pairs that other systems refuse, as ``kvferry plan`` takes them.

The plan explains each, and engines of these shapes run each: of one table, so that what is
explained is what runs.
"""

from typing import NamedTuple


class RefusedPair(NamedTuple):
    """Two specs, ``key=value`` with commas between."""

    prefill: str
    decode: str


REFUSED_PAIRS = {
    "larger prefill blocks": RefusedPair("block=64", "block=16"),
    "NHD to HND": RefusedPair("layout=NHD", "layout=HND"),
    "more prefill ranks, heads replicated": RefusedPair("tp=8", "tp=2"),
    "TP 3 to TP 2": RefusedPair("tp=3,layout=HND", "tp=2,layout=HND"),
    "PP on the decode side": RefusedPair("tp=1", "pp=4"),
}
