"""The listening end of the control channel: one thread, one ROUTER socket."""

import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvferry.control import messages
from kvferry.control.desk import ControlDesk, ErrorLog, TransferProvider
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import ErrorReply, StatusReport
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.control.peers import PeerTable
from kvferry.control.sockets import (
    Listener,
    bind_error,
    bound_port,
    configure,
    configure_curve,
    endpoint,
)
from kvferry.lifetimes import Closing
from kvferry.topology.description import EngineDescription

_BURST = 64  # messages answered between two looks at whether to stop


class _AllowedKeys:
    """Decides which clients may connect; called by pyzmq's authenticator thread."""

    def __init__(self, keys: CurveKeys, errors: ErrorLog) -> None:
        self._allowed = {keys.public_key, *keys.allowed_keys}
        self._errors = errors

    def callback(self, domain: str, key: bytes) -> bool:
        text = key.decode("ascii", "replace")
        if text in self._allowed:
            return True
        self._errors.note("curve", f"a client with the unknown public key {text} was refused")
        return False


class ControlServer(Closing):
    """Answers handshakes, renewals, finishes, releases and status requests of one engine.

    It answers as soon as it is open; handshakes are put off until :meth:`set_description`. All
    methods may be called from any thread.
    """

    def __init__(
        self,
        desk: ControlDesk,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        authenticator: ThreadAuthenticator | None,
        address: tuple[str, int],
    ) -> None:
        """Use :meth:`open`."""
        self._desk = desk
        self._context = context
        self._router = router
        self._authenticator = authenticator
        self.host, self.port = address
        self._listener = Listener("kvferry-control", router, self._answer, on_end=self._let_go)

    @classmethod
    def open(
        cls,
        *,
        engine_id: str,
        incarnation: str,
        role: str,
        leases: LeaseTable,
        host: str = "127.0.0.1",
        port: int = 0,
        options: ControlOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "ControlServer":
        """Listens on ``host:port`` and returns.

        Args:
            engine_id: this engine.
            incarnation: this start of it.
            role: its ``kv_role``, to be shown by ``kvferry status``.
            leases: the leases on this engine's blocks.
            host: address of this machine, or ``*`` for all of them.
            port: TCP port; 0 takes a free one, see :attr:`port`.
            options: timeouts, limits, keys.
            clock: seconds that never run backwards; tells how long peers have been silent.

        Raises:
            PortInUseError: the port is taken.
            HostError: the address is not of this machine, or the port needs privileges.
            ConfigError: a CURVE key is wrong.
        """
        options = options or ControlOptions()
        errors = ErrorLog(options.remembered_errors)
        peers = PeerTable(
            max_peers=options.max_peers, twin_silence_s=options.lease_duration_s, clock=clock
        )
        desk = ControlDesk(
            engine_id=engine_id,
            incarnation=incarnation,
            role=role,
            leases=leases,
            peers=peers,
            errors=errors,
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        authenticator = None
        try:
            router = context.socket(zmq.ROUTER)
            configure(router, host, options)
            if options.curve is not None:
                configure_curve(router, options.curve, server=True)
                authenticator = _authenticate(context, options.curve, errors)
            bound = _bind(router, host, port)
        except BaseException:
            if authenticator is not None:
                authenticator.stop()
            context.destroy(linger=0)
            raise
        return cls(desk, context, router, authenticator, (host, bound))

    @property
    def leases(self) -> LeaseTable:
        """The leases on this engine's blocks."""
        return self._desk.leases

    @property
    def peers(self) -> PeerTable:
        """The engines that have shaken hands with this one."""
        return self._desk.peers

    def set_description(self, description: EngineDescription) -> None:
        """From now on handshakes are answered.

        Raises:
            ValueError: it describes another engine or start.
            ProtocolError: it is inconsistent.
        """
        self._desk.set_description(description)

    def set_transfers(self, provider: TransferProvider) -> None:
        """``provider`` lists the loads under way for the status.

        It runs on the server's thread and must not block; what it raises is noted and harms
        nothing.
        """
        self._desk.set_transfers(provider)

    def note_error(self, kind: str, message: str) -> None:
        """Adds an error to the counters and to the last errors of the status."""
        self._desk.errors.note(kind, message)

    def status(self) -> StatusReport:
        """What ``kvferry status`` shows of this engine."""
        return self._desk.status()

    def close(self) -> None:
        """Stops listening and frees the port. Idempotent."""
        self._listener.close()

    def _let_go(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a bug of ours must not end the listener
            self._desk.errors.note("internal", f"serving: {error!r}")

    def _serve(self) -> None:
        for _ in range(_BURST):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                self._desk.errors.note("zmq", f"receiving: {error}")
                return
            self._reply(frames)

    def _reply(self, frames: list[bytes]) -> None:
        """Answers one message; frames are the sender's routing id and what it sent."""
        if len(frames) == 2:
            reply = self._desk.handle(frames[1])
        else:
            message = f"a message has one frame, this one has {len(frames) - 1}"
            self._desk.errors.note("ProtocolError", message)
            reply = messages.encode(ErrorReply(id=0, name="ProtocolError", message=message))
        try:
            self._router.send_multipart((frames[0], reply), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._desk.errors.note("zmq", f"replying: {error}")


def _authenticate(
    context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys, errors: ErrorLog
) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    provider: Any = _AllowedKeys(keys, errors)
    authenticator.configure_curve_callback(domain="*", credentials_provider=provider)
    return authenticator


def _bind(router: "zmq.Socket[bytes]", host: str, port: int) -> int:
    """Binds and returns the port.

    Raises:
        PortInUseError, HostError: see :meth:`ControlServer.open`.
    """
    try:
        router.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as error:
        raise bind_error(error, host, port) from error
    return bound_port(router)
