"""CPU time that kvferry takes of a serving engine's own thread, in vLLM and in SGLang.

``python -m tests.integrations.adapter_step`` measures both in one run, each in its own environment
and over its engine's real classes. The engines of the tests are used: vLLM's engine with a tiny
model, and SGLang's pools, managers, senders and receivers, which are called as its loop calls them.
All caches have 3 layers of 4 KV heads with 32 elements, in blocks of 64 tokens.

What is counted is the time of the thread that runs the engine. Threads that copy or that serve the
control channel are not counted.
"""

import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from benchmarks.remote import ROOT, Remote
from benchmarks.report import table

LENGTH = 512
"""Tokens of a prompt."""
CHUNK = 256
"""Tokens that a prefill engine computes in one step."""
BLOCK = 64
ANSWER = 8
"""Tokens of an answer of vLLM's decode engine."""
TURNS = 8
"""Turns of SGLang's loop in which a chunk is computed."""
TURN_S = 0.002
"""Pause between two of these turns, in place of a model's step."""
NUMBERS = (1, 8)
"""Numbers of requests at a time."""
SIDES = ("prefill", "decode")

OWN = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
    "request_finished_all_groups",
)
"""Methods of a connector that vLLM calls for one request."""
CALLS = (
    *OWN,
    "build_connector_meta",
    "update_connector_output",
    "has_pending_push_work",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)
"""Methods of a connector that vLLM calls for requests and in steps."""

Figures = dict[str, tuple[float, float]]
"""Side → µs of a quiet step, and µs of one request beyond quiet steps."""


class Spent:
    """CPU seconds of the calls of one side of a pair."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets everything."""
        self.total = 0.0
        self.steps: list[float] = []
        """Seconds of the calls in each step so far; the last step may go on."""
        self._depth = 0

    def step(self) -> None:
        """Begins a step."""
        self.steps.append(0.0)

    def timed(self, function: Callable[..., Any], *, is_step: bool) -> Callable[..., Any]:
        """``function``, whose time is added up; calls within a timed call count once."""

        def call(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                took = time.thread_time() - began
                self._depth -= 1
                if self._depth == 0:
                    self.total += took
                    if is_step and self.steps:
                        self.steps[-1] += took

        return call

    def figures(self, number: int) -> tuple[float, float]:
        """µs of a quiet step, and what all calls took beyond quiet steps for one of ``number``
        requests. Engines that wait for a load make more steps or fewer.
        """
        quiet = statistics.median(self.steps)
        return 1e6 * quiet, 1e6 * (self.total - quiet * len(self.steps)) / number


class VllmSide:
    """A prefill engine and a decode engine of vLLM."""

    def __init__(self, folder: str) -> None:
        from vllm.platforms import current_platform

        from tests.integrations.vllm.conftest import Engine, write_tiny_llama

        model = write_tiny_llama(Path(folder))
        Engine(model, None)
        # See the fixture of the first engine.
        current_platform.__class__.register_triton_kernel_overrides = classmethod(lambda cls: None)
        shape = {
            "block_size": BLOCK,
            "max_num_batched_tokens": CHUNK,
            "kv_cache_memory_bytes": 64 << 20,
        }
        roles = ("kv_producer", "kv_consumer")
        self.engines = [Engine(model, role, **shape) for role in roles]
        self.spent = [Spent(), Spent()]
        for engine, spent in zip(self.engines, self.spent, strict=True):
            for connector, name in itertools.product((engine.connector, engine.worker), CALLS):
                if hasattr(connector, name):
                    timed = spent.timed(getattr(connector, name), is_step=name not in OWN)
                    setattr(connector, name, timed)
            engine.step = _counted(engine.step, spent)  # type: ignore[method-assign]
        self._seeds = itertools.count(1)

    def round(self, number: int) -> Figures:
        """Has prompts computed and loaded, and some tokens of each answer."""
        for spent in self.spent:
            spent.begin()
        prompts = [
            [(next(self._seeds) + i) % 1000 + 8 for i in range(LENGTH)] for _ in range(number)
        ]
        prefill, decode = self.engines
        with _quiet():
            params = prefill.prefill(prompts)
            decode.generate(prompts, params, max_tokens=ANSWER)
            prefill.drain()
        return {side: each.figures(number) for side, each in zip(SIDES, self.spent, strict=True)}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def _counted(step: Callable[[], Any], spent: Spent) -> Callable[[], Any]:
    def call() -> Any:
        spent.step()
        return step()

    return call


class SglangSide:
    """A prefill engine and a decode engine of SGLang, each of some ranks."""

    def __init__(self, folder: str, ranks: int) -> None:
        from sglang.srt.plugins import load_plugins

        from benchmarks.vllm_servers.ports import free_port
        from tests.integrations.sglang.conftest import HOST, Group, Rank, listens, until

        load_plugins()
        from kvferry.integrations.sglang.bootstrap import BootstrapServer

        port = free_port()
        self._server = BootstrapServer(HOST, port)
        until(lambda: listens(port), "the bootstrap server")
        pages = max(NUMBERS) * LENGTH // BLOCK + 1
        shape: dict[str, Any] = {"page_size": BLOCK, "pages": pages, "size": 32, "tp": ranks}
        self.sides = []
        for side in SIDES:
            group = Group()
            each = [
                Rank(side, Path(folder), port, rank=rank, groups=(group, group), **shape)
                for rank in range(ranks)
            ]
            self.sides.append(each)
        self._numbers = itertools.count(1)

    def round(self, number: int) -> Figures:
        """Lends and loads prompts, in chunks."""
        spent = [Spent(), Spent()]
        with _quiet():
            rooms = [
                _Room(self.sides, spent, index, next(self._numbers)) for index in range(number)
            ]
            while not self._turn(rooms, spent):
                pass
            for room in rooms:
                room.clear()
        return {side: each.figures(number) for side, each in zip(SIDES, spent, strict=True)}

    def _turn(self, rooms: Sequence["_Room"], spent: Sequence[Spent]) -> bool:
        """Polls all rooms, as often as engines do while a chunk is computed, and sends a chunk of
        each; whether all rooms have ended.
        """
        for _ in range(TURNS):
            for each in spent:
                each.step()
            polls = [room.poll() for room in rooms]
            time.sleep(TURN_S)
        for room in rooms:
            room.compute()
        return all(polls)

    def close(self) -> None:
        for rank in itertools.chain(*self.sides):
            rank.close()
        self._server.close()


class _Room:
    """A prompt between two engines of SGLang. Only the calls of each engine's first rank are
    timed: every rank has a process of its own.
    """

    def __init__(
        self, sides: Sequence[Sequence[Any]], spent: Sequence[Spent], index: int, number: int
    ) -> None:
        from tests.integrations.sglang.conftest import request, until

        self.sides, self.spent, self.number = sides, spent, number
        count = LENGTH // BLOCK
        self.pages = list(range(1 + index * count, 1 + (index + 1) * count))
        tokens = [(number + i) % 1000 + 8 for i in range(LENGTH)]
        self.rooms = [
            [
                self._own(side, rank, each.room)(number, request(f"{side}{number}", tokens))
                for rank, each in enumerate(ranks)
            ]
            for side, ranks in enumerate(sides)
        ]
        self.sent = 0
        for rank, receiver in enumerate(self.rooms[1]):
            known = sides[1][rank].manager.try_ensure_parallel_info
            until(lambda known=known, at=receiver.bootstrap_addr: known(at), "the bootstrap server")
            self._own(1, rank, receiver.init)(0)
            self._own(1, rank, receiver.send_metadata)(self.pages, index, [], 0)

    def _own(self, side: int, rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.spent[side].timed(function, is_step=False) if rank == 0 else function

    def _poll(self, side: int) -> Any:
        """What SGLang makes of the answers of all ranks: the least."""
        first, *others = self.rooms[side]
        return min(
            self.spent[side].timed(first.poll, is_step=True)(), *[each.poll() for each in others], 9
        )

    def poll(self) -> bool:
        """Polls both sides; whether both have ended."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.polls = self._poll(0), self._poll(1)
        assert KVPoll.Failed not in self.polls
        return all(poll == KVPoll.Success for poll in self.polls)

    def compute(self) -> None:
        """Has the prefill engine compute a chunk, if the decode engine has asked for the prompt."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self.polls[0] == KVPoll.WaitingForInput and self.sent < LENGTH:
            self._send()

    def _send(self) -> None:
        """Sends a chunk from every rank."""
        first, self.sent = self.sent, self.sent + CHUNK
        pages = self.pages[first // BLOCK : self.sent // BLOCK]
        for rank, (each, sender) in enumerate(zip(self.sides[0], self.rooms[0], strict=True)):
            if first == 0:
                self._own(0, rank, sender.init)(len(self.pages), 5)
            each.rows.bootstrap_room[5, 0] = self.number
            with each.active():
                is_last = self.sent == LENGTH
                self._own(0, rank, sender.send)(pages, [] if is_last else None, CHUNK)

    def clear(self) -> None:
        for side, rooms in enumerate(self.rooms):
            for rank, room in enumerate(rooms):
                self._own(side, rank, room.clear)()


class _quiet:  # noqa: N801 - a context
    """No collection of garbage while the block runs."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()


def measure(rounds: int) -> Mapping[tuple[str, int], list[Figures]]:
    """Name of a pair and number of requests → its rounds, which take turns."""
    sglang = ROOT / os.environ.get("KVFERRY_TEST_SGLANG", ".venv-sglang") / "bin" / "python"
    vllm = ROOT / os.environ.get("KVFERRY_TEST_VLLM", ".venv-vllm") / "bin" / "python"
    # vLLM's engines of the tests have this transport too.
    env = {"OMP_NUM_THREADS": "1", "KVFERRY_SGLANG_CONFIG": '{"transport": "tcp"}'}
    found: dict[tuple[str, int], list[Figures]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Remote("vLLM", VllmSide, folder, python=vllm, env=env) as first,
        Remote("SGLang", SglangSide, folder, 1, python=sglang, env=env) as second,
        Remote("SGLang, TP 2", SglangSide, folder, 2, python=sglang, env=env) as third,
    ):
        for number in range(-1, rounds):  # the first round compiles and connects
            for pair, count in itertools.product((first, second, third), NUMBERS):
                figures = pair.call("round", count)
                if number >= 0:
                    found.setdefault((pair.name, count), []).append(figures)
    return found


def rows(found: Mapping[tuple[str, int], Sequence[Figures]]) -> Iterator[tuple[str, ...]]:
    """The table, its header first: medians in µs, and beside SGLang the ratio to vLLM."""
    yield ("engine", "requests", "side", "a quiet step", "to vLLM's", "a request", "to vLLM's")
    for (name, count), rounds in found.items():
        for side in SIDES:
            cells = []
            for kind in (0, 1):
                ours = [each[side][kind] for each in rounds]
                theirs = [each[side][kind] for each in found["vLLM", count]]
                ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                cells += [f"{statistics.median(ours):.0f} µs", f"{ratio:.2f}"]
            yield (name, str(count), side, *cells)


def main(rounds: int = 10) -> None:
    """Prints the table."""
    before = os.getloadavg()[0]
    typer.echo("\n".join(table(rows(measure(rounds)), left=3)))
    typer.echo(f"{rounds} rounds; load average {before:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    typer.run(main)
