"""Prefill and decode ranks made of SGLang's real classes, with caches in host memory.

They run where SGLang is installed; elsewhere the tests are skipped. What is left out is the model:
a test writes the cells that a model would write.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.vllm_servers.ports import free_port
from kvferry.testing import waiting

HERE = Path(__file__).parent
ABSENT = HERE.parents[1] / "sglang_servers" / "absent" / "sitecustomize.py"
HOST = "127.0.0.1"
WINDOW = 20
"""Tokens to which a layer with a window attends, itself not counted."""
collect_ignore = ["engines.py", "recurrent.py"]
"""Modules that need SGLang."""

if importlib.util.find_spec("sglang") is not None:
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    spec = importlib.util.spec_from_file_location("absent_packages", ABSENT)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    collect_ignore = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's warnings are not ours
        importlib.import_module("kvferry.integrations.sglang.backend")
        importlib.import_module("sglang.srt.managers.scheduler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of SGLang and of what it imports are not ours to fail for."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def activated() -> None:
    """SGLang has loaded its plugins, kvferry's among them."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a model, and a file of weights that nobody loads."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.arange(8.0)}, folder / "model.safetensors")
    return folder


class Request(SimpleNamespace):
    """What a backend reads of SGLang's request."""


def request(rid: str, tokens: list[int], **more: Any) -> Request:
    values = {"origin_input_ids": tokens, "output_ids": [], "lora_id": None, "input_embeds": None}
    return Request(rid=rid, **(values | more))


class Group:
    """SGLang's group of ranks; the first rank of a test's engine is made first."""

    def __init__(self, layers: list[list[int]] | None = None) -> None:
        """Takes the layers of all pipeline stages, for a group of stages."""
        self.layers = layers
        self.told: Any = None

    def broadcast_object(self, told: Any = None, src: int = 0) -> Any:
        self.told = self.told or told
        return self.told

    def all_gather_object(self, told: Any) -> Any:
        assert self.layers is not None
        assert told in self.layers
        return self.layers


LAYERS = 3
"""Number of layers of the model."""


class Rank:
    """A rank of a server: its pool, its rows, and the manager that SGLang's queue makes.

    ``kind`` is the kind of the model's recurrent layers; without it, all layers attend.
    With ``draft``, a draft model has a pool beside it.
    """

    def __init__(
        self,
        mode: str,
        folder: Path,
        port: int,
        *,
        page_size: int,
        pages: int = 60,
        windowed: bool = False,
        kind: str = "",
        draft: bool = False,
        rank: int = 0,
        tp: int = 1,
        split: tuple[int, ...] = (LAYERS,),
        heads: int = 4,
        size: int = 8,
        groups: tuple[Group, Group] | None = None,
    ) -> None:
        import torch
        from sglang.srt.disaggregation import decode, prefill
        from sglang.srt.disaggregation.utils import MetadataBuffers, TransferBackend
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.runtime_context import SpawnRanks, create_context
        from sglang.srt.server_args import ServerArgs
        from transformers import AutoConfig

        from tests.integrations.sglang import recurrent

        self.mode, self.page_size, self.port, self.groups = mode, page_size, port, groups
        pp_rank, tp_rank = divmod(rank, tp)
        self.first_head = tp_rank * heads // tp
        """First KV head of this rank."""
        first_layer = sum(split[:pp_rank])
        self.layers = range(first_layer, first_layer + split[pp_rank])
        """Layers of the model on this rank; of a model with states, the layers that attend."""
        args = ServerArgs(
            model_path=str(folder),
            skip_tokenizer_init=True,
            device="cpu",
            host=HOST,
            attention_backend="torch_native",
            disaggregation_mode=mode,
            disaggregation_transfer_backend="kvferry",
            disaggregation_bootstrap_port=port,
            page_size=page_size,
            tp_size=tp,
            pp_size=len(split),
            disable_overlap_schedule=True,
        )
        ranks = SpawnRanks(world_rank=rank, dp_rank=0, gpu_id=rank)
        self.context = create_context(args, role="scheduler", ranks=ranks)
        shape: dict[str, Any] = {
            "size": (pages - 1) * page_size,
            "page_size": page_size,
            "dtype": torch.float32,
            "head_num": max(1, heads // tp),
            "head_dim": size,
            "device": "cpu",
        }
        if kind:
            self.pool = recurrent.pool_of(kind, tp, page_size=page_size, pages=pages, heads=heads)
            self.pools = [self.pool.full_kv_pool]
            self.layers = range(len(self.pools[0].k_buffer))
        elif windowed:
            layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1]}
            self.pool = SWAKVPool(**shape, **layers, size_swa=shape["size"])
            self.pools = [self.pool.full_kv_pool, self.pool.swa_kv_pool]
        else:
            self.pool = MHATokenToKVPool(
                **shape,
                layer_num=len(self.layers),
                start_layer=self.layers.start,
                enable_memory_saver=False,
            )
            self.pools = [self.pool]
        self.rows = MetadataBuffers(8, 16, torch.float32, max_sampling_mask_tokens=16)
        config = AutoConfig.from_pretrained(folder)
        if kind:
            config.full_attention_layer_ids = list(recurrent.ATTENDING)
        model = SimpleNamespace(
            hf_config=config,
            hf_text_config=config,
            model_path=str(folder),
            revision=None,
            num_hidden_layers=LAYERS,
            quantization=None,
            context_len=4096,
            get_total_num_kv_heads=lambda: heads,
        )
        self.runner = SimpleNamespace(
            kv_cache_dtype_str="auto",
            model=recurrent.model_of(kind, tp) if kind else torch.nn.Module(),
            lora_manager=None,
            model_config=model,
            server_args=args,
        )
        self.scheduler = SimpleNamespace(
            enable_hisparse=False,
            forward_stream_ctx=contextlib.nullcontext(),
            model_config=model,
            req_to_token_pool=None,
            rust_server=None,
            server_args=args,
            sliding_window_size=WINDOW if windowed else None,
            tp_worker=SimpleNamespace(model_runner=self.runner),
        )
        prefills = mode == "prefill"
        self.queue: Any = object.__new__(
            prefill.PrefillBootstrapQueue if prefills else decode.DecodePreallocQueue
        )
        vars(self.queue).update(
            transfer_backend=TransferBackend("kvferry"),
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=MHATokenToKVPool(**shape, layer_num=1, enable_memory_saver=False)
            if draft
            else None,
            is_mla_backend=False,
            metadata_buffers=self.rows,
            scheduler=self.scheduler,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            gpu_id=rank,
            enable_staging=False,
            queue=[],
            # Its own settings, as a user may write them.
            transfer_queue=SimpleNamespace(
                enable_deferred_kv_release=False, deferred_kv_release_timeout=30.0
            ),
        )
        with self.active():
            self.manager = self.queue._init_kv_manager()

    @contextlib.contextmanager
    def active(self) -> Any:
        """SGLang's globals are those of this rank."""
        from sglang.srt.runtime_context import get_parallel, use_context

        world, stages = self.groups or (None, None)
        groups = {"pp_group": stages, "world_group": world}
        with use_context(self.context), get_parallel().override(**groups):
            yield

    def room(self, number: int, theirs: Request, at: str = "") -> Any:
        """The sender or receiver of a request, made as SGLang's queues make it.

        ``at`` is the address of the bootstrap server; by default that of the pair.
        """
        import kvferry.integrations.sglang as plugin

        with self.active():
            if self.mode == "prefill":
                from kvferry.integrations.sglang.backend import Sender

                theirs.disagg_kv_sender = Sender(self.manager, f"{HOST}:{self.port}", number)
                plugin.attach_sender(True, self.queue, theirs)
                return theirs.disagg_kv_sender
            from kvferry.integrations.sglang.backend import Receiver

            made = SimpleNamespace(
                kv_receiver=Receiver(self.manager, at or f"{HOST}:{self.port}", number)
            )
            plugin.attach_receiver(made, self.queue, theirs)
            return made.kv_receiver

    def slot(self, number: int) -> list[Any]:
        """SGLang's indices of the states of a request: none without recurrent layers."""
        import torch

        return [[torch.tensor(number).numpy()]] if hasattr(self.pool, "mamba_pool") else []

    def cells(self, pages: list[int], pool: int = 0) -> list[Any]:
        """K and V of each layer of a pool, ``[pages * page size, heads, elements]``, in pages."""
        import torch

        slots = torch.tensor(
            [page * self.page_size + slot for page in pages for slot in range(self.page_size)]
        )
        found = self.pools[pool]
        return [each[slots] for each in (*found.k_buffer, *found.v_buffer)]

    def close(self) -> None:
        self.manager.close()
        if hasattr(self.manager.request_status, "close"):
            self.manager.request_status.close()  # SGLang's map of the statuses of all stages
        self.manager.server_socket.close(linger=0)
        self.manager._zmq_ctx.destroy(linger=0)


@pytest.fixture
def pair(activated: None, model_folder: Path) -> Any:
    """``pair(page_size, page_size)`` opens a prefill rank and a decode rank, perhaps of the model
    in another folder, or with recurrent layers of another kind.
    """
    from kvferry.integrations.sglang.bootstrap import BootstrapServer

    opened: list[Any] = []

    def opening(
        prefill: int,
        decode: int,
        folder: Path = model_folder,
        *,
        kind: str = "",
        other: str = "",
        **more: Any,
    ) -> tuple[Rank, Rank]:
        port = free_port()
        server = BootstrapServer(HOST, port)
        until(lambda: listens(port), "the bootstrap server")
        ranks = []
        for mode, page_size, model, states in (
            ("prefill", prefill, model_folder, kind),
            ("decode", decode, folder, other or kind),
        ):
            ranks.append(Rank(mode, model, port, page_size=page_size, kind=states, **more))
            opened.append(ranks[-1])
        opened.append(server)
        return ranks[0], ranks[1]

    yield opening
    for each in opened:
        each.close()


def listens(port: int) -> bool:
    import requests

    try:
        return requests.get(f"http://{HOST}:{port}/health", timeout=1).ok
    except requests.ConnectionError:
        return False


def until(condition: Any, what: str) -> None:
    """Waits as the schedulers of SGLang do: they ask again and again."""
    waiting.until(condition, what=what, every_s=0.002)
