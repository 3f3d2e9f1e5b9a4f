"""Names with escape sequences and line feeds: refused in a config, escaped where peers send."""

import logging
from types import SimpleNamespace

import pytest

from kvferry.config import EngineConfig, KVTransferConfig, ModelConfig, parse_struct
from kvferry.errors import ConfigError
from kvferry.observe.records import TransferRecord
from kvferry.serving import metrics as metrics_module
from kvferry.serving.metrics import PEER_KEPT_S, EngineMetrics
from kvferry.testing.waiting import until

FORGED = "d0\x1b[2J\n| p9 | ready"
ESCAPED = "d0\\x1b[2J\\n| p9 | ready"


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (EngineConfig, {"name": FORGED, "kv_transfer_config": {}}, "name"),
        (
            KVTransferConfig,
            {"kv_connector": "C", "kv_role": "kv_both", "engine_id": FORGED},
            "engine_id",
        ),
        (ModelConfig, {"source": FORGED}, "source"),
    ],
)
def test_a_config_refuses_names_that_cannot_be_printed(kind, values, field):
    with pytest.raises(ConfigError, match="characters that cannot be printed") as raised:
        parse_struct(kind, values, "here")
    assert f"{field}: {FORGED!r}" in str(raised.value)


def test_a_log_has_no_forged_lines_and_no_escape_sequences():
    from kvferry.serving.process import LogFormatter

    record = logging.makeLogRecord({"msg": "peer %s left", "args": (FORGED,), "levelname": "INFO"})

    text = LogFormatter("%(levelname)s %(message)s").format(record)

    assert text == "INFO peer d0\\x1b[2J\n    | p9 | ready left"


def test_a_peers_name_is_escaped_in_metrics():
    record = TransferRecord(
        request_id="r",
        lease_id="l",
        rank=0,
        peer=FORGED,
        direction="recv",
        first_token=0,
        tokens=1,
        nbytes=8,
        copies=1,
        started=1.0,
        finished=2.0,
        ok=True,
    )
    metrics = EngineMetrics()
    metrics.count_transfer(record)

    text = metrics.render(None).decode()

    assert "\x1b" not in text
    assert "d0" in text


def test_what_an_engine_says_of_itself_is_escaped_and_cut(setup):
    setup.prefill[0].unwell = FORGED + "x" * 100_000
    until(lambda: not setup.client.get("/health").json()["engines"][0]["healthy"])

    said = setup.client.get("/health").json()["engines"][0]["last_error"]

    assert "\x1b" not in said
    assert len(said) < 5000


def test_the_labels_of_peers_that_nothing_is_loaded_from_any_more_are_dropped(monkeypatch):
    metrics = EngineMetrics()

    def load(peer, at):
        monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: at))
        metrics.count_transfer(
            TransferRecord(
                request_id="r",
                lease_id="l",
                rank=0,
                peer=peer,
                direction="recv",
                first_token=0,
                tokens=1,
                nbytes=3,
                started=1.0,
                finished=2.0,
                ok=True,
            )
        )
        return metrics.render(None).decode()

    load("gone", 0.0)
    load("here", 1.0)
    assert 'peer="gone"' in load("here", PEER_KEPT_S)
    text = load("new", PEER_KEPT_S + 1.0)
    assert 'peer="gone"' not in text
    assert 'kvferry_engine_transfer_bytes_total{peer="here"} 6.0' in text
    assert 'kvferry_engine_transfer_bytes_total{peer="gone"} 3.0' in load("gone", PEER_KEPT_S + 2)
