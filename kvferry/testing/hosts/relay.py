"""Carries packets between hosts, and drops and delays them as a test says.

Every host has a veth pair: one end in the host, the other here, with a packet socket on it. A
frame is read from the socket of the host that sent it, and written to that of the host whose
address is its destination. Real TCP of the kernel runs over it, so that a lost packet is sent
again, a slow link fills its queue, and on a cut link everything is silent.
"""

import heapq
import itertools
import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from kvferry.testing.hosts.messages import Link

FRAMES_PER_TURN = 64
"""Frames of one host that are carried before others have their turn."""
TURNS_BEFORE_A_CHANGE = 64
"""Turns in which a link is emptied before it changes; a host that never pauses has no end."""
MAX_QUEUE_S = 1.0
"""What would wait longer than this at a slow link is dropped."""
RECEIVE_BYTES = 8 << 20
"""What the kernel keeps of a host's packets until they are read."""

# Linux's, which the socket module does not name.
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_ETH_P_ALL = 0x0003

# A frame as it is read:
#
#   | vnet header | Ethernet: to, from, type | IPv4: ... to    |
#   | 0           | 10   ... 22 .. 24        | 24 ... 40 .. 44 |
#                                            | IPv6: ... to    |
#                                            | 24 ... 48 .. 64 |
#
# The vnet header says that the checksum is still to be made, as the sending host left that to
# its network card; with it the receiving host knows that all is well.
_TYPE = slice(22, 24)
_TO_IPV4 = slice(40, 44)
_TO_IPV6 = slice(48, 64)
_IPV4 = b"\x08\x00"
_IPV6 = b"\x86\xdd"


@dataclass(slots=True)
class _Direction:
    """From one host to another."""

    link: Link
    free_at: float = 0.0
    """When the last frame that entered has left, by the monotonic clock."""


class Relay:
    """All links of a network. Not thread-safe."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sockets: dict[int, socket.socket] = {}
        self._index_of: dict[bytes, int] = {}
        self._directions: dict[tuple[int, int], _Direction] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._buffer = memoryview(bytearray(1 << 17))

    def plug_in(self, index: int, interface: str, ipv4: str, ipv6: str) -> socket.socket:
        """From now on packets of this host are carried.

        Args:
            index: the host's.
            interface: the end of its veth pair that is here.
            ipv4: its addresses.
            ipv6: likewise.

        Returns:
            What is readable when :meth:`carry` has something to do.
        """
        # Protocol 0 until it is bound: it would read the packets of every interface.
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        port.setblocking(False)
        port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        try:
            port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        except PermissionError:  # in a user namespace: as much as anybody may have
            port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        port.bind((interface, _ETH_P_ALL))
        self._sockets[index] = port
        self._index_of[socket.inet_pton(socket.AF_INET, ipv4)] = index
        self._index_of[socket.inet_pton(socket.AF_INET6, ipv6)] = index
        return port

    def unplug(self, index: int) -> None:
        """From now on nothing comes from this host, and nothing reaches it."""
        self._sockets.pop(index).close()
        self._index_of = {key: value for key, value in self._index_of.items() if value != index}
        self._waiting = [frame for frame in self._waiting if frame[2] != index]
        heapq.heapify(self._waiting)

    def set_link(self, source: int, target: int, link: Link) -> None:
        """What packets from one host to another meet from now on; it outlives both."""
        # What was sent before meets what was there before, however busy this process has been.
        for _ in range(TURNS_BEFORE_A_CHANGE):
            if source not in self._sockets or not self.carry(source):
                break
        self._directions[source, target] = _Direction(link)

    def carry(self, index: int) -> bool:
        """Takes what a host has sent, and sends on what need not wait.

        Returns:
            Whether there may be more.
        """
        port, buffer = self._sockets[index], self._buffer
        with suppress(BlockingIOError):
            for _ in range(FRAMES_PER_TURN):
                size = port.recv_into(buffer)
                kind = buffer[_TYPE]
                if kind == _IPV4:
                    target = self._index_of.get(bytes(buffer[_TO_IPV4]))
                elif kind == _IPV6:
                    target = self._index_of.get(bytes(buffer[_TO_IPV6]))
                else:
                    continue
                if target is not None:
                    self._carry_frame(index, target, buffer[:size])
            return True
        return False

    def send_waiting(self) -> float | None:
        """Sends what has waited long enough; returns the seconds until the next, if any."""
        while self._waiting:
            left = self._waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, target, frame = heapq.heappop(self._waiting)
            self._send(target, frame)
        return None

    def _carry_frame(self, source: int, target: int, frame: memoryview) -> None:
        direction = self._directions.get((source, target))
        if direction is None:
            self._send(target, frame)
            return
        link = direction.link
        if link.is_cut or (link.loss and self._random.random() < link.loss):
            return
        now = time.monotonic()
        leaves = max(now, direction.free_at)
        if link.bytes_per_s is not None:
            leaves += len(frame) / link.bytes_per_s
            if leaves > now + MAX_QUEUE_S:
                return
        direction.free_at = leaves
        arrives = leaves + link.delay_s
        heapq.heappush(self._waiting, (arrives, next(self._order), target, bytes(frame)))

    def _send(self, target: int, frame: memoryview | bytes) -> None:
        # A full queue, or an end that has just gone: a packet is lost, as packets are.
        with suppress(OSError):
            self._sockets[target].send(frame)
