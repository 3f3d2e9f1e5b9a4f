#!/usr/bin/env bash
# SGLang's mini load balancer before the two servers, on port 8000. Further arguments go to it.
set -euo pipefail
exec python -m sglang_router.launch_router --pd-disaggregation --mini-lb --host 127.0.0.1 --port 8000 \
  --prefill http://127.0.0.1:8100 "${BOOTSTRAP_PORT:-8998}" --decode http://127.0.0.1:8200 "$@"
