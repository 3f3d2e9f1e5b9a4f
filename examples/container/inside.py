"""The program of test_container.py inside a container: a plan, a cluster, and requests until KV
loads.

    python3 inside.py CLUSTER.toml COMMAND...

COMMAND serves the cluster. The program writes one line of JSON at the end.
"""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROUTER, DECODE = "http://127.0.0.1:8000", "http://127.0.0.1:8200"
WAIT_S = 240


def fetch(url: str, body: object = None) -> str:
    """Text of a server's answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read(), "utf-8")


def loaded() -> float:
    """Number of prompt tokens that came from the prefill engine."""
    (tokens,) = re.findall(
        r'^kvferry_engine_prompt_tokens_total{source="peer"} (\S+)$',
        fetch(f"{DECODE}/metrics"),
        re.MULTILINE,
    )
    return float(tokens)


def ask(serving: "subprocess.Popen[bytes]") -> list[dict[str, object]]:
    """Answers to prompts of 200 bytes, sent one after the other until the KV of a prompt was
    loaded.
    """
    answers = []
    for number in range(WAIT_S):
        if serving.poll() is not None:
            break
        try:
            body = {"prompt": f"{number:03d} " * 50, "max_tokens": 4}
            answers.append(json.loads(fetch(f"{ROUTER}/v1/completions", body)))
            if loaded():
                break
        except (OSError, ValueError):
            pass  # the cluster does not serve yet
        time.sleep(1)
    return answers


def main() -> None:
    """Runs the plan, the cluster and the requests."""
    cluster, *command = sys.argv[1:]
    plan = subprocess.run(["kvferry", "plan", cluster], capture_output=True, text=True, check=False)
    begun = time.monotonic()
    serving = subprocess.Popen(command)
    answers = ask(serving)
    took = time.monotonic() - begun
    result = {
        "plan": plan.stdout,
        "plan_said": plan.stderr,
        "answers": answers,
        "loaded": loaded() if answers else 0.0,
        "seconds": took,
        "shm": {path.name: path.stat().st_size for path in Path("/dev/shm").glob("kvferry.*")},
        "logs": [log.read_text() for log in Path("/dev/shm").glob("kvferry-*/*.log")],
    }
    serving.send_signal(signal.SIGINT)
    result["exit"] = serving.wait(60)
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
