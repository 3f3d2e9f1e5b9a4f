"""Whole clusters of the tiny model, in real processes."""

import json
import logging
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest

from kvferry.cli.demo import load_example
from kvferry.cluster.launcher import Cluster, RunningEngine
from kvferry.config import ClusterConfig
from kvferry.errors import ConfigError, ModelError, PortInUseError, WorkerDiedError
from kvferry.router.router_client import RouterClient
from kvferry.serving.process import Child, ChildProcess, Reporter
from kvferry.testing.waiting import WAIT_S, until

pytestmark = pytest.mark.processes

"""Seconds that a cluster may take to start."""


def cluster_config(**changes):
    """A prefill engine of two ranks and a decode engine of one; ``changes`` by section."""

    def engine(name, role, **values):
        extra = {"record_digests": True, **changes.get("extra", {})}
        transfer = {
            "kv_connector": "PullConnector",
            "kv_role": role,
            "kv_port": 0,
            "kv_connector_extra_config": extra,
        }
        return {
            "name": name,
            "num_blocks": 64,
            "max_model_len": 512,
            "kv_transfer_config": transfer,
            **values,
        }

    prefill = engine("p0", "kv_producer", tp=2, block_size=16, layout="HND")
    decode = engine("d0", "kv_consumer", block_size=24, layout="NHD")
    return ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64", **changes.get("model", {})},
            # The decode engine is started last; which is ready first is left to chance.
            "prefill": [{**prefill, **changes.get("prefill", {})}],
            "decode": [{**decode, **changes.get("decode", {})}],
            "router": {"port": 0, **changes.get("router", {})},
        }
    )


def processes_of(cluster):
    """All processes of a cluster, ranks included."""
    found = []
    for process in cluster._processes:
        parent = psutil.Process(process.pid)
        found += [parent, *parent.children(recursive=True)]
    return found


def segments_of(pids):
    return [
        path for path in Path("/dev/shm").glob("kvferry.*") if int(path.name.split(".")[1]) in pids
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A place of its own for converted models, also for child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def said():
    """What the cluster says while it starts."""
    return []


@pytest.fixture(scope="module")
def cluster(cache, tmp_path_factory, said):
    with Cluster.open(
        cluster_config(),
        logs=tmp_path_factory.mktemp("logs"),
        progress=lambda *news: said.append(news),
        timeout_s=WAIT_S,
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with httpx.Client(base_url=cluster.url, timeout=WAIT_S, trust_env=False) as client:
        yield client


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_a_router_that_listens_everywhere_is_reached_on_loopback(host, address, tmp_path):
    config = cluster_config(router={"host": host})
    cluster = Cluster(config, tmp_path, print, is_whole=True, api_key=None, operator_key=None)
    assert cluster.url == f"http://{address}:0"


def test_a_router_that_cannot_be_told_of_an_engine_is_complained_of_once(tmp_path, caplog):
    config = cluster_config()
    cluster = Cluster(config, tmp_path, print, is_whole=True, api_key=None, operator_key=None)
    process = cast(Child, SimpleNamespace(host=""))
    engine = RunningEngine(config.decode[0], "decode", process)
    for _ in range(3):
        cluster._enter(engine)  # there is no router at port 0
    (line,) = [one for one in caplog.records if "is not entered yet" in one.getMessage()]
    assert "'d0'" in line.getMessage()


@pytest.mark.usefixtures("cluster")
def test_every_part_tells_what_it_does_while_it_starts(said):
    parts = {part for part, _, _ in said}
    assert {"model", "p0", "d0"} <= parts
    assert ("p0", "ready", 1.0) in said
    assert all(0.0 <= done <= 1.0 for _, _, done in said)


@pytest.mark.smoke
def test_a_rank_that_compiles_kernels_is_shown_as_progress_of_its_engine():
    log = logging.getLogger("ranks of a test")
    theirs, ours = os.pipe()
    with os.fdopen(theirs, "rb") as pipe:
        with os.fdopen(ours, "wb"), Reporter(ours).telling(log, "some.module: "):
            log.warning("[prefill-0 rank 0] INFO some.module: compiling kernels")
            log.warning("[prefill-0 rank 0] INFO other.module: not of interest")
        assert [json.loads(line)["doing"] for line in pipe] == ["compiling kernels"]
    log.warning("some.module: after the start")
    assert not log.handlers


def test_openai_client_streams_a_chat_whose_tokens_are_the_undivided_engines(cluster):
    import openai
    import torch

    from kvferry.config import EngineConfig
    from kvferry.engine.builder import build_engine
    from kvferry.engine.messages import SamplingParams
    from kvferry.router.answer import TextCodec

    question: list[Any] = [{"role": "user", "content": "What is a ferry? " * 6}]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=question,
            stream=True,
            temperature=0,
            max_completion_tokens=24,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        chunks: list[Any] = list(stream)  # with fields that OpenAI's chunks have not
    tokens = [id for chunk in chunks for choice in chunk.choices for id in choice.token_ids]
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)

    codec = TextCodec.open(cluster.model_folder)
    prompt = codec.encode_chat(question)
    undivided = EngineConfig(name="one", kv_transfer_config={}, num_blocks=32)
    torch.set_num_threads(1)
    with build_engine(
        undivided, cluster.model_folder, dtype="float64", executor="inprocess", connect=False
    ) as engine:
        (expected,) = engine.generate([prompt], SamplingParams(max_tokens=24))
    assert tokens == expected.token_ids
    assert text == codec.decode(expected.token_ids)
    assert chunks[-1].usage.prompt_tokens == len(prompt)
    assert chunks[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("bad", [{"seed": 2**64}, {"stop_token_ids": [2**64]}])
def test_a_request_that_cannot_be_sent_to_the_ranks_ends_no_engine(cluster, client, bad):
    for url in (cluster.url, *(engine.url for engine in cluster.engines)):
        body = {"prompt": [1, 2, 3], "max_tokens": 3, **bad}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False)
        assert response.status_code == 400, response.text
        assert "18446744073709551616" in response.json()["error"]["message"]

    assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3}).is_success
    assert cluster.deaths == []


NONSENSE = [
    {"do_remote_prefill": True, "ticket": "\x00" * 100, "remote_port": 2**64},
    {"do_remote_prefill": True, "ticket": 2**64, "remote_block_ids": [-1, 2**70]},
    {"do_remote_prefill": 1e300, "do_remote_decode": 2**64, "remote_engine_id": "\x1b[2J"},
    {"do_remote_decode": True, "keep_first_token": [[2**64]]},
]


@pytest.mark.parametrize("params", NONSENSE)
def test_transfer_parameters_that_make_no_sense_end_no_engine(cluster, client, params):
    for engine in cluster.engines:
        body = {"prompt": [1, 2, 3], "max_tokens": 3, "kv_transfer_params": params}
        response = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WAIT_S)
        assert response.status_code in (200, 400, 500), response.text
        assert httpx.get(f"{engine.url}/health", timeout=WAIT_S).status_code == 200

    assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3}).is_success
    assert cluster.deaths == []


def test_kv_that_arrived_is_the_kv_that_was_lent(cluster, client):
    demo = load_example().acts
    prompts = [demo.Prompt("short", "Why?"), demo.Prompt("longer", "Tell me about tides. " * 12)]
    import asyncio

    answers = asyncio.run(demo.send_all(cluster, prompts, 4, lambda _answer: None))
    assert [answer.error for answer in answers] == ["", ""]
    records = demo.fetch_records(cluster, answers)
    references = [demo.Reference(answer.token_ids, [], 0) for answer in answers]

    results = demo.compare(references, answers, records)

    assert all(result.ok for result in results)
    assert all(result.nbytes > 0 for result in results)
    assert results[1].tokens_moved > results[0].tokens_moved
    assert all(result.decode.num_external_tokens > 0 for result in results)


def test_seeded_sampling_does_not_depend_on_the_division(client):
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": 11}

    first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))

    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["choices"][0]["text"] != ""


def test_a_snapshot_of_the_cluster_tells_of_its_pair_and_a_timeline_of_both_engines(
    cluster, client
):
    body = {"prompt": "Look at the cluster", "max_tokens": 5}
    request_id = client.post("/v1/completions", json=body).headers["x-request-id"]

    stream = RouterClient(cluster.url, None).watch()
    snapshot = next(one for one in stream if one.pairs and not any(e.untold for e in one.engines))
    stream.close()
    found = client.get(f"/kvferry/requests/{request_id}").json()

    assert [one.name for one in snapshot.engines] == [engine.name for engine in cluster.engines]
    assert all(one.blocks and one.running is not None for one in snapshot.engines)
    (pair,) = snapshot.pairs
    assert pair.loaded_bytes > 0
    assert pair.transport
    assert request_id in [one.request_id for one in snapshot.requests]
    parts = {(row["engine"], row["part"]["name"]) for row in found["rows"]}
    prefill, decode = (one.engine_id for one in snapshot.engines)
    assert {(prefill, "prefill"), (prefill, "held"), (decode, "read")} <= parts


def test_metrics_of_an_engine_tell_of_loads(cluster, client):
    client.post("/v1/completions", json={"prompt": "A new prompt", "max_tokens": 3})
    url = next(engine.url for engine in cluster.engines if engine.role == "decode")

    metrics = httpx.get(f"{url}/metrics", trust_env=False, timeout=WAIT_S).text

    assert "kvferry_engine_transfer_bytes_total" in metrics
    assert 'kvferry_engine_prompt_tokens_total{source="peer"}' in metrics


@pytest.mark.slow
def test_an_engine_whose_rank_dies_is_reported_and_comes_back_and_the_end_is_clean(cache, tmp_path):
    cluster = Cluster.open(cluster_config(prefill={"tp": 1}), logs=tmp_path, timeout_s=WAIT_S)
    try:
        everything = processes_of(cluster)
        pids = {process.pid for process in everything}
        assert segments_of(pids), "the prefill engine's caches lie in shared memory"
        decode = next(engine for engine in cluster.engines if engine.role == "decode")
        assert isinstance(decode.process, ChildProcess)
        rank = next(
            child
            for child in psutil.Process(decode.process.pid).children(recursive=True)
            if "kvferry.engine.worker_process" in " ".join(child.cmdline())
        )
        rank.send_signal(signal.SIGKILL)

        error = cluster.wait(WAIT_S)

        assert isinstance(error, WorkerDiedError)
        assert "d0" in str(error)
        assert "rank 0" in str(error)
        assert "SIGKILL" in str(error)
        assert "perhaps by the OOM killer: see dmesg" in str(error)
        assert cluster.can_serve
        with httpx.Client(base_url=cluster.url, timeout=WAIT_S, trust_env=False) as client:
            # The prefill engine still answers what it can answer alone.
            assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).is_success
            response = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5})
            assert response.status_code == 503
            assert "'d0'" in response.json()["error"]["message"]

            def answers():
                assert cluster.wait(0.5) is None
                asked = {"prompt": "Hi", "max_tokens": 5}
                return client.post("/v1/completions", json=asked).is_success

            until(answers, what="an answer")
        everything += processes_of(cluster)
        # Who is ended from outside without a failure stays so.
        decode.process.terminate()
        cluster.wait(WAIT_S)
        assert cluster.wait(2) is None
        assert not cluster.can_serve
    finally:
        cluster.close()
    psutil.wait_procs(everything, timeout=WAIT_S)
    assert [process for process in everything if process.is_running()] == []
    assert segments_of(pids) == []


@pytest.mark.slow
def test_children_end_when_the_launcher_is_killed(cache, tmp_path):
    """The launcher runs in a process of its own here, and gets no chance to clean up."""
    import subprocess
    import sys

    script = (
        "import sys, time\n"
        "from kvferry.cluster.launcher import Cluster\n"
        "from kvferry.config import load_cluster\n"
        "cluster = Cluster.open(load_cluster(sys.argv[1]), logs=sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "time.sleep(300)\n"
    )
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[model]\nsource = "tiny"\n[router]\nport = 0\n'
        '[[prefill]]\nname = "p0"\nnum_blocks = 32\nkv_transfer_config = '
        '{kv_connector = "PullConnector", kv_role = "kv_producer", kv_port = 0}\n'
        '[[decode]]\nname = "d0"\nnum_blocks = 32\nkv_transfer_config = '
        '{kv_connector = "PullConnector", kv_role = "kv_consumer", kv_port = 0}\n'
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(file), str(tmp_path / "logs")], stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        everything = psutil.Process(launcher.pid).children(recursive=True)
        assert len(everything) >= 5
        launcher.kill()
    _, alive = psutil.wait_procs(everything, timeout=WAIT_S)
    assert alive == []
    assert segments_of({process.pid for process in everything}) == []


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.fixture
def no_start(monkeypatch):
    """Fails the test when a process is started."""

    def start(*args, **_kwargs):
        raise AssertionError(f"started {args}")

    monkeypatch.setattr("kvferry.cluster.launcher.ChildProcess.start", start)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Folder in which temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def transfer(role, port=0, **extra):
    return {
        "kv_connector": "PullConnector",
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": extra,
    }


def keyed(prefill, decode):
    """A cluster whose two engines have these extra keys."""
    return cluster_config(
        prefill={"kv_transfer_config": transfer("kv_producer", **prefill)},
        decode={"kv_transfer_config": transfer("kv_consumer", **decode)},
    )


def test_a_port_in_use_is_named_with_its_engine(no_start, taken_port):
    with pytest.raises(PortInUseError, match=rf"^engine 'd0': port {taken_port} .*in use"):
        Cluster.open(cluster_config(decode={"port": taken_port}))


def test_a_router_port_in_use_is_named(no_start, taken_port):
    with pytest.raises(PortInUseError, match=rf"^router: port {taken_port} .*in use"):
        Cluster.open(cluster_config(router={"port": taken_port}))


def test_a_control_port_in_use_is_named_with_its_engine(no_start, taken_port):
    config = cluster_config(prefill={"kv_transfer_config": transfer("kv_producer", taken_port)})
    with pytest.raises(PortInUseError, match=rf"^engine 'p0': kv_port {taken_port} on 127.0.0.1"):
        Cluster.open(config)


def test_a_control_port_is_tried_on_the_connectors_own_host(taken_port):
    from kvferry.cluster.preflight import check_cluster

    config = cluster_config(
        prefill={"kv_transfer_config": transfer("kv_producer", taken_port, host="127.0.0.2")}
    )
    check_cluster(config)
    with socket.create_server(("127.0.0.2", taken_port)), pytest.raises(PortInUseError):
        check_cluster(config)


def test_all_ports_in_use_are_one_error(no_start, taken_port):
    with socket.create_server(("127.0.0.1", 0)) as second:
        other = second.getsockname()[1]
        config = cluster_config(router={"port": other}, prefill={"port": taken_port})
        message = rf"(?s)router: port {other}.*'p0': port {taken_port}"
        with pytest.raises(PortInUseError, match=message):
            Cluster.open(config)


@pytest.mark.slow
def test_a_port_that_is_taken_after_the_check_is_named_once(
    cache, tmp_path, taken_port, monkeypatch
):
    monkeypatch.setattr("kvferry.cluster.launcher.check_cluster", lambda *_args, **_options: None)
    config = cluster_config(router={"port": taken_port})
    with pytest.raises(PortInUseError, match=rf"^router: port {taken_port} "):
        Cluster.open(config, logs=tmp_path)


@pytest.mark.parametrize("change", [{"pp": 200}, {"layout": "HMD"}])
def test_a_shape_that_does_not_fit_the_model_is_found_before_an_engine_starts(
    cache, temporary, change
):
    said = []
    with pytest.raises(ConfigError, match=r"^here.toml: engine 'd0': "):
        Cluster.open(
            cluster_config(decode=change),
            where="here.toml",
            progress=lambda part, *_: said.append(part),
        )
    assert set(said) <= {"model"}
    assert list(temporary.iterdir()) == [], "nobody needs these logs"


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        ({"cluster_key": "k" * 32}, {}, "engine 'p0' has a cluster key, but engine 'd0' has none"),
        ({}, {"cluster_key": "k" * 32}, "engine 'd0' has a cluster key, but engine 'p0' has none"),
        ({"cluster_key": "k" * 32}, {"cluster_key": "j" * 32}, "engine 'd0' has another one"),
        ({"cluster_key": "short"}, {"cluster_key": "short"}, "engine 'p0': .* has 5 bytes"),
        ({"cluster_key_file": "/no/such"}, {}, "engine 'p0': .*cannot be read"),
    ],
)
def test_cluster_keys_that_differ_are_found_before_anything_starts(
    no_start, temporary, prefill, decode, problem
):
    with pytest.raises(ConfigError, match=problem):
        Cluster.open(keyed(prefill, decode))
    assert list(temporary.iterdir()) == []


def test_cluster_keys_are_compared_by_value(tmp_path):
    from kvferry.cluster.preflight import check_cluster

    file = tmp_path / "key"
    file.write_text("k" * 32 + "\n")
    check_cluster(keyed({"cluster_key_file": str(file)}, {"cluster_key": "k" * 32}))


def test_an_interrupted_start_leaves_no_logs_behind(cache, temporary):
    def interrupt(part, *_):
        if part == "p0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cluster.open(cluster_config(prefill={"tp": 1}), progress=interrupt)
    assert list(temporary.iterdir()) == []


def test_a_start_that_failed_for_another_reason_names_its_logs(cache, temporary, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", os.fspath(temporary))
    with pytest.raises(WorkerDiedError) as caught:
        Cluster.open(cluster_config())
    (folder,) = temporary.iterdir()
    assert caught.value.__notes__ == [f"logs: {folder}"]


def test_a_process_shows_its_name_to_ps_and_marks_its_start_in_the_log(cluster):
    for engine in cluster.engines:
        pid = engine.process.pid
        assert psutil.Process(pid).cmdline()[-1] == engine.name
        first = (cluster.logs / f"{engine.name}.log").read_text().splitlines()[0]
        assert first.startswith(f"=== start of engine {engine.name!r}, process {pid}, 20")


def test_a_death_is_told_without_the_lines_of_earlier_starts(tmp_path, monkeypatch):
    import queue

    from kvferry.config import ModelConfig
    from kvferry.serving.process import ChildProcess

    log = tmp_path / "x.log"
    log.write_text("an error of yesterday\n")
    monkeypatch.setenv("PYTHONHOME", os.fspath(tmp_path))
    settings = ModelConfig(source="tiny")
    process = ChildProcess.start("x", "convert", settings, log, queue.Queue())
    process.reap(WAIT_S)

    assert "exit code 1" in str(process.error())
    assert "yesterday" not in str(process.error())
    assert "=== start" not in str(process.error())


def test_a_kill_from_outside_points_at_the_oom_killer(tmp_path):
    import queue

    from kvferry.config import ModelConfig

    settings = ModelConfig(source="tiny")
    process = ChildProcess.start("x", "convert", settings, tmp_path / "x.log", queue.Queue())
    os.kill(process.pid, signal.SIGKILL)
    process.reap(WAIT_S)

    assert "signal SIGKILL; killed from outside, perhaps by the OOM killer" in str(process.error())


def test_a_child_that_dies_before_it_has_its_settings_is_reaped(tmp_path, monkeypatch):
    import queue
    import subprocess

    from kvferry.config import ModelConfig

    class DeadAtOnce(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(["false"], **options)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", DeadAtOnce)
    settings = ModelConfig(source="tiny")
    process = ChildProcess.start("x", "convert", settings, tmp_path / "x.log", queue.Queue())
    process.reap(WAIT_S)

    assert "ended with exit code 1" in str(process.error())


def test_a_misspelt_extra_key_is_found_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"'p0'.*did you mean 'transport'"):
        Cluster.open(cluster_config(extra={"transprot": "shm"}), logs=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_one_message(cache, tmp_path):
    with pytest.raises(ModelError, match="is neither 'smollm2', one of tiny, "):
        Cluster.open(cluster_config(model={"source": "/no/such/model"}), logs=tmp_path)


def test_a_child_that_cannot_start_quotes_its_log(cache, tmp_path, monkeypatch):
    # Python itself fails to start: nothing is reported over the pipe.
    monkeypatch.setenv("PYTHONHOME", os.fspath(tmp_path))
    with pytest.raises(
        WorkerDiedError, match=r"model \(process \d+\) ended with exit code 1\n  \|"
    ):
        Cluster.open(cluster_config(), logs=tmp_path / "logs")
