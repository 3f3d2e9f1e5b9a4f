"""Looking at a cluster: snapshots of it, their stream, timelines, and what a browser may do."""

import asyncio
import base64
import gc
import hashlib
import re
import threading
import time
import warnings

import msgspec
import pytest

from kvferry.control.client import asking_client
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import (
    ErrorEvent,
    LeaseStatus,
    PeerStatus,
    RequestTrace,
    StatusReport,
    TracePart,
    TransferStatus,
)
from kvferry.control.server import ControlServer
from kvferry.errors import KVFerryError, PeerLostError
from kvferry.observe.spans import RequestSpan
from kvferry.router import watch
from kvferry.router.engine_client import EngineClient
from kvferry.router.engines import Engine
from kvferry.router.router_client import RouterClient
from kvferry.router.snapshot import (
    MOST_ROWS,
    ClusterFigures,
    Rates,
    Seen,
    Snapshot,
    figures_in,
    request_view,
    snapshot_of,
)
from kvferry.testing.waiting import WAIT_S, NotInTimeError, until

OURS = """\
# HELP kvferry_engine_live_requests Live requests
kvferry_engine_live_requests{state="running"} 2.0
kvferry_engine_live_requests{state="waiting"} 5.0
kvferry_engine_live_requests{state="loading"} 1.0
kvferry_engine_live_requests{state="lent"} 4.0
kvferry_engine_kv_blocks{state="free"} 30.0
kvferry_engine_kv_blocks{state="used"} 34.0
kvferry_engine_transfer_bytes_total{peer="p0"} 1.5e+06
kvferry_engine_transfer_bytes_total{peer="p1"} 200.0
"""
VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200"} 1.0
vllm:kvferry_load_bytes_bucket{engine="0",le="4096.0"} 7.0
vllm:kvferry_load_bytes_sum{engine="0",model_name="m"} 4096.0
"""


# ---- metrics ------------------------------------------------------------------------------------


def test_the_metrics_of_an_engine_of_ours():
    assert figures_in(OURS) == ClusterFigures(
        running=2, waiting=5, loading=1, lent=4, free_blocks=30, blocks=64,
        loaded={"p0": 1_500_000, "p1": 200},
    )  # fmt: skip


def test_a_vllm_servers_engines_are_added_up_and_the_rest_is_not_told():
    assert figures_in(VLLM) == ClusterFigures(
        running=4, waiting=0, free_blocks=175, blocks=300, loaded={"": 4096}
    )


def test_an_sglang_servers_requests_and_loads_are_told():
    text = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:kvferry_load_bytes_sum{dp_rank="0",model_name="m"} 4096.0
"""
    assert figures_in(text) == ClusterFigures(running=3, waiting=2, loaded={"": 4096})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>not found</html>",
        "vllm:num_requests_running nan\nvllm:num_requests_waiting -3\n",
        'vllm:kv_cache_usage_perc{engine="0"} 7\nvllm:cache_config_info{num_gpu_blocks="None"} 1\n',
        'kvferry_engine_live_requests{state="running"} 1e300\n',
    ],
)
def test_what_is_no_figure_is_not_told(text):
    assert figures_in(text) == ClusterFigures()


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0} 3',
        "vllm:num_requests_running {",
        "vllm:num_requests_running x",
    ],
)
def test_metrics_that_cannot_be_read_are_one_kind_of_error(line):
    with pytest.raises(ValueError, match=r"cannot be read|could not convert"):
        figures_in(line)


# ---- snapshots ----------------------------------------------------------------------------------


def engine(name="d0", role="decode"):
    found = Engine(name, f"http://user:secret@{name}", role, EngineClient({}))
    found.health.up()
    return found


def report(engine_id="d0", *, peers=(), leases=(), transfers=(), errors=(), incarnation="1"):
    return StatusReport(
        engine_id=engine_id, incarnation=incarnation, role="kv_both", ready=True, uptime_s=1.0,
        peers=tuple(peers), leases=tuple(leases), transfers=tuple(transfers), counters={},
        errors=tuple(errors),
    )  # fmt: skip


def peer(engine_id="p0", loaded=0, transport="tcp", incarnation="1"):
    return PeerStatus(
        engine_id=engine_id, incarnation=incarnation, state="ready", age_s=1.0, last_seen_s=1.0,
        ranks=1, loaded_bytes=loaded, transport=transport,
    )  # fmt: skip


def lease(request_id="r", age=1.0):
    return LeaseStatus(
        lease_id="secret", request_id=request_id, num_blocks=3, age_s=age, remaining_s=9.0,
        target="d0", ranks_done=(0, 2),
    )  # fmt: skip


def take(*seen, spans=(), rates=None):
    requests = [request_view(span) for span in reversed(spans)]
    return snapshot_of(seen, requests, rates or Rates(), 1000.0)


def test_what_nobody_tells_is_none_and_never_zero():
    (view,) = take(Seen(engine(), untold=["/metrics: no answer within 3 s"])).engines

    told = msgspec.to_builtins(view)
    for name in ("running", "waiting", "loading", "lent", "free_blocks", "blocks"):
        assert told[name] is None, name
    assert told["untold"] == ["/metrics: no answer within 3 s"]
    assert told["url"] == "http://d0"


def test_the_rate_of_a_pair_is_that_of_the_last_seconds_and_begins_anew_with_its_engine():
    rates = Rates()

    def rate(at, loaded):
        seen = Seen(engine(), report=report(peers=[peer(loaded=loaded)]), at=at)
        (pair,) = take(seen, rates=rates).pairs
        assert (pair.source, pair.target, pair.transport) == ("p0", "d0", "tcp")
        return pair.bytes_per_s

    assert rate(10.0, 1000) is None
    assert rate(12.0, 5000) == 2000
    assert rate(12.0, 5000) == 2000  # the same answer is no news
    assert rate(22.0, 5000) == 0
    assert rate(23.0, 700) is None  # it was started again
    assert rate(24.0, 800) == 100


def test_the_control_channel_tells_of_pairs_and_the_metrics_where_it_does_not():
    peers = [peer(loaded=5), peer(loaded=7, transport="shm", incarnation="2"), peer("p1")]
    ours = Seen(engine(), ClusterFigures(loaded={"p0": 1}), report(peers=peers))
    foreign = Seen(engine("host:8200"), ClusterFigures(loaded={"": 9}))
    lender = Seen(engine("host:8100", "prefill"), ClusterFigures(loaded={"": 0}))

    pairs = take(ours, foreign, lender).pairs

    assert [(one.source, one.target, one.transport, one.loaded_bytes) for one in pairs] == [
        ("", "host:8200", "", 9),
        ("p0", "d0", "shm", 12),
    ]


def test_an_engine_of_two_roles_tells_of_its_leases_once():
    told = report("e0", leases=[lease()], errors=[ErrorEvent(time=5.0, message="gone")])

    snapshot = take(
        Seen(engine("a", "prefill"), report=told), Seen(engine("a", "decode"), report=told)
    )

    assert len(snapshot.engines) == 2
    assert len(snapshot.leases) == len(snapshot.failures) == 1
    assert b"secret" not in msgspec.json.encode(snapshot)


def test_long_tables_are_cut_and_say_so_and_the_oldest_leases_stay():
    leases = [lease(f"r{age}", float(age)) for age in range(MOST_ROWS + 7)]

    snapshot = take(Seen(engine(), report=report(leases=leases)))

    assert len(snapshot.leases) == MOST_ROWS
    assert snapshot.leases[0].age_s == MOST_ROWS + 6
    assert snapshot.left_out == {"leases": 7}


def test_of_too_many_engines_those_with_trouble_are_shown():
    engines = [engine(f"d{number}") for number in range(MOST_ROWS + 1)]
    engines[-1].health.down("it hangs", reached=False)

    snapshot = take(*(Seen(one) for one in engines))

    assert len(snapshot.engines) == MOST_ROWS
    assert (snapshot.engines[0].name, snapshot.engines[0].state) == (f"d{MOST_ROWS}", "down")
    assert snapshot.left_out == {"engines": 1}


def test_failures_of_engines_and_of_the_router_are_one_list_newest_first():
    failed = RequestSpan(None, "/v1/completions", "", request_id="cmpl-9")
    failed.end("503: no decode engine")
    failed.end()
    well = RequestSpan(None, "/v1/completions", "", request_id="cmpl-10")
    events = [
        ErrorEvent(time=5.0, message="request cmpl-7, rank 0: PeerLostError: gone"),
        ErrorEvent(time=9.0, message="handshake with 10.0.0.1:14579: refused"),
    ]

    snapshot = take(Seen(engine(), report=report(errors=events)), spans=[failed, well])

    found = [(one.engine, one.request_id) for one in snapshot.failures]
    assert found == [("", "cmpl-9"), ("d0", ""), ("d0", "cmpl-7")]
    assert [(one.request_id, one.is_open) for one in snapshot.requests] == [
        ("cmpl-10", True),
        ("cmpl-9", False),
    ]


def test_texts_from_elsewhere_are_made_printable_and_short():
    hostile = "\x1b[2J\n" + "x" * 5000
    load = TransferStatus(
        request_id=hostile, lease_id="", peer=hostile, bytes_done=1, bytes_total=2, age_s=0.0,
        progress_s=0.0,
    )  # fmt: skip

    text = msgspec.json.encode(
        take(Seen(engine(), report=report(hostile, transfers=[load]), untold=[hostile]))
    ).decode()

    assert "\\u001b" not in text
    assert "\\n" not in text.replace("\\\\n", "")
    assert "x" * 2001 not in text


# ---- over HTTP ----------------------------------------------------------------------------------


@pytest.fixture
def watched(make_setup):
    """A router that asks for a key, and its fake engines."""
    return make_setup(api_key="sesame")


def snapshots(setup, key="sesame"):
    return RouterClient(str(setup.client.base_url), key).watch()


def first_snapshot(setup, condition=lambda _: True):
    """The first one that fulfils a condition."""
    deadline = time.monotonic() + WAIT_S
    found = snapshots(setup)
    try:
        for snapshot in found:
            if condition(snapshot):
                return snapshot
            if time.monotonic() > deadline:
                raise NotInTimeError(f"the condition does not hold: {snapshot}")
    finally:
        found.close()
    raise AssertionError("the stream has ended")


@pytest.mark.parametrize("path", ["/kvferry/watch", "/kvferry/requests/cmpl-1"])
@pytest.mark.parametrize("key", ["", "Bearer other"])
def test_without_the_key_nothing_is_told(watched, path, key):
    answer = watched.client.get(path, headers={"authorization": key})

    assert answer.status_code == 401
    assert "d0" not in answer.text


def test_the_page_is_for_everybody_and_has_nothing_of_the_cluster(watched):
    answer = watched.client.get("/kvferry", headers={"authorization": ""})

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "127.0.0.1" not in answer.text
    assert "sesame" not in answer.text


def test_the_page_runs_its_own_script_and_loads_nothing(watched):
    answer = watched.client.get("/kvferry")
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )

    for element, name in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "://" not in answer.text
    # What would let text become markup, or the key get into an address.
    for risk in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "EventSource(",
                 "localStorage", "eval("):  # fmt: skip
        assert risk not in answer.text


def test_snapshots_come_as_server_sent_events(watched):
    headers = {"authorization": "Bearer sesame"}
    with watched.client.stream("GET", "/kvferry/watch", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        for _ in range(2):
            event, end = next(lines), next(lines)
            assert end == ""
            snapshot = msgspec.json.decode(event.removeprefix("data: "), type=Snapshot)
            assert [one.name for one in snapshot.engines] == ["p0", "d0"]


def test_a_request_is_in_the_next_snapshot_with_its_engines(watched):
    headers = {"authorization": "Bearer sesame"}
    body = {"prompt": "Hi", "temperature": 0, "max_tokens": 5}
    answer = watched.client.post("/v1/completions", json=body, headers=headers)

    (request,) = first_snapshot(watched).requests

    assert request.request_id == answer.headers["x-request-id"]
    assert request.engines == ["p0", "d0"]
    assert (request.is_open, request.error) == (False, "")


def test_engines_are_asked_only_while_somebody_watches(watched):
    asked = [engine.metrics_asked for engine in watched.engines]
    assert asked == [0, 0]

    first_snapshot(watched, lambda _: all(engine.metrics_asked > 1 for engine in watched.engines))

    def is_quiet():
        before = [engine.metrics_asked for engine in watched.engines]
        time.sleep(3 * watch.POLL_S)
        return before == [engine.metrics_asked for engine in watched.engines]

    until(is_quiet)


def test_watchers_share_one_poll(watched):
    streams = [snapshots(watched) for _ in range(2)]
    first: set[float] = set()
    second: set[float] = set()

    def have_three_in_common():
        for stream, seen in zip(streams, (first, second), strict=True):
            seen.add(next(stream).time)
        return len(first & second) >= 3

    until(have_three_in_common)  # who takes long leaves some snapshots out
    for stream in streams:
        stream.close()


def test_too_many_watchers_are_refused_and_make_room_when_they_leave(watched, monkeypatch):
    monkeypatch.setattr(watch, "MOST_WATCHERS", 2)
    streams = [snapshots(watched) for _ in range(2)]
    for stream in streams:
        next(stream)

    with pytest.raises(KVFerryError, match="2 watch already"):
        next(snapshots(watched))

    for stream in streams:
        stream.close()

    def has_room():
        try:
            stream = snapshots(watched)
            next(stream)
            stream.close()
        except KVFerryError:
            return False
        return True

    until(has_room)


def test_a_hung_engine_holds_nobody_and_is_shown_as_not_told(watched, monkeypatch):
    monkeypatch.setattr(watch, "ASK_S", 0.3)
    watched.decode[0].hangs_at_metrics = True
    watched.prefill[0].metrics = OURS

    snapshot = first_snapshot(
        watched, lambda one: one.engines[0].running == 2 and len(one.engines[1].untold) == 2
    )

    hung = snapshot.engines[1]
    assert hung.untold[1].startswith("/metrics: no answer within")
    assert hung.running is None
    assert hung.free_blocks is None


def test_an_engine_that_tells_nonsense_harms_its_own_row_only(watched, monkeypatch):
    monkeypatch.setattr(watch, "MOST_METRICS_BYTES", 10_000)
    watched.prefill[0].metrics = "kvferry_engine_kv_blocks{ 3"
    watched.decode[0].metrics = "x" * 20_000

    snapshot = first_snapshot(watched, lambda one: all(len(row.untold) == 2 for row in one.engines))

    (ours, theirs) = snapshot.engines
    assert "cannot be read" in ours.untold[1]
    assert "more than 10000 bytes" in theirs.untold[1]


def test_a_question_that_is_cancelled_as_it_begins_leaves_nothing():
    async def run():
        client = EngineClient({})
        with asking_client("watch", WAIT_S) as control:
            question = watch.Question(engine(), client, control, asyncio.Semaphore(1))
            task = question.asking()
            await asyncio.sleep(0)  # both parts of the question are made, and none has begun
            question.cancel()
            await asyncio.gather(task, return_exceptions=True)

    gc.collect()  # what other tests have left may warn too
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert not warned


def test_a_router_that_ends_says_so(watched):
    found = snapshots(watched)
    next(found)
    watched.servers.stop(str(watched.client.base_url).rstrip("/"))

    with pytest.raises(PeerLostError):
        for _ in found:
            pass


def test_a_refusal_is_told_in_the_routers_words(watched):
    with pytest.raises(KVFerryError, match="not the bearer token of this router"):
        next(snapshots(watched, "other"))


# ---- control channels ---------------------------------------------------------------------------


@pytest.fixture
def channel():
    """The control channel of an engine ``p7``."""
    with ControlServer(
        engine_id="p7", role="kv_producer", incarnation="1", leases=LeaseTable(max_blocks=9)
    ) as served:
        yield served


@pytest.fixture
def told(make_setup, channel):
    """A router whose prefill engine says where its control channel is."""
    setup = make_setup(api_key="sesame", wait=False)
    setup.prefill[0].tells = {"control": f"127.0.0.1:{channel.port}"}
    return setup


def test_the_control_channel_tells_of_leases_and_failures(told, channel):
    channel.leases.grant("cmpl-4", 2)
    channel.note_error("load", "request cmpl-3, rank 0: gone")

    snapshot = first_snapshot(told, lambda one: one.leases)

    assert snapshot.engines[0].engine_id == "p7"
    assert [(one.engine, one.request_id) for one in snapshot.leases] == [("p7", "cmpl-4")]
    assert [(one.engine, one.request_id) for one in snapshot.failures] == [("p7", "cmpl-3")]


def test_a_timeline_comes_from_the_engines_control_channels(told, channel):
    part = TracePart(name="prefill", started=100.0, seconds=0.5)
    trace = RequestTrace(
        request_id="cmpl/3", started=100.0, seconds=1.0, outcome="lent", parts=(part,)
    )
    channel.set_traces(lambda wanted: (7, (trace,) if wanted == "cmpl/3" else ()))
    first_snapshot(told, lambda one: one.engines[0].engine_id == "p7")

    answer = told.client.get(
        "/kvferry/requests/cmpl%2F3", headers={"authorization": "Bearer sesame"}
    ).json()

    (asked,) = answer["engines"]
    assert (asked["engine_id"], asked["requests"][0]["outcome"]) == ("p7", "lent")
    assert [row["part"]["name"] for row in answer["rows"]] == ["prefill"]


def test_too_many_timelines_at_a_time_are_refused(told, channel, monkeypatch):
    monkeypatch.setattr(watch, "MOST_TIMELINES", 1)
    asked, answer = threading.Event(), threading.Event()

    def hang(_wanted):
        asked.set()
        answer.wait(WAIT_S)
        return 0, ()

    channel.set_traces(hang)
    first_snapshot(told, lambda one: one.engines[0].engine_id == "p7")
    headers = {"authorization": "Bearer sesame"}
    first = threading.Thread(target=lambda: told.client.get("/kvferry/requests/a", headers=headers))
    first.start()
    try:
        assert asked.wait(WAIT_S)
        second = told.client.get("/kvferry/requests/b", headers=headers)
    finally:
        answer.set()
        first.join(WAIT_S)
    assert (second.status_code, second.json()["error"]["code"]) == (503, "busy")


def test_an_id_that_is_none_is_refused(told):
    answer = told.client.get(
        f"/kvferry/requests/{'x' * 300}", headers={"authorization": "Bearer sesame"}
    )
    assert answer.status_code == 400


def test_an_operator_says_where_a_foreign_engines_channel_is(watched, channel):
    engine = watched.prefill[0]
    body = {"url": engine.url, "control": f"127.0.0.1:{channel.port}"}
    headers = {"authorization": "Bearer operator"}
    assert watched.client.put("/kvferry/engines/prefill/p0", json=body, headers=headers).is_success

    first_snapshot(watched, lambda one: one.engines[0].engine_id == "p7")

    refused = watched.client.put(
        "/kvferry/engines/prefill/p0", json={**body, "control": "14579"}, headers=headers
    )
    assert refused.status_code == 400
    assert "14579" in refused.json()["error"]["message"]
