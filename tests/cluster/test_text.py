"""Text token by token equals text at once, whatever the bytes and the stop strings."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvferry.errors import ModelError
from kvferry.router.answer import TextCodec, TextStream

EOS = 256

#: Well-formed text, broken bytes, and special tokens between them.
ANSWERS = st.lists(
    st.one_of(
        st.text(max_size=4).map(lambda text: list(text.encode(errors="ignore"))),
        st.lists(st.integers(0, 255), max_size=3),
        st.just([EOS]),
    ),
    max_size=8,
).map(lambda parts: [token for part in parts for token in part])


def feed(stream, tokens):
    """Pushes until a stop string is met; the text, and how many tokens were taken."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += stream.push(token)
        if stream.stopped:
            return text, count
    return text + stream.finish(), len(tokens)


@given(ANSWERS)
def test_pieces_add_up_to_the_whole(codec, tokens):
    assert feed(codec.stream(), tokens) == (codec.decode(tokens), len(tokens))


@given(st.text(alphabet="ab é", max_size=12), st.lists(st.text("ab é", min_size=1), max_size=3))
@settings(max_examples=300)
def test_text_ends_before_the_first_stop_string_to_be_completed(codec, text, stop):
    tokens = codec.encode(text)
    # The oracle: the shortest beginning of the text that holds a stop string, cut at the first.
    expected = text
    for end in range(len(text) + 1):
        starts = [text[:end].find(word) for word in stop if word in text[:end]]
        if starts:
            expected = text[: min(starts)]
            break

    assert feed(codec.stream(stop), tokens)[0] == expected


@given(st.text(max_size=20))
def test_nothing_is_shown_that_is_later_taken_back(codec, text):
    tokens = codec.encode(text)
    stream = codec.stream(["zzz"])
    shown = ""
    for token in tokens:
        shown += stream.push(token)
        assert codec.decode(tokens).startswith(shown)


def test_text_is_held_back_only_while_it_may_become_a_stop_string(codec):
    stream = codec.stream(["abc"])

    assert [stream.push(token) for token in b"xaab"] == ["x", "", "a", ""]
    assert stream.push(ord("d")) == "abd"
    assert not stream.stopped


def test_text_after_a_prompt_goes_on_from_it_as_a_vllm_servers_does(codec):
    """The space before a word is the word's own, but for the first word of a text."""
    words = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1}, unk_token="\u2581one"))
    words.decoder = decoders.Metaspace()

    assert TextStream(words).push(1) == "two"
    assert TextStream(words, prompt=[0]).push(1) == " two"
    begun = "日".encode()[:2]  # a character that never becomes whole
    assert feed(codec.stream(prompt=list(b"Hi")), [*b"a", *begun]) == ("a", 3)


def by_bytes():
    """Tokens of single bytes and of characters, as models of the Llama 2 kind have."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "b": 257}
    words = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return words


@pytest.mark.parametrize("prompt", [None, [256], [*"你".encode(), *"好".encode()[:2], 257]])
def test_bytes_that_change_the_text_before_them_are_left_out(prompt):
    """As a vLLM server does: the decoder of all bytes would take back a character that was told."""
    tokens = [*"你".encode(), *"好".encode()[:2], 257, 256]
    assert feed(TextStream(by_bytes(), prompt=prompt), tokens) == ("你ba", len(tokens))


@given(st.lists(st.integers(0, 257), max_size=12), st.lists(st.integers(0, 257), max_size=12))
def test_no_tokens_end_an_answer(prompt, tokens):
    told, count = feed(TextStream(by_bytes(), prompt=prompt), tokens)
    assert count == len(tokens)
    assert told == "".join(told_by_vllm(by_bytes(), prompt, tokens))


def told_by_vllm(tokenizer, prompt, tokens):
    """The pieces of vLLM 0.32's detokenizer, which begins anew at this error."""
    stream = decoders.DecodeStream(prompt, skip_special_tokens=True)
    for token in tokens:
        try:
            piece = stream.step(tokenizer, token)
        except Exception:  # "Invalid prefix encountered"
            stream = decoders.DecodeStream(skip_special_tokens=True)
            piece = stream.step(tokenizer, token)
        yield piece or ""


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        TextCodec.open(tmp_path)


def test_a_model_without_a_chat_template_says_so(tmp_path, byte_model):
    (tmp_path / "tokenizer.json").write_bytes((byte_model / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )

    with pytest.raises(ValueError, match="no chat template; use /v1/completions"):
        TextCodec.open(tmp_path).encode_chat([{"role": "user", "content": "x"}])
