"""The content beside the token ids that decides the KV of a request.

vLLM puts the same content beside the tokens into the hashes of its prefix cache. The salt is left
out here, as a salt keeps equal blocks apart on purpose. vLLM compares within one process; here the
values must be equal on two servers, so an adapter's number or path cannot identify the adapter.
"""

import hashlib
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from kvferry.integrations.checkpoint import (
    WeightsCheck,
    digest_of,
    digest_of_files,
    weight_files,
)
from kvferry.integrations.vllm import compat

logger = logging.getLogger(__name__)

_NAME_CHARS = 64
"""Number of characters of an adapter's name in a ticket; the digest covers all characters."""
_ADAPTER_CONFIG = "adapter_config.json"
_OUTSIDE_DIGEST = ("base_model_name_or_path", "revision")
"""Keys of an adapter's config that name the base model's place, and not its content."""

Files = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time in nanoseconds of each file in a folder."""


class Adapters:
    """Identifies LoRA adapters by name and by the content of their files.

    Two servers may have different adapters under one name. The files are read when a request first
    names the adapter, and again after they have changed.
    """

    def __init__(self, check: WeightsCheck) -> None:
        """Args:
        check: how much is read of the files; with ``config``, only the name counts.
        """
        self._check = check
        self._known: dict[tuple[str, str], tuple[Path, Files, str]] = {}
        self._warned: set[str] = set()

    def key(self, name: str, path: str) -> str:
        """The adapter's name and a digest, equal on every server with the adapter."""
        if self._check == "config":
            return _named(name, "")
        try:
            return self._key_of_files(name, path)
        except (OSError, ValueError) as error:
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "LoRA adapter %s: its files cannot be read on this machine (%s); its KV fits "
                    "only that of servers that cannot read them either; set weights_check to "
                    '"config" on all servers to compare names alone',
                    name,
                    error,
                )
            return _named(name, "")

    def _key_of_files(self, name: str, path: str) -> str:
        known = self._known.get((name, path))
        folder = compat.adapter_folder(path) if known is None else known[0]
        if folder is None:
            raise FileNotFoundError(f"{path} is not here")
        files = _files_of(folder)
        if known is None or known[1] != files:
            known = folder, files, _named(name, self._digest(folder))
            self._known[name, path] = known
        return known[2]

    def _digest(self, folder: Path) -> str:
        weights = weight_files(folder)
        if not weights:
            raise FileNotFoundError(f"{folder} holds no weights")
        config = json.loads((folder / _ADAPTER_CONFIG).read_bytes())
        kept = {key: value for key, value in config.items() if key not in _OUTSIDE_DIGEST}
        return json.dumps(kept, sort_keys=True) + digest_of_files(
            weights, full=self._check == "full"
        )


class ContentKeys:
    """Answers :meth:`kvferry.connectors.base.RequestView.content_keys` for vLLM's requests."""

    def __init__(self, check: WeightsCheck, *, inputs_are_hashed: bool = True) -> None:
        """Args:
        check: how adapters with equal names are told apart.
        inputs_are_hashed: see :func:`compat.hashes_inputs`. If false, a request with multimodal
            inputs equals no request of another server.
        """
        self.weights = ""
        """Digest of the engine's weights; empty if the digest is not known."""
        self._adapters = Adapters(check)
        self._unhashed = "" if inputs_are_hashed else f"not hashed {secrets.token_hex(8)}"

    def of(self, request: Any, num_tokens: int) -> dict[str, str]:
        """Returns part of the content → text.

        Args:
            request: the request of vLLM.
            num_tokens: number of leading tokens; inputs with later placeholders do not count.
        """
        keys = {"weights": self.weights} if self.weights else {}
        adapter = compat.adapter_of(request)
        if adapter is not None:
            keys["lora"] = self._adapters.key(*adapter)
        inputs = [each for each in compat.inputs_of(request) if each[1] < num_tokens]
        if inputs:
            known = self._unhashed or digest_of(inputs)[:32]
            keys["multimodal"] = f"{len(inputs)} inputs {known}"
        embeddings = compat.embeddings_of(request, num_tokens)
        if embeddings is not None:
            keys["prompt_embeds"] = _embeddings_key(*embeddings)
        return keys


def _embeddings_key(embeddings_TD: Any, are_tokens: list[bool]) -> str:
    """Key of embeddings, equal for equal bytes: a server with another dtype has other
    embeddings.
    """
    dtype = str(embeddings_TD.dtype).removeprefix("torch.")
    digest = hashlib.sha256(f"{dtype} {tuple(embeddings_TD.shape)}\n".encode())
    digest.update(bytes(are_tokens))
    digest.update(compat.bytes_of(embeddings_TD))
    return f"{dtype} {digest.hexdigest()[:32]}"


def _named(name: str, files: str) -> str:
    return f"{name[:_NAME_CHARS]} {digest_of([name, files])[:32]}"


def _files_of(folder: Path) -> Files:
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))
