"""The helpers for connector authors."""

import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors import PullConnector, get_kv_connector_cache_layout, yield_req_data
from kvferry.engine.messages import ScheduledRequest, SchedulerOutput


def part(request_id: str, tables, new, resumed: bool = False) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        token_ids=[1],
        first_position=0,
        block_ids=tables,
        num_new_blocks=new,
        resumed=resumed,
    )


def test_yield_req_data_gives_the_new_blocks_of_each_request():
    step = SchedulerOutput(
        requests=[
            part("first", ([1, 2], [7]), (2, 1)),
            part("grown", ([3, 4, 5], [8]), (1, 0)),
            part("resumed", ([6], [9]), (1, 1), resumed=True),
        ]
    )
    assert list(yield_req_data(step)) == [
        ("first", ([1, 2], [7]), False),
        ("grown", ([5], []), False),
        ("resumed", ([6], [9]), True),
    ]


def test_yield_req_data_refuses_a_step_that_does_not_say_what_is_new():
    with pytest.raises(ValueError, match="shorter"):
        list(yield_req_data(SchedulerOutput(requests=[part("a", ([1],), ())])))


def test_an_engine_keeps_the_layout_that_its_connector_requires(monkeypatch):
    config = KVTransferConfig(kv_connector="PullConnector", kv_role="kv_both")
    assert get_kv_connector_cache_layout() == "NHD"
    assert get_kv_connector_cache_layout(config) == "NHD"
    monkeypatch.setattr(PullConnector, "required_cache_layout", "HND")
    assert get_kv_connector_cache_layout(config) == "HND"
