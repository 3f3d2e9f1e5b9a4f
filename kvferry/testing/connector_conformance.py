"""The tests of every connector; subclass the suite in your connector's tests.

    class TestMyConnector(ConnectorConformance):
        @pytest.fixture
        def configs(self, tmp_path):
            extra = {"folder": str(tmp_path)}
            return tuple(
                KVTransferConfig(kv_connector="MyConnector", kv_role=role,
                                 kv_connector_extra_config=extra)
                for role in ("kv_producer", "kv_consumer")
            )

Both halves run in this process. :class:`~kvferry.testing.fake_engine.FakeEngine` drives them and
checks the contract in every step: cells, free blocks, single reports. For a connector with KV cache
groups, subclass :class:`HybridConnectorConformance` as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.base import KVConnectorOutput
from kvferry.errors import KVFerryError
from kvferry.testing.fake_engine import FakeEngine, Groups, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.known_cache import CacheDevice
from kvferry.testing.waiting import WAIT_S
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.sharding import split_of_group

#: The parameters of a router's request to a prefill engine.
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def small_geometry(layout: str, block_size: int, **parallel: int) -> EngineGeometry:
    """A geometry of 3 layers and 3 heads, numbers that few shapes divide."""
    return EngineGeometry(
        num_layers=3,
        num_kv_heads=3,
        head_size=2,
        dtype="float32",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(**parallel),
    )


#: Name → (producer's geometry, consumer's geometry).
GEOMETRIES = {
    "equal": (small_geometry("NHD", 4), small_geometry("NHD", 4)),
    "tp2-pp2": (small_geometry("HND", 4, tp=2), small_geometry("NHD", 6, pp=2)),
    "tp1-tp4": (small_geometry("BLKNHD", 8), small_geometry("NHD", 4, tp=4)),
}


@dataclass(frozen=True)
class Pair:
    """A producer and a consumer, stepped in turn."""

    producer: FakeEngine
    consumer: FakeEngine
    timeout_s: float = WAIT_S

    def run(self, until: Callable[[], bool], what: str) -> None:
        """Steps both engines until a condition holds; fails after the timeout."""
        run([self.producer, self.consumer], until, timeout_s=self.timeout_s, what=what)

    def prefill(
        self, request_id: str, num_tokens: int, content: Mapping[str, str] | None = None
    ) -> FakeRequest:
        """Computes a prompt on the producer, ready for the decode engine."""
        tokens = prompt(num_tokens, request_id)
        request = self.producer.add(request_id, tokens, REMOTE_DECODE, content=content)
        self.run(lambda: request.stage is Stage.FINISHED, f"{request_id!r} to be computed")
        return request

    def decode(
        self,
        source: FakeRequest,
        *,
        local_blocks: int = 0,
        content: Mapping[str, str] | None = None,
    ) -> FakeRequest:
        """Gives the consumer a computed prompt and the first token of the answer, as a router
        does.
        """
        return self.consumer.add(
            source.request_id,
            (*source.prompt_token_ids, *source.output_token_ids),
            source.response_params,
            local_blocks=local_blocks,
            content=content,
        )

    def finish(self, request: FakeRequest) -> None:
        """Steps both engines until the consumer's request has ended."""
        self.run(lambda: request.stage is Stage.FINISHED, f"{request.request_id!r} to end")

    def abort_within_a_step(self, request: FakeRequest, *stages: Stage) -> None:
        """Aborts the consumer's request in the middle of a step: after the schedule, before the
        ranks.

        Args:
            request: the request to abort.
            stages: the abort happens in the first step with the request in one of these stages.
        """

        def abort() -> None:
            if request.stage in stages:
                self.consumer.abort(request.request_id)

        self.consumer.during_step = abort
        self.finish(request)
        self.consumer.during_step = lambda: None

    def settle(self) -> None:
        """Steps both engines until both are idle; then every block must be free and untouched."""
        self.run(lambda: self.producer.is_idle and self.consumer.is_idle, "both to be idle")
        for engine in (self.producer, self.consumer):
            assert engine.num_free_blocks == engine.num_blocks - 1
            engine.check_memory()


@contextmanager
def open_pair(
    configs: tuple[KVTransferConfig, KVTransferConfig],
    geometries: tuple[Groups, Groups],
    num_blocks: int = 64,
    timeout_s: float = WAIT_S,
    layer_windows: Mapping[int, int] | None = None,
    device: CacheDevice | None = None,
) -> Iterator[Pair]:
    """Opens a producer and a consumer with the given configs and geometries, and closes both.

    Args:
        configs: the configs of producer and consumer, as a user would write them.
        geometries: the KV cache groups of producer and consumer.
        num_blocks: KV blocks per rank.
        timeout_s: seconds after which a wait counts as failed.
        layer_windows: layer of the model → window in tokens, for both engines.
        device: memory for the caches of both engines; host memory if left out.
    """
    with ExitStack() as stack:
        engines = []
        for config, groups in zip(configs, geometries, strict=True):
            engine = FakeEngine.open(
                config,
                groups,
                num_blocks=num_blocks,
                layer_windows=layer_windows,
                device=device,
            )
            engines.append(engine)
            stack.callback(engines[-1].close)
        yield Pair(engines[0], engines[1], timeout_s)


def prompt(num_tokens: int, seed: str) -> tuple[int, ...]:
    """A prompt of tokens; prompts of two seeds differ from the first token on."""
    first = sum(seed.encode()) * 1000 + len(seed)
    return tuple(range(first, first + num_tokens))


class ConnectorConformance:
    """The tests of a connector. Override :meth:`configs`, and other members where your connector
    differs.
    """

    timeout_s: ClassVar[float] = WAIT_S
    """Seconds after which a wait counts as failed."""
    num_blocks: ClassVar[int] = 64
    """Number of KV blocks per rank."""
    layer_windows: ClassVar[Mapping[int, int]] = {}
    """Layer of the model → window in tokens."""
    short_lease: ClassVar[Mapping[str, Any]] = {}
    """Extra keys for the one test that waits until KV comes back that nobody fetches, such as a
    lease of a second. The other tests take their leases, late on a busy machine: give ``configs``
    leases that outlast this."""

    @pytest.fixture
    def configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        """The configuration of a producer and of a consumer that can reach the producer."""
        raise NotImplementedError("override the fixture `configs`")

    @pytest.fixture(params=list(GEOMETRIES.values()), ids=list(GEOMETRIES))
    def geometries(self, request: pytest.FixtureRequest) -> tuple[Groups, Groups]:
        """The geometries of producer and consumer; override if your connector needs equal ones."""
        pair: tuple[Groups, Groups] = request.param
        return pair

    @pytest.fixture
    def cache_device(self) -> CacheDevice | None:
        """Memory for the caches; override with, for example, a :class:`TorchDevice` of a GPU."""
        return None

    @pytest.fixture
    def pair(
        self,
        configs: tuple[KVTransferConfig, KVTransferConfig],
        geometries: tuple[Groups, Groups],
        cache_device: CacheDevice | None,
    ) -> Iterator[Pair]:
        """Two open engines."""
        sizes = self.num_blocks, self.timeout_s, self.layer_windows
        with open_pair(configs, geometries, *sizes, cache_device) as pair:
            yield pair

    @pytest.fixture
    def short_lease_pair(
        self,
        configs: tuple[KVTransferConfig, KVTransferConfig],
        geometries: tuple[Groups, Groups],
        cache_device: CacheDevice | None,
    ) -> Iterator[Pair]:
        """Two open engines with the keys of :attr:`short_lease`."""
        producer, consumer = (
            msgspec.structs.replace(
                config,
                kv_connector_extra_config={**config.kv_connector_extra_config, **self.short_lease},
            )
            for config in configs
        )
        sizes = self.num_blocks, self.timeout_s, self.layer_windows
        with open_pair((producer, consumer), geometries, *sizes, cache_device) as pair:
            yield pair

    def lose_source(self, pair: Pair) -> None:
        """Makes the producer's KV unreachable; override if your connector keeps KV elsewhere."""
        pair.producer.close()

    # -- loads ----------------------------------------------------------------------------------

    def test_a_prompt_arrives_cell_by_cell(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 23))
        pair.finish(request)
        assert request.external_tokens > 0
        assert not request.failed
        pair.settle()

    def test_a_prompt_shorter_than_a_block_is_served(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 3))
        pair.finish(request)
        assert not request.failed
        pair.settle()

    def test_many_requests_at_once_keep_their_own_blocks(self, pair: Pair) -> None:
        lengths = {"r": 30, "r1": 17, "r10": 16, "r100": 25, "s": 1}
        sources = [pair.prefill(id, length) for id, length in lengths.items()]
        requests = [pair.decode(source) for source in sources]
        pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
        assert [r.request_id for r in requests if r.failed] == []
        pair.settle()

    def test_a_local_hit_is_left_alone(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 30), local_blocks=2)
        pair.finish(request)
        assert request.external_tokens > 0
        pair.settle()

    def test_a_local_hit_of_everything_needs_no_load(self, pair: Pair) -> None:
        size = pair.consumer.block_size
        request = pair.decode(pair.prefill("r", 2 * size), local_blocks=2)
        pair.finish(request)
        assert request.external_tokens == 0
        pair.settle()

    def test_an_id_may_be_used_again(self, pair: Pair) -> None:
        for length in (20, 13):
            request = pair.decode(pair.prefill("r", length))
            pair.finish(request)
            assert request.external_tokens > 0
            pair.settle()

    def test_a_request_that_comes_before_any_step_is_served(self, pair: Pair) -> None:
        # No handshake may have happened yet, so the connector may answer "ask later".
        source = pair.producer.add("r", prompt(21, "r"), REMOTE_DECODE)
        while source.stage is not Stage.FINISHED:
            pair.producer.step()
        request = pair.decode(source)
        pair.finish(request)
        assert request.external_tokens > 0
        pair.settle()

    def test_ordinary_requests_pass(self, pair: Pair) -> None:
        for engine in (pair.producer, pair.consumer):
            request = engine.add("plain", prompt(19, "plain"))
            pair.finish(request)
            assert request.error is None
        pair.settle()

    def test_kv_of_another_adapter_is_not_loaded(self, pair: Pair) -> None:
        def is_loaded(request_id: str, adapter: str) -> bool:
            source = pair.prefill(request_id, 21, {"lora": "one"})
            try:
                request = pair.decode(source, content={"lora": adapter})
            except KVFerryError:  # the connector refuses the request
                return False
            pair.finish(request)
            return request.external_tokens > 0 and not request.failed

        # The tokens are the same in each pair of requests.
        assert not is_loaded("r", "another")
        assert is_loaded("s", "one")

    # -- aborts ---------------------------------------------------------------------------------

    def test_abort_before_the_source_computes(self, pair: Pair) -> None:
        pair.producer.add("r", prompt(21, "r"), REMOTE_DECODE)
        pair.producer.abort("r")
        self._settles_and_still_serves(pair)

    def test_abort_while_the_source_computes(self, pair: Pair) -> None:
        pair.producer.add("r", prompt(21, "r"), REMOTE_DECODE)
        pair.producer.during_step = lambda: pair.producer.abort("r")
        pair.producer.step()
        pair.producer.during_step = lambda: None
        self._settles_and_still_serves(pair)

    def test_abort_before_it_is_admitted(self, pair: Pair) -> None:
        pair.decode(pair.prefill("r", 21))
        pair.consumer.abort("r")
        self._settles_and_still_serves(pair)

    def test_abort_before_the_ranks_hear_of_the_load(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 21))
        pair.abort_within_a_step(request, Stage.LOADING, Stage.COMPUTING)
        assert request.finish_reason == "abort"
        self._settles_and_still_serves(pair)

    def test_abort_while_it_loads(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 21))
        pair.run(lambda: request.stage is not Stage.WAITING, "its admission")
        pair.consumer.abort("r")
        self._settles_and_still_serves(pair)

    def test_abort_after_its_load(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 21))
        pair.abort_within_a_step(request, Stage.COMPUTING)
        self._settles_and_still_serves(pair)

    def test_what_nobody_fetches_comes_back(self, short_lease_pair: Pair) -> None:
        # Connectors may bound this time in any way: a lease that expires, a copy elsewhere.
        pair = short_lease_pair
        pair.prefill("r", 21)
        pair.settle()

        def serves(request_id: str) -> bool:
            request = pair.decode(pair.prefill(request_id, 18))
            pair.finish(request)
            return request.external_tokens > 0 and not request.failed

        # Where that time is short, a busy machine fetches some prompts too late.
        assert any(serves(f"next{number}") for number in range(20))
        pair.settle()

    def _settles_and_still_serves(self, pair: Pair) -> None:
        pair.settle()
        request = pair.decode(pair.prefill("next", 18))
        pair.finish(request)
        assert request.external_tokens > 0
        assert not request.failed
        pair.settle()

    # -- failures -------------------------------------------------------------------------------

    def test_unknown_ids_are_ignored(self, pair: Pair) -> None:
        for engine in (pair.producer, pair.consumer):
            engine.step()
            engine.scheduler.update_connector_output(
                KVConnectorOutput(
                    finished_sending={"nobody"},
                    finished_recving={"nobody"},
                    failed_recving={"nobody"},
                    invalid_block_ids={1},
                )
            )
            for worker in engine.workers:
                report = worker.get_transfer_results({"nobody"})
                assert not report.finished_sending | report.finished_recving
        self._settles_and_still_serves(pair)

    def test_a_lost_source_fails_the_load_and_nothing_else(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 21))
        self.lose_source(pair)

        def until(condition: Callable[[], bool], what: str) -> None:
            run([pair.consumer], condition, timeout_s=self.timeout_s, what=what)

        until(lambda: request.stage is Stage.FINISHED, "the load to fail or the prompt's tokens")
        other = pair.consumer.add("other", prompt(9, "other"))
        until(lambda: other.stage is Stage.FINISHED and pair.consumer.is_idle, "the consumer")
        assert pair.consumer.num_free_blocks == pair.consumer.num_blocks - 1
        pair.consumer.check_memory()

    def test_close_with_loads_under_way(self, pair: Pair) -> None:
        request = pair.decode(pair.prefill("r", 40))
        pair.run(lambda: request.stage is not Stage.WAITING, "its admission")
        pair.consumer.close()
        pair.producer.close()


NUM_LAYERS = 5
WINDOW = 7
"""Window in tokens: less than two blocks, and no multiple of a block."""
WINDOWED = (0, 1, 2, 4)
"""Layers with a window; the remaining layer sees all tokens."""


def hybrid_group(
    layers: Sequence[int],
    layout: str,
    block_size: int,
    *,
    window: int | None = None,
    stage_layers: Sequence[int] = (NUM_LAYERS,),
    tp: int = 1,
) -> EngineGeometry:
    """A KV cache group of a model with 5 layers and 3 heads.

    Args:
        layers: the model's layers in the group.
        layout: layout of the tensors.
        block_size: tokens per block.
        window: number of tokens that the group keeps; all tokens if left out.
        stage_layers: layers of the whole model per pipeline stage.
        tp: tensor-parallel ranks per stage.
    """
    return replace(
        small_geometry(layout, block_size, tp=tp, pp=len(stage_layers)),
        num_layers=len(layers),
        layer_indices=tuple(layers),
        layer_split=split_of_group(layers, stage_layers),
        sliding_window=window,
    )


#: Name → (groups of the producer, groups of the consumer).
HYBRID_GEOMETRIES = {
    "equal": 2
    * (
        (
            hybrid_group([3], "NHD", 4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW),
        ),
    ),
    # Another order of groups, and a stage without any layer of some group.
    "tp2-pp2": (
        (
            hybrid_group(WINDOWED, "HND", 4, window=WINDOW, tp=2),
            hybrid_group([3], "HND", 4, tp=2),
        ),
        (
            hybrid_group([3], "NHD", 6, stage_layers=(2, 3)),
            hybrid_group(WINDOWED, "NHD", 6, window=WINDOW, stage_layers=(2, 3)),
        ),
    ),
    # Layers with a window in two groups on one side; blocks of two sizes on the other side.
    "tp1-tp4": (
        (
            hybrid_group([0, 4], "BLKNHD", 8, window=WINDOW),
            hybrid_group([3], "BLKNHD", 8),
            hybrid_group([1, 2], "BLKNHD", 8, window=WINDOW),
        ),
        (
            hybrid_group([3], "NHD", 8, tp=4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW, tp=4),
        ),
    ),
    # The consumer keeps all tokens of every layer, but can never load tokens behind the windows.
    "windows-whole": (
        (
            hybrid_group([3], "NHD", 4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW),
        ),
        (hybrid_group(range(NUM_LAYERS), "HND", 5, tp=2),),
    ),
    # The producer keeps more tokens than the consumer has room for.
    "whole-windows": (
        (hybrid_group(range(NUM_LAYERS), "NHD", 4),),
        (
            hybrid_group(WINDOWED, "HND", 5, window=WINDOW, tp=2),
            hybrid_group([3], "HND", 5, tp=2),
        ),
    ),
    # No layer sees all tokens.
    "windows-only": (
        (hybrid_group(range(NUM_LAYERS), "NHD", 4, window=WINDOW),),
        (hybrid_group(range(NUM_LAYERS), "NHD", 6, window=WINDOW, stage_layers=(2, 3)),),
    ),
}


class HybridConnectorConformance(ConnectorConformance):
    """The same tests, and more, with engines that group the layers of a model differently.

    Some groups keep windows. The groups of an engine share block ids and memory, as in a real
    engine, so a block of the wrong group shows. Override ``configs``, as in the suite for one
    group.
    """

    num_blocks: ClassVar[int] = 128
    layer_windows: ClassVar[Mapping[int, int]] = dict.fromkeys(WINDOWED, WINDOW)

    @pytest.fixture(params=list(HYBRID_GEOMETRIES.values()), ids=list(HYBRID_GEOMETRIES))
    def geometries(self, request: pytest.FixtureRequest) -> tuple[Groups, Groups]:
        """The groups of producer and consumer."""
        pair: tuple[Groups, Groups] = request.param
        return pair

    @pytest.mark.parametrize("num_tokens", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 40])
    def test_a_prompt_of_any_length_arrives(self, pair: Pair, num_tokens: int) -> None:
        request = pair.decode(pair.prefill("r", num_tokens))
        pair.finish(request)
        assert not request.failed
        pair.settle()

    @pytest.mark.parametrize("num_tokens", [27, 33, 49])
    def test_a_local_hit_that_ends_in_or_behind_the_window_is_left_alone(
        self, pair: Pair, num_tokens: int
    ) -> None:
        blocks = (num_tokens - 1) // pair.consumer.block_size
        request = pair.decode(pair.prefill("r", num_tokens), local_blocks=blocks)
        pair.finish(request)
        assert not request.failed
        pair.settle()
