"""The bare loops: they move what they should, for one reader at a time."""

import ctypes
import mmap
import os
import secrets
import socket

import numpy as np
import pytest

from kvferry.errors import NotReadyError, PeerLostError
from kvferry.explain import limits
from kvferry.explain.limits import TOKEN_BYTES, BareSource, copy_from, dial, receive_part


@pytest.fixture
def memory():
    return np.random.default_rng(0).integers(0, 256, 100_001, dtype=np.uint8)


@pytest.fixture
def source(memory):
    with BareSource(memory) as bare:
        yield bare


def connect(source, reader=b"r" * TOKEN_BYTES):
    return dial("127.0.0.1", source.port, source.token, reader)


def test_every_part_arrives_where_it_belongs(source, memory):
    found = np.zeros_like(memory)
    with connect(source) as first, connect(source) as second:
        for number, tcp in enumerate((first, second, first)):
            receive_part(tcp, found, number, 3)
    assert np.array_equal(found, memory)


def test_a_second_reader_is_refused_until_the_first_has_gone(source):
    other = b"o" * TOKEN_BYTES
    with connect(source), pytest.raises(NotReadyError, match="serves another reader"):
        connect(source, other)
    while True:  # the source may notice later that it has gone
        try:
            connect(source, other).close()
        except NotReadyError:
            continue
        break


def test_a_stranger_without_the_token_gets_nothing(source):
    with pytest.raises(PeerLostError, match="closed"):
        dial("127.0.0.1", source.port, secrets.token_bytes(TOKEN_BYTES), b"r" * TOKEN_BYTES)


def test_a_part_that_does_not_exist_ends_the_connection(source):
    with connect(source) as tcp:
        tcp.sendall(bytes((3, 3)))
        assert tcp.recv(1) == b""


def test_strangers_who_say_nothing_are_bounded(source, monkeypatch):
    monkeypatch.setattr(limits, "_HELLO_S", 60.0)
    silent = [
        socket.create_connection(("127.0.0.1", source.port), 60.0)
        for _ in range(limits.MAX_CONNECTIONS)
    ]
    with socket.create_connection(("127.0.0.1", source.port), 60.0) as one_more:
        assert one_more.recv(1) == b""
    for tcp in silent:
        tcp.close()


def test_a_source_that_closes_ends_its_connections(source, memory):
    with connect(source) as tcp:
        source.close()
        with pytest.raises(PeerLostError):
            receive_part(tcp, np.zeros_like(memory), 0, 1)
    with pytest.raises(PeerLostError, match="open the port"):
        connect(source)


def test_memory_of_a_process_is_read_from_address_to_address(memory):
    found, copy = np.zeros_like(memory), copy_from(os.getpid())
    copy(found.ctypes.data, memory.ctypes.data, memory.nbytes)
    assert np.array_equal(found, memory)
    with pytest.raises(OSError, match="Bad address"):
        copy(found.ctypes.data, 0, memory.nbytes)


def test_memory_that_a_process_has_in_part_is_an_error(memory):
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    source = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(source + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0
    )
    with pytest.raises(OSError, match="Bad address"):
        copy_from(os.getpid())(memory.ctypes.data, source, 2 * mmap.PAGESIZE)
