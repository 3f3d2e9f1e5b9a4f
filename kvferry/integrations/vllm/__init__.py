"""kvferry as a connector of vLLM, loaded from outside through ``kv_connector_module_path``.

For example::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.integrations.vllm", "kv_role": "kv_producer"}'

A thin translation: what is moved, leased and refused is the PullConnector's business. What depends
on vLLM's release lives in :mod:`kvferry.integrations.vllm.compat`.

Raises:
    ImportError: vLLM is not installed, or is a release that this adapter was not written for.
"""

try:
    import vllm as _vllm
except ModuleNotFoundError as error:
    raise ImportError(
        "kvferry.integrations.vllm: vLLM is not installed here; install vllm 0.32 in the "
        "environment that serves, and kvferry into the same one"
    ) from error

from kvferry.integrations.vllm.release import check_release

check_release(_vllm.__version__)

from kvferry.integrations.vllm.connector import KVFerryConnector  # noqa: E402 (checked first)

__all__ = ["KVFerryConnector"]
