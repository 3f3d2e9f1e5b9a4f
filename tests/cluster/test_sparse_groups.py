"""What `kvferry router` knows of vLLM servers whose models have windows or states.

Their events say which blocks of a prompt are kept, but not where in the prompt these blocks are.
"""

import contextlib
import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import Any, cast

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.vllm_servers.front import router
from kvferry.cache.events import AllBlocksCleared, KVEventBatch
from kvferry.control.cache_events import CacheEventPublisher, ReceivedEvents
from kvferry.router.prefixes import CachedBlocks, Prompt
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import FakeEngine
from tests.publishers import publishers

pytestmark = pytest.mark.processes

# ---- vLLM's events -------------------------------------------------------------------------------


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As vLLM 0.32 has it, field by field, so that the bytes are the same."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


def hash_of(tokens, count):
    """One for the same tokens in all groups, as vLLM has it."""
    return int.from_bytes(hashlib.sha256(bytes(tokens[:count])).digest()[-8:], "big")


def stored(group, tokens, ends, size, kind=None, *, start=0, parent=None):
    """Tokens from ``start`` on, and hashes of the blocks that end at ``ends``."""
    if parent is None and start:
        parent = hash_of(tokens, start)
    return BlockStored(
        block_hashes=[hash_of(tokens, end) for end in ends],
        parent_block_hash=parent,
        token_ids=list(tokens[start:]),
        block_size=size,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * len(ends),
        group_idx=group,
        kv_cache_spec_kind=kind,
    )


def removed(group, tokens, *ends):
    return [BlockRemoved([hash_of(tokens, end)], "GPU", group) for end in ends]


def drawn(seed, count):
    return random.Random(seed).choices(range(256), k=count)


def test_events_have_the_bytes_of_vllm():
    """Encoded by vLLM 0.32's own classes."""
    events = [stored(2, [7] * 4, [4], 2, "mamba"), BlockRemoved([5], "GPU", 2)]
    batch = KVEventBatch(ts=1.5, events=cast(Any, events), data_parallel_rank=0)
    assert msgspec.msgpack.encode(batch).hex() == (
        "93cb3ff8000000000000928ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf"
        "db4d093e0793b349b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739407070707aa62"
        "6c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa6578"
        "7472615f6b65797391c0a967726f75705f69647802b26b765f63616368655f737065635f6b696e64a56d616d"
        "626184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756da3"
        "475055a967726f75705f6964780200"
    )


# ---- through the command -------------------------------------------------------------------------


class Server(FakeEngine):
    def draw(self, body):
        return [33], "length"


class Routed:
    """A server that publishes events, behind a router that chooses by them."""

    def __init__(
        self,
        client: httpx.Client,
        publisher: CacheEventPublisher,
        kinds: Sequence[str | None],
        size: int,
    ) -> None:
        self._client = client
        self._publisher = publisher
        self.kinds = kinds
        self.size = size
        self._numbers = itertools.count()

    def has(self, *events):
        """From now on, the server's cache is what these events say."""
        self._publish([AllBlocksCleared()])
        self.tell(*events)

    def tell(self, *events):
        """Publishes the events of a step, and waits until the router has heard them."""
        self._publish(events)
        last = drawn(next(self._numbers) + 100, 768)  # what is told after everything else
        ends = range(self.size, 769, self.size)
        self._publish(
            [stored(group, last, ends, self.size, kind) for group, kind in enumerate(self.kinds)]
        )
        until(lambda: self.held(last) == 768)

    def held(self, tokens):
        """Tokens of a prompt that the router expects at the server."""
        body = {"prompt": [*tokens, 0, 0], "max_tokens": 1}
        response = self._client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        parts = response.headers.get("x-kvferry-route", "cached=0").split("; ")
        return int(dict(part.split("=") for part in parts)["cached"])

    def _publish(self, events):
        self._publisher.publish(cast(Any, events))


@pytest.fixture(scope="module")
def start(server_thread, byte_model, tmp_path_factory):
    """``start(kinds, size)`` starts a router before a server with such groups."""
    with contextlib.ExitStack() as opened:

        def start(kinds, size):
            folder = tmp_path_factory.mktemp("router")
            publisher = opened.enter_context(publishers())()
            file = folder / "engines.toml"
            prefill, decode = (
                server_thread.start(Server(role, role, max_model_len=8192).app())
                for role in ("prefill", "decode")
            )
            file.write_text(f"""
                [[prefill]]
                url = "{prefill}"
                [prefill.kv_events]
                endpoint = "{publisher.endpoint}"
                replay_endpoint = "{publisher.replay_endpoint}"
                [[decode]]
                url = "{decode}"
            """)
            arguments = ["--engines", str(file), "--tokenizer", str(byte_model), "--explain"]
            url = opened.enter_context(router(folder / "log", *arguments))
            client = httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)
            return Routed(opened.enter_context(client), publisher, kinds, size)

        yield start


@pytest.fixture(scope="module")
def kimi_like(start):
    return start(KIMI, 768)


@pytest.fixture(scope="module", params=["sliding_window", None])
def windowed(request, start):
    return start(("full_attention" if request.param else None, request.param), 16)


KIMI = ("mamba", "mamba", "mamba", "mla_attention")
"""Kinds of the groups of a model with three groups of states."""
A, B, C = (drawn(seed, 3840) for seed in (1, 2, 3))
LATENT = range(768, 3841, 768)


def kimi(order, tokens, *ends, start=0):
    """A step of a model with three groups of states and one of full attention.

    The states after ``ends`` tokens are kept. The groups tell in this order.
    """
    kept = {"mamba": ends, "mla_attention": range(start + 768, len(tokens) + 1, 768)}
    return [
        stored(group, tokens, kept[KIMI[group]], 768, KIMI[group], start=start) for group in order
    ]


@pytest.fixture(params=[(0, 1, 2, 3), (3, 2, 1, 0)], ids=["states first", "states last"])
def order(request):
    return request.param


def test_a_prompt_stays_known_when_a_state_of_another_prompt_leaves(kimi_like, order):
    kimi_like.has(*kimi(order, A, 3840), *kimi(order, B, 3840))
    assert (kimi_like.held(A), kimi_like.held(B)) == (3840, 3840)
    kimi_like.tell(*removed(1, B, 3840))
    assert (kimi_like.held(A), kimi_like.held(B)) == (3840, 0)
    kimi_like.tell(*kimi(order, C, 3840))
    assert (kimi_like.held(A), kimi_like.held(B), kimi_like.held(C)) == (3840, 0, 3840)


def test_a_prompt_whose_own_state_leaves_is_known_up_to_its_last_state(kimi_like, order):
    kimi_like.has(*kimi(order, A[:2304], 2304), *kimi(order, A, 3840, start=2304))
    assert kimi_like.held(A) == 3840
    kimi_like.tell(*removed(0, A, 3840))
    assert kimi_like.held(A) == 2304
    kimi_like.tell(*removed(2, A, 2304))
    assert kimi_like.held(A) == 0


def test_states_in_the_middle_of_a_store_are_where_full_attention_has_their_hashes(
    kimi_like, order
):
    kimi_like.has(*kimi(order, A, 1536, 3072))
    assert kimi_like.held(A) == 3072
    assert kimi_like.held(A[:2500]) == 1536
    kimi_like.tell(*removed(1, A, 3072))
    assert kimi_like.held(A) == 1536


def test_full_attention_that_loses_a_block_ends_what_is_known(kimi_like, order):
    kimi_like.has(*kimi(order, A[:2304], 2304), *kimi(order, A, 3840, start=2304))
    kimi_like.tell(*removed(3, A, 3072))
    assert kimi_like.held(A) == 2304
    kimi_like.tell(*removed(3, A, 768))
    assert kimi_like.held(A) == 0


def test_the_end_of_a_prompt_is_told_as_a_smaller_block(kimi_like, order):
    short = drawn(4, 96)
    end = [stored(group, short, [96], 96, KIMI[group]) for group in order]
    kimi_like.has(*kimi(order, A, 3840), *end)
    assert (kimi_like.held(A), kimi_like.held(short)) == (3840, 96)
    assert (kimi_like.held([*short, *A]), kimi_like.held(A[:2000])) == (96, 0)
    kimi_like.tell(*kimi(order, B, 3840))
    assert (kimi_like.held(A), kimi_like.held(B), kimi_like.held(short)) == (3840, 3840, 96)
    kimi_like.tell(*removed(0, short, 96))
    assert (kimi_like.held(A), kimi_like.held(short)) == (3840, 0)


def test_the_smaller_block_at_the_end_may_come_first_and_may_follow_whole_blocks(kimi_like, order):
    short, longer = drawn(4, 96), [*A, *drawn(5, 96)]
    kimi_like.has(
        *(stored(group, short, [96], 96, KIMI[group]) for group in order),
        *kimi(order, A, 3840),
        *(stored(group, longer, [3936], 96, KIMI[group], start=3840) for group in order),
    )
    assert (kimi_like.held(short), kimi_like.held(A), kimi_like.held(longer)) == (96, 3840, 3936)
    kimi_like.tell(*removed(2, longer, 3936))
    assert (kimi_like.held(short), kimi_like.held(A), kimi_like.held(longer)) == (96, 3840, 3840)


def test_a_smaller_block_that_cannot_be_compared_changes_nothing(kimi_like, order):
    short = drawn(4, 24)
    end = [stored(group, short, [24], 24, KIMI[group]) for group in order]
    kimi_like.has(*kimi(order, A, 3840), *end)
    assert (kimi_like.held(A), kimi_like.held(short)) == (3840, 0)


def gemma(server, tokens, *ends):
    """A step of a model with full attention and a window that keeps these blocks."""
    kept = (range(16, len(tokens) + 1, 16), ends)
    return [stored(group, tokens, kept[group], 16, server.kinds[group]) for group in (0, 1)]


def test_a_window_of_which_the_last_blocks_are_told(windowed):
    mine, other = drawn(6, 160), drawn(7, 160)
    windowed.has(*gemma(windowed, mine, 128, 144, 160), *gemma(windowed, other, 144, 160))
    assert (windowed.held(mine), windowed.held(other)) == (160, 160)
    windowed.tell(*removed(1, other, 160))
    assert (windowed.held(mine), windowed.held(other)) == (160, 144)
    windowed.tell(*removed(1, mine, 160))
    assert windowed.held(mine) == 144
    windowed.tell(*removed(1, mine, 144, 128))
    assert windowed.held(mine) == 0


def test_blocks_of_a_hit_that_are_told_again_count_for_nothing_in_states(kimi_like, order):
    kimi_like.has(*kimi(order, A[:2304], 2304), *kimi(order, A, 3840, start=2304))
    again = [stored(group, A, LATENT, 768, KIMI[group]) for group in order]
    kimi_like.tell(*again)
    assert (kimi_like.held(A), kimi_like.held(A[:2000])) == (3840, 0)
    kimi_like.tell(*removed(1, A, 3840))
    assert (kimi_like.held(A), kimi_like.held(A[:2000])) == (2304, 0)


def test_blocks_of_a_hit_that_are_told_again_count_for_nothing_in_a_window(windowed):
    tokens = drawn(6, 160)
    whole = range(16, 161, 16)
    windowed.has(*gemma(windowed, tokens, *whole), *gemma(windowed, drawn(7, 160), 160))
    assert (windowed.held(tokens), windowed.held(tokens[:100])) == (160, 96)
    windowed.tell(*removed(1, tokens, *range(16, 113, 16)))
    windowed.tell(*gemma(windowed, tokens, *whole))
    assert (windowed.held(tokens), windowed.held(tokens[:100])) == (160, 0)


def test_states_without_full_attention_are_at_the_end_of_their_tokens(start):
    routed = start(("mamba", "mamba"), 768)
    routed.has(*(stored(group, A, [3840], 768, "mamba") for group in (0, 1)))
    assert (routed.held(A), routed.held(A[:3500])) == (3840, 0)
    routed.tell(*removed(0, A, 3840))
    assert routed.held(A) == 0


# ---- the law ------------------------------------------------------------------------------------


class Engine:
    """vLLM's prefix cache: full attention in group 0, states or a window in group 1."""

    def __init__(self, rng):
        self.rng = rng
        self.kind = rng.choice(["mamba", "sliding_window"])
        self.size = rng.choice([1, 2, 16, 24])
        self.order = rng.sample([0, 1], 2)
        self.there: list[set[tuple[int, ...]]] = [set(), set()]
        """Group → beginnings of which the last block is there."""

    def step(self):
        """Something happens; the events that tell of it."""
        match self.rng.randrange(8):
            case 0 | 1:
                return [event for group in (0, 1) for event in self.evict(group)]
            case 2:
                tokens = self.prompt()
                tokens = tokens[: self.hit(tokens)]
                again = range(self.size, len(tokens) + 1, self.size)
                return [self.stored(group, tokens, again) for group in self.order if tokens]
        return self.compute(self.prompt())

    def compute(self, tokens):
        start = self.hit(tokens)
        blocks = range(start + self.size, len(tokens) + 1, self.size)
        if not blocks:
            return []
        # A window and a state after the last token are kept, and perhaps some states before.
        kept = {*self.rng.sample(blocks, self.rng.randrange(len(blocks))), blocks[-1]}
        if not start and len(blocks) > 1:
            kept.discard(blocks[0])  # if not, nobody could tell it from a hit that is told again
        ends = [list(blocks), sorted(kept)]
        for group in (0, 1):
            self.there[group].update(tuple(tokens[:end]) for end in ends[group])
        return [self.stored(group, tokens, ends[group], start) for group in self.order]

    def stored(self, group, tokens, ends, start=0):
        kind = self.kind if group else "full_attention"
        return stored(group, tokens, ends, self.size, kind, start=start)

    def evict(self, group):
        there = self.there[group]
        gone = self.rng.sample(sorted(there), min(len(there), self.rng.randrange(3)))
        there.difference_update(gone)
        return [event for each in gone for event in removed(group, each, len(each))]

    def prompt(self):
        blocks = self.rng.choices(range(2), k=self.rng.randrange(8))
        return [token for token in blocks for _ in range(self.size)]

    def hit(self, tokens, whole=0):
        """Tokens that a request hits: whole in one group, the last block in the other."""
        best = 0
        for end in range(self.size, len(tokens) + 1, self.size):
            if tuple(tokens[:end]) not in self.there[whole]:
                break
            if tuple(tokens[:end]) in self.there[1 - whole]:
                best = end
        return best

    def told(self, tokens):
        """Tokens that it may hit after all, because vLLM tells that a block has left although
        another copy is there: full attention can have what a window has.
        """
        return max(self.hit(tokens), self.hit(tokens, whole=1))


def check(make, seed):
    engine, blocks = Engine(random.Random(seed)), make()
    for number in range(40):
        batch = KVEventBatch(ts=0.0, events=cast(Any, engine.step()))
        data = msgspec.msgpack.encode(batch)
        batch = msgspec.msgpack.decode(data, type=KVEventBatch)
        blocks.apply(ReceivedEvents(number, batch, is_gapless=True))
        for _ in range(4):
            tokens = engine.prompt()
            assert engine.hit(tokens) <= blocks.held(Prompt(tokens)) <= engine.told(tokens)


@given(st.integers(0, 2**32))
def test_index_knows_what_a_model_with_windows_or_states_would_hit(seed):
    check(CachedBlocks, seed)


def test_the_last_block_of_a_store_with_gaps_is_kept_if_there_is_no_room_for_all():
    event = stored(0, A, [768, 3840], 768, "mamba")
    batch = KVEventBatch(ts=0.0, events=cast(Any, [event]))
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    blocks = CachedBlocks()
    blocks.apply(ReceivedEvents(0, batch, is_gapless=True), most=1)
    assert (len(blocks), blocks.held(Prompt(A)), blocks.held(Prompt(A[:768]))) == (1, 3840, 0)


class IgnoresStoresWithGaps(CachedBlocks):
    def _place(self, group, numbers, keys):
        pass


class LeavesBlocksWhereTheyWere(CachedBlocks):
    def _correct(self, group, new):
        pass


class TakesEveryHashForTheLastBlock(CachedBlocks):
    def _place(self, group, numbers, keys):
        for number in numbers:
            group.place(number, keys[-1])


@pytest.mark.parametrize(
    "broken", [IgnoresStoresWithGaps, LeavesBlocksWhereTheyWere, TakesEveryHashForTheLastBlock]
)
def test_law_catches_an_index_that_misplaces_blocks(broken):
    def is_caught(seed):
        try:
            check(broken, seed)
        except AssertionError:
            return True
        return False

    assert any(is_caught(seed) for seed in range(100))
