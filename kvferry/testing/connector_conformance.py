"""What every connector must do; subclass it in the tests of yours.

    class TestMyConnector(ConnectorConformance):
        @pytest.fixture
        def configs(self, tmp_path):
            extra = {"folder": str(tmp_path)}
            return tuple(
                KVTransferConfig(kv_connector="MyConnector", kv_role=role,
                                 kv_connector_extra_config=extra)
                for role in ("kv_producer", "kv_consumer")
            )

Both halves run in this process, driven by :class:`~kvferry.testing.fake_engine.FakeEngine`, which
checks the contract in every step: cells, blocks that nobody holds, reports made once. A connector
that knows KV cache groups subclasses :class:`HybridConnectorConformance` as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.base import KVConnectorOutput
from kvferry.testing.fake_engine import FakeEngine, Groups, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.sharding import split_of_group

#: What a router sends along with a request to a prefill engine.
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def small_geometry(layout: str, block_size: int, **parallel: int) -> EngineGeometry:
    """A geometry of 3 layers and 3 heads: few shapes divide either."""
    return EngineGeometry(
        num_layers=3,
        num_kv_heads=3,
        head_size=2,
        dtype="float32",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(**parallel),
    )


#: (producer, consumer) by name.
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
    timeout_s: float

    def run(self, until: Callable[[], bool], what: str) -> None:
        """Steps both until a condition holds; fails after the timeout."""
        run([self.producer, self.consumer], until, timeout_s=self.timeout_s, what=what)

    def prefill(self, request_id: str, num_tokens: int) -> FakeRequest:
        """Computes a prompt on the producer, ready to be decoded elsewhere."""
        request = self.producer.add(request_id, prompt(num_tokens, request_id), REMOTE_DECODE)
        self.run(lambda: request.stage is Stage.FINISHED, f"{request_id!r} to be computed")
        return request

    def decode(self, source: FakeRequest, *, local_blocks: int = 0) -> FakeRequest:
        """Gives the consumer a computed prompt with its first token, as a router does."""
        tokens = (*source.prompt_token_ids, *source.output_token_ids)
        return self.consumer.add(
            source.request_id, tokens, source.response_params, local_blocks=local_blocks
        )

    def finish(self, request: FakeRequest) -> None:
        """Steps both until the consumer's request has ended."""
        self.run(lambda: request.stage is Stage.FINISHED, f"{request.request_id!r} to end")

    def abort_within_a_step(self, request: FakeRequest, *stages: Stage) -> None:
        """Aborts the consumer's request between a step's schedule and its ranks.

        Args:
            request: which one.
            stages: the first step that finds it in one of these.
        """

        def abort() -> None:
            if request.stage in stages:
                self.consumer.abort(request.request_id)

        self.consumer.during_step = abort
        self.finish(request)
        self.consumer.during_step = lambda: None

    def settle(self) -> None:
        """Steps both until nothing is under way; then every block is free and untouched."""
        self.run(lambda: self.producer.is_idle and self.consumer.is_idle, "both to be idle")
        for engine in (self.producer, self.consumer):
            assert engine.num_free_blocks == engine.num_blocks - 1
            engine.check_memory()


@contextmanager
def open_pair(
    configs: tuple[KVTransferConfig, KVTransferConfig],
    geometries: tuple[Groups, Groups],
    num_blocks: int = 64,
    timeout_s: float = 60.0,
    layer_windows: Mapping[int, int] | None = None,
) -> Iterator[Pair]:
    """A producer and a consumer of these configs and geometries, closed at the end.

    Args:
        configs: what a user would write for each.
        geometries: each one's KV cache groups.
        num_blocks: KV blocks per rank.
        timeout_s: seconds after which whatever is waited for counts as failed.
        layer_windows: layer of the model → tokens that it sees, on both.
    """
    with ExitStack() as stack:
        engines = []
        for config, groups in zip(configs, geometries, strict=True):
            engine = FakeEngine.open(
                config, groups, num_blocks=num_blocks, layer_windows=layer_windows
            )
            engines.append(engine)
            stack.callback(engines[-1].close)
        yield Pair(engines[0], engines[1], timeout_s)


def prompt(num_tokens: int, seed: str) -> tuple[int, ...]:
    """Tokens that differ from the first on between seeds."""
    first = sum(seed.encode()) * 1000 + len(seed)
    return tuple(range(first, first + num_tokens))


class ConnectorConformance:
    """The tests. Override :meth:`configs`; the rest where your connector differs."""

    timeout_s: ClassVar[float] = 60.0
    """Seconds after which whatever is waited for counts as failed."""
    num_blocks: ClassVar[int] = 64
    """KV blocks per rank."""
    layer_windows: ClassVar[Mapping[int, int]] = {}
    """Layer of the model → tokens that it sees."""

    @pytest.fixture
    def configs(self) -> tuple[KVTransferConfig, KVTransferConfig]:
        """The configuration of a producer and of a consumer that can reach it."""
        raise NotImplementedError("override the fixture `configs`")

    @pytest.fixture(params=list(GEOMETRIES.values()), ids=list(GEOMETRIES))
    def geometries(self, request: pytest.FixtureRequest) -> tuple[Groups, Groups]:
        """The geometries of producer and consumer; override it if yours must be equal."""
        pair: tuple[Groups, Groups] = request.param
        return pair

    @pytest.fixture
    def pair(
        self,
        configs: tuple[KVTransferConfig, KVTransferConfig],
        geometries: tuple[Groups, Groups],
    ) -> Iterator[Pair]:
        """Two open engines."""
        with open_pair(
            configs, geometries, self.num_blocks, self.timeout_s, self.layer_windows
        ) as pair:
            yield pair

    def lose_source(self, pair: Pair) -> None:
        """Makes what the producer holds unreachable; override it where that is another thing."""
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
        # No handshake may have happened yet: the connector may answer "ask later".
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

    def test_what_nobody_fetches_comes_back(self, pair: Pair) -> None:
        # However a connector bounds it: a lease that expires, a copy elsewhere.
        pair.prefill("r", 21)
        self._settles_and_still_serves(pair)

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
"""Tokens that a layer with a window sees: less than two blocks, and no multiple of one."""
WINDOWED = (0, 1, 2, 4)
"""Layers with a window; the other sees all."""


def hybrid_group(
    layers: Sequence[int],
    layout: str,
    block_size: int,
    *,
    window: int | None = None,
    stage_layers: Sequence[int] = (NUM_LAYERS,),
    tp: int = 1,
) -> EngineGeometry:
    """One KV cache group of a model of 5 layers and 3 heads.

    Args:
        layers: those of the model that the group has.
        layout: of its tensors.
        block_size: tokens per block.
        window: tokens that the group keeps; all if left out.
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


#: (groups of the producer, groups of the consumer) by name.
HYBRID_GEOMETRIES = {
    "equal": 2
    * (
        (
            hybrid_group([3], "NHD", 4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW),
        ),
    ),
    # Another order of groups, and a stage without any layer of one of them.
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
    # Layers with a window in two groups on one side; blocks of two sizes on the other.
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
    # The consumer keeps all tokens of every layer, and can never have those behind the windows.
    "windows-whole": (
        (
            hybrid_group([3], "NHD", 4),
            hybrid_group(WINDOWED, "NHD", 4, window=WINDOW),
        ),
        (hybrid_group(range(NUM_LAYERS), "HND", 5, tp=2),),
    ),
    # The producer keeps more than the consumer has room for.
    "whole-windows": (
        (hybrid_group(range(NUM_LAYERS), "NHD", 4),),
        (
            hybrid_group(WINDOWED, "HND", 5, window=WINDOW, tp=2),
            hybrid_group([3], "HND", 5, tp=2),
        ),
    ),
    # No layer sees all.
    "windows-only": (
        (hybrid_group(range(NUM_LAYERS), "NHD", 4, window=WINDOW),),
        (hybrid_group(range(NUM_LAYERS), "NHD", 6, window=WINDOW, stage_layers=(2, 3)),),
    ),
}


class HybridConnectorConformance(ConnectorConformance):
    """The same tests, and more, over engines that group the layers of one model differently.

    Some groups keep windows. The groups of an engine share block ids and memory, as in a real one,
    so that a block of the wrong group shows. Override ``configs``, as in the suite for one group.
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
