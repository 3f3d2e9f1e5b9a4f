"""kvferry moves KV-cache blocks between prefill and decode workers of disaggregated LLM serving.

Importing this package loads neither torch nor zmq. Import the module that you need, for example
``from kvferry.topology import plan_transfer`` or ``from kvferry.connectors import KVConnector``.
"""

__version__ = "0.1.0"
