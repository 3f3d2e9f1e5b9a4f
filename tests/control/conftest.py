"""Engines to shake hands with, clocks to turn, and a served engine."""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvferry.control.client import ControlClient
from kvferry.control.leases import Lease, LeaseTable
from kvferry.control.messages import FinishAnswer, LeaseAnswer, Renewed
from kvferry.control.options import ControlOptions
from kvferry.control.peers import PeerTable
from kvferry.control.server import ControlServer
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import (
    EngineDescription,
    ModelFingerprint,
    RankDescription,
    tagged_groups,
)


class Clock:
    """A clock that stands until it is turned."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def _fingerprint(**changes: Any) -> ModelFingerprint:
    values: dict[str, Any] = {
        "name": "tiny",
        "architecture": "LlamaForCausalLM",
        "num_layers": 6,
        "num_kv_heads": 3,
        "head_size": 8,
        "dtype": "float32",
        "rope": "theta=10000",
        "config_digest": "c0",
        "weights_digest": "w0",
    }
    return ModelFingerprint(**(values | changes))


def _description(
    engine_id: str,
    incarnation: str = "start-1",
    *,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 16,
    layout: str = "NHD",
    num_blocks: int = 10,
    num_layers: int = 6,
    num_kv_heads: int = 3,
    head_size: int = 8,
    dtype: str = "float32",
    scale_dtype: str | None = None,
    transports: tuple[str, ...] = ("shm", "tcp"),
    model: ModelFingerprint | None = None,
    **fields: Any,
) -> EngineDescription:
    geometry = EngineGeometry(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        scale_dtype=scale_dtype,
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(tp=tp, pp=pp),
    )
    ranks = tuple(
        RankDescription(
            rank=rank,
            endpoints={name: f"{name}-{rank}".encode() for name in transports},
            memory=(geometry.memory(rank, num_blocks, region_per_tensor=True),),
        )
        for rank in range(geometry.world_size)
    )
    return EngineDescription(
        engine_id=engine_id,
        incarnation=incarnation,
        model=model or _fingerprint(),
        groups=tagged_groups([geometry]),
        ranks=ranks,
        **fields,
    )


def _hybrid(
    engine_id: str, groups: Sequence[dict[str, Any]], *, tp: int = 1, pp: int = 1
) -> EngineDescription:
    """An engine whose groups lie on top of each other, from what each says beside the model."""
    model: dict[str, Any] = {
        "num_kv_heads": 3,
        "head_size": 8,
        "dtype": "float32",
        "block_size": 16,
        "layout": "NHD",
    }
    geometries = [
        EngineGeometry(
            **model | {"num_layers": len(group.get("layer_indices", range(6)))} | group,
            parallel=ParallelShape(tp=tp, pp=pp),
        )
        for group in groups
    ]
    base = _description(engine_id, tp=tp, pp=pp)
    ranks = []
    for rank in base.ranks:
        memory = [geometry.memory(rank.rank, 10) for geometry in geometries]
        nbytes = max(sum(one.region_bytes) for one in memory)
        shared = tuple(msgspec.structs.replace(one, region_bytes=(nbytes,)) for one in memory)
        ranks.append(msgspec.structs.replace(rank, memory=shared))
    return msgspec.structs.replace(
        base,
        groups=tagged_groups(geometries),
        ranks=tuple(ranks),
    )


@dataclass
class Served:
    """A source engine that answers, and clients of target engines."""

    server: ControlServer
    leases: LeaseTable
    description: EngineDescription
    address: str
    client: Callable[..., ControlClient]

    @property
    def incarnation(self) -> str:
        return self.description.incarnation

    def grant(self, num_blocks: int = 1, request_id: str = "r") -> str:
        """Grants a lease; returns its id."""
        lease = self.leases.grant(request_id, num_blocks)
        assert isinstance(lease, Lease)
        return lease.lease_id

    def keys(self, *lease_ids: str) -> dict[str, bytes]:
        """What the tickets of leases carry."""
        return {lease_id: self.server.secret(lease_id) for lease_id in lease_ids}

    def renew(self, client: ControlClient, *lease_ids: str) -> "Future[dict[str, LeaseAnswer]]":
        """A client renews leases of which it has the tickets."""
        states: Future[dict[str, LeaseAnswer]] = Future()

        def pass_on(renewed: "Future[Renewed]") -> None:
            if (error := renewed.exception()) is not None:
                states.set_exception(error)
            else:
                states.set_result(renewed.result().states)

        asked = client.renew(self.address, self.incarnation, self.keys(*lease_ids))
        asked.add_done_callback(pass_on)
        return states

    def finish(
        self,
        client: ControlClient,
        lease_id: str,
        *,
        rank: int = 0,
        ok: bool = True,
        nonce: bytes = b"n",
    ) -> "Future[FinishAnswer]":
        """A rank of a client reports on a lease of which it has the ticket."""
        secret = self.server.secret(lease_id)
        return client.finish(
            self.address, self.incarnation, lease_id, secret, rank=rank, ok=ok, nonce=nonce
        )

    def release(self, client: ControlClient, *lease_ids: str, keep: bool = False) -> "Future[None]":
        """A client gives up leases of which it has the tickets."""
        keys = self.keys(*lease_ids)
        return client.release(self.address, self.incarnation, keys, keep=keep)


@pytest.fixture(scope="session")
def clock_class() -> type[Clock]:
    return Clock


@pytest.fixture(scope="session")
def fingerprint() -> Callable[..., ModelFingerprint]:
    """Makes model fingerprints, with changes."""
    return _fingerprint


@pytest.fixture(scope="session")
def describe() -> Callable[..., EngineDescription]:
    """Makes valid engine descriptions that fit each other unless told otherwise."""
    return _description


@pytest.fixture(scope="session")
def hybrid() -> Callable[..., EngineDescription]:
    """Makes descriptions of engines with several groups of the six layers of one model."""
    return _hybrid


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Opens served engines and closes them, and their clients, at the end."""
    opened: list[ControlServer | ControlClient] = []
    numbers = itertools.count()

    def open_client(
        description: EngineDescription,
        options: ControlOptions | None = None,
        peers: PeerTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> ControlClient:
        client = ControlClient(
            engine_id=description.engine_id,
            incarnation=description.incarnation,
            options=options,
            peers=peers,
            clock=clock,
        )
        opened.append(client)
        return client

    def open_served(
        *,
        engine_id: str | None = None,
        incarnation: str | None = None,
        leases: LeaseTable | None = None,
        ready: bool = True,
        port: int = 0,
        options: ControlOptions | None = None,
        **more: Any,
    ) -> Served:
        engine_id = engine_id or f"prefill-{next(numbers)}"
        description = _description(engine_id, incarnation or secrets.token_hex(4), pp=2)
        leases = leases or LeaseTable(max_blocks=1000, duration_s=30.0)
        server = ControlServer(
            engine_id=engine_id,
            incarnation=description.incarnation,
            role="kv_producer",
            leases=leases,
            port=port,
            options=options,
            **more,
        )
        opened.append(server)
        if ready:
            server.set_description(description)
        return Served(server, leases, description, f"127.0.0.1:{server.port}", open_client)

    yield open_served
    for thing in reversed(opened):
        thing.close()
