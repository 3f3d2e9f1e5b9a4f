"""What the commands print, and how they fail."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from kvferry import __version__
from kvferry.control.client import fetch_status
from kvferry.errors import PeerLostError
from kvferry.integrations import releases
from kvferry.serving import process
from kvferry.topology.description import PROTOCOL_MAX, PROTOCOL_MIN

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def test_version_tells_the_protocol_and_the_engines_too(kvferry, monkeypatch):
    monkeypatch.setattr(releases, "packages_distributions", lambda: {"vllm": ["numpy", "numpy"]})
    assert kvferry("--version").out.splitlines() == [
        f"kvferry {__version__}",
        f"control protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}",
        f"vLLM {releases.range_text(releases.VLLM)}; here: numpy {metadata.version('numpy')}",
        f"SGLang {releases.range_text(releases.SGLANG)}; not installed here",
    ]


def test_version_says_which_engines_are_not_installed(kvferry, monkeypatch):
    monkeypatch.setattr(releases, "packages_distributions", dict)
    lines = kvferry("--version").out.splitlines()[2:]
    assert len(lines) == len(releases.ENGINES)
    assert all(line.endswith("; not installed here") for line in lines)


def test_the_command_line_starts_without_heavy_modules():
    code = (
        "import sys, kvferry.cli.app\n"
        "print([m for m in ('torch', 'zmq', 'numba', 'numpy', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_commands_are_listed_without_arguments(kvferry):
    outcome = kvferry("--help")
    for command in ("serve", "demo", "plan", "check", "status", "keys"):
        assert command in outcome.out


# ---- errors -----------------------------------------------------------------------------------


def test_a_missing_file_is_one_message(kvferry, tmp_path):
    outcome = kvferry("plan", tmp_path / "nowhere.toml")

    assert outcome.code == 2
    assert (
        outcome.err
        == f"kvferry: {tmp_path}/nowhere.toml: cannot be read: No such file or directory\n"
    )
    assert outcome.out == ""


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_an_unknown_key_names_the_nearest_known_one(kvferry, cluster_file, command):
    file = cluster_file(('layout = "HND"', 'layuot = "HND"'))

    outcome = kvferry(command, file)

    assert outcome.code == 2
    assert "[[prefill]] number 1: unknown key 'layuot'; did you mean 'layout'?" in outcome.err
    assert "Traceback" not in outcome.err


def test_brackets_of_a_message_are_text_and_no_markup(kvferry, cluster_file):
    outcome = kvferry("plan", cluster_file(("[model]", "[modle]")))

    assert "the section [model] is missing" in outcome.err or "'modle'" in outcome.err


def test_an_extra_key_is_checked_before_anything_starts(kvferry, cluster_file):
    file = cluster_file(
        (
            'kv_role = "kv_producer"',
            'kv_role = "kv_producer"\nkv_connector_extra_config = {hsot = 1}',
        )
    )

    outcome = kvferry("serve", file)

    assert outcome.code == 2
    assert f"{file}: engine 'p0'" in outcome.err
    assert "did you mean 'host'?" in outcome.err
    assert outcome.out == ""


def test_an_unknown_connector_is_answered_with_the_installed_ones(kvferry, cluster_file):
    outcome = kvferry("serve", cluster_file(('"PullConnector"', '"PulConnector"')))

    assert outcome.code == 2
    assert "PulConnector" in outcome.err
    assert "PullConnector" in outcome.err


def test_a_misspelt_table_is_named_when_it_makes_the_toml_invalid(kvferry, cluster_file):
    file = cluster_file()
    decode = file.read_text().partition("[[decode]]")[2]
    file.write_text(f"{file.read_text()}[[decodes]]{decode}")

    outcome = kvferry("plan", file)

    assert outcome.code == 2
    assert "there is a table 'decodes', did you mean 'decode'?" in outcome.err


def test_a_missing_role_is_named(kvferry, cluster_file):
    outcome = kvferry("serve", cluster_file(('kv_role = "kv_producer"\n', "")))

    assert outcome.code == 2
    assert "kv_role is missing" in outcome.err


def test_debug_shows_the_traceback(kvferry, tmp_path):
    from kvferry.errors import ConfigError

    with pytest.raises(ConfigError):
        kvferry("--debug", "plan", tmp_path / "nowhere.toml")


def test_a_layout_that_does_not_exist_names_the_engine(kvferry, cluster_file):
    outcome = kvferry("plan", cluster_file(('layout = "HND"', 'layout = "HMD"')))

    assert outcome.code == 2
    assert "engine 'p0'" in outcome.err
    assert "HMD" in outcome.err


# ---- plan -------------------------------------------------------------------------------------


def test_plan_names_a_source_that_cannot_be_looked_at(kvferry, cluster_file):
    outcome = kvferry("plan", cluster_file(('source = "tiny"', f'source = "{"a" * 5000}"')))
    assert (outcome.code, outcome.out) == (2, "")
    assert "File name too long; name a folder or a GGUF file" in outcome.err


def test_plan_covers_every_layer_and_head_of_every_decode_rank(kvferry, cluster_file):
    outcome = kvferry("plan", cluster_file(), "--tokens", "100", "--json")

    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    (pair,) = document["pairs"]
    assert (pair["prefill"], pair["decode"], document["tokens"]) == ("p0", "d0", 100)
    cells = [
        (transfer["decode_rank"], layer, head)
        for transfer in pair["transfers"]
        for layer in transfer["layers"]
        for head in transfer["heads"]
    ]
    # Four layers over two stages, three heads over three prefill ranks; 16 float64 per head.
    assert sorted(cells) == [(layer // 2, layer, head) for layer in range(4) for head in range(3)]
    assert sum(transfer["nbytes"] for transfer in pair["transfers"]) == 4 * 3 * 2 * 16 * 8 * 100
    for transfer in pair["transfers"]:
        assert transfer["segments_ordered"] <= transfer["segments_shuffled"] <= transfer["rows"]


def test_plan_prints_a_table_per_pair(kvferry, cluster_file):
    text = cluster_file().read_text()
    second = text[text.index("[[decode]]") :].replace("d0", "d1").replace("pp = 2", "pp = 1")
    file = cluster_file()
    file.write_text(text + second)

    outcome = kvferry("plan", file, "--tokens", "64")

    assert "d0 reads 64 tokens from p0" in outcome.out
    assert "d1 reads 64 tokens from p0" in outcome.out
    totals = [line for line in outcome.out.splitlines() if line.startswith("│ all")]
    assert [line.split("│")[5].strip() for line in totals] == ["192.0 KiB"] * 2  # all their cells


# ---- keys -------------------------------------------------------------------------------------


def test_keys_are_readable_by_the_owner_alone_and_by_the_connector(kvferry, tmp_path):
    from kvferry.config import parse_struct
    from kvferry.connectors.pull.config import PullConfig

    folder = tmp_path / "keys"
    outcome = kvferry("keys", folder)

    assert outcome.code == 0, outcome.err
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    values = {
        "cluster_key_file": str(folder / "cluster.key"),
        "curve_keys": str(folder / "curve.json"),
    }
    assert all(f'{key} = "{value}"' in outcome.out for key, value in values.items())
    config = parse_struct(PullConfig, values, "extra")
    key = config.key()
    assert key is not None
    assert len(key) >= 32
    assert config.curve() is not None
    assert (
        msgspec.json.decode((folder / "curve.json").read_bytes())["secret_key"] not in outcome.out
    )


def test_keys_are_named_by_their_absolute_paths(kvferry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    outcome = kvferry("keys")

    assert f'cluster_key_file = "{tmp_path}/kvferry-keys/cluster.key"' in outcome.out


def test_keys_are_never_overwritten(kvferry, tmp_path):
    kvferry("keys", tmp_path)
    before = (tmp_path / "cluster.key").read_bytes()

    outcome = kvferry("keys", tmp_path)

    assert outcome.code == 2
    assert "exists" in outcome.err
    assert (tmp_path / "cluster.key").read_bytes() == before


# ---- status -----------------------------------------------------------------------------------


@pytest.fixture
def control():
    from kvferry.control.leases import LeaseTable
    from kvferry.control.server import ControlServer

    leases = LeaseTable(max_blocks=100, duration_s=30.0)
    server = ControlServer(
        engine_id="p7", incarnation="abcdef0123456789", role="kv_producer", leases=leases
    )
    with server:
        yield server


def test_status_shows_leases_and_errors(kvferry, control):
    control.leases.grant("request-1", 12)
    control.note_error("load", "a [very] bad thing")

    outcome = kvferry("status", f"127.0.0.1:{control.port}")

    assert outcome.code == 0, outcome.err
    assert "p7 (kv_producer), starting" in outcome.out
    assert f"kvferry {__version__}" in outcome.out
    assert "no peers" in outcome.out
    row = next(line for line in outcome.out.splitlines() if "request-1" in line)
    assert "12" in row
    assert "nobody yet" in row
    assert "a [very] bad thing" in outcome.out


@pytest.mark.parametrize(
    ("serving_engine", "shown"),
    [("SGLang 0.5.23", f"kvferry {__version__} in SGLang 0.5.23"), ("kvferry", "kvferry")],
)
def test_status_shows_the_serving_engine(kvferry, control, monkeypatch, serving_engine, shown):
    report = fetch_status("127.0.0.1", control.port)
    report = msgspec.structs.replace(report, serving_engine=serving_engine)
    monkeypatch.setattr("kvferry.cli.status.fetch_status", lambda *_: report)

    outcome = kvferry("status", f"127.0.0.1:{control.port}")

    assert outcome.code == 0, outcome.err
    line = " ".join(outcome.out.splitlines()[:2])
    assert shown in line
    assert ("in SGLang" in line) == (serving_engine != "kvferry")


def test_drain_says_whether_an_engine_may_be_stopped(kvferry, control):
    address = f"127.0.0.1:{control.port}"
    control.set_open(lambda: 0)
    outcome = kvferry("drain", address)
    assert (outcome.code, outcome.out) == (
        0,
        f"{address} may be stopped: it loads and lends nothing\n",
    )

    control.set_open(lambda: 2)
    control.leases.grant("request-1", 12)
    outcome = kvferry("drain", address)
    assert (outcome.code, outcome.out) == (1, f"{address} has 2 open requests, 1 lease\n")


def test_drain_waits_until_an_engine_may_be_stopped(kvferry, control, monkeypatch):
    counts = iter([2, 2, 1, 0])
    control.set_open(lambda: next(counts))
    monkeypatch.setattr("kvferry.cli.drain.POLL_S", 0.0)
    address = f"127.0.0.1:{control.port}"
    outcome = kvferry("drain", address, "--wait")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        f"{address} has 2 open requests",
        f"{address} has 1 open request",
        f"{address} may be stopped: it loads and lends nothing",
    ]


def test_drain_goes_on_while_an_engine_gives_no_answer(kvferry, control, monkeypatch):
    address = f"127.0.0.1:{control.port}"
    control.set_open(lambda: 0)
    errors = iter([PeerLostError("no answer in 10 s"), PeerLostError("no answer in 10 s")])

    def late(*args):
        if error := next(errors, None):
            raise error
        return fetch_status(*args)

    monkeypatch.setattr("kvferry.cli.drain.POLL_S", 0.0)
    monkeypatch.setattr("kvferry.cli.drain.fetch_status", late)
    outcome = kvferry("drain", address, "--wait")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        f"{address} gives no answer (no answer in 10 s)",
        f"{address} may be stopped: it loads and lends nothing",
    ]

    errors = iter([PeerLostError("no answer in 10 s")])
    outcome = kvferry("drain", address)
    assert (outcome.code, outcome.out) == (2, "")
    assert "no answer in 10 s" in outcome.err


def test_drain_ends_when_the_engine_has_ended(kvferry, control):
    control.set_open(lambda: 2)
    control.close()
    outcome = kvferry("drain", f"127.0.0.1:{control.port}", "--wait")
    assert outcome.code == 2


def test_drain_says_what_an_engine_still_has_when_time_is_up(kvferry, control):
    control.set_open(lambda: 2)
    outcome = kvferry("drain", f"127.0.0.1:{control.port}", "--wait", "--timeout", "0")
    assert outcome.code == 2
    assert "still has 2 open requests after 0 s; it goes on" in outcome.err


def test_an_engine_that_does_not_tell_its_requests_is_not_called_drained(kvferry, control):
    outcome = kvferry("drain", f"127.0.0.1:{control.port}")
    assert outcome.code == 2
    assert "p7: does not tell its open requests" in outcome.err
    assert "kvferry status" in outcome.err


def test_what_a_stranger_says_forges_no_row_and_moves_no_cursor(kvferry, control):
    said = "gone\n| lease | decode-0 | held |\x1b[2J\x1b[31m"
    control.leases.grant(said, 12)
    control.note_error(said, said)

    outcome = kvferry("status", f"127.0.0.1:{control.port}")

    assert outcome.code == 0, outcome.err
    assert "\x1b" not in outcome.out
    assert not any(line.startswith("| lease") for line in outcome.out.splitlines())


def test_status_as_json_is_the_report(kvferry, control):
    from kvferry.control.messages import StatusReport

    control.leases.grant("request-1", 12)

    outcome = kvferry("status", f"127.0.0.1:{control.port}", "--json")

    report = msgspec.json.decode(outcome.out, type=StatusReport)
    assert report.engine_id == "p7"
    assert [lease.num_blocks for lease in report.leases] == [12]


def test_status_of_nobody_is_one_message(kvferry):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        outcome = kvferry("status", f"127.0.0.1:{port}", "--timeout", "0.3")

    assert outcome.code == 2
    assert f"is {port} the engine's kv_port?" in outcome.err


@pytest.mark.parametrize("address", ["localhost", "host:port", "host:99999", "host:-1"])
def test_status_wants_an_address(kvferry, address):
    outcome = kvferry("status", address)

    assert outcome.code == 2
    assert "HOST:PORT" in outcome.err


# ---- serve ------------------------------------------------------------------------------------


def test_notes_of_an_error_are_printed(kvferry, cluster_file, monkeypatch):
    from kvferry.errors import EngineError

    def fail(*_args, **_kwargs):
        error = EngineError("it failed")
        error.add_note("logs: /somewhere")
        raise error

    monkeypatch.setattr("kvferry.cluster.launcher.Cluster.open", fail)

    outcome = kvferry("serve", cluster_file())

    assert outcome.code == 2
    assert outcome.err == "kvferry: it failed\n  logs: /somewhere\n"


@pytest.fixture
def _signals():
    """Puts the handlers back that a command has replaced."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", [("serve",), ("engine", "p0")])
def test_a_signal_before_anything_is_served_ends_with_130(
    kvferry, cluster_file, monkeypatch, command, number
):
    def interrupted(*_args, **_kwargs):
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not arrive")

    monkeypatch.setattr("kvferry.cluster.launcher.Cluster.open", interrupted)
    name, *more = command
    outcome = kvferry(name, cluster_file(), *more)

    assert outcome.code == 130
    assert outcome.out == ""


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("during", ["url", "wait"])
def test_a_signal_to_a_cluster_that_serves_ends_with_0(
    kvferry, cluster_file, monkeypatch, during, number
):
    class Serving(contextlib.ExitStack):
        """A cluster that serves; the signal comes while its address is told, or later."""

        engines, logs, can_serve = (), "/logs", True

        @property
        def url(self):
            self.at("url")
            return "http://a"

        def wait(self, _timeout_s):
            self.at("wait")

        def at(self, place):
            if place == during:
                os.kill(os.getpid(), number)
                raise AssertionError("the signal did not arrive")

        def remove_logs(self):
            closed.append(self)

    closed: list[Serving] = []
    monkeypatch.setattr("kvferry.cluster.launcher.Cluster.open", lambda *_, **__: Serving())
    outcome = kvferry("serve", cluster_file())

    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("stopping\n")
    assert closed


def test_serve_says_which_folder_it_cannot_write(kvferry, cluster_file, monkeypatch):
    outcome = kvferry("serve", cluster_file(), "--logs", "/dev/null/logs")
    assert outcome.code == 2
    assert outcome.err == (
        "kvferry: --logs: /dev/null/logs cannot be written: Not a directory; name another\n"
    )
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    monkeypatch.setattr(process, "SHM_DIR", Path("/nowhere"))
    outcome = kvferry("serve", cluster_file())
    assert outcome.code == 2
    assert "temporary files: No usable temporary directory found" in outcome.err
    assert "set TMPDIR" in outcome.err


def test_temporary_files_of_a_container_go_to_dev_shm(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    monkeypatch.setattr(process, "SHM_DIR", tmp_path)
    monkeypatch.setenv("TMPDIR", "/dev/null")
    assert process.temporary_folder() == tempfile.gettempdir() == str(tmp_path)
    assert os.environ["TMPDIR"] == str(tmp_path)  # which children inherit


@pytest.mark.processes
@pytest.mark.slow
def test_a_model_that_cannot_be_kept_is_converted_for_one_start(cluster_file, tmp_path):
    temporary, logs = tmp_path / "temporary", tmp_path / "logs"
    temporary.mkdir()
    environment = {**os.environ, "KVFERRY_CACHE": "/dev/null", "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli", "serve", str(cluster_file()), "--logs", str(logs)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as serving:
        assert serving.stdout is not None
        assert any(line.startswith("OpenAI API at ") for line in serving.stdout)
        assert list(temporary.glob("kvferry-models-*/models/tiny-0-*/model.safetensors"))
        serving.send_signal(signal.SIGTERM)
    assert not list(temporary.glob("kvferry-models-*"))
    assert "set KVFERRY_CACHE" in (logs / "model.log").read_text()


def test_prepare_compiles_and_converts_what_a_start_would_wait_for(
    kvferry, cluster_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    outcome = kvferry("prepare", cluster_file())
    assert outcome.code == 0, outcome.err
    assert "the kernels are compiled" in outcome.out
    assert list((tmp_path / "cache/models").glob("tiny-0-*/model.safetensors"))


def test_prepare_fails_where_nothing_can_be_kept(kvferry, monkeypatch):
    monkeypatch.setattr("kvferry.layouts.compiled.is_kept", lambda: False)
    outcome = kvferry("prepare")
    assert outcome.code == 2
    assert "compiled kernels cannot be kept" in outcome.err


def test_the_help_of_demo_names_the_folder_of_prompts_that_is_read(kvferry, tmp_path):
    (shown,) = [line for line in kvferry("demo", "--help").out.splitlines() if "--prompts" in line]
    assert "FOLDER" in shown
    assert "Folder of prompts to send: a file *.txt for each." in shown
    (tmp_path / "prompts.json").write_text('["Why?"]')

    outcome = kvferry("demo", "--prompts", tmp_path)

    assert outcome.code == 2
    assert "holds no prompts; put one text file per prompt there" in " ".join(outcome.err.split())


@pytest.mark.processes
@pytest.mark.slow
def test_serve_answers_and_ends_cleanly_on_sigterm(cluster_file, tmp_path):
    import openai

    environment = {**os.environ, "KVFERRY_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"}
    with subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli", "serve", str(cluster_file())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        lines = []
        url = logs = ""
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("logs: "):
                logs = line.removeprefix("logs: ").strip()
            if line.startswith("OpenAI API at "):
                url = line.split()[3]
                break
        assert url, "".join(lines)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hello"}],
                stream=True,
                max_tokens=6,
            )
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert "stopping" in rest
    assert not Path(logs).exists(), "temporary logs are removed after a clean end"
