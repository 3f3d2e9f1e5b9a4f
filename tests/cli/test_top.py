"""``kvferry top``: a snapshot of a cluster in a terminal."""

import json
from typing import Any

import pytest

from kvferry.cli.top import MOST_SNAPSHOTS
from kvferry.errors import PeerLostError
from kvferry.router.router_client import RouterClient
from kvferry.router.snapshot import (
    EngineView,
    FailureView,
    LeaseView,
    LoadView,
    PairView,
    ShownRequest,
    Snapshot,
)

HOSTILE = "[red]x\x1b[2J\n┃ forged ┃"


def snapshot(**tables):
    empty: dict[str, Any] = {
        name: [] for name in ("engines", "pairs", "leases", "loads", "failures", "requests")
    }
    return Snapshot(time=1e9, left_out=tables.pop("left_out", {}), **{**empty, **tables})


def engine(name="p0", **told):
    return EngineView(
        name=name, role="prefill", url="http://p0", state="ready", outstanding=3, untaken=0, **told
    )


@pytest.fixture
def shown(kvferry, monkeypatch):
    """What ``kvferry top`` prints where a router tells of these snapshots."""

    def show(*snapshots, arguments=("--once",)):
        asked = []

        def watch(client):
            asked.append((client._url, client._headers))
            yield from snapshots
            raise PeerLostError("router: it tells no more")

        monkeypatch.setattr(RouterClient, "watch", watch)
        outcome = kvferry("top", "http://router:8000/v1", "--api-key", "sesame", *arguments)
        assert asked == [("http://router:8000", {"authorization": "Bearer sesame"})]
        return outcome

    return show


def row(outcome, word):
    """The cells of the one line that has a word in it."""
    (line,) = [line for line in outcome.out.splitlines() if word in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_once_shows_the_first_snapshot_that_can_tell_rates(shown):
    pair: dict[str, Any] = {
        "source": "p0",
        "target": "d0",
        "transport": "tcp",
        "loaded_bytes": 4096,
    }
    outcome = shown(
        snapshot(),
        snapshot(pairs=[PairView(**pair)]),
        snapshot(engines=[engine(running=2, waiting=0, free_blocks=7, blocks=9,
                                 kind="sglang 0.5.23")],
                 pairs=[PairView(**pair, bytes_per_s=2048.0)]),
    )  # fmt: skip

    assert outcome.code == 0, outcome.err
    assert row(outcome, "tcp") == ["p0", "d0", "tcp", "2.0 KiB/s", "4.0 KiB"]
    counts = ["3", "2", "0", "–", "–", "7 of 9"]
    assert row(outcome, "ready") == ["p0", "sglang 0.5.23", "prefill", "ready", *counts]
    for table in ("leases", "loads", "failures", "requests"):
        assert f"no {table}" in outcome.out


def test_once_does_not_wait_for_rates_without_end(shown):
    pair = PairView(source="p0", target="d0", loaded_bytes=4096)

    outcome = shown(*(snapshot(pairs=[pair]) for _ in range(MOST_SNAPSHOTS)))

    assert row(outcome, "d0") == ["p0", "d0", "–", "–", "4.0 KiB"]


def test_every_table_has_its_rows(shown):
    every = snapshot(
        engines=[engine(engine_id="prefill-0", problem="it hangs", untold=["/metrics: gone"])],
        leases=[LeaseView(engine="p0", request_id="r1", num_blocks=3, age_s=1.0, remaining_s=9.0,
                          target="", ranks_done=1)],
        loads=[LoadView(engine="d0", source="p0", request_id="r2", bytes_done=1, bytes_total=4,
                        age_s=1.0, progress_s=0.5)],
        failures=[FailureView(time=1e9, engine="", message="503: no engine")],
        requests=[ShownRequest(request_id="r3", path="/v1", started=1e9, seconds=2.0, is_open=True,
                              engines=["p0", "d0"], error="")],
        left_out={"leases": 17},
    )  # fmt: skip

    outcome = shown(every, every)

    assert "p0 (prefill-0)" in outcome.out
    assert "p0: it hangs" in outcome.out
    assert "p0: /metrics: gone" in outcome.out
    assert row(outcome, "r1")[:4] == ["p0", "r1", "nobody yet", "3"]
    assert "and 17 more leases" in outcome.out
    assert row(outcome, "r2")[-1] == "500.0 ms ago"
    assert row(outcome, "503")[1:] == ["router", "503: no engine"]
    assert row(outcome, "r3")[1:] == ["r3", "p0 → d0", "2.0 s", "goes on"]


def test_what_others_say_forges_no_row(shown):
    hostile = snapshot(
        engines=[engine(HOSTILE, problem=HOSTILE)],
        failures=[FailureView(time=1e9, engine=HOSTILE, message=HOSTILE)],
    )

    outcome = shown(hostile, hostile)

    assert "\x1b" not in outcome.out
    assert "[red]x" in outcome.out
    assert not any(line.startswith("┃ forged") for line in outcome.out.splitlines())


def test_as_json_it_is_the_same_snapshot(shown):
    outcome = shown(snapshot(), snapshot(engines=[engine()]), arguments=("--json",))

    document = json.loads(outcome.out)
    assert document["engines"][0]["name"] == "p0"
    assert document["engines"][0]["running"] is None


def test_a_router_that_is_not_there_is_named(kvferry):
    outcome = kvferry("top", "http://127.0.0.1:9", "--once")

    assert outcome.code == 2
    assert "router http://127.0.0.1:9: " in outcome.err
