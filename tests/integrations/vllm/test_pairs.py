"""Two real vLLM engines: what decode generates from the other's KV is what one engine generates."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.control.tickets import verify
from kvferry.integrations.first_token import FirstToken

LENGTHS = (5, 63, 64, 65, 128, 300, 1100)


def run(prefill, decode, prompts, **sampling):
    """Greedy tokens by way of both engines, as a proxy would drive them."""
    outputs = decode.generate(prompts, prefill.prefill(prompts), **sampling)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (64, 64),
        pytest.param(64, 128, marks=pytest.mark.smoke),
        (128, 64),
        (32, 96),
        (96, 32),
    ],
    ids=str,
)
def test_tokens_are_those_of_a_single_engine(start_pair, reference, random_prompt, source, target):
    prefill, decode = start_pair(p_block_size=source, d_block_size=target)
    prompts = [random_prompt(length) for length in LENGTHS]
    assert run(prefill, decode, prompts) == reference(prompts)
    # All but the last token of each prompt came from outside.
    external = sum(length - 1 for length in LENGTHS)
    assert decode.prompt_tokens_from("external_kv_transfer") == external
    decode.drain()
    prefill.drain()
    assert (prefill.used_blocks, decode.used_blocks) == (0, 0)


def test_float16_caches_of_unequal_blocks_fit_each_other(start_pair, random_prompt):
    prefill, decode = start_pair(dtype="float16", p_block_size=64, d_block_size=128)
    prompts = [random_prompt(length) for length in LENGTHS]
    expected = [list(o.outputs[0].token_ids) for o in prefill.generate(prompts)]
    assert run(prefill, decode, prompts) == expected


def test_only_what_decode_lacks_is_loaded(start_pair, reference, random_prompt):
    prefill, decode = start_pair(p_block_size=32)
    start = random_prompt(192)
    prompts = [start + random_prompt(70), start + random_prompt(90)]
    assert run(prefill, decode, prompts[:1]) == reference(prompts[:1])
    before = decode.prompt_tokens_from("external_kv_transfer")
    assert run(prefill, decode, prompts[1:]) == reference(prompts[1:])
    assert decode.prompt_tokens_from("external_kv_transfer") - before == 192 + 90 - 192 - 1
    assert decode.prompt_tokens_from("local_cache_hit") == 192


def test_the_prompt_of_another_request_gives_other_tokens(
    start_pair, reference, random_prompt, monkeypatch
):
    # Without this, a test of equal tokens could pass whatever is in the blocks.
    from kvferry.connectors.pull import tickets

    monkeypatch.setattr(tickets, "_check_prompt", lambda ticket, request: None)
    prefill, decode = start_pair()
    prompts = [random_prompt(200), random_prompt(200)]
    params = prefill.prefill(prompts)
    outputs = decode.generate(prompts, params[::-1])
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(one != other for one, other in zip(found, reference(prompts), strict=True))


def test_many_requests_at_once_keep_their_blocks_apart(start_pair, reference, random_prompt):
    prefill, decode = start_pair(p_block_size=64, d_block_size=96)
    prompts = [random_prompt(40 + 31 * number) for number in range(24)]
    found = []
    for first in range(0, 24, 8):
        found += run(prefill, decode, prompts[first : first + 8])
    assert found == reference(prompts)


def test_the_first_token_may_come_from_prefill(start_pair, reference, random_prompt):
    # As our own router does: decode is given the prompt and the first token.
    prefill, decode = start_pair()
    prompt = random_prompt(150)
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "keep_first_token": True}
    (output,) = prefill.generate([prompt], [asked], max_tokens=1)
    first = list(output.outputs[0].token_ids)
    (rest,) = decode.generate([prompt + first], [output.kv_transfer_params], max_tokens=11)
    assert [first + list(rest.outputs[0].token_ids)] == reference([prompt])


@pytest.mark.parametrize("stops", [False, True])
def test_the_first_token_goes_with_the_ticket_if_the_router_asks(start_pair, random_prompt, stops):
    # A decode engine that computes no prompt needs the token also if the token ends the answer.
    prefill, _ = start_pair()
    prompt = random_prompt(150)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    (plain,) = prefill.generate([prompt], [dict(asked)], max_tokens=1)
    (first,) = plain.outputs[0].token_ids
    assert verify(plain.kv_transfer_params["ticket"], None).note == b""
    stop = {"stop_token_ids": [first]} if stops else {}
    asked |= {"note_first_token": True}
    (output,) = prefill.generate([prompt], [asked], max_tokens=1, **stop)
    ticket = verify(output.kv_transfer_params["ticket"], None)
    assert FirstToken.of(ticket.note).token_id == first
    assert ticket.num_tokens == len(prompt)


def test_bfloat16_moves_between_equal_blocks(start_pair, random_prompt):
    prefill, decode = start_pair(dtype="bfloat16")
    prompts = [random_prompt(length) for length in LENGTHS]
    # Few tokens: decode computes a prompt's last token by another path, which rounds otherwise.
    expected = [list(o.outputs[0].token_ids) for o in prefill.generate(prompts, max_tokens=3)]
    assert run(prefill, decode, prompts, max_tokens=3) == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)


@pytest.fixture
def every_order_is_unknown(monkeypatch):
    """As bfloat16 is on CPUs with AMX: no layout says where a block's cells lie."""
    from kvferry.integrations.vllm import packing

    monkeypatch.setattr(packing, "_KNOWN", {})


def test_packed_blocks_move_whole_between_equal_engines(
    start_pair, reference, random_prompt, every_order_is_unknown
):
    prefill, decode = start_pair()
    (group,) = decode.connector.connector_scheduler.groups
    assert group.geometry.packing.startswith("CPU_ATTN vec ")
    prompts = [random_prompt(length) for length in LENGTHS]
    assert run(prefill, decode, prompts) == reference(prompts)
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)


def test_packed_blocks_of_unequal_sizes_are_refused(
    start_pair, random_prompt, every_order_is_unknown, caplog
):
    prefill, decode = start_pair(p_block_size=64, d_block_size=128)
    prompt = random_prompt(200)
    with caplog.at_level("ERROR", logger="kvferry"):
        (output,) = decode.generate([prompt], prefill.prefill([prompt]))
    assert output.outputs[0].finish_reason == "error"
    assert "opaque_blocks" in caplog.text
