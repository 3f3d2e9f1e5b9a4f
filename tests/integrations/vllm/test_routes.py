"""Every route that vLLM's servers have is on the router's list of paths."""

import warnings
from typing import get_args
from unittest.mock import MagicMock

import pytest
from starlette.routing import Mount

from kvferry.router.paths import PATHS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's are not ours
    try:
        from vllm.entrypoints.common import cli_args
    except ImportError:  # before 0.33; before 0.32 there is none
        cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm import envs
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

EVERYTHING = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
PROFILER = '{"profiler": "torch", "torch_profiler_dir": "/nowhere"}'
FLAGS = ("--model", "x", "--enable-tokenizer-info-endpoint", "--profiler-config", PROFILER)
TASKS = tuple(task for one in get_args(SupportedTask) for task in get_args(one) or (one,))
LISTED = {entry for entries in PATHS.values() for entry in entries}


def routes_of(pooling_task):
    """Method and path of all routes of a server that does everything."""
    args = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args([*FLAGS])
    args.enable_fault_tolerance = True
    config = MagicMock()
    config.get_pooling_task.return_value = pooling_task
    config.hf_config.num_labels = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        app = build_app(args, TASKS, config)
    found = set()
    for route in app.routes:
        # A path below another one that is mounted has that one's way; a web socket has no method.
        methods = (
            {"GET"} if isinstance(route, Mount) else getattr(route, "methods", None) or {"GET"}
        )
        found |= {f"{method} {route.path}" for method in methods - {"HEAD"}}
    return found


@pytest.mark.parametrize("pooling_task", ["embed", "classify", "token_embed", "token_classify"])
def test_every_route_is_listed(monkeypatch, pooling_task):
    for name in EVERYTHING:
        # Not in the environment: once an engine has run in this process, vLLM reads that no more.
        monkeypatch.setitem(vars(envs), name, True)
    found = routes_of(pooling_task)
    assert {"POST /v1/responses", "POST /pause", "POST /start_profile", "POST /pooling"} <= found
    assert found - LISTED == set(), "say in kvferry/router/paths.py who answers these"
