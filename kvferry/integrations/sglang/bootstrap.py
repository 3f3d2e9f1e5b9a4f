"""Bootstrap servers of SGLang, at which prefill engines register and decode engines look.

Each data-parallel engine of a prefill server registers the address of its control channel, on a
path of kvferry's own beside SGLang's.

A prefill server of another kind has no bootstrap server. Its router gives the address of its
control channel itself, with ``kvferry://`` before the host.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import requests
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, PrefillServerInfo

from kvferry.config import shown
from kvferry.control.tickets import CHANNEL_SCHEME, channel_address
from kvferry.errors import ConfigError
from kvferry.lifetimes import Closing

logger = logging.getLogger(__name__)

PATH = "/kvferry"
"""Path of the bootstrap server for control channels."""
FIRST_LOOK_S = 0.05
"""Longest time in seconds that SGLang's scheduler waits for an unknown bootstrap server."""
HTTP_TIMEOUT_S = 5.0
"""Seconds after which a bootstrap server counts as silent."""
LOOKS = 8
"""Number of bootstrap servers that are asked at once: a silent one delays few others."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 (a server's own address)


def register(host: str, port: int, dp_rank: int, address: str) -> None:
    """Registers the control channel of a prefill engine.

    Args:
        host: address on which the bootstrap server listens.
        port: TCP port of the bootstrap server.
        dp_rank: index of the data-parallel engine.
        address: ``host:port`` of the control channel.

    Raises:
        requests.RequestException: the bootstrap server does not answer, or has another backend.
    """
    url = f"http://{_LOOPBACK.get(host, host)}:{port}{PATH}"
    told: dict[str, Any] = {"dp_rank": dp_rank, "address": address}
    requests.put(url, json=told, timeout=HTTP_TIMEOUT_S).raise_for_status()


class BootstrapClient(Closing):
    """The bootstrap servers that a decode engine knows. Only the scheduler's thread calls it."""

    def __init__(self, known: dict[str, Any]) -> None:
        """Starts no thread until an unknown server is asked for.

        Args:
            known: SGLang's table of prefill servers, by the address of their bootstrap servers.
        """
        self._known = known
        self._channels: dict[str, dict[str, str]] = {}
        """Address of a bootstrap server → data-parallel rank → address of its control channel."""
        self._looks: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(LOOKS, thread_name_prefix="kvferry-bootstrap")

    def knows(self, address: str) -> bool:
        """Whether a prefill server is known. An unknown server is asked on another thread; the
        caller waits at most :data:`FIRST_LOOK_S`.
        """
        if address in self._known:
            return True
        if is_channel(address):
            self._known[address] = _ONE_ENGINE
            return True
        if address not in self._looks:
            self._looks[address] = self._threads.submit(self._look, address)
        try:
            self._looks[address].result(FIRST_LOOK_S)
        except TimeoutError:
            return False
        except Exception as error:  # the address comes with a request, and may lead anywhere
            logger.warning("bootstrap server %s: %s", address, error)
        del self._looks[address]
        return address in self._known

    def _look(self, address: str) -> None:
        """Asks a bootstrap server for its prefill engines."""
        fields = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        everything = dict.fromkeys(fields, -1)
        answer = requests.get(f"http://{address}/route", everything, timeout=HTTP_TIMEOUT_S)
        answer.raise_for_status()
        info = PrefillServerInfo(**answer.json())
        channels = requests.get(f"http://{address}{PATH}", timeout=HTTP_TIMEOUT_S)
        found = msgspec.convert(channels.json() if channels.ok else {}, dict[str, str])
        self._channels[address] = {rank: channel_address(at) for rank, at in found.items()}
        self._known[address] = info

    def channel_of(self, address: str, dp_rank: int) -> str:
        """Address of the control channel of a prefill engine.

        Raises:
            ConfigError: no such engine has registered, or it has another backend; or the address is
                the address of a channel, and invalid.
        """
        if is_channel(address):
            try:
                return channel_address(address.removeprefix(CHANNEL_SCHEME))
            except ValueError as error:
                raise ConfigError(f"bootstrap_host: {shown(address)}: {error}") from error
        channels = self._channels.get(address, {})
        if str(dp_rank) not in channels:
            raise ConfigError(
                f"bootstrap server {address}: it knows no kvferry engine of data-parallel rank "
                f"{dp_rank} ({', '.join(channels) or 'none'} registered); start the prefill server "
                "with --disaggregation-transfer-backend kvferry"
            )
        return channels[str(dp_rank)]

    def forget(self, address: str) -> None:
        """Asks a bootstrap server again before the next request: its engine may be another one."""
        self._known.pop(address, None)
        self._channels.pop(address, None)

    def close(self) -> None:
        """Starts nothing new; a look under way ends by itself. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_channel(address: str) -> bool:
    """Whether the address of a bootstrap server is the address of a control channel instead."""
    return address.startswith(CHANNEL_SCHEME)


_ONE_ENGINE = PrefillServerInfo(
    attn_tp_size=1,
    attn_cp_size=1,
    dp_size=1,
    pp_size=1,
    page_size=None,
    kv_cache_dtype=None,
    follow_bootstrap_room=True,
)
"""The facts for SGLang about a server with a control channel and no bootstrap server: there is no
choice among data-parallel engines."""


class BootstrapServer(CommonKVBootstrapServer):
    """SGLang's bootstrap server, with the control channels of prefill engines beside its own."""

    def __init__(self, host: str, port: int) -> None:
        """See SGLang for the arguments."""
        self._channels: dict[str, str] = {}
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_put(PATH, self._note_channel)
        self.app.router.add_get(PATH, self._tell_channels)

    async def _note_channel(self, request: web.Request) -> web.Response:
        told = await request.json()
        self._channels[str(int(told["dp_rank"]))] = str(told["address"])
        return web.Response(text="OK")

    async def _tell_channels(self, request: web.Request) -> web.Response:
        if not self._channels:
            return web.Response(text="no engine has registered yet", status=503)
        return web.json_response(self._channels)
