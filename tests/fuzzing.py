"""Messages that are nearly right: valid ones, changed at a few places of their structure.

Noise is refused by the first byte that is wrong. What is changed here is a value, a length or a
shape somewhere inside, so that it reaches the code behind the schema.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    255,
    1 << 31,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "\x1b[2J\n",
    "é" * 300,
    "x" * 5000,
    b"",
    bytes(16),
    bytes(5000),
    [],
    [0] * 2000,
    {},
    {"": None},
)
"""What a field may say though it should not."""


def nearly(messages: Sequence[Any], count: int, seed: int, *, changes: int = 3) -> Iterator[bytes]:
    """``count`` times the MessagePack of one of ``messages``, changed at up to ``changes`` places.

    One in twenty is cut off or has some bytes replaced, besides.
    """
    rng = random.Random(seed)
    plain = [msgspec.msgpack.decode(msgspec.msgpack.encode(message)) for message in messages]
    for _ in range(count):
        data = msgspec.msgpack.encode(nearly_value(rng.choice(plain), rng, changes=changes))
        yield damaged(data, rng) if rng.random() < 0.05 else data


def nearly_value(value: Any, rng: random.Random, *, changes: int = 3) -> Any:
    """A copy of some dicts, lists and scalars, changed at 1 to ``changes`` places."""
    value = _copy(value)
    for _ in range(rng.randint(1, changes)):
        value = _changed(value, rng)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with one place changed, somewhere down a random path."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        return _changed_dict(value, rng)
    if isinstance(value, list) and value and rng.random() < 0.9:
        return _changed_list(value, rng)
    if isinstance(value, bytes) and value and rng.random() < 0.7:
        return damaged(value, rng)
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        moved = value + rng.choice((-1, 1, 7, 1 << 20, -(1 << 40)))
        return max(min(moved, (1 << 63) - 1), -(1 << 63))
    if rng.random() < 0.02:
        return msgspec.Raw(b"\x91" * rng.choice((10, 200, 5000)) + b"\xc0")  # lists in lists
    return _copy(rng.choice(ODD))


def _changed_dict(value: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    name = rng.choice(list(value))
    match rng.randrange(12):
        case 0:
            del value[name]
        case 1:
            value[rng.choice(("", "id", "type", "x" * 300))] = _copy(value[name])
        case _:
            value[name] = _changed(value[name], rng)
    return value


def _changed_list(value: list[Any], rng: random.Random) -> list[Any]:
    index = rng.randrange(len(value))
    match rng.randrange(12):
        case 0:
            del value[index]
        case 1:
            value.insert(index, _copy(value[index]))
        case 2:
            part = _copy(value[index])
            value.extend([part] * (1 if isinstance(part, dict | list) else rng.choice((10, 2000))))
        case _:
            value[index] = _changed(value[index], rng)
    return value


def damaged(data: bytes, rng: random.Random) -> bytes:
    """``data`` cut off, or with up to four bytes replaced."""
    if rng.random() < 0.4:
        return data[: rng.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
