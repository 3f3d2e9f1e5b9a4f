"""The benchmark of conversations, without its clusters."""

from benchmarks import turns
from benchmarks.report import describe_machine
from benchmarks.turns import Conversations, Script, Turn, TurnResults, cluster_config, page


def held(contender, computed, first_token_s, wrong=0):
    all_turns = [
        Turn(0, turn, first_token_s * (turn + 1), turn >= wrong) for turn in range(turns.TURNS)
    ]
    return Conversations(
        contender=contender, turns=tuple(all_turns), prompt_tokens={"computed": float(computed)}
    )


def test_a_prompt_is_all_that_was_said():
    script = Script(questions=(((1, 2), (3,)),), answers=(((7,), (8, 9)),), computed=3)
    assert script.prompt(0, 0) == [1, 2]
    assert script.prompt(0, 1) == [1, 2, 7, 3]


def test_the_page_has_the_ratios_and_every_wrong_answer():
    results = TurnResults(
        command="python -m benchmarks.turns",
        machine=describe_machine(),
        load_after=1.0,
        rounds=1,
        undivided_tokens=100,
        runs=(held("plain", 300, 0.2), held("lending", 105, 0.05, wrong=2)),
    )
    text = page(results)
    assert "| turn 8 | 1600 | 400 | 4.00 |" in text
    assert "- plain: 300 prompt tokens computed, 3.00 times as many" in text
    assert "- lending: 105 prompt tokens computed, 1.05 times as many" in text
    assert "2 of 8 answers wrong." in text


def test_only_engines_that_lend_tell_what_they_have(tmp_path):
    plain, lending = (cluster_config(tmp_path, name) for name in ("plain", "lending"))
    assert {engine.kv_events for engine in plain.engines} == {None}
    events = [engine.kv_events for engine in lending.engines]
    assert all(each is not None and each.replay_endpoint for each in events)
    roles = [engine.kv_transfer_config["kv_role"] for engine in plain.engines]
    assert roles == ["kv_producer"] * 2 + ["kv_consumer"] * 2
    assert {engine.kv_transfer_config["kv_role"] for engine in lending.engines} == {"kv_both"}
