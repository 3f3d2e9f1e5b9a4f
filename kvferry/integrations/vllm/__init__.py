"""kvferry as a connector of vLLM, loaded from outside through ``kv_connector_module_path``.

For example::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.integrations.vllm", "kv_role": "kv_producer"}'

The package translates vLLM's calls for the PullConnector, which decides about transfers, leases and
refusals. Code that depends on vLLM lives in :mod:`kvferry.integrations.vllm.compat`.

Raises:
    ImportError: vLLM is not installed, is too old, or is newer and lacks a name that the adapter
        needs.
"""

from kvferry.integrations.releases import fitting
from kvferry.integrations.vllm.release import check_release

try:
    import vllm as _vllm
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvferry.integrations.vllm: vLLM is not installed here; install {fitting('vLLM')} in "
        "the environment that serves, and kvferry into the same one"
    ) from error

from kvferry.integrations.vllm.logs import log_with_vllm

log_with_vllm()
check_release(_vllm.__version__)

from kvferry.integrations.vllm.compat import register_connector  # noqa: E402 (checked first)
from kvferry.integrations.vllm.connector import KVFerryConnector  # noqa: E402 (checked first)

register_connector("KVFerryConnector", __name__)

__all__ = ["KVFerryConnector"]
