"""Which tickets are accepted: verified, fitting their request, used once unless they are shared."""

from collections.abc import Sequence

from msgspec.structs import replace

from kvferry.connectors.base import RequestView
from kvferry.connectors.pull.config import PullConfig
from kvferry.control.proofs import veil
from kvferry.control.tickets import (
    SeenTickets,
    Ticket,
    Transfer,
    prompt_digest,
    read_transfer,
    verify,
)
from kvferry.errors import TicketError
from kvferry.zeromq import split_address


class AcceptedTickets:
    """Judges the tickets that requests bring, before anybody is contacted."""

    def __init__(self, key: bytes | None, extra: PullConfig) -> None:
        """Args:
        key: the cluster's key; ``None`` where tickets are not signed.
        extra: of the connector; without a key, its ``peers`` bound whom a ticket may name.
        """
        self._key = key
        self._peers = extra.peer_addresses()
        self._seen = SeenTickets()

    def accept_transfer(self, text: object) -> Transfer:
        """What a request brings in place of a ticket, for which its source is asked.

        Raises:
            TicketError: it is forged or malformed, or names an engine that is none of our
                ``peers``.
        """
        transfer = read_transfer(text, self._key)
        self._check_address(transfer.address)
        return transfer

    def read_asked(self, text: str, transfer: Transfer) -> Ticket:
        """The ticket that was asked for. For any thread.

        Raises:
            TicketError: as :meth:`accept`, but that no request is looked at.
        """
        ticket = self._verified(text)
        return replace(ticket, secret=veil(ticket.secret, transfer.secret, ticket.lease_id))

    def accept(self, text: object, request: RequestView) -> Ticket:
        """The ticket of a request, verified, fitting, and from now on the request's own.

        Args:
            text: as it came.
            request: whose it is to be.

        Raises:
            TicketError: forged, malformed, used before, for another prompt, for another adapter
                or other inputs, or it names no address, or one that is none of our ``peers``.
        """
        ticket = self._verified(text)
        self.check(ticket, request)
        return self.claim(ticket, request.request_id)

    def check(self, ticket: Ticket, request: RequestView) -> None:
        """Refuses KV of other tokens than this request's, or of other inputs beside them.

        Raises:
            TicketError: it is such.
        """
        _check_prompt(ticket, request)
        _check_content(ticket, request)

    def claim(self, ticket: Ticket, request_id: str) -> Ticket:
        """The ticket as a request uses it: from now on its own. For any thread.

        Raises:
            TicketError: it was used before.
        """
        ticket = ticket.claimed()
        self._seen.claim(ticket.lease_id, request_id)
        return ticket

    def accept_rejected(self, text: object, request_id: str) -> Ticket:
        """The ticket of a request that ends before its prompt is known, to give its lease back.

        Raises:
            TicketError: as :meth:`accept`, but that no prompt is looked at.
        """
        return self.claim(self._verified(text), request_id)

    def _verified(self, text: object) -> Ticket:
        if not isinstance(text, str):
            raise TicketError(
                "kv_transfer_params: do_remote_prefill needs the ticket that the prefill engine "
                "returned; forward its kv_transfer_params unchanged"
            )
        ticket = verify(text, self._key)
        try:
            split_address(ticket.address)
        except ValueError as error:
            raise TicketError(f"ticket: its {error}") from error
        self._check_address(ticket.address)
        return ticket

    def _check_address(self, address: str) -> None:
        if self._key is None and self._peers and address not in self._peers:
            raise TicketError(
                f"ticket: it names {address}, which is not in peers "
                f"({', '.join(self._peers)}); add it, or set a cluster_key"
            )

    def retire(self, ticket: Ticket) -> None:
        """The request is over; its ticket is never accepted again."""
        self._seen.retire(ticket.lease_id)


def _check_prompt(ticket: Ticket, request: RequestView) -> None:
    """Refuses KV of other tokens than this request's: the signature cannot tell.

    Raises:
        TicketError: the request's prompt does not begin with the tokens of the ticket.
    """
    own = prompt_digest(request.prompt_token_ids[: ticket.num_tokens])
    if ticket.prompt_digest and own != ticket.prompt_digest:
        raise TicketError(
            f"ticket: it is for the prompt of request {ticket.request_id!r}, and request "
            f"{request.request_id!r} begins with other tokens; forward each response's "
            "kv_transfer_params with its own prompt"
        )


def _remedy(differing: Sequence[str]) -> str:
    if len(differing) == 1 and differing[0].startswith("weights:"):
        return "serve the same model on both engines: `kvferry check` shows what each serves"
    return (
        "send both engines the same request, and serve the same weights, adapters and input "
        "processing on both"
    )


def _check_content(ticket: Ticket, request: RequestView) -> None:
    """Refuses KV of equal tokens that another adapter, image or embedding went into.

    Raises:
        TicketError: a part differs, or only one of the two has it.
    """
    theirs, own = ticket.content, request.content_keys(ticket.num_tokens)
    differing = [
        f"{part}: prefill had {theirs.get(part, 'none')}, here it is {own.get(part, 'none')}"
        for part in sorted(theirs.keys() | own.keys())
        if theirs.get(part) != own.get(part)
    ]
    if differing:
        raise TicketError(
            f"ticket: it is for request {ticket.request_id!r}, and the KV of request "
            f"{request.request_id!r} is another though its tokens are equal ("
            f"{'; '.join(differing)}); {_remedy(differing)}"
        )
