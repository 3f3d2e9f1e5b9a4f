"""The loads of one rank, whose source, transfers and control client the test moves."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import kvferry.connectors.pull.loads as loads_module
from kvferry.connectors.pull.loads import Loads, RankLoad
from kvferry.connectors.pull.metadata import LoadSpec, packed
from kvferry.connectors.pull.peer import Move, SourcePeer
from kvferry.control.messages import FinishAnswer
from kvferry.control.tickets import Ticket
from kvferry.errors import CancelledError, PeerLostError
from kvferry.testing.waiting import WAIT_S, until
from kvferry.transports.base import Transfer, TransferState


class _Client:
    """The source answers every Finish at once."""

    def pump(self) -> bool:
        return False

    def finish(self, *_: Any, **__: Any) -> "Future[FinishAnswer]":
        answered: Future[FinishAnswer] = Future()
        answered.set_result(FinishAnswer.HELD)
        return answered


class _Connection:
    """A connection to a source rank, and what runs over it."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.fail(PeerLostError("the connection was closed"))


class _Wire:
    """Its transfers end when the test says so, or with their connection."""

    name = "wire"

    def __init__(self) -> None:
        self.connections: list[_Connection] = []
        self.readers: list[threading.Thread] = []
        """Who started each transfer."""

    def connect(self, _: bytes) -> _Connection:
        self.connections.append(_Connection())
        return self.connections[-1]

    def read(self, connection: _Connection, *_: Any, **__: Any) -> Transfer:
        self.readers.append(threading.current_thread())
        connection.transfers.append(Transfer(nbytes=8))
        return connection.transfers[-1]

    def cancel(self, transfer: Transfer) -> None:
        transfer.stop(TransferState.CANCELLED, CancelledError("the read was cancelled"))


@dataclass(eq=False)
class _Pair:
    """A pair of KV cache groups of which all cells come from rank 0."""

    index: int
    pair: Any = field(default_factory=lambda: SimpleNamespace(source_group=0, target_group=0))
    plan: Any = field(default_factory=lambda: SimpleNamespace(conversion=None))
    way: Any = None
    tiles: dict[int, Any] = field(default_factory=lambda: {0: None})

    def prepare(self, *_: Any) -> None: ...

    def bind(self, *_: Any) -> Any:
        return SimpleNamespace(runs_of=lambda rank: [rank])


class Scene:
    """The loads of one rank, and connections to engine ``p``."""

    def __init__(self) -> None:
        self.wire = _Wire()
        self.polls = 0
        staging = SimpleNamespace(stall_timeout_s=0.1)
        target: Any = SimpleNamespace(rank=0, staged={"wire": self}, staging=staging)
        client: Any = _Client()
        self.loads = Loads(target, client, None)

    def poll(self) -> list[Transfer]:
        """As a transport, which is asked now and then to see to what depends on time."""
        self.polls += 1
        return []

    def engine(self, incarnation: str = "p1") -> Any:
        """The description of a start of engine ``p``."""
        ranks = [SimpleNamespace(endpoints={"wire": b""})]
        return SimpleNamespace(engine_id="p", incarnation=incarnation, ranks=ranks)

    def peer(self, engine: Any, num_pairs: int = 1, *, placed: bool = True) -> SourcePeer:
        """The engine, connected to."""
        wire: Any = self.wire
        way = SimpleNamespace(placed=placed)
        pairs: Any = tuple(_Pair(index, way=way) for index in range(num_pairs))
        return SourcePeer(engine, wire, wire, (), pairs, {0: wire.connect(b"")})

    def meet(self, monkeypatch: pytest.MonkeyPatch, num_pairs: int = 1, *, placed: bool) -> None:
        """Connects to the engine's first start."""
        peer = self.peer(self.engine(), num_pairs, placed=placed)
        monkeypatch.setattr(SourcePeer, "connect", lambda *_: peer)
        self.loads.meet(self.engine())
        self.loads.thread.call(lambda: None)

    def spec(self, lease_id: str, incarnation: str = "p1", num_tokens: int = 4) -> LoadSpec:
        return LoadSpec(
            request_id=lease_id,
            ticket=Ticket(
                lease_id=lease_id,
                engine_id="p",
                incarnation=incarnation,
                secret=bytes(16),
                host="127.0.0.1",
                port=1,
                request_id=lease_id,
                num_tokens=num_tokens,
                block_ids=(),
                lease_duration_s=30.0,
            ),
            source_tables=packed([[1]]),
            target_tables=packed([[1]]),
            first_token=0,
            num_tokens=num_tokens,
            starts=(0,) * 8,
        )

    def wait_for_one(self) -> RankLoad:
        """The next load that ends."""
        ended: list[RankLoad] = []

        def has_ended() -> bool:
            ended.extend(self.loads.take_ended())
            return bool(ended)

        until(has_ended)
        (load,) = ended
        return load


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.loads.close()


def test_what_was_lost_with_one_connection_is_all_repeated_over_the_next_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.meet(monkeypatch, num_pairs=3, placed=True)
    scene.loads.start(scene.spec("lease"))
    (first,) = scene.wire.connections
    until(lambda: len(first.transfers) == 3)

    first.close()

    assert len(scene.wire.connections) == 2
    second = scene.wire.connections[1]
    assert [transfer.state for transfer in second.transfers] == [TransferState.RUNNING] * 3
    for transfer in second.transfers:
        transfer.stop(TransferState.DONE)
    assert scene.wait_for_one().error is None


def test_each_part_of_a_load_is_repeated_once_over_whichever_connection_it_lost(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.meet(monkeypatch, placed=True)
    early = replace(scene.spec("early"), readable=2)
    scene.loads.start(early)
    (first,) = scene.wire.connections
    first.transfers[0].stop(TransferState.DONE)
    # The connection breaks under another load, which connects anew and ends well.
    scene.loads.start(scene.spec("other"))
    first.close()
    second = scene.wire.connections[1]
    second.transfers[0].stop(TransferState.DONE)
    assert scene.wait_for_one().error is None

    scene.loads.read_on(replace(early, readable=None))
    until(lambda: len(second.transfers) == 2)
    second.close()

    until(lambda: len(scene.wire.connections) == 3)
    third = scene.wire.connections[2]
    until(lambda: len(third.transfers) == 1)
    third.transfers[0].stop(TransferState.DONE)
    assert scene.wait_for_one().error is None


def test_a_load_is_not_given_up_because_an_older_start_of_its_engine_is_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, restarted = threading.Event(), threading.Event()

    def connect(engine: Any, _: Any) -> SourcePeer:
        if engine.incarnation == "p1":
            connecting.set()
            assert restarted.wait(WAIT_S)
            raise PeerLostError("it has ended")
        return scene.peer(engine)

    monkeypatch.setattr(SourcePeer, "connect", connect)
    scene.loads.meet(scene.engine("p1"))
    assert connecting.wait(WAIT_S)
    scene.loads.start(scene.spec("old", "p1"))
    scene.loads.meet(scene.engine("p2"))
    scene.loads.start(scene.spec("new", "p2"))

    restarted.set()

    assert isinstance(scene.wait_for_one().error, PeerLostError)  # the old one
    until(lambda: bool(scene.wire.connections and scene.wire.connections[0].transfers))
    scene.wire.connections[0].transfers[0].stop(TransferState.DONE)
    ended = scene.wait_for_one()
    assert (ended.spec.ticket.lease_id, ended.error) == ("new", None)


@pytest.mark.parametrize(
    ("placed", "num_tokens", "by_the_caller"),
    [(True, 1 << 17, True), (False, 4, True), (False, 1 << 17, False)],
)
def test_only_a_long_load_that_is_staged_is_started_by_another_thread(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    placed: bool,
    num_tokens: int,
    by_the_caller: bool,
) -> None:
    scene.meet(monkeypatch, placed=placed)
    scene.loads.start(scene.spec("lease", num_tokens=num_tokens))
    (connection,) = scene.wire.connections
    until(lambda: bool(connection.transfers))
    assert (scene.wire.readers == [threading.current_thread()]) is by_the_caller
    connection.transfers[0].stop(TransferState.DONE)
    assert scene.wait_for_one().error is None


def test_a_load_that_is_given_up_before_its_thread_comes_to_it_reads_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.meet(monkeypatch, placed=False)
    may_go_on = threading.Event()
    scene.loads.thread.post(partial(may_go_on.wait, WAIT_S))
    scene.loads.start(scene.spec("lease", num_tokens=1 << 17))
    scene.loads.cancel("lease")
    assert isinstance(scene.wait_for_one().error, CancelledError)
    may_go_on.set()
    scene.loads.thread.call(lambda: None)
    assert not scene.wire.readers


def test_an_engine_that_was_never_connected_to_is_forgotten_while_a_load_waits_for_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(description: Any, _: object) -> SourcePeer:
        if description.engine_id == "q":
            assert may_connect.wait(WAIT_S)
        raise PeerLostError("nobody is there")

    may_connect = threading.Event()
    monkeypatch.setattr(SourcePeer, "connect", connect)
    other = scene.engine()
    other.engine_id = "q"
    scene.loads.meet(scene.engine())
    scene.loads.thread.call(lambda: None)
    scene.loads.meet(other)
    spec = scene.spec("other")
    scene.loads.start(replace(spec, ticket=replace(spec.ticket, engine_id="q")))
    scene.loads.forget("p", "p1")
    assert list(scene.loads.peers.known) == ["q"]
    may_connect.set()
    assert isinstance(scene.wait_for_one().error, PeerLostError)


# ---- a lease that takes the place of one that was revoked ----------------------------------------


def begun(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[Transfer, list[Transfer]]:
    """The read of a part, with a mover in it that cannot be called back, and all reads."""
    scene.meet(monkeypatch, placed=True)
    scene.loads.start(replace(scene.spec("old"), readable=2))
    (connection,) = scene.wire.connections
    (first,) = connection.transfers
    assert first.enter()
    return first, connection.transfers


def test_a_load_begins_anew_once_nothing_of_its_first_reads_can_land(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, transfers = begun(scene, monkeypatch)
    anew = replace(scene.spec("new"), readable=2, replaces="old")
    scene.loads.read_on(anew)
    scene.loads.read_on(replace(anew, readable=3, replaces=""))
    assert transfers == [first], "a mover is in it"
    first.leave(8, 1)
    assert len(transfers) == 2
    scene.loads.read_on(replace(anew, readable=None, replaces=""))
    assert len(transfers) == 3
    for transfer in transfers[1:]:
        transfer.stop(TransferState.DONE)
    load = scene.wait_for_one()
    assert (load.error, load.spec.ticket.lease_id) == (None, "new")
    assert [move.transfer for move in load.moves] == transfers[1:]
    assert load.record(0).nbytes == 16


def test_a_load_that_is_given_up_before_it_begins_anew_ends_after_its_first_reads(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, transfers = begun(scene, monkeypatch)
    scene.loads.read_on(replace(scene.spec("new"), readable=2, replaces="old"))
    scene.loads.cancel("new")
    assert not scene.loads.take_ended()
    first.leave(8, 1)
    load = scene.wait_for_one()
    assert isinstance(load.error, CancelledError)
    assert transfers == [first]


def test_a_load_that_has_not_begun_begins_under_the_newer_lease(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.meet(monkeypatch, placed=False)
    may_go_on = threading.Event()
    scene.loads.thread.post(partial(may_go_on.wait, WAIT_S))
    scene.loads.start(replace(scene.spec("old", num_tokens=1 << 17), readable=2))
    scene.loads.read_on(replace(scene.spec("new", num_tokens=1 << 17), replaces="old"))
    may_go_on.set()
    scene.loads.thread.call(lambda: None)
    (connection,) = scene.wire.connections
    (transfer,) = connection.transfers
    transfer.stop(TransferState.DONE)
    load = scene.wait_for_one()
    assert (load.error, load.spec.ticket.lease_id) == (None, "new")


def test_a_load_that_has_failed_does_not_begin_anew(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, transfers = begun(scene, monkeypatch)
    scene.loads.cancel("old", "it is of no use")
    first.leave(8, 1)
    scene.loads.read_on(replace(scene.spec("new"), readable=2, replaces="old"))
    assert scene.wait_for_one().spec.ticket.lease_id == "old"
    assert transfers == [first]
    assert not scene.loads._loads


def test_the_progress_of_a_load_may_be_looked_at_while_its_transfers_are_started() -> None:
    load = RankLoad(Scene.spec(Any, "lease"))  # type: ignore[arg-type]

    class Growing(Transfer):
        """Whoever looks at it is interrupted by the thread that starts the next one."""

        @property
        def bytes_done(self) -> int:
            add()
            return 3

        @bytes_done.setter
        def bytes_done(self, _: int) -> None:
            pass

    def add() -> None:
        nothing: Any = None
        load.moves.append(Move(nothing, 0, nothing, nothing, Growing(nbytes=8)))

    add()
    assert load.bytes_done == 3
    assert load.nbytes == 16


def test_what_depends_on_time_is_looked_at_soon_even_if_a_load_begins_in_an_idle_second(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody wakes the thread for a short load; it must not be asleep for longer than it may."""
    monkeypatch.setattr(loads_module, "IDLE_S", 1000.0)
    until(lambda: scene.polls >= 4)
