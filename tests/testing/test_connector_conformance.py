"""The conformance suite catches connectors that break the contract.

Each fault is put into the example connector, which passes the suite as it is.
"""

from typing import Any

import pytest

from kvferry.connectors import KVConnectorOutput
from kvferry.testing.connector_conformance import GEOMETRIES, ConnectorConformance, open_pair
from kvferry.testing.fake_rank import ContractBrokenError, FakeRequest

SUITE = ConnectorConformance()


@pytest.fixture
def run_test(configs):
    """Runs one test of the suite on the example connector."""

    def run(name: str, timeout_s: float = 60.0) -> None:
        with open_pair(configs, GEOMETRIES["tp2-pp2"], timeout_s=timeout_s) as pair:
            getattr(SUITE, name)(pair)

    return run


def test_the_example_passes_as_it_is(run_test):
    run_test("test_a_prompt_arrives_cell_by_cell")


@pytest.mark.parametrize(
    "name",
    [
        "test_a_prompt_arrives_cell_by_cell",
        "test_many_requests_at_once_keep_their_own_blocks",
        "test_a_local_hit_is_left_alone",
        "test_an_id_may_be_used_again",
        "test_abort_before_the_ranks_hear_of_the_load",
        "test_abort_after_its_load",
    ],
)
def test_the_example_passes_if_it_loads_within_the_step(run_test, in_step, name):
    run_test(name)


@pytest.mark.parametrize("loads", ["beside_the_steps", "in_step"])
def test_cells_of_another_token_are_caught(run_test, example, monkeypatch, request, loads):
    if loads == "in_step":
        request.getfixturevalue(loads)
    copy = example.FolderWorker._copy

    def shifted(self, job):
        ids = job.block_ids if job.saves else job.block_ids[::-1]
        return copy(self, example.msgspec.structs.replace(job, block_ids=ids))

    monkeypatch.setattr(example.FolderWorker, "_copy", shifted)
    with pytest.raises(ContractBrokenError, match="the load is not what the source held"):
        run_test("test_a_prompt_arrives_cell_by_cell")


def test_cells_that_come_after_the_computation_of_their_step_are_caught(
    run_test, example, in_step, monkeypatch
):
    start, results = example.FolderWorker.start_load_kv, example.FolderWorker.get_transfer_results
    told: dict[Any, Any] = {}

    def late(self, finished_req_ids):
        start(self, told.pop(self))
        return results(self, finished_req_ids)

    monkeypatch.setattr(
        example.FolderWorker, "start_load_kv", lambda self, metadata: told.update({self: metadata})
    )
    monkeypatch.setattr(example.FolderWorker, "get_transfer_results", late)
    with pytest.raises(ContractBrokenError, match="the load is not what the source held"):
        run_test("test_a_prompt_arrives_cell_by_cell")


def test_a_load_over_the_local_hit_is_caught(run_test, example, monkeypatch):
    copy = example.FolderWorker._copy

    def from_the_start(self, job):
        return copy(self, example.msgspec.structs.replace(job, first=0))

    monkeypatch.setattr(example.FolderWorker, "_copy", from_the_start)
    with pytest.raises(ContractBrokenError, match="the load changed the local hit"):
        run_test("test_a_local_hit_is_left_alone")


def test_blocks_given_back_while_they_are_written_are_caught(run_test, example, monkeypatch):
    finished = example.FolderScheduler.request_finished
    copy = example.FolderWorker._copy

    def lets_go(self, request, block_ids):
        keep, params = finished(self, request, block_ids)
        return keep and request.finished_cleanly, params

    def late(self, job):
        if not job.saves:
            example.time.sleep(0.05)
        return copy(self, job)

    monkeypatch.setattr(example.FolderScheduler, "request_finished", lets_go)
    monkeypatch.setattr(example.FolderWorker, "_copy", late)
    with pytest.raises(ContractBrokenError, match="were written to, held by nobody"):
        run_test("test_abort_while_it_loads")


def test_kv_that_is_found_by_tokens_alone_is_caught(run_test, example, monkeypatch):
    monkeypatch.setattr(FakeRequest, "content_keys", lambda self, num_tokens: {})
    with pytest.raises(AssertionError, match="another"):
        run_test("test_kv_of_another_adapter_is_not_loaded")


def test_a_report_made_twice_is_caught(run_test, example, monkeypatch):
    results = example.FolderWorker.get_transfer_results
    before: dict[Any, Any] = {}

    def repeats(self, finished_req_ids):
        report = results(self, finished_req_ids)
        report.finished_sending |= before.get(self, set())
        before[self] = set(report.finished_sending)
        return report

    monkeypatch.setattr(example.FolderWorker, "get_transfer_results", repeats)
    with pytest.raises(ContractBrokenError, match="is reported twice"):
        run_test("test_a_prompt_arrives_cell_by_cell")


def test_a_report_of_an_unknown_request_is_caught(run_test, example, monkeypatch):
    def invents(self, finished_req_ids):
        return KVConnectorOutput(finished_recving={"r1"})

    monkeypatch.setattr(example.FolderWorker, "get_transfer_results", invents)
    with pytest.raises(ContractBrokenError, match="finished_recving names unknown 'r1'"):
        run_test("test_a_prompt_arrives_cell_by_cell")


def test_a_load_that_is_never_reported_is_caught(run_test, example, monkeypatch):
    monkeypatch.setattr(
        example.FolderWorker, "get_transfer_results", lambda self, ids: KVConnectorOutput()
    )
    with pytest.raises(ContractBrokenError, match=r"waited 5 s for both to be idle.*\['r'\]"):
        run_test("test_what_nobody_fetches_comes_back", timeout_s=5)


def test_an_answer_that_changes_is_caught(run_test, example, monkeypatch):
    ask = example.FolderScheduler.get_num_new_matched_tokens
    answers = []

    def wavers(self, request, num_computed_tokens):
        tokens, load_async = ask(self, request, num_computed_tokens)
        answers.append(tokens)
        return (tokens and tokens - len(answers) % 2), load_async

    monkeypatch.setattr(example.FolderScheduler, "get_num_new_matched_tokens", wavers)
    with pytest.raises(ContractBrokenError, match="asked twice"):
        run_test("test_a_prompt_arrives_cell_by_cell")


def test_a_failure_that_is_not_also_an_end_is_caught(run_test, example, monkeypatch):
    monkeypatch.setattr(
        example.FolderWorker,
        "get_transfer_results",
        lambda self, ids: KVConnectorOutput(failed_recving={"r"}),
    )
    with pytest.raises(ContractBrokenError, match="is not in finished_recving"):
        run_test("test_a_prompt_arrives_cell_by_cell")
