"""The serving side of ``kvferry bench``.

The serving side is the control channel of an engine with nothing but memory. The measuring side
shakes hands with it, and reads its blocks as a decode engine does. Beside the transports, the
serving side offers a bare TCP loop, whose connections also keep a second client out.
"""

import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from rich.markup import escape

from kvferry.cli.console import make_console
from kvferry.cli.options import load_keys
from kvferry.cli.serve import end_by_interrupt
from kvferry.cli.specs import EngineSpec, find_model
from kvferry.control.leases import LeaseTable
from kvferry.control.options import ControlOptions
from kvferry.control.server import ControlServer
from kvferry.errors import ConfigError, KVFerryError
from kvferry.explain.limits import TOKEN_BYTES, BareSource
from kvferry.explain.sentences import bytes_text
from kvferry.layouts.arrays import ByteArray
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import (
    EngineDescription,
    ModelFingerprint,
    RankDescription,
    tagged_groups,
)
from kvferry.topology.typical import table_blocks
from kvferry.transports.base import Transport, TransportOptions
from kvferry.transports.local import host_digest
from kvferry.transports.regions import private_memory
from kvferry.transports.registry import open_transport
from kvferry.zeromq import is_everywhere, is_loopback, join_address

ENGINE_ID = "kvferry bench"
"""Engine id of the serving side."""
BARE = "bare tcp"
"""Name of the bare loop among the endpoints."""
LAYOUT = "NHD"
"""Layout of the served blocks."""
TRANSPORTS = ("shm", "vm", "tcp", "nixl")
"""Transports that are served by default, as far as this machine has them."""
MAX_BYTES = 8 << 30
"""Largest KV cache on either side in bytes; a serving side with shm holds the cache twice."""
_SEED = 1


class BareEndpoint(msgspec.Struct, frozen=True):
    """Address of the bare loop, on the host of the control channel."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


def serve_blocks(
    address: tuple[str, int],
    keys: Path | None,
    insecure: bool,
    model: str,
    tokens: int,
    block: int,
    transports: Sequence[str] | None,
    threads: int,
) -> None:
    """Serves blocks to one ``kvferry bench`` at a time, until Ctrl-C or SIGTERM.

    Args:
        address: host and port to listen on.
        keys: file of CURVE keys; ``None`` for an open channel.
        insecure: whether to listen beyond this machine without keys.
        model: model of the KV cache to move: a name or a ``config.json``.
        tokens: number of tokens to move.
        block: tokens per block.
        transports: names of the transports to serve; if ``None``, the default transports that this
            machine has.
        threads: number of copy threads of each transport.

    Raises:
        ConfigError: an option cannot be used, or strangers could reach the server.
        HostError: the machine lacks a port or memory.
    """
    host, port = address
    _check_reach(host, keys, insecure)
    geometry = _geometry(model, tokens, block)
    memory = geometry.memory(0, 1 + table_blocks(geometry, tokens))
    (nbytes,) = memory.region_bytes
    options = TransportOptions(host=host, threads=threads)
    console = make_console()
    with ExitStack() as stack:
        values = pattern(nbytes)
        bare = stack.enter_context(BareSource(values, host=host))
        opened, left_out = open_transports(
            TRANSPORTS if transports is None else transports, options
        )
        for transport in opened.values():
            stack.enter_context(transport)
        for name, error in left_out.items():
            if transports is not None:
                raise error
            console.print(f"[yellow]![/] {name} is left out: {escape(str(error))}", soft_wrap=True)
        endpoints = {BARE: msgspec.msgpack.encode(BareEndpoint(bare.port, bare.token))}
        for name, transport in opened.items():
            if name == "shm":
                transport.allocate(nbytes)[1][:] = values
            else:
                transport.register(values)
            endpoints[name] = transport.endpoint()
        server = stack.enter_context(
            ControlServer(
                engine_id=ENGINE_ID,
                incarnation=secrets.token_hex(8),
                role="kv_producer",
                leases=LeaseTable(max_blocks=1),
                host=host,
                port=port,
                options=ControlOptions(curve=load_keys(keys)),
            )
        )
        rank = RankDescription(
            rank=0,
            endpoints=endpoints,
            memory=(memory,),
            host=host_digest(),
        )
        server.set_description(
            EngineDescription(
                engine_id=ENGINE_ID,
                incarnation=server.incarnation,
                model=_fingerprint(model, geometry),
                groups=tagged_groups([geometry]),
                ranks=(rank,),
            )
        )
        end_by_interrupt()
        try:
            console.print(
                f"serving {bytes_text(nbytes)} of {escape(model)} over "
                f"{', '.join(opened)}; on the other host: kvferry bench "
                f"{join_address(host, server.port)} (Ctrl-C stops this)",
                soft_wrap=True,
            )
            threading.Event().wait()
        except KeyboardInterrupt:
            console.print("stopping", style="dim")


def _check_reach(host: str, keys: Path | None, insecure: bool) -> None:
    if is_everywhere(host):
        raise ConfigError(
            f"--host: {host} is every address of this machine, and the other side must be told "
            "one; give the address at which it reaches this machine"
        )
    if not (is_loopback(host) or keys or insecure):
        raise ConfigError(
            f"--host: {host} is reached from other machines, and there is no key that tells friend "
            "from stranger; make keys with `kvferry keys` and give both sides --keys, or say "
            "--insecure on a network that you trust"
        )


def _geometry(model: str, tokens: int, block: int) -> EngineGeometry:
    known = find_model(model)
    spec = EngineSpec(ParallelShape(), block, LAYOUT, hybrid=False)
    try:
        geometry, *others = spec.geometries(known.shape, known.dtype)
    except ValueError as error:
        raise ConfigError(f"--model: {model}: bench moves attention only: {error}") from error
    if others:
        raise ConfigError(
            f"--model: {model}: its layers have unlike heads, and bench moves layers of one kind; "
            "take another model"
        )
    assert isinstance(geometry, EngineGeometry)  # a single group that is not recurrent
    (one,) = geometry.memory(0, 1).region_bytes
    most = (MAX_BYTES // one - 1) * block
    if tokens > most:
        nbytes = one * (1 + table_blocks(geometry, tokens))
        raise ConfigError(
            f"--tokens: {tokens} tokens of {model} take {bytes_text(nbytes)}, bench moves "
            f"{bytes_text(MAX_BYTES)} at most; give {most} at most"
        )
    return geometry


def _fingerprint(model: str, geometry: EngineGeometry) -> ModelFingerprint:
    return ModelFingerprint(
        name=model,
        architecture="",
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        dtype=geometry.dtype,
        rope="",
        config_digest="",
        weights_digest="",
    )


def open_transports(
    names: Sequence[str], options: TransportOptions
) -> tuple[dict[str, Transport], dict[str, KVFerryError]]:
    """Opens transports by name; returns the opened transports, and the errors of the others."""
    opened, left_out = {}, {}
    for name in names:
        try:
            opened[name] = open_transport(name, options)
        except KVFerryError as error:
            left_out[name] = error
    return opened, left_out


def pattern(nbytes: int) -> ByteArray:
    """Content of the served memory; the measuring side computes the same content.

    Raises:
        SharedMemoryError: there is not enough memory.
    """
    memory = private_memory(nbytes)
    rng = np.random.Generator(np.random.SFC64(_SEED))
    for first in range(0, nbytes, 1 << 24):
        part = memory[first : first + (1 << 24)]
        part[:] = np.frombuffer(rng.bytes(part.nbytes), dtype=np.uint8)
    return memory
