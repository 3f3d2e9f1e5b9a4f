#!/usr/bin/env bash
# A chat with the pair.
set -euo pipefail
curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d '{
  "model": "default", "max_tokens": 64, "temperature": 0,
  "messages": [{"role": "user", "content": "What carries people over a river?"}]
}'
