"""Carries packets between hosts, and drops and delays them on a test's request.

Every host has a veth pair: one end in the host, the other end here, with a packet socket. The relay
reads a frame from the socket of the sending host, and writes the frame to the socket of the host
with the destination address. The kernel's real TCP runs over the relay: lost packets are sent
again, a slow link fills its queue, and a cut link is silent.
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
"""Number of frames carried for one host before other hosts are served."""
TURNS_BEFORE_A_CHANGE = 64
"""Number of turns in which a link is emptied before a change; a host may send without end."""
MAX_QUEUE_S = 1.0
"""Seconds that a frame waits at most at a slow link; frames with a longer wait are dropped."""
RECEIVE_BYTES = 8 << 20
"""Number of bytes of a host's unread packets in the kernel."""

# Constants of Linux that the socket module does not name.
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_ETH_P_ALL = 0x0003

# Layout of a frame as the relay reads the frame:
#
#   | vnet header | Ethernet: to, from, type | IPv4: ... to    |
#   | 0           | 10   ... 22 .. 24        | 24 ... 40 .. 44 |
#                                            | IPv6: ... to    |
#                                            | 24 ... 48 .. 64 |
#
# The vnet header says that the checksum is still missing, because the sending host left the
# checksum to its network card. With this header, the receiving host accepts the packet.
_TYPE = slice(22, 24)
_TO_IPV4 = slice(40, 44)
_TO_IPV6 = slice(48, 64)
_IPV4 = b"\x08\x00"
_IPV6 = b"\x86\xdd"


@dataclass(slots=True)
class _Direction:
    """State of one direction between two hosts."""

    link: Link
    free_at: float = 0.0
    """Time at which the last entered frame has left, by the monotonic clock."""


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
        """Starts carrying packets of a host.

        Args:
            index: index of the host.
            interface: the end of the host's veth pair on this side.
            ipv4: IPv4 address of the host.
            ipv6: IPv6 address of the host.

        Returns:
            Socket that is readable when :meth:`carry` has something to do.
        """
        # Protocol 0 until the bind: the socket would otherwise read the packets of every interface.
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        port.setblocking(False)
        port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        try:
            port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        except PermissionError:  # in a user namespace: the usual limit applies
            port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        port.bind((interface, _ETH_P_ALL))
        self._sockets[index] = port
        self._index_of[socket.inet_pton(socket.AF_INET, ipv4)] = index
        self._index_of[socket.inet_pton(socket.AF_INET6, ipv6)] = index
        return port

    def unplug(self, index: int) -> None:
        """Stops carrying packets from and to a host."""
        self._sockets.pop(index).close()
        self._index_of = {key: value for key, value in self._index_of.items() if value != index}
        self._waiting = [frame for frame in self._waiting if frame[2] != index]
        heapq.heapify(self._waiting)

    def set_link(self, source: int, target: int, link: Link) -> None:
        """Sets the effects on later packets from one host to another; the setting outlives both
        hosts.
        """
        # Earlier packets meet the earlier link, even if this process has been busy.
        for _ in range(TURNS_BEFORE_A_CHANGE):
            if source not in self._sockets or not self.carry(source):
                break
        self._directions[source, target] = _Direction(link)

    def carry(self, index: int) -> bool:
        """Reads the frames of a host, and sends on the frames without a delay.

        Returns:
            Whether there may be more frames.
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
        """Sends the due frames; returns the seconds until the next, if any."""
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
        # A full queue, or an end that has just vanished: the packet is lost, as packets may be.
        with suppress(OSError):
            self._sockets[target].send(frame)
