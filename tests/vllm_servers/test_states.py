"""Pairs of real servers of models with recurrent layers, of equal and unequal shapes.

Every rank writes down digests of what it lent or loaded: cell by cell, states and attention, both
sides must have the same at any concurrency. Where one request runs at a time, of pairs without TP,
the tokens are a lone server's, as far as bfloat16 lets them: decode computes a prompt's last token
by other kernels. TP adds in another order, which changes more: of the gated delta nets a lone
server of two ranks and one of one rank gave other tokens in 29 of 48 answers, two of them not among
the other server's twenty likeliest. So nothing follows from pairs with TP; their ties are printed.
"""

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.pair import Pair, pair_options
from benchmarks.vllm_shapes import TRIALS
from kvferry.connectors.records import digest_mismatch
from kvferry.observe.records import TransferRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # three servers start in the first test
PLUGIN = Path(__file__).parent / "plugin"
TRIAL = TRIALS["vllm_states"]


@pytest.fixture(scope="module", params=list(TRIAL.models))
def model(request):
    return TRIAL.models[request.param]()


@pytest.fixture(scope="module", params=list(TRIAL.shapes))
def shapes(request):
    return TRIAL.shapes[request.param]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A pair, and where its ranks write down what they move."""

    pair: Pair
    folder: Path

    def records(self, direction):
        """Lease → its records of one side."""
        found: dict[Any, Any] = {}
        for path in self.folder.iterdir():
            for line in path.read_bytes().splitlines():
                record = msgspec.json.decode(line, type=TransferRecord)
                if record.direction == direction:
                    found.setdefault(record.lease_id, []).append(record)
        return found


@pytest.fixture(scope="module")
def recorded(shapes, model, start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    connector = KVFerry(extra={"record_digests": True})
    prefill_shape, decode_shape = shapes
    options = [
        dataclasses.replace(
            each,
            transfer={
                **(each.transfer or {}),
                "kv_connector": "RecordingConnector",
                "kv_connector_module_path": "recording",
            },
            path=(PLUGIN,),
            environment={
                **each.environment,
                "RECORDS": str(folder),
            },
        )
        for each in pair_options(model, prefill_shape, decode_shape, connector)
    ]
    with start(options) as servers:
        yield Recorded(Pair(*servers), folder)


@pytest.fixture
def prompt_of(model, request):
    """``prompt_of(length)``: random tokens, other ones in every test."""
    draw = random.Random(request.node.name)
    return lambda length: [draw.randrange(8, model.vocab_size) for _ in range(length)]


def assert_every_cell_arrived(recorded, leases):
    """Of all requests so far."""
    sent, received = recorded.records("send"), recorded.records("recv")
    assert len(received) == leases
    for lease, records in received.items():
        assert all(record.ok for record in records)
        assert digest_mismatch(sent[lease], records) is None


def test_one_request_at_a_time_has_a_lone_servers_tokens(
    recorded, model, shapes, reference, prompt_of
):
    pair, before = recorded.pair, len(recorded.records("recv"))
    ties = []
    for length in TRIAL.lengths:
        prompt = prompt_of(length)
        external = pair.external_tokens()
        tokens, alone = pair.ask(prompt).tokens, reference.tokens(model, prompt)
        assert pair.external_tokens() - external == length - 1
        for at, (ours, theirs) in enumerate(zip(tokens, alone, strict=True)):
            if ours != theirs:
                ties.append(reference.less_likely(model, [*prompt, *alone[:at]], ours))
                break
    assert_every_cell_arrived(recorded, before + len(TRIAL.lengths))
    equal = len(TRIAL.lengths) - len(ties)
    print(f"{equal} of {len(TRIAL.lengths)} answers are a lone server's, {ties=}")
    if all(shape.tp == 1 for shape in shapes):
        assert all(tie < TRIAL.tie_nats for tie in ties)
    assert pair.idle()


def test_every_cell_arrives_eight_requests_at_a_time(recorded, prompt_of):
    pair, before = recorded.pair, len(recorded.records("recv"))
    prompts = [prompt_of(random.Random(index).randrange(3, 1400)) for index in range(24)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(pair.ask, prompts))
    assert_every_cell_arrived(recorded, before + len(prompts))
    assert pair.idle()
