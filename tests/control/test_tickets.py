"""Tickets: what comes back is what was signed, or a named error."""

import base64
import hashlib
import hmac
import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.control.messages import MAX_ID_CHARS, MAX_NOTE_BYTES, Asked, AskState, encode
from kvferry.control.options import ControlOptions
from kvferry.control.proofs import lease_of
from kvferry.control.tickets import (
    MAX_CONTENT_PARTS,
    MAX_TICKET_BLOCKS,
    MAX_TICKET_CHARS,
    SeenTickets,
    Ticket,
    check_incarnation,
    prompt_digest,
    sign,
    verify,
)
from kvferry.errors import TicketError, TicketExpiredError, TicketForgedError
from kvferry.topology.description import MAX_GROUPS

KEY = b"0123456789abcdef0123456789abcdef"
OTHER_KEY = b"fedcba9876543210fedcba9876543210"

TICKET = Ticket(
    lease_id="5f",
    engine_id="prefill-0",
    incarnation="a1",
    secret=b"0123456789abcdef",
    host="10.0.0.1",
    port=14579,
    request_id="request-1",
    num_tokens=40,
    block_ids=((3, 9, 200_000),),
    lease_duration_s=30.0,
    tp=3,
)

names = st.text(min_size=1, max_size=20)
tickets = st.builds(
    Ticket,
    lease_id=names,
    engine_id=names,
    incarnation=names,
    secret=st.binary(min_size=16, max_size=16),
    host=names,
    port=st.integers(1, 65535),
    request_id=names,
    num_tokens=st.integers(0, 1 << 40),
    block_ids=st.lists(st.lists(st.integers(0, 1 << 31)).map(tuple), max_size=3).map(tuple),
    lease_duration_s=st.floats(0.001, 1e6),
    tp=st.integers(1, 64),
    pp=st.integers(1, 64),
    content=st.dictionaries(names, names, max_size=3),
    shared=st.booleans(),
)


def text_of(values, key=None):
    """A ticket made of any values, signed the way `sign` does it."""
    payload = msgspec.msgpack.encode(values)
    text = base64.urlsafe_b64encode(payload).rstrip(b"=").decode()
    if key is None:
        return text
    mac = hmac.new(key, b"kvferry ticket\n" + payload, hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


@given(ticket=tickets, key=st.sampled_from([None, KEY]))
def test_a_ticket_comes_back_as_it_was_signed_in_url_safe_characters(ticket, key):
    text = sign(ticket, key)
    assert set(text) <= set(string.ascii_letters + string.digits + "-_.")
    assert verify(text, key) == ticket


def test_the_address_is_host_and_port():
    assert TICKET.address == "10.0.0.1:14579"


def test_an_unsigned_ticket_is_refused_where_there_is_a_key():
    with pytest.raises(TicketForgedError, match="not signed"):
        verify(sign(TICKET, None), KEY)


def test_a_ticket_under_another_key_is_forged():
    with pytest.raises(TicketForgedError, match="give all engines of the cluster the same"):
        verify(sign(TICKET, OTHER_KEY), KEY)


def test_without_a_key_a_signed_ticket_is_read():
    assert verify(sign(TICKET, KEY), None) == TICKET


def test_a_short_key_is_the_callers_mistake():
    with pytest.raises(ValueError, match="15 bytes"):
        sign(TICKET, KEY[:15])
    with pytest.raises(ValueError, match="0 bytes"):
        verify(sign(TICKET, KEY), b"")


@given(position=st.integers(0, 10_000), char=st.sampled_from(string.ascii_letters + "-_.=\0é"))
def test_no_changed_character_goes_unnoticed(position, char):
    text = sign(TICKET, KEY)
    position %= len(text)
    changed = text[:position] + char + text[position + 1 :]
    if changed != text:
        with pytest.raises(TicketError):
            verify(changed, KEY)


@given(length=st.integers(0, 10_000), key=st.sampled_from([None, KEY]))
def test_a_cut_off_ticket_is_refused(length, key):
    text = sign(TICKET, key)
    with pytest.raises(TicketError):
        verify(text[: length % len(text)], key)


@given(
    text=st.one_of(
        st.text(max_size=300),
        st.text(alphabet=string.ascii_letters + string.digits + "-_.", max_size=300),
        st.binary(max_size=300).map(lambda data: base64.urlsafe_b64encode(data).decode()),
        st.binary(max_size=300).map(
            lambda data: base64.urlsafe_b64encode(data).rstrip(b"=").decode()
        ),
    ),
    key=st.sampled_from([None, KEY]),
)
def test_random_text_raises_a_ticket_error_and_nothing_else(text, key):
    with pytest.raises(TicketError):
        verify(text, key)


@given(
    field=st.sampled_from(Ticket.__struct_fields__),
    value=st.one_of(
        st.none(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.integers(-2, 2), max_size=2),
        st.lists(st.lists(st.integers(-2, -1), min_size=1, max_size=2), min_size=1, max_size=2),
    ),
)
def test_a_well_signed_ticket_with_a_wild_field_is_read_or_refused(field, value):
    values = msgspec.structs.asdict(TICKET) | {field: value}
    try:
        ticket = verify(text_of(values, KEY), KEY)
    except TicketError:
        return
    assert msgspec.convert(msgspec.to_builtins(ticket), Ticket) == ticket
    assert 0 < ticket.port < 65536
    assert 0 < ticket.lease_duration_s <= 1e6
    assert all(block >= 0 for table in ticket.block_ids for block in table)


def test_a_ticket_of_another_version_is_named_so_even_if_its_schema_changed():
    for version in (0, 1, 2, -1, 1 << 60):
        text = text_of({"version": version, "who": "knows"}, KEY)
        with pytest.raises(TicketError, match=f"version: the ticket has {version}"):
            verify(text, KEY)


def test_a_ticket_of_endless_content_is_refused():
    parts = {f"part {number}": "x" for number in range(MAX_CONTENT_PARTS + 1)}
    values = msgspec.structs.asdict(TICKET)
    with pytest.raises(TicketError, match="content"):
        verify(text_of(values | {"content": parts}, KEY), KEY)
    with pytest.raises(TicketError, match="content"):
        verify(text_of(values | {"content": {"lora": "x" * 1025}}, KEY), KEY)


def test_fields_that_a_newer_release_adds_are_ignored():
    values = msgspec.structs.asdict(TICKET) | {"colour": "red"}
    assert verify(text_of(values, KEY), KEY) == TICKET


def test_deep_nesting_and_lies_about_sizes_are_ticket_errors():
    header = b"\x82\xa7version\x01\xa1x"
    for tail in (b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xa2\xff"):
        text = base64.urlsafe_b64encode(header + tail).rstrip(b"=").decode()
        with pytest.raises(TicketError):
            verify(text, None)


def test_what_is_no_string_or_too_long_is_refused():
    with pytest.raises(TicketError, match="NoneType"):
        verify(None, KEY)
    with pytest.raises(TicketError, match="characters"):
        verify("A" * (MAX_TICKET_CHARS + 1), None)


def test_the_longest_ticket_is_read_and_fits_a_message_of_the_control_channel():
    longest, wide = 1 << 31, "\N{GRINNING FACE}" * 1024  # the numbers and names with most bytes
    groups = [MAX_TICKET_BLOCKS // MAX_GROUPS] * MAX_GROUPS
    ticket = Ticket(
        lease_id=wide,
        engine_id=wide,
        incarnation=wide,
        secret=b"0123456789abcdef",
        host=wide,
        port=14579,
        request_id=wide,
        num_tokens=1 << 40,
        block_ids=tuple((longest,) * count for count in groups),
        lease_duration_s=30.0,
        prompt_digest=prompt_digest([]),
        first_tokens=(1 << 40,) * MAX_GROUPS,
        content={f"{part:x}{wide[1:]}": wide for part in range(MAX_CONTENT_PARTS)},
        note=b"\xff" * MAX_NOTE_BYTES,
    )
    text = sign(ticket, KEY)
    assert verify(text, KEY) == ticket
    asked = Asked(id=1 << 63, transfer_id="x" * MAX_ID_CHARS, state=AskState.LENT, ticket=text)
    assert len(encode(asked)) <= ControlOptions().max_message_bytes


def test_an_equal_ticket_has_one_spelling_only():
    """Base64 with padding, or with other bits in its last character, decodes to the same bytes."""
    text = sign(TICKET, None)
    while len(text) % 4 == 0:
        text = sign(msgspec.structs.replace(TICKET, host="1" * len(text)), None)
    with pytest.raises(TicketError):
        verify(text + "=" * (-len(text) % 4), None)
    last = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
    twin = text[:-1] + last[last.index(text[-1]) ^ 1]
    with pytest.raises(TicketError):
        verify(twin, None)


def test_a_ticket_from_an_earlier_start_of_its_engine_is_expired():
    check_incarnation(TICKET, "a1")
    with pytest.raises(TicketExpiredError, match=r"a1.*prefill-0.*b2"):
        check_incarnation(TICKET, "b2")


def test_each_request_uses_a_shared_ticket_under_a_claim_of_its_own():
    shared = msgspec.structs.replace(TICKET, shared=True)
    ids = {shared.claimed().lease_id for _ in range(100)}
    assert len(ids) == 100
    assert {lease_of(claim) for claim in ids} == {TICKET.lease_id}
    assert TICKET.claimed() is TICKET


def test_a_lease_serves_one_live_request():
    seen = SeenTickets()
    seen.claim("lease", "request-1")
    seen.claim("lease", "request-1")
    with pytest.raises(TicketExpiredError, match=r"request-1.*request-2"):
        seen.claim("lease", "request-2")


def test_a_lease_whose_request_is_over_serves_nobody_again():
    seen = SeenTickets()
    seen.claim("lease", "request-1")
    seen.retire("lease")
    seen.retire("lease")
    seen.retire("unknown")
    for request in ("request-1", "request-2"):
        with pytest.raises(TicketExpiredError):
            seen.claim("lease", request)


def test_ended_leases_are_forgotten_oldest_first_and_live_ones_never():
    seen = SeenTickets(limit=2)
    seen.claim("live", "request-0")
    for number in range(3):
        seen.claim(f"lease-{number}", "request")
        seen.retire(f"lease-{number}")
    seen.claim("lease-0", "again")
    for lease in ("live", "lease-1", "lease-2"):
        with pytest.raises(TicketExpiredError):
            seen.claim(lease, "another")
