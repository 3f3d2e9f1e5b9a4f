"""What the engines of a simulated cluster are made of: classes, shapes, blocks, requests."""

import functools
import hashlib
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.pull.asks import Asks
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.loads import Loads
from kvferry.connectors.pull.pursuits import Pursuits
from kvferry.connectors.pull.renewals import Renewals
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.control.client import ControlClient
from kvferry.control.give_backs import WORD_BYTES
from kvferry.control.leases import LeaseTable
from kvferry.control.server import ControlService
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import (
    ModelFingerprint,
)

NUM_BLOCKS = 64
KEY = "the key of the simulated cluster"
MODEL = ModelFingerprint(
    name="tiny",
    architecture="Llama",
    num_layers=2,
    num_kv_heads=3,
    head_size=2,
    dtype="float32",
    rope="",
    config_digest="c",
    weights_digest="w",
)


@dataclass(frozen=True)
class Build:
    """The product's classes; a mutation takes the place of one."""

    table: type[LeaseTable] = LeaseTable
    service: type[ControlService] = ControlService
    client: type[ControlClient] = ControlClient
    pursuits: type[Pursuits] = Pursuits
    asks: type[Asks] = Asks
    renewals: type[Renewals] = Renewals
    scheduler: type[PullScheduler] = PullScheduler
    loads: type[Loads] = Loads
    aggregator: type[KVOutputAggregator] = KVOutputAggregator

    @property
    def name(self) -> str:
        """Of the class that is not the product's."""
        made = (getattr(self, one.name) for one in fields(self))
        return " ".join(one.__name__ for one in made if not one.__module__.startswith("kvferry"))


@dataclass(frozen=True)
class Shape:
    """An engine as its user configures it."""

    name: str
    host: str
    """Address of its machine."""
    advertised: str
    """What its tickets name: that address, or a name."""
    block_size: int
    tp: int
    pp: int = 1
    peers: tuple[str, ...] = ()
    lends: bool = False
    """Whether it is a source, or a target."""
    early_load: Literal["off", "late", "now"] = "off"

    @property
    def address(self) -> str:
        return f"{self.host}:14579"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @functools.cached_property
    def geometry(self) -> EngineGeometry:
        return EngineGeometry(
            num_layers=MODEL.num_layers,
            num_kv_heads=MODEL.num_kv_heads,
            head_size=MODEL.head_size,
            dtype=MODEL.dtype,
            block_size=self.block_size,
            layout="NHD",
            parallel=ParallelShape(tp=self.tp, pp=self.pp),
        )

    @functools.cached_property
    def extra(self) -> PullConfig:
        return PullConfig(
            host=self.advertised,
            cluster_key=KEY,
            peers=self.peers,
            early_load=self.early_load,
        )


class Pool:
    """The blocks of an engine, and what is in them."""

    def __init__(self) -> None:
        self.content = ["nothing"] * NUM_BLOCKS
        """Whose tokens each block holds."""
        self._free = list(range(NUM_BLOCKS - 1, 0, -1))

    @property
    def num_held(self) -> int:
        return NUM_BLOCKS - 1 - len(self._free)

    def take(self, count: int, content: str) -> list[int] | None:
        """Blocks for somebody; ``None`` if there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self.fill(blocks, content)
        return blocks

    def fill(self, blocks: list[int], content: str) -> None:
        """Whose tokens some blocks hold from now on."""
        for block in blocks:
            self.content[block] = content

    def free(self, blocks: list[int]) -> None:
        """Gives them back; the next one to take any takes these."""
        self.fill(blocks, "nothing")
        self._free.extend(blocks)

    def forget(self, content: str) -> None:
        """The process has died: what is left in memory is of no use."""
        self.content[:] = [content] * NUM_BLOCKS


def word_of(request_id: str) -> bytes:
    """The word with which the router gives back what a request lends."""
    return hashlib.sha256(request_id.encode()).digest()[:WORD_BYTES]


@dataclass(eq=False)
class Want:
    """One request at one engine, as the connector sees it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    traceparent: str = ""
    received: float = 0.0
    state: str = "waiting"
    """``waiting``, ``loading``, ``running`` or ``over``; at a source ``computing`` in chunks."""
    outcome: str = ""
    """What came of its load: ``loaded``, ``computed``, ``denied``, ``aborted``, ``died``,
    ``refused``; at a source ``lent``, or ``kept`` where nothing was."""
    blocks: list[int] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    """Rank of a source → tokens that it has written."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason == "abort"

    @property
    def finished_cleanly(self) -> bool:
        return not self.is_aborted

    def content_keys(self, num_tokens: int) -> dict[str, str]:
        return {}

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.blocks,)

    @property
    def transfer_id(self) -> str:
        """Of the transfer that it brings; empty without one."""
        text: str = (self.kv_transfer_params or {}).get("transfer", "")
        return text.rpartition(".")[0]


@dataclass(frozen=True)
class Part:
    """A request's part of one step of a source."""

    want: Want
    first_position: int
    end: int
    """It computes the tokens ``[first_position, end)``."""
    block_ids: tuple[list[int], ...]

    @property
    def request_id(self) -> str:
        return self.want.request_id


@dataclass
class Step:
    """What a source computes in one step: as much of a ``SchedulerOutputView`` as the product's
    scheduler half reads.
    """

    requests: list[Part] = field(default_factory=list)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {part.request_id: part.end - part.first_position for part in self.requests}
