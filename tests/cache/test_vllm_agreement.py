"""Our manager and vLLM's leave the same trace, and where they part it is on purpose.

vLLM 0.32 runs in an environment of its own, ``.venv-vllm``, which ``make test-rest`` sets up.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.peers.kvferry_peer import KvferryPeer
from benchmarks.peers.peer import Allocation
from benchmarks.peers.process import start_peer
from benchmarks.peers.setups import Group, Setup
from benchmarks.remote import Remote
from tests.cache.agreement.peer import TracedPeer
from tests.cache.agreement.script import Admit, Free, Grow, Loaded, Step, play
from tests.cache.agreement.trace import Record
from tests.cache.agreement.workload import Workload, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = range(3)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Remote]:
    with start_peer("vllm", TracedPeer) as process:
        yield process


def full(block_size: int = 4) -> Group:
    return Group(kind="full", block_size=block_size)


def mla(block_size: int = 4) -> Group:
    return Group(kind="mla", block_size=block_size)


def window(span: int, block_size: int = 4) -> Group:
    return Group(kind="window", block_size=block_size, span=span)


def chunk(span: int, block_size: int = 4) -> Group:
    return Group(kind="chunk", block_size=block_size, span=span)


def mamba(block_size: int = 4) -> Group:
    return Group(kind="mamba", block_size=block_size)


def setup_of(groups: tuple[Group, ...], num_blocks: int, **options: Any) -> Setup:
    return Setup(groups=groups, num_blocks=num_blocks, max_model_len=160, **options)


# Pools so small that requests are refused and preempted, and hits evicted.
SETUPS = {
    "full": setup_of((full(),), 60),
    "mla": setup_of((mla(),), 60),
    "window within a block": setup_of((window(2),), 30),
    "window that ends with a block": setup_of((window(13),), 40),
    "window that ends within a block": setup_of((window(10),), 40),
    "long window": setup_of((window(40),), 55),
    "chunk": setup_of((chunk(16),), 30),
    "long chunk": setup_of((chunk(32),), 45),
    "full and window": setup_of((full(), window(13)), 90),
    "window and full": setup_of((window(10), full()), 90),
    "mla and window": setup_of((mla(), window(12)), 90),
    "full and chunk": setup_of((full(), chunk(16)), 90),
    "two windows": setup_of((window(8), window(16)), 80),
    "window and chunk": setup_of((window(9), chunk(16)), 80),
    "full and two windows": setup_of((full(), window(9), window(20)), 120),
    "two full and window": setup_of((full(), full(), window(9)), 120),
    "full, window and chunk": setup_of((full(), window(9), chunk(16)), 120),
    "window of larger blocks": setup_of((full(4), window(16, 8)), 90),
    "window of much larger blocks": setup_of((full(4), window(16, 12)), 90),
    "window of smaller blocks": setup_of((full(8), window(13, 4)), 60),
    "blocks of 12 and 8": setup_of((full(12), window(16, 8)), 40),
    "recurrent": setup_of((mamba(),), 30),
    "full and recurrent": setup_of((full(), mamba()), 80),
    "tokens over two ranks": setup_of((full(2),), 60, dcp_world_size=2),
    "eagle: full": setup_of((full(),), 60, use_eagle=True),
    "eagle: window": setup_of((window(12),), 45, use_eagle=True),
    "eagle: full and window": setup_of((full(), window(12)), 90, use_eagle=True),
    "eagle: full and two windows": setup_of((full(), window(13), window(7)), 110, use_eagle=True),
    "eagle: window of larger blocks": setup_of((full(4), window(16, 8)), 90, use_eagle=True),
}

# Loads end where the window before them begins with a block; see
# test_a_block_that_a_load_fills_in_part_is_never_a_hit_with_us for elsewhere.
LOADS = {
    "full": (1, 0),
    "mla": (1, 0),
    "window within a block": (4, 1),
    "window that ends with a block": (4, 0),
    "window that ends within a block": (4, 1),
    "long window": (4, 3),
    "chunk": (1, 0),
    "full and window": (4, 0),
    "window and full": (4, 1),
    "full and chunk": (1, 0),
    "recurrent": (1, 0),
    "full and recurrent": (1, 0),
    "tokens over two ranks": (1, 0),
    "eagle: full": (1, 0),
    "eagle: full and window": (4, 3),
}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_managers_leave_the_same_trace(vllm, name, num_drafts):
    share = 0.0 if SETUPS[name].has_windows else 0.3  # of windows they ask something else, below
    workloads = [Workload(seed=seed, num_drafts=num_drafts, must_fit_share=share) for seed in SEEDS]
    assert_same_traces(vllm, SETUPS[name], workloads)


@pytest.mark.parametrize("name", LOADS)
def test_the_managers_leave_the_same_trace_when_loads_fill_a_part(vllm, name):
    multiple, offset = LOADS[name]
    workloads = [
        Workload(seed=seed, load_share=0.4, load_multiple=multiple, load_offset=offset)
        for seed in SEEDS
    ]
    traces = assert_same_traces(vllm, SETUPS[name], workloads)
    assert any(record.op.startswith("loaded") for record in traces)


def assert_same_traces(vllm: Remote, setup: Setup, workloads: list[Workload]) -> list[Record]:
    """The records of all workloads; fails at the first on which the managers do not agree."""
    records = []
    for workload in workloads:
        ours = run(KvferryPeer(setup), workload)
        theirs = vllm.call("trace", setup, workload)
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            assert comparable(mine) == comparable(other), f"operation {number} of {workload}"
        assert len(ours) == len(theirs)
        records += ours
    # Or else the traces are about nothing.
    assert sum(1 for record in records if record.hit) > 20
    assert any(record.op == "finish" for record in records)
    assert any(record.asked and not record.new for record in records)
    if setup.has_windows:
        assert any("0" in table for record in records for table in record.tables)
    return records


def comparable(record: Record) -> Record:
    """Without the number of external blocks: vLLM leaves them out of what it returns."""
    if record.asked and record.asked.num_external_tokens and record.new is not None:
        return Record(**{**{f: getattr(record, f) for f in record.__struct_fields__}, "new": ()})
    return record


# -- Where the managers part on purpose. Each test pins both sides: when vLLM changes, it fails.


def both(vllm: Remote, setup: Setup, *steps: Step) -> tuple[list[Record], list[Record]]:
    """Our trace of the steps, and vLLM's."""
    return play(KvferryPeer(setup), list(steps)), vllm.call("script", setup, list(steps))


def prompt(alike: int, own: int = 0) -> list[int]:
    """As many tokens that all prompts begin with, then some of its own."""
    return [*range(alike), *range(900, 900 + own)]


def external(count: int) -> Allocation:
    """Room for tokens that something else fills."""
    return Allocation(0, num_external_tokens=count)


def test_the_blocks_that_a_load_fills_are_new_blocks_with_us(vllm):
    """vLLM returns the blocks to be computed only; our connectors get all that are new."""
    steps = Admit("a", prompt(24), external(12)), Grow("a", 12)
    (ours, _), (theirs, _) = both(vllm, setup_of((full(),), 20), *steps)
    assert ours.new == (3,)
    assert theirs.new == (0,)
    assert ours.tables == theirs.tables == ("bbb",)
    assert ours.free == theirs.free == 16


def test_a_block_that_a_load_fills_in_part_is_never_a_hit_with_us(vllm):
    """A load of 15 tokens into a window of 5 fills tokens 11 to 14: of block 2, one token of four.

    vLLM hashes block 2, so a hit of 12 tokens finds it, which needs the tokens from 8 on. There
    that works as long as connectors move whole blocks; ours move tokens.
    """
    steps = (
        Admit("a", prompt(15, own=1), external(15)),
        Loaded("a", 15),
        Free("a"),
        Admit("b", prompt(12, own=4), Allocation(4)),
    )
    ours, theirs = both(vllm, setup_of((window(5),), 20), *steps)
    assert ours[1].tables == theirs[1].tables == ("00bb",)
    assert ours[3].hit == 0
    assert (theirs[3].hit, theirs[3].hit_tables) == (12, ("00b",))


def test_no_hit_of_ours_lacks_a_part_of_its_chunk(vllm):
    """Chunks of 10 in blocks of 4, nothing cached, a prompt of 38 tokens.

    Tokens from 30 on need no token before, but no hit ends there; one of 20 tokens needs nothing
    either. vLLM answers 28: token 28 needs those from 20 on, which no block holds.
    """
    steps = [Admit("a", prompt(38), Allocation(1))]
    (ours,), (theirs,) = both(vllm, setup_of((chunk(10),), 20), *steps)
    assert (ours.hit, ours.hit_tables) == (20, ("00000",))
    assert (theirs.hit, theirs.hit_tables) == (28, ("0000000",))


def test_a_window_of_one_token_needs_nothing_before_a_hit(vllm):
    """vLLM asks for one cached block and never hashes any, so it has no hits at all."""
    steps = [Admit("a", prompt(24), Allocation(4))]
    (ours,), (theirs,) = both(vllm, setup_of((window(1),), 20), *steps)
    assert ours.hit == 20
    assert theirs.hit == 0


def test_a_drafter_costs_one_block_where_a_window_has_smaller_blocks(vllm):
    """Both groups know 16 tokens, so 8 are a hit and the next block of each is there too.

    vLLM rounds the window's run down to whole blocks of 8 before it drops the last block, which
    it does only where the run begins with the first token, and rounds down again: no hit.
    """
    setup = setup_of((full(8), window(16, 4)), 60, use_eagle=True)
    steps = (
        Admit("a", prompt(20), Allocation(20)),
        Free("a"),
        Admit("b", prompt(16, own=20), Allocation(4)),
    )
    ours, theirs = both(vllm, setup, *steps)
    assert (ours[2].hit, ours[2].hit_tables) == (8, ("b", "bb"))
    assert theirs[2].hit == 0


def test_a_window_must_fit_in_steps_as_large_as_the_first(vllm):
    """64 tokens in steps of 8 never hold more than 4 blocks of a window of 8.

    vLLM counts steps as large as its engine could ever make, which it is not told here, and so
    refuses a request that both then run in 4 blocks.
    """
    setup = setup_of((window(8),), 9)
    refused = Admit("a", prompt(64), Allocation(8, must_fit=True))
    (admitted,), (denied,) = both(vllm, setup, refused)
    assert admitted.new == (2,)
    assert denied.new is None
    steps: tuple[Step, ...] = (Admit("a", prompt(64), Allocation(8)), *[Grow("a", 8)] * 7)
    ours, theirs = both(vllm, setup, *steps)
    assert ours == theirs
    assert min(record.free for record in ours) == 8 - 4
