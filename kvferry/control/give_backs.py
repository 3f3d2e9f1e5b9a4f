"""Loans that a router gives back, because no engine will fetch them.

The router gives a random word to the source together with the request, in the transfer parameters
(:data:`WORD`). A :class:`~kvferry.control.messages.TakeBack` with this word ends each lease of the
request that no target has taken. So the router needs no part of the source's answer, which may be
lost on its way. The message may also come before the lease, or before the request::

    lease granted ──> TakeBack ──> the lease ends, unless a target holds it
    TakeBack ──> lease granted ──> the lease ends

The word is the proof: only the router and the source know it, and who has heard the message can do
no more than repeat it.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kvferry.control.leases import LeaseTable

WORD = "give_back"
"""Name of the transfer parameter with the word, in hexadecimal digits."""
WORD_BYTES = 16
MAX_REMEMBERED = 4096
"""Largest number of remembered words of loans given back; the oldest word makes room."""


def word_in(kv_transfer_params: Mapping[str, Any] | None) -> bytes | None:
    """The word in the transfer parameters of a request; ``None`` if there is no valid word.

    >>> word_in({"give_back": "00" * 16}) == bytes(16)
    True
    >>> word_in({"give_back": "0"}), word_in(None)
    (None, None)
    """
    text = (kv_transfer_params or {}).get(WORD)
    try:
        word = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return None
    return word if len(word) == WORD_BYTES else None


class GiveBacks:
    """The words of a source's open leases. Thread-safe; no method waits, except for its lock."""

    def __init__(self, leases: LeaseTable) -> None:
        """``leases`` are the leases of the source; stays the caller's."""
        self._leases = leases
        self._lock = threading.Lock()
        self._words: dict[str, bytes] = {}
        """Lease id → word, for leases that were not swept."""
        self._lent: dict[bytes, set[str]] = {}
        """Word → ids of its leases: a router may have sent a request twice."""
        self._given: OrderedDict[bytes, None] = OrderedDict()
        """The last words of loans given back."""

    def granted(self, word: bytes, lease_id: str) -> None:
        """Notes the word of a lease that was just granted, and ends a lease given back already."""
        with self._lock:
            self._words[lease_id] = word
            self._lent.setdefault(word, set()).add(lease_id)
            is_given = word in self._given
        if is_given:
            self._leases.withdraw(lease_id)

    def ended(self, lease_id: str) -> None:
        """Forgets a lease that was swept; other ids are ignored."""
        with self._lock:
            word = self._words.pop(lease_id, None)
            if word is not None:
                self._lent[word].discard(lease_id)
                if not self._lent[word]:
                    del self._lent[word]

    def take_back(self, word: bytes) -> bool:
        """Ends the leases with this word that no target has taken, now and later. Returns whether
        there is such a lease now, taken or not.
        """
        with self._lock:
            self._given[word] = None
            if len(self._given) > MAX_REMEMBERED:
                self._given.popitem(last=False)
            lent = list(self._lent.get(word, ()))
        for lease_id in lent:
            self._leases.withdraw(lease_id)
        return bool(lent)

    def __len__(self) -> int:
        return len(self._words)
