"""What of a message's head goes on through the router: end-to-end fields do, in both directions.

Fields that are about one connection do not, nor do those that the router writes itself. An
``authorization`` that the router judges is never shown to a server.
"""

import re
import secrets
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Fields about one connection; those that ``connection`` names are others."""
WRITTEN_TO_SERVERS = frozenset(
    {"accept-encoding", "content-length", "expect", "host", "traceparent", "x-request-id"}
)
"""Fields of a request that the router writes itself, or leaves out."""
WRITTEN_TO_CLIENTS = frozenset(
    {"content-encoding", "content-length", "date", "server", "x-request-id"}
)
"""Fields of an answer that the router writes itself, or leaves out."""
_MOST_ID_CHARACTERS = 200
_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._:~+/=@-]")


@dataclass(frozen=True, slots=True)
class Head:
    """What of a client's request goes on to servers beside its body."""

    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    """Of the URL, encoded, without its question mark."""
    request_id: str = ""
    """The client's own ``x-request-id``, as it came; empty where it sent none."""

    @classmethod
    def of(cls, request: Request, *keys: str | None) -> "Head":
        """``keys`` are bearer tokens that the router judges, shown here or elsewhere."""
        left_out = HOP_BY_HOP | WRITTEN_TO_SERVERS | _named(request.headers.getlist("connection"))
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            if name not in left_out:
                separator = "; " if name == "cookie" else ", "
                headers[name] = separator.join(filter(None, (headers.get(name), _text(value))))
        shown = headers.get("authorization", "").encode()
        if any(key and secrets.compare_digest(shown, f"Bearer {key}".encode()) for key in keys):
            del headers["authorization"]
        query = request.scope.get("query_string", b"").decode("ascii", "replace")
        return cls(headers, query, request.headers.get("x-request-id", ""))

    def new_id(self, prefix: str) -> str:
        """An id for servers, which clients may not choose: two requests may bring the same one."""
        if not self.request_id:
            return f"{prefix}-{uuid.uuid4().hex}"
        known = _NOT_IN_AN_ID.sub("_", self.request_id[:_MOST_ID_CHARACTERS])
        return f"{known}-{uuid.uuid4().hex[:8]}"


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The fields of a server's answer that go on to the client."""
    fields = [(name.lower(), value) for name, value in headers]
    named = _named(value.decode("latin-1") for name, value in fields if name == b"connection")
    left_out = HOP_BY_HOP | WRITTEN_TO_CLIENTS | named
    return [(name, value) for name, value in fields if name.decode("latin-1") not in left_out]


def put_on(response: Response, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Puts fields on an answer, in place of its own of the same names."""
    added = list(headers)
    names = {name for name, _ in added}
    response.raw_headers = [each for each in response.raw_headers if each[0] not in names] + added


def _named(connection: Iterable[str]) -> set[str]:
    """Fields that ``connection`` names."""
    return {name.strip().lower() for value in connection for name in value.split(",")}


def _text(value: str) -> str:
    """A value whose bytes are the same in UTF-8 as they came."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value
