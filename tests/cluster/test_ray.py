"""Engines on the nodes of a Ray cluster: placement, and real clusters over hosts."""

import http.client
import importlib.util
import itertools
import os
import queue
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from kvferry.cluster import ray_nodes
from kvferry.cluster.launcher import Cluster
from kvferry.cluster.ray_nodes import Ended, Node, RayAgent, RayNodes, place
from kvferry.config import ClusterConfig, EngineConfig, ModelConfig
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TINY_MODELS
from kvferry.errors import ConfigError, HostError
from kvferry.serving.messages import (
    Bound,
    ChildFailed,
    EngineSettings,
    Loading,
    RankSettings,
    Ready,
)
from kvferry.testing.ray_hosts import start_ray
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.test_starved import REQUESTS, prompt, undivided
from tests.load import Load, tokens_in

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra `ray`)"
)
A, B, C = (Node(name, f"10.0.0.{n}", name, 4) for n, name in enumerate("abc", start=1))


def engine_config(name="d0", role="kv_consumer", **values):
    transfer = {
        "kv_connector": "PullConnector",
        "kv_role": role,
        "kv_port": 0,
        "kv_connector_extra_config": {"transport": ["shm", "tcp"]},
    }
    return {"name": name, "num_blocks": 256, "max_model_len": 512, **values} | {
        "kv_transfer_config": transfer
    }


def placed(free, **values):
    """Hostnames of the nodes on which the ranks of an engine are put, given the free CPUs."""
    config = EngineConfig(**engine_config(**values))
    nodes = [A, B, C][: len(free)]
    return "".join(
        node.hostname
        for node in place(
            config, nodes, {node.id: cpus for node, cpus in zip(nodes, free, strict=True)}
        )
    )


def test_all_ranks_are_on_the_node_with_most_room():
    assert placed((1, 3, 2), tp=2) == "bb"


def test_ranks_that_no_node_has_room_for_are_on_as_few_as_possible_in_a_row():
    assert placed((1, 2, 3), tp=5) == "cccbb"
    assert placed((3, 3), pp=2, threads=2) == "ab"


def test_an_engine_is_on_the_node_that_it_names_by_host_or_by_nodes():
    assert placed((4, 1), host="10.0.0.2") == "b"
    assert placed((4, 1), nodes=("b",)) == "b"
    assert placed((4, 4, 2), nodes=("c", "10.0.0.1"), tp=3) == "cca"


def test_too_few_cpus_are_told_with_all_that_are_free():
    with pytest.raises(ConfigError, match=r"'d0' needs 6 CPUs, 2 for .* 3 ranks; free are 3 of 4 "):
        placed((3, 3), tp=3, threads=2)
    with pytest.raises(ConfigError, match=r"free are 1 of 4 on 10\.0\.0\.2: add nodes"):
        placed((4, 1), nodes=("b",), tp=2)


def test_a_node_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(ConfigError, match=r"node x is not in .* there are 10\.0\.0\.1 \(a\), "):
        placed((4, 4), nodes=("x",))


@pytest.mark.parametrize("nodes", [("a", "a"), ("a", "b", "c")])
def test_nodes_are_different_and_no_more_than_ranks(nodes):
    with pytest.raises(ValueError, match="not one to 2 different nodes"):
        EngineConfig(**engine_config(tp=2, nodes=nodes))


def cluster_config(prefill=(), decode=(), **router):
    return ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine_config("p0", "kv_producer", **dict(prefill))],
            "decode": [engine_config("d0", **dict(decode))],
            "router": {"port": 0, **router},
        }
    )


@pytest.fixture
def fake_nodes(monkeypatch):
    """A Ray cluster of which there is nothing but the list of nodes, to be changed by the test."""
    alive = [A, B]
    monkeypatch.setattr(ray_nodes, "_connect", lambda address: None)
    monkeypatch.setattr(ray_nodes, "_alive", lambda: list(alive))
    monkeypatch.setattr(RayNodes, "close", lambda self: None)
    return alive


def start(nodes, config, name, tmp_path):
    """Where an engine is started, or why it is not."""
    started = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_nodes.RayProcess, "follow", lambda process, _: started.append(process))
        engine = next(one for one in config.engines if one.name == name)
        settings = EngineSettings(
            engine=engine, role="decode", model_folder="", model_name="", dtype="float64"
        )
        nodes.start(settings, config.model, tmp_path / "log", queue.Queue())
    return started[0]


def test_named_engines_get_their_room_before_others_take_it(fake_nodes, tmp_path):
    config = cluster_config({"tp": 4}, {"nodes": ("a",), "tp": 4})
    with RayNodes.open("", config) as nodes:
        assert start(nodes, config, "p0", tmp_path).where == "node 10.0.0.2"
        assert start(nodes, config, "d0", tmp_path).where == "node 10.0.0.1"


def test_an_engine_whose_node_is_gone_is_placed_elsewhere_with_a_warning(
    fake_nodes, tmp_path, caplog
):
    config = cluster_config(decode={"nodes": ("b",), "tp": 3})
    with RayNodes.open("", config) as nodes:
        assert start(nodes, config, "d0", tmp_path).where == "node 10.0.0.2"
        fake_nodes.remove(B)
        assert start(nodes, config, "d0", tmp_path).where == "node 10.0.0.1"
        assert "engine 'd0': its node b is gone" in caplog.text
        fake_nodes.append(B)
        assert start(nodes, config, "d0", tmp_path).where == "node 10.0.0.2"


@needs_ray
def test_an_engine_for_which_there_is_no_room_any_more_fails_and_says_so(fake_nodes, tmp_path):
    config = cluster_config({"tp": 3}, {"nodes": ("b",), "tp": 3})
    with RayNodes.open("", config) as nodes:
        fake_nodes.remove(B)
        process = start(nodes, config, "d0", tmp_path)
        process._follow(queue.Queue())
    assert not process.is_running
    assert process.exit_code is None  # not 0, so that it is tried again
    assert "engine 'd0' needs 3 CPUs" in str(process.error())


def test_an_agent_tells_why_a_model_cannot_be_used_on_its_node():
    settings = RankSettings(host="127.0.0.1", key="k", model_folder="")
    model = ModelConfig(source="/no/such/model")
    told = list(RayAgent().run("x", "rank", settings, model, 1))
    news = [one for one in told if not isinstance(one, bytes)]
    log = b"".join(one for one in told if isinstance(one, bytes)).decode()
    assert isinstance(news[-2], ChildFailed)
    assert news[-2].name == "ModelError"
    assert news[-1] == Ended(1)
    assert "=== start of convert 'x-model'" in log
    assert "'/no/such/model': is neither" in log


def test_an_agent_runs_its_process_with_the_model_of_its_node_until_it_is_told_to_end(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    settings = RankSettings(host="127.0.0.1", key="k", model_folder="")
    agent = RayAgent()
    seen = []
    for one in agent.run("x", "rank", settings, ModelConfig(source="tiny"), 1):
        seen.append(one)
        if isinstance(one, Bound):
            agent.terminate()
    assert seen[-1] == Ended(0)
    assert any(isinstance(one, Bound) for one in seen)
    # What the conversion says of itself is not true of the process.
    assert not any(isinstance(one, Ready) for one in seen)
    assert all(one.done < 1 for one in seen if isinstance(one, Loading))


def test_an_agent_that_is_told_to_end_before_it_begins_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    settings = RankSettings(host="127.0.0.1", key="k", model_folder="")
    agent = RayAgent()
    agent.terminate()
    told = list(agent.run("x", "rank", settings, ModelConfig(source="tiny"), 1))
    assert isinstance(told[-1], Ended)
    assert not any(isinstance(one, Bound) for one in told)


def test_nodes_without_ray_are_refused():
    with pytest.raises(ConfigError, match=r"'d0': nodes .*`kvferry serve --ray"):
        Cluster.open(cluster_config(decode={"nodes": ("a",)}))


def test_engines_on_nodes_need_a_key():
    with pytest.raises(ConfigError, match=r"'p0': its Ray node is reached .* set KVFERRY_API_KEY"):
        Cluster.open(cluster_config(), ray="127.0.0.1:6379")


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[ray\]'"):
        Cluster.open(cluster_config(), ray="127.0.0.1:6379", api_key="k")


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("127.0.0.1:1", HostError, "no Ray cluster answers at 127.0.0.1:1 .*refused"),
        ("there", ConfigError, "'there' is not host:port, as `ray start"),
    ],
)
def test_a_ray_cluster_that_is_not_there_is_told(address, error, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", sys)  # it is not asked for anything
    with pytest.raises(error, match=words):
        Cluster.open(cluster_config(), ray=address, api_key="k")


# ---- real clusters over hosts -------------------------------------------------------------------

TEST_S = 1500
"""Of a whole test; Ray alone needs a minute on a busy machine."""
PORT = 8000
CLIENTS = 4
#: Ray's own ways to find a dead node are slow, and these are for tests.
SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}


@pytest.fixture
def cluster_env(tmp_path, monkeypatch):
    """Environment of everything on the hosts."""
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVFERRY_API_KEY", "client")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@pytest.fixture
def ray_hosts(network, cluster_env):
    """Starts a Ray node on a host each, with these CPUs; returns the hosts and Ray's address."""
    with tempfile.TemporaryDirectory(prefix="kr-") as folder:

        def begin(*cpus):
            hosts = [network.add_host(f"node{number}") for number in range(len(cpus))]
            for host, number in zip(hosts, cpus, strict=True):
                head = None if host is hosts[0] else hosts[0]
                address = start_ray(host, Path(folder), cpus=number, head=head, env=SOON)
            return hosts, address

        yield begin
        network.close()  # before its files go


class Served:
    """`kvferry serve --ray` on the first of the hosts."""

    def __init__(self, host, address, config, folder):
        self.host = host
        self.said = folder / "said"
        self.logs = folder / "logs"
        file = folder / "cluster.toml"
        file.write_text(toml(config))
        command = [sys.executable, "-m", "kvferry.cli", "serve", file, "--ray", address]
        with self.said.open("wb") as said:
            self.process = host.run(
                [*command, "--logs", self.logs], stdout=said, stderr=subprocess.STDOUT
            )

    def says(self, words):
        """Waits until it has said this."""

        def has_said():
            said = self.said.read_text()
            assert words in said or self.process.poll() is None, said
            return words in said

        until(has_said, every_s=0.2, what=lambda: f"{words!r} in {self.said.read_text()}")

    def ask(self, method, path, body=None, statuses=(200,)):
        """The content of an answer, whose status is one of these."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        connection.sock = self.host.connect("127.0.0.1", PORT, WAIT_S)
        headers = {"content-type": "application/json", "authorization": "Bearer client"}
        try:
            connection.request(method, path, body and msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status in statuses, content
            return content
        finally:
            connection.close()

    def complete(self, number):
        """The token ids of a streamed answer."""
        body = {"prompt": prompt(number), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        stream = self.ask(
            "POST", "/v1/completions", body | {"stream": True, "return_token_ids": True}
        )
        return list(tokens_in(stream.decode().splitlines()))

    def urls(self, number):
        """Waits until so many engines are ready for the router; returns name → URL of each."""

        def ready():
            health = self.ask("GET", "/health", statuses=(200, 503))  # 503: not enough are ready
            engines = msgspec.json.decode(health)["engines"]
            found = {one["name"]: one["url"] for one in engines if one["state"] == "ready"}
            return found if len(found) == number else None

        return until(ready, every_s=0.2, what=f"{number} engines that are ready")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0, self.said.read_text()


def toml(config):
    def value(one):
        if isinstance(one, dict):
            return "{ " + ", ".join(f"{key} = {value(item)}" for key, item in one.items()) + " }"
        return msgspec.json.encode(one).decode()

    lines = ["[model]", *(f"{key} = {value(one)}" for key, one in config["model"].items())]
    lines += ["[router]", *(f"{key} = {value(one)}" for key, one in config["router"].items())]
    for role in ("prefill", "decode"):
        for engine in config[role]:
            lines += [f"[[{role}]]", *(f"{key} = {value(one)}" for key, one in engine.items())]
    return "\n".join(lines)


def cluster_of(prefill, decode):
    return {
        "model": {"source": "tiny", "dtype": "float64"},
        "router": {"port": PORT},
        "prefill": prefill,
        "decode": decode,
    }


@pytest.fixture
def expected(cluster_env, tmp_path):
    """The answers of an undivided engine."""
    return undivided(str(prepare_model("tiny", tiny=TINY_MODELS["tiny"])))


@pytest.mark.timed("Ray takes a node for dead after four health checks and starts within 30 s.")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(TEST_S)
@needs_ray
def test_an_engine_with_ranks_over_two_nodes_answers_as_an_undivided_one(
    ray_hosts, expected, tmp_path
):
    (small, large), address = ray_hosts(1, 3)
    config = cluster_of(
        [engine_config("p0", "kv_producer", tp=2, block_size=8)],
        [engine_config("d0", pp=2, nodes=["node1", "node0"])],
    )
    served = Served(small, address, config, tmp_path)
    served.says("OpenAI API at")
    assert [served.complete(number) for number in range(REQUESTS)] == expected
    urls = served.urls(2)
    assert set(urls) == {"p0", "d0"}
    assert all(url.startswith(f"http://{large.ipv4}:") for url in urls.values())
    log = (served.logs / "d0.log").read_text()  # of both nodes
    assert "=== start of engine 'd0'" in log
    assert "=== start of rank 'd0-rank1'" in log
    assert "reading from engine p0: shm" in log
    assert "reading from engine p0: tcp" in log
    served.stop()


@pytest.mark.timed("Ray takes a node for dead after four health checks and starts within 30 s.")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(TEST_S)
@needs_ray
def test_an_engine_of_which_a_rank_on_another_node_dies_is_started_again(
    ray_hosts, expected, tmp_path
):
    (small, _), address = ray_hosts(1, 2)
    config = cluster_of(
        [engine_config("p0", "kv_producer")], [engine_config("d0", pp=2, nodes=["node1", "node0"])]
    )
    served = Served(small, address, config, tmp_path)
    served.says("OpenAI API at")
    small.run(["pkill", "-KILL", "-f", "cluster.main rank .* d0-rank1"]).wait(WAIT_S)
    served.says("died: d0: rank 1 of engine 'd0' at ")
    served.says("serves again: d0")
    served.urls(2)
    assert served.complete(0) == expected[0]
    served.stop()


@pytest.mark.timed("Ray takes a node for dead after four health checks and starts within 30 s.")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(TEST_S)
@needs_ray
def test_a_node_that_dies_under_load_costs_no_answer_and_its_engines_serve_elsewhere(
    ray_hosts, expected, tmp_path
):
    (head, lost, other), address = ray_hosts(0, 2, 4)
    config = cluster_of(
        [
            engine_config("p0", "kv_producer", nodes=["node1"]),
            engine_config("p1", "kv_producer", block_size=8),
        ],
        [engine_config("d0", nodes=["node1"]), engine_config("d1", block_size=24)],
    )
    served = Served(head, address, config, tmp_path)
    served.says("OpenAI API at")
    assert f"http://{lost.ipv4}:" in served.urls(4)["d0"]
    numbers = itertools.cycle(range(REQUESTS))
    with Load(served.complete, numbers, clients=CLIENTS) as load:
        load.goes_on()
        lost.kill()
        served.says("serves again: d0")
        served.says("serves again: p0")
        load.goes_on()
    wrong = load.wrong(expected.__getitem__)
    assert (load.errors, wrong) == ([], [])
    served.says("engine 'd0': its node node1 is gone")
    assert all(f"http://{other.ipv4}:" in url for url in served.urls(4).values())
    served.stop()


@pytest.mark.timed("Ray takes a node for dead after four health checks and starts within 30 s.")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(TEST_S)
@needs_ray
@pytest.mark.parametrize(
    ("decode", "words"),
    [
        ({"nodes": ["node7"]}, "node node7 is not in the Ray cluster; there are 10.77.0.1 (node0)"),
        ({"tp": 3}, "engine 'd0' needs 3 CPUs, 1 for each of 3 ranks; free are 2 of 2 on"),
    ],
)
def test_what_cannot_be_placed_is_told_before_anything_starts(ray_hosts, decode, words, tmp_path):
    (head,), address = ray_hosts(2)
    config = cluster_of([engine_config("p0", "kv_producer")], [engine_config("d0", **decode)])
    served = Served(head, address, config, tmp_path)
    assert served.process.wait(WAIT_S) == 2
    assert words in served.said.read_text()
    assert not served.logs.exists()
