"""The router's page in a real browser: Debian's chromium, without a window."""

import re
import shutil
import subprocess
from urllib.parse import quote

import httpx
import pytest

from kvferry.control.leases import LeaseTable
from kvferry.control.messages import RequestTrace, TracePart
from kvferry.control.server import ControlServer
from kvferry.testing.waiting import WAIT_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timed("A browser's session must begin within 60 s."),
]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""What a browser's driver calls the id of an element."""
ENTER, ESCAPE = "\ue007", "\ue00c"


class Browser:
    """A chromium, driven by W3C's WebDriver protocol."""

    def __init__(self, driver, folder):
        self._driver = httpx.Client(base_url=driver, timeout=WAIT_S, trust_env=False)
        options = {"args": [*FLAGS, f"--user-data-dir={folder}", "--window-size=1200,900"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._ask("POST", "/session", capabilities={"alwaysMatch": wanted})
        self._path = f"/session/{session['sessionId']}"

    def _ask(self, method, path, **body):
        json = body if method == "POST" else None
        answer = self._driver.request(method, path, json=json).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def go(self, url):
        self._ask("POST", f"{self._path}/url", url=url)

    def run(self, script, *args):
        return self._ask("POST", f"{self._path}/execute/sync", script=script, args=list(args))

    def until(self, script, *args):
        """Waits until a script returns something true, and returns that."""
        return until(lambda: self.run(script, *args), what=lambda: (script, self.text("body")))

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def press(self, selector, keys):
        """Types into an element, as a keyboard does."""
        found = self._ask("POST", f"{self._path}/element", using="css selector", value=selector)[
            ELEMENT
        ]
        self._ask("POST", f"{self._path}/element/{found}/value", text=keys)

    def complaints(self):
        """What it has logged since the last call: errors of scripts, refusals of the policy. That
        a router wants a key, or has ended, is none.
        """
        told = self._ask("POST", f"{self._path}/se/log", type="browser")
        severe = [one["message"] for one in told if one["level"] == "SEVERE"]
        return [message for message in severe if "Failed to load resource" not in message]

    def close(self):
        self._ask("DELETE", self._path)
        self._driver.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium: apt-get install chromium chromium-driver")
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        try:
            port = next(
                found[1] for line in driver.stdout if (found := re.search(r"on port (\d+)\.", line))
            )
            browser = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("chromium"))
            yield browser
            browser.close()
        finally:
            driver.terminate()


@pytest.fixture
def channel():
    """The control channel of an engine whose clients and peers are hostile."""
    with ControlServer(
        engine_id="p7", role="kv_producer", incarnation="1", leases=LeaseTable(max_blocks=99)
    ) as served:
        served.leases.grant(HOSTILE, 3)
        served.note_error("load", f"request r1, rank 0: {HOSTILE}")
        parts = (
            TracePart(name="prefill", started=100.0, seconds=1.0),
            TracePart(name="read", started=101.0, seconds=1.0, rank=0, error=HOSTILE),
            TracePart(name="answer", started=102.0, seconds=2.8),
        )
        trace = RequestTrace(
            request_id=HOSTILE, started=100.0, seconds=2.0, outcome=HOSTILE, parts=parts
        )
        served.set_traces(lambda wanted: (1, (trace,) if wanted in (HOSTILE, "r1") else ()))
        yield served


@pytest.fixture
def setup(make_setup, channel):
    """A router that asks for a key; one of its engines has a name that would be markup."""
    setup = make_setup(api_key="sesame")
    setup.prefill[0].metrics = (
        'kvferry_engine_kv_blocks{state="free"} 30\nkvferry_engine_kv_blocks{state="used"} 20\n'
        'kvferry_engine_live_requests{state="running"} 41\n'
    )
    body = {"url": setup.prefill[0].url, "control": f"127.0.0.1:{channel.port}"}
    setup.client.put(f"/kvferry/engines/prefill/{quote(HOSTILE)}", json=body).raise_for_status()
    return setup


@pytest.fixture
def page(chromium, setup):
    """The page, before anybody has shown a key."""
    chromium.go(f"{setup.client.base_url}/kvferry")
    chromium.run("sessionStorage.clear(); location.reload()")
    chromium.until("return document.activeElement?.id === 'key'")
    return chromium


def log_in(page):
    page.press("#key", f"sesame{ENTER}")
    page.until("return document.querySelector('#cluster').innerText.includes('30 of 50')")


def test_who_has_no_key_sees_nothing_and_who_has_it_sees_the_cluster(page):
    assert page.run("return document.querySelector('#cluster').hidden")
    assert page.run("return document.querySelectorAll('tbody tr').length") == 0
    page.press("#key", f"wrong{ENTER}")
    page.until("return document.querySelector('#why').textContent.includes('bearer token')")

    log_in(page)

    assert page.run("return document.querySelector('#login').hidden")
    assert "sesame" not in page.run(
        "return location.href + document.cookie + document.body.innerHTML"
    )
    assert page.complaints() == []
    page.run("location.reload()")
    page.until("return document.querySelector('#cluster').innerText.includes('30 of 50')")
    page.run("document.querySelector('#forget').click()")
    page.until("return document.activeElement?.id === 'key'")


def test_the_page_follows_the_cluster(page, setup):
    log_in(page)
    row = "return document.querySelector('tbody tr').innerText"
    assert "41" in page.run(row)
    decode = (
        "return [...document.querySelectorAll('tbody tr')]"
        ".find((one) => one.innerText.includes('decode')).innerText"
    )
    assert "not told" in page.run(decode)

    setup.prefill[0].metrics = 'kvferry_engine_live_requests{state="running"} 77\n'

    page.until("return document.querySelector('tbody tr').innerText.includes('77')")
    assert "not told" in page.run(row)  # its blocks, now


def test_what_engines_and_clients_say_is_text_and_never_markup(page):
    log_in(page)

    shown = page.until(
        "const text = document.querySelector('#cluster').innerText;"
        "return text.split(arguments[0]).length > 3 && text",
        HOSTILE,
    )

    assert "request r1, rank 0: <img" in shown
    assert page.run("return document.querySelectorAll('img, main script').length") == 0
    assert page.run("return document.title") == "kvferry: the cluster"
    assert page.complaints() == []


def test_a_request_shows_its_timeline_by_keyboard_alone(page):
    log_in(page)
    page.until("return document.querySelector('button.id')")

    page.press("button.id", ENTER)

    page.until("return document.querySelectorAll('#timeline tbody tr').length === 3")
    text = page.text("#timeline")
    assert "prefill" in text
    assert HOSTILE in text
    assert page.run("return document.querySelectorAll('#timeline img').length") == 0
    left, width = page.run(
        "const bar = document.querySelectorAll('#timeline .track i')[1].style;"
        "return [parseFloat(bar.left), parseFloat(bar.width)]"
    )
    assert (left, width) == (pytest.approx(50, abs=1), pytest.approx(50, abs=1))
    # The answer begins where the axis ends, and is still seen to go on.
    beyond, end, track_end = page.run(
        "const bar = document.querySelectorAll('#timeline .track i')[2];"
        "const [drawn, track] = [bar, bar.parentElement].map((one) => one.getBoundingClientRect());"
        "return [bar.className, drawn.width >= 10 && drawn.right, track.right]"
    )
    assert beyond == "on"
    assert end == pytest.approx(track_end, abs=1)
    page.press("#again", ESCAPE)
    page.until("return !document.querySelector('#timeline').open")
    # New snapshots leave the focus where it was.
    before = page.text("#status")
    page.until("return document.querySelector('#status').innerText !== arguments[0]", before)
    assert page.run("return document.activeElement.className") == "id"
