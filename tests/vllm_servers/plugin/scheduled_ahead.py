"""Asynchronous scheduling on a CPU, where vLLM switches it off as of no use.

vLLM's scheduler, engine loop and executors are its own; what it does with streams of a device is
left out, as a CPU has none. Servers with ``SCHEDULE_AHEAD`` in their environment do it; tests of
engines in one process put the :func:`stand_ins` in place themselves.
"""

import functools
import os
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker import gpu_model_runner


class DrawnTokens(AsyncModelRunnerOutput):
    """A step's tokens, which vLLM takes when it needs them."""

    def __init__(
        self,
        *,
        model_runner_output: Any,
        sampled_token_ids: torch.Tensor,
        invalid_req_indices: list[int],
        **_: Any,
    ) -> None:
        self._output = model_runner_output
        self._invalid = invalid_req_indices
        self.sampled_token_ids_cpu = sampled_token_ids
        self.async_copy_ready_event = None  # for requests whose sampling looks at their output
        _say_once()

    def get_output(self) -> Any:
        """See vLLM."""
        rows = self.sampled_token_ids_cpu.tolist()
        for index in self._invalid:
            rows[index].clear()
        self._output.sampled_token_ids = rows
        return self._output

    def get_kv_connector_output(self) -> Any:
        """See vLLM, which asks from 0.33 on, after a step that has failed."""
        return self._output.kv_connector_output


@functools.cache
def _say_once() -> None:
    print("scheduled ahead: its tokens are taken when they are needed", flush=True)


def stand_ins() -> list[tuple[Any, str, Any]]:
    """Objects, their attributes, and what to put there."""
    platform = type(current_platform)
    check = platform.check_and_update_config

    def ahead(cls: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    return [
        (platform, "check_and_update_config", classmethod(ahead)),
        (gpu_model_runner, "AsyncGPUModelRunnerOutput", DrawnTokens),
    ]


def register() -> None:
    """Called by vLLM in each of a server's processes."""
    if "SCHEDULE_AHEAD" in os.environ:
        for where, name, value in stand_ins():
            setattr(where, name, value)
