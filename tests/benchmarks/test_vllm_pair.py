"""The benchmark beside NIXL in vLLM judges round by round, and says what was wrong or refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import vllm_shapes
from benchmarks.report import Run, describe_machine
from benchmarks.vllm_pair.cases import ON_A_GPU, ON_CPUS, REQUESTS, Case, fat_model
from benchmarks.vllm_pair.report import PairResults, draw, page
from benchmarks.vllm_pair.rounds import AT_ONCE, Contender, Row, Sample
from benchmarks.vllm_servers.client import Choice, Completion
from benchmarks.vllm_servers.connectors import KVFerry, Nixl
from benchmarks.vllm_servers.models import Model
from benchmarks.vllm_servers.pair import Shape, pair_options
from benchmarks.vllm_shapes import ShapeResults, Verdict
from kvferry.observe.timeline import Stretch

CASE = Case(1000, 8)


def contender(name: str, *seconds: float, wrong: int = 0) -> Contender:
    samples = tuple(Sample(transfer=each, handover=each, cpu=each) for each in seconds)
    return Contender(name=name, samples=samples, wrong=wrong)


def compare(group: str, case: Case, ours: Contender, theirs: Contender) -> Row:
    return Row(group=group, case=case, ours=ours, theirs=theirs)


def results_of(rows=()) -> PairResults:
    return PairResults(
        command="python -m benchmarks.vllm_pair",
        machine=describe_machine(),
        rounds=3,
        load_after=1.0,
        rows=tuple(rows),
    )


def test_a_ratio_is_of_one_round_and_its_middle_counts():
    ours, theirs = contender("kvferry", 1.0, 2.0, 4.0), contender("nixl", 2.0, 2.0, 2.0)
    assert "| 2000.0 / 2000.0: 1.00 (0.50–2.00) ≥ 1 |" in page(
        results_of([compare("one host", CASE, ours, theirs)])
    )


def test_over_tcp_more_is_asked_and_what_misses_its_goal_is_bold():
    row = compare("TCP", CASE, contender("kvferry tcp", 1.0), contender("nixl tcp", 1.4))
    assert page(results_of([row])).count("**1.40 (1.40–1.40) ≥ 1.5**") == 3


def test_wrong_and_refused_answers_are_shown():
    row = compare("one host", CASE, contender("kvferry", 1.0, wrong=1), contender("nixl", 2.0))
    assert "| 1 / 0 |" in page(results_of([row]))
    verdicts = (
        Verdict(shape="block 64 to 128", contender="kvferry", right=5, refused=1, why="HTTP 500"),
        Verdict(shape="block 64 to 128", contender="nixl", wrong=6),
    )
    found = ShapeResults(
        command="python -m benchmarks.vllm_shapes",
        machine=describe_machine(),
        trial="vllm_shapes",
        verdicts={"tiny": verdicts},
    )
    text = vllm_shapes.page(found)
    assert "| block 64 to 128 | 5 right, 1 refused (HTTP 500) | 6 wrong |" in text


def test_the_results_are_written_and_read_back(tmp_path):
    rows = [
        compare(group, CASE, contender(ours.name, 1.0, 2.0), contender(theirs.name, 3.0, 4.0))
        for group, (ours, theirs) in ON_CPUS.groups.items()
    ]
    results = results_of(rows)
    run = Run("benchmarks.vllm_pair", tmp_path)
    run.publish("vllm", results, page, draw)
    assert {path.name for path in tmp_path.iterdir()} == {"VLLM.md", "vllm.json", "vllm.png"}
    assert msgspec.json.decode((tmp_path / "vllm.json").read_bytes(), type=PairResults) == results


def test_on_a_gpu_caches_stay_there_and_all_servers_are_started_alike(tmp_path):
    for ours, theirs in ON_A_GPU.groups.values():
        commands = []
        for connector in (ours, theirs):
            for options in pair_options(
                fat_model(), ON_A_GPU.shape, ON_A_GPU.shape, connector, max_model_len=16_384
            ):
                transfer = options.transfer or {}
                assert transfer.get("kv_buffer_device") != "cpu"  # ours takes what vLLM has
                command = options.command(8000)
                commands.append(command[: command.index("--kv-transfer-config")])
                assert "TRITON_ATTN" in options.command(8000)
        assert len({*map(tuple, commands)}) == 1
    longest = max(case.tokens * case.concurrency for case in ON_A_GPU.cases)
    assert 2 * longest * 16 << 10 <= ON_A_GPU.cache_gib << 30
    prompts = REQUESTS * sum(case.tokens for case in ON_A_GPU.cases)
    assert prompts * 16 << 10 <= ON_A_GPU.prefill_cache_gib << 30


def handed_over(answer: float, read: float, step: float) -> Sample:
    parts = {"answer and router": answer, "read": read, "first token": step}
    stretches = tuple(Stretch(name, "whose", seconds) for name, seconds in parts.items())
    return Sample(transfer=read, handover=1.0, cpu=1.0, stretches=stretches)


def test_the_hand_over_is_shown_stretch_by_stretch():
    rounds = [(0.009, 0.5, 0.6), (0.012, 0.7, 0.8), (0.030, 0.9, 0.1)]
    ours = Contender(name="kvferry", samples=tuple(handed_over(*each) for each in rounds), wrong=0)
    theirs = contender("nixl", 2.0, 2.0, 2.0)

    alone = results_of([compare("one host", Case(256, 1), ours, theirs)])
    busy = results_of([compare("one host", Case(256, 1, beside=4), ours, theirs)])

    text = page(alone)
    for line in (
        "| answer and router | whose | 12.0 |",
        "| read | whose | 700.0 |",
        "| first token | whose | 600.0 |",
        "| the rest |  | 12.0 |",
    ):
        assert line in text, text
    assert "| one host, 256 tokens, 1 at a time, beside 4 answers |" in page(busy)


def test_requests_in_turn_and_at_once_have_rows_of_their_own():
    theirs = contender("nixl", 2.0)
    rows = [
        compare("one host", Case(256, 1), contender(name, 1.0), theirs)
        for name in ("kvferry", f"kvferry{AT_ONCE}")
    ]
    assert [row.name for row in rows] == [
        "one host, 256 tokens, 1 at a time",
        "one host, 256 tokens, 1 at a time, at once",
    ]
    assert all(f"| {row.name} |" in page(results_of(rows)) for row in rows)


@pytest.mark.parametrize("connector", [KVFerry(), Nixl(), Nixl("nixl tcp", "tcp")])
def test_both_servers_of_a_pair_differ_in_their_roles_and_ports_alone(connector):
    model = Model("model", Path("folder"), 1024)
    prefill, decode = pair_options(model, Shape(64), Shape(64), connector)
    roles = [json.loads(json.dumps(each.transfer))["kv_role"] for each in (prefill, decode)]
    assert roles == ["kv_producer", "kv_consumer"]
    blank: dict[str, Any] = {"name": "", "transfer": None, "environment": {}}
    assert dataclasses.replace(prefill, **blank) == dataclasses.replace(decode, **blank)


def test_a_server_of_several_ranks_shares_the_cores_politely():
    model = Model("model", Path("folder"), 1024)
    one, two = pair_options(model, Shape(), Shape(tp=2), KVFerry())
    assert "vllm_servers/site" not in one.variables(Path())["PYTHONPATH"]
    assert "vllm_servers/site" in two.variables(Path())["PYTHONPATH"]
    assert two.variables(Path())["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_answers_are_right_tied_wrong_or_refused(monkeypatch):
    """A single server would answer 5, 6, 7; after 5 it finds 8 a little less likely than 6."""
    monkeypatch.setattr(
        vllm_shapes, "complete", lambda *_: Completion([Choice([5, 6, 7], "length")])
    )
    asked = []

    def less_likely(_url, prompt, token):
        asked.append((prompt, token))
        return 0.1 if token == 8 else 3.0

    monkeypatch.setattr(vllm_shapes, "less_likely", less_likely)
    answers: list[list[int] | str] = [[5, 6, 7], [5, 8, 1], [5, 9, 7], [5, 6], "HTTP 500"]
    judge = vllm_shapes.Judge("", [[1, 2]] * len(answers), 0.5)
    verdict = judge.verdict("equal", "ours", answers)
    assert str(verdict) == "1 right, 1 tied, 2 wrong, 1 refused (HTTP 500)"
    assert asked == [([1, 2, 5], 8), ([1, 2, 5], 9)]
    strict = vllm_shapes.Judge("", [[1, 2]] * len(answers), 0.0).verdict("equal", "ours", answers)
    assert (strict.tied, strict.wrong) == (0, 3)
