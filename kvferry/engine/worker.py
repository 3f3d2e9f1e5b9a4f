"""One rank of the reference engine: a model runner and the worker half of a connector."""

from contextlib import ExitStack

import msgspec
import numpy as np

from kvferry.connectors.base import KVConnectorMetadata, WorkerConnector
from kvferry.connectors.registry import connector_context
from kvferry.engine.attention_cache import PagedKVCache
from kvferry.engine.communicator import Communicator
from kvferry.engine.messages import RankOutput, SchedulerOutput
from kvferry.engine.model import LayerHook, NoHook
from kvferry.engine.runner import ModelRunner
from kvferry.engine.weights import fingerprint
from kvferry.engine.worker_spec import WorkerSpec
from kvferry.errors import EngineError


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
