"""One rank's computing: its model share, its KV cache, and the tokens it draws."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.attention_batch import build_batch
from kvferry.engine.attention_cache import PagedKVCache
from kvferry.engine.communicator import Communicator
from kvferry.engine.messages import RankOutput, ScheduledRequest
from kvferry.engine.model import DecoderModel, LayerHook
from kvferry.engine.runner_sampler import best_two_gaps, sample
from kvferry.engine.weights import load_model_config
from kvferry.engine.worker_spec import WorkerSpec


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
