"""CURVE: who has no key gets no answer, whoever listens hears nothing."""

import socket
import threading

import msgspec
import pytest

from kvferry.config import parse_struct
from kvferry.control.client import fetch_status
from kvferry.control.options import ControlOptions, CurveKeys, make_keys
from kvferry.errors import ConfigError, PeerLostError
from kvferry.testing.waiting import WAIT_S


def with_keys(keys, **more):
    return ControlOptions(curve=keys, request_timeout_s=WAIT_S, **more)


def test_a_cluster_with_one_pair_of_keys_speaks(serve, describe):
    options = with_keys(make_keys())
    served = serve(options=options)
    description = describe("decode-0")
    client = served.client(description, options)
    client.handshake(served.address, description).result(WAIT_S)
    lease_id = served.grant()
    answer = served.finish(client, lease_id)
    assert answer.result(WAIT_S) == "held"
    assert fetch_status("127.0.0.1", served.server.port, WAIT_S, options.curve).ready


@pytest.mark.parametrize(
    ("servers", "clients"), [("keys", "none"), ("none", "keys"), ("keys", "others")]
)
def test_whoever_has_no_or_other_keys_gets_no_answer(serve, servers, clients):
    choices = {"keys": make_keys(), "others": make_keys(), "none": None}
    served = serve(options=with_keys(choices[servers]))
    with pytest.raises(PeerLostError):
        fetch_status("127.0.0.1", served.server.port, 2.0, choices[clients])
    assert fetch_status("127.0.0.1", served.server.port, WAIT_S, choices[servers]).ready


def test_knowing_the_servers_public_key_is_not_enough(serve):
    cluster, stranger = make_keys(), make_keys()
    served = serve(options=with_keys(cluster))
    stranger = msgspec.structs.replace(stranger, server_key=cluster.public_key)
    with pytest.raises(PeerLostError, match="allowed_keys"):
        fetch_status("127.0.0.1", served.server.port, WAIT_S, stranger)
    report = fetch_status("127.0.0.1", served.server.port, WAIT_S, cluster)
    assert report.counters["errors.curve"] == 1
    assert stranger.public_key in report.errors[0].message


def test_a_client_with_its_own_pair_is_admitted_by_name(serve):
    cluster, monitor = make_keys(), make_keys()
    allowed = msgspec.structs.replace(cluster, allowed_keys=(monitor.public_key,))
    served = serve(options=with_keys(allowed))
    monitor = msgspec.structs.replace(monitor, server_key=cluster.public_key)
    assert fetch_status("127.0.0.1", served.server.port, WAIT_S, monitor).ready


@pytest.mark.parametrize("encrypted", [False, True])
def test_with_keys_nothing_readable_crosses_the_wire(serve, describe, encrypted):
    options = with_keys(make_keys() if encrypted else None)
    served = serve(options=options)
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:
        address = f"127.0.0.1:{tap.getsockname()[1]}"
        thread = threading.Thread(target=relay, args=(tap, served.server.port, seen))
        thread.start()
        description = describe("decode-with-a-long-name")
        client = served.client(description, options)
        client.handshake(address, description).result(WAIT_S)
        client.close()
        thread.join(WAIT_S)
    assert (b"decode-with-a-long-name" in seen) is not encrypted
    assert (served.description.engine_id.encode() in seen) is not encrypted


def relay(tap, port, seen):
    """Carries one connection to the port and keeps what it carries."""
    with tap.accept()[0] as client, socket.create_connection(("127.0.0.1", port)) as server:

        def carry(source, sink):
            while data := source.recv(65536):
                seen.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        back = threading.Thread(target=carry, args=(server, client))
        back.start()
        carry(client, server)
        back.join()


def test_random_bytes_on_an_encrypted_port_harm_nobody(serve):
    options = with_keys(make_keys())
    served = serve(options=options)
    for number in range(50):
        with socket.create_connection(("127.0.0.1", served.server.port)) as raw:
            raw.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes([number]) * 500)
    assert fetch_status("127.0.0.1", served.server.port, WAIT_S, options.curve).ready


def test_a_key_of_the_wrong_length_is_named_without_being_shown():
    with pytest.raises(ConfigError, match="secret_key: a CURVE key is 40 characters") as raised:
        parse_struct(CurveKeys, {"public_key": "p" * 40, "secret_key": "hush"}, "curve")
    assert "hush" not in str(raised.value)


def test_a_misspelt_key_name_inside_the_options_is_an_error():
    values = {"curve": {"public_key": "p" * 40, "secret_key": "s" * 40, "allowed": []}}
    with pytest.raises(ConfigError, match="allowed"):
        parse_struct(ControlOptions, values, "extra")


def test_a_key_that_is_no_z85_is_a_config_error_on_both_ends(serve, describe):
    keys = CurveKeys(public_key="~" * 40, secret_key="~" * 40)
    with pytest.raises(ConfigError, match="kvferry keys"):
        serve(options=with_keys(keys))
    with pytest.raises(ConfigError, match="kvferry keys"):
        fetch_status("127.0.0.1", 1, WAIT_S, keys)


def test_the_secret_key_does_not_show_in_a_repr():
    keys = make_keys()
    assert keys.secret_key not in repr(ControlOptions(curve=keys))
