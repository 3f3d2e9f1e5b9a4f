#!/usr/bin/env bash
# One of the two servers: `serve.sh prefill` or `serve.sh decode`. Further arguments go to SGLang.
#
#   MODEL   what to serve; both servers need the same (default: Qwen/Qwen3-0.6B)
#   PORT    of the server's HTTP (default: 8100 for prefill, 8200 for decode)
#   CPU     1 on a machine without a GPU: SGLang's own operations in torch
#
# The keys of kvferry are in KVFERRY_SGLANG_CONFIG; two servers on one host need none.
set -euo pipefail
case "${1:-}" in
  prefill) default_port=8100; options=(--disaggregation-bootstrap-port "${BOOTSTRAP_PORT:-8998}") ;;
  decode) default_port=8200; options=() ;;
  *) echo "usage: serve.sh prefill|decode [SGLang's arguments]" >&2; exit 2 ;;
esac
role=$1; shift
if [[ "${CPU:-}" == 1 ]]; then
  export SGLANG_USE_CPU_ENGINE=1
  options+=(--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none
    --disable-cuda-graph --disable-overlap-schedule --sleep-on-idle --mem-fraction-static 0.3)
  if [[ $role == decode ]]; then # the default copies to pinned memory, which needs CUDA
    options+=(--disaggregation-decode-retraction-backup none)
  fi
fi
exec python -m sglang.launch_server --model-path "${MODEL:-Qwen/Qwen3-0.6B}" \
  --host 127.0.0.1 --port "${PORT:-$default_port}" \
  --disaggregation-mode "$role" --disaggregation-transfer-backend kvferry "${options[@]}" "$@"
