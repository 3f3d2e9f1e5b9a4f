"""The router over fake engines: what clients get, and what engines are asked."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import leave


def text_of(events):
    return "".join(e["choices"][0]["text"] for e in events if e != "[DONE]" and e.get("choices"))


def test_first_token_comes_from_prefill_and_the_rest_from_decode(setup):
    response = setup.complete(max_tokens=5, seed=7, top_k=-1, return_token_ids=True)

    assert response.status_code == 200
    body = response.json()
    assert body["choices"][0]["text"] == "Hello"
    assert body["choices"][0]["token_ids"] == list(b"Hello")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["model"] == "fake"
    assert body["object"] == "text_completion"
    (asked_p,) = setup.prefill[0].bodies
    (asked_d,) = setup.decode[0].bodies
    assert asked_p["prompt"] == list(b"Hi")
    assert (asked_p["max_tokens"], asked_p.get("seed_offset")) == (1, 0)
    assert asked_p["kv_transfer_params"]["do_remote_decode"] is True
    assert asked_d["prompt"] == list(b"HiH")
    assert (asked_d["max_tokens"], asked_d["seed_offset"], asked_d["seed"]) == (4, 1, 7)
    assert asked_d["kv_transfer_params"] == {"ticket": "from p0"}
    (routed,) = setup.decode[0].routed
    assert 0.0 <= routed < 600.0
    assert setup.prefill[0].routed == [None]
    assert setup.prefill[0].ids == setup.decode[0].ids == [body["id"]]
    assert response.headers["x-request-id"] == body["id"]


def test_usage_counts_the_prompt_and_each_token_once(setup):
    usage = setup.complete(max_tokens=4).json()["usage"]

    assert usage == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_transfer_parameters_of_a_client_are_dropped(setup):
    setup.complete(max_tokens=3, kv_transfer_params={"remote_host": "evil", "ticket": "forged"})

    assert "evil" not in str(setup.prefill[0].bodies + setup.decode[0].bodies)
    assert setup.decode[0].bodies[0]["kv_transfer_params"] == {"ticket": "from p0"}


def test_one_token_needs_no_decode_engine_and_no_lease(setup):
    body = setup.complete(max_tokens=1).json()

    assert body["choices"][0] == {
        "index": 0,
        "text": "H",
        "logprobs": None,
        "finish_reason": "length",
    }
    assert "kv_transfer_params" not in setup.prefill[0].bodies[0]
    assert setup.decode[0].bodies == []


def test_end_of_text_as_first_token_needs_no_decode_engine(setup):
    setup.says("", eos=True)

    body = setup.complete().json()

    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 1
    assert setup.decode[0].bodies == []


def test_a_chat_before_the_first_health_check_is_as_long_as_one_after_it(make_setup):
    setup = make_setup(wait=False, slow=True)
    setup.says("Hello you", prompt="user:Hi\nassistant:", eos=True)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(setup.client.post, "/v1/chat/completions", json=body)
        time.sleep(0.1)
        for engine in setup.engines:
            engine.is_slow = False
        answer = first.result(WAIT_S)

    while answer.status_code == 503:  # the health checks took longer than the router waits
        assert not setup.prefill[0].bodies
        answer = setup.client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello you"


def test_stop_token_ends_the_text_without_being_part_of_it(setup):
    setup.says("Yes", eos=True)

    choice = setup.complete(return_token_ids=True).json()["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("Yes", "stop")
    assert choice["token_ids"] == [*b"Yes", 256]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_the_text_and_ends_the_decode_request(setup, stream):
    setup.says("one two three four" + "." * 40)
    setup.decode[0].stall_after = len("one two three four")

    if stream:
        events = setup.stream(stop=["three"], stream_options={"include_usage": True})
        text, reason = text_of(events), events[-3]["choices"][0]["finish_reason"]
        usage = events[-2]["usage"]
    else:
        body = setup.complete(stop="three").json()
        text, reason = body["choices"][0]["text"], body["choices"][0]["finish_reason"]
        usage = body["usage"]

    assert (text, reason) == ("one two ", "stop")
    assert usage["completion_tokens"] == len("one two three")
    assert setup.decode[0].aborted.wait(WAIT_S)


def test_stop_string_in_the_first_token_needs_no_decode_engine(setup):
    body = setup.complete(stop=["H"]).json()

    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert setup.decode[0].bodies == []


def test_text_that_only_looked_like_a_stop_string_is_released(setup):
    setup.says("ab ab abc")

    events = setup.stream(stop=["abcd"], max_tokens=9)

    assert text_of(events) == "ab ab abc"


def test_characters_are_streamed_whole(setup):
    setup.says("né🤷🏽日")
    size = len("né🤷🏽日".encode())

    events = setup.stream(max_tokens=size)

    pieces = [e["choices"][0]["text"] for e in events if e != "[DONE]"]
    assert pieces == ["n", "é", "🤷", "🏽", "日"]


def test_a_character_that_never_completes_becomes_a_replacement_character(setup):
    setup.says(b"a" + "日".encode()[:2])

    assert text_of(setup.stream(max_tokens=3)) == "a\ufffd"
    assert setup.complete(max_tokens=3).json()["choices"][0]["text"] == "a\ufffd"


def test_stream_of_a_chat_has_openais_chunks(setup):
    setup.says("Hey", prompt="user:Hi\nassistant:", eos=True)

    events = setup.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        stream_options={"include_usage": True},
        temperature=0,
    )

    assert events[-1] == "[DONE]"
    assert [e["object"] for e in events[:-1]] == ["chat.completion.chunk"] * 5
    assert len({e["id"] for e in events[:-1]}) == 1
    assert events[0]["id"].startswith("chatcmpl-")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
    assert [e["choices"][0]["delta"] for e in events[1:4]] == [
        {"content": "e"},
        {"content": "y"},
        {},
    ]
    assert events[3]["choices"][0]["finish_reason"] == "stop"
    assert all(e["usage"] is None for e in events[:4])
    assert events[4]["choices"] == []
    assert events[4]["usage"]["prompt_tokens"] == len("user:Hi\nassistant:")
    assert events[4]["usage"]["completion_tokens"] == 4


def test_chat_without_a_limit_may_fill_the_longest_sequence(setup):
    setup.says("Hey", prompt="user:Hi\nassistant:", eos=True)

    setup.client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]}
    )

    prompt = len("user:Hi\nassistant:")
    assert setup.decode[0].bodies[0]["max_tokens"] == 512 - prompt - 1


def test_lists_of_prompts_and_n_give_one_choice_each(setup):
    body = setup.complete(prompt=["Hi", list(b"Hi")], n=2, max_tokens=3, seed=5).json()

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["Hel"] * 4
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 12
    assert sorted(asked["seed"] for asked in setup.decode[0].bodies) == [5, 5, 6, 6]
    assert len(set(setup.prefill[0].ids)) == 4


def test_the_first_token_is_streamed_before_decode_answers(setup):
    setup.decode[0].hang = True

    request = setup.client.stream(
        "POST", "/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 5}
    )
    with request as response:
        lines = response.iter_lines()
        assert '"text":"H"' in next(lines)
    assert setup.decode[0].aborted.wait(WAIT_S)


def test_a_client_that_leaves_aborts_the_prefill(setup):
    setup.prefill[0].hang = True

    leave(setup.client, lambda: setup.prefill[0].bodies, prompt="Hi")

    assert setup.prefill[0].aborted.wait(WAIT_S)


def test_what_no_decode_engine_will_fetch_is_given_back_to_the_lender(setup):
    setup.says("x" * 9)
    setup.decode[0].hang = True
    leave(setup.client, lambda: setup.decode[0].bodies, prompt="Hi")
    lent = {"ticket": "from p0"}
    until(lambda: setup.prefill[0].taken_back == [lent])
    setup.decode[0].hang = False
    setup.decode[0].refuse = (400, "no")
    assert setup.complete().status_code == 400
    until(lambda: setup.prefill[0].taken_back == [lent, lent])


def test_what_was_fetched_is_not_given_back(setup):
    setup.says("one two three" + "." * 40)
    setup.decode[0].stall_after = len("one two three")
    setup.complete(max_tokens=5)
    setup.complete(stop="three")
    assert setup.decode[0].aborted.wait(WAIT_S)
    assert setup.prefill[0].taken_back == []


def test_a_client_that_leaves_a_stream_aborts_the_decode(setup):
    setup.says("x" * 90)
    setup.decode[0].stall_after = 5
    body = {"prompt": "Hi", "stream": True, "max_tokens": 90}

    with setup.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())

    assert setup.decode[0].aborted.wait(WAIT_S)


def test_requests_are_spread_over_engines(make_setup):
    setup = make_setup(prefill=2, decode=3)

    for _ in range(6):
        assert setup.complete(max_tokens=3).status_code == 200

    assert [len(engine.bodies) for engine in setup.engines] == [3, 3, 2, 2, 2]


def test_the_engine_with_the_least_work_is_chosen(make_setup):
    setup = make_setup(prefill=2)
    setup.prefill[0].hang = True

    is_over = threading.Event()
    stuck = threading.Thread(
        target=leave, args=(setup.client, is_over.is_set), kwargs={"prompt": "Hi"}
    )
    stuck.start()
    until(lambda: setup.prefill[0].bodies)
    for _ in range(3):
        assert setup.complete(max_tokens=2).status_code == 200
    is_over.set()
    stuck.join()

    assert [len(engine.bodies) for engine in setup.prefill] == [1, 3]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_down_is_replaced(make_setup, role):
    setup = make_setup(prefill=2, decode=2)
    setup.stop(getattr(setup, role)[0])

    for _ in range(4):
        assert setup.complete(max_tokens=4).json()["choices"][0]["text"] == "Hell"

    states = {e["name"]: e["healthy"] for e in setup.client.get("/health").json()["engines"]}
    assert states[f"{role[0]}0"] is False
    assert sum(states.values()) == 3


def test_what_was_lent_passes_on_when_a_decode_engine_dies_before_its_first_token(make_setup):
    setup = make_setup(decode=2)
    setup.decode[0].break_after = 0

    body = setup.complete(max_tokens=5).json()

    assert body["choices"][0]["text"] == "Hello"
    assert body["usage"]["completion_tokens"] == 5
    assert [asked["prompt"] for asked in setup.prefill[0].bodies] == [list(b"Hi")]
    (first,), (second,) = (engine.bodies for engine in setup.decode)
    assert first["prompt"] == second["prompt"] == list(b"HiH")
    assert first["kv_transfer_params"] == {"ticket": "from p0"}
    assert second["kv_transfer_params"] == {"ticket": "from p0", "passed_on": True}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 5}])
def test_an_answer_goes_on_where_a_decode_engine_died_in_the_middle_of_it(make_setup, sampling):
    """The fakes check that the prompt and the offset of the seed hold every token so far."""
    setup = make_setup(decode=2)
    setup.decode[0].break_after = 2

    events = setup.stream(max_tokens=5, stream_options={"include_usage": True}, **sampling)

    assert text_of(events[:-2]) == "Hello"
    assert events[-2]["usage"]["completion_tokens"] == 5
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}  # told once
    assert [asked["prompt"] for asked in setup.prefill[0].bodies] == [list(b"Hi"), list(b"HiHel")]
    assert setup.decode[1].bodies[0]["prompt"] == list(b"HiHell")


def test_an_answer_under_which_two_decode_engines_died_is_an_error(make_setup):
    setup = make_setup(decode=3)
    for engine in setup.decode:
        engine.break_after = 1

    events = setup.stream(max_tokens=5)

    assert text_of(events[:-2]) == "Hell"
    assert "decode engine 'd1'" in events[-2]["error"]["message"]
    assert events[-1] == "[DONE]"
    assert not setup.decode[2].bodies


@pytest.mark.parametrize("at", ["last token", "its end"])
def test_a_decode_engine_that_dies_once_it_has_said_everything_harms_nothing(make_setup, at):
    setup = make_setup(decode=1)
    setup.decode[0].break_after = 4
    setup.decode[0].says_how_it_ends = at == "its end"

    choice = setup.complete(max_tokens=5).json()["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert len(setup.prefill[0].bodies) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("TransferError", "no KV"),
        ("PeerLostError", "no KV"),
        ("LeaseRevokedError", "no KV"),
        pytest.param(None, "Internal server error", id="vLLM"),
    ],
)
def test_a_prompt_whose_kv_could_not_be_loaded_is_computed_again(make_setup, code, message):
    setup = make_setup(prefill=2)
    (decode,) = setup.decode
    decode.refuse, decode.refuse_code, decode.refusals = (500, message), code, 2

    assert setup.complete(max_tokens=5).json()["choices"][0]["text"] == "Hello"

    assert len(decode.bodies) == 3
    assert len(set(decode.ids)) == 3
    decode.refusals = 3
    response = setup.complete(max_tokens=5)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == f"decode engine 'd0': {message}"


def test_another_error_of_an_engine_with_kv_to_load_is_the_answer_after_two_new_attempts(setup):
    """Each of them begins with the prefill engine's next token."""
    setup.decode[0].refuse = (500, "something of this request")

    response = setup.complete(max_tokens=5)

    assert response.status_code == 500
    error = response.json()["error"]
    assert error["message"] == "decode engine 'd0': something of this request"
    assert error["type"] == "server_error"
    assert len(setup.decode[0].bodies) == 3
    events = setup.stream(max_tokens=5)
    assert text_of(events[:3]) == "Hel"
    assert "something of this request" in events[3]["error"]["message"]
    assert events[4:] == ["[DONE]"]


def test_an_error_of_an_engine_without_kv_to_load_is_the_answer_at_once(make_setup):
    setup = make_setup(prefill=0)
    setup.decode[0].refuse = (500, "something of this request")

    assert setup.complete(max_tokens=5).status_code == 500
    assert len(setup.decode[0].bodies) == 1


def test_an_error_event_of_an_engine_ends_the_answer(setup):
    setup.decode[0].error_after = 1

    response = setup.complete(max_tokens=5)

    assert response.status_code == 500
    assert "the load failed" in response.json()["error"]["message"]


def test_no_engine_left_names_each_and_why(make_setup):
    setup = make_setup(prefill=2, decode_only="never")
    for engine in setup.prefill:
        setup.stop(engine)

    response = setup.complete()

    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "engine_unavailable"
    assert "no prefill engine can serve this" in error["message"]
    assert "'p0'" in error["message"]
    assert "'p1'" in error["message"]
    assert setup.client.get("/health").status_code == 503


def test_an_engine_that_comes_back_serves_again(setup):
    setup.decode[0].healthy = False
    until(lambda: setup.client.get("/health").status_code != 200)
    assert setup.complete().status_code == 503

    setup.decode[0].healthy = True
    until(lambda: setup.client.get("/health").status_code == 200)
    assert setup.complete(max_tokens=3).status_code == 200


def test_an_engine_that_says_why_it_is_stuck_is_quoted_and_avoided_until_it_recovers(make_setup):
    setup = make_setup(prefill=2)

    def first():
        return setup.client.get("/health").json()["engines"][0]

    setup.prefill[0].unwell = "the step has run for 63 s and waits for rank 0"
    until(lambda: not first()["healthy"])
    assert first()["last_error"] == "the step has run for 63 s and waits for rank 0"
    for _ in range(3):
        assert setup.complete(max_tokens=3).status_code == 200
    assert len(setup.prefill[0].bodies) == 0
    assert len(setup.prefill[1].bodies) == 3

    setup.prefill[0].unwell = ""
    until(lambda: first()["healthy"])
    assert first()["last_error"] == ""


def test_time_up_is_a_504(make_setup):
    setup = make_setup(request_timeout_s=0.2)
    setup.decode[0].hang = True

    response = setup.complete()

    assert response.status_code == 504
    assert "0.2 s" in response.json()["error"]["message"]
    while not setup.decode[0].bodies:  # the time was up before it was asked
        assert setup.complete().status_code == 504
    assert setup.decode[0].aborted.wait(WAIT_S)


def test_a_prompt_longer_than_the_model_is_refused_with_both_numbers(setup):
    for prompt, max_tokens in (("x" * 512, 1), ("x" * 600, 16), ("x" * 500, 13)):
        response = setup.complete(prompt=prompt, max_tokens=max_tokens)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512 tokens" in error["message"]
        assert str(len(prompt)) in error["message"]
    assert setup.prefill[0].bodies == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"logprobs": 3}, "logprobs: 3 is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"echo": True}, "echo"),
        ({"n": 0}, "n is 0"),
        ({"n": 100, "prompt": ["a", "b"]}, "200 choices"),
        ({"temperature": 3}, "temperature is 3"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": -7}, "top_k is -7"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ["a", ""]}, "stop[1] is ''"),
        ({"stop": 5}, "stop"),
        ({"prompt": ""}, "prompt is ''"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, 257]}, "token id 257 is outside the vocabulary of 257"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_it(setup, body, message):
    response = setup.complete(**body)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_neutral_values_of_unsupported_fields_are_accepted(setup):
    response = setup.complete(
        max_tokens=2, presence_penalty=0.0, best_of=1, echo=False, logprobs=None, user="me"
    )

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is []"),
        ([{"content": "x"}], "role is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of type 'text'"),
        ([{"role": "tool", "content": "x"}], "the chat template refuses these messages"),
    ],
)
def test_bad_conversations_are_refused(setup, messages, message):
    response = setup.client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_another_model_is_not_found(setup):
    response = setup.complete(model="gpt-9")

    assert response.status_code == 404
    assert "'fake' is" in response.json()["error"]["message"]


def test_what_is_not_json_is_a_400(setup):
    assert setup.client.post("/v1/completions", content=b"\xff{").status_code == 400
    assert setup.client.post("/v1/completions", content=b"[1]").status_code == 400


def test_metrics_count_requests_tokens_and_engines(setup):
    setup.complete(max_tokens=5)
    setup.complete(n=0)

    text = setup.client.get("/metrics").text

    assert 'kvferry_router_requests_total{status="200"} 1.0' in text
    assert 'kvferry_router_requests_total{status="400"} 1.0' in text
    assert "kvferry_router_completion_tokens_total 5.0" in text
    assert 'kvferry_router_engine_up{engine="p0",role="prefill"} 1.0' in text
    assert "kvferry_router_time_to_first_token_seconds_count 1.0" in text


def test_openai_client_streams_a_chat(setup):
    import openai

    setup.says("Hello you", prompt="user:Hi\nassistant:", eos=True)
    base_url = str(setup.client.base_url.join("/v1"))
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "Hello you"

        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hi"}], logprobs=True
            )
