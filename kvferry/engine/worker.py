"""One rank of the reference engine: a model runner and the worker half of a connector.

The runner computes steps on the rank's share of the model, and draws tokens so that the choice
does not depend on batch, rank or engine.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.connectors.base import KVConnectorMetadata, WorkerConnector
from kvferry.connectors.registry import connector_context
from kvferry.engine.attention import build_batch
from kvferry.engine.communicator import Communicator
from kvferry.engine.messages import (
    RankOutput,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    WorkerSpec,
)
from kvferry.engine.model import DecoderModel, LayerHook, NoHook
from kvferry.engine.shard import PagedKVCache
from kvferry.engine.weights import fingerprint, load_model_config
from kvferry.errors import EngineError

#: Below this the largest logit wins every draw, and dividing by it could overflow.
_GREEDY_TEMPERATURE = 1e-5


def best_two_gaps(logits_SV: torch.Tensor) -> list[float]:
    """Difference of the two largest logits of each row."""
    best = logits_SV.topk(min(2, logits_SV.shape[-1]), dim=-1).values.double()
    return [float(row[0] - row[-1]) for row in best]


def sample(logits_V: torch.Tensor, params: SamplingParams, output_index: int) -> int:
    """Chooses one token.

    Args:
        logits_V: of one position, any float dtype.
        params: how to choose; with a seed the draw follows from ``(seed, output_index)`` and the
            logits alone.
        output_index: of the token in its answer, ``seed_offset`` included.
    """
    if params.temperature < _GREEDY_TEMPERATURE:
        return int(logits_V.argmax())
    scores = _top_p(_top_k(logits_V.double() / params.temperature, params.top_k), params.top_p)
    # A race: token t arrives after an exponential time with rate p(t), and the first wins. Each
    # token has its own random number, so logits that differ in the last bits, or one token more
    # or less inside top_p, almost never change the winner; walking along a cumulative sum would
    # shift every boundary.
    waits = torch.empty_like(scores).exponential_(generator=_generator(params.seed, output_index))
    return int((scores - waits.log()).argmax())


def _generator(seed: int | None, output_index: int) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    digest = hashlib.sha256(f"{seed} {output_index}".encode()).digest()
    return generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keeps the ``top_k`` best; ties with the last of them stay too."""
    if not 0 < top_k < len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(top_k).values[-1], float("-inf"))


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the fewest best tokens whose probabilities add up to ``top_p``, at least one."""
    if top_p >= 1.0:
        return scores
    ordered, tokens = scores.softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    dropped = before >= top_p
    dropped[0] = False
    return scores.index_fill(0, tokens[dropped], float("-inf"))


class ModelRunner:
    """Computes steps on one rank.

    Args:
        spec: of the engine's workers.
        communicator: the rank's end.
        memory: for the KV cache, at least :meth:`PagedKVCache.nbytes` bytes.

    Raises:
        ModelError: the model folder cannot be used, or is of another shape than the geometries.
    """

    def __init__(
        self, spec: WorkerSpec, communicator: Communicator, memory: npt.NDArray[np.uint8]
    ) -> None:
        self._groups = spec.geometries
        self.cache = PagedKVCache(self._groups, communicator.rank, spec.num_blocks, memory)
        folder = spec.folder
        self.model = DecoderModel(
            folder,
            load_model_config(folder),
            self._groups,
            communicator,
            getattr(torch, spec.dtype),
        )

    def run(self, requests: Sequence[ScheduledRequest], hook: LayerHook) -> RankOutput:
        """Computes one step.

        Args:
            requests: the same on every rank; nothing is computed if there are none.
            hook: told about each layer.

        Raises:
            WorkerDiedError: another rank is gone.
            BlockTableError: a block table lacks a block that its request needs.
        """
        output = RankOutput()
        if not requests:
            return output
        with torch.inference_mode():
            model = self.model
            batch = build_batch(requests, self._groups, model.dtype, model.config.layer_windows)
            logits_SV = model.forward(batch, self.cache, hook)
            if logits_SV is None:
                return output
            asked = [request for request in requests if request.sample is not None]
            gaps = best_two_gaps(logits_SV)
            for request, row_V, gap in zip(asked, logits_SV, gaps, strict=True):
                assert request.sample is not None
                token = sample(row_V, request.sample, request.output_index)
                output.sampled[request.request_id] = token
                output.gaps[request.request_id] = gap
        return output


class Worker:
    """Executes steps on one rank; used from one thread.

    Args:
        spec: of the engine's workers.
        communicator: the rank's end; the worker closes it.

    Raises:
        ModelError: the model folder cannot be used.
        ConfigError: the connector's configuration is wrong.
        HostError: the connector found no memory or no port.
    """

    def __init__(self, spec: WorkerSpec, communicator: Communicator) -> None:
        self.rank = communicator.rank
        with ExitStack() as opened:
            opened.callback(communicator.close)
            half = _open_connector(spec, self.rank)
            if half is not None:
                opened.callback(half.connector.close)
            nbytes = PagedKVCache.nbytes(spec.geometries, self.rank, spec.num_blocks)
            # The transport must own the memory that it serves: shared memory, for one, cannot
            # take over memory that exists. And memory comes before weights, which take longer.
            memory = np.zeros(nbytes, np.uint8) if half is None else half.connector.allocate(nbytes)
            if memory.nbytes < nbytes:
                raise EngineError(
                    f"connector allocated {memory.nbytes} bytes, {nbytes} were asked for"
                )
            self._runner = ModelRunner(spec, communicator, memory)
            if half is not None:
                half.connector.register_kv_caches(self._runner.cache.tensors)
            self._half = half
            self._hook: LayerHook = NoHook() if half is None else _ConnectorHook(spec, half)
            self._opened = opened.pop_all()

    @property
    def runner(self) -> ModelRunner:
        """The model and the KV cache, for tests and digests."""
        return self._runner

    def handshake(self) -> bytes:
        """What the connector's scheduler half must know of this rank."""
        return b"" if self._half is None else self._half.connector.handshake_metadata()

    def execute(self, step: SchedulerOutput) -> RankOutput:
        """One step, in the order that :mod:`kvferry.connectors.base` documents.

        Raises:
            WorkerDiedError: another rank is gone.
            EngineError: the step does not fit this rank.
        """
        half = self._half
        if half is None:
            return self._runner.run(step.requests, self._hook)
        if step.connector_metadata is None:
            raise EngineError("a step without connector metadata reached a rank with a connector")
        half.connector.start_load_kv(half.decoder.decode(step.connector_metadata))
        output = self._runner.run(step.requests, self._hook)
        half.connector.wait_for_save()
        output.kv_connector_output = half.connector.get_transfer_results(step.finished_req_ids)
        return output

    def close(self) -> None:
        """Closes the connector, then leaves the group. Idempotent."""
        # Views of the connector's memory must be gone before the connector unmaps it.
        self.__dict__.pop("_runner", None)
        self._opened.close()


class _ConnectorHalf(msgspec.Struct):
    connector: WorkerConnector
    decoder: msgspec.msgpack.Decoder[KVConnectorMetadata]


def _open_connector(spec: WorkerSpec, rank: int) -> _ConnectorHalf | None:
    if spec.kv_transfer_config is None:
        return None
    plugin, context = connector_context(
        spec.kv_transfer_config,
        incarnation=spec.incarnation,
        groups=spec.geometries,
        layer_windows=spec.layer_windows,
        model=fingerprint(spec.folder, spec.dtype),
        num_blocks=spec.num_blocks,
        world_size=spec.parallel.world_size,
    )
    return _ConnectorHalf(plugin.worker(context, rank), msgspec.msgpack.Decoder(plugin.Metadata))


class _ConnectorHook:
    """Tells the connector about each layer, by the name of the layer's own tensor.

    Also where one tensor holds all layers: a connector that moves layer by layer needs the layer.
    """

    def __init__(self, spec: WorkerSpec, half: _ConnectorHalf) -> None:
        self._names = {
            layer: geometry.layer_name(layer)
            for geometry in spec.geometries
            for layer in geometry.model_layers
        }
        self._connector = half.connector

    def before_attention(self, layer: int) -> None:
        self._connector.wait_for_layer_load(self._names[layer])

    def after_attention(self, layer: int) -> None:
        self._connector.save_kv_layer(self._names[layer])
