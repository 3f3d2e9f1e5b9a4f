#!/usr/bin/env bash
# The router in front of the two servers, on port 8000. Further arguments go to `kvferry router`.
set -euo pipefail
exec kvferry router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 "$@"
