"""A rank of the reference engine: its part of the model, and the worker half of a connector.

The sampling of tokens does not depend on batch, rank or engine.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvferry.connectors.base import WorkerConnector
from kvferry.decoding import decoder_for
from kvferry.engine.attention import build_batch
from kvferry.engine.communicator import Communicator
from kvferry.engine.messages import (
    RankOutput,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    WorkerSpec,
)
from kvferry.engine.model import DecoderModel
from kvferry.engine.shard import PagedKVCache
from kvferry.engine.weights import load_model_config
from kvferry.errors import EngineError
from kvferry.topology.heads import HeadDigests

#: Temperature below which sampling is greedy: the largest logit wins always, and a division by a
#: temperature that small could overflow.
_GREEDY_TEMPERATURE = 1e-5


def best_two_gaps(logits_SV: torch.Tensor) -> list[float]:
    """Difference between the two largest logits, for each row."""
    best = logits_SV.topk(min(2, logits_SV.shape[-1]), dim=-1).values.double()
    return [float(row[0] - row[-1]) for row in best]


def sample(logits_V: torch.Tensor, params: SamplingParams, output_index: int) -> int:
    """Samples a token.

    Args:
        logits_V: logits of a position, with any float dtype.
        params: rules for the sampling. With a seed, the token depends only on the seed,
            ``output_index`` and the logits.
        output_index: index of the token in its answer, including ``seed_offset``.
    """
    if params.temperature < _GREEDY_TEMPERATURE:
        return int(logits_V.argmax())
    scores = _top_p(_top_k(logits_V.double() / params.temperature, params.top_k), params.top_p)
    # The sampling is a race: token t arrives after an exponential time with rate p(t), and the
    # first token wins. Each token has its own random number. So logits that differ in the last
    # bits, or an additional token inside top_p, almost never change the winner. A walk along a
    # cumulative sum would instead shift every boundary.
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
    """Keeps the ``top_k`` best tokens, and all ties with the last of these."""
    if not 0 < top_k < len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(top_k).values[-1], float("-inf"))


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the fewest best tokens whose probabilities add up to ``top_p``, at least one token."""
    if top_p >= 1.0:
        return scores
    ordered, tokens = scores.softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    dropped = before >= top_p
    dropped[0] = False
    return scores.index_fill(0, tokens[dropped], float("-inf"))


class Worker:
    """Executes the steps of a rank. Only a single thread may use the worker.

    Args:
        spec: settings of the engine's ranks.
        communicator: the communicator of this rank; the worker closes it.

    Raises:
        ModelError: the model folder cannot be used, or its shape differs from the geometries.
        ConfigError: the connector's configuration is wrong.
        HostError: the connector found no memory or no port.
    """

    cache: PagedKVCache
    model: DecoderModel

    def __init__(self, spec: WorkerSpec, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self._groups = spec.geometries
        self._layer_windows = spec.layer_windows
        self._connector: WorkerConnector | None = None
        with ExitStack() as opened:
            opened.callback(communicator.close)
            if spec.kv_transfer_config is not None:
                plugin, context = spec.connector(spec.kv_transfer_config)
                self._connector = plugin.worker(context, self.rank)
                opened.callback(self._connector.close)
                self._metadata_decoder = decoder_for(plugin.Metadata)
            # Allocate memory before the weights are loaded, because loading takes longer.
            memory = self._allocate(PagedKVCache.nbytes(self._groups, self.rank, spec.num_blocks))
            self.cache = PagedKVCache(self._groups, self.rank, spec.num_blocks, memory)
            self._open_model = partial(
                DecoderModel,
                groups=self._groups,
                communicator=communicator,
                dtype=getattr(torch, spec.dtype),
            )
            self.model = self._open_model(spec.folder, load_model_config(spec.folder))
            if self._connector is not None:
                self._connector.register_kv_caches(self.cache.tensors)
                self._connector.set_head_digests(self.model.head_digests())
            self._opened = opened.pop_all()

    def _allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if self._connector is None:
            return np.zeros(nbytes, np.uint8)
        # The transport must allocate the memory that it serves. Shared memory, for example, cannot
        # take over existing memory.
        memory = self._connector.allocate(nbytes)
        if memory.nbytes < nbytes:
            raise EngineError(f"connector allocated {memory.nbytes} bytes, {nbytes} were asked for")
        return memory

    def handshake(self) -> bytes:
        """Handshake data of this rank for the connector's scheduler half."""
        return b"" if self._connector is None else self._connector.handshake_metadata()

    def load_weights(self, folder: Path) -> HeadDigests:
        """Computes with other weights from the next step on.

        Args:
            folder: folder with a converted model of the same shape.

        Returns:
            Digests of the weights of this rank's KV heads.

        Raises:
            ModelError: the folder cannot be used. The rank has no weights any more.
        """
        del self.model  # two models may not fit into memory
        self.model = self._open_model(folder, load_model_config(folder))
        return self.model.head_digests()

    def execute(self, step: SchedulerOutput) -> RankOutput:
        """Executes a step, in the order that :mod:`kvferry.connectors.base` documents.

        Raises:
            WorkerDiedError: another rank is gone.
            BlockTableError: a block table lacks a block that the request needs.
            EngineError: the step does not fit this rank.
        """
        connector = self._connector
        if connector is None:
            return self._compute(step.requests)
        if step.connector_metadata is None:
            raise EngineError("a step without connector metadata reached a rank with a connector")
        connector.start_load_kv(self._metadata_decoder.decode(step.connector_metadata))
        output = self._compute(step.requests)
        connector.wait_for_save()
        output.kv_connector_output = connector.get_transfer_results(step.finished_req_ids)
        return output

    def _compute(self, requests: Sequence[ScheduledRequest]) -> RankOutput:
        """Computes the requests on every rank, and samples tokens on the rank with the logits."""
        output = RankOutput()
        if not requests:
            return output
        model = self.model
        with torch.inference_mode():
            batch = build_batch(requests, self._groups, model.dtype, self._layer_windows)
            logits_SV = model.forward(batch, self.cache, self._connector)
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

    def close(self) -> None:
        """Closes the connector, then leaves the group of ranks. Idempotent."""
        # Delete the views of the connector's memory before the connector unmaps this memory.
        self.__dict__.pop("cache", None)
        self._opened.close()
