"""kvferry's log inside vLLM's: the same handlers, format and level."""

import logging

VLLM = logging.getLogger("vllm")
"""vLLM has set it up once ``vllm`` is imported."""


class VllmHandler(logging.Handler):
    """Hands records to whatever handlers vLLM's logger has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        VLLM.handle(record)


def log_with_vllm() -> None:
    """Has ``kvferry``'s loggers write what vLLM's do, and where they do.

    Not where somebody has set them up already, in the file that ``VLLM_LOGGING_CONFIG_PATH`` names
    for example.
    """
    ours = logging.getLogger("kvferry")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.setLevel(VLLM.getEffectiveLevel())
    ours.addHandler(VllmHandler())
