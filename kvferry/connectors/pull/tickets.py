"""The accepted tickets and the issued tickets of an engine.

The engine accepts a ticket once, if the ticket is verified and fits its request; a shared ticket
any number of times. An issued ticket is in the answer of the request whose prompt is lent. If the
request came with a transfer, a target asks for this transfer instead. The target gets the ticket as
soon as the lease is granted, or gets a denial::

    expect ──> tell_lent ──> tell_not_lent, once the lease has ended
       │  ▲        │
       │  └─recall─┘  the lease is about to be revoked, and may be granted again
       └───────────────────> tell_not_lent, without a lease
"""

import hmac
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kvferry.connectors.base import ConnectorContext, RequestView
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.groups import Filled
from kvferry.control.leases import Lease
from kvferry.control.messages import BlockTables
from kvferry.control.proofs import veil
from kvferry.control.server import ControlServer
from kvferry.control.tickets import (
    SeenTickets,
    Ticket,
    TransferId,
    prompt_digest,
    read_transfer,
    sign,
    verify,
)
from kvferry.errors import TicketError
from kvferry.zeromq import join_address, split_address


class AcceptedTickets:
    """Judges the tickets of requests, before any engine is contacted."""

    def __init__(self, key: bytes | None, extra: PullConfig) -> None:
        """Args:
        key: the cluster's key; ``None`` if tickets are not signed.
        extra: the connector's keys; without a cluster key, a ticket may name only an address in
            ``peers``.
        """
        self._key = key
        self._peers = extra.peer_addresses()
        self.seen = SeenTickets()

    def accept_transfer(self, text: object) -> TransferId:
        """The transfer of a request without a ticket, with which the ticket is requested from the
        source.

        Raises:
            TicketError: the transfer is forged or malformed, or names an engine outside ``peers``.
        """
        transfer = read_transfer(text, self._key)
        self._check_address(transfer.address)
        return transfer

    def read_asked(self, text: str, transfer: TransferId) -> Ticket:
        """The requested ticket, from its signed text. For any thread.

        Raises:
            TicketError: as :meth:`accept`, but without a check of the request.
        """
        ticket = self._verified(text)
        return replace(ticket, secret=veil(ticket.secret, transfer.secret, ticket.lease_id))

    def accept(self, text: object, request: RequestView) -> Ticket:
        """The ticket of a request, verified and fitting; from now on no other request can use the
        ticket.

        Args:
            text: the signed ticket, unchanged.
            request: the request with the ticket.

        Raises:
            TicketError: the ticket is forged, malformed, used before, for another prompt, or for
                another adapter or other inputs; or it names no address, or an address outside
                ``peers``.
        """
        ticket = self._verified(text)
        self.check(ticket, request)
        return self.claim(ticket, request.request_id)

    def check(self, ticket: Ticket, request: RequestView) -> None:
        """Refuses KV of other tokens than this request's, or of other inputs beside the tokens.

        Raises:
            TicketError: the tokens or the other inputs differ.
        """
        _check_prompt(ticket, request)
        _check_content(ticket, request)

    def claim(self, ticket: Ticket, request_id: str) -> Ticket:
        """Claims a ticket for a request, and returns the form for use. For any thread.

        Raises:
            TicketError: the ticket was used before.
        """
        ticket = ticket.claimed()
        self.seen.claim(ticket.lease_id, request_id)
        return ticket

    def accept_rejected(self, text: object, request_id: str) -> Ticket:
        """The ticket of a request ended before its prompt is known, to give the lease back.

        Raises:
            TicketError: as :meth:`accept`, but without a check of the prompt.
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
        """Notes the end of the request; its ticket is never accepted again."""
        self.seen.retire(ticket.lease_id)


def _check_prompt(ticket: Ticket, request: RequestView) -> None:
    """Refuses KV of other tokens than this request's; the signature cannot tell them apart.

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
    """Refuses KV of equal tokens but another adapter, image or embedding.

    Raises:
        TicketError: a part differs, or only the ticket or only the request has it.
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


class IssuedTickets:
    """The issued tickets of one engine. Only the scheduler's thread uses the object."""

    def __init__(
        self, context: ConnectorContext, extra: PullConfig, key: bytes | None, server: ControlServer
    ) -> None:
        """Args:
        context: context from which the connector was built.
        extra: the connector's keys.
        key: the cluster's key; ``None`` if tickets are not signed.
        server: control server with the leases; answers targets about transfers; stays the caller's.
        """
        self._context = context
        self._extra = extra
        self._key = key
        self._server = server
        self._transfers: dict[str, TransferId] = {}
        """Request id → its transfer, from the arrival of the request until it is certain that
        nothing is lent, or the lease has ended."""
        self._lent_as: dict[TransferId, str] = {}
        """Transfer → the id of its lease, for lent prompts."""

    @property
    def _told(self) -> tuple[str, int]:
        """Host and port at which peers reach the control channel."""
        return self._extra.told(self._server.port)

    @property
    def address(self) -> str:
        """``host:port`` at which peers reach the control channel."""
        return join_address(*self._told)

    # ---- requests that arrive -----------------------------------------------------------------

    def transfer_of(self, params: Mapping[str, Any]) -> TransferId | None:
        """The transfer in ``params``, given by the router to this engine and to the decode engine;
        ``None`` without a transfer.

        Raises:
            TicketError: the transfer was not made by the router.
        """
        if not params.get("do_remote_decode") or "transfer" not in params:
            return None
        try:
            return read_transfer(params["transfer"], self._key)
        except TicketError as error:
            self._server.note_error("ticket", str(error))
            raise

    def expect(self, request_id: str, transfer: TransferId) -> None:
        """Notes a request with a transfer; from now on targets may ask for the transfer."""
        self._transfers[request_id] = transfer
        self._server.expect(transfer)

    def is_asked(self, request_id: str) -> bool:
        """Whether a target has asked for the transfer of a request."""
        transfer = self._transfers.get(request_id)
        return transfer is not None and self._server.is_asked(transfer)

    # ---- prompts that are lent, or are not ----------------------------------------------------

    def ticket(
        self,
        request: RequestView,
        lease: Lease,
        tables: BlockTables,
        num_tokens: int,
        filled: Filled | None,
        note: bytes = b"",
    ) -> Ticket:
        """The ticket of a lease in its present state.

        Args:
            request: the request whose prompt is lent.
            lease: the lease of the prompt.
            tables: the parts of the block tables with the lent tokens.
            num_tokens: number of lent tokens, from the start of the prompt.
            filled: the tokens loaded for the request itself; ``None`` without a load.
            note: bytes of the engine for the engine of the target.
        """
        parallel = self._context.groups[0].parallel
        host, port = self._told
        first_tokens = () if filled is None else filled.first_tokens
        return Ticket(
            lease_id=lease.lease_id,
            engine_id=self._context.config.engine_id,
            incarnation=self._server.incarnation,
            secret=self._server.secret(lease.lease_id),
            host=host,
            port=port,
            request_id=request.request_id,
            num_tokens=num_tokens,
            block_ids=tables,
            prompt_digest=prompt_digest(request.prompt_token_ids[:num_tokens]),
            lease_duration_s=lease.duration_s,
            tp=parallel.tp,
            pp=parallel.pp,
            first_tokens=first_tokens if any(first_tokens) else (),
            content=dict(request.content_keys(num_tokens)),
            shared=lease.shared,
            whole=not self._server.leases.readable([lease.lease_id]),
            note=note,
        )

    def tell_lent(self, ticket: Ticket) -> dict[str, Any]:
        """Notes the grant of a request's lease; must be called immediately after the grant.

        Targets waiting for the request's transfer get the ticket.

        Returns:
            The ``kv_transfer_params`` of the request's answer, without the ticket if targets ask
            for this ticket.
        """
        transfer = self._transfers.get(ticket.request_id)
        if transfer is None:
            return self.params(ticket)
        self._lent_as[transfer] = ticket.lease_id
        self._server.lend(transfer, ticket)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_num_tokens": ticket.num_tokens,
            "transfer": transfer.text,
        }

    def params(self, ticket: Ticket) -> dict[str, Any]:
        """The fields for vLLM's proxies, and the ticket; kvferry itself reads only the ticket."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": ticket.engine_id,
            "remote_request_id": ticket.request_id,
            "remote_block_ids": ticket.block_ids,
            "remote_host": ticket.host,
            "remote_port": ticket.port,
            "remote_num_tokens": ticket.num_tokens,
            "tp_size": ticket.tp,
            "pp_size": ticket.pp,
            "ticket": sign(ticket, self._key),
        }

    def recall(self, request_id: str) -> None:
        """Makes later requests for a transfer wait until another lease is granted, or nothing is
        lent. Must be called before the lease is revoked.
        """
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._lent_as.pop(transfer, None)
            self._server.recall(transfer)

    def tell_not_lent(self, request_id: str, reason: str) -> None:
        """Notes that nothing of a request will be lent, or is lent any more."""
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            self._lent_as.pop(transfer, None)
            self._server.deny(transfer, reason)

    # ---- tickets that no target uses ----------------------------------------------------------

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Ends the lease of an unused ticket or transfer; other params are ignored."""
        try:
            if "transfer" in kv_transfer_params:
                transfer = read_transfer(kv_transfer_params["transfer"], self._key)
                if transfer in self._lent_as:
                    self._server.leases.withdraw(self._lent_as[transfer])
            elif "ticket" in kv_transfer_params:  # without a ticket nothing was lent
                self.withdraw(verify(kv_transfer_params["ticket"], self._key))
        except TicketError as error:
            self._server.note_error("ticket", f"to be taken back: {error}")

    def withdraw(self, ticket: Ticket) -> None:
        """Ends the lease of an unused ticket of ours."""
        # Without a cluster key any client could write a ticket, but not its secret.
        if hmac.compare_digest(ticket.secret, self._server.secret(ticket.lease_id)):
            self._server.leases.withdraw(ticket.lease_id)
