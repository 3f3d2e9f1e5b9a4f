"""What a manager under test can do. The managers' interfaces are nearly one."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from benchmarks.peers.setups import Setup


class Hit(NamedTuple):
    """What the prefix cache answers."""

    blocks: Any
    """The manager's own form."""
    num_tokens: int


class Allocation(NamedTuple):
    """What a call of ``allocate`` asks for."""

    num_new_tokens: int
    num_lookahead_tokens: int = 0
    num_external_tokens: int = 0
    """Tokens that something outside will fill; the blocks are not hashed before ``cache``."""
    reserved_blocks: int = 0
    must_fit: bool = False


class CachePeer:
    """A manager; subclasses know whose."""

    name: ClassVar[str]

    def __init__(self, setup: Setup, manager: Any) -> None:
        """Subclasses take the setup alone."""
        self.setup = setup
        self.manager = manager
        """The manager itself: what is timed is called without a layer between."""

    def request(self, request_id: str, token_ids: list[int]) -> Any:
        """A request whose full blocks are hashed. It has ``num_tokens``,
        ``append_output_token_ids`` and ``num_computed_tokens``, which the caller keeps.
        """
        raise NotImplementedError

    def new_step(self) -> None:
        """All that was allocated so far has been computed."""
        self.manager.new_step_starts()

    def lookup(self, request: Any) -> Hit:
        """What of a request is cached."""
        found = self.manager.get_computed_blocks(request)
        return Hit(found[0], found[1])  # vLLM has a third item

    def allocate(
        self, request: Any, wanted: Allocation, hit: Hit | None = None
    ) -> tuple[int, ...] | None:
        """Numbers of new blocks, by group; ``None`` if it does not fit."""
        new = self.manager.allocate_slots(
            request,
            wanted.num_new_tokens,
            num_new_computed_tokens=hit.num_tokens if hit else 0,
            new_computed_blocks=hit.blocks if hit else None,
            num_lookahead_tokens=wanted.num_lookahead_tokens,
            delay_cache_blocks=wanted.num_external_tokens > 0,
            num_external_computed_tokens=wanted.num_external_tokens,
            reserved_blocks=wanted.reserved_blocks,
            full_sequence_must_fit=wanted.must_fit,
        )
        return None if new is None else tuple(len(group) for group in new.blocks)

    def cache(self, request: Any, num_tokens: int) -> None:
        """Blocks of a load are hits from now on."""
        self.manager.cache_blocks(request, num_tokens)

    def free(self, request: Any) -> None:
        """Gives all blocks back."""
        self.manager.free(request)

    def reset(self) -> bool:
        """Forgets all hits; whether it did."""
        return bool(self.manager.reset_prefix_cache())

    def num_free_blocks(self) -> int:
        """Blocks that could be taken."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def tables(self, request: Any) -> Sequence[Sequence[int]]:
        """Block ids by group; 0 is the null block."""
        tables: tuple[list[int], ...] = self.manager.get_block_ids(request.request_id)
        return tables
