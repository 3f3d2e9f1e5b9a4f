r"""kvferry as a transfer backend of SGLang's prefill and decode servers.

Where kvferry is installed beside SGLang, SGLang finds the backend by an entry point::

    python -m sglang.launch_server --model-path MODEL --disaggregation-mode prefill \
        --disaggregation-transfer-backend kvferry

SGLang calls :func:`activate` in each of its processes. Nothing else happens until a server is
started with the backend. kvferry's own keys are in an environment variable, see
:mod:`kvferry.integrations.sglang.config`.
"""

import logging
from enum import Enum
from typing import Any

from kvferry.integrations.releases import SGLANG, fitting, numbers
from kvferry.integrations.sglang.needed import check_release

logger = logging.getLogger(__name__)

NAME = "kvferry"
"""Name of the backend for ``--disaggregation-transfer-backend``."""
_UTILS = "sglang.srt.disaggregation.utils"


def activate() -> None:
    """Registers the backend with SGLang; called by SGLang's loader of plugins."""
    import sglang

    version = sglang.__version__
    if numbers(version, 3) < SGLANG[0]:
        logger.warning("SGLang %s has no backend %s: it needs %s", version, NAME, fitting("SGLang"))
        return
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([NAME])
    members = {each.name: each.value for each in TransferBackend} | {NAME.upper(): NAME}
    extended = Enum("TransferBackend", members, module=_UTILS)  # type: ignore[misc]
    HookRegistry.register(f"{_UTILS}.TransferBackend", extended, HookType.REPLACE)
    for target, hook, kind in (
        (f"{_UTILS}.get_kv_class", _classes, HookType.AROUND),
        (f"{_PREFILL}._init_kv_manager", _with_queue, HookType.AROUND),
        (f"{_PREFILL}.create_sender", attach_sender, HookType.AFTER),
        (f"{_DECODE}._init_kv_manager", _with_queue, HookType.AROUND),
        (f"{_DECODE}._create_receiver_and_enqueue", attach_receiver, HookType.AFTER),
        (f"{_STAGES}.process_decode_transfer_queue", _with_failed, HookType.AROUND),
        (f"{_WEIGHTS}.record_weight_version_after_update", _weights_changed, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)


_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_managers: list[Any] = []
"""The manager of this process, once SGLang has made one."""


def _classes(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """The classes of the backend; those of other backends as SGLang has them.

    Raises:
        ImportError: see :func:`check_release`.
    """
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    import sglang

    check_release(sglang.__version__)
    from kvferry.integrations.sglang import backend, bootstrap

    return {
        "manager": backend.Manager,
        "sender": backend.Sender,
        "receiver": backend.Receiver,
        "bootstrap_server": bootstrap.BootstrapServer,
    }[class_type.value]


def _with_queue(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets a manager that is made meanwhile see the queue, with its pool and its scheduler."""
    if queue.transfer_backend.value != NAME:
        return original(queue, *args, **kwargs)
    from kvferry.integrations.sglang.backend import QUEUE

    token = QUEUE.set(queue)
    try:
        manager = original(queue, *args, **kwargs)
    finally:
        QUEUE.reset(token)
    _managers[:] = [manager]
    return manager


def attach_sender(result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """Gives a new sender of ours its request."""
    if result and queue.transfer_backend.value == NAME:
        attach = getattr(req.disagg_kv_sender, "attach", None)
        if attach is not None:  # a warm-up has SGLang's fake sender
            attach(req)


def attach_receiver(result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """Gives a new receiver of ours its request."""
    if queue.transfer_backend.value == NAME:
        attach = getattr(result.kv_receiver, "attach", None)
        if attach is not None:
            attach(req)


def _with_failed(original: Any, scheduler: Any, release_rids: list[str] | None) -> Any:
    """Has the next pipeline stage end the failed loads that this stage has ended too.

    SGLang ends those loads on the first stage and tells the next stage only of the others, so the
    next stage would keep their pages for ever, and soon take fewer requests than the first stage.
    """
    released = original(scheduler, release_rids)
    if scheduler.disagg_decode_prealloc_queue.transfer_backend.value != NAME or not release_rids:
        return released
    kept = {each.req.rid for each in scheduler.disagg_decode_transfer_queue.queue}
    return [rid for rid in release_rids if rid not in kept]


def _weights_changed(*_: Any, **__: Any) -> None:
    """Stops all lending and loading: SGLang has changed the weights in memory."""
    for manager in _managers:
        manager.rooms.weights_changed()
