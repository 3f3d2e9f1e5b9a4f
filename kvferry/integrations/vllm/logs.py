"""kvferry's log inside vLLM's: the same handlers, format and level."""

import logging

VLLM = logging.getLogger("vllm")
"""vLLM's logger, configured when ``vllm`` is imported."""


class VllmHandler(logging.Handler):
    """Passes records to the current handlers of vLLM's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        VLLM.handle(record)


def log_with_vllm() -> None:
    """Makes ``kvferry``'s loggers write at the level and to the handlers of vLLM's logger.

    Loggers that are configured already, for example by the file that ``VLLM_LOGGING_CONFIG_PATH``
    names, stay as they are.
    """
    ours = logging.getLogger("kvferry")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.setLevel(VLLM.getEffectiveLevel())
    ours.addHandler(VllmHandler())
