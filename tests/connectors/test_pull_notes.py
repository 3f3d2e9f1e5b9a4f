"""Notes: what the engine of a source writes for the engine of the target, beside a prompt."""

from functools import partial
from typing import Any

import pytest

from kvferry.control.leases import EndedLease, LeaseOutcome
from kvferry.control.tickets import TransferId
from kvferry.testing.fake_rank import FakeRequest, Stage
from tests.connectors.engines import KEY
from tests.connectors.test_pull_early import SOURCE, TARGET, Scene, open_scene, readable

NOTE = b"the first token is 7"


@pytest.fixture
def scene():
    with open_scene(SOURCE, TARGET) as scene:
        scheduler: Any = scene.source.scheduler
        scheduler.request_finished = partial(scheduler.request_finished, note=NOTE)
        yield scene


def note_of(scene: Scene, name: str) -> bytes:
    borrower: Any = scene.target.scheduler.borrower  # type: ignore[attr-defined]
    note: bytes = borrower.loads[name].ticket.note
    return note


def loaded(scene: Scene, load: FakeRequest) -> None:
    scene.run(lambda: load.stage is not Stage.LOADING and load.external_tokens > 0, "the load")


def test_a_whole_prompt_brings_its_note_with_the_ticket(scene):
    request = scene.begin("a", 30, chunk=30)
    scene.run(lambda: request.stage is Stage.FINISHED, "the prompt", scene.source)
    load = scene.load("a")
    loaded(scene, load)
    assert note_of(scene, "a") == NOTE
    scene.end(load)


def test_a_growing_prompt_brings_its_note_once_it_is_whole(scene):
    request = scene.begin("a", 60, chunk=16)
    load = scene.load("a")
    scene.run(lambda: readable(scene, "a") == 12, "the first part")
    assert note_of(scene, "a") == b""
    scene.run(lambda: request.stage is Stage.FINISHED, "the prompt", scene.source)
    loaded(scene, load)
    assert note_of(scene, "a") == NOTE
    scene.end(load)


def test_ranks_are_not_sent_the_note(scene):
    request = scene.begin("a", 30, chunk=30)
    scene.run(lambda: request.stage is Stage.FINISHED, "the prompt", scene.source)
    load = scene.load("a")
    loaded(scene, load)
    borrower: Any = scene.target.scheduler.borrower
    assert borrower.loads["a"].spec.ticket.note == b""
    scene.end(load)


def test_a_source_knows_whether_it_was_asked_for_a_prompt(scene):
    tickets: Any = scene.source.scheduler.lender.tickets
    address = f"127.0.0.1:{scene.source.scheduler.port}"
    transfer = TransferId.begin(address, KEY.encode()).text
    request = scene.source.add("a", range(30), {"do_remote_decode": True, "transfer": transfer})
    assert not tickets.is_asked("a")
    assert not tickets.is_asked("b")
    asked = {"do_remote_prefill": True, "transfer": transfer}
    load = scene.target.add("a", range(31), asked)
    scene.run(lambda: tickets.is_asked("a"), "the ask")
    scene.end(request, load)
    assert not tickets.is_asked("a")


def test_the_engine_of_a_source_hears_how_a_lease_ended(scene):
    ended: list[EndedLease] = []
    scene.source.scheduler.lender.on_ended = ended.append
    request = scene.begin("a", 30, chunk=8)
    load = scene.load("a")
    scene.end(request, load)
    assert [(each.request_id, each.outcome) for each in ended] == [("a", LeaseOutcome.DONE)]
