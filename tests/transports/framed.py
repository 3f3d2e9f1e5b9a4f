"""A connection of the tcp transport that says what a test wants it to."""

import contextlib
import selectors
import socket

from kvferry.transports.wire_messages import HEADER, MESSAGE, encode


def readable(files, seconds):
    """The first of some sockets or descriptors that has bytes to read, in the time given.

    ``select.select`` takes no descriptor above 1,023, and a process of tests may have as many.
    """
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return next((key.fileobj for key, _ in selector.select(seconds)), None)


class Framed:
    """Sends and receives what stands behind headers, waiting for it."""

    def __init__(self, tcp):
        self.tcp = tcp
        tcp.settimeout(60)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

    def send(self, message, data=b""):
        """A message, encoded or not, or the header of a chunk and its bytes."""
        if isinstance(message, tuple):
            self.tcp.sendall(HEADER.pack(*message) + data)
        else:
            body = message if isinstance(message, bytes) else encode(message)
            self.tcp.sendall(HEADER.pack(MESSAGE, 0, len(body)) + body)

    def receive(self, decoder):
        """The next message; or (transfer, chunk) of a chunk, whose bytes are in ``data``.

        Raises:
            EOFError: the other side has ended the connection.
        """
        transfer, chunk, nbytes = HEADER.unpack(self.exactly(HEADER.size))
        body = self.exactly(nbytes)
        if transfer == MESSAGE:
            return decoder.decode(body)
        self.data = body
        return transfer, chunk

    def exactly(self, nbytes):
        """So many bytes of what comes next.

        Raises:
            EOFError: the other side has ended the connection.
        """
        got = bytearray()
        while len(got) < nbytes:
            try:
                part = self.tcp.recv(min(nbytes - len(got), 1 << 20))
            except ConnectionError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            got += part
        return bytes(got)

    def is_silent(self, seconds=0.2):
        """Whether nothing comes for so long."""
        return readable([self.tcp], seconds) is None

    def is_ended(self):
        """Waits until the other side ends the connection, whatever it says before."""
        with contextlib.suppress(ConnectionError):
            while self.tcp.recv(1 << 16):
                pass
        return True

    def close(self):
        self.tcp.close()
