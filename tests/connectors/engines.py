"""Fake engines with PullConnectors: how they are configured, and that a pair of them serves."""

from typing import Any

import msgspec

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.control.tickets import sign, verify
from kvferry.testing.connector_conformance import Pair, small_geometry
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.fake_rank import FakeRequest
from kvferry.testing.waiting import until
from tests.clock import Clock

KEY = "k" * 32
SHORT_LEASE = {"lease_duration_s": 0.4}
"""Keys for tests that wait for the end of a lease which nobody takes."""
SOURCE = small_geometry("HND", 4, tp=2)
TARGET = small_geometry("NHD", 6, pp=2)


def pull_config(role: str, engine_id: str, kv_port: int = 0, **extra: Any) -> KVTransferConfig:
    """The config of one engine's PullConnector; takes further extra keys."""
    return KVTransferConfig(
        kv_connector="PullConnector",
        kv_role=role,  # type: ignore[arg-type]
        engine_id=engine_id,
        kv_port=kv_port,
        kv_connector_extra_config={"cluster_key": KEY, "handshake_timeout_s": 30.0, **extra},
    )


def on_devices(config: KVTransferConfig, device: str, transport: Any) -> KVTransferConfig:
    """The config of an engine whose caches are on a device."""
    extra = {**config.kv_connector_extra_config, "transport": transport}
    return msgspec.structs.replace(config, kv_buffer_device=device, kv_connector_extra_config=extra)


def pull_scheduler(engine: FakeEngine) -> PullScheduler:
    """The engine's half of the PullConnector, with more methods than every connector has."""
    assert isinstance(engine.scheduler, PullScheduler)
    return engine.scheduler


def params_of(source: FakeRequest) -> dict[str, Any]:
    """The params with which the source has answered, for a decode engine."""
    assert source.response_params is not None
    return source.response_params


def passed_on(source: FakeRequest) -> FakeRequest:
    """What a router says of a ticket that another decode engine was given: this one waits until it
    knows that the lease is its own.
    """
    params_of(source)["passed_on"] = True
    return source


def end_leases(engine: FakeEngine) -> None:
    """Ends the leases of an engine, as if their time were over; nobody has to wait for that."""
    pull_scheduler(engine).lender.leases.revoke_all()


def renew_now(target: FakeEngine, request_id: str) -> None:
    """A target asks at once whether the lease of a load is still its own."""
    scheduler = pull_scheduler(target)
    pursuit, agenda = scheduler.borrower.loads[request_id].pursuit, scheduler.sources.agenda
    with agenda.lock:
        pursuit.due = 0.0
        agenda.wake(pursuit.source)


def count(engine: FakeEngine, name: str) -> int:
    """How often something has come to an engine's control server."""
    return pull_scheduler(engine).server.status().counters.get(name, 0)


def keep_parked(clock: Clock, pair: Pair, lease_duration_s: float) -> None:
    """Several times as long as a lease lasts the consumer's engine is busy with something else."""
    seen = 0

    def is_renewed() -> bool:
        return count(pair.producer, "requests.Renew") > seen

    for _ in range(40):
        seen = count(pair.producer, "requests.Renew")
        clock.advance(lease_duration_s / 6)
        until(is_renewed, what="a renewal")
        pair.producer.step()


def served(pair: Pair, request_id: str) -> None:
    """The pair moves a prompt; every block comes back."""
    request = pair.decode(pair.prefill(request_id, 21))
    pair.finish(request)
    assert request.error is None
    assert not request.failed
    pair.settle()


def retold(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The params with a ticket that says something else, signed as the cluster signs."""
    ticket = verify(params["ticket"], KEY.encode())
    return {**params, "ticket": sign(msgspec.structs.replace(ticket, **changes), KEY.encode())}
