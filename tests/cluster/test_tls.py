"""Servers with https: whose certificates the router takes, and which mistakes it names."""

import datetime as dt
import ipaddress
import subprocess

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvferry.testing.waiting import WAIT_S, until
from tests.cli.test_router import COMMAND
from tests.cluster.conftest import router_process, running_router
from tests.cluster.streams import CHAT, CONTENT, END, Server

pytestmark = pytest.mark.processes

POD = "vllm.internal"
"""The only name in the certificate of one of the servers."""


def certified(subject, names=(), authority=None):
    """A key and its certificate, by an authority or, without one, by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    issuer, signer = (authority[1].subject, authority[0]) if authority else (name, key)
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), True)
    )
    if names:
        made = made.add_extension(x509.SubjectAlternativeName(names), False)
    return key, made.sign(signer, hashes.SHA256())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The authority's certificate, and what servers need for certificates of two names."""
    folder = tmp_path_factory.mktemp("tls")
    authority = certified("an authority of our own")
    (folder / "ca.pem").write_bytes(authority[1].public_bytes(Encoding.PEM))
    local = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    servers = {"address": [local], "name": [x509.DNSName(POD)]}
    for which, names in servers.items():
        key, own = certified("server", names, authority)
        (folder / f"{which}.pem").write_bytes(own.public_bytes(Encoding.PEM))
        (folder / f"{which}.key").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
    return folder


@pytest.fixture
def pair(servers, files, request):
    """The addresses of a prefill and a decode server with https."""
    which = request.param
    tls = {"ssl_certfile": files / f"{which}.pem", "ssl_keyfile": files / f"{which}.key"}
    both = [Server(), Server()]
    for each in both:
        each.goes_on.set()
    return [[servers.start(each.app(), **tls)] for each in both]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("pair", "options"),
    [
        ("address", ("--tls-ca", "ca.pem")),
        ("name", ("--tls-ca", "ca.pem", "--tls-server-name", POD)),
        ("name", ("--tls-no-check",)),
    ],
    indirect=["pair"],
)
def test_all_calls_to_servers_are_encrypted(pair, files, options, workers):
    told = [str(files / each) if each.endswith(".pem") else each for each in options]
    prefill, decode = pair
    with (
        running_router(prefill, decode, *told, "--workers", workers) as url,
        httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client,
    ):
        answer = client.post(CHAT, json={"messages": [], "stream": True})
        assert answer.content.endswith(CONTENT[CHAT] + END[CHAT])
        assert client.post(CHAT, json={"messages": []}).json() == {"said": "whole"}
        engines = client.get("/health").json()["engines"]
        assert [each["url"] for each in engines] == [*prefill, *decode]


@pytest.mark.parametrize("pair", ["address"], indirect=True)
def test_the_environment_may_name_the_authority(pair, files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
    with running_router(*pair) as url:
        answer = httpx.post(url + CHAT, json={"messages": []}, timeout=WAIT_S, trust_env=False)
        assert answer.json() == {"said": "whole"}


@pytest.mark.parametrize(
    ("pair", "options", "reason"),
    [
        ("address", (), "certificate verify failed"),
        ("name", ("--tls-ca", "ca.pem"), "127.0.0.1"),
        ("address", ("--tls-ca", "ca.pem", "--tls-server-name", POD), POD),
    ],
    indirect=["pair"],
)
def test_a_server_whose_certificate_does_not_fit_is_down(pair, files, options, reason):
    told = [str(files / each) if each.endswith(".pem") else each for each in options]
    with (
        router_process(*pair, *told, waits=False) as (_, url),
        httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client,
    ):

        def reasons():
            told = [each["last_error"] for each in client.get("/health").json()["engines"]]
            return told if all(reason in each for each in told) else None

        assert len(until(reasons)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tls-ca", "missing.pem"), "missing.pem cannot be read: No such file"),
        (("--tls-ca", "address.key"), "address.key has no certificate"),
        (("--tls-ca", "empty.pem"), "empty.pem has no certificate"),
        (("--tls-ca", "ca.pem", "--tls-no-check"), "leave out --tls-ca"),
    ],
)
def test_mistakes_are_named_at_the_start(files, options, message):
    (files / "empty.pem").touch()
    done = subprocess.run(
        [*COMMAND, *options], cwd=files, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
