"""Small random models for pairs of a vLLM server and an SGLang server."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from benchmarks.vllm_servers.models import Model, tiny_model
from tests.integrations.checkpoints import write_tiny_hybrid

WINDOW = 100
"""Number of tokens to which a layer with a window attends."""


@functools.cache
def windowed_model() -> Model:
    """A random Gemma 3 whose first and third layer of four have a window.

    vLLM keeps the tokens of the windows alone; SGLang keeps all tokens of this model.
    """
    folder = write_tiny_hybrid(Path(tempfile.mkdtemp(prefix="gemma3-")), window=WINDOW)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in tiny_model().folder.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return Model("gemma3", folder, tiny_model().vocab_size)
