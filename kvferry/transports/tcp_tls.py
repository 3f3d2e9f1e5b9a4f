"""Encryption for the tcp transport (``encrypt_data``): TLS 1.3 over the same connections.

A rank makes a key and a certificate when the rank's transport is opened. The certificate travels in
the endpoint, over the control channel, and the reader accepts only this certificate: an impostor
does not have the key. The reader proves itself by the token, as without TLS, but an observer on the
network path cannot read the token.
"""

import contextlib
import ctypes
import datetime as dt
import os
import select
import socket
import ssl

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, DecodeError, IncompatibleError, PeerLostError
from kvferry.transports import tcp_kernels as kernels
from kvferry.transports.tcp_link import READABLE, TcpLink

_NAME = "kvferry"
_MOST_BYTES = 256 << 10
"""Largest number of bytes in one call of ``ssl``, which reports progress only after the last
byte."""


def new_identity() -> tuple[ssl.SSLContext, bytes]:
    """TLS context of a serving rank, and its certificate (DER) for the readers.

    Raises:
        ConfigError: the package cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            f"encrypt_data of tcp: the package cryptography does not load ({error}); install "
            "kvferry[tls]"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The certificate ends with its process; the hosts' clocks may differ.
        .not_valid_before(dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(9999, 1, 1, tzinfo=dt.UTC))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = _only_tls_1_3(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0  # readers do not resume sessions
    descriptor = os.memfd_create(_NAME)  # ssl reads files only; this file is on no disk
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context, bytes(certificate.public_bytes(serialization.Encoding.DER))


def reading_context(certificate: bytes) -> ssl.SSLContext:
    """TLS context that accepts only the rank with this certificate.

    Raises:
        DecodeError: ``certificate`` is no certificate.
    """
    context = _only_tls_1_3(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False  # no name to check: the key is known
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise DecodeError(f"endpoint: its certificate does not parse: {error}") from error
    return context


def check_same(address: str, *, ours: bool, theirs: bool) -> None:
    """Checks that both sides encrypt, or neither.

    Raises:
        IncompatibleError: only one side encrypts.
    """
    if ours != theirs:
        told = f"encrypt_data of tcp: it has {str(theirs).lower()}, we have {str(ours).lower()}"
        raise IncompatibleError(address, [f"{told}; give both sides the same"])


def _only_tls_1_3(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class TlsLink(TcpLink):
    """A connection with encrypted bytes. A part goes through ``ssl`` row by row."""

    # Shorter pieces are packed: each row costs a Python call and a TLS record.
    _direct_bytes = kernels.PACK_BYTES

    def __init__(self, tcp: socket.socket, other: str, context: ssl.SSLContext) -> None:
        """Makes the server's end with a context of :func:`new_identity`, else the reader's end."""
        super().__init__(tcp, other)
        self._context = context
        self._tls: ssl.SSLSocket | None = None
        """``None`` before the socket is connected."""
        self._is_shaken = False
        self._begun: bytes | memoryview | None = None
        """Bytes of which the library may have sent a part, although it took none: it wants at least
        these bytes again."""
        self._copy: npt.NDArray[np.uint8] | None = None
        """Such bytes of a piece that was taken back."""

    @property
    def has_pending(self) -> bool:
        """See :attr:`TcpLink.has_pending`."""
        with self._lock:
            return self._tls is not None and not self.is_closed and self._tls.pending() > 0

    def flags(self, *, is_full: bool) -> int:
        """See :meth:`TcpLink.flags`."""
        # The first messages are short, so this side can only be waiting for the remote side.
        shaking = self._tls is not None and not self._is_shaken
        return READABLE if shaking else super().flags(is_full=is_full)

    def push(self, most: int, *, waits: int = 0) -> int:
        """See :meth:`TcpLink.push`."""
        assert self._chunk is not None  # some bytes of the chunk are left
        part, addresses, tiles, runs = self._chunk
        state, sent = part.state[0], 0
        with self._errors():
            while self.at_hand and sent < most:
                if state["row"] == state["rows"]:
                    kernels.fill(part, addresses, tiles, runs, True)
                with self._lock:
                    # The library wants the whole row, or else the same row again.
                    nbytes = self._write(_row(part))
                if not nbytes:
                    if not (waits and self._has_waited(select.POLLOUT)):
                        break
                    waits -= 1
                    continue
                kernels.took(part, nbytes)
                sent += nbytes
                self._went(nbytes)
        if not self.at_hand:
            self._copy = None
        return sent

    def take_back(self) -> int | None:
        """See :meth:`TcpLink.take_back`. Bytes that the library has begun to send count as sent. A
        copy of these bytes stays :attr:`at_hand`.
        """
        if self._begun is None:
            return super().take_back()
        if self._copy is not None:
            return 0
        begun = self._copy = np.frombuffer(bytes(self._begun), dtype=np.uint8)
        sent = self._supplied - self.at_hand + begun.nbytes  # a header is no part of the piece
        self._part_of(0).state["header"] = False
        self.supply(begun.ctypes.data, begun.nbytes)
        return sent

    def pull(self, most: int, *, waits: int = 0) -> tuple[int, int, int]:
        """See :meth:`TcpLink.pull`."""
        assert self._chunk is not None  # some bytes of the chunk are left
        part, addresses, tiles, runs = self._chunk
        state, came, placed = part.state[0], 0, 0
        before = int(state["segments"])
        with self._errors():
            while self.left and came < most:
                if state["row"] == state["rows"]:
                    kernels.fill(part, addresses, tiles, runs, False)
                row = _row(part)
                done = self._read(row)
                kernels.took(part, done)
                came += done
                self._went(done)
                if state["row"] == state["rows"]:
                    placed += int(state["nbytes"])
                    kernels.place(part, addresses, tiles, runs)
                elif done < len(row):
                    if not (waits and self._has_waited(select.POLLIN)):
                        break
                    waits -= 1
        return came, placed, int(state["segments"]) - before

    def _has_waited(self, flag: int) -> bool:
        """Whether the socket takes more, or more has come, within a short time."""
        poller = select.poll()
        poller.register(self.descriptor, flag)
        return self._is_shaken and bool(poller.poll(kernels.WAIT_MS))

    def _write(self, data: bytes | memoryview) -> int:
        tls = self._shake()
        if tls is None:
            return 0
        try:
            sent, self._begun = tls.send(data), None
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent, self._begun = 0, data
        return sent

    def _read(self, into: memoryview) -> int:
        with self._lock:  # the library allows one call at a time
            tls = self._shake()
            came = 0
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                while tls is not None and came < len(into):  # a TLS record at a time
                    nbytes = tls.recv_into(into[came:])
                    if not nbytes:
                        why = "it was ended there"
                        raise PeerLostError(f"the connection to {self.other} is gone: {why}")
                    came += nbytes
        return came

    def _shake(self) -> ssl.SSLSocket | None:
        """The connection after the TLS handshake, else ``None``. The caller must hold the lock."""
        if self._tls is None:
            failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            try:
                self._socket.getpeername()
            except OSError:  # the socket is not connected yet
                return None
            self._tls = self._socket = self._context.wrap_socket(
                self._socket,
                server_side=self._context.protocol is ssl.PROTOCOL_TLS_SERVER,
                do_handshake_on_connect=False,
            )
        if not self._is_shaken:
            try:
                self._tls.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None
            self._is_shaken = True
        return self._tls


def _row(part: kernels.Part) -> memoryview:
    """The bytes to transfer next, in the part's next row."""
    row = part.rows[int(part.state["row"][0])]
    address, nbytes = int(row["address"]), min(int(row["nbytes"]), _MOST_BYTES)
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
