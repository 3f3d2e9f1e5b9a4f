"""The tests of a connector between hosts; subclass the suite in your connector's tests.

    class TestMyConnectorBetweenHosts(MultiHostConnectorConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def configs(cls, hosts):
            return tuple(
                KVTransferConfig(kv_connector="MyConnector", kv_role=role,
                                 kv_load_failure_policy="recompute",
                                 kv_connector_extra_config={"host": cls.address(host)})
                for role, host in (("kv_producer", hosts.prefill), ("kv_consumer", hosts.decode))
            )

A prefill engine and a decode engine of unequal shapes run a small random model in float64, on two
hosts made of network namespaces. The tests run on a third host and act as a router. Every answer is
compared with the answer of an undivided engine. All tests are skipped if the machine allows no
hosts.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
import pytest

from kvferry.config import EngineConfig, KVTransferConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig
from kvferry.errors import HostError
from kvferry.testing.host_engines import DTYPE, HostAnswer, HostEngine, HostPair
from kvferry.testing.hosts import Host, Network
from kvferry.testing.waiting import WAIT_S, until

MAX_TOKENS = 6
NUM_BLOCKS = 256
FAULT_S = 2.0
"""Seconds for which a fault lasts."""

TRIES = 10
"""Number of prompts of which one must be loaded."""

CLIENTS = 6
"""Number of requests under way at a time."""

Prompt: TypeAlias = tuple[int, ...]
Expected: TypeAlias = Callable[[Sequence[Prompt]], list[list[int]]]


def prompt(num_tokens: int, seed: int) -> Prompt:
    """Tokens of the tiny model; no two prompts begin alike."""
    chance = random.Random(seed)
    return tuple(chance.randrange(3, 300) for _ in range(num_tokens))


def prompts(seed: int, number: int = 6) -> list[Prompt]:
    """Prompts from 25 tokens on, each with several blocks."""
    return [prompt(25 + 20 * index, 100 * seed + index) for index in range(number)]


@dataclass(frozen=True)
class Hosts:
    """The hosts of a test, and the network between them."""

    network: Network
    prefill: Host
    decode: Host
    client: Host


#: Faults that interrupt all contact between the two engines; :meth:`HostPair.mend` ends a fault.
INTERRUPTIONS: Mapping[str, Callable[[HostPair], None]] = {
    "cut": lambda pair: pair.network.cut(pair.prefill.host, pair.decode.host),
    "cut-from-prefill": lambda pair: pair.network.cut(
        pair.prefill.host, pair.decode.host, one_way=True
    ),
    "cut-from-decode": lambda pair: pair.network.cut(
        pair.decode.host, pair.prefill.host, one_way=True
    ),
    "prefill-stopped": lambda pair: pair.prefill.host.pause(),
    "decode-stopped": lambda pair: pair.decode.host.pause(),
}

#: Faults of a link that the engines must be able to work with.
BAD_LINKS: Mapping[str, Callable[[HostPair], None]] = {
    "slow": lambda pair: pair.network.slow(
        pair.prefill.host, pair.decode.host, delay_s=0.05, bytes_per_s=1e6
    ),
    "lossy": lambda pair: pair.network.lose(pair.prefill.host, pair.decode.host, 0.1),
}


class MultiHostConnectorConformance:
    """The tests of a connector between hosts. Override :meth:`configs`, and other members where
    your connector differs.
    """

    timeout_s: ClassVar[float] = WAIT_S
    """Seconds after which a wait counts as failed."""
    prefill_shape: ClassVar[Mapping[str, Any]] = {"tp": 2, "block_size": 8, "layout": "HND"}
    """Shape of the prefill engine, as in a cluster file; override both shapes if yours must be
    equal."""
    decode_shape: ClassVar[Mapping[str, Any]] = {"block_size": 12, "layout": "NHD"}
    """Shape of the decode engine, as in a cluster file."""
    family: ClassVar[Literal["ipv4", "ipv6"]] = "ipv4"
    """Address family of the hosts."""

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls, hosts: Hosts) -> tuple[KVTransferConfig, KVTransferConfig]:
        """The configuration of a producer and of a consumer that can reach the producer.

        Set ``kv_load_failure_policy="recompute"``, so that no fault costs an answer.
        """
        raise NotImplementedError("override the fixture `configs`, with scope='class'")

    @classmethod
    def address(cls, host: Host) -> str:
        """The address at which other hosts reach a host."""
        return host.ipv6 if cls.family == "ipv6" else host.ipv4

    @pytest.fixture(scope="class")
    @classmethod
    def hosts(cls) -> Iterator[Hosts]:
        """The hosts, without processes; skips the tests if the machine allows no hosts."""
        try:
            network = Network.open()
        except HostError as error:
            pytest.skip(str(error))
        with network:
            yield Hosts(network, *map(network.add_host, ("prefill", "decode", "client")))

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of the model."""
        return prepare_model("tiny", tiny=TinyConfig(), cache=tmp_path_factory.mktemp("models"))

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, model: Path) -> Iterator[Expected]:
        """Answers of an engine with one rank, in this process."""
        config = EngineConfig(name="undivided", kv_transfer_config={})
        with build_engine(
            config, model, dtype=DTYPE, executor="inprocess", connect=False
        ) as engine:
            sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
            yield lambda asked: [one.token_ids for one in engine.generate(asked, sampling)]

    @pytest.fixture(scope="class")
    @classmethod
    def engines(
        cls,
        hosts: Hosts,
        configs: tuple[KVTransferConfig, KVTransferConfig],
        model: Path,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> HostPair:
        """A prefill engine and a decode engine, not yet running."""
        logs = tmp_path_factory.mktemp("logs")

        def engine(host: Host, config: KVTransferConfig, shape: Mapping[str, Any]) -> HostEngine:
            engine = EngineConfig(
                name=host.name,
                kv_transfer_config=msgspec.to_builtins(config),
                num_blocks=NUM_BLOCKS,
                **shape,
            )
            return HostEngine(
                host,
                hosts.client,
                engine,
                address=cls.address(host),
                model=model,
                log=logs / host.name,
                timeout_s=cls.timeout_s,
            )

        return HostPair(
            hosts.network,
            engine(hosts.prefill, configs[0], cls.prefill_shape),
            engine(hosts.decode, configs[1], cls.decode_shape),
            MAX_TOKENS,
            cls.timeout_s,
        )

    @pytest.fixture
    def pair(self, engines: HostPair) -> Iterator[HostPair]:
        """Two running engines that hold no block; restarted after a failed test."""
        if not engines.is_settled:
            engines.start()
        engines.is_settled = False
        yield engines
        engines.mend()

    # -- a good link ----------------------------------------------------------------------------

    def test_answers_are_those_of_an_undivided_engine(
        self, pair: HostPair, expected: Expected
    ) -> None:
        asked = [prompt(length, seed=length) for length in (2, 30, 100)]
        answers = [pair.serve(one) for one in asked]
        self.check(answers, expected(asked))
        for length in (30, 100):
            self.check_kv_moves(pair, expected, length)
        pair.settle()

    def test_many_requests_at_once(self, pair: HostPair, expected: Expected) -> None:
        asked = prompts(seed=1, number=2 * CLIENTS)
        self.check(_at_once(pair.serve, asked), expected(asked))
        pair.settle()

    def test_what_was_loaded_is_what_was_lent(self, pair: HostPair) -> None:
        # Only for connectors that record digests; the tokens above prove the same in another way.
        _at_once(pair.serve, prompts(seed=2))
        pair.check_digests()
        pair.settle()

    def test_a_prefix_that_was_loaded_serves_other_requests(
        self, pair: HostPair, expected: Expected
    ) -> None:
        # Attention accepts the blocks of a prompt in any order. A request that finds only one of
        # the blocks in the prefix cache does not.
        size = self.decode_shape["block_size"]
        loaded, rest = prompt(5 * size, seed=30), prompt(7, seed=31)
        self.check([pair.serve(loaded)], expected([loaded]))
        asked = [(*loaded[: size * blocks], *rest) for blocks in (1, 2, 3, 4)]
        answers = [pair.decode.complete(one, MAX_TOKENS, {}) for one in asked]
        self.check(answers, expected(asked))
        pair.settle()

    def test_what_nobody_fetches_comes_back(self, pair: HostPair) -> None:
        for one in prompts(seed=3, number=2):
            assert pair.lend(one).error == ""
        pair.settle()

    # -- faults ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("begin", BAD_LINKS.values(), ids=BAD_LINKS)
    def test_a_bad_link_costs_no_answer(
        self, pair: HostPair, expected: Expected, begin: Callable[[HostPair], None]
    ) -> None:
        asked = prompts(seed=4)
        begin(pair)
        self.check(_at_once(pair.serve, asked), expected(asked))
        self.check_recovery(pair, expected)

    @pytest.mark.parametrize("begin", INTERRUPTIONS.values(), ids=INTERRUPTIONS)
    def test_an_interruption_costs_no_answer(
        self, pair: HostPair, expected: Expected, begin: Callable[[HostPair], None]
    ) -> None:
        lent, new = prompts(seed=5), prompts(seed=6)
        firsts = _at_once(pair.lend, lent)
        begin(pair)
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            loads = pool.map(pair.load, lent, firsts)
            whole = pool.map(pair.serve, new)
            time.sleep(FAULT_S)
            pair.mend()
            answers = [*loads, *whole]
        self.check(answers, expected([*lent, *new]))
        self.check_recovery(pair, expected)

    def test_a_prefill_host_that_dies_costs_no_answer_that_it_has_begun(
        self, pair: HostPair, expected: Expected
    ) -> None:
        asked = prompts(seed=7)
        firsts = _at_once(pair.lend, asked)
        pair.prefill.host.kill()
        self.check(_at_once(pair.load, asked, firsts), expected(asked))
        pair.prefill.start()
        pair.prefill.wait_until_ready()
        self.check_recovery(pair, expected)

    def test_a_decode_host_that_dies_keeps_no_block(
        self, pair: HostPair, expected: Expected
    ) -> None:
        asked = prompts(seed=8)
        firsts = _at_once(pair.lend, asked)
        with ThreadPoolExecutor(CLIENTS) as pool:
            # The loads are under way as long as the link is this slow.
            pair.network.slow(pair.prefill.host, pair.decode.host, bytes_per_s=1e4)
            loads = pool.map(pair.load, asked, firsts)
            time.sleep(FAULT_S / 2)
            pair.decode.host.kill()
            ended = list(loads)
        # All answers that came in time must be right.
        served = [
            (one, answer) for one, answer in zip(asked, ended, strict=True) if not answer.error
        ]
        self.check([answer for _, answer in served], expected([one for one, _ in served]))
        pair.mend()
        pair.decode.start()
        pair.decode.wait_until_ready()
        self.check_recovery(pair, expected)

    # -- what is checked ------------------------------------------------------------------------

    def check(self, answers: Sequence[HostAnswer], expected: Sequence[list[int]]) -> None:
        """Asserts that every request was answered, with the tokens of an undivided engine."""
        assert [answer.error for answer in answers if answer.error] == []
        assert [answer.token_ids for answer in answers] == expected

    def check_kv_moves(self, pair: HostPair, expected: Expected, num_tokens: int = 60) -> None:
        """Asserts that the decode engine loads one of a few prompts. On a busy machine the prefill
        engine may give up one, which is then computed.
        """
        asked = (prompt(num_tokens, seed) for seed in range(2000, 2000 + TRIES))
        assert any(self._moves(pair, expected, one) for one in asked), (
            f"none of {TRIES} prompts of {num_tokens} tokens came from the prefill engine"
        )

    def _moves(self, pair: HostPair, expected: Expected, asked: Prompt) -> bool:
        """Whether the KV of a prompt is loaded; asserts that the answer is right."""
        answer = pair.serve(asked)
        self.check([answer], expected([asked]))
        return pair.summary(answer).num_external_tokens > 0

    def check_recovery(self, pair: HostPair, expected: Expected) -> None:
        """Asserts that KV moves again after the fault, and that every block becomes free."""
        pair.mend()
        seeds = itertools.count(1000)
        until(
            lambda: self._moves(pair, expected, prompt(60, next(seeds))),
            self.timeout_s,
            what="anything from the prefill engine",
        )
        pair.check_digests()
        pair.settle()


def _at_once(
    ask: Callable[..., HostAnswer], asked: Sequence[Prompt], *more: Sequence[HostAnswer]
) -> list[HostAnswer]:
    """Answers to prompts, with several requests under way at a time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, asked, *more))
