"""The inputs of SGLang's requests beside the tokens, and the requests that are not served."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from kvferry.errors import ConfigError
from kvferry.integrations.checkpoint import WeightsCheck, digest_of, slices

_OUTSIDE_DIGEST = ("base_model_name_or_path", "revision")
"""Keys of an adapter's config that name the base model's place, and not its content."""


class LoadedAdapters:
    """Identifies the LoRA adapters of a server by the weights in its memory.

    Two servers may have different adapters under one name, and their ids of one adapter differ.
    """

    def __init__(self, runner: Any, check: WeightsCheck) -> None:
        """Args:
        runner: SGLang's model runner, which has the adapters.
        check: how much is read of the weights; with ``config``, only the name counts.
        """
        self._runner = runner
        self._check = check
        self._known: dict[str, str] = {}
        """SGLang's id of an adapter, which it gives to one load of files, → its key."""

    def key(self, lora_id: str) -> str:
        """The adapter's name and a digest, equal on every SGLang server with the adapter.

        Raises:
            ConfigError: the server has no such adapter.
        """
        if lora_id not in self._known:
            manager = self._runner.lora_manager
            if manager is None or lora_id not in manager.loras:
                raise ConfigError(f"lora_id: {lora_id} is no adapter of this server; load it again")
            name = str(manager.lora_refs[lora_id].lora_name)
            found = "" if self._check == "config" else self._digest(manager, lora_id)
            self._known[lora_id] = f"{name[:64]} {digest_of([name, found])[:32]}"
        return self._known[lora_id]

    def _digest(self, manager: Any, lora_id: str) -> str:
        adapter = manager.loras[lora_id]
        config = dict(adapter.config.hf_config)
        kept = {key: value for key, value in config.items() if key not in _OUTSIDE_DIGEST}
        # A text stands for all modules, of which the server chooses.
        by_server = isinstance(kept["target_modules"], str)
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
        digest.update(str(sorted(manager.target_modules) if by_server else "").encode())
        for name, tensor in sorted(_weights(adapter)):
            values = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
            content = values.flatten().view(torch.uint8).numpy()
            for start, length in slices(content.nbytes, self._check == "full"):
                digest.update(content[start : start + length])
        return digest.hexdigest()


def _weights(adapter: Any) -> Iterator[tuple[str, Any]]:
    """Name → tensor of an adapter."""
    yield from adapter.embedding_layers.items()
    yield from adapter.added_tokens_embeddings.items()
    for layer in adapter.layers:
        yield from layer.weights.items()


def check_served(request: Any) -> None:
    """Refuses a request whose KV depends on inputs that two servers cannot compare.

    Raises:
        ConfigError: names the input and the remedy.
    """
    if getattr(request, "input_embeds", None) is not None:
        raise ConfigError(
            "input_embeds: the request has embeddings, of which SGLang tells a transfer backend "
            "nothing that two servers could compare; send such requests to a server without "
            "--disaggregation-mode"
        )


def check_first_token(request: Any) -> None:
    """Refuses a request that needs more than the first token itself from a prefill server of
    another kind.

    Raises:
        ConfigError: names the field of the request and the remedy.
    """
    for field_name, what in (
        ("return_logprob", "log-probabilities"),
        ("return_hidden_states", "hidden states"),
        ("return_sampling_mask", "the mask of the sampler"),
    ):
        if getattr(request, field_name, None):
            raise ConfigError(
                f"{field_name}: the request wants {what} of the first token, which comes from a "
                "prefill server that is not SGLang's, without them; send such requests to a pair "
                "of SGLang servers"
            )
