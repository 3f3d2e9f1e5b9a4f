#!/usr/bin/env bash
# One streamed request through the router, then where the decode server's prompt tokens came from.
set -euo pipefail
curl -sN http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d '{
  "messages": [{"role": "user", "content": "Why is the sky blue?"}],
  "max_tokens": 64, "stream": true}'
curl -s http://127.0.0.1:8200/metrics | grep prompt_tokens_by_source_total
