"""The weights that an engine computes with, including changes in memory.

Prefill and decode engines hold the same weights differently: sharded, fused, laid out for a kernel,
quantised, or hidden in a kernel's own memory. Engines therefore compare the tensors that they were
given, by the names of the checkpoint. At the start these are the tensors of the files; later, each
tensor that goes through the model's ``load_weights``. The digest of a tensor covers some slices,
and no sharding changes it. Slices of every live parameter show changes in memory that bypass
``load_weights``. The digest is then taken of this rank's memory, which is equal only on engines of
one shape.

vLLM changes weights only by remote calls, which all go through the executor in the scheduler's
process. After any call that may have changed the weights, kvferry asks the ranks before anything
more is scheduled, loaded or lent. A change while the engine sleeps is found after the engine wakes.
"""

import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvferry.integrations.checkpoint import DIGEST_CHARS, WeightsCheck, digest_of, slices
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.integrations.vllm.compat.projections import qkv_projections
from kvferry.integrations.vllm.fingerprint import are_dummy, named_weights
from kvferry.integrations.vllm.heads import head_digests, why_exempt
from kvferry.topology.heads import HeadDigests

logger = logging.getLogger(__name__)

_AT_START = "at start"
_IN_BETWEEN = "in between"
"""Value in place of a digest, for a parameter that an update has begun to replace."""
_WATCH = "_kvferry_watch"
"""Name of the attribute that holds a worker's :class:`_RankWatch`."""


@dataclass(frozen=True)
class RankWeights:
    """A rank's report of its weights."""

    beneath: str
    """Content of the memory outside the tensors in ``given``: ``at start``, a digest of the memory,
    or empty if every module was loaded."""
    given: Mapping[str, str]
    """Name in the checkpoint → digest of the last tensor loaded under this name."""
    memory: str
    """Digest of the live parameters."""
    heads: HeadDigests | None = None
    """Digests of the weights behind the rank's KV heads."""


class _RankWatch:
    """Records the tensors given to a rank, and the content of the rank's memory."""

    def __init__(
        self, models: Mapping[str, torch.nn.Module], full: bool, *, is_first: bool
    ) -> None:
        """Args:
        models: prefix of the parameter names → a model of the rank; a draft model has a prefix.
        full: read every byte, not slices.
        is_first: the memory holds the weights of the engine's start.
        """
        self.models = models
        self._full = full
        self._given: dict[str, str] = {}
        self._loaded: set[str] = set()
        """Modules loaded since the whole memory was last unknown."""
        self._news: set[str] = set()
        """Modules loaded since the last look."""
        self._hidden: dict[str, tuple[object, str]] = {}
        for prefix, model in models.items():
            load_weights: Any = model.load_weights
            model.load_weights = self._watched(prefix, load_weights)  # type: ignore[assignment]
        self._live = self._read()
        self._beneath = _AT_START if is_first else digest_of(self._live)

    def look(self) -> RankWeights:
        """The weights that this rank computes with now."""
        live = self._read()
        if any(digest == _IN_BETWEEN for digest in live.values()):
            return RankWeights(f"in the middle of an update {secrets.token_hex(8)}", {}, "")
        changed = {name for name, digest in live.items() if self._live.get(name) != digest}
        changed |= self._live.keys() - live.keys()
        modules = {_module(name) for name in live}
        if {_module(name) for name in changed} - self._news:
            self._beneath, self._given, self._loaded = digest_of(live), {}, set()
        elif modules <= self._loaded:
            self._beneath = ""
        self._live, self._news = live, set()
        return RankWeights(self._beneath, dict(self._given), digest_of(live))

    def _watched(self, prefix: str, load_weights: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``load_weights`` of a model to note the tensors that pass.

        The wrapper patches vLLM, because vLLM does not tell which tensors of a checkpoint a model
        was given. A hook in vLLM's model loader for each name and tensor could replace the patch.
        """

        @functools.wraps(load_weights)
        def load(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            given: dict[str, str] = {}
            loaded = load_weights(self._noted(weights, prefix, given), *args, **kwargs)
            if "" not in given.values():
                self._given |= given
                modules = {_module(prefix + name) for name in loaded or ()}
                self._loaded |= modules
                self._news |= modules
            return loaded

        return load

    def _noted(
        self, weights: Iterable[tuple[str, torch.Tensor]], prefix: str, given: dict[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            # A tensor of another type stands for a later one, which bypasses this method.
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
            try:
                given[prefix + name] = tensor_digest(tensor, self._full) if is_plain else ""
            except Exception:
                # The loading belongs to vLLM and must go on, with an unknown digest.
                logger.exception("a digest of %s could not be taken", name)
                given[prefix + name] = ""
            yield name, tensor

    def _read(self) -> dict[str, str]:
        """Parameter → digest of the content in memory."""
        live = {}
        for prefix, model in self.models.items():
            for name, parameter in model.named_parameters():
                meta = parameter.is_meta
                live[prefix + name] = _IN_BETWEEN if meta else tensor_digest(parameter, self._full)
            for name, hidden in compat.hidden_weights(model).items():
                # Hidden weights are never overwritten: a change creates new objects.
                known, digest = self._hidden.get(prefix + name, (hidden, _AT_START))
                digest = digest if known is hidden else secrets.token_hex(8)
                self._hidden[prefix + name] = hidden, digest
                live[prefix + name] = digest
        return live


def look_at_rank(worker: Any, full: bool, groups: Sequence[CacheGroup]) -> RankWeights:
    """The weights that a rank computes with; the first call starts to watch the rank's loading.

    This function runs on the rank.

    Args:
        worker: the worker of vLLM.
        full: read every byte, not slices.
        groups: the engine's groups.
    """
    models = compat.models_of(worker)
    watch = getattr(worker, _WATCH, None)
    if watch is None or watch.models != models:
        watch = _RankWatch(models, full, is_first=watch is None)
        setattr(worker, _WATCH, watch)
    found: RankWeights = watch.look()
    config = worker.vllm_config
    names = [name for group in groups for name in group.geometry.layer_names or ()]
    projections = qkv_projections(config, models.values(), names)
    # Dummy weights that a trainer has replaced are ordinary weights.
    exempt = why_exempt(config, "full" if full else "sample") if found.beneath else ""
    rank = compat.rank_of_this_worker(config)
    heads = head_digests(config, projections, groups, rank, exempt)
    return replace(found, heads=heads)


def tensor_digest(tensor: torch.Tensor, full: bool) -> str:
    """Digest of a tensor's size and of slices of the bytes, as for a tensor in a checkpoint's
    file.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    pieces = [flat[start : start + length] for start, length in slices(flat.numel(), full)]
    digest = hashlib.sha256(flat.numel().to_bytes(8, "little"))
    if pieces:
        digest.update(torch.cat(pieces).cpu().numpy().data)
    return digest.hexdigest()[:DIGEST_CHARS]


class EngineWeights:
    """The weights of an engine, as the engine's scheduler process knows them."""

    def __init__(self, vllm_config: Any, check: WeightsCheck, changing: Callable[[], None]) -> None:
        """Watches the engine's remote calls; :meth:`open` looks at the weights.

        Args:
            vllm_config: the engine's config.
            check: how much is read; with ``config`` nothing is read, and changes go unnoticed.
            changing: called before the engine frees the memory of weights and KV cache.
        """
        self._config = vllm_config
        self._check: WeightsCheck = check
        self._question: Callable[[Any], RankWeights] | None = None
        self._changing = changing
        self._executor: Any = None
        self._base: Mapping[str, str] = {}
        self.heads: list[HeadDigests | None] | None = None
        """Each rank's digests of the KV heads since the last look; ``None`` if the look failed."""
        self.are_watched = check != "config"
        """Whether a change of the weights is noticed."""
        self.in_question = False
        """Whether a call since the last look may have changed the weights."""
        compat.watch_calls(vllm_config, self._called)

    def _called(self, executor: Any, method: object) -> None:
        self._executor = executor
        name = method if isinstance(method, str) else ""
        if name in compat.LETS_MEMORY_GO:
            self._changing()
        harmless = method is self._question or name in compat.KEEPS_WEIGHTS
        self.in_question = self.in_question or (self.are_watched and not harmless)

    def open(self, groups: Sequence[CacheGroup]) -> str:
        """Digest of the weights loaded at the start.

        Args:
            groups: the engine's groups.

        Raises:
            ConfigError: the model's files cannot be read.
        """
        question = functools.partial(look_at_rank, full=self._check == "full")
        self._question = functools.partial(question, groups=groups)
        load_format = self._config.load_config.load_format
        named = named_weights(self._config.model_config, load_format, self._check)
        if self._executor is None or not self.are_watched:
            return _digest(named)
        try:
            # The ranks have digested their heads when they registered their caches.
            ranks = self._ask(functools.partial(question, groups=()))
        except Exception:
            logger.exception(
                "the weights cannot be read in memory; changes of them will go unnoticed, and KV "
                "of older weights will not be told from newer: reset prefix caches and drain "
                "leases yourself"
            )
            self.are_watched = self.in_question = False
            return _digest(named)
        memory = _by_rank(rank.memory for rank in ranks) if are_dummy(load_format) else {}
        self._base = {**named, **memory}
        self.in_question = False
        return weights_digest(self._base, ranks)

    def look(self) -> str | None:
        """Digest of the weights that the engine computes with now; ``None`` while the weights
        sleep.

        If a rank does not answer, the digest differs from the digest of every other engine.
        """
        if compat.weights_sleep(self._executor):
            return None
        self.in_question, self.heads = False, None
        try:
            ranks = self._ask(self._question)
            self.heads = [rank.heads for rank in ranks]
            return weights_digest(self._base, ranks)
        except Exception:
            logger.exception("the weights in memory could not be read; nothing pairs with them")
            return f"unknown {secrets.token_hex(8)}"

    def _ask(self, question: Callable[[Any], RankWeights] | None) -> list[RankWeights]:
        found: list[RankWeights] = self._executor.collective_rpc(question)
        return found

    def close(self) -> None:
        """Stops watching. Idempotent."""
        compat.unwatch_calls(self._config)
        self.in_question = False


def weights_digest(base: Mapping[str, str], ranks: list[RankWeights]) -> str:
    """Digest of an engine's weights.

    Args:
        base: name → digest of the tensors loaded at the start.
        ranks: the report of each rank.
    """
    names = dict(base) if any(rank.beneath == _AT_START for rank in ranks) else {}
    given: dict[str, set[str]] = {}
    for rank in ranks:
        for name, digest in rank.given.items():
            given.setdefault(name, set()).add(digest)
    # A trainer may give each rank its own part of a tensor.
    names |= {name: "+".join(sorted(digests)) for name, digests in given.items()}
    beneath = (rank.beneath if rank.beneath != _AT_START else "" for rank in ranks)
    return _digest(names | {name: each for name, each in _by_rank(beneath).items() if each})


def _digest(names: Mapping[str, str]) -> str:
    return digest_of(names)[:DIGEST_CHARS]


def _by_rank(digests: Iterable[str]) -> dict[str, str]:
    return {f"memory of rank {rank}": digest for rank, digest in enumerate(digests)}


def _module(name: str) -> str:
    """The module of a parameter, under the module's name without adapters around it."""
    return name.replace(".base_layer", "").rpartition(".")[0]
