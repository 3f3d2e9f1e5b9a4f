"""``kvferry demo``: a prefill engine and a decode engine serve a real model, tokens compared."""

from .display import demo

__all__ = ["demo"]
