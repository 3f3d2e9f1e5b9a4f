"""Engines as processes, and the OpenAI-compatible router in front of them."""
