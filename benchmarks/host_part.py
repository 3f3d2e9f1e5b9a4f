"""The host's part of work on a GPU, measured without a GPU.

Of a read over ``cuda_ipc``, that is binding, tables and launches; of a postprocessor, a whole call.
It is measured by a process of its own (:mod:`benchmarks.host_side`). Nothing here imports Triton,
whose kernels are made for a GPU or for the interpreter when they are imported.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.remote import Remote

PAIRS = [(layout, tokens) for layout in ("NHD", "HND") for tokens in (16, 512, 4096, 32768)]
"""Layout of the source and tokens of a read; the target's layout is NHD."""
POSTPROCESSED = (32, 256, 2048)
"""Block ids of a call: 1, 8 and 64 requests of 512 tokens, in blocks of 16."""
WIRE_TOKENS = 4096
"""Tokens of a read over a wire."""
COLUMNS = ("bind", "tables", "uploads", "launches", "runs to enqueued", "call to known", "number")
"""Of a row: microseconds, and in the end the number of launches."""
NOT_COUNTED = (
    "Medians in µs. Counted: kvferry, and of Triton's launcher what is Python. Not counted: the "
    "driver's calls, and what torch does for CUDA alone (pinning, switching streams, events)."
)


def make_side() -> Any:
    """What is held by the process that measures."""
    from benchmarks.host_side import Side

    return Side(PAIRS)


def make_postprocess_side() -> Any:
    """What is held by the process that measures postprocessors."""
    from benchmarks.host_side import PostprocessSide

    return PostprocessSide(POSTPROCESSED)


def measure_postprocess(rounds: int) -> Iterator[tuple[str, ...]]:
    """The table of postprocessors, its header first: medians over rounds."""
    yield ("caches", "block ids", "same views", "new views")
    medians = _medians(make_postprocess_side, rounds)
    for number, figures in zip(POSTPROCESSED, medians, strict=True):
        yield ("160", f"{number:,}", *figures)


def make_wires() -> Any:
    """What is held by the process that measures chunks and pieces."""
    from benchmarks.host_side import Wires

    return Wires(WIRE_TOKENS)


def measure(rounds: int) -> Iterator[tuple[str, ...]]:
    """The table of reads, its header first: medians over rounds."""
    yield ("layouts", "tokens", *COLUMNS)
    for (layout, tokens), figures in zip(PAIRS, _medians(make_side, rounds), strict=True):
        yield (f"{layout} to NHD", f"{tokens:,}", *figures)


def measure_wires(rounds: int) -> Iterator[tuple[str, ...]]:
    """The table of chunks and pieces of 4 MiB, its header first: medians over rounds."""
    yield ("layouts", "tokens", "chunk placed", "piece packed")
    for layout, figures in zip(("NHD", "HND"), _medians(make_wires, rounds), strict=True):
        yield (f"{layout} to NHD", f"{WIRE_TOKENS:,}", *figures)


def _medians(make: Callable[[], Any], rounds: int) -> Iterator[list[str]]:
    """The medians of each row over rounds."""
    with Remote("host", make, env={"TRITON_INTERPRET": "0"}) as side:
        side.call("round")  # it loads and compiles
        taken = [side.call("round") for _ in range(rounds)]
    for rows in zip(*taken, strict=True):
        yield [f"{statistics.median(column):.0f}" for column in zip(*rows, strict=True)]
