"""The fault matrix counts what a broken cluster does to its clients."""

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from typing import cast

import pytest

from benchmarks.faults import matrix
from benchmarks.faults.faults import FAULTS, Fault
from benchmarks.faults.load import Answer, Endpoint, Prompts, count, seconds_until_back
from benchmarks.faults.matrix import Cell, cells_of, faults_named, run_cell
from benchmarks.faults.report import FaultResults, draw, missed, page, read
from benchmarks.faults.system import System, SystemFailedError, build_clock
from benchmarks.report import Run
from kvferry.testing.hosts import Host

PROMPTS = Prompts([[1], [2], [3]], [[10, 11, 12], [20, 21, 22], [30, 31, 32]])


class Here:
    """In the place of a host from which servers are asked."""

    def connect(self, address, port, timeout_s):
        return socket.create_connection((address, port), timeout_s)


class Server(http.server.ThreadingHTTPServer):
    """A router whose answers go wrong as ``mood`` says."""

    daemon_threads = True

    def __init__(self):
        self.mood = "well"
        self.moods = []
        """In which it was, request by request."""
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    server: Server

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        mood = self.server.mood
        self.server.moods.append(mood)
        if mood == "refuses":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        tokens = PROMPTS.expected[PROMPTS.prompts.index(body["prompt"])]
        if mood == "forgets":
            tokens = tokens[:-1]
        for number, token in enumerate(tokens):
            if mood == "breaks off" and number == 1:
                return
            if mood == "fails" and number == 1:
                self.say({"error": {"message": "a load failed"}})
                break
            if mood == "errs" and number == 1:
                token += 1
            self.say({"choices": [{"token_ids": [token]}]})
            time.sleep(0.005)
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


class FakeSystem(System):
    """A cluster that has only its router."""

    name = "fake"
    clients = 4
    requests = 30
    lease_s = 0.3

    def __init__(self, server):
        self.server = server
        self.router = Endpoint(cast(Host, Here()), *server.server_address)
        self.members = []
        self.prompts = PROMPTS
        self.held = 0

    def make_members(self):
        return []

    def router_arguments(self):
        return []

    def make_prompts(self):
        return PROMPTS

    def stranded(self):
        return self.held

    def mend(self):
        self.server.mood = "well"

    def close(self):
        pass


@pytest.fixture
def system(monkeypatch):
    monkeypatch.setattr(matrix, "BEFORE_S", 0.0)
    monkeypatch.setattr(matrix, "AFTER_S", 60.0)
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield FakeSystem(server)
    server.shutdown()
    server.server_close()


def cell(system, mood, lasts_s=0.2, **more):
    @contextlib.contextmanager
    def act(scene):
        system.server.mood = mood
        yield
        while mood not in system.server.moods:
            time.sleep(0.01)
        system.server.mood = "well"
        scene.asides += more.get("asides", ())

    return run_cell(system, Fault("kill-p", "kill", act, lasts_s), "any", 0)


@pytest.mark.timed("Half of the rate must be back within 60 s.")
def test_a_fault_that_costs_nothing_is_a_good_cell(system):
    found = cell(system, "well")
    assert found.counts.requests >= system.requests
    assert (found.counts.wrong, found.counts.failed, found.is_good) == (0, 0, True)


@pytest.mark.parametrize("mood", ["errs", "forgets"])
def test_wrong_tokens_are_counted(system, mood):
    found = cell(system, mood)
    assert found.counts.wrong > 0
    assert found.counts.failed == 0
    assert not found.is_good


@pytest.mark.parametrize(
    ("mood", "words"),
    [("refuses", "HTTP 503"), ("breaks off", "the stream broke off"), ("fails", "a load failed")],
)
def test_failures_are_counted_and_quoted(system, mood, words):
    found = cell(system, mood)
    assert found.counts.failed > 0
    assert found.counts.wrong == 0
    assert words in found.counts.errors[0]
    assert not found.is_good
    assert len(missed([found])) == 1


def test_wrong_tokens_count_even_when_the_answer_fails_after_them():
    began = time.monotonic()
    assert PROMPTS.is_wrong(Answer(0, began, tokens=[11]).end(began, "broke off"))
    assert not PROMPTS.is_wrong(Answer(0, began, tokens=[10]).end(began, "broke off"))


def test_stranded_blocks_are_counted(system):
    @contextlib.contextmanager
    def act(_):
        system.held = 7
        yield

    found = run_cell(system, Fault("kill-p", "kill", act), "any", 0)
    assert found.stranded == 7
    assert not found.is_good
    # What is held before a fault is not its doing, and no cell is measured on it.
    with pytest.raises(SystemFailedError, match="7 blocks are held before"):
        cell(system, "well")


def test_a_hostile_request_that_is_answered_wrong_counts_and_one_that_is_refused_does_not(system):
    began = time.monotonic()
    wrong = Answer(0, began, tokens=[10, 11, 99]).end(began)
    refused = Answer(0, began).end(began, "HTTP 400")
    found = cell(system, "well", asides=[wrong, refused])
    assert (found.hostile, found.refused, found.counts.wrong, found.counts.failed) == (2, 1, 1, 0)
    assert not found.is_good


def test_a_stall_is_the_longest_time_without_a_token():
    answers = [Answer(0, 0.0, 9.0, [10, 11, 12], stall_s=each) for each in (0.5, 7.0, 1.0)]
    assert count(answers, PROMPTS, 1.0, 2.0).stall_s == 7.0


def test_throughput_is_back_when_it_stays_at_half_the_rate_of_before():
    before = [number / 10 for number in range(50)]
    straggler, slow = [6.0], [10.0, 14.0, 18.0]
    back = [20 + number / 10 for number in range(50)]
    assert seconds_until_back([*before, *straggler, *slow, *back], 5.0, 5.5) == 14.5
    assert seconds_until_back([*before, *straggler, *slow], 5.0, 5.5) is None
    assert seconds_until_back([*before, *back], 5.0, 20.0) == 0.1


def test_a_cluster_that_never_comes_back_is_no_good_cell(system, monkeypatch):
    monkeypatch.setattr(matrix, "AFTER_S", 0.5)

    @contextlib.contextmanager
    def act(_):
        system.server.mood = "refuses"
        yield

    found = run_cell(system, Fault("kill-p", "kill", act), "any", 0)
    assert found.counts.back_s is None
    assert "never back" in missed([found])[0]


def test_faults_are_chosen_by_name_and_run_at_each_of_their_steps():
    assert [fault.name for fault in faults_named(["kill"])] == ["kill-p", "kill-d"]
    with pytest.raises(ValueError, match="'flood' is no fault"):
        faults_named(["flood"])
    (kill, *_) = faults_named(["kill-p"])
    assert [step for _, step in cells_of([kill], at_every_step=True)] == list(kill.steps)
    assert [step for _, step in cells_of([kill], at_every_step=False)] == ["any"]
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_cells_are_stored_read_back_and_measured_anew(system, tmp_path):
    run = Run("benchmarks.faults", tmp_path)
    results = run.results(FaultResults)
    for mood in ("fails", "well"):
        results = results.with_cell(cell(system, mood))
        run.write("faults", results, page)
    (found,) = read(tmp_path)
    assert isinstance(found, Cell)
    assert found.is_good
    assert "| fake | kill -9 of P | any |" in page(results)
    draw(results, tmp_path / "faults.png")
    assert (tmp_path / "faults.png").stat().st_size > 0


def test_the_wall_clock_of_a_process_can_be_set_back_and_its_other_clock_stays(tmp_path):
    library = build_clock(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    offset = tmp_path / "clock"
    offset.write_bytes((-3600).to_bytes(8, sys.byteorder, signed=True))
    code = "import time; print(time.time(), time.monotonic())"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={"LD_PRELOAD": str(library), "CLOCK_FILE": str(offset)},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.split()
    assert 3000 < time.time() - float(said[0]) < 4000
    assert 0 <= time.monotonic() - float(said[1]) < 600
