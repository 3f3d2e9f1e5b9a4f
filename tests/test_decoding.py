"""Struct types that threads decode for the first time at once."""

import subprocess
import sys

import pytest

RACE = """
import sys
import threading
from typing import Annotated

import msgspec

from kvferry.decoding import decoder_for

sys.setswitchinterval(1e-6)
Count = Annotated[int, msgspec.Meta(ge=0)]
message = msgspec.msgpack.encode({"number": 1, "inner": [{"number": 3}]})
for _ in range(int(sys.argv[1])):
    fields = [(f"field{i}", dict[Count, str] | None, None) for i in range(10)]
    Inner = msgspec.defstruct("Inner", [("number", Count), *fields])
    Outer = msgspec.defstruct("Outer", [("number", int), ("inner", tuple[Inner, ...]), *fields])
    together = threading.Barrier(3)

    def use(kind):
        together.wait()
        decoder_for(kind).decode(message)

    threads = [threading.Thread(target=use, args=(Outer,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize("rounds", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_threads_decode_a_new_type_at_once(rounds: int) -> None:
    # With a decoder that each thread makes for itself, the process died in six runs after 2, 9, 16,
    # 60, 75 and 161 rounds.
    command = [sys.executable, "-c", RACE, str(rounds)]
    subprocess.run(command, check=True, timeout=280)
