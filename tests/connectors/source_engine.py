"""A prefill engine in a process of its own, to be killed, or stopped and resumed.

Run by its path. It reads one JSON object per line and answers with one, and steps in between;
it ends when its stdin does.
"""

import json
import queue
import sys
import threading
import time
from typing import Any

from kvferry.config import KVTransferConfig
from kvferry.testing.connector_conformance import REMOTE_DECODE, prompt
from kvferry.testing.fake_engine import FakeEngine, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.topology import EngineGeometry, ParallelShape


def computed(engine: FakeEngine, request_id: str, num_tokens: int) -> FakeRequest:
    """Computes a prompt that is to be decoded elsewhere."""
    request = engine.add(request_id, prompt(num_tokens, request_id), REMOTE_DECODE)
    run([engine], lambda: request.stage is Stage.FINISHED, what="the prompt")
    return request


def answer(engine: FakeEngine, command: dict[str, Any]) -> dict[str, Any]:
    """A prompt is computed, or the engine waits until it holds no block for anybody."""
    if "prefill" in command:
        request = computed(engine, command["prefill"], command["num_tokens"])
        return {"params": request.response_params, "tokens": request.output_token_ids}
    run([engine], lambda: engine.is_idle, what="every lease to end")
    engine.check_memory()
    return {"held": engine.num_blocks - 1 - engine.num_free_blocks}


def main() -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    options = json.loads(sys.stdin.readline())
    parallel = ParallelShape(**options["geometry"].pop("parallel"))
    geometry = EngineGeometry(**options["geometry"], parallel=parallel)
    config = KVTransferConfig(**options["config"])
    engine = FakeEngine.open(config, geometry, num_blocks=options["num_blocks"])
    threading.Thread(target=listen, daemon=True).start()
    print("{}", flush=True)
    try:
        while True:
            engine.step()
            time.sleep(0.001)
            if not lines.empty():
                line = lines.get()
                if not line:
                    return
                print(json.dumps(answer(engine, json.loads(line))), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
