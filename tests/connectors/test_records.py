"""Digests of what was lent and of what arrived, compared token by token."""

import pytest

from kvferry.connectors.records import digest_mismatch
from kvferry.observe.records import TransferRecord


def record(
    direction: str, rank: int, digests: tuple[int, ...] | None, first_token: int = 0
) -> TransferRecord:
    return TransferRecord(
        request_id="r",
        lease_id="l",
        rank=rank,
        peer="",
        direction=direction,
        first_token=first_token,
        tokens=0 if digests is None else len(digests),
        nbytes=0,
        copies=0,
        started=0.0,
        finished=0.0,
        ok=True,
        token_digests=digests,
    )


def test_sums_over_ranks_are_compared_modulo_two_to_the_64() -> None:
    sent = [record("send", 0, (2**64 - 1, 5, 9)), record("send", 1, (3, 0, 1))]
    received = [record("recv", 0, (2, 5, 10))]
    assert digest_mismatch(sent, received) is None


def test_a_load_behind_a_prefix_hit_is_compared_with_its_own_tokens() -> None:
    sent = [record("send", 0, (1, 2, 3, 4, 5))]
    assert digest_mismatch(sent, [record("recv", 0, (3, 4), first_token=2)]) is None


def test_the_first_token_that_differs_is_named() -> None:
    sent = [record("send", 0, (1, 2, 3, 4))]
    assert digest_mismatch(sent, [record("recv", 0, (2, 7, 8), first_token=1)]) == 2


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        ([], [record("recv", 0, (1,))], "no send record"),
        ([record("send", 0, (1,))], [], "no recv record"),
        ([record("send", 0, None)], [record("recv", 0, (1,))], "record_digests"),
        ([record("send", 0, (1,))], [record("recv", 0, (1, 2))], "not records of one lease"),
        (
            [record("send", 0, (1, 2)), record("send", 1, (1,))],
            [record("recv", 0, (1,))],
            "different tokens",
        ),
    ],
)
def test_records_that_do_not_belong_together_are_an_error_not_a_match(
    sent: list[TransferRecord], received: list[TransferRecord], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        digest_mismatch(sent, received)
