"""Headers of requests and answers that pass through the router: end-to-end fields, in both
directions.

Fields about a single connection do not pass, nor do fields written by the router itself. An
``authorization`` checked by the router (:class:`Keys`) is never shown to a server.
"""

import re
import secrets
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from kvferry.serving import web
from kvferry.serving.openai import ApiError


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


HOP_BY_HOP = _names("""
    connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer
    transfer-encoding upgrade
""")
"""Names of fields about a single connection. The ``connection`` field of a message names further
fields."""
WRITTEN_TO_SERVERS = _names("""
    accept-encoding content-length expect host traceparent x-request-id
    x-override-bootstrap-host x-override-bootstrap-port x-override-bootstrap-room
    x-override-disagg-prefill-dp-rank
""")
"""Names of request fields that the router writes itself or leaves out."""
WRITTEN_TO_CLIENTS = _names("content-encoding content-length date server x-request-id")
"""Names of answer fields that the router writes itself or leaves out."""
_MOST_ID_CHARACTERS = 200
_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._:~+/=@-]")


@dataclass(frozen=True, slots=True)
class Head:
    """Headers, query and id of a client's request, for the servers."""

    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    """Query of the URL, encoded, without the question mark."""
    request_id: str = ""
    """The client's own ``x-request-id``, unchanged; empty if the client sent none."""

    @classmethod
    def of(cls, request: Request, *keys: str | None) -> "Head":
        """Reads the head of a client's request.

        ``keys`` are bearer tokens of the router; a server never sees these tokens.
        """
        own = [f"Bearer {key}".encode() for key in keys if key]
        left_out = HOP_BY_HOP | WRITTEN_TO_SERVERS | _named(request.headers.getlist("connection"))
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            if name in left_out:
                continue
            text = _text(value)
            shown = text.encode() if name == "authorization" else b""
            if any(secrets.compare_digest(shown, each) for each in own):
                continue
            separator = "; " if name == "cookie" else ", "
            headers[name] = separator.join(filter(None, (headers.get(name), text)))
        query = request.scope.get("query_string", b"").decode("ascii", "replace")
        return cls(headers, query, request.headers.get("x-request-id", ""))

    def new_id(self, prefix: str) -> str:
        """A new id for servers. Clients may not choose this id: two requests may have the same
        ``x-request-id``.
        """
        if not self.request_id:
            return f"{prefix}-{uuid.uuid4().hex}"
        known = _NOT_IN_AN_ID.sub("_", self.request_id[:_MOST_ID_CHARACTERS])
        return f"{known}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The bearer tokens checked by the router.

    The methods raise an ``ApiError``, 401 or 403, if the request does not show the right token.
    """

    api: str | None
    """Bearer token for clients; ``None`` if clients need no token."""
    operator: str | None
    """Bearer token for changes of the engines; ``None`` if no changes are permitted."""

    def check(self, request: Request) -> None:
        """Checks the token of a client."""
        if self.api is not None:
            web.check_bearer(request, self.api, "this router, its api_key")

    def check_reader(self, request: Request) -> None:
        """Checks the token of a program that reads the engines: a client's or an operator's
        token.
        """
        try:
            self.check(request)
        except ApiError:
            if self.operator is None:
                raise
            self.check_operator(request)

    def check_operator(self, request: Request) -> None:
        """Checks the token of an operator.

        An operator can add an engine and thus see all prompts. Neither a client's token nor mere
        access to the router is enough: clients of a proxy have such access too.
        """
        if self.operator is None:
            raise ApiError(
                403,
                "operator_key: this router has none, so its engines cannot be changed; start it "
                "with KVFERRY_OPERATOR_KEY, and show that key",
            )
        web.check_bearer(request, self.operator, "this router, its operator_key")

    def head(self, request: Request) -> Head:
        """The head of the request, for engines."""
        return Head.of(request, self.api, self.operator)


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The fields of a server's answer for the client."""
    fields = [(name.lower(), value) for name, value in headers]
    named = _named(value.decode("latin-1") for name, value in fields if name == b"connection")
    left_out = HOP_BY_HOP | WRITTEN_TO_CLIENTS | named
    return [(name, value) for name, value in fields if name.decode("latin-1") not in left_out]


def _named(connection: Iterable[str]) -> set[str]:
    """Names of the fields listed in ``connection``."""
    return {name.strip().lower() for value in connection for name in value.split(",")}


def _text(value: str) -> str:
    """A value whose bytes in UTF-8 are the bytes that came."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value
